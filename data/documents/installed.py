"""The Python on this machine as text, which needs no network: its source code, and the English in it."""

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
    """(fingerprint, units), of which there is one."""
    rows = INSTALLED[source.dataset_name]
    files = [(owner, path, size, file.stat().st_mtime_ns) for owner, path, size, _, file in _python_files()]
    code = Path(inspect.getfile(rows)).read_bytes()
    return digest(source.dataset_name, code, files), [rows]


@functools.cache
def _python_files() -> list[tuple[str, str, int, str, Path]]:
    """(distribution and version, relative path, bytes, license, file) of every .py file of the standard
    library and of site-packages, in an order that does not depend on where the interpreter is installed."""
    found = {}

    def search(root, owners, default):
        for folder, folders, names in os.walk(root):
            folders[:] = {*folders} - {"__pycache__", "site-packages", "dist-packages"}
            for file in (Path(folder, name) for name in names if name.endswith(".py")):
                if file not in found and file.is_file():
                    path = file.relative_to(root).as_posix()
                    owner, license = owners.get(path, default)
                    found[file] = (owner, path, file.stat().st_size, license, file)

    python = f"{platform.python_implementation()} {platform.python_version()}"
    search(sysconfig.get_path("stdlib"), {}, (python, "PSF-2.0"))
    for root in _site_packages():
        owners = {}
        for package in metadata.distributions(path=[root]):
            owner = (f"{package.name} {package.version}", _license(package.metadata))
            owners.update((file.as_posix(), owner) for file in package.files or () if file.suffix == ".py")
        search(root, owners, ("site-packages", "unknown"))
    return sorted(found.values())


def _site_packages() -> dict[str, None]:
    return dict.fromkeys(map(sysconfig.get_path, ("purelib", "platlib")))


def _license(package) -> str:
    return package.get("License-Expression") or (package.get("License") or "unknown").split("\n")[0]


def _text(file: Path) -> str | None:
    """None where it is not UTF-8."""
    with suppress(UnicodeDecodeError):
        return file.read_bytes().decode("utf-8-sig")


def _python_documents() -> Iterator[dict]:
    """Python source with the columns, and the column types, of codeparrot-ds."""
    for owner, path, size, license, file in _python_files():
        columns = {"repo_name": owner, "path": path, "copies": "1", "size": str(size)}
        yield {**columns, "content": _text(file), "license": license}


# A docstring, found lexically: a triple-quoted string that starts a line, first in the file or after a line
# that ends in ":". Parsing every installed file with ast takes a minute, this a few seconds.
COMMENT = r"[ \t]*(?:#[^\n]*)?\n"
DOCSTRING = re.compile(rf"""(?:\A(?:{COMMENT})*|:{COMMENT}\s*)[rRuU]?(\"\"\"|''')(.*?)\1""", re.DOTALL)
MARKUP = re.compile(r">>>|\.\. |::|https?:|[|<>{}\\]|---|===|^\s*[:@#]", re.MULTILINE)
LEAST_PROSE = 400  # characters: modules and packages with less are left out


def _docs_documents() -> Iterator[dict]:
    """The English in the same installation: package descriptions, then docstrings, a module per document.

    Paragraphs keep their order, one line each, a blank line between; code and markup are left out."""
    for root in _site_packages():
        for package in sorted(metadata.distributions(path=[root]), key=lambda package: package.name):
            text = package.metadata.get_payload() or package.metadata.get("Description") or ""
            yield from _document(f"{package.name} {package.version}", "METADATA", [str(text)])
    for owner, path, _, _, file in _python_files():
        found = DOCSTRING.finditer(_text(file) or "")
        yield from _document(owner, path, (cleandoc(docstring[2]) for docstring in found))


def _document(owner: str, path: str, texts: Iterable[str]) -> Iterator[dict]:
    """Of the paragraphs that read as sentences: mostly letters, from a capital to a full stop."""
    prose = []
    for paragraph in (paragraph for text in texts for paragraph in re.split(r"\n\s*\n", text)):
        line = " ".join(paragraph.split())
        letters = sum(character.isalpha() or character == " " for character in line)
        if len(line) >= 40 and line[0].isupper() and line[-1] in ".!?" and letters >= 0.9 * len(line):
            prose += [] if MARKUP.search(paragraph) else [line]
    if sum(map(len, prose)) >= LEAST_PROSE:
        yield {"repo_name": owner, "path": path, "text": "\n\n".join(prose)}


INSTALLED = {"installed-python": _python_documents, "installed-docs": _docs_documents}
