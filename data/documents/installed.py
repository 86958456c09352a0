"""The Python on this machine as text, without a network: its source code, and the English in it."""

import functools
import inspect
import os
import platform
import re
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import metadata
from inspect import cleandoc
from pathlib import Path

from data.documents.names import digest


def splits(source) -> list[str]:
    return ["train"]


def open_units(source) -> tuple[str, list]:
    """(fingerprint, [the only unit]). The fingerprint changes with the files and the code of their reader."""
    read = INSTALLED[source.dataset_name]
    files = [(package, path, size, file.stat().st_mtime_ns) for package, path, size, _, file in _list_files()]
    code = Path(inspect.getfile(read)).read_bytes()
    return digest(source.dataset_name, code, files), [read]


@functools.cache
def _list_files() -> list[tuple[str, str, int, str, Path]]:
    """(package and version, relative path, bytes, license, file) of each .py file of the standard library and
    of site-packages, in an order that does not depend on where the interpreter is installed."""
    files = {}

    def add_files(root, owners, default):
        for folder, folders, names in os.walk(root):
            folders[:] = {*folders} - {"__pycache__", "site-packages", "dist-packages"}
            for file in (Path(folder, name) for name in names if name.endswith(".py")):
                if file not in files and file.is_file():
                    path = file.relative_to(root).as_posix()
                    package, license = owners.get(path, default)
                    files[file] = (package, path, file.stat().st_size, license, file)

    python = f"{platform.python_implementation()} {platform.python_version()}"
    add_files(sysconfig.get_path("stdlib"), {}, (python, "PSF-2.0"))
    for root in _site_packages():
        owners = {}  # {relative path: (package and version, license)}
        for package in metadata.distributions(path=[root]):
            about = package.metadata
            license = about.get("License-Expression") or (about.get("License") or "unknown").split("\n")[0]
            owner = (f"{package.name} {package.version}", license)
            owners.update((file.as_posix(), owner) for file in package.files or () if file.suffix == ".py")
        add_files(root, owners, ("site-packages", "unknown"))
    return sorted(files.values())


def _site_packages() -> dict[str, None]:
    return dict.fromkeys(map(sysconfig.get_path, ("purelib", "platlib")))


def _read_text(file: Path) -> str | None:
    """None: the file is not UTF-8."""
    with suppress(UnicodeDecodeError):
        return file.read_bytes().decode("utf-8-sig")


def _read_python() -> Iterator[dict]:
    """The source files, with the columns and column types of codeparrot-ds."""
    for package, path, size, license, file in _list_files():
        columns = {"repo_name": package, "path": path, "copies": "1", "size": str(size)}
        yield {**columns, "content": _read_text(file), "license": license}


# A docstring: a triple-quoted string that starts a line, first in the file or after a line that ends in ":".
# Searching all installed files with this expression takes seconds; parsing them with ast takes a minute.
COMMENT = r"[ \t]*(?:#[^\n]*)?\n"
DOCSTRING = re.compile(rf"""(?:\A(?:{COMMENT})*|:{COMMENT}\s*)[rRuU]?(\"\"\"|''')(.*?)\1""", re.DOTALL)
MARKUP = re.compile(r">>>|\.\. |::|https?:|[|<>{}\\]|---|===|^\s*[:@#]", re.MULTILINE)
LEAST_PROSE = 400  # characters; modules and packages with less are left out


def _read_docs() -> Iterator[dict]:
    """The English in the same installation: package descriptions, then the docstrings of each module."""
    for root in _site_packages():
        for package in sorted(metadata.distributions(path=[root]), key=lambda package: package.name):
            text = package.metadata.get_payload() or package.metadata.get("Description") or ""
            yield from _select_prose(f"{package.name} {package.version}", "METADATA", [str(text)])
    for package, path, _, _, file in _list_files():
        docstrings = DOCSTRING.finditer(_read_text(file) or "")
        yield from _select_prose(package, path, (cleandoc(docstring[2]) for docstring in docstrings))


def _select_prose(package: str, path: str, texts: Iterable[str]) -> Iterator[dict]:
    """A document of the paragraphs that are prose: mostly letters, from a capital to a full stop, no code or
    markup. Each becomes one line; blank lines separate them."""
    prose = []
    for paragraph in (paragraph for text in texts for paragraph in re.split(r"\n\s*\n", text)):
        line = " ".join(paragraph.split())
        letters = sum(character.isalpha() or character == " " for character in line)
        if len(line) >= 40 and line[0].isupper() and line[-1] in ".!?" and letters >= 0.9 * len(line):
            prose += [] if MARKUP.search(paragraph) else [line]
    if sum(map(len, prose)) >= LEAST_PROSE:
        yield {"repo_name": package, "path": path, "text": "\n\n".join(prose)}


INSTALLED = {"installed-python": _read_python, "installed-docs": _read_docs}
