"""What a name of files stands for: a file, folder, glob or URL; its files, and which split each is of.

Hidden files and folders (.x, __x) are left out. Splits are those of `load_dataset`: words of SPLIT_WORDS in
the names of folders, or where no folder has one, of files.
"""

import glob
import hashlib
import os
import re
from collections import Counter, deque

import fsspec

from utils.io.text import without_secrets
from utils.io.urls import explained, open_url

JSON_LINES = (".jsonl", ".ndjson", ".jsonlines", ".json")
SUFFIXES = (*JSON_LINES, ".csv", ".tsv", ".txt", ".parquet")
TOKEN_FILES = (".tfrecord", ".tfrecords", ".bin", ".ds")  # files of token ids, for data/convert.py
# A folder that holds more files of these endings than of SUFFIXES is read as text, a document each.
CODE = """.py .pyi .js .jsx .ts .tsx .java .kt .scala .c .h .cc .cpp .hpp .cs .go .rs .rb .php .swift .r
    .jl .lua .pl .sh .sql .hs .ml .ex .dart .zig .md .rst .tex""".split()
SPLIT_WORDS = {"train": "train|training", "validation": "validation|valid|dev|val",
               "test": "test|testing|eval|evaluation"}  # as in datasets.data_files
METADATA = {"manifest.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
# Entries that change with a file's content, in the file systems local, S3, GCS, Azure, http, hf.
TAGS = ("mtime", "ETag", "etag", "LastModified", "last_modified", "Last-Modified", "updated", "blob_id")


def is_files(name: str) -> bool:
    """Whether the name is a file, a folder, a glob or a URL, and nothing that the datasets library wrote."""
    path_like = "://" in name or glob.has_magic(name) or name[-1:] == "/" or name.startswith(("/", "~", "."))
    return not is_saved(name) and (path_like or os.path.exists(name) or suffix(name) in SUFFIXES)


def is_saved(name: str) -> bool:
    """Whether the name is a folder that save_to_disk of the datasets library has written."""
    name = os.path.expanduser(name)
    alone = all(os.path.exists(f"{name}/{file}.json") for file in ("dataset_info", "state"))
    return alone or os.path.exists(f"{name}/dataset_dict.json")


def suffix(path: str) -> str:
    """Its ending, without that of a compression or the query of a web address."""
    path = path.partition("?")[0] if path.startswith(("http://", "https://")) else path
    return os.path.splitext(re.sub(r"\.(gz|bz2|xz|zst)$", "", path.lower()))[1]


def list_files(name: str) -> tuple[fsspec.AbstractFileSystem, str, list[str]]:
    """(file system, the folder that the name begins with, the files there) of a file, folder, glob or URL."""
    with explained(f"dataset_name {name!r}", "listed"):
        files, path = open_url(os.path.expanduser(name))
        if suffix(path) in SUFFIXES and files.isfile(path):  # first, as over http isdir reads the whole file
            return files, os.path.dirname(path), [path]
        if glob.has_magic(path) and not files.exists(path):  # my[1].jsonl may be a file's name
            found = files.glob(path, detail=True)
            fixed = re.split(r"[*?\[]", path)[0].rpartition("/")[0]
            return files, fixed, [one for one, about in found.items() if about["type"] != "directory"]
        if not files.isdir(path):
            return files, os.path.dirname(path), [path] * files.exists(path)
        local = isinstance(files, fsspec.get_filesystem_class("file"))
        return files, path.rstrip("/"), _follow_links(path) if local else files.find(path)


def _follow_links(path: str) -> list[str]:
    """The files below a folder, each folder once: links may form a circle. Linked folders come last."""
    paths, seen, folders = [], set(), deque([path])
    while folders:
        if (real := os.path.realpath(folder := folders.popleft())) not in seen:
            seen.add(real)
            for entry in os.scandir(folder):
                later = folders.append if entry.is_symlink() else folders.appendleft
                (later if entry.is_dir() else paths.append)(entry.path)
    return paths


def split_files(name: str, endings=SUFFIXES, say: bool = False) -> dict[str, list[str]]:
    """{split: sorted URLs} of the files with these endings, by the rules above. say: print what became which
    split, and what is left out."""
    files, base, paths = list_files(name)
    if not paths:
        raise ValueError(f"dataset_name {name!r}: no such file, folder or Hub data set, or an empty one; "
                         "check its spelling")
    inside = {path: path.removeprefix(base).lstrip("/") for path in paths}
    visible = sorted(path for path in paths if not re.search(r"(^|/)(\.|__[^/]*/)", inside[path]))
    known = [path for path in visible if suffix(path) in endings]
    known = [path for path in known if os.path.basename(path) not in METADATA] or known
    as_text = endings == SUFFIXES and _programs(visible) > len(known)
    if as_text:  # then .json files and tables are no data
        known = [path for path in visible if suffix(path) in (*CODE, ".txt")]
        splits = {"train": known}
    elif known:
        splits = _splits_by_words(name, known, inside)
    elif {*TOKEN_FILES} & {*map(suffix, visible)}:
        raise ValueError(f"dataset_name {name!r} holds token ids: run `python -m data.convert {name} tokens/ "
                         "--tokenizer_name gpt2` once, with the tokenizer that made them, and name tokens/ "
                         "here")
    elif {*map(suffix, visible)} == {suffix(name)} - {""} and b"\0" not in files.head(visible[0], 4096):
        splits = {"train": visible}  # the name selects other files, and they are text
    else:
        raise ValueError(f"dataset_name {name!r} holds no file of the types {' '.join(endings)}; to read "
                         "others as plain text, select them by a glob, such as 'src/**/*.py'")
    if say and known:
        left_out = len(paths) - sum(map(len, splits.values()))
        other = sorted({suffix(path) or "no ending" for path in visible} - {*map(suffix, known)})
        _say(name, splits, as_text, left_out, other)
    return {split: [*map(files.unstrip_protocol, some)] for split, some in splits.items()}


def _programs(paths: list[str]) -> int:
    """How many are source code or other text, and no README, as a clone of a data set has one."""
    return sum(suffix(path) in CODE and "README" not in path for path in paths)


def _say(name: str, splits: dict[str, list[str]], as_text: bool, left_out: int, other: list[str]) -> None:
    """Prints what became which split, or which kinds of files are read as text, and what is left out."""
    if not (as_text or left_out or len(splits) > 1):
        return
    by_words = ", by words in their paths" * (len(splits) > 1)
    told = ", ".join(f"{split} {len(some):,}" for split, some in splits.items()) + by_words
    if as_text:
        kinds = Counter(map(suffix, splits["train"])).most_common()
        told = f"read as text, a document each: {', '.join(f'{n:,} {kind}' for kind, n in kinds)}"
    told += f"; {left_out:,} not read" * (left_out > 0)
    told += f" (such as {' '.join(other[:9])})" * (left_out > 0 and bool(other))
    print(f"data       {without_secrets(name)}, files: {told}", flush=True)


def _splits_by_words(name: str, paths: list[str], inside: dict[str, str]) -> dict[str, list[str]]:
    """{split: paths}. Files of none are left out where there is a split train; else all files are train."""

    def named(part: str) -> set[str]:
        return {split for split, words in SPLIT_WORDS.items()
                if re.search(rf"(^|[-._ 0-9/])({words})([-._ 0-9/]|$)", part)}

    found = {path: named(os.path.dirname(inside[path])) for path in paths}
    if not any(found.values()):
        found = {path: named(os.path.basename(path)) for path in paths}
    if len(paths) == 1 or not any("train" in splits for splits in found.values()):
        return {"train": paths}
    if unclear := [inside[path] for path in paths if len(found[path]) > 1]:
        raise ValueError(f"dataset_name {name!r}: {', '.join(unclear[:9])}: of two splits, by the words in "
                         "the path; rename, or select the wanted files by a glob")
    splits = {split: [path for path in paths if split in found[path]] for split in SPLIT_WORDS}
    return {split: some for split, some in splits.items() if some}


def states(urls: list[str]) -> list[tuple]:
    """(URL, size, tags...) of each file, which change when the file does."""
    infos = [(url, files.info(path)) for url in urls for files, path in [fsspec.core.url_to_fs(url)]]
    return [(without_secrets(url), *(str(info.get(key)) for key in ("size", *TAGS))) for url, info in infos]


def digest(*parts) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
