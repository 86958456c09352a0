"""Pretrain a masked language model: ModernBERT, RoBERTa, or BERT with next-sentence prediction.

    python train_mlm.py                                                        # this machine, one process
    accelerate launch --config_file accelerate_configs/cpu.yaml train_mlm.py   # the same through the launcher
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml train_mlm.py --preset wikitext-roberta
    accelerate launch --config_file accelerate_configs/tpu.yaml train_mlm.py   # one TPU host

Run the same command again to continue where it stopped. The settings are the fields of TrainArgs below:
edit a default, or pass a flag (`--help` lists them). Edit main as well: docs/editing.md shows how, and
`python -m utils.check train_mlm.py` tests the edited script. Every process runs every line of main, and many
lines wait for all processes: never skip a line on some of them. Log, Hub, save_model write on process 0.

Shapes: B rows per micro-batch, T tokens per row (block_size), K of them masked. A step is an optimizer step.
"""

import math
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # ahead of any installed package named utils

from utils.entry import entry_point  # isort: skip  # first: it handles stop signals during imports

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

EVAL_MASKED = 0.15  # share of the tokens masked in evaluations; keep it, so that runs can be compared


@dataclass
class TrainArgs:
    preset: str | None = None  # one of PRESETS below; laptop if neither data nor weights are named

    # What to learn from
    dataset_name: list[str] = field(default_factory=list)  # files, folders, Hub ids or token shards
    mixture: list[float] = field(default_factory=list)  # share of the tokens from each dataset, if several
    dataset_config_name: str | None = None  # configuration of a Hub dataset
    eval_dataset_name: list[str] = field(default_factory=list)  # none: a validation split, or held-out text
    text_column: str | None = None  # in all datasets; none: the column content, else text
    keywords: list[str] = field(default_factory=list)  # train only on documents with any of these; none: off
    validation_fraction: float = 0.05  # of the documents, held out if the source has no validation split
    tokenizer_name: str | None = None  # a Hub id or folder; none: train a Unigram tokenizer on the corpus
    vocab_size: int = 4096  # of the trained tokenizer
    block_size: int = 128  # T, tokens per row, special tokens included
    max_train_samples: int = 0  # use only the first N rows; 0: all
    streaming: bool = False  # read a Hub dataset over the network, without downloading it first
    cache_dir: str = "cache"  # prepared rows and trained tokenizers
    mlm_probability: float = 0.30  # share of the tokens masked in training
    next_sentence: bool = False  # rows are sentence pairs; also predict whether the second follows

    # Model
    model_type: str = "modernbert"  # or roberta, bert, another masked model type, trained from scratch
    config_overrides: str = (  # fields of the model's config; the flag changes only those it lists
        "hidden_size=128,num_hidden_layers=3,num_attention_heads=4,intermediate_size=256,local_attention=16"
    )
    model_name_or_path: str | None = None  # start from these weights and their tokenizer instead

    # Optimization
    per_device_train_batch_size: int = 8  # B, rows per micro-batch
    per_device_eval_batch_size: int = 32  # rows
    gradient_accumulation_steps: int = 1  # micro-batches per step
    optimizer_type: str = "muon"  # Muon for hidden matrices, AdamW for the rest; adamw: AdamW for all
    learning_rate: float = 1e-2  # peak, of AdamW; pass about 2e-3 with --optimizer_type adamw
    muon_learning_rate: float = 5e-3  # peak, of Muon; 0: the same as learning_rate
    weight_decay: float = 0.1  # on matrices and embeddings, not on biases and norms
    adam_beta2: float = 0.95  # AdamW's beta2; its beta1 is 0.9
    lr_scheduler_type: str = "linear"  # of transformers: cosine, constant_with_warmup, ...
    lr_scheduler_kwargs: str | None = None  # its arguments: min_lr_rate=0.1 for cosine_with_min_lr
    num_warmup_steps: float = 0.04  # steps; below 1: a share of all steps
    num_train_epochs: float = 1.0  # used if max_train_steps is 0, as --num_train_epochs sets it
    max_train_steps: int = 7000  # steps; 0: num_train_epochs decides
    max_grad_norm: float = 1.0  # 0: no clipping
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: less memory, slower

    # When to log, evaluate, save
    logging_steps: int = 50  # steps; 0: once per epoch
    eval_at_start: bool = True  # also evaluate before the first step
    eval_steps: int = 1000  # steps; 0: once per epoch
    save_steps: int = 1000  # steps; 0: once per epoch
    save_total_limit: int = 2  # keep this many of the newest checkpoints
    max_eval_samples: int = 512  # rows per evaluation, drawn by the seed; 0: all
    prompts: list[str] = field(default_factory=lambda: ["rows"])  # with [MASK]; rows: evaluation rows

    # The run
    output_dir: str = "runs/mlm"  # one folder per run
    seed: int = 42  # of weights, order, masks, dropout
    resume_from_checkpoint: str = "auto"  # auto: the newest valid one, if any; none: a new run; or a path
    eval_only: bool = False  # evaluate model_name_or_path, or the run in output_dir, and exit
    show: int = 0  # print N rows as the model gets them, and exit; 0: train
    report_to: list[str] = field(default_factory=list)  # tensorboard, wandb, trackio; none: off
    push_to_hub: bool = False  # upload each save in the background
    hub_model_id: str | None = None  # user/name; none: the name of output_dir
    hub_private_repo: bool = False  # visible only to its owner


ENGLISH = ["Goal of my life is to [MASK].", "The film was released in [MASK].", "He was [MASK] in London."]
PRESETS = {
    "laptop": dict(  # the first run: English text in the Python packages here, minutes on two cores
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
        # The article trains 200 to 400 epochs on the validation split's 3,000 pairs and evaluates on the same
        # pairs after each. One epoch of the train split is about as many pairs; evaluated by steps.
        dataset_name="Salesforce/wikitext", dataset_config_name="wikitext-103-raw-v1", next_sentence=True,
        model_type="bert", tokenizer_name="google-bert/bert-base-cased",
        config_overrides="max_position_embeddings=512",  # as in BERT; rows of 128 use only the first 128
        mlm_probability=0.15, per_device_train_batch_size=8, per_device_eval_batch_size=8,
        optimizer_type="adamw", learning_rate=5e-5, weight_decay=0, adam_beta2=0.999,  # plain Adam
        num_warmup_steps=0, lr_scheduler_type="linear", num_train_epochs=1, max_train_steps=0,
        eval_steps=5000, save_steps=5000, max_eval_samples=0, logging_steps=50, prompts=ENGLISH,
        output_dir="runs/wikitext-bert-nsp",
    ),
}


# Settings that may differ when a run continues: none of them changes what is learned. The rows per step
# (B x micro-batches x processes) must stay the same. max_train_steps may change, too, if the learning rate
# does not depend on it.
MAY_CHANGE = """preset cache_dir streaming per_device_train_batch_size per_device_eval_batch_size
    gradient_accumulation_steps gradient_checkpointing logging_steps eval_at_start eval_steps save_steps
    save_total_limit max_eval_samples prompts output_dir resume_from_checkpoint eval_only show report_to
    push_to_hub hub_model_id hub_private_repo""".split()


@entry_point
def main(args: TrainArgs | None = None) -> None:
    args = args or parse_args(TrainArgs, PRESETS)
    kind = "pretraining" if args.next_sentence else "masked"  # AutoModelForPreTraining, ForMaskedLM
    check_settings(args, kind)  # one error that lists all mistakes in settings and model, before any work
    accelerator = Accelerator(
        **launch_options(),  # precision and torch.compile, from accelerate_configs/ even without a launcher
        log_with=args.report_to,
        project_dir=args.output_dir,
        kwargs_handlers=[
            DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=False),
            InitProcessGroupKwargs(timeout=timedelta(hours=3)),  # while the first process prepares the rows
        ],
    )
    check_launch(accelerator)  # an error if the processes do not see each other
    hub = Hub(args, accelerator)  # with push_to_hub: creates the repository now

    # ---- Data: rows of T tokens. eval_rows is {name of an evaluation set: its rows}, "" for a single one.
    n_special = 0 if args.next_sentence else 2  # MaskTokens puts <s> and </s> around a row; pairs have theirs
    with accelerator.local_main_process_first():  # prepares rows in cache_dir, where the others read them
        tokenizer, rows, eval_rows = load_rows(args, "unigram", n_special)
    mask_tokens = MaskTokens(tokenizer, args.mlm_probability, args.seed)  # depends only on seed, epoch, row
    mask_eval_tokens = MaskTokens(tokenizer, EVAL_MASKED)  # the same masks in every evaluation and run
    if args.show:
        return show_rows(args, accelerator, train_loader(rows, args, collate=mask_tokens), tokenizer)

    # ---- Model and optimizer
    set_seed(args.seed)
    model = MaskedLMLoss(build_model(args, kind, tokenizer))  # returns {loss_sums, correct, rows}
    to_device(model, accelerator)  # before the optimizer is built: XLA replaces the parameters
    optimizer = build_optimizer(model, args)  # Muon for hidden matrices, AdamW for the rest
    model, optimizer = accelerator.prepare(model, optimizer)
    eval_loaders = {name: accelerator.prepare(eval_loader(part, args, mask_eval_tokens))
                    for name, part in eval_rows.items()}  # fmt: skip

    # A batch is a dict: input_ids [B, T], with masks; slots and slot_labels [B, K], the masked positions and
    # their tokens; with next_sentence also token_type_ids, attention_mask, next_sentence_label; and for each
    # row [B] its position in the training order, epoch, row (its number, -1 for padding in the last batch of
    # an evaluation) and source (the number of its dataset).
    def evaluate() -> dict:
        """Returns {metric: value} for all evaluation sets. Each row counts once."""
        set_seed(args.seed)  # the same random numbers in every evaluation; each training step reseeds
        model.eval()
        record = {}
        for name, loader in eval_loaders.items():
            sums, row_numbers = [], []
            for batch in tqdm(loader, desc="evaluating", leave=False, disable=not sys.stderr.isatty()):
                with torch.no_grad():  # per row: loss sum, predictions, correct; [B, 3 or 6]
                    sums.append(model(batch)["rows"])
                row_numbers.append(batch["row"])
            sums, row_numbers = accelerator.gather((torch.cat(sums), torch.cat(row_numbers)))
            sums = sums.cpu().double()[row_numbers.cpu() >= 0]  # without padding
            metrics = masked_metrics(sums)  # adds up all rows, then divides once
            record |= {f"{metric}/{name}".rstrip("/"): value for metric, value in metrics.items()}
        model.train()
        return record

    if args.eval_only:
        return print_evaluation(args, accelerator, evaluate())

    # ---- Schedule, log, and where the run continues
    steps = Steps(args, accelerator, rows)  # how many steps there are, and which rows each one takes
    schedule = build_schedule(optimizer, args, steps.last)  # unprepared, or it would step once per process
    guard = UpdateGuard(accelerator, optimizer)  # skips a step whose gradient is not finite
    names = ["accuracy/train", "loss/train", "loss/train_mlm"]
    names += ["loss/train_nsp"] if args.next_sentence else []
    log = Log(args, accelerator, steps, guard, *names)  # logs the mean of each
    checkpoints = Checkpoints(
        args, accelerator, steps, rows.fingerprint, MAY_CHANGE,
        model=model,
        optimizer=optimizer,
        schedule=schedule,
        log=log,
        # add your state here: name=object with state_dict and load_state_dict; process 0's is saved
    )  # fmt: skip
    step = checkpoints.load()  # 0 in a new run
    log.start(step, model, optimizer, tokenizer, hub)  # deletes metrics after `step`: these steps run again
    batches = train_loader(rows, args, steps.rows_before(step), steps.rows_before(steps.last), mask_tokens)
    batches = iter(accelerator.prepare(batches))
    signals = StopSignals(accelerator)  # from here on SIGTERM and Ctrl-C save before they end the run

    # ---- The loop: evaluate and save when due, then one optimizer step. Step 0 saves, too: a run that cannot
    # save must fail now, not in an hour.
    while not log.finished:  # skipped if an earlier start finished the run; else break ends it
        if log.evaluation_due(step):
            with log.timed("evaluation"):
                record = evaluate()
                samples = fill_masks(accelerator, model, tokenizer, args.prompts, eval_rows)
                log.evaluation(step, record, samples)
        stopping = step >= steps.last or signals.stop_requested()  # the same on all processes
        if stopping or steps.due(step, args.save_steps):
            with log.timed("save"):
                checkpoints.save(step, stopping)  # warns if it fails; at step 0 and at the end it raises
                save_model(args, accelerator, model, tokenizer, log.facts)  # facts: for the model card
                hub.push(step)
        if stopping:
            break

        micro_batches = [next(batches) for _ in range(steps.micro_batches(step))]
        steps.seed(step)  # random numbers depend only on (seed, step, process)
        # Predictions of the step, summed over processes and divided by their number: DDP averages gradients.
        keys = ["slot_labels", *(["next_sentence_label"] if args.next_sentence else [])]
        counts = torch.stack([sum((batch[key] != -100).sum() for batch in micro_batches) for key in keys])
        counts = accelerator.reduce(counts).clamp(min=1) / accelerator.num_processes
        losses, accuracy = torch.zeros(len(keys), device=accelerator.device), 0
        for micro_step, batch in enumerate(micro_batches, 1):
            last = micro_step == len(micro_batches)
            with nullcontext() if last else accelerator.no_sync(model):  # gradients are all-reduced once
                output = model(batch)
                parts = output["loss_sums"] / counts  # [1 or 2]: masked LM, next sentence
                accelerator.backward(parts.sum())
            losses += parts.detach()
            accuracy += output["correct"] / counts[0]
        grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
        skipped = guard.check(grad_norm)  # 1.0 if grad_norm is not finite: optimizer.step() then does nothing
        learning_rate = schedule.get_last_lr()[0]  # of this step, of the first group (AdamW's)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        step += 1
        log.add(step, torch.cat([torch.stack([accuracy, losses.sum()]), losses]), skipped)
        if steps.due(step, args.logging_steps):
            log.train(step, learning_rate)

    pushed = hub.finish(step)  # waits for the last upload; False: it failed, and the message has a fix
    log.finish(step)
    signals.exit_if_stopped(finished=step >= steps.last)  # status 143 after SIGTERM, 130 after Ctrl-C
    if not pushed:
        sys.exit(1)


if __name__ == "__main__":
    main()
