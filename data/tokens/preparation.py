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
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from data.documents.filters import Accounting, HoldOut, clean_documents, readable, show_progress, wanted
from data.documents.source import Corpus
from data.tokens.cache import locked
from data.tokens.encode import Key, TokenMaker
from data.tokens.shards import (
    BEGUN,
    FORMAT,
    MANIFEST,
    NAME,
    PROGRESS,
    SHARD_MB,
    SPLITS,
    Shards,
    finish,
    read_manifest,
    write_shard,
    write_shards,
)
from utils.io.urls import Folder, explained

OWN = rf"{PROGRESS}|tokenizer|{MANIFEST}|{NAME}"  # names in the folder
BESIDE = r"\.lock|README\.md|\.gitattributes"  # others that may be there
TEXT_PER_BYTE = 2.2  # bytes of text per byte of tokens, roughly: it decides how much text a chunk takes
NO_LIMIT = float("inf")
SAMPLE = 100, 2000  # documents, and characters of each, that tell how much of the text a tokenizer knows
LOSSY, USELESS = 0.01, 0.5  # shares of lost characters


def _name(key: Key, ending: str) -> str:
    """Of the file of a chunk, or of its record."""
    return f"{key[0]}-{key[1]:05d}-{key[2]:05d}.{ending}"


@dataclass
class Preparation:
    """Turns corpora into token shards in a folder."""

    folder: Folder
    corpora: dict[str, Corpus]  # by split, in the order of SPLITS
    maker: TokenMaker
    hold_out: HoldOut | None = None  # of the split train, for validation
    evaluated: Iterable[Corpus] = ()  # their documents are not trained on
    max_tokens: int = 0  # stop after so many tokens, 0: never; for a single corpus
    shard_mb: float = SHARD_MB
    chunk_records: dict[Key, dict] = field(default_factory=dict)  # finished chunks
    tokens_left: float = NO_LIMIT  # still to be made

    @property
    def settings(self) -> dict:
        """What shapes the files, by the names of the flags."""
        *_, corpus = self.corpora.values()
        settings = {
            "dataset_name": corpus.name, "dataset_config_name": corpus.source.dataset_config_name,
            "split": corpus.source.split, "text_column": corpus.text_column, "keywords": corpus.keywords,
            "content": {split: own.fingerprint for split, own in self.corpora.items()},
            "hold_out": self.hold_out and self.hold_out.settings, "format": FORMAT, "shard_mb": self.shard_mb,
            "evaluated": [[other.fingerprint, other.keywords] for other in self.evaluated],
            "max_tokens": self.max_tokens,
        }  # fmt: skip
        return settings | self.maker.settings

    def make(self) -> dict:
        """The manifest of the folder, made now or earlier, its files verified. One process makes it, others
        wait. ValueError: the folder holds something else, or the tokenizer does not know the text."""
        folder = self.folder
        self._existing()  # refuses before anything is written
        with locked(Path(folder.root, ".lock"), folder.url) if folder.local else contextlib.nullcontext():
            manifest = self._existing()
            if manifest and folder.local and (problem := Shards(folder.root, manifest).check()):
                print(f"data       {problem}: all of it is prepared again", flush=True)
                self.empty()
                manifest = None
            manifest = manifest or self._make()
            folder.remove(PROGRESS)
        return manifest

    def _existing(self) -> dict | None:
        """The manifest, None where there is none. ValueError where the folder holds something else, or a
        preparation with other settings."""
        folder, settings, old = self.folder, json.loads(json.dumps(self.settings)), None
        with explained(folder.url, "read"):
            names, begun = folder.names(), folder.names(PROGRESS)
        if manifest := read_manifest(folder) if MANIFEST in names else None:
            old = manifest["settings"]
        elif "settings.json" in begun:
            old = json.loads(folder.read(BEGUN))
        elif not all(re.fullmatch(f"{OWN}|{BESIDE}", name) for name in names):
            raise ValueError(f"{folder.url} is not empty and holds no shards. Name a new folder.")
        if old and old != settings:
            pairs = ((name, old.get(name), settings.get(name)) for name in {**settings, **old})
            changes = ", ".join(f"{name} {was!r}, now {now!r}" for name, was, now in pairs if was != now)
            raise ValueError(f"{folder.url} holds a preparation with other settings ({changes}). Name "
                             "another folder, or delete this one.")
        return manifest

    def empty(self) -> None:
        """Deletes all that a preparation writes."""
        for name in self.folder.names():
            if re.fullmatch(OWN, name):
                self.folder.remove(name)

    def _make(self) -> dict:
        """Makes the shards, or what is missing of them."""
        with explained(self.folder.url, "written"):
            self.folder.write(BEGUN, json.dumps(self.settings, indent=1).encode())
        # Not those that a kill has left before they were renamed: .npz.tmp.
        for name in (name for name in self.folder.names(PROGRESS) if name.endswith(".npz")):
            with contextlib.suppress(FileNotFoundError, KeyError):  # KeyError: it is of an older version
                record = json.loads(str(self._progress(name)["record"]))
                self.chunk_records[tuple(record["key"])] = record
        if self.chunk_records:
            done = len(self.chunk_records)
            print(f"{self.folder.url}: resumes after {done:,} chunks", file=sys.stderr, flush=True)
        lossy = self._check_tokenizer()
        self._run()
        return self._finish(lossy)

    def _check_tokenizer(self) -> bool:
        """Whether it loses a part of the text, which is said. ValueError: most of it."""
        *_, corpus = self.corpora.values()
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

    def _progress(self, name: str) -> dict[str, np.ndarray]:
        """FileNotFoundError if it is missing or incomplete: some file systems leave half a file."""
        try:
            with np.load(io.BytesIO(self.folder.read(f"{PROGRESS}/{name}"))) as arrays:
                return dict(arrays)
        except (BadZipFile, ValueError, EOFError) as error:
            raise FileNotFoundError(name) from error

    def _run(self) -> None:
        """Makes every chunk that is missing."""
        evaluated, seen, self.tokens_left = set(), set(), self.max_tokens or NO_LIMIT
        for split, corpus in self.corpora.items():
            if split == "train":
                evaluated, seen = seen, set()
                for other in self.evaluated:
                    documents = readable(other.documents(), other, Accounting())
                    evaluated.update(number for _, number, _ in documents)
            for unit in range(len(corpus.readers)):
                self._make_unit(split, unit, seen, evaluated)

    def _make_unit(self, split: str, unit: int, seen: set[int], evaluated: set[int]) -> None:
        """Makes the missing chunks of a unit, one after the other. `seen` gets the hashes of all."""
        corpus, skipped, last = self.corpora[split], 0, False
        rows = show_progress(corpus.documents(unit), f"preparing {corpus.name}, {split}")
        for number in itertools.count():
            if last or self.tokens_left <= 0:
                return
            key = split, unit, number
            if record := self.chunk_records.get(key):
                account, last = record["accounts"][split], record["last"]
                self.tokens_left -= account["tokens"]
                skipped += account["read"]
                seen.update(self._progress(_name(key, "npz"))["hashes"].tolist())
            else:
                last = self._make_chunk(key, itertools.islice(rows, skipped, None), seen, evaluated)
                skipped = 0

    def _make_chunk(self, key: Key, rows: Iterator[dict], seen: set[int], evaluated: set[int]) -> bool:
        """Writes the file of a chunk and its record; with max_tokens little more than is left to make.
        Returns whether the rows end there."""
        split, started, hashes, last = key[0], time.monotonic(), array("Q"), False
        account = Accounting()
        counts = {split: account}
        written = defaultdict(partial(array, self.maker.dtype.char))  # token ids of each split

        def in_chunk() -> Iterator[tuple]:
            """Where a chunk ends depends on its own text alone, before duplicates are left out."""
            nonlocal last
            size, most = 0, int(self.shard_mb * 1e6 * TEXT_PER_BYTE)
            for document in readable(rows, self.corpora[split], account):
                hashes.append(document[1])
                size += document[2]
                yield document
                if size >= most:
                    return
            last = True

        def to_tokenize() -> Iterator[tuple[str, str]]:
            """(text, the split that it is for)"""
            for text, number, size in wanted(in_chunk(), account, seen, evaluated):
                held_out = split == "train" and self.hold_out and self.hold_out(text, number)
                if held_out:
                    account.hold_out(counts.setdefault("validation", Accounting()), size)
                yield text, "validation" if held_out else split
                if len(written[split]) >= self.tokens_left:
                    return

        for into, ids in self.maker(to_tokenize(), key):
            written[into].frombytes(ids.tobytes())
        if account.read:
            account.seconds = time.monotonic() - started
            self._record(key, last, counts, hashes, written)
        return last

    def _record(self, key: Key, last: bool, counts: dict, hashes: array, written: dict[str, array]) -> None:
        """Writes what a chunk has made, its record last. counts, written: of each split."""
        tokens = {split: np.frombuffer(ids, self.maker.dtype) for split, ids in written.items()}
        self.maker.account(tokens, counts)
        accounts = {split: asdict(account) for split, account in counts.items()}
        self.chunk_records[key] = record = {"key": key, "last": last, "accounts": accounts}
        if len(own := tokens.pop(key[0], ())):
            record["file"] = write_shard(self.folder, _name(key, "npy"), own)
        self.tokens_left -= accounts[key[0]]["tokens"]
        progress = io.BytesIO()
        np.savez(progress, record=json.dumps(record), hashes=hashes, **tokens)
        self.folder.write(f"{PROGRESS}/{_name(key, 'npz')}", progress.getvalue())

    def _finish(self, lossy: bool) -> dict:
        """Writes what chunks held out, the tokenizer, and the manifest."""
        entries, accounts, keys = defaultdict(list), defaultdict(Accounting), sorted(self.chunk_records)
        for key in sorted(keys, key=lambda key: SPLITS.index(key[0])):
            record = self.chunk_records[key]
            for split, account in record["accounts"].items():
                accounts[split] += Accounting(**account)
            entries[key[0]] += [record["file"]] if "file" in record else []
        splits = [split for split in reversed(SPLITS) if split in accounts]
        if self.hold_out:
            made = (self._progress(_name(key, "npz")).get("validation") for key in keys)
            some = (ids for ids in made if ids is not None)
            entries["validation"] = write_shards(
                self.folder, "validation", some, self.maker.dtype, self.maker.width, self.shard_mb)
        manifest = finish(
            self.folder, self.maker.tokenizer, {split: entries[split] for split in splits},
            kind=self.maker.kind, width=self.maker.width, dtype=str(self.maker.dtype), lossy=lossy,
            settings=self.settings, accounting={split: asdict(accounts[split]) for split in splits},
        )  # fmt: skip
        for split in splits:
            self._say(split, accounts[split])
        return manifest

    def _say(self, split: str, account: Accounting) -> None:
        print(f"data       {split}: {account.line()}", flush=True)
        if account.unreadable_names:
            print(f"data       not text: {', '.join(account.unreadable_names)}", flush=True)
        if account.evaluated > account.kept:
            print(f"data       {account.evaluated:,} of {account.read:,} documents are evaluated on and "
                  "therefore not trained on", flush=True)
