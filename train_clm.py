"""Pretrain a GPT-2-like language model from scratch, for code completion by default.

    python train_clm.py                                                        # this machine, one process
    accelerate launch --config_file accelerate_configs/cpu.yaml train_clm.py   # the same through the launcher
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml train_clm.py --preset codeparrot
    accelerate launch --config_file accelerate_configs/tpu.yaml train_clm.py   # one TPU host

Run the same command again to continue where it stopped. The settings are the fields of TrainArgs below:
edit a default, or pass a flag (`--help` lists them). Edit main as well: docs/editing.md shows how, and
`python -m utils.check train_clm.py` tests the edited script. Every process runs every line of main, and many
lines wait for all processes: never skip a line on some of them. Log, Hub, save_model write on process 0.

Shapes: B rows per micro-batch, T tokens per row (block_size), V vocabulary. A step is an optimizer step.
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
    preset: str | None = None  # one of PRESETS below; laptop if neither data nor weights are named

    # What to learn from
    dataset_name: list[str] = field(default_factory=list)  # files, folders, Hub ids or token shards
    mixture: list[float] = field(default_factory=list)  # share of the tokens from each dataset, if several
    dataset_config_name: str | None = None  # configuration of a Hub dataset
    eval_dataset_name: list[str] = field(default_factory=list)  # none: a validation split, or held-out text
    text_column: str | None = None  # in all datasets; none: the column content, else text
    keywords: list[str] = field(default_factory=list)  # train only on documents with any of these; none: off
    validation_fraction: float = 0.05  # of the documents, held out if the source has no validation split
    tokenizer_name: str | None = None  # a Hub id or folder; none: train a byte-level BPE on the corpus
    vocab_size: int = 4096  # of the trained tokenizer
    block_size: int = 128  # T, tokens per row
    max_train_samples: int = 0  # use only the first N rows; 0: all
    streaming: bool = False  # read a Hub dataset over the network, without downloading it first
    cache_dir: str = "cache"  # prepared rows and trained tokenizers

    # Model
    model_type: str = "qwen3"  # any causal model type of transformers, trained from scratch
    config_overrides: str = (  # fields of the model's config; the flag changes only those it lists
        "hidden_size=128,num_hidden_layers=4,num_attention_heads=2,num_key_value_heads=2,head_dim=64,"
        "intermediate_size=344,tie_word_embeddings=true"
    )
    model_name_or_path: str | None = None  # start from these weights and their tokenizer instead

    # Optimization
    per_device_train_batch_size: int = 32  # B, rows per micro-batch
    per_device_eval_batch_size: int = 32  # rows
    gradient_accumulation_steps: int = 1  # micro-batches per step
    optimizer_type: str = "muon"  # Muon for hidden matrices, AdamW for the rest; adamw: AdamW for all
    learning_rate: float = 4e-2  # peak, of AdamW; pass about 2e-3 with --optimizer_type adamw
    muon_learning_rate: float = 5e-3  # peak, of Muon; 0: the same as learning_rate
    weight_decay: float = 0.1  # on matrices and embeddings, not on biases and norms
    adam_beta2: float = 0.95  # AdamW's beta2; its beta1 is 0.9
    lr_scheduler_type: str = "linear"  # of transformers: cosine, constant_with_warmup, ...
    lr_scheduler_kwargs: str | None = None  # its arguments: min_lr_rate=0.1 for cosine_with_min_lr
    num_warmup_steps: float = 0.04  # steps; below 1: a share of all steps
    num_train_epochs: float = 1.0  # used if max_train_steps is 0, as --num_train_epochs sets it
    max_train_steps: int = 1800  # steps; 0: num_train_epochs decides
    max_grad_norm: float = 1.0  # 0: no clipping
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: less memory, slower
    keytokens: list[str] = field(default_factory=list)  # rows with these weigh more in the loss; none: off
    keytoken_alpha: float = 1.0  # row weight = 1 + alpha * occurrences; 0: plain cross-entropy

    # When to log, evaluate, save
    logging_steps: int = 50  # steps; 0: once per epoch
    eval_at_start: bool = True  # also evaluate before the first step
    eval_steps: int = 300  # steps; 0: once per epoch
    save_steps: int = 300  # steps; 0: once per epoch
    save_total_limit: int = 2  # keep this many of the newest checkpoints
    max_eval_samples: int = 512  # rows per evaluation, drawn by the seed; 0: all
    prompts: list[str] = field(default_factory=lambda: ["rows"])  # texts to complete; rows: evaluation rows

    # The run
    output_dir: str = "runs/clm"  # one folder per run
    seed: int = 42  # of weights, order, dropout
    resume_from_checkpoint: str = "auto"  # auto: the newest valid one, if any; none: a new run; or a path
    eval_only: bool = False  # evaluate model_name_or_path, or the run in output_dir, and exit
    show: int = 0  # print N rows as the model gets them, and exit; 0: train
    report_to: list[str] = field(default_factory=list)  # tensorboard, wandb, trackio; none: off
    push_to_hub: bool = False  # upload each save in the background
    hub_model_id: str | None = None  # user/name; none: the name of output_dir
    hub_private_repo: bool = False  # visible only to its owner


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
    "codeparrot": dict(  # the Hugging Face course, chapter 7.6: GPT-2 (124 M) for data science code
        dataset_name="huggingface-course/codeparrot-ds-train",
        eval_dataset_name=["huggingface-course/codeparrot-ds-valid"], max_eval_samples=0,
        tokenizer_name="huggingface-course/code-search-net-tokenizer",
        model_type="gpt2",
        config_overrides="max_position_embeddings=1024",  # as in GPT-2; rows of 128 use only the first 128
        keytokens=["plt", "pd", "sk", "fit", "predict"], lr_scheduler_type="linear",
        per_device_train_batch_size=32, gradient_accumulation_steps=8,
        optimizer_type="adamw", learning_rate=5e-4, adam_beta2=0.999,
        num_warmup_steps=1000, max_train_steps=0, logging_steps=50, eval_steps=5000, save_steps=5000,
        prompts=LAPTOP["prompts"],
        output_dir="runs/codeparrot",
    ),
    "gpt2-124m": dict(  # llm.c's GPT-2 (124 M), on web text, 0.5 M tokens per step on one device
        dataset_name="HuggingFaceFW/fineweb-edu", dataset_config_name="sample-10BT", streaming=True,
        tokenizer_name="openai-community/gpt2", block_size=1024,
        model_type="gpt2",
        config_overrides="vocab_size=50304,resid_pdrop=0,embd_pdrop=0,attn_pdrop=0",  # 50,257 rounded up
        per_device_train_batch_size=32, gradient_accumulation_steps=16, optimizer_type="adamw",
        learning_rate=6e-4, num_warmup_steps=700, max_train_steps=19000, lr_scheduler_type="cosine",
        eval_steps=1000, save_steps=1000, validation_fraction=0.03,
        output_dir="runs/gpt2-124m",
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
    check_settings(args, "causal")  # one error that lists all mistakes in settings and model, before any work
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
    with accelerator.local_main_process_first():  # prepares rows in cache_dir, where the others read them
        tokenizer, rows, eval_rows = load_rows(args)
    keytokens = keytoken_table(args.keytokens, tokenizer, accelerator.device)  # [V], 1 at key tokens, else 0
    if args.show:
        return show_rows(args, accelerator, train_loader(rows, args), tokenizer, keytokens)

    # ---- Model and optimizer
    set_seed(args.seed)
    model = CausalLMLoss(build_model(args, "causal", tokenizer))  # returns (loss, row losses [B])
    to_device(model, accelerator)  # before the optimizer is built: XLA replaces the parameters
    optimizer = build_optimizer(model, args)  # Muon for hidden matrices, AdamW for the rest
    model, optimizer = accelerator.prepare(model, optimizer)
    eval_loaders = {name: accelerator.prepare(eval_loader(part, args)) for name, part in eval_rows.items()}

    # A batch is a dict: input_ids [B, T], and for each row [B] its position in the training order, epoch, row
    # (its number, -1 for padding in the last batch of an evaluation) and source (the number of its dataset).
    def evaluate() -> dict:
        """Returns {metric: value} for all evaluation sets. Each row counts once."""
        set_seed(args.seed)  # the same random numbers in every evaluation; each training step reseeds
        model.eval()
        record = {}
        for name, loader in eval_loaders.items():
            losses, row_numbers = [], []
            for batch in tqdm(loader, desc="evaluating", leave=False, disable=not sys.stderr.isatty()):
                with torch.no_grad():
                    losses.append(model(batch)[1])  # [B], each the mean over T - 1 predictions
                row_numbers.append(batch["row"])
            losses, row_numbers = accelerator.gather((torch.cat(losses), torch.cat(row_numbers)))
            losses = losses.cpu().double()[row_numbers.cpu() >= 0]  # without padding
            loss = losses.mean().item()
            metrics = {
                "loss/eval": loss,  # keep this name: resuming reads it
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
    steps = Steps(args, accelerator, rows)  # how many steps there are, and which rows each one takes
    schedule = build_schedule(optimizer, args, steps.last)  # unprepared, or it would step once per process
    guard = UpdateGuard(accelerator, optimizer)  # skips a step whose gradient is not finite
    log = Log(args, accelerator, steps, guard, "loss/train", "loss/train_plain")  # key-token loss, plain loss
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
    batches = train_loader(rows, args, steps.rows_before(step), steps.rows_before(steps.last))
    batches = iter(accelerator.prepare(batches))
    signals = StopSignals(accelerator)  # from here on SIGTERM and Ctrl-C save before they end the run

    # ---- The loop: evaluate and save when due, then one optimizer step. Step 0 saves, too: a run that cannot
    # save must fail now, not in an hour.
    while not log.finished:  # skipped if an earlier start finished the run; else break ends it
        if log.evaluation_due(step):
            with log.timed("evaluation"):
                record = evaluate()
                samples = complete_prompts(accelerator, model, tokenizer, args.prompts, eval_rows)
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
        losses = torch.zeros(2, device=accelerator.device)
        for micro_step, batch in enumerate(micro_batches, 1):
            last = micro_step == len(micro_batches)
            with nullcontext() if last else accelerator.no_sync(model):  # gradients are all-reduced once
                weights = keytoken_row_weights(batch["input_ids"], keytokens, args.keytoken_alpha)  # [B]
                loss, row_losses = model(batch, weights)  # scalar; [B], unweighted, no gradient
                accelerator.backward(loss / len(micro_batches))
            losses += torch.stack([loss.detach(), row_losses.mean()]) / len(micro_batches)
        grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
        skipped = guard.check(grad_norm)  # 1.0 if grad_norm is not finite: optimizer.step() then does nothing
        learning_rate = schedule.get_last_lr()[0]  # of this step, of the first group (AdamW's)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        step += 1
        log.add(step, losses, skipped)
        if steps.due(step, args.logging_steps):
            log.train(step, learning_rate)

    pushed = hub.finish(step)  # waits for the last upload; False: it failed, and the message has a fix
    log.finish(step)
    signals.exit_if_stopped(finished=step >= steps.last)  # status 143 after SIGTERM, 130 after Ctrl-C
    if not pushed:
        sys.exit(1)


if __name__ == "__main__":
    main()
