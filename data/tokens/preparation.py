"""Text to token shards, chunk by chunk: for the cache of a run, and for `python -m data.prepare`.

A chunk is some consecutive documents of a source. Its tokens depend on them, on the settings, and on the
documents before it, whose duplicates are left out. Each chunk becomes one file:

    train-00000-00007.npy           chunk 7 of unit 0 (a file of the source, or several) of the split train
    progress/train-00000-00007.npz  until all is done: its counts, hashes, tokens for validation

At the end the tokens for validation become validation-00000.npy, ..., and manifest.json is written. A killed
preparation resumes at its chunk: earlier documents are read again, but never tokenized again. A finished one
is verified by its checksums, and made again if a file is damaged.
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

OWN = rf"{shards.PROGRESS}|tokenizer|{shards.MANIFEST}|{shards.NAME}"  # names in the folder
BESIDE = r"\.lock|README\.md|\.gitattributes"  # others that may be there
TEXT_PER_BYTE = 2.2  # bytes of text per byte of tokens, roughly: it decides how much text a chunk takes
NO_LIMIT = float("inf")
SAMPLE = 100, 2000  # documents, and characters of each, that tell how much of the text a tokenizer knows
LOSSY, USELESS = 0.01, 0.5  # shares of lost characters


def _name(key: ChunkKey, ending: str) -> str:
    """Of the file of a chunk, or of its record."""
    return f"{key[0]}-{key[1]:05d}-{key[2]:05d}.{ending}"


@dataclass
class Recipe:
    """All that the files of a preparation depend on."""

    corpora: dict[str, Corpus]  # by split, in the order of shards.SPLITS
    maker: TokenMaker
    hold_out: HoldOut | None = None  # of the split train, for validation
    evaluated: Iterable[Corpus] = ()  # their documents are not trained on
    max_tokens: int = 0  # stop after so many tokens, 0: never; for a single corpus
    shard_mb: float = shards.SHARD_MB

    @property
    def settings(self) -> dict:
        """By the names of the flags."""
        *_, corpus = self.corpora.values()
        settings = {
            "dataset_name": corpus.name, "dataset_config_name": corpus.source.dataset_config_name,
            "split": corpus.source.split, "text_column": corpus.text_column, "keywords": corpus.keywords,
            "content": {split: corpus.fingerprint for split, corpus in self.corpora.items()},
            "hold_out": self.hold_out and self.hold_out.settings, "format": shards.FORMAT,
            "shard_mb": self.shard_mb,
            "evaluated": [[other.fingerprint, other.keywords] for other in self.evaluated],
            "max_tokens": self.max_tokens,
        }  # fmt: skip
        return settings | self.maker.settings


def make_shards(folder: Folder, recipe: Recipe) -> dict:
    """The manifest of the folder, made now or earlier, its files verified. One process makes it, others wait.
    ValueError: the folder holds something else, or the tokenizer does not know the text."""
    settings = json.loads(json.dumps(recipe.settings))
    _existing(folder, settings)  # refuses before anything is written
    with locked(Path(folder.root, ".lock"), folder.url) if folder.local else contextlib.nullcontext():
        manifest = _existing(folder, settings)
        if manifest and folder.local and (problem := shards.Shards(folder.root, manifest=manifest).check()):
            print(f"data       {problem}: all of it is prepared again", flush=True)
            delete_shards(folder)
            manifest = None
        manifest = manifest or _Preparation(folder, recipe).run()
        folder.remove(shards.PROGRESS)
    return manifest


def _existing(folder: Folder, settings: dict) -> dict | None:
    """The manifest, None where there is none. ValueError where the folder holds something else, or a
    preparation with other settings."""
    old = None
    with explained(folder.url, "read"):
        names, begun = folder.names(), folder.names(shards.PROGRESS)
    if manifest := shards.read_manifest(folder) if shards.MANIFEST in names else None:
        old = manifest["settings"]
    elif "settings.json" in begun:
        old = json.loads(folder.read(shards.BEGUN))
    elif not all(re.fullmatch(f"{OWN}|{BESIDE}", name) for name in names):
        raise ValueError(f"{folder.url} is not empty and holds no shards. Name a new folder.")
    if old and old != settings:
        pairs = ((name, old.get(name), settings.get(name)) for name in {**settings, **old})
        changes = ", ".join(f"{name} {was!r}, now {now!r}" for name, was, now in pairs if was != now)
        raise ValueError(f"{folder.url} holds a preparation with other settings ({changes}). Name another "
                         "folder, or delete this one.")
    return manifest


def delete_shards(folder: Folder) -> None:
    """Deletes all that a preparation writes."""
    for name in folder.names():
        if re.fullmatch(OWN, name):
            folder.remove(name)


class _Preparation:
    """A preparation at work, and how far it is."""

    def __init__(self, folder: Folder, recipe: Recipe):
        self.folder, self.recipe, self.maker = folder, recipe, recipe.maker
        self.records: list[dict] = []  # of finished chunks, in their order
        self.tokens_left = recipe.max_tokens or NO_LIMIT  # still to be made

    def run(self) -> dict:
        """Makes the shards, or what is missing of them. Returns the manifest."""
        with explained(self.folder.url, "written"):
            self.folder.write(shards.BEGUN, json.dumps(self.recipe.settings, indent=1).encode())
        # Not those that a kill has left before they were renamed: .npz.tmp.
        if done := sum(name.endswith(".npz") for name in self.folder.names(shards.PROGRESS)):
            print(f"{self.folder.url}: resumes after {done:,} chunks", file=sys.stderr, flush=True)
        lossy = self._check_tokenizer()
        evaluated, seen = set(), set()
        for split, corpus in self.recipe.corpora.items():
            if split == "train":
                evaluated, seen = seen, set()
                for other in self.recipe.evaluated:
                    documents = clean_documents(other, Accounting())
                    evaluated.update(number for _, number, _ in documents)
            for unit in range(len(corpus.units)):
                self._make_unit(split, unit, seen, evaluated)
        return self._finish(lossy)

    def _check_tokenizer(self) -> bool:
        """Whether it loses a part of the text, which is said. ValueError: most of it."""
        *_, corpus = self.recipe.corpora.values()
        documents = itertools.islice(clean_documents(corpus, Accounting()), SAMPLE[0])
        lost = self.maker.lost_share([text[: SAMPLE[1]] for text, _, _ in documents])
        if lost > USELESS:
            raise ValueError(f"tokenizer_name {self.maker.tokenizer.name_or_path!r} does not know the text "
                             f"of {corpus.name}: {lost:.1%} of its characters are lost. Name another one, "
                             "or none to train one.")
        if lost > LOSSY:
            print(f"data       the tokenizer loses {lost:.1%} of the characters of {corpus.name}; bits per "
                  "byte are not comparable", flush=True)
        return lost > LOSSY

    def _progress(self, key: ChunkKey) -> tuple[dict, dict] | None:
        """(record, arrays) of a finished chunk, None where its file is missing, incomplete, as file systems
        may leave half a file, or of an older version."""
        missing = FileNotFoundError, BadZipFile, ValueError, EOFError, KeyError
        with contextlib.suppress(*missing):
            with np.load(io.BytesIO(self.folder.read(f"{shards.PROGRESS}/{_name(key, 'npz')}"))) as arrays:
                return json.loads(str(arrays["record"])), dict(arrays)

    def _make_unit(self, split: str, unit: int, seen: set[int], evaluated: set[int]) -> None:
        """Makes the missing chunks of a unit, one after the other. `seen` gets the hashes of all."""
        corpus, skipped, last = self.recipe.corpora[split], 0, False
        rows = show_progress(corpus.documents(unit), f"preparing {corpus.name}, {split}")
        for number in itertools.count():
            if last or self.tokens_left <= 0:
                return
            key = split, unit, number
            if progress := self._progress(key):
                record, arrays = progress
                skipped += record["accounts"][split]["read"]
                seen.update(arrays["hashes"].tolist())
            else:
                record = self._make_chunk(key, itertools.islice(rows, skipped, None), seen, evaluated)
                skipped = 0
            last, account = record["last"], record["accounts"][split]
            self.tokens_left -= account["tokens"]
            self.records += [record] if account["read"] else []

    def _make_chunk(self, key: ChunkKey, rows: Iterator[dict], seen: set[int], evaluated: set[int]) -> dict:
        """Writes the file of a chunk and its record, which is returned. Stops soon after max_tokens."""
        split, started, hashes, last = key[0], time.monotonic(), array("Q"), False
        account, hold_out = Accounting(), self.recipe.hold_out if split == "train" else None
        counts = {split: account}
        written = defaultdict(partial(array, self.maker.dtype.char))  # token ids of each split

        def in_chunk() -> Iterator[tuple]:
            """Where a chunk ends depends on its own text alone, before duplicates are left out."""
            nonlocal last
            size, most = 0, int(self.recipe.shard_mb * 1e6 * TEXT_PER_BYTE)
            for document in filter_rows(rows, self.recipe.corpora[split], account):
                hashes.append(document[1])
                size += document[2]
                yield document
                if size >= most:
                    return
            last = True

        def to_tokenize() -> Iterator[tuple[str, str]]:
            """(text, the split that it is for)"""
            for text, number, size in drop_seen(in_chunk(), account, seen, evaluated):
                if held_out := hold_out and hold_out(text, number):
                    account.hold_out(counts.setdefault("validation", Accounting()), size)
                yield text, "validation" if held_out else split
                if len(written[split]) >= self.tokens_left:
                    return

        for into, ids in self.maker(to_tokenize(), key):
            written[into].frombytes(ids.tobytes())
        account.seconds = time.monotonic() - started
        tokens = {split: np.frombuffer(ids, self.maker.dtype) for split, ids in written.items()}
        self.maker.account(tokens, counts)
        accounts = {split: account.record() for split, account in counts.items()}
        record = {"key": key, "last": last, "accounts": accounts}
        if len(ids := tokens.pop(split, ())):
            record["file"] = shards.write_shard(self.folder, _name(key, "npy"), ids)
        if account.read:
            np.savez(progress := io.BytesIO(), record=json.dumps(record), hashes=hashes, **tokens)
            self.folder.write(f"{shards.PROGRESS}/{_name(key, 'npz')}", progress.getvalue())
        return record

    def _finish(self, lossy: bool) -> dict:
        """Writes what chunks held out, the tokenizer, and the manifest."""
        entries, accounts = defaultdict(list), defaultdict(Accounting)
        for record in self.records:
            for split, account in record["accounts"].items():
                accounts[split] += Accounting.from_record(account)
            entries[record["key"][0]] += [record["file"]] if "file" in record else []
        splits = [split for split in reversed(shards.SPLITS) if split in accounts]
        if self.recipe.hold_out:
            arrays = (self._progress(record["key"])[1].get("validation") for record in self.records)
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
                print(f"data       not text: {', '.join(account.unreadable_names)}", flush=True)
            if account.evaluated > account.used:
                print(f"data       {account.evaluated:,} of {account.read:,} documents are evaluated on and "
                      "therefore not trained on", flush=True)
        return manifest
