"""Token shards, in a folder at any fsspec URL; data/preparation.py makes them.

    train-00000-00000.npy ...   token ids of whole documents, one after the other: uint16 or uint32 [n]
    validation-00000.npy ...
    tokenizer/                  the tokenizer that made the ids
    manifest.json               settings, counts, checksums; written last, when the folder is complete
    progress/                   the chunks that are done, until then
"""

import contextlib
import glob
import hashlib
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.cache import build_once
from data.rows import PackedRows
from data.sources import files
from data.token_set import Split, TokenSet
from utils.io.retry import FIRST_CONTACT
from utils.io.urls import Folder, explained

MANIFEST, PROGRESS = "manifest.json", "progress"
FORMAT = "tokens-1"


def read_file(folder: Folder, entry: dict) -> bytes:
    """The content of a file of the manifest. ValueError where it is lost or damaged."""
    try:
        data = folder.read(entry["file"])
    except FileNotFoundError:
        data = None
    if data is None or hashlib.sha256(data).hexdigest() != entry["sha256"]:
        problem = "missing" if data is None else "damaged (by its checksum)"
        raise ValueError(f"{folder.url}/{entry['file']} is {problem}. Copy it again, or run the same command "
                         "of data.prepare again: it makes missing and damaged files.")
    return data


def damaged_files(folder: Folder, manifest: dict, checksums: bool = True) -> list[str]:
    """The files that are missing or differ from the manifest: in size, on a local disk also in checksum."""
    damaged = []
    for entry in (file for split in manifest["splits"].values() for file in split["files"]):
        try:
            whole = folder.fs.size(folder.path(entry["file"])) == entry["size"]
            if whole and folder.local and checksums:
                read_file(folder, entry)
        except (FileNotFoundError, ValueError):
            whole = False
        damaged += [] if whole else [entry["file"]]
    return damaged


def is_whole(folder: Folder) -> bool:
    """Whether it has a manifest, and every file in its size."""
    manifest = finished_manifest(folder)
    return manifest is not None and not damaged_files(folder, manifest, checksums=False)


def finished_manifest(folder: Folder) -> dict | None:
    """The manifest, or None where there is none, or none that can be read."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return json.loads(folder.read(MANIFEST))


def read_manifest(url: str) -> dict | None:
    """The manifest of the shards at `url`, or None where `url` is no URL or folder or holds none.

    ValueError: the URL cannot be read, or its preparation is unfinished."""
    a_file = files.suffix(url) in (*files.SUFFIXES, ".bin", ".tfrecord") or glob.has_magic(url)
    if a_file if "://" in url else not os.path.isdir(os.path.expanduser(url)):
        return None
    folder = Folder(url)
    with explained(url, "read"):
        names = folder.names(retries=FIRST_CONTACT)
        manifest = json.loads(folder.read(MANIFEST)) if MANIFEST in names else None
        begun = PROGRESS in names and "settings.json" in folder.names(PROGRESS)
    if begun and MANIFEST not in names:
        raise ValueError(f"{url} is not finished; run the same `python -m data.prepare` command to resume.")
    made_in = str(manifest.get("format") if isinstance(manifest, dict) else None)
    if made_in.startswith("token") and made_in != FORMAT:
        raise ValueError(f"{url}: format {made_in!r}, but this version reads {FORMAT!r}. Prepare it again.")
    return manifest if made_in == FORMAT else None


def open_shards(url: str, cache_dir) -> TokenSet | None:
    """The token shards at `url`, None where it holds none. Local files are read where they lie, others are
    copied to `cache_dir` once. Each is verified once. ValueError: a file is lost or damaged."""
    if (manifest := read_manifest(url)) is None:
        return None
    folder = Folder(url)
    tokens = shard_set(url, manifest, partial(_verified, folder, cache_dir))
    tokens.tokenizer, tokens.tokenizer_name = manifest["tokenizer"], f"{folder.root}/tokenizer"

    def copy(target: Path) -> None:
        for name in folder.names("tokenizer"):
            (target / name).write_bytes(folder.read(f"tokenizer/{name}"))

    if not folder.local:
        tokens.tokenizer_name = str(build_once(cache_dir, "tokenizer", manifest["tokenizer"], copy))
    return tokens


def shard_set(name: str, manifest: dict, fetch: Callable[[list[dict]], Path], kind=PackedRows) -> TokenSet:
    """What a manifest lists. fetch(entries): gives the local folder of these files."""
    splits = {}
    for split, entry in manifest["splits"].items():
        files, account = entry["files"], manifest["accounting"][split]
        bytes_per_token = account["bytes"] / max(account["tokens"], 1)
        opened = partial(_opened, files, fetch)
        splits[split] = Split(entry["tokens"], content_of(files), opened, bytes_per_token, shards=files)
    return TokenSet(name, splits, kind)


def _opened(entries: list[dict], fetch: Callable, max_tokens: int) -> tuple[list[np.ndarray], str]:
    """The first of these files that have so many tokens, 0: all; and their content."""
    wanted, tokens = [], 0
    for entry in entries:
        if not max_tokens or tokens < max_tokens:
            wanted, tokens = [*wanted, entry], tokens + entry["tokens"]
    folder = fetch(wanted)
    return [np.load(folder / entry["file"], mmap_mode="r") for entry in wanted], content_of(wanted)


def content_of(entries: list[dict]) -> str:
    """A hash of the content of these files."""
    return hashlib.sha256(repr([entry["sha256"] for entry in entries]).encode()).hexdigest()[:32]


def _verified(folder: Folder, cache_dir, entries: list[dict]) -> Path:
    """The local folder of these files, after a look at their checksums; remote ones are copied."""

    def copy(target: Path) -> None:
        what = "checking" if folder.local else "copying"
        for entry in tqdm(entries, desc=f"{what} {folder.url}", disable=None):
            data = read_file(folder, entry)
            if not folder.local:
                (target / entry["file"]).write_bytes(data)

    if not folder.local:
        return build_once(cache_dir, "shards", entries, copy)
    paths = [Path(folder.root, entry["file"]) for entry in entries]
    states = files.states([str(path) for path in paths if path.exists()])
    build_once(cache_dir, "verified", [states, entries], copy)
    return Path(folder.root)
