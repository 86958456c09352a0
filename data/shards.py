"""Token shards: rows of T token ids in Parquet files, in a folder at any fsspec URL, made by data/prepare.py.

    train-00000.parquet ...       one column, input_ids: fixed_size_list<uint16 | uint32>[T]; the footer
    validation-00000.parquet ...  knows the rows, its key-value metadata the tokens
    tokenizer/                    the tokenizer that made the ids
    manifest.json                 settings, counts, checksums; written last: with it, the folder is complete

The functions here take token files of other projects, too (data/foreign.py).
"""

import glob
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from data.cache import RowFile, build_once
from data.foreign import SUFFIXES, check_foreign, is_foreign, open_foreign
from data.packing import PackedRows, prepare_splits, tokenizer_fingerprint
from data.sources import files
from data.sources.storage import FIRST_CONTACT, Folder, explained

MANIFEST = "manifest.json"
PROGRESS = "progress"  # folder of a preparation that is not finished
FORMAT = "token-rows-1"


def read_manifest(url: str) -> dict[str, Any] | None:
    """The manifest of the shards at `url`. None where there are none, or what is no URL or folder.

    Raises ValueError for a URL that cannot be read, or an unfinished preparation."""
    web = "://" in str(url)
    a_file = files.suffix(url) in files.SUFFIXES + SUFFIXES or glob.has_magic(url)
    if a_file if web else not os.path.isdir(url):
        return None
    folder = Folder(url)
    with explained(url, "read"):
        names = folder.names(tries=FIRST_CONTACT)
        if MANIFEST not in names:
            if PROGRESS in names and "settings.json" in folder.names(PROGRESS):
                raise ValueError("not finished; the same `python -m data.prepare` command goes on")
            return None
    with explained(f"{url}/{MANIFEST}", "read"):
        manifest = json.loads(folder.read(MANIFEST))
    made = manifest.get("format") if isinstance(manifest, dict) else None
    if str(made).startswith("token-rows") and made != FORMAT:
        raise ValueError(f"{url}: format {made!r}, and this version reads {FORMAT!r}. Prepare it again.")
    return manifest if made == FORMAT else None


def is_shards(url: str) -> bool:
    """Whether token shards or token files lie at `url`. Raises like read_manifest."""
    return read_manifest(url) is not None or is_foreign(url)


def check_shards(url: str, block_size: int | None = None, tokenizer=None, special: int = 0,
                 cache_dir: str = "cache") -> dict[str, Any]:
    """The manifest of token shards that fit. ValueError with every reason why they do not, and the remedy.

    special: how many tokens are added to a row, unless it is "whole", with its special tokens inside."""
    manifest = read_manifest(url)
    if manifest is None and is_foreign(url):
        return check_foreign(url, block_size, tokenizer, special, cache_dir)
    if manifest is None:
        raise ValueError(f"{url} holds no token shards; `python -m data.prepare` makes them.")
    problems, made = [], manifest["block_size"]
    added = 0 if manifest.get("whole") else special
    if block_size not in (None, made + added - special):
        why = "<s> and </s> are added to" if added else f"{block_size + special}, but"
        problems.append(f"block_size: {why} the {made} tokens of the rows of {url}: set --block_size "
                        f"{made + added}, or prepare other shards.")
    if tokenizer is not None and tokenizer_fingerprint(tokenizer) != manifest["tokenizer"]:
        problems.append(f"tokenizer_name: not the tokenizer that made {url}: use {url}/tokenizer.")
    if problems:
        raise ValueError("\n".join(problems))
    return manifest


def read_shard(folder: Folder, shard: dict[str, Any], block_size: int) -> np.ndarray:
    """Rows [n, T] of one shard of the manifest. ValueError where the file is not the one it names."""
    name = f"{folder.url}/{shard['file']}"
    try:
        data = folder.read(shard["file"])
    except FileNotFoundError as error:
        raise ValueError(f"{name} is missing. Copy it again, or prepare the folder anew.") from error
    if hashlib.sha256(data).hexdigest() != shard["sha256"]:
        raise ValueError(f"{name} is damaged (by its checksum). Copy it again, or prepare the folder anew.")
    from data.sources.tables import parquet_to_rows

    rows = parquet_to_rows(data)
    assert rows.shape == (shard["rows"], block_size), f"{name}: {rows.shape}"
    return rows


def split_entry(manifest: dict[str, Any], url: str, split: str) -> dict[str, Any]:
    entry = manifest["splits"].get(split)
    if entry is None or entry["rows"] == 0:
        have = ", ".join(name for name, e in manifest["splits"].items() if e["rows"])
        raise ValueError(f"{url} has no rows for {split}, only for {have or 'none'}: set eval_dataset_name.")
    return entry


def open_shards(url: str, split: str, *, cache_dir: str, block_size: int | None = None,
                max_rows: int = 0) -> PackedRows:
    """Map-style rows of the shards at `url`, or the first max_rows: copied once, each shard verified, to an
    array in `cache_dir` (2 or 4 bytes per token). ValueError as of check_shards, read_shard, build_once.

    block_size: of rows that are cut out of a file without any."""
    manifest = check_shards(url, cache_dir=cache_dir)
    entry = split_entry(manifest, url, split)
    if "format" not in manifest:
        return open_foreign(url, split, manifest["block_size"] or block_size, cache_dir, max_rows)
    block_size, dtype = manifest["block_size"], manifest["dtype"]
    most = min(entry["rows"], max_rows or entry["rows"])

    def write(folder: Path) -> dict[str, dict]:
        copy, source = RowFile(folder / f"{split}.npy", block_size, dtype), Folder(url)
        for shard in tqdm(entry["shards"], desc=f"copying {url}, {split}", disable=None):
            if copy.rows < most:
                copy.write(read_shard(source, shard, block_size)[: most - copy.rows])
        copy.close()
        return {split: manifest["accounting"][split]}

    settings = [entry["shards"], max_rows] if max_rows else entry["shards"]
    return prepare_splits(cache_dir, "shards", settings, write).splits[split]


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
