"""Text to token shards, chunk by chunk: for the cache of a run, and for `python -m data.prepare`.

A chunk is some consecutive documents of a source. Its tokens depend on them, on the settings, and on the
documents before it, whose duplicates are left out. Each chunk becomes one file:

    train-00000-00007.npy           chunk 7 of unit 0 (a file of the source, or several) of the split train
    progress/train-00000-00007.npz  until all is done: its counts, hashes, tokens for validation

At the end the tokens for validation become validation-00000.npy, ..., and manifest.json is written. A killed
preparation resumes at its chunk: earlier documents are read again, but never tokenized again.
"""

import contextlib
import io
import itertools
import json
import re
import sys
import tempfile
import time
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from data.documents import filters
from data.documents.filters import Accounting, Chunk, HoldOut, SeenHashes, clean_documents, is_wanted
from data.documents.source import Corpus
from data.tokens.encode import Encoder, lost_shares, tokenize_documents, tokenizer_fingerprint
from data.tokens.shards import FORMAT, MANIFEST, PROGRESS, write_shard
from utils.io.urls import Folder

SPLITS = ("test", "validation", "train")  # evaluation first: its documents are not trained on
SHARD_MB = 64.0
TEXT_PER_BYTE = 2.2  # bytes of text per byte of tokens, roughly: it decides how much text a chunk takes
NO_LIMIT = float("inf")
SAMPLE = 100, 2000  # documents, and characters of each, that tell how much of the text a tokenizer knows
LOSSY, USELESS = 0.01, 0.5  # shares of unknown tokens or lost characters

Key = tuple[str, int, int]  # split, unit, chunk


def named(key: Key) -> str:
    return f"{key[0]}-{key[1]:05d}-{key[2]:05d}"


def key_of(name: str) -> Key | None:
    """The key of a chunk, or of its record, by its name; None for other names."""
    match = re.fullmatch(r"([a-z]+)-(\d+)-(\d+)(?:\.npz)?", name)
    return match and (match[1], int(match[2]), int(match[3]))


class TokenMaker:
    """Turns documents into tokens, with EOS."""

    cache = kind = "rows"  # prefix of the folder in the cache; of the manifest
    width, no_row = 1, ""  # files hold multiples of so many tokens; what to tell where text gives no row

    def __init__(self, tokenizer):
        self.tokenizer, self.encoder = tokenizer, Encoder.of(tokenizer)
        self.dtype = np.dtype(self.encoder.dtype)
        self.settings = {"tokenizer": tokenizer_fingerprint(tokenizer)}

    def __call__(self, documents: Iterable[tuple[str, str]], key: Key) -> Iterator[tuple[str, np.ndarray]]:
        """(text, split) of the documents of a chunk -> (split, token ids), several times per split."""
        for ids, split in tokenize_documents(documents, self.encoder):
            yield split, ids

    def account(self, tokens: dict[str, np.ndarray], counts: dict[str, Accounting]) -> None:
        """Adds the tokens of a chunk to the counts of their splits."""
        for split, ids in tokens.items():
            counts[split].tokens = len(ids)


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
        """Makes the shards, or what is missing of them. Returns the manifest. ValueError: the tokenizer does
        not know the text."""
        for name in self.folder.names(PROGRESS):
            with contextlib.suppress(FileNotFoundError, KeyError):  # KeyError: it is of an older version
                if key := key_of(name):
                    self.chunk_records[key] = json.loads(str(self._progress(key)["record"]))
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
        unknown, lost = lost_shares(self.maker.tokenizer, [text[: SAMPLE[1]] for text, _, _ in documents])
        told = f"{unknown:.1%} of its tokens of this text are unknown, {lost:.1%} of the characters are lost"
        if max(unknown, lost) > USELESS:
            raise ValueError(f"tokenizer_name {self.maker.tokenizer.name_or_path!r} does not know the text "
                             f"of {corpus.name}: {told}. Name another one, or none to train one.")
        if max(unknown, lost) > LOSSY:
            print(f"data       the tokenizer: {told}; bits per byte are not comparable", flush=True)
        return max(unknown, lost) > LOSSY

    def _progress(self, key: Key) -> dict[str, np.ndarray]:
        """FileNotFoundError if it is missing or incomplete: some file systems leave half a file."""
        try:
            with np.load(io.BytesIO(self.folder.read(f"{PROGRESS}/{named(key)}.npz"))) as arrays:
                return dict(arrays)
        except (BadZipFile, ValueError, EOFError) as error:
            raise FileNotFoundError(named(key)) from error

    def _run(self) -> None:
        """Makes every chunk that is missing."""
        evaluated, seen, self.tokens_left = (), SeenHashes(), self.max_tokens or NO_LIMIT
        for split, corpus in self.corpora.items():
            if split == "train":
                evaluated, seen = seen, SeenHashes()
                for other in self.evaluated:
                    for _ in clean_documents(other, Accounting(), evaluated):
                        pass
            for unit in range(len(corpus.readers)):
                for key, chunk in self._chunks(split, unit, seen):
                    if self.tokens_left > 0:
                        self._make_chunk(key, chunk, evaluated, seen)
                    if self.tokens_left <= 0:
                        return

    def _chunks(self, split: str, unit: int, seen: SeenHashes) -> Iterator[tuple[Key, Chunk]]:
        """The missing chunks of a unit, to be read one after the other. `seen` gets the hashes of the chunks
        that are not missing."""
        corpus, skipped, size = self.corpora[split], 0, int(self.shard_mb * 1e6 * TEXT_PER_BYTE)
        documents = filters.show_progress(corpus.documents(unit), f"preparing {corpus.name}, {split}")
        for number in itertools.count():
            key = split, unit, number
            if record := self.chunk_records.get(key):
                account = record["accounts"][split]
                self.tokens_left -= account["tokens"]
                skipped, last = skipped + account["read"], record["last"]
                for one in self._progress(key)["hashes"].tolist():
                    seen.add(one)
            else:
                chunk = Chunk(itertools.islice(documents, skipped, None), corpus, size)
                yield key, chunk
                skipped, last = 0, chunk.last
            if last:
                return

    def _make_chunk(self, key: Key, chunk: Chunk, evaluated, seen) -> None:
        """Writes the file of a chunk and its record; with max_tokens little more than is left to make."""
        counts, started = {key[0]: chunk.counts}, time.monotonic()
        written = defaultdict(partial(array, self.maker.dtype.char))  # token ids of each split

        def wanted() -> Iterator[tuple[str, str]]:
            """(text, split) of the documents to tokenize: all that are counted."""
            for text, number, size in chunk:
                if is_wanted(number, size, chunk.counts, seen, evaluated):
                    split = key[0]
                    if split == "train" and self.hold_out and self.hold_out(text, number):
                        split = "validation"
                        chunk.counts.hold_out(counts.setdefault(split, Accounting()), size)
                    yield text, split
                    if len(written[key[0]]) >= self.tokens_left:
                        return

        for split, ids in self.maker(wanted(), key):
            written[split].frombytes(ids.tobytes())
        if not chunk.counts.read:
            return
        tokens = {split: np.frombuffer(ids, self.maker.dtype) for split, ids in written.items()}
        self.maker.account(tokens, counts)
        chunk.counts.seconds = round(time.monotonic() - started, 3)
        accounts = {split: asdict(account) for split, account in counts.items()}
        self.chunk_records[key] = record = {"last": chunk.last, "accounts": accounts}
        if len(own := tokens.pop(key[0], ())):
            record["file"] = write_shard(self.folder, f"{named(key)}.npy", own)
        self.tokens_left -= accounts[key[0]]["tokens"]
        progress = io.BytesIO()
        np.savez(progress, record=json.dumps(record), hashes=chunk.hashes, **tokens)
        self.folder.write(f"{PROGRESS}/{named(key)}.npz", progress.getvalue())

    def _finish(self, lossy: bool) -> dict:
        """Writes what chunks held out, the tokenizer, and the manifest."""
        files, accounts = defaultdict(list), defaultdict(Accounting)
        for key in sorted(self.chunk_records, key=lambda key: (SPLITS.index(key[0]), key)):
            record = self.chunk_records[key]
            for split, account in record["accounts"].items():
                accounts[split] += Accounting(**account)
            files[key[0]] += [record["file"]] if "file" in record else []
        splits = [split for split in reversed(SPLITS) if split in accounts]
        files["validation"] += self._write_held_out()
        found = {split: {"tokens": sum(entry["tokens"] for entry in files[split]), "files": files[split]}
                 for split in splits if files[split]}
        manifest = {
            "format": FORMAT, "kind": self.maker.kind, "width": self.maker.width,
            "dtype": str(self.maker.dtype), "tokenizer": self.maker.settings["tokenizer"], "lossy": lossy,
            "settings": self.settings, "splits": found,
            "accounting": {split: asdict(accounts[split]) for split in splits},
        }  # fmt: skip
        save_tokenizer(self.folder, self.maker.tokenizer)
        self.folder.write(MANIFEST, json.dumps(manifest, indent=1).encode())
        self.folder.remove(PROGRESS)
        return manifest

    def _write_held_out(self) -> list[dict]:
        """Writes the tokens that chunks of train made for validation, in files of a shard's size."""
        width = self.maker.width
        full = max(1, int(self.shard_mb * 1e6) // self.maker.dtype.itemsize // width) * width
        files, waiting = [], np.empty(0, self.maker.dtype)
        for key in [*sorted(self.chunk_records), None]:
            if key and key[0] == "train" and self.hold_out:
                waiting = np.append(waiting, self._progress(key).get("validation", waiting[:0]))
            while len(waiting) >= full or key is None and len(waiting):
                files.append(write_shard(self.folder, f"validation-{len(files):05d}.npy", waiting[:full]))
                waiting = waiting[full:]
        return files


def save_tokenizer(folder: Folder, tokenizer) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        for file in sorted(map(Path, tokenizer.save_pretrained(temporary))):
            folder.write(f"tokenizer/{file.name}", file.read_bytes())
