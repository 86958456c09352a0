"""Token shards, the one format that is trained on, in a folder at any fsspec URL:

    train-00000-00000.npy ...   token ids, one document after the other: uint16 or uint32 [n]
    validation-00000.npy ...
    tokenizer/                  the tokenizer that made the ids
    manifest.json               what made them, counts, checksums; written last, when the folder is complete
    progress/                   the chunks that are done, until then

preparation.py and pairs.py make them from text, data/convert.py from the token files of others. Rows are
views of them. A manifest's `width`, where it is not 1, is the length of the rows that the files hold: T of
rows that bring their special tokens, T + 3 of sentence pairs (kind "pairs").
"""

import glob
import io
import json
import os
import re
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import xxhash
from tqdm import tqdm

from data.batches.rows import PackedRows
from data.documents import names as files
from data.tokens.cache import build_once
from utils.io.files import checksum_file
from utils.io.retry import FIRST_CONTACT
from utils.io.urls import Folder, explained

MANIFEST, PROGRESS = "manifest.json", "progress"
FORMAT = "tokens-2"
NAME = r"[a-z]+-[\d-]+\.npy"  # of a file: a plain name, so that none leads out of the folder
ENTRY = {"file": str, "tokens": int, "size": int, "xxh3_128": str}


def write_shard(folder: Folder, name: str, ids: np.ndarray) -> dict:
    """Writes token ids [n] as .npy. Returns the file's entry in the manifest."""
    np.save(data := io.BytesIO(), ids)
    content = data.getvalue()
    folder.write(name, content)
    return {"file": name, "tokens": len(ids), "size": len(content), "xxh3_128": _checksum(content)}


def read_manifest(folder: Folder) -> dict | None:
    """The manifest, None where there is none. ValueError where it is damaged, of another format, or names
    other files than its own."""
    try:
        content = folder.read(MANIFEST, FIRST_CONTACT)
    except FileNotFoundError:
        return None
    try:
        manifest = json.loads(content)
        made_in = str(manifest.get("format"))
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{folder.url}/{MANIFEST} is damaged ({error}). Copy it again, or delete the folder "
                         "and prepare it again.") from error
    if made_in != FORMAT:
        if made_in.startswith("token"):
            raise ValueError(f"{folder.url}: format {made_in!r}, but this version reads {FORMAT!r}. Prepare "
                             "it again.")
        return None
    _check_manifest(manifest, folder.url)
    return manifest


def _check_manifest(manifest: dict, url: str) -> None:
    try:
        for split, found in manifest["splits"].items():
            for entry in found["files"]:
                wrong = [name for name, kind in ENTRY.items() if not isinstance(entry[name], kind)]
                if wrong or not re.fullmatch(NAME, entry["file"]):
                    raise ValueError(f"{url}/{MANIFEST}, {split}: {entry.get('file')!r} is no name of a file "
                                     "in this folder. Do not use it: it may come from somebody with bad "
                                     "intent.")
            account = manifest["accounting"][split]
            _ = account["bytes"], account["tokens"], found["tokens"]
        _ = manifest["dtype"], manifest["tokenizer"], manifest["settings"]["format"]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{url}/{MANIFEST} is damaged: it lacks {error}. Copy it again, or delete the "
                         "folder and prepare it again.") from error


class Shards:
    """A finished folder of token shards."""

    def __init__(self, url, manifest: dict | None = None):
        """manifest: it has been read already. ValueError where there is none, or a damaged one."""
        self.folder = Folder(url)
        self.url = self.folder.url
        self.manifest = manifest or read_manifest(self.folder)
        if self.manifest is None:
            raise ValueError(f"{self.url} holds no token shards")
        self.splits = self.manifest["splits"]
        self.width = self.manifest.get("width", 1)
        self.pairs = self.manifest.get("kind") == "pairs"
        self.row_tokens = self.width - 3 * self.pairs if self.width > 1 else None  # T of rows; None: any

    def with_rows(self, T: int) -> list[str]:
        """The splits with at least one row of T tokens."""
        size = self.width if self.width > 1 else T
        return [name for name, split in self.splits.items() if split["tokens"] >= size]

    def entries(self, split: str, max_tokens: int = 0) -> list[dict]:
        """The first files of a split that have so many tokens; 0: all."""
        wanted, tokens = [], 0
        for entry in self.splits[split]["files"]:
            if not max_tokens or tokens < max_tokens:
                wanted, tokens = [*wanted, entry], tokens + entry["tokens"]
        return wanted

    def content(self, split: str) -> str:
        """Changes with the ids and with the tokenizer."""
        sums = [entry["xxh3_128"] for entry in self.splits[split]["files"]]
        return files.digest(sums, self.manifest["tokenizer"])

    def check(self, entries: Sequence[dict] | None = None) -> str:
        """What is wrong with these files of a local folder, or with all; "" if nothing."""
        every = (entry for split in self.splits for entry in self.entries(split))
        for entry in every if entries is None else entries:
            path = Path(self.folder.root, entry["file"])
            if not path.is_file() or path.stat().st_size != entry["size"]:
                return f"{path} is missing or has another size"
            if checksum_file(path)["xxh3_128"] != entry["xxh3_128"]:
                return f"{path} is damaged (by its checksum)"
        return ""

    def local(self, cache_dir, entries: Sequence[dict]) -> "Shards":
        """These shards, or a copy in the cache, with these files, if they are not on a disk of this machine.
        ValueError: a file is lost or damaged."""
        if self.folder.local:
            if problem := self.check(entries):
                raise ValueError(f"{problem}. Copy it again, or delete {self.url} and prepare it again.")
            return self
        how = cache_dir, "shards", [self.manifest["settings"], entries], partial(self._copy, entries)
        copy = Shards(folder := build_once(*how))
        if copy.check(entries):  # it was whole once
            shutil.rmtree(folder)
            copy = Shards(build_once(*how))
        return copy

    def _copy(self, entries: Sequence[dict], target: Path) -> None:
        (target / "tokenizer").mkdir()
        names = [name for name in self.folder.names("tokenizer") if re.fullmatch(r"[\w.-]+", name)]
        for name in names:
            (target / "tokenizer" / name).write_bytes(self.folder.read(f"tokenizer/{name}"))
        for entry in tqdm(entries, desc=f"copying {self.url}", disable=None):
            try:
                data = self.folder.read(entry["file"])
            except FileNotFoundError:
                data = b""
            if _checksum(data) != entry["xxh3_128"]:
                raise ValueError(f"{self.url}/{entry['file']} is missing or damaged (by its checksum). Copy "
                                 "it again, or delete the folder and prepare it again.")
            (target / entry["file"]).write_bytes(data)
        kept = {entry["file"] for entry in entries}
        splits = {split: found | {"files": [entry for entry in found["files"] if entry["file"] in kept]}
                  for split, found in self.splits.items()}
        splits = {split: found for split, found in splits.items() if found["files"]}
        (target / MANIFEST).write_text(json.dumps(self.manifest | {"splits": splits}))

    def rows(self, split: str, T: int, max_rows: int = 0) -> PackedRows:
        """Rows of T tokens, or the first max_rows. The files must be on this machine (`local`)."""
        account, width = self.manifest["accounting"][split], self.width if self.width > 1 else T
        entries = self.entries(split, max_rows * width)
        arrays = [np.load(Path(self.folder.root, entry["file"]), mmap_mode="r") for entry in entries]
        known = account["bytes"] and not self.manifest.get("lossy")
        bytes_per_token = account["bytes"] / max(account["tokens"], 1) if known else float("nan")
        if self.pairs:
            from data.batches.pair_rows import PairRows as Rows
        else:
            Rows = PackedRows
        return Rows(arrays, width - 3 * self.pairs, max_rows, self.content(split), bytes_per_token)


def _checksum(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def find_shards(url: str) -> Shards | None:
    """The token shards at `url`, None where `url` is no URL or folder or holds none. ValueError: the URL
    cannot be read, or its preparation is unfinished."""
    a_file = files.suffix(url) in (*files.SUFFIXES, ".bin", ".tfrecord") or glob.has_magic(url)
    if a_file if "://" in url else not os.path.isdir(os.path.expanduser(url)):
        return None
    folder = Folder(os.path.expanduser(url))
    with explained(folder.url, "read"):
        names = folder.names(retries=FIRST_CONTACT)
        begun = PROGRESS in names and "settings.json" in folder.names(PROGRESS)
    if begun and MANIFEST not in names:
        raise ValueError(f"{folder.url} is not finished; run the same `python -m data.prepare` command to "
                         "resume.")
    manifest = read_manifest(folder) if MANIFEST in names else None
    return Shards(os.path.expanduser(url), manifest) if manifest else None
