"""Pretrain a GPT-2-like language model from scratch, for code completion by default.

    python train_clm.py                                                        # this machine, one process
    accelerate launch --config_file accelerate_configs/cpu.yaml train_clm.py   # the same through the launcher
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml train_clm.py --preset codeparrot
    accelerate launch --config_file accelerate_configs/tpu.yaml train_clm.py   # one TPU host

Run the same command again and it continues where it stopped. `--help` lists the settings, the fields of
TrainArgs below: edit them there, or give them as flags. Edit main, too: docs/editing.md shows how, and
`python -m utils.check train_clm.py` tells what still holds. Every process runs every line of main, and many
lines wait for the others: Log, Hub and save_model write on the first process by themselves.

Shapes: B rows per micro-batch, T tokens per row (block_size), V vocabulary. A step is an optimizer step.
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

from data.load import eval_loader, load_rows, train_loader
from utils.display.log import Log, print_evaluation
from utils.display.samples import complete_prompts, show_rows
from utils.flags import parse_args
from utils.launch import check_launch, launch_options
from utils.learning.losses import CausalLMLoss, keytoken_row_weights, keytoken_table
from utils.learning.model import build_model, to_device
from utils.learning.optim import UpdateGuard, build_optimizer, build_schedule
from utils.publishing.export import save_model
from utils.publishing.hub import Hub
from utils.settings import check_settings
from utils.state.checkpoints import Checkpoints
from utils.state.stop_signals import StopSignals
from utils.steps import Steps


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
    tokenizer_name: str | None = None  # a Hub id or folder; none: train a byte-level BPE on the corpus
    vocab_size: int = 4096  # of the trained tokenizer
    block_size: int = 128  # T, tokens per row
    max_train_samples: int = 0  # use only so many rows, the first ones; 0: all
    streaming: bool = False  # read the source over the network while it is prepared; download nothing first
    cache_dir: str = "cache"  # prepared rows and trained tokenizers

    # Model
    model_type: str = "qwen3"  # any causal model of transformers, from scratch
    config_overrides: str = (  # sizes by transformers' names; a flag changes those that it names
        "hidden_size=128,num_hidden_layers=4,num_attention_heads=2,num_key_value_heads=2,head_dim=64,"
        "intermediate_size=344,tie_word_embeddings=true"
    )
    model_name_or_path: str | None = None  # continue from these weights and their tokenizer, not from scratch

    # Optimization
    per_device_train_batch_size: int = 32  # B, rows
    per_device_eval_batch_size: int = 32  # rows
    gradient_accumulation_steps: int = 1  # micro-batches per step
    optimizer_type: str = "muon"  # on the hidden layers' matrices, AdamW on the rest; or adamw on all
    learning_rate: float = 4e-2  # peak, of AdamW; about 2e-3 if adamw trains all
    muon_learning_rate: float = 5e-3  # peak, of the matrices that Muon trains; 0: learning_rate
    weight_decay: float = 0.1  # on matrices and embeddings only
    adam_beta2: float = 0.95  # AdamW's beta2; its beta1 is 0.9
    lr_scheduler_type: str = "linear"  # of transformers: cosine, constant_with_warmup, ...
    lr_scheduler_kwargs: str | None = None  # its options: cosine_with_min_lr takes min_lr_rate=0.1
    num_warmup_steps: float = 0.04  # steps; below 1: a share of all steps
    num_train_epochs: float = 1.0  # passes over the rows, where max_train_steps is 0; the flag sets it to 0
    max_train_steps: int = 1800  # steps; 0: num_train_epochs decides
    max_grad_norm: float = 1.0  # 0: no clipping
    gradient_checkpointing: bool = False  # compute blocks again in the backward pass: less memory, slower
    keytokens: list[str] = field(default_factory=list)  # rows with these get a larger loss weight; none: off
    keytoken_alpha: float = 1.0  # row weight 1 + alpha * occurrences; 0: plain cross-entropy

    # When to log, evaluate, save
    logging_steps: int = 50  # steps; 0: once per epoch
    eval_at_start: bool = True  # evaluate before the first step, too
    eval_steps: int = 300  # steps; 0: once per epoch
    save_steps: int = 300  # steps; 0: once per epoch
    save_total_limit: int = 2  # newest checkpoints kept
    max_eval_samples: int = 512  # rows per evaluation; 0: all
    prompts: list[str] = field(default_factory=lambda: ["rows"])  # rows: complete evaluation rows; none: off

    # The run
    output_dir: str = "runs/clm"  # one run, one folder
    seed: int = 42  # of weights, order, dropout
    resume_from_checkpoint: str = "auto"  # auto: the newest valid one, if any; none: start anew; or a path
    eval_only: bool = False  # of model_name_or_path, or of output_dir's run, with its settings
    show: int = 0  # print so many rows as the model is fed them, and end; 0: train
    report_to: list[str] = field(default_factory=list)  # tensorboard, wandb, trackio; none: off
    push_to_hub: bool = False  # publish each save in the background
    hub_model_id: str | None = None  # user/name; none: the name of output_dir
    hub_private_repo: bool = False  # seen by its owner alone


LAPTOP = dict(  # the Python code on this machine: no network, minutes on two cores
    dataset_name="installed-python", keywords=["pandas", "sklearn", "matplotlib", "seaborn"],
    prompts=[
        "import numpy as np\nimport matplotlib.pyplot as plt\n\n"
        "x = np.random.randn(100)\ny = np.random.randn(100)\n\n# scatter plot of x against y\n",
        "import numpy as np\nimport pandas as pd\n\n"
        "x = np.random.randn(100)\ny = np.random.randn(100)\n\n# create a dataframe from x and y\n",
        "import pandas as pd\n\ndf = pd.DataFrame({'profession': jobs, 'income': incomes, 'name': names})\n\n"
        "# mean income per profession\n",
        "from sklearn.ensemble import RandomForestRegressor\n\n"
        "# fit a random forest with 300 trees to X, y\n",
    ],
)
PRESETS = {
    "laptop": LAPTOP,  # the first run: the Python code on this machine, minutes on two cores, no network
    "hour": LAPTOP | dict(  # laptop's text, a larger model, longer rows: an hour on two cores
        block_size=256, max_train_steps=2500, eval_steps=500, save_steps=500,
        config_overrides="hidden_size=256,num_hidden_layers=6,num_attention_heads=4,num_key_value_heads=4"
        ",head_dim=64,intermediate_size=688,tie_word_embeddings=true", output_dir="runs/hour",
    ),
    "gpt2": LAPTOP | dict(  # laptop's text and sizes, with GPT-2's layers and learned positions
        model_type="gpt2", learning_rate=1e-2,
        config_overrides="n_embd=128,n_layer=4,n_head=4,resid_pdrop=0,embd_pdrop=0,attn_pdrop=0",
        output_dir="runs/gpt2",
    ),
    "codeparrot": dict(  # the Hugging Face course, chapter 7.6: GPT-2 of 124 M for data science code
        dataset_name="huggingface-course/codeparrot-ds-train",
        eval_dataset_name=["huggingface-course/codeparrot-ds-valid"], max_eval_samples=0,
        tokenizer_name="huggingface-course/code-search-net-tokenizer",
        model_type="gpt2",
        config_overrides="max_position_embeddings=1024",  # GPT-2's; rows of 128 train the first 128
        keytokens=["plt", "pd", "sk", "fit", "predict"], lr_scheduler_type="linear",
        per_device_train_batch_size=32, gradient_accumulation_steps=8,
        optimizer_type="adamw", learning_rate=5e-4, adam_beta2=0.999,
        num_warmup_steps=1000, max_train_steps=0, logging_steps=50, eval_steps=5000, save_steps=5000,
        prompts=LAPTOP["prompts"],
        output_dir="runs/codeparrot",
    ),
    "gpt2-124m": dict(  # llm.c's GPT-2 of 124 M, on web text, 0.5 M tokens per step on one device
        dataset_name="HuggingFaceFW/fineweb-edu", dataset_config_name="sample-10BT", streaming=True,
        tokenizer_name="openai-community/gpt2", block_size=1024,
        model_type="gpt2",
        config_overrides="vocab_size=50304,resid_pdrop=0,embd_pdrop=0,attn_pdrop=0",  # 50257 in 64 x 786
        per_device_train_batch_size=32, gradient_accumulation_steps=16, optimizer_type="adamw",
        learning_rate=6e-4, num_warmup_steps=700, max_train_steps=19000, lr_scheduler_type="cosine",
        eval_steps=1000, save_steps=1000, validation_fraction=0.03,
        output_dir="runs/gpt2-124m",
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
    check_settings(args, "causal")  # raises what settings and model can tell, before any work
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
    with accelerator.local_main_process_first():  # it prepares the rows, the others find them in cache_dir
        tokenizer, rows, eval_rows = load_rows(args)
    keytokens = keytoken_table(args.keytokens, tokenizer, accelerator.device)  # float [V], 1 at key tokens
    if args.show:
        return show_rows(args, accelerator, train_loader(rows, args), tokenizer, keytokens)

    # ---- Model and optimizer
    set_seed(args.seed)
    model = CausalLMLoss(build_model(args, "causal", tokenizer))  # (batch, row weights) -> loss, row losses
    to_device(model, accelerator)  # before the optimizer: on XLA it makes new parameters
    optimizer = build_optimizer(model, args)  # Muon for hidden matrices, AdamW for the rest; or AdamW for all
    model, optimizer = accelerator.prepare(model, optimizer)
    eval_batches = {name: accelerator.prepare(eval_loader(part, args)) for name, part in eval_rows.items()}

    # A batch is a dict of input_ids [B, T] and, for each row [B], its position in the stream, epoch, row (its
    # number; -1 where the last batch of an evaluation is filled up) and source (the number of its data set).
    def evaluate() -> dict:
        """{metric: value} over each evaluation set, each row once."""
        set_seed(args.seed)
        model.eval()
        record = {}
        for name, loader in eval_batches.items():
            losses, row_numbers = [], []
            for batch in tqdm(loader, desc="evaluating", leave=False, disable=not sys.stderr.isatty()):
                with torch.no_grad():
                    losses.append(model(batch)[1])  # [B], each the mean over T - 1 predictions
                row_numbers.append(batch["row"])
            losses, row_numbers = accelerator.gather((torch.cat(losses), torch.cat(row_numbers)))
            losses = losses.cpu().double()[row_numbers.cpu() >= 0]  # of all processes
            loss = losses.mean().item()
            metrics = {
                "loss/eval": loss,  # keep this name: a resume looks for it
                "loss/eval_stderr": (losses.std() / math.sqrt(len(losses))).item(),
                "perplexity": math.exp(min(loss, 700)),
                "bits_per_byte": loss / math.log(2) / eval_rows[name].bytes_per_token,
                "eval_tokens": len(losses) * (args.block_size - 1),
            }
            record |= {f"{metric}/{name}".rstrip("/"): value for metric, value in metrics.items()}
        model.train()
        return record

    if args.eval_only:
        return print_evaluation(args, accelerator, evaluate())

    # ---- Schedule, log, and where the run continues
    steps = Steps(args, accelerator, rows)  # which rows a step takes, how many steps there are
    schedule = build_schedule(optimizer, args, steps.last)  # not prepared, or it would step per process
    guard = UpdateGuard(accelerator, optimizer)  # skips updates that are not finite
    log = Log(args, accelerator, steps, guard, "loss/train", "loss/train_plain")  # weighted, plain
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
    batches = train_loader(rows, args, steps.rows_before(step), steps.rows_before(steps.last))
    batches = iter(accelerator.prepare(batches))
    signals = StopSignals(accelerator)  # from here on a first signal lets the run save; before, it ends it

    # ---- The loop: evaluate and save when due, then one optimizer step. Step 0 saves, too: a run that cannot
    # save must fail now, not in an hour.
    while not log.finished:  # by an earlier start
        if log.evaluation_due(step):
            with log.timed("evaluation"):
                record = evaluate()
                samples = complete_prompts(accelerator, model, tokenizer, args.prompts, eval_rows)
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
        losses = torch.zeros(2, device=accelerator.device)
        for micro_step, batch in enumerate(micro_batches, 1):
            last = micro_step == len(micro_batches)
            with nullcontext() if last else accelerator.no_sync(model):  # gradients are all-reduced once
                weights = keytoken_row_weights(batch["input_ids"], keytokens, args.keytoken_alpha)  # [B]
                loss, row_losses = model(batch, weights)  # scalar; [B], unweighted, no gradient
                accelerator.backward(loss / len(micro_batches))
            losses += torch.stack([loss.detach(), row_losses.mean()]) / len(micro_batches)
        grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
        skipped = guard.check(grad_norm)  # 1.0 if not finite: the optimizer then changes nothing
        learning_rate = schedule.get_last_lr()[0]  # of this step, of the first group (AdamW's)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        step += 1
        log.add(step, losses, skipped)
        if steps.due(step, args.logging_steps):
            log.train(step, learning_rate)

    pushed = hub.finish(step)  # waits until the last save has arrived; False: a message says how to upload it
    log.finish(step)
    signals.exit_if_stopped(finished=step >= steps.last)  # status 143 after SIGTERM, 130 after Ctrl-C
    if not pushed:
        sys.exit(1)


if __name__ == "__main__":
    main()
