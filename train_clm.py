"""Pretrain a GPT-2-like language model from scratch, for code completion by default.

    python train_clm.py                                                        # this machine, one process
    accelerate launch --config_file accelerate_configs/cpu.yaml train_clm.py   # the same through the launcher
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml train_clm.py --preset codeparrot
    accelerate launch --config_file accelerate_configs/tpu.yaml train_clm.py   # one TPU host

Run the same command again and it continues where it stopped. `--help` lists the settings, the fields of
TrainArgs below: edit them there, or give them as flags.

Shapes: B rows per micro-batch, T tokens per row (block_size), V vocabulary. A step is an optimizer step.
"""

import json
import math
import shlex
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # before any installed `utils`: TPU appends it

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, set_seed

from data.packing import trained_tokenizer
from data.rows import evaluation_loader, rows_from_shards, rows_from_text, training_loader
from data.shards import fetch_tokenizer, is_shards
from data.sources.corpus import has_split, load_corpus
from data.tokenizer import keytoken_ids, load_tokenizer
from utils import xla
from utils.display.curves import draw_curves
from utils.display.doctor import check_devices, check_launch, report
from utils.display.metrics import (
    MetricsLog,
    Throughput,
    check_trackers,
    device_name,
    flops_per_token,
    log_to_trackers,
    peak_flops,
    start_trackers,
)
from utils.display.plan import peak_memory
from utils.display.progress import Progress, duration, quiet_libraries, summarize
from utils.learning.evaluation import complete_prompts, perplexity_metrics, sum_over_dataset
from utils.learning.losses import CausalLMLoss, keytoken_row_weights, keytoken_table
from utils.learning.model import build_model, model_problems
from utils.learning.optim import (
    UpdateGuard,
    build_optimizer,
    build_schedule,
    describe_groups,
    skipped_updates,
)
from utils.publishing.export import export_model
from utils.publishing.hub import HubPusher, check_hub, fetch_checkpoint
from utils.publishing.model_card import write_model_card
from utils.settings import attempt, entry_point, number_problems, output_dir_problems, parse_args, save_args
from utils.state.checkpoint import Checkpoints, changed_settings, disk_space, other_run
from utils.state.preemption import StopSignals, exit_status, install, lock_output_dir
from utils.state.rehearsal import rehearsal

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
KEYTOKENS = ["plt", "pd", "sk", "fit", "predict", "plot", "import", "numpy", "pandas", "array", "self"]


@dataclass
class TrainArgs:
    preset: str = "laptop"  # a whole experiment from PRESETS below; flags given beside it win

    # What to learn from
    dataset_name: str = "installed-python"  # or a Hub id, a file, folder or glob, token shards
    dataset_config_name: str | None = None  # configuration of a Hub data set
    eval_dataset_name: str | None = None  # none: the source's validation split, else a part of it
    text_column: str | None = None  # none: content, else text
    keywords: list[str] = field(default_factory=LIBRARIES.copy)  # documents must hold one; none: all
    validation_fraction: float = 0.03  # of the documents, where the source has no validation split
    tokenizer_name: str | None = None  # a Hub id or folder; none: train a byte-level BPE on the corpus
    vocab_size: int = 4096  # of the trained tokenizer
    block_size: int = 128  # T, tokens per row
    streaming: bool = False  # read the source while training, prepare nothing; needs max_train_steps
    cache_dir: str = "cache"  # prepared rows and trained tokenizers

    # Model
    model_type: str = "gpt2"  # any causal model of transformers, from scratch
    config_overrides: str = "n_layer=4,n_embd=192,n_head=6,resid_pdrop=0,embd_pdrop=0,attn_pdrop=0"
    model_name_or_path: str | None = None  # continue from these weights instead of from scratch

    # Optimization
    per_device_train_batch_size: int = 8  # B, rows
    per_device_eval_batch_size: int = 32  # rows
    gradient_accumulation_steps: int = 1  # micro-batches per step
    learning_rate: float = 2e-3  # peak
    weight_decay: float = 0.1  # on matrices and embeddings only
    adam_beta2: float = 0.95  # of AdamW's second moment; 0.9 of its first
    lr_scheduler_type: str = "cosine"  # linear, cosine, constant, constant_with_warmup, ...
    num_warmup_steps: int = 100  # steps
    num_train_epochs: float = 1.0  # passes over the rows; used where max_train_steps is 0
    max_train_steps: int = 2800  # steps; 0: num_train_epochs decides
    max_grad_norm: float = 1.0  # 0: no clipping
    keytokens: list[str] = field(default_factory=KEYTOKENS.copy)  # rows with these weigh more; none: off
    keytoken_alpha: float = 1.0  # row weight 1 + alpha * occurrences; 0: plain cross-entropy
    max_skipped_updates: int = 20  # updates in a row that are not finite before the run gives up
    skip_outlier_updates: float = 0.0  # skip gradient norms so many times the usual, too; 0: off

    # When to log, evaluate, save
    logging_steps: int = 25  # steps
    eval_steps: int = 700  # steps
    save_steps: int = 700  # steps
    save_total_limit: int = 2  # newest checkpoints kept
    background_save: bool = True  # write checkpoints beside training; false: training waits
    max_eval_samples: int = 512  # rows per evaluation; 0: all
    prompts: list[str] = field(default_factory=PROMPTS.copy)  # completed at each evaluation; none: off

    # The run
    output_dir: str = "runs/clm"  # one run, one folder
    seed: int = 42
    resume_from_checkpoint: str = "auto"  # auto: the newest valid one, if any; none: start anew; or a path
    preflight: bool = True  # exercise every later stage once before the first step
    eval_only: bool = False  # evaluate model_name_or_path, or the model in output_dir, and end
    report_to: str = "none"  # tensorboard, wandb, trackio
    log_level: str = "error"  # of the libraries
    push_to_hub: bool = False  # publish each save in the background
    hub_model_id: str | None = None  # user/name; none: the name of output_dir
    hub_private_repo: bool = False
    push_checkpoints: bool = False  # publish the training state too, to continue on another machine
    hub_timeout: float = 600.0  # seconds to wait for the last push


PRESETS = {
    "laptop": {},  # the defaults above: minutes on two cores, no network
    "codeparrot": dict(  # the Hugging Face course's model: 124 M parameters, Python for data science
        dataset_name="huggingface-course/codeparrot-ds-train", keywords=[],
        eval_dataset_name="huggingface-course/codeparrot-ds-valid", max_eval_samples=0,
        tokenizer_name="huggingface-course/code-search-net-tokenizer", config_overrides="",
        per_device_train_batch_size=32, gradient_accumulation_steps=8, learning_rate=5e-4, adam_beta2=0.999,
        num_warmup_steps=1000, max_train_steps=0, logging_steps=50, eval_steps=5000, save_steps=5000,
        output_dir="runs/codeparrot",
    ),
    "gpt2-124m": dict(  # GPT-2 small on web text, 0.5 M tokens per step on one device: the speed reference
        dataset_name="HuggingFaceFW/fineweb-edu", dataset_config_name="sample-10BT", streaming=True,
        keywords=[], tokenizer_name="openai-community/gpt2", keytokens=[], block_size=1024,
        config_overrides="vocab_size=50304,resid_pdrop=0,embd_pdrop=0,attn_pdrop=0",  # 50257, to 64 x 786
        per_device_train_batch_size=32, gradient_accumulation_steps=16, learning_rate=6e-4,
        num_warmup_steps=700, max_train_steps=19000, eval_steps=1000, save_steps=1000,
        output_dir="runs/gpt2-124m",
    ),
}
# A run may be continued with other values of these: they change what is seen and kept, not what is learnt.
# The batch may be divided otherwise; the rows per step are compared instead.
MAY_CHANGE = set(
    "preset cache_dir output_dir resume_from_checkpoint preflight eval_only logging_steps eval_steps "
    "save_steps save_total_limit background_save prompts report_to log_level push_to_hub hub_model_id "
    "hub_private_repo push_checkpoints hub_timeout max_skipped_updates max_eval_samples "
    "per_device_eval_batch_size per_device_train_batch_size gradient_accumulation_steps".split()
)
MAY_BE_ZERO = set(
    "weight_decay num_warmup_steps max_train_steps num_train_epochs max_grad_norm keytoken_alpha adam_beta2 "
    "seed skip_outlier_updates max_eval_samples".split()
)


def check_args(args: TrainArgs) -> list[str]:
    """Every problem that can be seen in the settings alone, a line each."""
    problems = number_problems(args, MAY_BE_ZERO) + output_dir_problems(args.output_dir)
    if not args.max_train_steps and not args.num_train_epochs:
        problems.append("max_train_steps and num_train_epochs: both are 0, set one of them.")
    if args.block_size == 1:
        problems.append("block_size: must be at least 2, a row of one token has nothing to predict.")
    if args.validation_fraction >= 1:
        problems.append(f"validation_fraction: must be less than 1, is {args.validation_fraction}.")
    if args.adam_beta2 >= 1:
        problems.append(f"adam_beta2: must be less than 1, is {args.adam_beta2}.")
    if args.max_train_steps and args.num_warmup_steps > args.max_train_steps:
        problems.append(f"num_warmup_steps: {args.num_warmup_steps} are more than max_train_steps, "
                        f"{args.max_train_steps}.")
    if args.streaming and not (args.max_train_steps and args.max_eval_samples):
        problems.append("streaming: a stream has no known length, set max_train_steps and max_eval_samples.")
    if args.streaming and not args.tokenizer_name and not is_shards(args.dataset_name):
        problems.append("streaming: set tokenizer_name; `python -m data.tokenizer` trains one on a stream.")
    if args.model_name_or_path and not args.tokenizer_name:
        problems.append("model_name_or_path: its weights go with one tokenizer, set tokenizer_name too.")
    if args.push_checkpoints and not args.push_to_hub:
        problems.append("push_checkpoints: needs push_to_hub.")
    return problems


@entry_point
def main(args: TrainArgs | None = None) -> None:
    # ---- Settings, all checked before any work
    install()  # from here on a stop signal ends the run in order
    args = args or parse_args(TrainArgs, PRESETS)
    if args.eval_only and not args.model_name_or_path:
        args.model_name_or_path = args.tokenizer_name = args.output_dir
        args.config_overrides = ""  # the saved configuration counts
    problems = check_args(args)
    attempt(problems, quiet_libraries, args.log_level)
    trackers = attempt(problems, check_trackers, args.report_to)
    shards = attempt(problems, is_shards, args.dataset_name)
    if shards and not args.tokenizer_name:
        args.tokenizer_name = fetch_tokenizer(args.dataset_name, args.cache_dir)
    corpus = eval_corpus = None
    source = {"dataset_config_name": args.dataset_config_name, "text_column": args.text_column}
    if not shards:
        corpus = attempt(problems, load_corpus, args.dataset_name, **source, streaming=args.streaming)
        if args.eval_dataset_name:
            eval_corpus = attempt(problems, load_corpus, args.eval_dataset_name, text_column=args.text_column)
        elif corpus and has_split(args.dataset_name, args.dataset_config_name, "validation"):
            eval_corpus = attempt(problems, load_corpus, args.dataset_name, split="validation", **source)
    tokenizer = attempt(problems, load_tokenizer, args.tokenizer_name) if args.tokenizer_name else None
    problems += model_problems(
        "causal", args.model_type, args.config_overrides, args.model_name_or_path, args.block_size, tokenizer
    )
    if not args.eval_only:
        problems += other_run(asdict(args), MAY_CHANGE)
    if problems:
        raise ValueError("\n".join(problems))

    # ---- Processes and devices
    check_devices()
    accelerator = Accelerator(
        mixed_precision=xla.launcher_precision(),
        # SampleOrder gives whole steps only: accelerate must not end one early at a supposed last batch
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=args.gradient_accumulation_steps, sync_with_dataloader=False
        ),
        log_with=trackers or None, project_dir=args.output_dir,
    )
    check_launch(accelerator)
    is_main = accelerator.is_main_process
    repo_id, name = None, args.hub_model_id or Path(args.output_dir).resolve().name
    if args.push_to_hub and is_main:
        repo_id = check_hub(name, args.hub_private_repo, args.push_checkpoints)

    # ---- Text to rows [n, T], prepared once per machine
    text = {"keywords": args.keywords, "cache_dir": args.cache_dir}
    if tokenizer is None:
        tokenizer = trained_tokenizer(
            corpus, vocab_size=args.vocab_size, algorithm="bpe", model_type=args.model_type, **text
        )
    if shards:
        rows = rows_from_shards(
            args.dataset_name, tokenizer, block_size=args.block_size, cache_dir=args.cache_dir,
            streaming=args.streaming,
        )
    else:
        rows = rows_from_text(
            corpus, tokenizer, block_size=args.block_size, eval_corpus=eval_corpus, seed=args.seed,
            validation_fraction=args.validation_fraction, streaming=args.streaming,
            max_eval_rows=args.max_eval_samples, **text,
        )
    rows_per_process = args.per_device_train_batch_size * args.gradient_accumulation_steps
    rows_per_step = rows_per_process * accelerator.num_processes
    tokens_per_step = rows_per_step * args.block_size
    max_steps = args.max_train_steps or int(rows.length * args.num_train_epochs) // rows_per_step
    if max_steps < 1 or (rows.length or rows_per_step) < rows_per_step:
        raise ValueError(
            f"dataset_name: {args.dataset_name} gives {rows.length} rows of {args.block_size} tokens to "
            f"train on, and one step takes {rows_per_step}. Take more text, or lower block_size, "
            "per_device_train_batch_size or gradient_accumulation_steps."
        )
    eval_loader = evaluation_loader(accelerator, rows, args.per_device_eval_batch_size, args.max_eval_samples)

    # ---- Model, optimizer, schedule
    tokenizer.model_max_length = args.block_size  # saved with it
    set_seed(args.seed)
    lm = build_model(
        "causal", args.model_type, args.config_overrides, args.model_name_or_path, tokenizer, args.block_size
    )
    model = CausalLMLoss(lm).to(accelerator.device)
    lm.tie_weights()  # moving to XLA makes new parameters, and ties come apart
    optimizer = build_optimizer(model, args.learning_rate, args.weight_decay, betas=(0.9, args.adam_beta2))
    scheduler = build_schedule(optimizer, args.lr_scheduler_type, args.num_warmup_steps, max_steps)
    accelerator.print(describe_groups(optimizer))
    parameters, flops = lm.num_parameters(), flops_per_token(lm, args.block_size)  # before FSDP cuts them up
    memory = peak_memory(accelerator, lm.config, args.per_device_train_batch_size, args.block_size, "causal")
    enough_disk, disk = disk_space(args.output_dir, model, args.save_total_limit)
    if not enough_disk:
        raise ValueError(f"output_dir: {disk}.")
    model, optimizer = accelerator.prepare(model, optimizer)  # not the schedule: it would count processes too
    xla.autocast_forward(model)
    guard = UpdateGuard(accelerator, optimizer, args.skip_outlier_updates)
    keytoken_list, not_single = keytoken_ids(tokenizer, args.keytokens)
    keytokens = keytoken_table(keytoken_list, len(tokenizer), accelerator.device)  # [V], 1 at key tokens
    if not_single:
        accelerator.print(f"keytokens: without weight, not one token: {', '.join(map(repr, not_single))}")

    def batch_sums(batch: dict) -> torch.Tensor:
        """[loss sum over predicted tokens, predicted tokens]; padding rows count as nothing."""
        _, row_losses = model(batch["input_ids"])  # [B], each the mean over T - 1 predictions
        counted = (batch["row"] >= 0).float()
        return torch.stack([(row_losses * counted).sum(), counted.sum()]) * (args.block_size - 1)

    if args.eval_only:
        sums = sum_over_dataset(accelerator, model, eval_loader, batch_sums)
        accelerator.print(json.dumps(perplexity_metrics(*sums, rows.eval_bytes_per_token)))
        return

    # ---- The state of the run: beside weights and optimizer, all that shapes what comes next
    lock = lock_output_dir(args.output_dir) if is_main else None  # noqa: F841  until the end
    if is_main and args.push_checkpoints and args.resume_from_checkpoint == "auto":
        fetch_checkpoint(repo_id, args.output_dir)  # where this folder has none as new
    accelerator.wait_for_everyone()
    state = {"step": 0, "seconds": 0.0, "skipped_updates": 0, "eval": {}, "evaluation_due": False}
    facts = {"rows_per_step": rows_per_step, "max_steps": max_steps, "training_rows": rows.length}
    settings = asdict(args) | facts

    def check_saved(saved: dict) -> None:
        if changes := changed_settings(saved["settings"], settings, MAY_CHANGE):
            raise ValueError("\n".join(changes))

    checkpoints = Checkpoints(accelerator, args.output_dir, args.save_total_limit, args.background_save)
    saved = checkpoints.load(args.resume_from_checkpoint, model, optimizer, check_saved)
    if saved:
        state = saved["state"]
        scheduler.load_state_dict(saved["scheduler"])
        guard.load_state_dict(saved["guard"])
    pusher = HubPusher(repo_id, args.output_dir, push_checkpoints=args.push_checkpoints) if repo_id else None

    def push() -> None:
        if pusher:
            pusher.push(state["step"], {k: state["eval"].get(k) for k in ("loss/eval", "perplexity")})

    if state["step"] >= max_steps and not state["evaluation_due"]:
        accelerator.print(f"{args.output_dir}: this run is finished, {state['step']} steps; nothing to do.")
        push()  # the last one may have been cut off; nothing is sent that the Hub has
        if pusher and not pusher.finish(args.hub_timeout):
            raise SystemExit(1)
        return
    train_loader, stream = training_loader(
        accelerator, rows, args.per_device_train_batch_size, args.seed, start=state["step"] * rows_per_step,
        stop=max_steps * rows_per_step, stream_state=saved and saved["stream"],
    )

    # ---- What is seen of it
    if is_main:
        save_args(args, args.output_dir)
    metrics = MetricsLog(args.output_dir, saved["metrics_offset"] if saved else 0, is_main)
    start_trackers(accelerator, "train_clm", args.output_dir, asdict(args), state["step"])
    hardware = f"{accelerator.num_processes} x {device_name(accelerator.device)}"
    peak = peak_flops(device_name(accelerator.device))
    clock = Throughput(
        max_steps, tokens_per_step, flops, peak and peak * accelerator.num_processes,
        step=state["step"], seconds=state["seconds"],
        every={"evaluation": args.eval_steps, "save": args.save_steps},
    )
    progress = Progress(max_steps, state["step"], is_main)
    if pusher:
        pusher.say = progress.write  # above the bar
    stop = StopSignals(accelerator)
    accelerator.print(report(
        accelerator, model=args.model_name_or_path or args.model_type, parameters=parameters,
        rows=args.per_device_train_batch_size, accumulation=args.gradient_accumulation_steps,
        block_size=args.block_size, max_steps=max_steps, start=state["step"], memory=memory,
        precision=xla.xla_precision() if xla.is_xla() else None,
    ))
    accelerator.print(f"disk       {disk}")

    def log_pushes() -> None:
        for event in pusher.poll() if pusher else []:
            metrics.write({"step": state["step"], **event})

    def log(record: dict) -> None:
        log_pushes()
        record = {"step": state["step"], **record}
        metrics.write(record)
        log_to_trackers(accelerator, record)
        progress.update(state["step"], record, clock.eta, pusher.status if pusher else "")

    def evaluate() -> None:
        """Perplexity of the validation set, completions, curves. A stop signal ends it early, still due."""
        with clock.aside("evaluation"):
            sums = sum_over_dataset(accelerator, model, eval_loader, batch_sums, stop.agreed)
            state["evaluation_due"] = sums is None
            if sums is None:
                return
            state["eval"] = perplexity_metrics(*sums, rows.eval_bytes_per_token)
            log(state["eval"])
            completions = complete_prompts(accelerator, model, tokenizer, args.prompts)
            for prompt, completion in zip(args.prompts, completions, strict=False):
                progress.write(f"{prompt.strip().splitlines()[-1]}\n{completion.rstrip()}\n")
            if is_main:
                draw_curves(args.output_dir)

    def save(final: bool = False) -> None:
        """A checkpoint to continue from, the model for from_pretrained, and their push."""
        with clock.aside("save"):
            state["seconds"] = clock.seconds
            state["losses"] = [row[:3] for row in losses_by_process()]
            export_model(accelerator, model, tokenizer, args.output_dir)
            checkpoints.save(state["step"], model, optimizer, final=final, extra={
                "state": state, "settings": settings, "scheduler": scheduler.state_dict(),
                "guard": guard.state_dict(), "metrics_offset": metrics.offset,
                "stream": stream and stream.state_dict(state["step"] * rows_per_step),
            })
            if is_main:
                write_model_card(
                    args.output_dir, pipeline_tag="text-generation", model_name=name.split("/")[-1],
                    model_type=lm.config.model_type, parameters=parameters, dataset=args.dataset_name,
                    step=state["step"], max_steps=max_steps, tokens=state["step"] * tokens_per_step,
                    seconds=state["seconds"], hardware=hardware, settings=asdict(args), results=state["eval"],
                    example=args.prompts[0] if args.prompts else "", repo_id=repo_id,
                    base_model=args.model_name_or_path,
                )
            push()

    def losses_by_process() -> list[list[float]]:
        """[processes, 4]: `losses` and the newest gradient norm. Here alone the loop waits for the device."""
        return accelerator.gather(torch.cat([losses, guard.norm[None]])).cpu().view(-1, 4).tolist()

    def seed_step() -> None:
        """Random numbers are a function of (seed, step, process): evaluating or saving leaves no trace."""
        set_seed((args.seed * 1_000_003 + state["step"] * 4099 + accelerator.process_index) % 2**32)

    # ---- The loop
    losses = torch.zeros(3).to(accelerator.device)  # weighted, plain, steps: sums since the last log line
    if saved:
        mine = state["losses"][accelerator.process_index :: accelerator.num_processes]
        losses = torch.tensor(mine).sum(0).to(accelerator.device) if mine else losses
    step_losses = torch.zeros(2).to(accelerator.device)  # weighted, plain: over a step's micro-batches
    last, stopped_by = False, 0
    if args.preflight and not saved:
        with rehearsal(accelerator, model, optimizer, guard, tokenizer, checkpoints):
            if not xla.is_xla():  # there it would be graphs of its own, and the first step comes at once
                batch = next(iter(train_loader))
                accelerator.backward(model(batch["input_ids"])[0])
                guard.judge(accelerator.clip_grad_norm_(model.parameters(), 1.0))
                optimizer.step()
            sum_over_dataset(accelerator, model, [next(iter(eval_loader))], batch_sums)
            complete_prompts(accelerator, model, tokenizer, args.prompts[:1], max_new_tokens=2)
    if state["evaluation_due"]:  # a stop signal came during the evaluation of the step that was saved
        evaluate()
        if state["evaluation_due"]:  # and another one: all is saved
            raise SystemExit(exit_status(stop.agreed()))
        last = state["step"] == max_steps
        if last:
            save(final=True)
    for batch in train_loader:
        if accelerator.sync_gradients:  # the first micro-batch of a step
            seed_step()
        with accelerator.accumulate(model):
            weights = keytoken_row_weights(batch["input_ids"], keytokens, args.keytoken_alpha)  # [B]
            loss, row_losses = model(batch["input_ids"], weights)  # scalar; [B], unweighted
            accelerator.backward(loss)  # divides by gradient_accumulation_steps
            step_losses += torch.stack([loss.detach(), row_losses.mean()])
            if accelerator.sync_gradients:
                grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
                bad = guard.judge(grad_norm)  # 1. if not finite: then the step changes nothing
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        if not accelerator.sync_gradients:
            continue

        state["step"] += 1
        last = state["step"] == max_steps
        means = torch.cat([step_losses / args.gradient_accumulation_steps, torch.ones_like(bad)[None]])
        losses += torch.where(bad > 0, 0, means)
        step_losses.zero_()
        xla.sync()
        progress.update(state["step"])
        if last or state["step"] % args.logging_steps == 0:
            weighted, plain, steps, norms = map(sum, zip(*losses_by_process(), strict=True))
            losses = torch.zeros(3).to(accelerator.device)
            for record in skipped_updates(guard.read(), state["step"], rows_per_step):
                metrics.write(record)
                state["skipped_updates"] += 1
            log({
                "epoch": rows.length and state["step"] * rows_per_step / rows.length,
                "samples": state["step"] * rows_per_step, "tokens": state["step"] * tokens_per_step,
                "loss/train": weighted / steps if steps else None,
                "loss/train_plain": plain / steps if steps else None,
                "learning_rate": scheduler.get_last_lr()[0], "grad_norm": norms / accelerator.num_processes,
                "skipped_updates": state["skipped_updates"],
                **clock.measure(state["step"]),
            })
            if guard.consecutive > args.max_skipped_updates:
                break
        if last or state["step"] % args.eval_steps == 0:
            evaluate()
        stopped_by = stop.agreed()
        if last or stopped_by or state["step"] % args.save_steps == 0:
            save(final=bool(last or stopped_by))
        if stopped_by:
            break

    # ---- The end: nothing is left in flight
    progress.close()
    checkpoints.wait()
    arrived = pusher.finish(20 if stop.requested else args.hub_timeout) if pusher else True
    log_pushes()
    if guard.consecutive > args.max_skipped_updates:
        raise RuntimeError(
            f"{guard.consecutive} updates in a row were skipped, as their gradients are not finite. Lower "
            f"learning_rate, or look at the samples that {args.output_dir}/metrics.jsonl names."
        )
    if last and not state["evaluation_due"]:
        stopped_by = 0  # it came too late to stop anything
    if not (last or stopped_by):
        raise RuntimeError(f"the data ended at step {state['step']} of {max_steps}: see above")
    accelerator.end_training()
    stop.close()
    if stopped_by:
        accelerator.print(f"Stopped at step {state['step']} of {max_steps} and saved; run it again to go on.")
        raise SystemExit(exit_status(stopped_by))
    if is_main:
        print(summarize(args.output_dir, f"{args.model_type} on {args.dataset_name}", {
            "steps": max_steps, "tokens": max_steps * tokens_per_step, "time": duration(clock.seconds),
            **({"compiled graphs": xla.compiled_graphs()} if xla.is_xla() else {}),
            **state["eval"], "model": args.output_dir, "curves": f"{args.output_dir}/curves.png",
        }, {
            "generate": f"python -m utils.generate {args.output_dir} --prompt 'import numpy as np'",
            "evaluate": f"python {shlex.join(sys.argv)} --eval_only true",
            "publish": f"hf upload {name} {args.output_dir} . --exclude 'checkpoints/*'",
        }))
    if not arrived:
        raise SystemExit(1)


install(importing=True)  # the TPU launcher imports this file; it must pass a stop signal on to its children

if __name__ == "__main__":
    main()
