"""Token shards, the one format that training reads, in a folder at any fsspec URL:

    train-00000-00000.npy ...   token ids, one document after the other: uint16 or uint32 [n]
    validation-00000.npy ...
    tokenizer/                  the tokenizer that made the ids
    manifest.json               settings, counts, checksums; written last, when the folder is complete
    progress/                   finished chunks, while the folder is not complete

preparation.py and pairs.py make shards from text, data/convert.py from the token files of other projects.
Shards are cut into rows when they are read. A manifest with `width` above 1 tells that the files hold rows
already: T tokens with their special tokens, or T + 3 numbers per sentence pair (kind "pairs").
"""

import copy
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

from data.batches.rows import PackedRows, PairRows
from data.documents.names import SUFFIXES, digest, suffix
from data.tokens.cache import cache_path, locked
from data.tokens.encode import tokenizer_fingerprint
from utils.io.files import check_file, save_tokenizer
from utils.io.urls import Folder, explained

MANIFEST, PROGRESS, BEGUN = "manifest.json", "progress", "progress/settings.json"
FORMAT = "tokens-2"
SPLITS = ("test", "validation", "train")  # in this order: documents of the others are left out of train
SHARD_MB = 64.0
NAME = r"[a-z]+-[\d-]+\.npy"  # a file's name; it cannot lead out of the folder


def write_shard(folder: Folder, name: str, ids: np.ndarray) -> dict:
    """Writes token ids [n] as .npy. Returns the file's entry for the manifest."""
    np.save(data := io.BytesIO(), ids)
    content = data.getvalue()
    folder.write(name, content)
    checksum = xxhash.xxh3_128_hexdigest(content)
    return {"file": name, "tokens": len(ids), "size": len(content), "xxh3_128": checksum}


def write_shards(folder: Folder, split: str, arrays: Iterable[np.ndarray], dtype, width: int,
                 shard_mb: float) -> list[dict]:
    """Writes arrays of ids as files of about shard_mb, each a multiple of `width` ids; the last file may be
    smaller. Returns their entries for the manifest."""
    size = max(1, int(shard_mb * 1e6) // np.dtype(dtype).itemsize // width) * width
    entries, waiting = [], np.empty(0, dtype)
    for ids in itertools.chain(arrays, [None]):
        waiting = waiting if ids is None else np.concatenate([waiting, ids])
        while len(waiting) >= size or ids is None and len(waiting):
            entries.append(write_shard(folder, f"{split}-{len(entries):05d}.npy", waiting[:size]))
            waiting = waiting[size:]
    return entries


def finish(folder: Folder, tokenizer, entries: dict[str, list[dict]], **about) -> dict:
    """Completes the folder: writes the tokenizer, then the manifest, and returns the manifest. entries: the
    files of each split. about: kind, width, dtype, lossy, settings and accounting."""
    with tempfile.TemporaryDirectory() as temporary:
        for file in save_tokenizer(tokenizer, temporary):
            folder.write(f"tokenizer/{file.name}", file.read_bytes())
    splits = {split: {"tokens": sum(entry["tokens"] for entry in files), "files": files}
              for split, files in entries.items() if files}
    manifest = {"format": FORMAT, "tokenizer": tokenizer_fingerprint(tokenizer), **about, "splits": splits}
    folder.write(MANIFEST, json.dumps(manifest, indent=1).encode())
    return manifest


def read_manifest(folder: Folder) -> dict | None:
    """The manifest; None if there is none, or the file is another program's. ValueError if it is damaged, of
    an older format, or names files outside the folder."""
    try:
        manifest = json.loads(folder.read(MANIFEST))
        found_format, names = str(manifest.get("format")), []
        if found_format == FORMAT:
            _ = manifest["dtype"], manifest["tokenizer"], manifest["settings"]["format"]
            for name, split in manifest["splits"].items():
                account, entries = manifest["accounting"][name], split["files"]
                _ = account["bytes"] + account["tokens"] + split["tokens"]
                _ = sum(entry["tokens"] + entry["size"] + len(entry["xxh3_128"]) for entry in entries)
                names += [str(entry["file"]) for entry in entries]
    except FileNotFoundError:
        return None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{folder.url}/{MANIFEST} is damaged ({error}). Copy it again, or delete the folder "
                         "and prepare it again.") from error
    if found_format != FORMAT and found_format.startswith("token"):
        raise ValueError(f"{folder.url}: its format is {found_format!r}, but this version reads {FORMAT!r}. "
                         "Prepare it again.")
    if foreign := [name for name in names if not re.fullmatch(NAME, name)]:
        raise ValueError(f"{folder.url}/{MANIFEST}: {foreign[0]!r} is no name of a file in this folder. Do "
                         "not use these shards: somebody may have manipulated them.")
    return manifest if found_format == FORMAT else None


class Shards:
    """One split of a finished folder of token shards. Shards(**shards.place) opens it again."""

    def __init__(self, folder, split: str = "train", manifest: dict | None = None):
        """folder: a path or URL. manifest: None to read it. ValueError if it is missing or damaged."""
        self.folder, self.split = Folder(folder), split
        self.name = self.folder.url
        self.manifest = manifest or read_manifest(self.folder)
        if self.manifest is None:
            raise ValueError(f"{self.name} holds no token shards")
        self.splits = self.manifest["splits"]
        self.width = self.manifest.get("width", 1)
        self.pairs = self.manifest.get("kind") == "pairs"
        self.row_tokens = self.width - 3 * self.pairs if self.width > 1 else None  # T; None: any T
        self.place = {"folder": str(folder), "split": split}
        self.tokenizer = f"{folder}/tokenizer"

    def with_split(self, split: str) -> "Shards":
        """Another split of the folder."""
        shards = copy.copy(self)
        shards.split, shards.place = split, self.place | {"split": split}
        return shards

    def with_rows(self, T: int) -> list[str]:
        """The splits with at least one row of T tokens."""
        size = self.width if self.width > 1 else T
        return [name for name, split in self.splits.items() if split["tokens"] >= size]

    def entries(self, max_tokens: int = 0) -> list[dict]:
        """The manifest's entries of the first files that together have max_tokens; 0: of all files."""
        entries = self.splits[self.split]["files"]
        ends = itertools.accumulate((entry["tokens"] for entry in entries), initial=0)
        starts = zip(entries, ends, strict=False)
        return [entry for entry, start in starts if not max_tokens or start < max_tokens]

    @property
    def content(self) -> str:
        """A hash of the ids of the split and of the tokenizer."""
        return digest([entry["xxh3_128"] for entry in self.entries()], self.manifest["tokenizer"])

    def find_misfits(self, tokenizer, T: int, pairs: bool) -> list[str]:
        """Says, a line each, which settings do not fit. tokenizer: None if the shards' own is used."""
        lines, size, name, splits = [], self.row_tokens, self.name, self.with_rows(T)
        if pairs and not self.pairs:
            lines.append("next_sentence: token shards have no sentences; name text or sentence pairs.")
        if self.pairs and not pairs:
            lines.append(f"dataset_name: {name} holds sentence pairs: use train_mlm.py with --next_sentence "
                         "true.")
        if size and T != size:
            lines.append(f"block_size: {T}, but rows of {name} have {size} tokens: set --block_size {size}.")
        if self.split not in splits:
            remedy = "lower block_size or name other data"
            if self.split != "train":
                remedy = "set eval_dataset_name, or prepare it again with --validation_fraction 0.05"
            lines.append(f"{name} has no row of {size or T} tokens in its split {self.split}, only in "
                         f"{', '.join(splits) or 'none'}: {remedy}.")
        if tokenizer is not None and self.manifest["tokenizer"] != tokenizer_fingerprint(tokenizer):
            lines.append(f"tokenizer_name: not the tokenizer that made {name}: use {name}/tokenizer.")
        return lines

    def check(self, entries: Sequence[dict] | None = None) -> str:
        """Verifies these files, or those of all splits, in a local folder. Returns what is wrong, or ""."""
        of_all_splits = itertools.chain.from_iterable(split["files"] for split in self.splits.values())
        for entry in of_all_splits if entries is None else entries:
            path = Path(self.folder.root, entry["file"])
            if problem := check_file(path, entry["size"], entry["xxh3_128"]):
                return f"{path} {problem}"
        return ""

    def local(self, cache_dir, entries: Sequence[dict]) -> "Shards":
        """These shards, if they are on a disk of this machine, else a copy in the cache. entries: the files
        that must be there. ValueError if one is missing or damaged."""
        shards, unchecked = self, entries
        if not self.folder.local:
            shards = Shards(cache_path(cache_dir, "shards", self.manifest), self.split, self.manifest)
            with locked(Path(shards.folder.root, ".lock"), shards.name), explained(self.name, "read"):
                unchecked = [entry for entry in entries if shards.check([entry])]
                names = [name for name in self.folder.names("tokenizer") if re.fullmatch(r"[\w.-]+", name)]
                names = [*(entry["file"] for entry in unchecked), *(f"tokenizer/{name}" for name in names)]
                for name in tqdm([*names, MANIFEST], desc=f"copying {self.name}", disable=None):
                    shards.folder.write(name, self.folder.read(name))
        if problem := shards.check(unchecked):
            raise ValueError(f"{problem}. Copy it again, or delete {self.name} and prepare it again.")
        return shards

    def rows(self, T: int, max_rows: int = 0) -> PackedRows:
        """All rows of T tokens, or the first max_rows. The files must be on this machine, see `local`."""
        account, width = self.manifest["accounting"][self.split], self.width if self.width > 1 else T
        paths = (Path(self.folder.root, entry["file"]) for entry in self.entries(max_rows * width))
        arrays = [np.load(path, mmap_mode="r") for path in paths]
        known = account["bytes"] and not self.manifest.get("lossy")
        bytes_per_token = account["bytes"] / max(account["tokens"], 1) if known else float("nan")
        kind = PairRows if self.pairs else PackedRows
        return kind(arrays, width - 3 * self.pairs, max_rows, self.content, bytes_per_token)


def find_shards(url: str, split: str = "train") -> Shards | None:
    """The token shards in a folder or at a URL; None if it holds no shards. ValueError if the URL cannot be
    read or the preparation is not finished."""
    is_file = suffix(url) in (*SUFFIXES, ".bin", ".tfrecord") or glob.has_magic(url)
    if is_file if "://" in url else not os.path.isdir(os.path.expanduser(url)):
        return None
    folder = Folder(os.path.expanduser(url))
    with explained(folder.url, "read"):
        names = folder.names()
        started = PROGRESS in names and "settings.json" in folder.names(PROGRESS)
    if started and MANIFEST not in names:
        raise ValueError(f"{folder.url} is not finished: run its `python -m data.prepare` command again to "
                         "resume.")
    manifest = read_manifest(folder) if MANIFEST in names else None
    return Shards(os.path.expanduser(url), split, manifest) if manifest else None
