"""One flat dataclass per script <-> the command line."""

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

# Settings of transformers' scripts and of nanoGPT, and what takes their place here.
ELSEWHERE = {
    "fp16 bf16 dtype torch_dtype": "the launcher's --mixed_precision, or accelerate_configs/*.yaml",
    "torch_compile compile": "the launcher's, dynamo_backend in accelerate_configs/*.yaml",
    "fsdp deepspeed": "the launcher's, accelerate_configs/fsdp.yaml shards a model over devices",
    "cpu no_cuda device multi_gpu num_processes mixed_precision": "the launcher's, before the script",
    "data_dir data_files dataset_file train_dataset train_file": "--dataset_name takes files and folders",
    "eval_dataset validation_file": "--eval_dataset_name takes files and folders",
    "max_seq_length max_length": "--block_size",
    "preprocessing_num_workers dataloader_num_workers": "none, all cores tokenize, rows need no workers",
    "overwrite_cache": "none, changes are noticed; delete --cache_dir to make all anew",
    "eval_subset": "--eval_dataset_name NAME:SPLIT",
    "batch_size per_replica_batch_size": "--per_device_train_batch_size",
    "n_layer n_layers n_head n_heads n_embd dropout":
        "--config_overrides, such as num_hidden_layers=6,num_attention_heads=4",
    "trust_remote_code": "none, code of a model's repository is never run",
    "epochs num_epochs": "--num_train_epochs",
    "lr": "--learning_rate",
    "optim": "--optimizer_type",
    "adam_beta1": "none, AdamW's is 0.9",
    "warmup_steps warmup_ratio warmup_proportion warmup_iters": "--num_warmup_steps; below 1: a share of all",
    "out_dir run_name": "--output_dir, whose name is the run's",
    "overwrite_output_dir": "--resume_from_checkpoint none begins anew",
    "do_train do_eval": "none, both are done; --eval_only true only evaluates",
    "evaluation_strategy eval_strategy save_strategy logging_strategy eval_interval checkpointing_steps":
        "--eval_steps, --save_steps, --logging_steps; 0: once per epoch",
    "logging_first_step": "none, --logging_steps 1 logs every step",
    "with_tracking wandb_log wandb_project": "--report_to tensorboard trackio wandb",
}
PATHS = re.compile(r"_(name|path|dir|checkpoint)$")  # settings that may name a place on this machine
NEGATIVE = re.compile(r"-(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$|-(inf|nan)", re.I)
OF_ITS_DATA = {"keywords", "prompts"}  # of a preset
LENGTH = {"num_train_epochs", "max_train_steps"}
OF_A_START = {"model_name_or_path", "tokenizer_name", "output_dir", "eval_only", "show"}
ELSEWHERE = {name: there for names, there in ELSEWHERE.items() for name in names.split()}


class _Parser(HfArgumentParser):
    def __init__(self, *classes, **options):
        super().__init__(*classes, **options)
        self._negative_number_matcher = NEGATIVE  # argparse takes -1e-3 for a flag before Python 3.14

    def error(self, message):
        raise ValueError(f"{message}\n`--help` lists every setting.")

    def format_help(self):
        """The settings under the headings of the source, each with its default and its comment."""
        lines = [f"usage: {self.prog} [--preset {' | '.join(self.presets)}] [--setting value ...]", "",
                 "A preset is a whole experiment, with the settings of its source:", ""]
        source = inspect.getsource(inspect.getmodule(self.dataclass_types[0]))
        for name, what in re.findall(r'^    "([^"]+)": .*?#\s*(.+)$', source, re.M):
            lines += [f"  {name:<18} {what}"] * (name in self.presets)
        lines += ["", "The settings, each with its value in the preset and what it is:", ""]
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
    """The defaults of `args_class`, changed by the preset (`--preset NAME`), changed by the other flags.

    Where neither a preset nor data nor weights are named, the first preset counts. --config_overrides changes
    the sizes that it names and keeps the others. --num_train_epochs takes the place of max_train_steps.
    --model_name_or_path comes with its own configuration and tokenizer. Without it --eval_only evaluates the
    run in output_dir, whose settings are the defaults then. `none` switches an optional setting off and
    empties a list. A field's trailing comment is its help text. ValueError for unknown flags, with what takes
    their place or has a similar name, and for wrong values."""
    if argv is None:  # a notebook's kernel has flags of its own
        argv = [] if sys.argv[0].endswith("kernel_launcher.py") else sys.argv[1:]
    parser = _Parser(args_class, allow_abbrev=False)
    parser.presets = presets
    given = _given(args_class, parser, argv)
    weights = (given.get("model_name_or_path") or "none").lower() != "none"
    _set_defaults(args_class, parser, given, weights)
    sizes = parser.get_default("config_overrides")
    options = dict(return_remaining_strings=True, look_for_args_file=False)
    args, unknown = parser.parse_args_into_dataclasses(argv, **options)
    if unknown:
        parser.error("\n".join(_explained(unknown, parser)))
    if given.get("config_overrides") and not weights:
        args.config_overrides = merge_overrides(sizes, given["config_overrides"])
    _apply_none(args)
    expand_home(args)
    return args


def _given(args_class: type, parser: _Parser, argv: list[str]) -> dict[str, Any]:
    """The flags of the command line: None, or [], for a setting that is not among them."""
    if dashes := [word for word in argv if word.endswith("=--")]:  # argparse would drop the value
        parser.error(f"{', '.join(dashes)}: no value.")
    asked = _Parser(args_class, allow_abbrev=False, add_help=False)
    asked.set_defaults(**dict.fromkeys(get_type_hints(args_class)))
    given, flags = vars(asked.parse_known_args(argv)[0]), [word.split("=")[0] for word in argv]
    if twice := [f"--{name}" for name, values in given.items()  # argparse would drop the first list
                 if isinstance(values, list) and values != ["none"] and flags.count(f"--{name}") > 1]:
        parser.error(f"{', '.join(twice)}: given twice; one flag takes all values, separated by spaces.")
    return given


def _set_defaults(args_class: type, parser: _Parser, given: dict[str, Any], weights: bool) -> None:
    """What counts where no flag is given. weights: model_name_or_path is among the flags."""
    preset = given.get("preset") or parser.get_default("preset")
    if not (preset or weights or given.get("dataset_name")):
        preset = next(iter(parser.presets))
    if preset and preset not in parser.presets:
        raise ValueError(f"--preset {preset}: unknown. Known presets: {', '.join(parser.presets)}.")
    settings = {"preset": preset} | parser.presets.get(preset, {})
    if given.get("eval_only") and not weights:
        folder = given.get("output_dir") or settings.get("output_dir") or parser.get_default("output_dir")
        run = read_args(os.path.expanduser(folder)).get("settings", {})
        if given.get("preset") in (None, run.get("preset")):
            same = (get_type_hints(args_class).keys() & run.keys()) - OF_A_START
            settings |= {name: run[name] for name in same}
    if (data := given.get("dataset_name")) and data != as_list(settings.get("dataset_name")):
        settings = {name: value for name, value in settings.items() if name not in OF_ITS_DATA}
    parser.set_defaults(**settings)
    if given.get("num_train_epochs") or settings.keys() & LENGTH == {"num_train_epochs"}:
        parser.set_defaults(max_train_steps=0)
    if weights:
        parser.set_defaults(config_overrides="", tokenizer_name=given["model_name_or_path"])
    elif given.get("model_type") not in (None, parser.get_default("model_type")):
        parser.set_defaults(config_overrides=args_class.config_overrides)  # the preset's are of its own type


def merge_overrides(sizes: str, changes: str) -> str:
    """The overrides `sizes` with the values that `changes` names; `none` drops them all. Text that cannot be
    read is returned as it is."""
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
    """'n_layer=4,n_embd=256', or a JSON object for parts of it -> {"n_layer": 4, "n_embd": 256}."""
    if text.startswith("{"):
        return json.loads(text)
    items = (item.partition("=") for item in re.split(r",(?![^[]*\])", text) if item.strip())
    return {name.strip(): _parsed(value.strip()) for name, _, value in items}


def _parsed(text: str) -> Any:
    """A number, list, true, false or none; else the text itself."""
    try:
        return json.loads({"none": "null"}.get(text.lower(), text.lower()))
    except ValueError:
        return text


def answer_help(script: Path) -> None:
    """Prints the help of the script that runs, and ends it, where its settings and presets can be read
    without its other imports, which take seconds."""
    known = {"__name__": "__main__"}

    def plain(node) -> bool:
        from_standard = isinstance(node, ast.ImportFrom) and node.module == "dataclasses"
        return from_standard or isinstance(node, ast.Assign | ast.AugAssign | ast.ClassDef)

    with suppress(Exception):  # an edit may need more: then the script itself answers
        nodes = [node for node in ast.parse(script.read_text()).body if plain(node)]
        exec(compile(ast.Module(nodes, []), script, "exec"), known)
        parse_args(known["TrainArgs"], known["PRESETS"])


def _apply_none(args: Any) -> None:
    """`none` becomes None, or in a list no item; "x" of a preset becomes ["x"] where the field is a list.
    ValueError for blank texts."""
    blank = []
    for name, kind in get_type_hints(type(args)).items():  # the parser changes the types in fields()
        value = getattr(args, name)
        if str(kind).startswith("list"):
            setattr(args, name, value := as_list(value))
        if isinstance(value, list) and [str(item).lower() for item in value] == ["none"]:
            setattr(args, name, [])
        elif isinstance(value, str) and value.lower() in ("none", "") and "None" in str(kind):
            setattr(args, name, None)
        elif name != "config_overrides" and not all(str(item).strip() for item in as_list(value)):
            blank.append(name)
    if blank:
        raise ValueError(f"{', '.join(blank)}: holds a blank text, leave it out. `none` empties a list.")


def expand_home(args: Any) -> None:
    """~ as the shell expands it, which it does not in --output_dir=~/run."""

    def expanded(value):
        return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~") else value

    for name in filter(PATHS.search, vars(args)):
        value = getattr(args, name)
        setattr(args, name, [*map(expanded, value)] if isinstance(value, list) else expanded(value))


def _explained(unknown: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """A line for each unknown flag: what takes its place, or which setting has a similar name."""
    flags = [option for action in parser._actions for option in action.option_strings]
    lines, before = [], ""
    for word in unknown:
        flag = word.split("=")[0]
        near = difflib.get_close_matches(flag, flags, n=1, cutoff=0.63)
        if there := flag.startswith("--") and ELSEWHERE.get(flag[2:].replace("-", "_").lower()):
            lines.append(f"{word}: no such setting; instead: {there}.")
        elif word.startswith("-") or not before or "=" in before:  # else it is the value of an unknown flag
            lines.append(f"{word}: no such setting." + (f" Did you mean {near[0]}?" if near else ""))
        before = word if word.startswith("-") else before
    return lines


def as_list(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]
