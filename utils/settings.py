"""What is wrong with the settings, before any work."""

import math
import os
from pathlib import Path
from typing import Any

from utils.display.progress import quiet_libraries
from utils.display.trackers import check_trackers
from utils.launch import check_devices, check_launcher
from utils.learning.model import check_model
from utils.learning.optim import DECAYS, SCHEDULES
from utils.state.experiment import resume_problems

POSITIVE = """block_size vocab_size per_device_train_batch_size per_device_eval_batch_size learning_rate
    gradient_accumulation_steps save_total_limit validation_fraction mlm_probability""".split()
OR_OFF = """max_train_samples num_train_epochs max_train_steps muon_learning_rate weight_decay adam_beta2 seed
    num_warmup_steps min_lr_ratio max_grad_norm keytoken_alpha logging_steps eval_steps save_steps show
    max_eval_samples""".split()  # at least 0, which turns most of them off; an edit's own may be negative
SHARES = "validation_fraction mlm_probability adam_beta2 min_lr_ratio".split()  # below 1
PATH_BYTES = 4096 - 256  # of output_dir: the system's limit, less the names of files in it


def check_settings(args: Any, kind: str, may_change: list[str]) -> list[str]:
    """A line for each problem that can be seen before the data is read.

    kind: of the model, as in utils/learning/model.py; may_change: settings that may differ on a resume. An
    edited script may lack a setting. ValueError at once for what keeps accelerate from starting."""
    quiet_libraries()
    use_saved_model(args)
    problems = number_problems(args)
    for name in ["cache_dir"] if args.eval_only else ["output_dir", "cache_dir"]:
        problems += folder_problems(name, getattr(args, name))
    starts = True
    for check, *values in ((check_trackers, args.report_to), (check_devices,), (check_launcher,)):
        try:
            check(*values)
        except ValueError as error:
            problems.append(str(error))
            starts = False
    if not (args.eval_only or args.show or folder_problems("output_dir", args.output_dir)):
        problems += resume_problems(args, set(may_change))
    special = {"masked": 2, "pretraining": 3}.get(kind, 1)  # a row of one token has nothing to predict
    if 0 < args.block_size <= special:
        problems.append(f"block_size: must be more than {special}, is {args.block_size}.")
    problems += _schedule_problems(args)
    problems += check_model(args, kind) if not problems else []
    if not starts:
        raise ValueError("\n".join(problems))
    return problems


def use_saved_model(args: Any) -> None:
    """eval_only without model_name_or_path evaluates output_dir: its model, with the state of its newest
    checkpoint, if any. The run may have begun with other weights, which its settings still name."""
    folder = Path(args.output_dir)
    if not args.eval_only or args.model_name_or_path:
        return
    if not (folder / "config.json").exists():
        raise ValueError(f"eval_only: no model in output_dir, {folder}; name one, or another folder.")
    args.tokenizer_name = args.model_name_or_path = args.output_dir
    args.config_overrides = ""


def _schedule_problems(args: Any) -> list[str]:
    """Of optimizer, learning rate and length. An edit with its own may lack these settings."""
    optimizer = getattr(args, "optimizer_type", "adamw")
    schedule, warmup = getattr(args, "lr_scheduler_type", "linear"), getattr(args, "num_warmup_steps", 0)
    steps, problems = args.max_train_steps, []
    if optimizer not in ("adamw", "muon"):
        problems.append(f"optimizer_type: {optimizer!r} is unknown, give adamw or muon.")
    if schedule not in SCHEDULES:
        problems.append(f"lr_scheduler_type: {schedule!r} is unknown, give one of: {', '.join(SCHEDULES)}.")
    if steps and warmup > steps:
        problems.append(f"num_warmup_steps: {warmup:g} are more than max_train_steps, {steps}: add "
                        "--num_warmup_steps 0.05, a share of them.")
    if getattr(args, "min_lr_ratio", 0) and schedule not in DECAYS:
        problems.append(f"min_lr_ratio: only {', '.join(DECAYS)} support it.")
    if not steps and not args.num_train_epochs:
        problems.append("max_train_steps and num_train_epochs: both are 0, set one of them.")
    if args.model_name_or_path and not args.tokenizer_name:
        problems.append("model_name_or_path: its weights need their own tokenizer, set tokenizer_name too.")
    return problems


def number_problems(args: Any) -> list[str]:
    """A line for each number out of range."""
    problems = []
    for name, value in vars(args).items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        below = 1 if name in SHARES else 2**32 if name == "seed" else 2**63
        if not math.isfinite(value):
            problems.append(f"{name}: must be a finite number, is {value}.")
        elif value < 0 and name in OR_OFF or value <= 0 and name in POSITIVE:
            least = "greater than 0" if name in POSITIVE else "0 (off) or greater"
            problems.append(f"{name}: must be {least}, is {value}.")
        elif value >= below:
            problems.append(f"{name}: must be less than {below:,}, is {value}.")
    return problems


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
