"""Prepares token shards from text, chunk by chunk: for the cache of a run, and for `python -m data.prepare`.

A chunk is a number of consecutive documents of a source. Its tokens depend on these documents, the settings,
and all documents before it, as duplicates of those are left out. Each chunk becomes one file:

    train-00000-00007.npy           chunk 7 of unit 0 (a file of the source, or several) of the train split
    progress/train-00000-00007.npz  its counts, hashes and validation tokens; deleted at the end

At the end the validation tokens become validation-00000.npy, ..., and manifest.json is written. After a kill
the next start goes on at the unfinished chunk: earlier documents are read, but not tokenized again. Finished
preparations are verified by their checksums; if a file is damaged, all are prepared again.
"""

import contextlib
import io
import itertools
import json
import re
import sys
import time
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from data.documents.filters import Accounting, HoldOut, clean_documents, drop_seen, filter_rows, show_progress
from data.documents.source import Corpus
from data.tokens import shards
from data.tokens.cache import locked
from data.tokens.encode import ChunkKey, TokenMaker
from utils.io.urls import Folder, explained

WRITTEN = rf"{shards.PROGRESS}|tokenizer|{shards.MANIFEST}|{shards.NAME}"  # what a preparation writes
IGNORED = r"\.lock|README\.md|\.gitattributes"  # may be in the output folder beforehand
TEXT_PER_BYTE = 2.2  # roughly, per byte of token ids; decides how much text makes a chunk
NO_LIMIT = float("inf")
SAMPLE = 100, 2000  # documents, and characters of each, on which the tokenizer is tried
LOSSY, USELESS = 0.01, 0.5  # shares of lost characters: above them, warn; refuse the tokenizer


def _file_name(key: ChunkKey, ending: str) -> str:
    return f"{key[0]}-{key[1]:05d}-{key[2]:05d}.{ending}"


@dataclass
class Recipe:
    """Everything that decides what the shards contain."""

    corpora: dict[str, Corpus]  # by split, in the order of shards.SPLITS
    maker: TokenMaker
    hold_out: HoldOut | None = None  # which documents of the train split become the validation split
    excluded: Iterable[Corpus] = ()  # their documents are left out of the train split
    max_tokens: int = 0  # stop soon after this many tokens; only for a single corpus; 0: no limit
    shard_mb: float = shards.SHARD_MB

    @property
    def settings(self) -> dict:
        """The settings as in the manifest; the cache key is their hash."""
        *_, corpus = self.corpora.values()
        settings = {
            "dataset_name": corpus.name, "dataset_config_name": corpus.source.dataset_config_name,
            "split": corpus.source.split, "text_column": corpus.text_column, "keywords": corpus.keywords,
            "content": {split: corpus.fingerprint for split, corpus in self.corpora.items()},
            "hold_out": self.hold_out and self.hold_out.settings, "format": shards.FORMAT,
            "shard_mb": self.shard_mb,
            "evaluated": [[other.fingerprint, other.keywords] for other in self.excluded],
            "max_tokens": self.max_tokens,
        }  # fmt: skip
        return settings | self.maker.settings


def make_shards(folder: Folder, recipe: Recipe) -> dict:
    """Prepares missing shards and returns their manifest. In a local folder (not at a URL) finished shards
    are verified, and one process works while others wait. ValueError if the folder holds anything else, or
    the tokenizer loses most of the text."""
    settings = json.loads(json.dumps(recipe.settings))
    _read_folder(folder, settings)  # raises before anything is written
    with locked(Path(folder.root, ".lock"), folder.url) if folder.local else contextlib.nullcontext():
        manifest = _read_folder(folder, settings)
        if manifest and folder.local and (problem := shards.Shards(folder.root, manifest=manifest).check()):
            print(f"data       {problem}: all of it is prepared again", flush=True)
            delete_shards(folder)
            manifest = None
        manifest = manifest or _Preparation(folder, recipe).run()
        folder.remove(shards.PROGRESS)
    return manifest


def _read_folder(folder: Folder, settings: dict) -> dict | None:
    """The manifest of a finished preparation, else None. ValueError if the folder holds other files, or a
    preparation with other settings."""
    old = None
    with explained(folder.url, "read"):
        names, progress = folder.names(), folder.names(shards.PROGRESS)
    if manifest := shards.read_manifest(folder) if shards.MANIFEST in names else None:
        old = manifest["settings"]
    elif "settings.json" in progress:
        old = json.loads(folder.read(shards.BEGUN))
    elif not all(re.fullmatch(f"{WRITTEN}|{IGNORED}", name) for name in names):
        raise ValueError(f"{folder.url} is not empty and holds no shards. Name a new folder.")
    if old and old != settings:
        pairs = ((name, old.get(name), settings.get(name)) for name in {**settings, **old})
        changes = ", ".join(f"{name} {was!r}, now {now!r}" for name, was, now in pairs if was != now)
        raise ValueError(f"{folder.url} holds a preparation with other settings ({changes}). Name another "
                         "folder, or delete this one.")
    return manifest


def delete_shards(folder: Folder) -> None:
    """Deletes what a preparation writes."""
    for name in folder.names():
        if re.fullmatch(WRITTEN, name):
            folder.remove(name)


class _Preparation:
    """One preparation: what it has finished, and what is left."""

    def __init__(self, folder: Folder, recipe: Recipe):
        self.folder, self.recipe, self.maker = folder, recipe, recipe.maker
        self.records: list[dict] = []  # of the finished chunks, in order
        self.tokens_left = recipe.max_tokens or NO_LIMIT  # until max_tokens
        self.seen, self.excluded = set(), set()  # hashes of documents: read before; not to be trained on

    def run(self) -> dict:
        """Makes the missing shards. Returns the manifest."""
        with explained(self.folder.url, "written"):
            self.folder.write(shards.BEGUN, json.dumps(self.recipe.settings, indent=1).encode())
        # A kill can leave .npz.tmp files, which do not count.
        if done := sum(name.endswith(".npz") for name in self.folder.names(shards.PROGRESS)):
            print(f"{self.folder.url}: resuming after {done:,} finished chunks", file=sys.stderr, flush=True)
        lossy = self._check_tokenizer()
        for split, corpus in self.recipe.corpora.items():
            if split == "train":
                self.excluded, self.seen = self.seen, set()  # test and validation split came before
                for other in self.recipe.excluded:
                    documents = clean_documents(other, Accounting())
                    self.excluded.update(document_hash for _, document_hash, _ in documents)
            for unit in range(len(corpus.units)):
                self._make_unit(split, unit)
        return self._finish(lossy)

    def _check_tokenizer(self) -> bool:
        """Warns and returns True if the tokenizer loses some of the text. ValueError if it loses most."""
        *_, corpus = self.recipe.corpora.values()
        documents = itertools.islice(clean_documents(corpus, Accounting()), SAMPLE[0])
        lost = self.maker.lost_share([text[: SAMPLE[1]] for text, _, _ in documents])
        if lost > USELESS:
            raise ValueError(f"tokenizer_name {self.maker.tokenizer.name_or_path!r} does not know the text "
                             f"of {corpus.name}: {lost:.1%} of its characters are lost. Name another "
                             "tokenizer, or leave tokenizer_name out to train one.")
        if lost > LOSSY:
            print(f"data       the tokenizer loses {lost:.1%} of the characters of {corpus.name}: bits per "
                  "byte are not computed", flush=True)
        return lost > LOSSY

    def _read_progress(self, key: ChunkKey) -> tuple[dict, dict] | None:
        """(record, arrays) of a finished chunk. None if its file is missing, of an older version, or
        cut short by a crash."""
        file = f"{shards.PROGRESS}/{_file_name(key, 'npz')}"
        with contextlib.suppress(FileNotFoundError, BadZipFile, ValueError, EOFError, KeyError):
            with np.load(io.BytesIO(self.folder.read(file))) as arrays:
                return json.loads(str(arrays["record"])), dict(arrays)

    def _make_unit(self, split: str, unit: int) -> None:
        """Makes the missing chunks of a unit, in order."""
        corpus, chunk, to_skip, last = self.recipe.corpora[split], 0, 0, False
        rows = show_progress(corpus.documents(unit), f"preparing {corpus.name}, {split}")
        while not last and self.tokens_left > 0:
            key, chunk = (split, unit, chunk), chunk + 1
            if progress := self._read_progress(key):
                record, arrays = progress
                to_skip += record["accounts"][split]["read"]
                self.seen.update(arrays["hashes"].tolist())
            else:
                record = self._make_chunk(key, itertools.islice(rows, to_skip, None))
                to_skip = 0
            last, account = record["last"], record["accounts"][split]
            self.tokens_left -= account["tokens"]
            self.records += [record] if account["read"] else []

    def _make_chunk(self, key: ChunkKey, rows: Iterator[dict]) -> dict:
        """Writes a chunk's shard and progress file and returns its record. Stops soon after max_tokens."""
        split, account, hashes, started = key[0], Accounting(), array("Q"), time.monotonic()
        counts, record = {split: account}, {"key": key, "last": False}
        hold_out = self.recipe.hold_out if split == "train" else None
        token_ids = defaultdict(partial(array, self.maker.dtype.char))  # by split

        def in_chunk() -> Iterator[tuple]:
            """Yields documents until their text fills a shard. Duplicates count, so that the end of a chunk
            depends on its documents alone."""
            bytes_left = int(self.recipe.shard_mb * 1e6 * TEXT_PER_BYTE)
            for document in filter_rows(rows, self.recipe.corpora[split], account):
                hashes.append(document[1])
                bytes_left -= document[2]
                yield document
                if bytes_left <= 0:
                    return
            record["last"] = True

        def to_tokenize() -> Iterator[tuple[str, str]]:
            """Yields (text, split) of each document."""
            for text, document_hash, size in drop_seen(in_chunk(), account, self.seen, self.excluded):
                if held_out := hold_out and hold_out(text, document_hash):
                    account.hold_out(counts.setdefault("validation", Accounting()), size)
                yield text, "validation" if held_out else split
                if len(token_ids[split]) >= self.tokens_left:
                    return

        for into, ids in self.maker(to_tokenize(), key):
            token_ids[into].frombytes(ids.tobytes())
        account.seconds = time.monotonic() - started
        arrays = {split: np.frombuffer(ids, self.maker.dtype) for split, ids in token_ids.items()}
        self.maker.count_tokens(arrays, counts)
        record["accounts"] = {split: account.record() for split, account in counts.items()}
        if len(ids := arrays.pop(split, ())):
            record["file"] = shards.write_shard(self.folder, _file_name(key, "npy"), ids)
        if account.read:
            np.savez(progress := io.BytesIO(), record=json.dumps(record), hashes=hashes, **arrays)
            self.folder.write(f"{shards.PROGRESS}/{_file_name(key, 'npz')}", progress.getvalue())
        return record

    def _finish(self, lossy: bool) -> dict:
        """Writes the validation split, if documents were held out, then the tokenizer and the manifest."""
        entries, accounts = defaultdict(list), defaultdict(Accounting)
        for record in self.records:
            for split, account in record["accounts"].items():
                accounts[split] += Accounting.from_record(account)
            entries[record["key"][0]] += [record["file"]] if "file" in record else []
        splits = [split for split in reversed(shards.SPLITS) if split in accounts]
        if self.recipe.hold_out:
            arrays = (self._read_progress(record["key"])[1].get("validation") for record in self.records)
            arrays = (ids for ids in arrays if ids is not None)
            entries["validation"] = shards.write_shards(
                self.folder, "validation", arrays, self.maker.dtype, self.maker.width, self.recipe.shard_mb)
        manifest = shards.finish(
            self.folder, self.maker.tokenizer, {split: entries[split] for split in splits},
            kind=self.maker.kind, width=self.maker.width, dtype=str(self.maker.dtype), lossy=lossy,
            settings=self.recipe.settings, accounting={split: accounts[split].record() for split in splits},
        )  # fmt: skip
        for split in splits:
            account = accounts[split]
            print(f"data       {split}: {account.line()}", flush=True)
            if account.unreadable_names:
                print(f"data       skipped, not text: {', '.join(account.unreadable_names)}", flush=True)
            if account.evaluated > account.used:
                print(f"data       {account.evaluated:,} of {account.read:,} documents are also in the "
                      "evaluation data: they are left out of the training data", flush=True)
        return manifest
