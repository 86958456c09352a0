"""The values of the settings: what is wrong with them, which of them may change on a resume, args.json."""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import inspect
import math
import os
import platform
import shlex
import subprocess
from pathlib import Path
from typing import Any

from utils.display.doctor import check_devices, check_launcher
from utils.display.progress import quiet_libraries
from utils.display.trackers import check_trackers
from utils.flags import as_list
from utils.io.files import write_json
from utils.io.secrets import without_secrets
from utils.learning.optim import DECAYS, SCHEDULES
from utils.publishing.export import milestone_steps
from utils.state.folders import newest_extra

# These may change on a resume: they change what is shown and kept, not what is learnt. So may the division
# of a batch: the rows per step are compared instead.
MAY_CHANGE = set("""
    preset cache_dir output_dir resume_from_checkpoint preflight eval_only show logging_steps eval_steps
    eval_at_start keep_best save_steps save_total_limit prompts report_to log_level push_to_hub hub_model_id
    hub_private_repo checkpoint_url hub_timeout max_skipped_updates max_eval_samples milestones stable
    per_device_eval_batch_size per_device_train_batch_size gradient_checkpointing gradient_accumulation_steps
    attn_implementation stream_gb""".split())
# So may the length of a run while its learning rate is constant: `Resume` checks the step.
LENGTH_SETTINGS = {"max_train_steps", "num_train_epochs", "num_decay_steps", "max_steps"}
CONSTANT_SCHEDULES = ("constant", "constant_with_warmup", "warmup_stable_decay")
POSITIVE = set("""
    validation_fraction vocab_size block_size mlm_probability eval_mlm_probability learning_rate logging_steps
    per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps max_skipped_updates
    save_total_limit hub_timeout""".split())
NOT_NEGATIVE = set("""
    weight_decay num_warmup_steps max_train_steps num_train_epochs max_grad_norm keytoken_alpha adam_beta2
    num_decay_steps min_lr_ratio muon_learning_rate seed max_eval_samples eval_steps max_train_samples
    save_steps show""".split())
UPPER_BOUNDS = {"seed": 2**32, "min_lr_ratio": 1, "validation_fraction": 1, "adam_beta2": 1,
                "mlm_probability": 1, "eval_mlm_probability": 1}
PATH_BYTES = 4096 - 256  # of output_dir: the system's limit, less the names of files in it


def common_problems(args: Any) -> list[str]:
    """A line for each problem with the settings that both scripts have."""
    problems = number_problems(args)
    for name in ["cache_dir"] if args.eval_only else ["output_dir", "cache_dir"]:
        problems += folder_problems(name, getattr(args, name))
    checks = [(quiet_libraries, args.log_level), (check_trackers, args.report_to), (check_devices,)]
    checks += [(check_launcher,), (milestone_steps, args.milestones, args.max_train_steps)]
    for check, *values in checks:
        try:
            check(*values)
        except ValueError as error:
            problems.append(str(error))
    problems += _schedule_problems(args) + _length_problems(args)
    if args.model_name_or_path and not args.tokenizer_name:
        problems.append("model_name_or_path: its weights need their own tokenizer, set tokenizer_name too.")
    if args.checkpoint_url and not args.checkpoint_url.partition("://")[2].strip("/"):
        problems.append(f"checkpoint_url: {args.checkpoint_url} is not the URL of a folder; give "
                        "s3://bucket/run, hf://user/name, file:///mnt/disk/run or the like.")
    if not args.eval_only and not args.show:
        saved = newest_extra(args.output_dir, args.resume_from_checkpoint).get("settings", {})
        saved = {name: value for name, value in saved.items() if hasattr(args, name)}
        problems += changed_settings(saved, args) if saved else []
        if not saved and (path := args.resume_from_checkpoint) not in ("auto", "none"):
            problems.append(f"resume_from_checkpoint: {path} is no checkpoint of this version; give another.")
    return problems


def _schedule_problems(args: Any) -> list[str]:
    """Of optimizer and learning rate. An edit with its own optimizer or schedule may lack these settings."""
    optimizer = getattr(args, "optimizer_type", "adamw")
    schedule, warmup = getattr(args, "lr_scheduler_type", "linear"), getattr(args, "num_warmup_steps", 0)
    decay = getattr(args, "num_decay_steps", 0) if schedule == "warmup_stable_decay" else 0
    steps, problems = args.max_train_steps, []
    if optimizer not in ("adamw", "muon"):
        problems.append(f"optimizer_type: {optimizer!r} is unknown, give adamw or muon.")
    if schedule not in SCHEDULES:
        problems.append(f"lr_scheduler_type: {schedule!r} is unknown, give one of: {', '.join(SCHEDULES)}.")
    if steps and warmup > steps:
        problems.append(f"num_warmup_steps: {warmup:g} are more than max_train_steps, {steps}: add "
                        "--num_warmup_steps 0.05, a share of them.")
    if steps and decay and sum(n if n >= 1 else n * steps for n in (warmup, decay)) > steps:
        problems.append(f"num_decay_steps: {decay:g} and warm-up are more than max_train_steps, lower one.")
    if getattr(args, "min_lr_ratio", 0) and schedule not in DECAYS:
        problems.append(f"min_lr_ratio: only {', '.join(DECAYS)} support it.")
    return problems


def _length_problems(args: Any) -> list[str]:
    problems = []
    if not args.max_train_steps and not args.num_train_epochs:
        problems.append("max_train_steps and num_train_epochs: both are 0, set one of them.")
    if args.streaming and not (args.max_train_steps and args.max_eval_samples):
        problems.append("streaming: the length is unknown, set max_train_steps and max_eval_samples.")
    if args.streaming and not (args.eval_steps and args.save_steps):
        problems.append("streaming: there are no epochs, set eval_steps and save_steps.")
    if args.streaming and args.max_train_samples:
        problems.append("max_train_samples: a stream is read as far as max_train_steps goes, leave it out.")
    return problems


def number_problems(args: Any) -> list[str]:
    """A line for each number out of range. A setting that is not listed above may be anything finite."""
    problems = []
    for name, value in vars(args).items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not math.isfinite(value):
            problems.append(f"{name}: must be a finite number, is {value}.")
        elif name in NOT_NEGATIVE and value < 0:
            problems.append(f"{name}: must be 0 (off) or greater, is {value}.")
        elif name in POSITIVE and value <= 0:
            problems.append(f"{name}: must be greater than 0, is {value}.")
        elif value >= UPPER_BOUNDS.get(name, 2**63):
            problems.append(f"{name}: must be less than {UPPER_BOUNDS.get(name, 2**63):,}, is {value}.")
    return problems


def changed_settings(saved: dict, args: Any, counts: dict | None = None) -> list[str]:
    """A line for each setting that differs and may not change: "learning_rate: 0.0005 in the run, 0.001 now".

    counts: numbers that follow from the data, compared too. A setting that the run lacks counts as its
    default, or as field(metadata={"before": value}). "x" equals ["x"]."""
    now, defaults = dataclasses.asdict(args) | (counts or {}), type(args)()
    before = {f.name: f.metadata.get("before", getattr(defaults, f.name)) for f in dataclasses.fields(args)}
    may_grow = getattr(args, "lr_scheduler_type", "") in CONSTANT_SCHEDULES
    may_change = MAY_CHANGE | (LENGTH_SETTINGS if may_grow else set())
    lines = {}
    for name in sorted((saved.keys() | now.keys()) - may_change):
        values = saved.get(name, before.get(name, "missing")), now.get(name, "missing")
        was, is_now = map(as_list, without_secrets(values))  # saved without them
        if was != is_now:
            shown = [" ".join(map(str, value)) or "none" for value in (was, is_now)]
            lines[name] = f"{name}: {shown[0]} in the run, {shown[1]} now"
    if not lines:
        return []
    first = f"{args.output_dir} holds a run with other settings: repeat them, or choose another --output_dir"
    folder, remedy = shlex.quote(args.output_dir), []
    if lines.keys() <= LENGTH_SETTINGS:
        remedy = ["The learning rate depends on that length; docs/learning.md has runs that may grow. For a "
                  f"new run with its weights: --model_name_or_path {folder} --output_dir ANOTHER"]
    return [first, *lines.values(), *remedy]


def folder_problems(name: str, folder: str) -> list[str]:
    """A line if the folder of setting `name` could not be written. Nothing is created."""
    path = Path(folder).absolute()
    there = next(place for place in [path, *path.parents] if os.path.lexists(place))
    longest = max(len(os.fsencode(part)) for part in path.parts)
    if not there.is_dir():
        trouble = "is a file, not a folder" if there == path else f"cannot be made, {there} is not a folder"
    elif not os.access(there, os.W_OK | os.X_OK):
        trouble = f"cannot be written ({there} is not writable)"
    elif longest > os.pathconf(there, "PC_NAME_MAX") or len(os.fsencode(path)) > PATH_BYTES:
        trouble = f"cannot be made, its name is too long ({longest} bytes in one folder's name)"
    else:
        return []
    return [f"{name}: {folder} {trouble}. Name another folder."]


def stop_at(problems: list[str]) -> None:
    """ValueError with all problems, if any."""
    if problems:
        raise ValueError("\n".join(problems))


def evaluate_what_is_saved(args: Any) -> None:
    """With eval_only and without model_name_or_path the model is the one saved in output_dir."""
    if args.eval_only and not args.model_name_or_path:
        if not Path(args.output_dir, "config.json").exists():
            stop_at([f"eval_only: no model in output_dir, {args.output_dir}; name one, or another folder."])
        args.model_name_or_path = args.tokenizer_name = args.output_dir
        args.config_overrides = ""


def saved_data(args: Any) -> dict:
    """Fingerprints and names of the data of the run to resume; {} if there is none."""
    extra = {} if args.eval_only or args.show else newest_extra(args.output_dir, args.resume_from_checkpoint)
    return extra and extra["data"] | {"dataset_name": as_list(extra["settings"].get("dataset_name"))}


def save_args(output_dir, settings: dict, code: dict, launch: dict | None = None, origin=None) -> None:
    """Writes args.json: every setting, what the run computes with, versions, its origin."""
    packages = ("torch", "accelerate", "transformers", "datasets", "huggingface_hub", "tokenizers", "numpy")
    versions = {package: importlib.metadata.version(package) for package in packages}
    content = dict(settings=without_secrets(settings), launch=launch, versions=versions)
    content |= dict(python=platform.python_version(), platform=platform.platform(), code=code, origin=origin)
    write_json(Path(output_dir) / "args.json", content)


def code_version(args: Any) -> dict[str, str | None]:
    """{"script": SHA-256 of the script, "git": git describe --dirty in its folder, or None}"""
    script = Path(inspect.getsourcefile(type(args)))
    git, command = None, ["git", "describe", "--always", "--dirty"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, cwd=script.parent, capture_output=True, text=True, timeout=10)
        git = done.stdout.strip() or None
    return {"script": hashlib.sha256(script.read_bytes()).hexdigest(), "git": git}
