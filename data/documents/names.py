"""Lists the files that a name stands for (a file, folder, glob or URL), and the split of each.

Hidden files (.x) and folders (.x, __x) are left out. Splits are found as in `load_dataset`, by SPLIT_WORDS in
the names of folders or, if no folder has such a word, of files; without a train file all is train.
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
TOKEN_FILES = (".tfrecord", ".tfrecords", ".bin", ".ds")  # token ids, for data/convert.py
# A folder with more files of these endings than of SUFFIXES is read as text: each file is a document.
CODE = """.py .pyi .js .jsx .ts .tsx .java .kt .scala .c .h .cc .cpp .hpp .cs .go .rs .rb .php .swift .r
    .jl .lua .pl .sh .sql .hs .ml .ex .dart .zig .md .rst .tex""".split()
SPLIT_WORDS = {"train": "train|training", "validation": "validation|valid|dev|val",
               "test": "test|testing|eval|evaluation"}  # as in datasets.data_files
METADATA = {"manifest.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
# What changes with a file's content, by the names that local disks, S3, GCS, Azure, http and hf use for it.
TAGS = ("mtime", "ETag", "etag", "LastModified", "last_modified", "Last-Modified", "updated", "blob_id")


def is_files(name: str) -> bool:
    """Whether the name is a file, folder, glob or URL, but no save_to_disk folder."""
    path_like = "://" in name or glob.has_magic(name) or name[-1:] == "/" or name.startswith(("/", "~", "."))
    return not is_saved(name) and (path_like or os.path.exists(name) or suffix(name) in SUFFIXES)


def is_saved(name: str) -> bool:
    """Whether the name is a folder that save_to_disk of the datasets library wrote."""
    name = os.path.expanduser(name)
    is_dataset = all(os.path.exists(f"{name}/{file}.json") for file in ("dataset_info", "state"))
    return is_dataset or os.path.exists(f"{name}/dataset_dict.json")


def suffix(path: str) -> str:
    """The file's ending in lower case, without that of a compression or the query of a web address."""
    path = path.partition("?")[0] if path.startswith(("http://", "https://")) else path
    return os.path.splitext(re.sub(r"\.(gz|bz2|xz|zst)$", "", path.lower()))[1]


def list_files(name: str) -> tuple[fsspec.AbstractFileSystem, str, list[str]]:
    """(file system, base folder, paths of the files) of a file, folder, glob or URL."""
    with explained(f"dataset_name {name!r}", "listed"):
        files, path = open_url(os.path.expanduser(name))
        if suffix(path) in SUFFIXES and files.isfile(path):  # first, as over http isdir reads the whole file
            return files, os.path.dirname(path), [path]
        if glob.has_magic(path) and not files.exists(path):  # my[1].jsonl may be a file's name
            base = re.split(r"[*?\[]", path)[0].rpartition("/")[0]
            entries = files.glob(path, detail=True).items()
            return files, base, [path for path, info in entries if info["type"] != "directory"]
        if not files.isdir(path):
            return files, os.path.dirname(path), [path] * files.exists(path)
        local = isinstance(files, fsspec.get_filesystem_class("file"))
        return files, path.rstrip("/"), _follow_links(path) if local else files.find(path)


def _follow_links(path: str) -> list[str]:
    """The files below a folder. Each folder is read once, as links may form a circle; linked folders last."""
    paths, seen, folders = [], set(), deque([path])
    while folders:
        if (real := os.path.realpath(folder := folders.popleft())) not in seen:
            seen.add(real)
            for entry in os.scandir(folder):
                later = folders.append if entry.is_symlink() else folders.appendleft
                (later if entry.is_dir() else paths.append)(entry.path)
    return paths


def split_files(name: str, endings=SUFFIXES, report: bool = False) -> dict[str, list[str]]:
    """{split: sorted URLs} of the files with these endings. report: print the splits and what is not read."""
    files, base, paths = list_files(name)
    if not paths:
        raise ValueError(f"dataset_name {name!r}: no such file, folder or Hub dataset, or an empty one; "
                         "check its spelling")
    relative = {path: path.removeprefix(base).lstrip("/") for path in paths}
    visible = sorted(path for path in paths if not re.search(r"(^|/)(\.|__[^/]*/)", relative[path]))
    known = [path for path in visible if suffix(path) in endings]
    known = [path for path in known if os.path.basename(path) not in METADATA] or known
    # README files do not count: the clone of a dataset has one, too.
    code = [path for path in visible if suffix(path) in CODE and "README" not in path]
    as_text = endings == SUFFIXES and len(code) > len(known)
    if as_text:  # .json files and tables next to source code are no data
        known = [path for path in visible if suffix(path) in (*CODE, ".txt")]
        splits = {"train": known}
    elif known:
        splits = _find_splits(name, known, relative)
    elif {*TOKEN_FILES} & {*map(suffix, visible)}:
        raise ValueError(f"dataset_name {name!r} holds token ids: run `python -m data.convert {name} tokens/ "
                         "--tokenizer_name gpt2` once, with the tokenizer that made them, and name tokens/ "
                         "here")
    elif {*map(suffix, visible)} == {suffix(name)} - {""} and b"\0" not in files.head(visible[0], 4096):
        splits = {"train": visible}  # the name selects files of another type, and they are text
    else:
        raise ValueError(f"dataset_name {name!r} holds no file of the types {' '.join(endings)}; to read "
                         "others as plain text, select them by a glob, such as 'src/**/*.py'")
    if report and known:
        unread = len(paths) - sum(map(len, splits.values()))
        other_types = sorted({suffix(path) or "no ending" for path in visible} - {*map(suffix, known)})
        _report_files(name, splits, as_text, unread, other_types)
    return {split: [*map(files.unstrip_protocol, paths)] for split, paths in splits.items()}


def _report_files(name: str, splits: dict, as_text: bool, unread: int, other_types: list[str]) -> None:
    """Prints how many files each split has, or of which types the text files are, and what is not read."""
    if not (as_text or unread or len(splits) > 1):
        return
    message = ", ".join(f"{split} {len(paths):,}" for split, paths in splits.items())
    message += ", by words in their paths" * (len(splits) > 1)
    if as_text:
        counts = Counter(map(suffix, splits["train"])).most_common()
        message = f"read as text, a document each: {', '.join(f'{n:,} {ending}' for ending, n in counts)}"
    if unread:
        message += f"; {unread:,} not read"
        message += f" (such as {' '.join(other_types[:9])})" * bool(other_types)
    print(f"data       {without_secrets(name)}, files: {message}", flush=True)


def _find_splits(name: str, paths: list[str], relative: dict[str, str]) -> dict[str, list[str]]:
    """{split: paths}. Without a train file all files are train; with one, files of no split are left out."""

    def splits_in(part: str) -> set[str]:
        return {split for split, words in SPLIT_WORDS.items()
                if re.search(rf"(^|[-._ 0-9/])({words})([-._ 0-9/]|$)", part)}

    splits_of = {path: splits_in(os.path.dirname(relative[path])) for path in paths}
    if not any(splits_of.values()):
        splits_of = {path: splits_in(os.path.basename(path)) for path in paths}
    if len(paths) == 1 or not any("train" in splits for splits in splits_of.values()):
        return {"train": paths}
    if unclear := [relative[path] for path in paths if len(splits_of[path]) > 1]:
        raise ValueError(f"dataset_name {name!r}: paths with words of two splits: {', '.join(unclear[:9])}; "
                         "rename them, or select files by a glob")
    by_split = {split: [path for path in paths if split in splits_of[path]] for split in SPLIT_WORDS}
    return {split: paths for split, paths in by_split.items() if paths}


def stat_files(urls: list[str]) -> list[tuple]:
    """(URL, size, tags...) of each file; they change when the file does."""
    infos = [(url, files.info(path)) for url in urls for files, path in [fsspec.core.url_to_fs(url)]]
    return [(without_secrets(url), *(str(info.get(key)) for key in ("size", *TAGS))) for url, info in infos]


def digest(*parts) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
