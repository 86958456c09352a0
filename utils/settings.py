"""Settings: one flat dataclass per script <-> command line <-> args.json."""

import contextlib
import dataclasses
import difflib
import functools
import importlib.metadata
import inspect
import os
import platform
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from transformers import HfArgumentParser

from utils.display.doctor import lost_peer
from utils.display.metrics import write_json

Args = TypeVar("Args")
PROJECT = Path(__file__).resolve().parent.parent


def parse_args(
    args_class: type[Args], presets: dict[str, dict[str, Any]], argv: list[str] | None = None
) -> Args:
    """Defaults of `args_class`, changed by the preset (`--preset NAME`), changed by the flags given beside
    it.

    `none` switches an optional setting off and empties a list. The trailing comment of a field is its help
    text. Raises ValueError naming every unknown flag, with its nearest match, and the first value that does
    not parse.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = HfArgumentParser(args_class, allow_abbrev=False)
    parser.error = lambda message: _raise(f"{message}\n`--help` lists every setting.")
    comments = dict(re.findall(r"^    (\w+):.*?#\s*(.+)$", inspect.getsource(args_class), re.M))
    for action in parser._actions:  # argparse formats help with %, so a literal one is doubled
        action.help = comments.get(action.dest, action.help or "").replace("%", "%%")

    name = _flag(argv, "--preset") or parser.get_default("preset")
    if name not in presets:
        raise ValueError(f"--preset {name}: unknown. Known presets: {', '.join(presets)}.")
    parser.set_defaults(**presets[name])
    args, unknown = parser.parse_args_into_dataclasses(
        argv, return_remaining_strings=True, look_for_args_file=False
    )
    if unknown:
        flags = [option for action in parser._actions for option in action.option_strings]
        lines = []
        for word in unknown:
            near = difflib.get_close_matches(word.split("=")[0], flags, n=1)
            lines.append(f"{word}: no such setting." + (f" Did you mean {near[0]}?" if near else ""))
        raise ValueError("\n".join(lines) + "\n`--help` lists every setting.")
    for name, kind in get_type_hints(args_class).items():  # not fields(): the parser rewrites their types
        value = getattr(args, name)
        if isinstance(value, list) and [str(item).lower() for item in value] == ["none"]:
            setattr(args, name, [])
        elif isinstance(value, str) and value.lower() == "none" and "None" in str(kind):
            setattr(args, name, None)
    return args


def _raise(message: str):
    raise ValueError(message)


def _flag(argv: list[str], name: str) -> str | None:
    """The last value given for a flag, in either form (`--preset x`, `--preset=x`)."""
    value = None
    for i, word in enumerate(argv):
        if word == name and i + 1 < len(argv):
            value = argv[i + 1]
        elif word.startswith(name + "="):
            value = word.partition("=")[2]
    return value


def attempt(problems: list[str], function: Callable, *args, **kwargs) -> Any:
    """`function(...)`; its ValueError becomes a line of `problems` and the result None, so that all can be
    shown.
    """
    try:
        return function(*args, **kwargs)
    except ValueError as error:
        problems.append(str(error))


def number_problems(args: Any, may_be_zero: set[str]) -> list[str]:
    """One line for each number among the settings that is not > 0, or not >= 0 where 0 means off."""
    lines = []
    for name, value in vars(args).items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if name in may_be_zero and not value >= 0:
                lines.append(f"{name}: must be 0 (off) or greater, is {value}.")
            elif name not in may_be_zero and not value > 0:
                lines.append(f"{name}: must be greater than 0, is {value}.")
    return lines


def output_dir_problems(output_dir: str) -> list[str]:
    """One line if `output_dir` could not be written; nothing is created."""
    path = Path(output_dir)
    if path.exists() and not path.is_dir():
        return [f"output_dir: {output_dir} is a file, not a folder. Name another folder."]
    parent = next(
        folder for folder in [path, *path.absolute().parents] if folder.is_dir() or folder.is_file()
    )
    if not parent.is_dir():
        return [f"output_dir: {output_dir} cannot be made, {parent} is not a folder. Name another folder."]
    if not os.access(parent, os.W_OK | os.X_OK):
        return [
            f"output_dir: {output_dir} cannot be written ({parent} is not writable). Name another folder."
        ]
    return []


def save_args(args: Any, output_dir: str) -> None:
    """Writes args.json: every setting, the preset included, and what it ran on."""
    packages = ("torch", "accelerate", "transformers", "datasets", "huggingface_hub", "tokenizers", "numpy")
    versions = {package: importlib.metadata.version(package) for package in packages}
    record = {
        "settings": dataclasses.asdict(args),
        "versions": versions,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    write_json(Path(output_dir) / "args.json", record)


@contextlib.contextmanager
def user_mistakes() -> Iterator[None]:
    """A ValueError raised by a line of this project is the user's mistake: its text on stderr, exit status 2.

    Anything else, a library's ValueError included, keeps its traceback. With several processes the first one
    speaks; the others wait a moment, in which the launcher ends them, and speak only if they alone failed.
    """
    try:
        yield
    except ValueError as error:
        raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
        library = "site-packages" in raised_in.parts
        if library or not raised_in.is_relative_to(PROJECT):
            raise
        if int(os.environ.get("RANK", "0")) > 0:
            time.sleep(5)
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    except RuntimeError as error:
        if not (message := lost_peer(error)):
            raise
        print(f"error: {message}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def entry_point(main: Callable) -> Callable:
    """Decorates a script's main: `user_mistakes`, and an end that cannot hang.

    One of several processes leaves by os._exit, when everything is written: while the interpreter takes the
    model apart, DDP's destructor holds the GIL and joins gloo's thread, which may wait for it (torch 2.13).
    """

    @functools.wraps(main)
    def run(*args):
        try:
            with user_mistakes():
                main(*args)
            status = 0
        except SystemExit as end:
            if not _several_processes():
                raise
            status = end.code if isinstance(end.code, int) else 1
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
        except BaseException:
            if not _several_processes():
                raise
            status = 1
            traceback.print_exc()
        if _several_processes():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    return run


def _several_processes() -> bool:
    return int(os.environ.get("WORLD_SIZE", 1)) > 1
