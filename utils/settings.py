"""Checks all settings before any work, and lists every problem in one message."""

import math
import os
from pathlib import Path
from typing import Any

import torch

from utils.display.metrics import read_args, tracker_problems
from utils.display.start import quiet_libraries
from utils.flags import expand_home
from utils.launch import launch_problems
from utils.learning.configuration import one_line
from utils.learning.model import check_model
from utils.learning.optim import build_schedule

POSITIVE = """block_size vocab_size per_device_train_batch_size per_device_eval_batch_size learning_rate
    gradient_accumulation_steps save_total_limit validation_fraction mlm_probability""".split()
BELOW_1 = "validation_fraction mlm_probability adam_beta2".split()


def check_settings(args: Any, kind: str) -> None:
    """ValueError with a line for each problem that can be seen before the data is read.

    kind: "causal", "masked" or "pretraining". An edited script may lack settings."""
    quiet_libraries()
    expand_home(args)  # parse_args does it, too, but main may be called with TrainArgs(...)
    use_saved_model(args)
    args.push_to_hub = args.push_to_hub and not (args.eval_only or args.show)
    problems = number_problems(args)
    for name in ["cache_dir"] if args.eval_only else ["output_dir", "cache_dir"]:
        problems += folder_problems(name, getattr(args, name))
    problems += tracker_problems(args.report_to) + launch_problems()
    too_short = {"masked": 2, "pretraining": 3}.get(kind, 1)  # special tokens alone; one token has no target
    if 0 < args.block_size <= too_short:
        problems.append(f"block_size: must be more than {too_short}, is {args.block_size}.")
    for prompt in args.prompts if kind != "causal" and args.prompts != ["rows"] else ():
        if "[MASK]" not in prompt:
            problems.append(f"prompts: {prompt!r} has no [MASK], the place of the word to fill in.")
    problems += _schedule_problems(args)
    problems += check_model(args, kind) if not problems else []
    if problems:
        raise ValueError("\n".join(problems))


def use_saved_model(args: Any) -> None:
    """Makes eval_only without model_name_or_path evaluate the model of the newest save, in output_dir. The
    run's own model_name_or_path names the weights that it started from."""
    folder = Path(args.output_dir)
    if not args.eval_only or args.model_name_or_path:
        return
    if not (folder / "config.json").exists():
        raise ValueError(f"eval_only: no model in output_dir, {folder}; give another folder, or "
                         "--model_name_or_path.")
    run = read_args(folder).get("settings", vars(args))
    if ("mlm_probability" in run) != hasattr(args, "mlm_probability"):
        raise ValueError(f"eval_only: {folder} is a run of the other script, train_clm.py or train_mlm.py.")
    args.tokenizer_name = args.model_name_or_path = args.output_dir
    args.config_overrides = ""


def _schedule_problems(args: Any) -> list[str]:
    """Problems of optimizer, schedule and number of steps. An edited script may lack these settings."""
    optimizer = getattr(args, "optimizer_type", "adamw")
    steps, problems = args.max_train_steps, []
    if optimizer not in ("adamw", "muon"):
        problems.append(f"optimizer_type: {optimizer!r} is unknown, give adamw or muon.")
    if hasattr(args, "lr_scheduler_type") and steps >= 0:
        sgd = torch.optim.SGD([torch.zeros(1)], abs(args.learning_rate) or 1)
        try:
            build_schedule(sgd, args, steps or 2**62).lr_lambdas[0](steps)
        except Exception as error:  # transformers does not check options: errors of any type
            problems.append(f"lr_scheduler_type, {args.lr_scheduler_type!r}: {one_line(error)}")
    if not steps and not args.num_train_epochs:
        problems.append("max_train_steps and num_train_epochs: both are 0, set one of them.")
    if args.model_name_or_path and not args.tokenizer_name:
        problems.append("model_name_or_path: its weights need their own tokenizer, set tokenizer_name too.")
    return problems


def number_problems(args: Any) -> list[str]:
    """A line for each number out of range. A setting may be negative only if its default is."""
    problems, defaults = [], type(args)()
    for name, value in vars(args).items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        below = 1 if name in BELOW_1 else 2**32 if name == "seed" else 2**63
        if not math.isfinite(value):
            problems.append(f"{name}: must be a finite number, is {value}.")
        elif value <= 0 and name in POSITIVE:
            problems.append(f"{name}: must be greater than 0, is {value}.")
        elif value < 0 <= getattr(defaults, name):
            problems.append(f"{name}: must be 0 (off) or greater, is {value}.")
        elif value >= below:
            problems.append(f"{name}: must be less than {below:,}, is {value}.")
    return problems


def folder_problems(name: str, folder: str) -> list[str]:
    """A line if the folder of setting `name` is not writable. Creates nothing."""
    if "://" in folder:
        return [f"{name}: {folder} is a URL, but a run writes to a folder. Mount it and give the mount, "
                "or give a folder and copy it with `rclone copy` or `hf sync`: docs/resuming.md, Checkpoints "
                "elsewhere."]
    path = Path(folder).absolute()
    existing = next(parent for parent in [path, *path.parents] if os.path.lexists(parent))
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return []
    cause = "is not writable" if existing.is_dir() else "is a file, not a folder"
    return [f"{name}: {folder} cannot be written, as {existing} {cause}. Name another folder."]
