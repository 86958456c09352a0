"""Token shards: what data/factory.py has made, in a folder at any fsspec URL.

    train-00000-00000.npy ...     token ids of whole documents, one after the other: uint16 or uint32 [any
    number] validation-00000.npy ... tokenizer/                    the tokenizer that made the ids
    manifest.json                 settings, counts, checksums; written last: with it, the folder is complete
"""

import glob
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from data.cache import build_once
from data.encode import token_dtype, tokenizer_fingerprint
from data.factory import PROGRESS, Factory
from data.files import read_file
from data.rows import PackedRows
from data.sources import files
from utils.io.retry import FIRST_CONTACT
from utils.io.urls import Folder, explained

MANIFEST = "manifest.json"
FORMAT = "tokens-1"


def read_manifest(url: str) -> dict[str, Any] | None:
    """The manifest of the shards at `url`. None where there are none, or what is no URL or folder.

    Raises ValueError for a URL that cannot be read, or an unfinished preparation."""
    a_file = files.suffix(url) in (*files.SUFFIXES, ".bin", ".tfrecord") or glob.has_magic(url)
    if a_file if "://" in str(url) else not os.path.isdir(url):
        return None
    folder = Folder(url)
    with explained(url, "read"):
        names = folder.names(tries=FIRST_CONTACT)
        if MANIFEST not in names:
            if PROGRESS in names and "settings.json" in folder.names(PROGRESS):
                raise ValueError("not finished; run the same `python -m data.prepare` command to resume")
            return None
    with explained(f"{url}/{MANIFEST}", "read"):
        manifest = json.loads(folder.read(MANIFEST))
    made = str(manifest.get("format") if isinstance(manifest, dict) else None)
    if made.startswith("token") and made != FORMAT:
        raise ValueError(f"{url}: format {made!r}, and this version reads {FORMAT!r}. Prepare it again.")
    return manifest if made == FORMAT else None


def complete(factory: Factory, tokenizer, settings: dict, check: Callable[[dict], None]) -> dict[str, Any]:
    """The manifest of a folder of shards, which is made, resumed, or where files are lost or damaged, mended.

    check: called with what Factory.finish returns, before the manifest is written; raises ValueError."""
    folder = factory.folder
    if MANIFEST in folder.names():
        manifest = json.loads(folder.read(MANIFEST))
        if damaged := damaged_files(folder, manifest):
            print(f"{folder.url}: made again: {', '.join(damaged)}", file=sys.stderr, flush=True)
            mend(factory, manifest, damaged)
        return manifest
    if there := factory.resume():
        print(f"{folder.url}: resumes after {there:,} chunks", file=sys.stderr, flush=True)
    factory.run()
    return write_manifest(factory, tokenizer, settings, check)


def write_manifest(factory: Factory, tokenizer, settings: dict,
                   check: Callable[[dict], None]) -> dict[str, Any]:
    """Completes a folder whose chunks are all made."""
    folder, made = factory.folder, factory.finish()
    check(made)
    with tempfile.TemporaryDirectory() as temporary:
        for file in sorted(tokenizer.save_pretrained(temporary)):
            folder.write(f"tokenizer/{Path(file).name}", Path(file).read_bytes())
    manifest = {"format": FORMAT, "dtype": str(token_dtype(tokenizer)),
                "tokenizer": tokenizer_fingerprint(tokenizer), "settings": settings} | made  # fmt: skip
    folder.write(MANIFEST, json.dumps(manifest, indent=1).encode())
    folder.remove(PROGRESS)
    return json.loads(json.dumps(manifest))


def mend(factory: Factory, manifest: dict[str, Any], damaged: list[str]) -> None:
    """Makes files of finished shards again. ValueError where the source gives others now."""
    factory.lines = {tuple(line["chunk"]): line for line in manifest["chunks"]}
    wanted, rest = set(), set()
    for split, entry in manifest["splits"].items():
        for file in entry["files"]:
            if "chunk" in file:
                factory.lines[tuple(file["chunk"])] |= {"tokens": file["tokens"]}
            if file["file"] in damaged:
                wanted |= {tuple(file["chunk"])} if "chunk" in file else set()
                rest |= set() if "chunk" in file else {split}
    factory.make_again(wanted, rest)
    for split in rest:
        factory.write_rest(split)
    factory.folder.remove(PROGRESS)
    if left := damaged_files(factory.folder, manifest):
        raise ValueError(f"{factory.folder.url}: {', '.join(left)} cannot be made again, as the source has "
                         "other documents now. Delete the folder to prepare all of it.")


def check_shards(url: str, tokenizer=None) -> dict[str, Any]:
    """The manifest of token shards. ValueError with every reason why they cannot be used, and the remedy."""
    manifest = read_manifest(url)
    if manifest is None:
        raise ValueError(f"{url} holds no token shards; `python -m data.prepare` makes them.")
    if tokenizer is not None and tokenizer_fingerprint(tokenizer) != manifest["tokenizer"]:
        raise ValueError(f"tokenizer_name: not the tokenizer that made {url}: use {url}/tokenizer.")
    return manifest


def split_entry(manifest: dict[str, Any], url: str, split: str, block_size: int) -> dict[str, Any]:
    entry = manifest["splits"].get(split, {"tokens": 0})
    if entry["tokens"] < block_size:
        have = ", ".join(name for name, other in manifest["splits"].items() if other["tokens"] >= block_size)
        raise ValueError(f"{url} has no row of {block_size} tokens for {split}, only for {have or 'none'}: "
                         "set eval_dataset_name.")
    return entry


def damaged_files(folder: Folder, manifest: dict[str, Any]) -> list[str]:
    """The files of shards that are missing, or not what the manifest says: by their sizes, and of those here
    by their checksums."""
    damaged = []
    for entry in all_files(manifest):
        try:
            assert folder.fs.size(folder.path(entry["file"])) == entry["size"]
            if folder.local:
                read_file(folder, entry)
        except (ValueError, FileNotFoundError, AssertionError):
            damaged.append(entry["file"])
    return damaged


def all_files(manifest: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for entry in manifest["splits"].values():
        yield from entry["files"]


def open_shards(url: str, split: str, block_size: int, *, cache_dir: str, max_rows: int = 0) -> PackedRows:
    """Map-style rows of the shards at `url`, or the first max_rows: local files are read where they lie,
    others are copied once to `cache_dir`. Each file is verified once. ValueError as of check_shards,
    read_shard."""
    manifest, folder = check_shards(url), Folder(url)
    wanted, tokens = [], max_rows * block_size
    for entry in split_entry(manifest, url, split, block_size)["files"]:
        if not max_rows or tokens > 0:
            wanted, tokens = [*wanted, entry], tokens - entry["tokens"]

    def copy(target: Path) -> None:
        what = "checking" if folder.local else "copying"
        for entry in tqdm(wanted, desc=f"{what} {url}, {split}", disable=None):
            data = read_file(folder, entry)
            if not folder.local:
                (target / entry["file"]).write_bytes(data)

    if not folder.local:
        where = build_once(cache_dir, "shards", wanted, copy)
    else:
        where = Path(folder.root)
        there = [str(where / entry["file"]) for entry in wanted if (where / entry["file"]).exists()]
        build_once(cache_dir, "verified", [files.states(there), wanted], copy)
    return rows_of(where, manifest, split, wanted, block_size, max_rows)


def rows_of(folder: Path, manifest: dict, split: str, entries: list[dict], block_size: int, most: int = 0,
            kind=PackedRows) -> PackedRows:
    """Rows of these files of a local folder."""
    arrays = [np.load(folder / entry["file"], mmap_mode="r") for entry in entries]
    content = hashlib.sha256(repr([entry["sha256"] for entry in entries]).encode()).hexdigest()[:32]
    account = manifest["accounting"][split]
    return kind(arrays, block_size, most, content, account["bytes"] / max(account["tokens"], 1))


def fetch_tokenizer(url: str, cache_dir: str) -> str | None:
    """A local folder with the tokenizer of the shards at `url`; once copied to `cache_dir` if remote. None
    where they bring none."""
    if (manifest := read_manifest(url)) is None:
        return None
    folder = Folder(url)
    if folder.local:
        return f"{folder.root}/tokenizer"

    def copy(target: Path) -> None:
        for name in folder.names("tokenizer"):
            (target / name).write_bytes(folder.read(f"tokenizer/{name}"))

    return str(build_once(cache_dir, "tokenizer", manifest["tokenizer"], copy))
