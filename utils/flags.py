"""Parses the command line into a script's dataclass of settings, with presets, help and hints."""

import argparse
import ast
import difflib
import inspect
import json
import os
import re
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, get_type_hints

from transformers import HfArgumentParser

from utils.display.metrics import read_args

# Settings of transformers' scripts and of nanoGPT: what to use instead.
ELSEWHERE = {
    "fp16 bf16 dtype torch_dtype": "use the launcher's --mixed_precision, or accelerate_configs/*.yaml",
    "torch_compile compile": "set dynamo_backend in accelerate_configs/*.yaml",
    "fsdp deepspeed": "launch with accelerate_configs/fsdp.yaml, which shards a model over devices",
    "cpu no_cuda device multi_gpu num_processes mixed_precision":
        "it is a flag of `accelerate launch`: give it before the name of the script",
    "data_dir data_files dataset_file train_dataset train_file": "--dataset_name takes files and folders",
    "eval_dataset validation_file": "--eval_dataset_name takes files and folders",
    "max_seq_length max_length": "use --block_size",
    "preprocessing_num_workers dataloader_num_workers": "all cores tokenize, and rows need no workers",
    "overwrite_cache": "changed data is prepared again by itself; delete --cache_dir to prepare all again",
    "eval_subset": "use --eval_dataset_name NAME:SPLIT",
    "batch_size per_replica_batch_size": "use --per_device_train_batch_size",
    "n_layer n_layers n_head n_heads n_embd dropout":
        "use --config_overrides, such as num_hidden_layers=6,num_attention_heads=4",
    "trust_remote_code": "code from a model's repository is never run",
    "epochs num_epochs": "use --num_train_epochs",
    "lr": "use --learning_rate",
    "optim": "use --optimizer_type",
    "adam_beta1": "AdamW's beta1 is 0.9",
    "warmup_steps warmup_ratio warmup_proportion warmup_iters":
        "use --num_warmup_steps; a value below 1 is a share of all steps",
    "out_dir run_name": "use --output_dir, whose last part is the run's name",
    "overwrite_output_dir": "--resume_from_checkpoint none starts from scratch",
    "do_train do_eval": "a run trains and evaluates; --eval_only true only evaluates",
    "evaluation_strategy eval_strategy save_strategy logging_strategy eval_interval checkpointing_steps":
        "use --eval_steps, --save_steps and --logging_steps; 0 means once per epoch",
    "logging_first_step": "--logging_steps 1 logs every step",
    "with_tracking wandb_log wandb_project": "use --report_to tensorboard trackio wandb",
}
ELSEWHERE = {name: hint for names, hint in ELSEWHERE.items() for name in names.split()}
PATHS = re.compile(r"_(name|path|dir|checkpoint)$")  # settings that may hold a path
NEGATIVE = re.compile(r"-(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$|-(inf|nan)", re.I)
DATA_SPECIFIC = {"keywords", "prompts"}  # a preset's values fit only the preset's data
LENGTH = {"num_train_epochs", "max_train_steps"}
NOT_INHERITED = {"model_name_or_path", "tokenizer_name", "output_dir", "eval_only", "show"}  # by --eval_only


class _Parser(HfArgumentParser):
    def __init__(self, *classes, **options):
        super().__init__(*classes, **options)
        self._negative_number_matcher = NEGATIVE  # before Python 3.14 argparse reads -1e-3 as a flag

    def error(self, message):
        raise ValueError(f"{message}\n`--help` lists every setting.")

    def format_help(self):
        """The settings under the headings of the source file, each with its default and its comment."""
        lines = [f"usage: {self.prog} [--preset {' | '.join(self.presets)}] [--setting value ...]", "",
                 "A preset is a complete experiment, whose settings replace the defaults:", ""]
        source = inspect.getsource(inspect.getmodule(self.dataclass_types[0]))
        for name, comment in re.findall(r'^    "([^"]+)": .*?#\s*(.+)$', source, re.M):
            lines += [f"  {name:<18} {comment}"] * (name in self.presets)
        lines += ["", "The settings, with their values in this preset:", ""]
        for line in inspect.getsource(self.dataclass_types[0]).splitlines():
            if heading := re.match(r"    # (.+)$", line):
                lines += ["", heading[1]]
            elif field := re.match(r"    (\w+):(?:.*?#\s*(.+))?", line):
                value = self.get_default(field[1])
                shown = "none" if value in (None, []) else shlex.join(map(str, as_list(value)))
                shown = f"({len(value)} texts)" if "\n" in shown else shown
                shown = shown.lower() if isinstance(value, bool) else shown
                lines += [f"{f'  --{field[1]} {shown}':<50}  {field[2] or ''}".rstrip()]
        return "\n".join(lines) + "\n"


def parse_args(args_class: type, presets: dict[str, dict[str, Any]], argv: list[str] | None = None) -> Any:
    """The settings of a script. Flags win over the preset (`--preset NAME`), which wins over the defaults.

    Without a preset, data or weights the first preset is used. --config_overrides changes the sizes that it
    names and keeps the others. --num_train_epochs sets max_train_steps to 0. --model_name_or_path brings its
    configuration and tokenizer. Without it --eval_only evaluates the run in output_dir, and that run's
    settings become the defaults. `none` switches an optional setting off and empties a list. The comment
    behind a field is its help text. ValueError for unknown flags, with a hint, and for wrong values."""
    if argv is None:  # the flags of a notebook's kernel are not for the script
        argv = [] if sys.argv[0].endswith("kernel_launcher.py") else sys.argv[1:]
    parser = _Parser(args_class, allow_abbrev=False)
    parser.presets = presets
    flags = _read_flags(args_class, parser, argv)
    has_weights = (flags.get("model_name_or_path") or "none").lower() != "none"
    _set_defaults(args_class, parser, flags, has_weights)
    sizes = parser.get_default("config_overrides")
    options = dict(return_remaining_strings=True, look_for_args_file=False)
    args, unknown = parser.parse_args_into_dataclasses(argv, **options)
    if unknown:
        parser.error("\n".join(_explain_unknown(unknown, parser)))
    if flags.get("config_overrides") and not has_weights:
        args.config_overrides = merge_overrides(sizes, flags["config_overrides"])
    _apply_none(args)
    expand_home(args)
    return args


def _read_flags(args_class: type, parser: _Parser, argv: list[str]) -> dict[str, Any]:
    """{setting: its value on the command line}; None, or [], for a setting without a flag."""
    if dashes := [word for word in argv if word.endswith("=--")]:  # argparse would drop the value
        parser.error(f"{', '.join(dashes)}: the value is missing.")
    without_defaults = _Parser(args_class, allow_abbrev=False, add_help=False)
    without_defaults.set_defaults(**dict.fromkeys(get_type_hints(args_class)))
    flags, names = vars(without_defaults.parse_known_args(argv)[0]), [word.split("=")[0] for word in argv]
    if repeated := [f"--{name}" for name, values in flags.items()  # argparse would drop the first list
                    if isinstance(values, list) and values != ["none"] and names.count(f"--{name}") > 1]:
        parser.error(f"{', '.join(repeated)}: given twice; one flag takes all values, separated by spaces.")
    return flags


def _set_defaults(args_class: type, parser: _Parser, flags: dict[str, Any], has_weights: bool) -> None:
    """Sets the parser's defaults, the values of settings without a flag, from the preset or the run."""
    preset = flags.get("preset") or parser.get_default("preset")
    if not (preset or has_weights or flags.get("dataset_name")):
        preset = next(iter(parser.presets))
    if preset and preset not in parser.presets:
        raise ValueError(f"--preset {preset}: unknown. Known presets: {', '.join(parser.presets)}.")
    settings = {"preset": preset} | parser.presets.get(preset, {})
    if flags.get("eval_only") and not has_weights:
        folder = flags.get("output_dir") or settings.get("output_dir") or parser.get_default("output_dir")
        run = read_args(os.path.expanduser(folder)).get("settings", {})
        if flags.get("preset") in (None, run.get("preset")):
            inherited = (get_type_hints(args_class).keys() & run.keys()) - NOT_INHERITED
            settings |= {name: run[name] for name in inherited}
    if (data := flags.get("dataset_name")) and data != as_list(settings.get("dataset_name")):
        settings = {name: value for name, value in settings.items() if name not in DATA_SPECIFIC}
    parser.set_defaults(**settings)
    if flags.get("num_train_epochs") or settings.keys() & LENGTH == {"num_train_epochs"}:
        parser.set_defaults(max_train_steps=0)
    if has_weights:
        parser.set_defaults(config_overrides="", tokenizer_name=flags["model_name_or_path"])
    elif flags.get("model_type") not in (None, parser.get_default("model_type")):
        parser.set_defaults(config_overrides=args_class.config_overrides)  # the preset's fit its model_type


def merge_overrides(sizes: str, changes: str) -> str:
    """The overrides `sizes`, updated with `changes`; `none` drops all. If one cannot be parsed, `changes`."""
    if changes.lower() == "none":
        return ""
    try:
        merged = named_values(sizes) | named_values(changes)
    except ValueError:
        return changes
    if any(isinstance(value, dict) for value in merged.values()):
        return json.dumps(merged)
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in merged.items()}
    return ",".join(f"{name}={text}" for name, text in texts.items())


def named_values(text: str) -> dict[str, Any]:
    """'n_layer=4,n_embd=256', or a JSON object with nested values -> {"n_layer": 4, "n_embd": 256}."""
    if text.startswith("{"):
        return json.loads(text)
    items = (item.partition("=") for item in re.split(r",(?![^[]*\])", text) if item.strip())
    return {name.strip(): _parse_value(value.strip()) for name, _, value in items}


def _parse_value(text: str) -> Any:
    """A number, list, bool or None; any other text as it is."""
    try:
        return json.loads({"none": "null"}.get(text.lower(), text.lower()))
    except ValueError:
        return text


def answer_help(script: Path) -> None:
    """Prints the script's help and exits, without the script's imports, which take seconds: only the classes
    and assignments of the script are run. Returns if that fails, and the script prints its help later."""
    namespace = {"__name__": "__main__"}

    def is_definition(node) -> bool:
        from_dataclasses = isinstance(node, ast.ImportFrom) and node.module == "dataclasses"
        return from_dataclasses or isinstance(node, ast.Assign | ast.AugAssign | ast.ClassDef)

    with suppress(Exception):
        nodes = [node for node in ast.parse(script.read_text()).body if is_definition(node)]
        exec(compile(ast.Module(nodes, []), script, "exec"), namespace)
        parse_args(namespace["TrainArgs"], namespace["PRESETS"])


def _apply_none(args: Any) -> None:
    """Replaces `none` by None, or by [] for a list, and a preset's "x" by ["x"] for a list. ValueError for
    blank texts."""
    blank = []
    for name, field_type in get_type_hints(type(args)).items():  # the parser changes the types in fields()
        value = getattr(args, name)
        if str(field_type).startswith("list"):
            setattr(args, name, value := as_list(value))
        if isinstance(value, list) and [str(item).lower() for item in value] == ["none"]:
            setattr(args, name, [])
        elif isinstance(value, str) and value.lower() in ("none", "") and "None" in str(field_type):
            setattr(args, name, None)
        elif name != "config_overrides" and not all(str(item).strip() for item in as_list(value)):
            blank.append(name)
    if blank:
        raise ValueError(f"{', '.join(blank)}: holds a blank text, leave it out. `none` empties a list.")


def expand_home(args: Any) -> None:
    """Expands ~ in paths. The shell does not expand it in --output_dir=~/run."""

    def expanded(value):
        return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~") else value

    for name in filter(PATHS.search, vars(args)):
        value = getattr(args, name)
        setattr(args, name, [*map(expanded, value)] if isinstance(value, list) else expanded(value))


def _explain_unknown(unknown: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """A line for each unknown flag: what to use instead, or which setting has a similar name."""
    flags = [option for action in parser._actions for option in action.option_strings]
    lines, last_flag = [], ""
    for word in unknown:
        flag = word.split("=")[0]
        near = difflib.get_close_matches(flag, flags, n=1, cutoff=0.63)
        if hint := flag.startswith("--") and ELSEWHERE.get(flag[2:].replace("-", "_").lower()):
            lines.append(f"{word}: no such setting; {hint}.")
        elif word.startswith("-") or not last_flag or "=" in last_flag:  # else: value of an unknown flag
            lines.append(f"{word}: no such setting." + (f" Did you mean {near[0]}?" if near else ""))
        last_flag = word if word.startswith("-") else last_flag
    return lines


def as_list(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]
