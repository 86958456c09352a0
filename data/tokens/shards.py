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
    splits = {split: {"tokens": sum(entry["tokens"] for entry in files), "files": files}
              for split, files in entries.items() if files}
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
    if made_in != FORMAT and made_in.startswith("token"):
        raise ValueError(f"{folder.url}: format {made_in!r}, but this version reads {FORMAT!r}. Prepare it "
                         "again.")
    if foreign := [name for name in names if not re.fullmatch(NAME, name)]:
        raise ValueError(f"{folder.url}/{MANIFEST}: {foreign[0]!r} is no name of a file in this folder. Do "
                         "not use it: it may come from somebody with bad intent.")
    return manifest if made_in == FORMAT else None


class Shards:
    """One split of a finished folder of token shards. Shards(**place) opens it again."""

    def __init__(self, folder, split: str = "train", manifest: dict | None = None):
        """folder: a path or URL. manifest: it has been read already. ValueError where there is none, or a
        damaged one."""
        self.folder, self.split = Folder(folder), split
        self.name = self.folder.url
        self.manifest = manifest or read_manifest(self.folder)
        if self.manifest is None:
            raise ValueError(f"{self.name} holds no token shards")
        self.splits = self.manifest["splits"]
        self.width = self.manifest.get("width", 1)
        self.pairs = self.manifest.get("kind") == "pairs"
        self.row_tokens = self.width - 3 * self.pairs if self.width > 1 else None  # T of rows; None: any
        self.place = {"folder": str(folder), "split": split}
        self.tokenizer = f"{folder}/tokenizer"

    def of(self, split: str) -> "Shards":
        """Another split of the folder."""
        shards = copy.copy(self)
        shards.split, shards.place = split, self.place | {"split": split}
        return shards

    def with_rows(self, T: int) -> list[str]:
        """The splits with at least one row of T tokens."""
        size = self.width if self.width > 1 else T
        return [name for name, split in self.splits.items() if split["tokens"] >= size]

    def entries(self, max_tokens: int = 0) -> list[dict]:
        """The first files of the split that have so many tokens; 0: all."""
        entries = self.splits[self.split]["files"]
        ends = itertools.accumulate((entry["tokens"] for entry in entries), initial=0)
        starts = zip(entries, ends, strict=False)
        return [entry for entry, start in starts if not max_tokens or start < max_tokens]

    @property
    def content(self) -> str:
        """Changes with the ids and with the tokenizer."""
        return digest([entry["xxh3_128"] for entry in self.entries()], self.manifest["tokenizer"])

    def misfits(self, tokenizer, T: int, pairs: bool) -> list[str]:
        """A line for each setting that does not fit. tokenizer: None for that of the shards."""
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
                remedy = "set eval_dataset_name, or make it again with --validation_fraction 0.05"
            lines.append(f"{name} has no row of {size or T} tokens for {self.split}, only for "
                         f"{', '.join(splits) or 'none'}: {remedy}.")
        if tokenizer is not None and self.manifest["tokenizer"] != tokenizer_fingerprint(tokenizer):
            lines.append(f"tokenizer_name: not the tokenizer that made {name}: use {name}/tokenizer.")
        return lines

    def check(self, entries: Sequence[dict] | None = None) -> str:
        """What is wrong with these files of a local folder, or with all splits' files; "" if nothing."""
        of_all_splits = itertools.chain.from_iterable(split["files"] for split in self.splits.values())
        for entry in of_all_splits if entries is None else entries:
            path = Path(self.folder.root, entry["file"])
            if problem := check_file(path, entry["size"], entry["xxh3_128"]):
                return f"{path} {problem}"
        return ""

    def local(self, cache_dir, entries: Sequence[dict]) -> "Shards":
        """These shards, or a copy in the cache, with these files, if they are not on a disk of this machine.
        ValueError: a file is lost or damaged."""
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
        """Rows of T tokens, or the first max_rows. The files must be on this machine (`local`)."""
        account, width = self.manifest["accounting"][self.split], self.width if self.width > 1 else T
        paths = (Path(self.folder.root, entry["file"]) for entry in self.entries(max_rows * width))
        arrays = [np.load(path, mmap_mode="r") for path in paths]
        known = account["bytes"] and not self.manifest.get("lossy")
        bytes_per_token = account["bytes"] / max(account["tokens"], 1) if known else float("nan")
        kind = PairRows if self.pairs else PackedRows
        return kind(arrays, width - 3 * self.pairs, max_rows, self.content, bytes_per_token)


def find_shards(url: str, split: str = "train") -> Shards | None:
    """The token shards at `url`, None where `url` is no URL or folder or holds none. ValueError: the URL
    cannot be read, or its preparation is unfinished."""
    a_file = suffix(url) in (*SUFFIXES, ".bin", ".tfrecord") or glob.has_magic(url)
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
    return Shards(os.path.expanduser(url), split, manifest) if manifest else None
