"""Settings: one flat dataclass per script <-> command line <-> args.json; and all that is wrong with them."""

import argparse
import contextlib
import copy
import dataclasses
import difflib
import hashlib
import importlib.metadata
import inspect
import math
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

from transformers import HfArgumentParser

from utils.display.doctor import check_devices
from utils.display.metrics import write_json
from utils.display.progress import quiet_libraries
from utils.display.trackers import check_trackers
from utils.learning.optim import SCHEDULES
from utils.publishing.milestones import milestone_steps
from utils.publishing.secrets import without_secrets
from utils.state.checkpoint import newest_extra


class _Parser(HfArgumentParser):
    """A field's metadata are ours: transformers' parser would hand them to argparse."""

    def error(self, message):
        raise ValueError(f"{message}\n`--help` lists every setting.")

    @staticmethod
    def _parse_dataclass_field(parser, field):
        field = copy.copy(field)
        field.metadata = {}
        HfArgumentParser._parse_dataclass_field(parser, field)

    def format_help(self):
        """The settings under the headings of their source, each with its default and its comment."""
        lines = [f"usage: {self.prog} [--preset {' | '.join(self.presets)}] [--setting value ...]", "",
                 "With the value of the preset, then what it is:", ""]  # fmt: skip
        for line in inspect.getsource(self.dataclass_types[0]).splitlines():
            if heading := re.match(r"    # (.+)$", line):
                lines += ["", heading[1]]
            elif found := re.match(r"    (\w+):(?:.*?#\s*(.+))?", line):
                value = self.get_default(found[1])
                told = "none" if value in (None, []) else shlex.join(map(str, as_list(value)))
                told = f"({len(value)} texts)" if "\n" in told else told
                told = told.lower() if isinstance(value, bool) else told
                lines += [f"{f'  --{found[1]} {told}':<50}  {found[2] or ''}".rstrip()]
        return "\n".join(lines) + "\n"


# A run may be continued with other values of these: they change what is seen and kept, not what is learnt.
# The batch may be divided otherwise; the rows per step are compared instead.
MAY_CHANGE = set(
    "preset cache_dir output_dir resume_from_checkpoint preflight eval_only show logging_steps eval_steps "
    "eval_at_start keep_best save_steps save_total_limit background_save prompts report_to log_level "
    "push_to_hub hub_model_id hub_private_repo checkpoint_url hub_timeout "
    "max_skipped_updates max_eval_samples per_device_eval_batch_size per_device_train_batch_size "
    "gradient_checkpointing gradient_accumulation_steps milestones stable attn_implementation".split()
)
# Settings that are gone, and their values that did nothing: runs with them go on.
GONE = {"skip_outlier_updates": 0.0, "pair_label_is_next": 0}
# So may the length of a run whose learning rate stands still, while it does: Run looks at the step.
LENGTH = {"max_train_steps", "num_train_epochs", "num_decay_steps", "max_steps"}
STABLE = ("constant", "constant_with_warmup", "warmup_stable_decay")
POSITIVE = set(
    "validation_fraction vocab_size block_size mlm_probability eval_mlm_probability learning_rate "
    "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps logging_steps "
    "max_skipped_updates save_total_limit hub_timeout".split()
)
NOT_NEGATIVE = set(
    "weight_decay num_warmup_steps max_train_steps num_train_epochs max_grad_norm keytoken_alpha adam_beta2 "
    "num_decay_steps min_lr_ratio muon_learning_rate seed max_eval_samples eval_steps "
    "max_train_samples save_steps show".split()
)
BELOW = {"seed": 2**32, "min_lr_ratio": 1, "validation_fraction": 1, "adam_beta2": 1,
         "mlm_probability": 1, "eval_mlm_probability": 1}  # fmt: skip
PATH_BYTES = 4096 - 256  # of output_dir: the system's limit, and what a run puts below it

# What transformers' scripts and nanoGPT have a setting for that no name here is near to, and what does it.
ELSEWHERE = {name: there for names, there in {
    "fp16 bf16": "the launcher's: --mixed_precision, or mixed_precision in accelerate_configs/*.yaml.",
    "torch_compile compile": "the launcher's: dynamo_backend in accelerate_configs/*.yaml.",
    "fsdp deepspeed": "the launcher's: accelerate_configs/fsdp.yaml divides a model over devices.",
    "use_cpu": "the launcher's: accelerate_configs/cpu.yaml.",
    "warmup_steps warmup_ratio warmup_iters": "--num_warmup_steps; below 1 it is a share of all steps.",
    "max_steps max_iters": "--max_train_steps.",
    "max_seq_length": "--block_size.",
    "batch_size": "--per_device_train_batch_size.",
    "lr": "--learning_rate.",
    "eval_strategy eval_interval save_strategy checkpointing_steps":
        "--eval_steps, --save_steps; 0: once per epoch.",
    "with_tracking logging_dir": "--report_to names the trackers; they write to --output_dir.",
    "overwrite_output_dir": "--resume_from_checkpoint none begins anew.",
    "do_train do_eval": "leave it out: both are done; --eval_only true only evaluates.",
    "train_file validation_file": "--dataset_name and --eval_dataset_name take files and folders, too.",
    "dataloader_num_workers preprocessing_num_workers": "leave it out: rows are ready, all cores tokenize.",
    "optim": "--optimizer_type adamw or muon; build_optimizer in the script's main makes it.",
    "skip_outlier_updates": "docs/edits/outlier-updates.diff, an edit of train_clm.py.",
    "pair_label_is_next background_save": "leave it out: it is gone.",
    "hub_token": "the environment's: HF_TOKEN, or `hf auth login`.",
}.items() for name in names.split()}  # fmt: skip


def parse_args(args_class: type, presets: dict[str, dict[str, Any]], argv: list[str] | None = None) -> Any:
    """Defaults of `args_class`, changed by the preset (`--preset NAME`), changed by the flags beside it.

    `none` switches an optional setting off and empties a list. A field's trailing comment is its help text.
    ValueError with every unknown flag and what does it here or is near, or with a value that does not parse.
    """
    notebook = sys.argv[0].endswith("kernel_launcher.py")  # its arguments are not for us
    argv = ([] if notebook else sys.argv[1:]) if argv is None else argv
    parser = _Parser(args_class, allow_abbrev=False)
    parser.presets = presets
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", nargs="?")
    name = first.parse_known_args(argv)[0].preset or parser.get_default("preset")
    if name not in presets:
        raise ValueError(f"--preset {name}: unknown. Known presets: {', '.join(presets)}.")
    parser.set_defaults(**presets[name])
    args, unknown = parser.parse_args_into_dataclasses(
        argv, return_remaining_strings=True, look_for_args_file=False
    )
    if unknown:
        flags = [option for action in parser._actions for option in action.option_strings]
        lines, before = [], ""
        for word in unknown:
            flag = word.split("=")[0]
            near = difflib.get_close_matches(flag, flags, n=1, cutoff=0.5)
            if there := flag.startswith("--") and ELSEWHERE.get(flag[2:].replace("-", "_")):
                lines.append(f"{word}: no such setting; instead: {there}")
            elif word.startswith("-") or not before or "=" in before:  # else the value of an unknown flag
                lines.append(f"{word}: no such setting." + (f" Did you mean {near[0]}?" if near else ""))
            before = word if word.startswith("-") else before
        parser.error("\n".join(lines))
    blank = []
    for name, kind in get_type_hints(args_class).items():  # not fields(): the parser rewrites their types
        value = getattr(args, name)
        if isinstance(value, list) and [str(item).lower() for item in value] == ["none"]:
            setattr(args, name, [])
        elif isinstance(value, str) and value.lower() in ("none", "") and "None" in str(kind):
            setattr(args, name, None)
        elif name != "config_overrides" and not all(str(item).strip() for item in as_list(value)):
            blank.append(name)
    if blank:
        raise ValueError(f"{', '.join(blank)}: holds a blank text, leave that out. `none` empties a list.")
    return args


def common_problems(args: Any) -> list[str]:
    """What is wrong with the settings that both scripts have, a line each."""
    problems = number_problems(args)
    for name in ["cache_dir"] if args.eval_only else ["output_dir", "cache_dir"]:
        problems += folder_problems(name, getattr(args, name))
    checks = (quiet_libraries, args.log_level), (check_trackers, args.report_to), (check_devices,)
    checks += ((milestone_steps, args.milestones, args.max_train_steps),)
    for check, *values in checks:
        try:
            check(*values)
        except ValueError as error:
            problems.append(str(error))
    # An edit with an optimizer or a schedule of its own may have none of these.
    optimizer = getattr(args, "optimizer_type", "adamw")
    schedule, warmup = getattr(args, "lr_scheduler_type", "linear"), getattr(args, "num_warmup_steps", 0)
    decay = getattr(args, "num_decay_steps", 0) if schedule == "warmup_stable_decay" else 0
    endless, steps = args.streaming, args.max_train_steps
    changing = sum(n if n >= 1 else n * steps for n in (warmup, decay))
    together = {
        f"optimizer_type: {optimizer!r} is unknown, give adamw or muon.": optimizer in ("adamw", "muon"),
        f"lr_scheduler_type: {schedule!r} is unknown, give one of: {', '.join(SCHEDULES)}.":
            schedule in SCHEDULES,
        f"num_warmup_steps: {warmup:g} are more than max_train_steps, {steps}: add --num_warmup_steps 0.05, "
        "a share of them.":
            not steps or warmup <= steps,
        f"num_decay_steps: {decay:g} and warm-up are more than max_train_steps.":
            not steps or not decay or changing <= steps,
        "min_lr_ratio: only linear, cosine and warmup_stable_decay have such an end.":
            not getattr(args, "min_lr_ratio", 0) or schedule in ("linear", "cosine", "warmup_stable_decay"),
        "max_train_steps and num_train_epochs: both are 0, set one of them.": steps or args.num_train_epochs,
        "streaming: a stream has no known length, set max_train_steps and max_eval_samples.":
            not endless or steps and args.max_eval_samples,
        "streaming: a stream has no known epochs, set eval_steps and save_steps.":
            not endless or args.eval_steps and args.save_steps,
        "max_train_samples: a stream is read as far as max_train_steps goes, leave it out.":
            not endless or not args.max_train_samples,
        "model_name_or_path: its weights go with one tokenizer, set tokenizer_name too.":
            args.tokenizer_name or not args.model_name_or_path,
        "checkpoint_url: no URL, give s3://bucket/run, hf://user/name, file:///mnt/disk/run or the like.":
            "://" in (args.checkpoint_url or "://"),
    }  # fmt: skip
    problems += [problem for problem, fine in together.items() if not fine]
    if not args.eval_only and not args.show:
        saved = newest_extra(args.output_dir, args.resume_from_checkpoint).get("settings", {})
        saved = {name: value for name, value in saved.items() if hasattr(args, name)}
        problems += changed_settings(saved, args) if saved else []
        if not saved and (path := args.resume_from_checkpoint) not in ("auto", "none"):
            problems.append(f"resume_from_checkpoint: {path} is no checkpoint. Give auto, none, or another.")
    return problems


def number_problems(args: Any) -> list[str]:
    """One line for each number that cannot be meant; a field of your own may be anything finite."""
    lines = []
    for name, value in vars(args).items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            most = BELOW.get(name, 2**63)
            wrong = {
                "a finite number": not math.isfinite(value),
                "0 (off) or greater": name in NOT_NEGATIVE and value < 0,
                "greater than 0": name in POSITIVE and value <= 0,
                f"less than {most:,}": value >= most,
            }
            lines += [f"{name}: must be {what}, is {value}." for what, is_so in wrong.items() if is_so][:1]
    return lines


def changed_settings(saved: dict, args: Any, counts: dict | None = None) -> list[str]:
    """A line for each setting that differs and may not: "learning_rate: 0.0005 in the run, 0.001 now".

    counts: what the data tell beside args. A field that the run does not know yet counts as what that run
    did: its default, unless field(metadata={"before": value}) says another. A name equals a list of one."""
    now = dataclasses.asdict(args) | (counts or {})
    made = type(args)()  # with the defaults
    before = {f.name: f.metadata.get("before", getattr(made, f.name)) for f in dataclasses.fields(args)}
    lines = {}
    free = {name for name, did_nothing in GONE.items() if saved.get(name) == did_nothing} - now.keys()
    free |= MAY_CHANGE | (LENGTH if getattr(args, "lr_scheduler_type", "") in STABLE else set())
    for name in sorted((saved.keys() | now.keys()) - free):
        was, is_now = saved.get(name, before.get(name, "missing")), now.get(name, "missing")
        was, is_now = without_secrets((was, is_now))  # as they were saved
        if as_list(was) != as_list(is_now):
            shown = [" ".join(map(str, as_list(value))) or "none" for value in (was, is_now)]
            lines[name] = f"{name}: {shown[0]} in the run, {'gone' if name in GONE else shown[1]} now"
    first = f"{args.output_dir} holds a run with other settings: give these, or another output_dir"
    found = [first, *lines.values()] if lines else []
    if lines and lines.keys() <= LENGTH:
        folder = shlex.quote(args.output_dir)
        found.append("The learning rate followed that length; runs that may grow: docs/learning.md. For a "
                     f"new run with its weights: --model_name_or_path {folder} --tokenizer_name {folder} "
                     '--config_overrides "" --output_dir ANOTHER')
    return found


def as_list(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def folder_problems(name: str, folder: str) -> list[str]:
    """One line if the folder of setting `name` could not be written; nothing is created."""
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
    """ValueError with all problems, if there are any."""
    if problems:
        raise ValueError("\n".join(problems))


def evaluate_what_is_saved(args: Any) -> None:
    """With eval_only and no model named: the one in output_dir, as it was saved."""
    if args.eval_only and not args.model_name_or_path:
        if not Path(args.output_dir, "config.json").exists():
            stop_at([f"eval_only: no model in output_dir, {args.output_dir}; name one, or another folder."])
        args.model_name_or_path = args.tokenizer_name = args.output_dir
        args.config_overrides = ""


def saved_data(args: Any) -> dict:
    """Fingerprints and name of what the run to continue was trained on and evaluated; {} at the beginning."""
    found = {} if args.eval_only or args.show else newest_extra(args.output_dir, args.resume_from_checkpoint)
    name = as_list(found.get("settings", {}).get("dataset_name"))
    return found["data"] | {"dataset_name": name} if "data" in found else {}


def save_args(args: Any, code: dict, origin: dict | None = None, attention: str | None = None) -> None:
    """Writes args.json: every setting, what it ran on and with which code and attention, its origin."""
    packages = ("torch", "accelerate", "transformers", "datasets", "huggingface_hub", "tokenizers", "numpy")
    write_json(Path(args.output_dir) / "args.json", {
        "settings": without_secrets(dataclasses.asdict(args)), "attention": attention,
        "versions": {package: importlib.metadata.version(package) for package in packages},
        "python": platform.python_version(), "platform": platform.platform(), "code": code, "origin": origin,
    })  # fmt: skip


def code_version(args: Any) -> dict[str, str | None]:
    """{"script": sha256 of the file with these settings, "git": git describe --dirty there, or None}"""
    script = Path(inspect.getsourcefile(type(args)))
    git, command = None, ["git", "describe", "--always", "--dirty"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        found = subprocess.run(command, cwd=script.parent, capture_output=True, text=True, timeout=10)
        git = found.stdout.strip() or None
    return {"script": hashlib.sha256(script.read_bytes()).hexdigest(), "git": git}
