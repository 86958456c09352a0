"""Pretrain a masked language model: ModernBERT, RoBERTa, or BERT with next-sentence prediction.

    python train_mlm.py                                                        # this machine, one process
    accelerate launch --config_file accelerate_configs/cpu.yaml train_mlm.py   # the same through the launcher
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml train_mlm.py --preset wikitext-roberta
    accelerate launch --config_file accelerate_configs/tpu.yaml train_mlm.py   # one TPU host

Run the same command again and it continues where it stopped. `--help` lists the settings, the fields of
TrainArgs below: edit them there, or give them as flags.

Shapes: B rows per micro-batch, T tokens per row (block_size), K predictions. A step is an optimizer step.
"""

import math
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # before an installed `utils`; TPU appends it

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, set_seed

from data.masking import MaskTokens
from data.open import Recipe, open_sources, prepare
from utils.display.preview import show_rows
from utils.display.trackers import check_trackers
from utils.entry import entry_point
from utils.flags import parse_args
from utils.learning.compiled import compile_blocks
from utils.learning.losses import MaskedLMLoss
from utils.learning.model import build_model, model_problems, packs_pairs
from utils.learning.optim import Means, UpdateGuard, build_optimizer, build_schedule
from utils.run import Run
from utils.settings import common_problems, evaluate_what_is_saved, saved_data, stop_at
from utils.state.preemption import handle_stop_signals
from utils.steps import Steps
from utils.tasks import MASKED
from utils.xla import autocast_forward, launcher_precision, sync

# Filled at every evaluation: they show what the loss does not. Does it know the language yet?
PROMPTS = [
    "Goal of my life is to [MASK].",
    "If the file does not [MASK], an error is raised.",
    "The number of [MASK] in the array.",
]
OTHER_DATA = {"prompts": ["rows"]}  # where --dataset_name names other data: of its evaluation rows
ENGLISH = ["Goal of my life is to [MASK].", "The film was released in [MASK].", "He was [MASK] in London."]

# Rotary positions: with learned ones, so small a model learns no word order in so few minutes.
# name?: where the type has it. Other sizes keep their proportion to these.
SMALL = "hidden_size=128,num_hidden_layers=3,num_attention_heads=4,intermediate_size?=256,local_attention?=16"

# ModernBERT-base with the rotary base of its first phase.
MODERNBERT = """{"vocab_size": 50368, "rope_parameters": {
    "full_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}}}"""


@dataclass
class TrainArgs:
    preset: str = "laptop"  # a whole experiment from PRESETS below; flags given beside it win

    # What to learn from
    dataset_name: list[str] = field(default_factory=lambda: ["installed-docs"])  # or Hub ids, files, shards
    mixture: list[float] = field(default_factory=list)  # of several: their shares of the tokens, sum 1
    dataset_config_name: list[str] = field(default_factory=list)  # configuration of a Hub data set
    eval_dataset_name: list[str] = field(default_factory=list)  # or several; none: a split, or held out
    text_column: list[str] = field(default_factory=list)  # one, or one each; none: content, else text
    keywords: list[str] = field(default_factory=list)  # documents must hold one; none: all
    keep_duplicates: bool = False  # keep documents whose text repeats
    validation_fraction: float = 0.03  # of the documents, where the source has no validation split
    tokenizer_name: str | None = None  # a Hub id or folder; none: train a Unigram on the corpus
    vocab_size: int = 4096  # of the trained tokenizer
    block_size: int = 128  # T, tokens per row, special tokens included
    max_train_samples: int = 0  # use only so many rows, the first ones; 0: all
    streaming: bool = False  # read the source while training, prepare nothing; needs max_train_steps
    stream_gb: float = 4.0  # GB of cache_dir for what is read ahead of training
    cache_dir: str = "cache"  # prepared rows and trained tokenizers
    mlm_probability: float = 0.30  # share of the tokens that are predicted in training
    eval_mlm_probability: float = 0.15  # in evaluations; keep it, so that runs can be compared
    next_sentence: bool = False  # rows are sentence pairs, the model also tells whether B follows A (BERT)
    pack_pairs: bool = field(default=True, metadata={"before": False})  # as many pairs into a row as fit

    # Model
    model_type: str = "modernbert"  # or roberta, bert, or another masked model of transformers, from scratch
    config_overrides: str = SMALL  # configuration (?=: if the type has it); yours replace all of these
    model_name_or_path: str | None = None  # continue from these weights and their tokenizer, not from scratch
    attn_implementation: str = "auto"  # sdpa, eager, local, window: docs/masked.md

    # Optimization
    per_device_train_batch_size: int = 8  # B, rows
    per_device_eval_batch_size: int = 32  # rows
    gradient_accumulation_steps: int = 1  # micro-batches per step
    optimizer_type: str = "muon"  # on the hidden layers' matrices, AdamW on the rest; or adamw on all
    learning_rate: float = 1e-2  # peak, of AdamW; about 2e-3 if adamw trains all
    muon_learning_rate: float = 5e-3  # peak, of the matrices that Muon trains; 0: learning_rate
    weight_decay: float = 0.1  # on matrices and embeddings only
    adam_beta2: float = 0.95  # AdamW's beta2; its beta1 is 0.9
    lr_scheduler_type: str = "cosine"  # linear, constant_with_warmup, warmup_stable_decay, ...
    num_warmup_steps: float = 0.04  # steps; below 1: a share of all steps
    num_decay_steps: float = 0.2  # of warmup_stable_decay, at its end; below 1: a share
    min_lr_ratio: float = 0.0  # final learning rate / peak
    num_train_epochs: float = 1.0  # passes over the rows; used where max_train_steps is 0
    max_train_steps: int = 5000  # steps; 0: num_train_epochs decides
    max_grad_norm: float = 1.0  # 0: no clipping
    gradient_checkpointing: bool = False  # compute blocks again in the backward pass: less memory, slower
    max_skipped_updates: int = 20  # updates in a row that are not finite before the run gives up

    # When to log, evaluate, save
    logging_steps: int = 50  # steps
    eval_at_start: bool = True  # evaluate before the first step, too
    eval_steps: int = 1000  # steps; 0: once per epoch
    save_steps: int = 1000  # steps; 0: once per epoch
    save_total_limit: int = 2  # newest checkpoints kept
    keep_best: bool = False  # also the model of the lowest evaluation loss, in output_dir/best
    milestones: list[str] = field(default_factory=list)  # steps, or log: models kept for good; none: off
    max_eval_samples: int = 512  # rows per evaluation; 0: all
    prompts: list[str] = field(default_factory=PROMPTS.copy)  # filled at evaluations; none: off

    # The run
    output_dir: str = "runs/mlm"  # one run, one folder
    seed: int = 42  # of weights, order, masks, dropout
    resume_from_checkpoint: str = "auto"  # auto: the newest valid one, if any; none: start anew; or a path
    preflight: bool = True  # exercise every later stage once before the first step
    eval_only: bool = False  # of model_name_or_path, or of output_dir's run, with its settings
    show: int = 0  # print so many rows as the model is fed them, and end; 0: train
    report_to: str = "none"  # tensorboard, wandb, trackio
    log_level: str = "error"  # of the libraries
    push_to_hub: bool = False  # publish each save in the background
    hub_model_id: str | None = None  # user/name; none: the name of output_dir
    hub_private_repo: bool = False  # seen by its owner alone
    checkpoint_url: str | None = None  # keep checkpoints there, too: s3://..., hf://user/name; none: off
    hub_timeout: float = 600.0  # seconds to wait for the last push


PRESETS = {
    "laptop": {},  # the defaults: minutes on two cores, no network
    "wikitext-roberta": dict(  # Hugging Face's Keras example for TPUs: RoBERTa base on WikiText-103
        dataset_name="Salesforce/wikitext", dataset_config_name="wikitext-103-raw-v1", block_size=512,
        model_type="roberta", config_overrides="", vocab_size=25_000, mlm_probability=0.15,
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
    "modernbert-base": dict(  # ModernBERT's first phase, 26 B of its 1,719 B tokens; not run (docs/masked.md)
        dataset_name="HuggingFaceFW/fineweb-edu", dataset_config_name="sample-100BT", streaming=True,
        tokenizer_name="answerdotai/ModernBERT-base", block_size=1024, config_overrides=MODERNBERT,
        per_device_train_batch_size=96, gradient_accumulation_steps=8, optimizer_type="adamw",
        learning_rate=8e-4, weight_decay=0.0125, adam_beta2=0.98, lr_scheduler_type="warmup_stable_decay",
        num_warmup_steps=3815, num_decay_steps=0.2, max_train_steps=33_000, eval_steps=1000, save_steps=1000,
        prompts=ENGLISH, output_dir="runs/modernbert-base",
    ),
    "bert-24h": dict(  # Cramming's BERT of one GPU and one day, 18 B tokens; not run (docs/masked.md)
        dataset_name="HuggingFaceFW/fineweb-edu", dataset_config_name="sample-100BT", streaming=True,
        tokenizer_name="google-bert/bert-base-uncased", mlm_probability=0.25,
        config_overrides="num_hidden_layers=16,intermediate_size=1536,local_attention=256",  # all T
        per_device_train_batch_size=512, gradient_accumulation_steps=8, optimizer_type="adamw",
        learning_rate=1e-3, weight_decay=0.01, adam_beta2=0.98, max_grad_norm=0.5, lr_scheduler_type="linear",
        num_warmup_steps=0.25, max_train_steps=35_000, eval_steps=1000, save_steps=1000, prompts=ENGLISH,
        output_dir="runs/bert-24h",
    ),
}


def check_args(args: TrainArgs) -> list[str]:
    """Every problem that can be seen in the settings alone, a line each."""
    problems = common_problems(args)
    special = 3 if args.next_sentence else 2  # [CLS] A [SEP] B [SEP], or <s> row </s>
    if args.block_size <= special:
        problems.append(f"block_size: {special} are special tokens, must be more than {args.block_size}.")
    if args.streaming and args.next_sentence:
        problems.append("streaming: sentence pairs are prepared first, set only one of it and next_sentence.")
    return problems


@entry_point
def main(args: TrainArgs | None = None) -> None:
    # ---- Settings and sources: every mistake at once, before any work
    args = args or parse_args(TrainArgs, PRESETS, other_data=OTHER_DATA)
    evaluate_what_is_saved(args)
    args.pack_pairs &= args.next_sentence  # False without pairs, as in runs before this setting
    problems = check_args(args)
    n_special = 0 if args.next_sentence else 2  # <s> and </s> come around a row when it is masked
    kind = "pretraining" if args.next_sentence else "masked"
    pack = args.pack_pairs and packs_pairs(args.model_type, args.model_name_or_path, args.attn_implementation)
    added = dict(algorithm="unigram", n_special=n_special, saved=saved_data(args), pack_pairs=pack)
    sources = open_sources(Recipe.of(args, **added), problems)
    build = dict(
        kind=kind, model_type=args.model_type, config_overrides=args.config_overrides,
        model_name_or_path=args.model_name_or_path, block_size=args.block_size, attn=args.attn_implementation,
    )  # fmt: skip
    stop_at(problems + model_problems(
        **build, tokenizer=sources.tokenizer, gradient_checkpointing=args.gradient_checkpointing,
        eval_only=args.eval_only,
    ))  # fmt: skip

    accelerator = Accelerator(
        mixed_precision=launcher_precision(),
        log_with=check_trackers(args.report_to) or None,
        project_dir=args.output_dir,
        kwargs_handlers=[DistributedDataParallelKwargs(
            gradient_as_bucket_view=True, bucket_cap_mb=100, broadcast_buffers=False)],
    )
    run = Run(args, accelerator, MASKED)

    # ---- Data: tokenizer, rows [n, T], prepared once per machine; masks made for each batch
    data = prepare(sources, accelerator)
    data.tokenizer.model_max_length = args.block_size  # saved with it
    data.collate = MaskTokens(data.tokenizer, args.mlm_probability, args.seed)
    data.evaluation_collate = MaskTokens(data.tokenizer, args.eval_mlm_probability, args.seed)
    steps = Steps(args, accelerator, data.length)
    if args.show:
        return show_rows(args.show, data, steps)

    # ---- Model, loss, optimizer, schedule
    set_seed(args.seed)
    lm = build_model(**build, tokenizer=data.tokenizer)
    if args.gradient_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    model = MaskedLMLoss(lm).to(accelerator.device)  # token_loss=... for one of your own
    lm.tie_weights()  # moving to XLA makes new parameters, and ties come apart
    optimizer = build_optimizer(
        model, args.learning_rate, args.weight_decay, betas=(0.9, args.adam_beta2),
        optimizer_type=args.optimizer_type, muon_learning_rate=args.muon_learning_rate,
    )  # fmt: skip
    warmup, decay = steps.count(args.num_warmup_steps), steps.count(args.num_decay_steps)
    schedule = build_schedule(
        optimizer, args.lr_scheduler_type, warmup, steps.last, decay, args.min_lr_ratio
    )
    compile_blocks(accelerator, model)  # where accelerate_configs/*.yaml says so
    model, optimizer = accelerator.prepare(model, optimizer)  # the schedule would step per process
    autocast_forward(model)
    guard = UpdateGuard(accelerator, optimizer)
    means = Means(accelerator, "train_mlm", *(["train_nsp"] if args.next_sentence else []), total="train")

    # A batch: input_ids [B, T], masked; slots [B, K], the positions to predict, and slot_labels; of sentence
    # pairs token_type_ids, attention_mask and next_sentence_label, too; and of each row [B] its position in
    # the stream, epoch, row (-1: padding of an evaluation) and source, the number of its data set.
    def update(micro_batches: list[dict]) -> None:
        """One optimizer step: forward and backward of every micro-batch, then the update."""
        processes = accelerator.num_processes
        # Rows differ in their number of predictions: sum it over the step and all processes first.
        labels = ["slot_labels", *(["next_sentence_label"] if args.next_sentence else [])]
        counts = [sum((batch[name] != -100).sum() for batch in micro_batches) for name in labels]
        counts = accelerator.reduce(counts) if processes > 1 else counts
        for i, batch in enumerate(micro_batches, 1):
            last = i == len(micro_batches)
            with nullcontext() if last else accelerator.no_sync(model):  # gradients are all-reduced once
                sums = model(batch)
                losses = [sums["mlm_loss_sum"] / counts[0].clamp(min=1) * processes]
                if args.next_sentence:
                    losses.append(sums["nsp_loss_sum"] / counts[1] * processes)
                accelerator.backward(sum(losses))  # the all-reduce takes the mean over processes
            means.add(*losses)
            if not last:
                sync()
        grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
        skipped = guard.check(grad_norm)  # 1.0 if not finite: the optimizer then skips the step
        means.end_step(skipped, len(micro_batches), divide=False)  # they already sum to the mean
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        sync()

    def evaluate(batch: dict) -> dict:
        """{name: (sums, counts)}, both [B] or both 0-d; padding rows count 0."""
        sums, tokens = model(batch), (batch["slot_labels"] != -100).sum(1)  # [B]
        totals = {"loss/mlm": (sums["mlm_row_losses"], tokens)}
        totals["accuracy"] = sums["mlm_correct"], sums["mlm_tokens"]
        if args.next_sentence:
            labels = batch["next_sentence_label"].view(len(tokens), -1)  # of one pair a row, or several
            totals["loss/nsp"] = sums["nsp_row_losses"], (labels != -100).sum(1)
            totals["nsp_accuracy"] = sums["nsp_correct"], sums["nsp_rows"]
        return totals

    # ---- The loop
    # What checkpoints hold. Add objects of your own that have state_dict and load_state_dict.
    keep = dict(optimizer=optimizer, schedule=schedule, guard=guard, means=means)
    if args.eval_only:
        return run.evaluate_only(model, evaluate, data, keep)
    if not run.start(model, update, evaluate, data, steps, keep, predicted=args.mlm_probability):
        return
    for micro_batches in data.batches(steps, run.step):
        run.seed_step()
        learning_rate = schedule.get_last_lr()[0]  # of this step; update goes on to the next one's
        update(micro_batches)
        run.next_step()
        if run.due(args.logging_steps):
            losses = means.read(grad_norm=guard.norm)  # waits for the device
            run.log({**losses, "learning_rate": learning_rate}, skipped=guard.read())
            if guard.consecutive > args.max_skipped_updates:
                run.give_up(guard.consecutive)
                break
        if run.due(args.eval_steps):
            run.evaluate()
        if run.due(args.save_steps) or run.stopping:
            run.save()
        if run.stopping:
            break
    run.finish()


handle_stop_signals(importing=True)  # the TPU launcher imports this file and must pass a stop signal on

if __name__ == "__main__":
    main()
