"""Pretrain a masked language model: ModernBERT, RoBERTa, or BERT with next-sentence prediction.

    python train_mlm.py                                                        # this machine, one process
    accelerate launch --config_file accelerate_configs/cpu.yaml train_mlm.py   # the same through the launcher
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml train_mlm.py --preset wikitext-roberta
    accelerate launch --config_file accelerate_configs/tpu.yaml train_mlm.py   # one TPU host

Run the same command again and it continues where it stopped. `--help` lists the settings, the fields of
TrainArgs below: edit them there, or give them as flags. Edit main, too: docs/editing.md shows how, and
`python -m utils.check train_mlm.py` tells what still holds. Every process runs every line of main, and many
lines wait for the others: Log, Hub and save_model write on the first process by themselves.

Shapes: B rows per micro-batch, T tokens per row (block_size), K predictions. A step is an optimizer step.
"""

import math
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # before an installed package `utils`

from utils.entry import entry_point  # isort: skip  # first: it handles stop signals from here on

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs, set_seed, tqdm

from data.batches.masking import MaskTokens
from data.load import eval_loader, load_rows, train_loader
from utils.display.log import Log, print_evaluation
from utils.display.samples import fill_masks, show_rows
from utils.flags import parse_args
from utils.launch import check_launch, launch_options
from utils.learning.losses import MaskedLMLoss, masked_metrics
from utils.learning.model import build_model, to_device
from utils.learning.optim import UpdateGuard, build_optimizer, build_schedule
from utils.publishing.export import save_model
from utils.publishing.hub import Hub
from utils.settings import check_settings
from utils.state.checkpoints import Checkpoints
from utils.state.stop_signals import StopSignals
from utils.steps import Steps

EVAL_MASKED = 0.15  # share of the tokens that evaluations hide; keep it, so that runs can be compared


@dataclass
class TrainArgs:
    preset: str | None = None  # an experiment from PRESETS below; laptop if no data and no weights are named

    # What to learn from
    dataset_name: list[str] = field(default_factory=list)  # files, folders, Hub ids, token shards
    mixture: list[float] = field(default_factory=list)  # of several: their shares of the tokens, sum 1
    dataset_config_name: str | None = None  # configuration of a Hub data set
    eval_dataset_name: list[str] = field(default_factory=list)  # or several; none: a split, or held out
    text_column: str | None = None  # for all data sets; none: content, else text
    keywords: list[str] = field(default_factory=list)  # train only on documents with one of these; none: all
    validation_fraction: float = 0.05  # of the documents, where the source has no validation split
    tokenizer_name: str | None = None  # a Hub id or folder; none: train a Unigram on the corpus
    vocab_size: int = 4096  # of the trained tokenizer
    block_size: int = 128  # T, tokens per row, special tokens included
    max_train_samples: int = 0  # use only so many rows, the first ones; 0: all
    streaming: bool = False  # read the source over the network while it is prepared; download nothing first
    cache_dir: str = "cache"  # prepared rows and trained tokenizers
    mlm_probability: float = 0.30  # share of the tokens that training hides
    next_sentence: bool = False  # rows are sentence pairs, the model also tells whether B follows A (BERT)

    # Model
    model_type: str = "modernbert"  # or roberta, bert, or another masked model of transformers, from scratch
    config_overrides: str = (  # sizes by transformers' names; a flag changes those that it names
        "hidden_size=128,num_hidden_layers=3,num_attention_heads=4,intermediate_size=256,local_attention=16"
    )
    model_name_or_path: str | None = None  # continue from these weights and their tokenizer, not from scratch

    # Optimization
    per_device_train_batch_size: int = 8  # B, rows
    per_device_eval_batch_size: int = 32  # rows
    gradient_accumulation_steps: int = 1  # micro-batches per step
    optimizer_type: str = "muon"  # on the hidden layers' matrices, AdamW on the rest; or adamw on all
    learning_rate: float = 1e-2  # peak, of AdamW; about 2e-3 if adamw trains all
    muon_learning_rate: float = 5e-3  # peak, of the matrices that Muon trains; 0: learning_rate
    weight_decay: float = 0.1  # on matrices and embeddings only
    adam_beta2: float = 0.95  # AdamW's beta2; its beta1 is 0.9
    lr_scheduler_type: str = "linear"  # of transformers: cosine, constant_with_warmup, ...
    lr_scheduler_kwargs: str | None = None  # its options: cosine_with_min_lr takes min_lr_rate=0.1
    num_warmup_steps: float = 0.04  # steps; below 1: a share of all steps
    num_train_epochs: float = 1.0  # passes over the rows, where max_train_steps is 0; the flag sets it to 0
    max_train_steps: int = 7000  # steps; 0: num_train_epochs decides
    max_grad_norm: float = 1.0  # 0: no clipping
    gradient_checkpointing: bool = False  # compute blocks again in the backward pass: less memory, slower

    # When to log, evaluate, save
    logging_steps: int = 50  # steps; 0: once per epoch
    eval_at_start: bool = True  # evaluate before the first step, too
    eval_steps: int = 1000  # steps; 0: once per epoch
    save_steps: int = 1000  # steps; 0: once per epoch
    save_total_limit: int = 2  # newest checkpoints kept
    max_eval_samples: int = 512  # rows per evaluation; 0: all
    prompts: list[str] = field(default_factory=lambda: ["rows"])  # rows: words of evaluation rows; none: off

    # The run
    output_dir: str = "runs/mlm"  # one run, one folder
    seed: int = 42  # of weights, order, masks, dropout
    resume_from_checkpoint: str = "auto"  # auto: the newest valid one, if any; none: start anew; or a path
    eval_only: bool = False  # of model_name_or_path, or of output_dir's run, with its settings
    show: int = 0  # print so many rows as the model is fed them, and end; 0: train
    report_to: list[str] = field(default_factory=list)  # tensorboard, wandb, trackio; none: off
    push_to_hub: bool = False  # publish each save in the background
    hub_model_id: str | None = None  # user/name; none: the name of output_dir
    hub_private_repo: bool = False  # seen by its owner alone


ENGLISH = ["Goal of my life is to [MASK].", "The film was released in [MASK].", "He was [MASK] in London."]
PRESETS = {
    "laptop": dict(  # the first run: the English in your Python packages, minutes on two cores
        dataset_name="installed-docs",
        prompts=["Goal of my life is to [MASK].", "If the file does not [MASK], an error is raised.",
                 "The number of [MASK] in the array."],
    ),
    "wikitext-roberta": dict(  # Hugging Face's Keras example for TPUs: RoBERTa base on WikiText-103
        dataset_name="Salesforce/wikitext", dataset_config_name="wikitext-103-raw-v1", block_size=512,
        model_type="roberta", config_overrides="layer_norm_eps=1e-5,type_vocab_size=1",  # roberta-base's
        vocab_size=25_000, mlm_probability=0.15,
        per_device_train_batch_size=16, per_device_eval_batch_size=16, optimizer_type="adamw",
        learning_rate=1e-4, weight_decay=1e-3, adam_beta2=0.999, max_grad_norm=0, lr_scheduler_type="linear",
        num_warmup_steps=0.05, num_train_epochs=10, max_train_steps=0, eval_steps=0, save_steps=0,
        max_eval_samples=0, logging_steps=50, prompts=ENGLISH, output_dir="runs/wikitext-roberta",
    ),
    "wikitext-bert-nsp": dict(  # AMD's article: BERT base with next-sentence prediction on WikiText-103
        # The article makes 200 to 400 epochs of the validation split's 3,000 pairs, and evaluates on the same
        # ones after each. One epoch of the train split is about as many pairs: evaluated by steps.
        dataset_name="Salesforce/wikitext", dataset_config_name="wikitext-103-raw-v1", next_sentence=True,
        model_type="bert", tokenizer_name="google-bert/bert-base-cased",
        config_overrides="max_position_embeddings=512",  # BERT's; rows of block_size 128 train the first 128
        mlm_probability=0.15, per_device_train_batch_size=8, per_device_eval_batch_size=8,
        optimizer_type="adamw", learning_rate=5e-5, weight_decay=0, adam_beta2=0.999,  # plain Adam
        num_warmup_steps=0, lr_scheduler_type="linear", num_train_epochs=1, max_train_steps=0,
        eval_steps=5000, save_steps=5000, max_eval_samples=0, logging_steps=50, prompts=ENGLISH,
        output_dir="runs/wikitext-bert-nsp",
    ),
}


# Settings that may differ when a run continues: they change what is shown and kept, not what is learnt. The
# rows per step (B x micro-batches x processes) must stay the same. max_train_steps is not in this list, but
# may change as long as the learning rate does not depend on it.
MAY_CHANGE = """preset cache_dir streaming per_device_train_batch_size per_device_eval_batch_size
    gradient_accumulation_steps gradient_checkpointing logging_steps eval_at_start eval_steps save_steps
    save_total_limit max_eval_samples prompts output_dir resume_from_checkpoint eval_only show report_to
    push_to_hub hub_model_id hub_private_repo""".split()


@entry_point
def main(args: TrainArgs | None = None) -> None:
    args = args or parse_args(TrainArgs, PRESETS)
    kind = "pretraining" if args.next_sentence else "masked"  # of transformers' models
    check_settings(args, kind)  # raises what settings and model can tell, before any work
    accelerator = Accelerator(
        **launch_options(),  # precision and compiler: accelerate_configs/ counts, also without a launcher
        log_with=args.report_to,
        project_dir=args.output_dir,
        kwargs_handlers=[
            DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=False),
            InitProcessGroupKwargs(timeout=timedelta(hours=3)),  # the others wait for the first one's rows
        ],
    )
    check_launch(accelerator)  # every process must see the others
    hub = Hub(args, accelerator)  # with push_to_hub: makes the repository now

    # ---- Data: rows of T tokens; those to evaluate on by name, a single set as ""
    n_special = 0 if args.next_sentence else 2  # <s> and </s> come around a row when it is masked
    with accelerator.local_main_process_first():  # it prepares the rows, the others find them in cache_dir
        tokenizer, rows, eval_rows = load_rows(args, "unigram", n_special)
    mask = MaskTokens(tokenizer, args.mlm_probability, args.seed)  # a function of (seed, epoch, row)
    eval_mask = MaskTokens(tokenizer, EVAL_MASKED)  # the same masks in every evaluation, for every seed
    if args.show:
        return show_rows(args, accelerator, train_loader(rows, args, collate=mask), tokenizer)

    # ---- Model and optimizer
    set_seed(args.seed)
    model = MaskedLMLoss(build_model(args, kind, tokenizer))  # batch -> loss_sums, right, in eval mode rows
    to_device(model, accelerator)  # before the optimizer: on XLA it makes new parameters
    optimizer = build_optimizer(model, args)  # Muon for hidden matrices, AdamW for the rest; or AdamW for all
    model, optimizer = accelerator.prepare(model, optimizer)
    eval_batches = {name: accelerator.prepare(eval_loader(part, args, eval_mask))
                    for name, part in eval_rows.items()}  # fmt: skip

    # A batch is a dict of input_ids [B, T], masked; slots [B, K], the positions to predict, and slot_labels;
    # for sentence pairs also token_type_ids, attention_mask and next_sentence_label; and for each row [B] its
    # position in the stream, epoch, row (its number; -1 where the last batch of an evaluation is filled up)
    # and source (the number of its data set).
    def evaluate() -> dict:
        """{metric: value} over each evaluation set, each row once."""
        set_seed(args.seed)
        model.eval()
        record = {}
        for name, loader in eval_batches.items():
            sums, row_numbers = [], []
            for batch in tqdm(loader, desc="evaluating", leave=False, disable=not sys.stderr.isatty()):
                with torch.no_grad():  # of each row its summed loss, predictions, correct ones: [B, 3 or 6]
                    sums.append(model(batch)["rows"])
                row_numbers.append(batch["row"])
            sums, row_numbers = accelerator.gather((torch.cat(sums), torch.cat(row_numbers)))
            sums = sums.cpu().double()[row_numbers.cpu() >= 0]  # of all processes
            metrics = masked_metrics(sums)  # adds up, then divides once
            record |= {f"{metric}/{name}".rstrip("/"): value for metric, value in metrics.items()}
        model.train()
        return record

    if args.eval_only:
        return print_evaluation(args, accelerator, evaluate())

    # ---- Schedule, log, and where the run continues
    steps = Steps(args, accelerator, rows)  # which rows a step takes, how many steps there are
    schedule = build_schedule(optimizer, args, steps.last)  # not prepared, or it would step per process
    guard = UpdateGuard(accelerator, optimizer)  # skips updates that are not finite
    names = ["accuracy/train", "loss/train", "loss/train_mlm", *["loss/train_nsp"] * args.next_sentence]
    log = Log(args, accelerator, steps, guard, *names)  # means of these over the steps
    checkpoints = Checkpoints(
        args, accelerator, steps, rows.fingerprint, MAY_CHANGE,
        model=model,
        optimizer=optimizer,
        schedule=schedule,
        log=log,
        # add your state here as name=object with state_dict and load_state_dict; the first process's is saved
    )  # fmt: skip
    step = checkpoints.load()  # as resume_from_checkpoint says; 0: a new run
    log.start(step, model, optimizer, tokenizer, hub)  # drops records of later steps from metrics.jsonl
    batches = train_loader(rows, args, steps.rows_before(step), steps.rows_before(steps.last), mask)
    batches = iter(accelerator.prepare(batches))
    signals = StopSignals(accelerator)  # from here on a first signal lets the run save; before, it ends it

    # ---- The loop: evaluate and save when due, then one optimizer step. Step 0 saves, too: a run that cannot
    # save must fail now, not in an hour.
    while not log.finished:  # by an earlier start
        if log.evaluation_due(step):
            with log.timed("evaluation"):
                record = evaluate()
                samples = fill_masks(accelerator, model, tokenizer, args.prompts, eval_rows)
                log.evaluation(step, record, samples)
        stopping = step >= steps.last or signals.agreed()  # the same on all processes
        if stopping or steps.due(step, args.save_steps):
            with log.timed("save"):
                checkpoints.save(step, stopping)  # a failure is a warning; at step 0 and at the end an error
                save_model(args, accelerator, model, tokenizer, log.facts)  # these for the model card
                hub.push(step)
        if stopping:
            break

        micro_batches = [next(batches) for _ in range(steps.micro_batches(step))]
        steps.seed(step)  # from here on random numbers are a function of (seed, step, process)
        # Rows differ in their number of predictions: count those of the step on all processes first.
        labels = ["slot_labels", *(["next_sentence_label"] if args.next_sentence else [])]
        counts = torch.stack([sum((batch[name] != -100).sum() for batch in micro_batches) for name in labels])
        counts = accelerator.reduce(counts).clamp(min=1) / accelerator.num_processes
        losses, accuracy = torch.zeros(len(labels), device=accelerator.device), 0
        for micro_step, batch in enumerate(micro_batches, 1):
            last = micro_step == len(micro_batches)
            with nullcontext() if last else accelerator.no_sync(model):  # gradients are all-reduced once
                found = model(batch)
                parts = found["loss_sums"] / counts  # [1 or 2]: masked tokens, next sentence
                accelerator.backward(parts.sum())  # the all-reduce takes the mean over processes
            losses += parts.detach()
            accuracy += found["right"] / counts[0]
        grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
        skipped = guard.check(grad_norm)  # 1.0 if not finite: the optimizer then changes nothing
        learning_rate = schedule.get_last_lr()[0]  # of this step, of the first group (AdamW's)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        step += 1
        log.add(step, torch.cat([torch.stack([accuracy, losses.sum()]), losses]), skipped)
        if steps.due(step, args.logging_steps):
            log.train(step, learning_rate)

    pushed = hub.finish(step)  # waits until the last save has arrived; False: a message says how to upload it
    log.finish(step)
    signals.exit_if_stopped(finished=step >= steps.last)  # status 143 after SIGTERM, 130 after Ctrl-C
    if not pushed:
        sys.exit(1)


if __name__ == "__main__":
    main()
