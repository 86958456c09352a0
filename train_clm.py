"""Pretrain a GPT-2-like language model from scratch, for code completion by default.

    python train_clm.py                                                        # this machine, one process
    accelerate launch --config_file accelerate_configs/cpu.yaml train_clm.py   # the same through the launcher
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml train_clm.py --preset codeparrot
    accelerate launch --config_file accelerate_configs/tpu.yaml train_clm.py   # one TPU host

Run the same command again and it continues where it stopped. `--help` lists the settings, the fields of
TrainArgs below: edit them there, or give them as flags.

Shapes: B rows per micro-batch, T tokens per row (block_size), V vocabulary. A step is an optimizer step.
"""

import math
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # before an installed `utils`; TPU appends it

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, set_seed

from data.encode import id_count
from data.open import Recipe, open_sources, prepare
from data.tokenizer import keytoken_ids
from utils.display.preview import show_rows
from utils.display.trackers import check_trackers
from utils.entry import entry_point
from utils.flags import parse_args
from utils.learning.compiled import compile_blocks
from utils.learning.losses import CausalLMLoss, keytoken_row_weights, keytoken_table
from utils.learning.model import build_model, model_problems
from utils.learning.optim import Means, UpdateGuard, build_optimizer, build_schedule
from utils.run import Run
from utils.settings import common_problems, evaluate_what_is_saved, saved_data, stop_at
from utils.state.preemption import handle_stop_signals
from utils.steps import Steps
from utils.tasks import CAUSAL
from utils.xla import autocast_forward, launcher_precision, sync

# Completed at every evaluation: they show what the loss does not. Does it write code yet?
PROMPTS = [
    "import numpy as np\nimport matplotlib.pyplot as plt\n\n"
    "x = np.random.randn(100)\ny = np.random.randn(100)\n\n# scatter plot of x against y\n",
    "import numpy as np\nimport pandas as pd\n\n"
    "x = np.random.randn(100)\ny = np.random.randn(100)\n\n# create a dataframe from x and y\n",
    "import pandas as pd\n\ndf = pd.DataFrame({'profession': jobs, 'income': incomes, 'name': names})\n\n"
    "# mean income per profession\n",
    "from sklearn.ensemble import RandomForestRegressor\n\n# fit a random forest with 300 trees to X, y\n",
]
LIBRARIES = ["pandas", "sklearn", "matplotlib", "seaborn"]
# Where --dataset_name names other data: all documents, and beginnings of evaluation rows as prompts.
OTHER_DATA = {"keywords": [], "prompts": ["rows"]}

# Names that most types share; name?: only where the type has it. Sizes not named scale along.
SMALL = "hidden_size=128,num_hidden_layers=4,num_attention_heads?=2,intermediate_size?=344"
SMALL += ",tie_word_embeddings?=true,resid_pdrop?=0,embd_pdrop?=0,attn_pdrop?=0"


@dataclass
class TrainArgs:
    preset: str = "laptop"  # a whole experiment from PRESETS below; flags given beside it win

    # What to learn from
    dataset_name: list[str] = field(default_factory=lambda: ["installed-python"])  # or Hub ids, files, shards
    mixture: list[float] = field(default_factory=list)  # of several: their shares of the tokens, sum 1
    dataset_config_name: list[str] = field(default_factory=list)  # configuration of a Hub data set
    eval_dataset_name: list[str] = field(default_factory=list)  # or several; none: a split, or held out
    text_column: list[str] = field(default_factory=list)  # one, or one each; none: content, else text
    keywords: list[str] = field(default_factory=LIBRARIES.copy)  # the default's documents hold one; none: all
    keep_duplicates: bool = False  # keep documents whose text repeats
    validation_fraction: float = 0.03  # of the documents, where the source has no validation split
    tokenizer_name: str | None = None  # a Hub id or folder; none: train a byte-level BPE on the corpus
    vocab_size: int = 4096  # of the trained tokenizer
    block_size: int = 128  # T, tokens per row
    max_train_samples: int = 0  # use only so many rows, the first ones; 0: all
    fim_rate: float = 0.0  # share of the documents that teach to fill in the middle; 0: off
    streaming: bool = False  # read the source while training, prepare nothing; needs max_train_steps
    stream_gb: float = 4.0  # GB of cache_dir for what is read ahead of training
    cache_dir: str = "cache"  # prepared rows and trained tokenizers

    # Model
    model_type: str = "qwen3"  # any causal model of transformers, from scratch
    config_overrides: str = SMALL  # configuration (?=: if the type has it); yours replace all of these
    model_name_or_path: str | None = None  # continue from these weights and their tokenizer, not from scratch
    attn_implementation: str = "auto"  # sdpa, eager, local, window: docs/masked.md

    # Optimization
    per_device_train_batch_size: int = 32  # B, rows
    per_device_eval_batch_size: int = 32  # rows
    gradient_accumulation_steps: int = 1  # micro-batches per step
    optimizer_type: str = "muon"  # on the hidden layers' matrices, AdamW on the rest; or adamw on all
    learning_rate: float = 4e-2  # peak, of AdamW; about 2e-3 if adamw trains all
    muon_learning_rate: float = 5e-3  # peak, of the matrices that Muon trains; 0: learning_rate
    weight_decay: float = 0.1  # on matrices and embeddings only
    adam_beta2: float = 0.95  # AdamW's beta2; its beta1 is 0.9
    lr_scheduler_type: str = "cosine"  # linear, constant_with_warmup, warmup_stable_decay, ...
    num_warmup_steps: float = 0.04  # steps; below 1: a share of all steps
    num_decay_steps: float = 0.2  # of warmup_stable_decay, at its end; below 1: a share
    min_lr_ratio: float = 0.0  # final learning rate / peak
    num_train_epochs: float = 1.0  # passes over the rows; used where max_train_steps is 0
    max_train_steps: int = 1000  # steps; 0: num_train_epochs decides
    max_grad_norm: float = 1.0  # 0: no clipping
    gradient_checkpointing: bool = False  # compute blocks again in the backward pass: less memory, slower
    keytokens: list[str] = field(default_factory=list)  # rows with these get a larger loss weight; none: off
    keytoken_alpha: float = 1.0  # row weight 1 + alpha * occurrences; 0: plain cross-entropy
    max_skipped_updates: int = 20  # updates in a row that are not finite before the run gives up

    # When to log, evaluate, save
    logging_steps: int = 50  # steps
    eval_at_start: bool = True  # evaluate before the first step, too
    eval_steps: int = 250  # steps; 0: once per epoch
    save_steps: int = 250  # steps; 0: once per epoch
    save_total_limit: int = 2  # newest checkpoints kept
    keep_best: bool = False  # also the model of the lowest evaluation loss, in output_dir/best
    milestones: list[str] = field(default_factory=list)  # steps, or log: models kept for good; none: off
    max_eval_samples: int = 512  # rows per evaluation; 0: all
    prompts: list[str] = field(default_factory=PROMPTS.copy)  # completed at evaluations; none: off

    # The run
    output_dir: str = "runs/clm"  # one run, one folder
    seed: int = 42  # of weights, order, dropout
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
    "gpt2": dict(  # the same with GPT-2's layers and learned positions
        model_type="gpt2", learning_rate=1e-2, output_dir="runs/gpt2",
        config_overrides="n_embd=128,n_layer=4,n_head=4,resid_pdrop=0,embd_pdrop=0,attn_pdrop=0",
    ),
    "codeparrot": dict(  # the Hugging Face course, chapter 7.6: GPT-2 of 124 M for data science code
        dataset_name="huggingface-course/codeparrot-ds-train", keywords=[],
        eval_dataset_name=["huggingface-course/codeparrot-ds-valid"], max_eval_samples=0,
        tokenizer_name="huggingface-course/code-search-net-tokenizer",
        model_type="gpt2",
        config_overrides="max_position_embeddings=1024",  # GPT-2's; rows of 128 train the first 128
        keytokens=["plt", "pd", "sk", "fit", "predict"], lr_scheduler_type="linear",
        per_device_train_batch_size=32, gradient_accumulation_steps=8,
        optimizer_type="adamw", learning_rate=5e-4, adam_beta2=0.999,
        num_warmup_steps=1000, max_train_steps=0, logging_steps=50, eval_steps=5000, save_steps=5000,
        output_dir="runs/codeparrot",
    ),
    "gpt2-124m": dict(  # llm.c's GPT-2 of 124 M, on web text, 0.5 M tokens per step on one device
        dataset_name="HuggingFaceFW/fineweb-edu", dataset_config_name="sample-10BT", streaming=True,
        keywords=[], tokenizer_name="openai-community/gpt2", keytokens=[], block_size=1024,
        model_type="gpt2",
        config_overrides="vocab_size=50304,resid_pdrop=0,embd_pdrop=0,attn_pdrop=0",  # 50257, to 64 x 786
        per_device_train_batch_size=32, gradient_accumulation_steps=16, optimizer_type="adamw",
        learning_rate=6e-4, num_warmup_steps=700, max_train_steps=19000, eval_steps=1000, save_steps=1000,
        prompts=["rows"], output_dir="runs/gpt2-124m",
    ),
}


def check_args(args: TrainArgs) -> list[str]:
    """Every problem that can be seen in the settings alone, a line each."""
    problems = common_problems(args)
    if not 0 <= args.fim_rate <= 1:
        problems.append(f"fim_rate: must be 0 (off) to 1, is {args.fim_rate}.")
    if args.block_size == 1:
        problems.append("block_size: must be at least 2, a row of one token has nothing to predict.")
    return problems


@entry_point
def main(args: TrainArgs | None = None) -> None:
    # ---- Settings and sources: every mistake at once, before any work
    args = args or parse_args(TrainArgs, PRESETS, other_data=OTHER_DATA)
    evaluate_what_is_saved(args)
    problems = check_args(args)
    sources = open_sources(Recipe.of(args, algorithm="bpe", saved=saved_data(args)), problems)
    build = dict(
        kind="causal", model_type=args.model_type, config_overrides=args.config_overrides,
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
    run = Run(args, accelerator, CAUSAL)

    # ---- Data: tokenizer, rows [n, T], prepared once per machine
    data = prepare(sources, accelerator)
    data.tokenizer.model_max_length = args.block_size  # saved with it
    steps = Steps(args, accelerator, data.length)
    ids, not_single = keytoken_ids(data.tokenizer, args.keytokens)
    keytokens = keytoken_table(ids, id_count(data.tokenizer), accelerator.device)  # [V], 1 at key tokens
    if not_single:
        names = ", ".join(map(repr, not_single))
        accelerator.print(f"keytokens: ignored, because the tokenizer splits them: {names}")
    if args.show:
        return show_rows(args.show, data, steps, keytokens, args.keytoken_alpha)

    # ---- Model, loss, optimizer, schedule
    set_seed(args.seed)
    lm = build_model(**build, tokenizer=data.tokenizer)
    if args.gradient_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    model = CausalLMLoss(lm).to(accelerator.device)  # token_loss=... for one of your own
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
    means = Means(accelerator, "train", "train_plain")  # of the weighted loss and the plain one

    # A batch: input_ids [B, T]; and of each row [B] its position in the stream, epoch, row (-1: padding of an
    # evaluation) and source, the number of its data set.
    def update(micro_batches: list[dict]) -> None:
        """One optimizer step: forward and backward of every micro-batch, then the update."""
        for i, batch in enumerate(micro_batches, 1):
            last = i == len(micro_batches)
            with nullcontext() if last else accelerator.no_sync(model):  # gradients are all-reduced once
                weights = keytoken_row_weights(batch["input_ids"], keytokens, args.keytoken_alpha)  # [B]
                loss, row_losses = model(batch, weights)  # scalar; [B], unweighted, no gradient
                accelerator.backward(loss / len(micro_batches))
            means.add(loss, row_losses.mean())
            if not last:
                sync()
        grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
        skipped = guard.check(grad_norm)  # 1.0 if not finite: the optimizer then skips the step
        means.end_step(skipped, len(micro_batches))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        sync()

    def evaluate(batch: dict) -> dict:
        """{name: (sums, counts)}, both [B] or both 0-d; padding rows count 0."""
        _, row_losses = model(batch)  # [B], each the mean over T - 1 predictions
        rows, predicted = (batch["row"] >= 0).float(), batch["input_ids"].shape[1] - 1
        return {"loss/eval": (row_losses * rows * predicted, rows * predicted)}

    # ---- The loop
    # What checkpoints hold. Add objects of your own that have state_dict and load_state_dict.
    keep = dict(optimizer=optimizer, schedule=schedule, guard=guard, means=means)
    if args.eval_only:
        return run.evaluate_only(model, evaluate, data, keep)
    if not run.start(model, update, evaluate, data, steps, keep):
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
