"""Token shards, in a folder at any fsspec URL; data/factory.py makes them.

    train-00000-00000.npy ...   token ids of whole documents, one after the other: uint16 or uint32 [n]
    validation-00000.npy ...
    tokenizer/                  the tokenizer that made the ids
    manifest.json               settings, counts, checksums; written last, when the folder is complete
    progress/                   the chunks that are done, until then
"""

import contextlib
import glob
import hashlib
import io
import json
import os
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.cache import build_once
from data.encode import tokenizer_fingerprint
from data.rows import PackedRows
from data.sources import files
from utils.io.retry import FIRST_CONTACT
from utils.io.urls import Folder, explained

MANIFEST, PROGRESS = "manifest.json", "progress"
FORMAT = "tokens-1"


def write_tokens(folder: Folder, name: str, ids: np.ndarray) -> dict:
    """Writes token ids [n] as .npy. Returns the file's entry in the manifest."""
    data = io.BytesIO()
    np.save(data, ids)
    content = data.getvalue()
    folder.write(name, content)
    digest = hashlib.sha256(content).hexdigest()
    return {"file": name, "tokens": len(ids), "size": len(content), "sha256": digest}


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


def finished_manifest(folder: Folder) -> dict | None:
    """The manifest, or None where there is none, or none that can be read."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return json.loads(folder.read(MANIFEST))


def read_manifest(url: str) -> dict | None:
    """The manifest of the shards at `url`, or None where `url` is no URL or folder or holds none.

    ValueError: the URL cannot be read, or its preparation is unfinished."""
    a_file = files.suffix(url) in (*files.SUFFIXES, ".bin", ".tfrecord") or glob.has_magic(url)
    if a_file if "://" in str(url) else not os.path.isdir(os.path.expanduser(url)):
        return None
    folder = Folder(url)
    with explained(url, "read"):
        names = folder.names(tries=FIRST_CONTACT)
        unfinished = MANIFEST not in names and PROGRESS in names and "settings.json" in folder.names(PROGRESS)
        manifest = json.loads(folder.read(MANIFEST)) if MANIFEST in names else None
    if unfinished:
        raise ValueError(f"{folder.url} is not finished; run the same `python -m data.prepare` command to resume.")
    made_in = str(manifest.get("format") if isinstance(manifest, dict) else None)
    if made_in.startswith("token") and made_in != FORMAT:
        raise ValueError(f"{url}: format {made_in!r}, but this version reads {FORMAT!r}. Prepare it again.")
    return manifest if made_in == FORMAT else None


def check_shards(url: str, tokenizer=None) -> dict:
    """The manifest of token shards. ValueError where there are none, or another tokenizer made them."""
    manifest = read_manifest(url)
    if manifest is None:
        raise ValueError(f"{url} holds no token shards; `python -m data.prepare` makes them.")
    if tokenizer is not None and tokenizer_fingerprint(tokenizer) != manifest["tokenizer"]:
        raise ValueError(f"tokenizer_name: not the tokenizer that made {url}: use {url}/tokenizer.")
    return manifest


def entries_of(manifest: dict, url: str, split: str, block_size: int) -> list[dict]:
    """The manifest's entries for the files of a split. ValueError where it has no row."""
    tokens = {name: entry["tokens"] for name, entry in manifest["splits"].items()}
    if tokens.get(split, 0) < block_size:
        have = ", ".join(name for name, count in tokens.items() if count >= block_size)
        raise ValueError(f"{url} has no row of {block_size} tokens for {split}, only for {have or 'none'}: "
                         "set eval_dataset_name.")
    return manifest["splits"][split]["files"]


def open_shards(url: str, split: str, block_size: int, *, cache_dir: str, max_rows: int = 0) -> PackedRows:
    """Map-style rows of the shards at `url`, or the first max_rows. Local files are read where they lie,
    others are copied to `cache_dir` once. Each is verified once. ValueError: a file is lost or damaged."""
    manifest, folder = check_shards(url), Folder(url)
    wanted, tokens = [], 0
    for entry in entries_of(manifest, url, split, block_size):
        if not max_rows or tokens < max_rows * block_size:
            wanted, tokens = [*wanted, entry], tokens + entry["tokens"]

    def copy(target: Path) -> None:
        what = "checking" if folder.local else "copying"
        for entry in tqdm(wanted, desc=f"{what} {url}, {split}", disable=None):
            data = read_file(folder, entry)
            if not folder.local:
                (target / entry["file"]).write_bytes(data)

    if folder.local:
        where = Path(folder.root)
        paths = [where / entry["file"] for entry in wanted]
        states = files.states([str(path) for path in paths if path.exists()])
        build_once(cache_dir, "verified", [states, wanted], copy)
    else:
        where = build_once(cache_dir, "shards", wanted, copy)
    return rows_of(where, manifest, split, wanted, block_size, max_rows)


def content_of(entries: list[dict]) -> str:
    """A hash of the content of these files."""
    return hashlib.sha256(repr([entry["sha256"] for entry in entries]).encode()).hexdigest()[:32]


def rows_of(folder: Path, manifest: dict, split: str, entries: list[dict], block_size: int, most: int = 0,
            kind=PackedRows) -> PackedRows:
    """Rows from these files of a local folder."""
    arrays = [np.load(folder / entry["file"], mmap_mode="r") for entry in entries]
    account = manifest["accounting"][split]
    return kind(arrays, block_size, most, content_of(entries), account["bytes"] / max(account["tokens"], 1))


def fetch_tokenizer(url: str, cache_dir: str) -> str:
    """The folder of the shards' tokenizer, or of its copy in `cache_dir` if they are remote."""
    folder = Folder(url)
    if folder.local:
        return f"{folder.root}/tokenizer"

    def copy(target: Path) -> None:
        for name in folder.names("tokenizer"):
            (target / name).write_bytes(folder.read(f"tokenizer/{name}"))

    return str(build_once(cache_dir, "tokenizer", check_shards(url)["tokenizer"], copy))
