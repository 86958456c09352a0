"""What is wrong with the settings, before any work."""

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
SHARES = "validation_fraction mlm_probability adam_beta2".split()  # below 1


def check_settings(args: Any, kind: str) -> None:
    """ValueError with a line for each problem that can be seen before the data is read.

    kind: of the model, as in utils/learning/model.py. An edited script may lack a setting."""
    quiet_libraries()
    expand_home(args)  # parse_args does it, too, but main may be called with settings
    use_saved_model(args)
    args.push_to_hub = args.push_to_hub and not (args.eval_only or args.show)
    problems = number_problems(args)
    for name in ["cache_dir"] if args.eval_only else ["output_dir", "cache_dir"]:
        problems += folder_problems(name, getattr(args, name))
    problems += tracker_problems(args.report_to) + launch_problems()
    special = {"masked": 2, "pretraining": 3}.get(kind, 1)  # a row of one token has nothing to predict
    if 0 < args.block_size <= special:
        problems.append(f"block_size: must be more than {special}, is {args.block_size}.")
    for prompt in args.prompts if kind != "causal" and args.prompts != ["rows"] else ():
        if "[MASK]" not in prompt:
            problems.append(f"prompts: {prompt!r} has no [MASK], which stands for the word to be filled in.")
    problems += _schedule_problems(args)
    problems += check_model(args, kind) if not problems else []
    if problems:
        raise ValueError("\n".join(problems))


def use_saved_model(args: Any) -> None:
    """eval_only without model_name_or_path evaluates the model in output_dir, of its newest save. The run may
    have begun with other weights, which its settings still name."""
    folder = Path(args.output_dir)
    if not args.eval_only or args.model_name_or_path:
        return
    if not (folder / "config.json").exists():
        raise ValueError(f"eval_only: no model in output_dir, {folder}; name one, or another folder.")
    run = read_args(folder).get("settings", vars(args))
    if ("mlm_probability" in run) != hasattr(args, "mlm_probability"):
        raise ValueError(f"eval_only: {folder} is a run of the other script, train_clm.py or train_mlm.py.")
    args.tokenizer_name = args.model_name_or_path = args.output_dir
    args.config_overrides = ""


def _schedule_problems(args: Any) -> list[str]:
    """Of optimizer, learning rate and length. An edit with its own may lack these settings."""
    optimizer = getattr(args, "optimizer_type", "adamw")
    steps, problems = args.max_train_steps, []
    if optimizer not in ("adamw", "muon"):
        problems.append(f"optimizer_type: {optimizer!r} is unknown, give adamw or muon.")
    if hasattr(args, "lr_scheduler_type") and steps >= 0:
        trial = torch.optim.SGD([torch.zeros(1)], abs(args.learning_rate) or 1)
        try:
            build_schedule(trial, args, steps or 2**62).lr_lambdas[0](steps)
        except Exception as error:  # of many kinds: transformers does not check options
            problems.append(f"lr_scheduler_type, {args.lr_scheduler_type!r}: {one_line(error)}")
    if not steps and not args.num_train_epochs:
        problems.append("max_train_steps and num_train_epochs: both are 0, set one of them.")
    if args.model_name_or_path and not args.tokenizer_name:
        problems.append("model_name_or_path: its weights need their own tokenizer, set tokenizer_name too.")
    return problems


def number_problems(args: Any) -> list[str]:
    """A line for each number out of range. Only those whose default is negative may be."""
    problems, defaults = [], type(args)()
    for name, value in vars(args).items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        below = 1 if name in SHARES else 2**32 if name == "seed" else 2**63
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
    """A line if the folder of setting `name` could not be written. Nothing is created."""
    if "://" in folder:
        return [f"{name}: {folder} is a URL, but a run writes to a folder. Mount it and name the mount, or "
                "name a folder and copy that with `rclone copy` or `hf sync`: docs/resuming.md, Checkpoints "
                "elsewhere."]
    path = Path(folder).absolute()
    there = next(place for place in [path, *path.parents] if os.path.lexists(place))
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return []
    trouble = "is not writable" if there.is_dir() else "is a file, not a folder"
    return [f"{name}: {folder} cannot be written, as {there} {trouble}. Name another folder."]
