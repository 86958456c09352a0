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
import itertools
import json
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import xxhash
from tqdm import tqdm

from data.batches.rows import PackedRows
from data.documents import names as files
from data.tokens.cache import cache_path, locked
from data.tokens.encode import tokenizer_fingerprint
from utils.io.files import checksum_file, save_tokenizer
from utils.io.urls import Folder, explained

MANIFEST, PROGRESS, BEGUN = "manifest.json", "progress", "progress/settings.json"
FORMAT = "tokens-2"
SPLITS = ("test", "validation", "train")  # evaluation first: its documents are not trained on
SHARD_MB = 64.0
NAME = r"[a-z]+-[\d-]+\.npy"  # of a file: a plain name, so that none leads out of the folder


def write_shard(folder: Folder, name: str, ids: np.ndarray) -> dict:
    """Writes token ids [n] as .npy. Returns the file's entry in the manifest."""
    np.save(data := io.BytesIO(), ids)
    content = data.getvalue()
    folder.write(name, content)
    checksum = xxhash.xxh3_128_hexdigest(content)
    return {"file": name, "tokens": len(ids), "size": len(content), "xxh3_128": checksum}


def write_shards(folder: Folder, split: str, arrays: Iterable[np.ndarray], dtype, width: int,
                 shard_mb: float) -> list[dict]:
    """Writes the ids of these arrays as files of about shard_mb, of whole rows of `width`; the last one may
    be smaller. Returns their entries."""
    size = max(1, int(shard_mb * 1e6) // np.dtype(dtype).itemsize // width) * width
    entries, waiting = [], np.empty(0, dtype)
    for ids in itertools.chain(arrays, [None]):
        waiting = waiting if ids is None else np.concatenate([waiting, ids])
        while len(waiting) >= size or ids is None and len(waiting):
            entries.append(write_shard(folder, f"{split}-{len(entries):05d}.npy", waiting[:size]))
            waiting = waiting[size:]
    return entries


def finish(folder: Folder, tokenizer, entries: dict[str, list[dict]], **about) -> dict:
    """Writes what makes the folder complete: the tokenizer, then the manifest, which is returned. entries: of
    the files of each split. about: kind, width, dtype, lossy, settings and accounting."""
    with tempfile.TemporaryDirectory() as temporary:
        for file in save_tokenizer(tokenizer, temporary):
            folder.write(f"tokenizer/{file.name}", file.read_bytes())
    splits = {split: {"tokens": sum(entry["tokens"] for entry in some), "files": some}
              for split, some in entries.items() if some}
    manifest = {"format": FORMAT, "tokenizer": tokenizer_fingerprint(tokenizer), **about, "splits": splits}
    folder.write(MANIFEST, json.dumps(manifest, indent=1).encode())
    return manifest


def read_manifest(folder: Folder) -> dict | None:
    """The manifest, None where there is none. ValueError where it is damaged, of another format, or names
    other files than its own."""
    try:
        manifest = json.loads(folder.read(MANIFEST))
        made_in, names = str(manifest.get("format")), []
        if made_in == FORMAT:
            _ = manifest["dtype"], manifest["tokenizer"], manifest["settings"]["format"]
            for split, found in manifest["splits"].items():
                account = manifest["accounting"][split]
                _ = account["bytes"] + account["tokens"] + found["tokens"]
                _ = sum(entry["tokens"] + entry["size"] + len(entry["xxh3_128"]) for entry in found["files"])
                names += [str(entry["file"]) for entry in found["files"]]
    except FileNotFoundError:
        return None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{folder.url}/{MANIFEST} is damaged ({error}). Copy it again, or delete the folder "
                         "and prepare it again.") from error
    if made_in != FORMAT and made_in.startswith("token"):
        raise ValueError(f"{folder.url}: format {made_in!r}, but this version reads {FORMAT!r}. Prepare it "
                         "again.")
    if foreign := [name for name in names if not re.fullmatch(NAME, name)]:
        raise ValueError(f"{folder.url}/{MANIFEST}: {foreign[0]!r} is no name of a file in this folder. Do "
                         "not use it: it may come from somebody with bad intent.")
    return manifest if made_in == FORMAT else None


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
        shards, unchecked = self, entries
        if not self.folder.local:
            shards = Shards(cache_path(cache_dir, "shards", self.manifest), self.manifest)
            with locked(Path(shards.folder.root, ".lock"), shards.url), explained(self.url, "read"):
                unchecked = [entry for entry in entries if shards.check([entry])]
                names = [name for name in self.folder.names("tokenizer") if re.fullmatch(r"[\w.-]+", name)]
                names = [*(entry["file"] for entry in unchecked), *(f"tokenizer/{name}" for name in names)]
                for name in tqdm([*names, MANIFEST], desc=f"copying {self.url}", disable=None):
                    shards.folder.write(name, self.folder.read(name))
        if problem := shards.check(unchecked):
            raise ValueError(f"{problem}. Copy it again, or delete {self.url} and prepare it again.")
        return shards

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


def find_shards(url: str) -> Shards | None:
    """The token shards at `url`, None where `url` is no URL or folder or holds none. ValueError: the URL
    cannot be read, or its preparation is unfinished."""
    a_file = files.suffix(url) in (*files.SUFFIXES, ".bin", ".tfrecord") or glob.has_magic(url)
    if a_file if "://" in url else not os.path.isdir(os.path.expanduser(url)):
        return None
    folder = Folder(os.path.expanduser(url))
    with explained(folder.url, "read"):
        names = folder.names()
        begun = PROGRESS in names and "settings.json" in folder.names(PROGRESS)
    if begun and MANIFEST not in names:
        raise ValueError(f"{folder.url} is not finished; run the same `python -m data.prepare` command to "
                         "resume.")
    manifest = read_manifest(folder) if MANIFEST in names else None
    return Shards(os.path.expanduser(url), manifest) if manifest else None
