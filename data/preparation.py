"""Text to token files, chunk by chunk: for the cache of a run, for `python -m data.prepare` and its parts.

A chunk is some consecutive documents of a source. Its tokens depend on them, on the settings, and on
the documents before it, whose duplicates are left out. Each chunk becomes one file:

    train-00000-00007.npy           chunk 7 of unit 0 (a file of the source, or several) of the split train
    progress/train-00000-00007.npz  until all is done: its counts, hashes, tokens for other splits

At the end the tokens for other splits become validation-00000.npy, ..., and manifest.json is written.
A killed preparation resumes at its chunk: earlier documents are read again, but never tokenized again.
If files of a finished folder are lost or damaged, all is prepared again and these files are written.
"""

import contextlib
import hashlib
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
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from data import filters
from data.encode import Encoder, tokenize_documents, tokenizer_fingerprint
from data.filters import Accounting, Chunk, Facts, SeenHashes, clean_documents, in_validation, is_wanted
from data.rows import PackedRows
from data.shards import FORMAT, MANIFEST, PROGRESS, damaged_files, finished_manifest
from data.sources.corpus import Corpus
from utils.io.urls import Folder

SPLITS = ("test", "validation", "fim", "train")  # evaluation first: its documents are not trained on
SHARD_MB = 64.0
TEXT_PER_BYTE = 2.2  # bytes of text per byte of tokens, roughly: it decides how much text a chunk takes
NO_LIMIT = float("inf")

Key = tuple[str, int, int]  # split, unit, chunk


def named(key: Key) -> str:
    return f"{key[0]}-{key[1]:05d}-{key[2]:05d}"


def key_of(name: str) -> Key | None:
    """The key of a chunk, or of its record, by its name; None for other names."""
    match = re.fullmatch(r"([a-z]+)-(\d+)-(\d+)(?:\.npz)?", name)
    return match and (match[1], int(match[2]), int(match[3]))


class TokenMaker:
    """Turns documents into tokens, with EOS. fim (FillInMiddle) cuts training documents. Validation documents
    stay plain; a second copy of them, all cut, becomes the split "fim"."""

    kind, width = PackedRows, 1  # the class that reads the files; files hold multiples of so many tokens
    cache, no_row = "rows", ""  # prefix in the cache; what to tell the user when text gives no row

    def __init__(self, tokenizer, fim=None):
        self.tokenizer, self.encoder, self.fim = tokenizer, Encoder.of(tokenizer), fim
        self.dtype = np.dtype(self.encoder.dtype)
        self.settings = {"tokenizer": tokenizer_fingerprint(tokenizer), "fim_rate": fim.rate if fim else 0.0}
        self.settings |= {"fim_seed": fim.seed} if fim else {}

    def __call__(self, documents: Iterable[tuple[str, str]], key: Key) -> Iterator[tuple[str, np.ndarray]]:
        """(text, split) of the documents of a chunk -> (split, token ids), several times per split."""

        def cut() -> Iterator[tuple]:
            for text, split in documents:
                yield self.fim(text) if self.fim and split == "train" else text, split
                if self.fim and split == "validation":
                    yield replace(self.fim, rate=1.0)(text), "fim"

        for ids, split in tokenize_documents(cut(), self.encoder, self.fim):
            yield split, ids

    def account(self, tokens: dict[str, np.ndarray], counts: dict[str, Accounting]) -> None:
        """Adds the tokens of a chunk to the counts of their splits."""
        if "fim" in tokens:
            counts["fim"] = replace(counts["validation"])
        for split, ids in tokens.items():
            counts[split].tokens = len(ids)


@dataclass
class Preparation:
    """Turns corpora into token files in a folder."""

    folder: Folder
    corpora: dict[str, Corpus]  # by split, in the order of SPLITS
    maker: TokenMaker
    held_out: tuple[int, float] = (0, 0.0)  # seed, and the fraction of training documents for validation
    evaluated: Iterable[Corpus] = ()  # their documents are not trained on
    max_tokens: int = 0  # stop after so many tokens, 0: never; for a single corpus
    shard_mb: float = SHARD_MB
    other_parts: dict[Key, Facts] = field(default_factory=dict)  # the chunks that other parts make
    chunk_records: dict[Key, dict] = field(default_factory=dict)  # finished chunks, as in the manifest
    damaged: list[str] = field(default_factory=list)  # files of a finished folder that are to be written
    tokens_left: float = NO_LIMIT  # still to be made

    @property
    def settings(self) -> dict:
        """What shapes the files, by the names of the flags. The number of parts is not among them."""
        *_, corpus = self.corpora.values()
        seed, fraction = self.held_out
        settings = {
            "dataset_name": corpus.name, "dataset_config_name": corpus.source.dataset_config_name,
            "split": corpus.source.split, "text_column": corpus.text_column, "keywords": corpus.keywords,
            "content": {split: own.fingerprint for split, own in self.corpora.items()},
            "validation_fraction": fraction, "seed": seed, "format": FORMAT, "shard_mb": self.shard_mb,
        }  # fmt: skip
        evaluated = [[other.fingerprint, other.keywords] for other in self.evaluated]
        settings |= {"evaluated": evaluated} if evaluated else {}
        settings |= {"most": self.max_tokens} if self.max_tokens else {}
        return settings | self.maker.settings

    # ---- The folder

    def complete(self) -> dict:
        """Makes the folder, resumes it, or makes lost and damaged files again. Returns its manifest.

        ValueError: files are lost, and the source has other documents now."""
        if earlier := finished_manifest(self.folder):
            self.damaged = damaged_files(self.folder, earlier)
            again = self._save_tokenizer(self.folder.names("tokenizer")) + self.damaged
            state = f"making {', '.join(again)} again" if again else "nothing to do"
            print(f"{self.folder.url} is finished: {state}", flush=True)
            if not self.damaged:
                return earlier
        if finished := self.resume():
            print(f"{self.folder.url}: resumes after {finished:,} chunks", file=sys.stderr, flush=True)
        self.run()
        return self.finish(earlier)

    def resume(self) -> int:
        """Takes over the chunks that are done. Returns their number."""
        for key in filter(None, map(key_of, self.folder.names(PROGRESS))):
            with contextlib.suppress(FileNotFoundError, KeyError):  # KeyError: it is of an older version
                record = json.loads(str(self._progress(key)["record"]))
                if record.get("file", {}).get("file") not in self.damaged:
                    self.chunk_records[key] = record
        return len(self.chunk_records)

    def _write(self, name: str, ids: np.ndarray) -> dict:
        """Writes token ids [n] as .npy, but no file of a finished folder that is whole: others may read it.
        Returns the file's entry in the manifest."""
        data = io.BytesIO()
        np.save(data, ids)
        content = data.getvalue()
        if not self.damaged or name in self.damaged:
            self.folder.write(name, content)
        digest = hashlib.sha256(content).hexdigest()
        return {"file": name, "tokens": len(ids), "size": len(content), "sha256": digest}

    def _progress(self, key: Key) -> dict[str, np.ndarray]:
        """FileNotFoundError if it is missing or incomplete: some file systems leave half a file."""
        try:
            with np.load(io.BytesIO(self.folder.read(f"{PROGRESS}/{named(key)}.npz"))) as arrays:
                return dict(arrays)
        except (BadZipFile, ValueError, EOFError) as error:
            raise FileNotFoundError(named(key)) from error

    def finish(self, earlier: dict | None = None) -> dict:
        """Writes what chunks made for other splits; the tokenizer and the manifest, if there is none."""
        files, accounts, chunks = defaultdict(list), defaultdict(Accounting), []
        for key in sorted(self.chunk_records, key=lambda key: (SPLITS.index(key[0]), key)):
            record = dict(self.chunk_records[key])
            for split, account in record["accounts"].items():
                accounts[split] += Accounting(**account)
            if file := record.pop("file", None):
                files[key[0]].append(file | {"chunk": key})
            chunks.append({"chunk": key} | record)
        splits = [split for split in reversed(SPLITS) if split in accounts]
        manifest = {
            "format": FORMAT, "dtype": str(self.maker.dtype), "tokenizer": self.maker.settings["tokenizer"],
            "settings": self.settings, "splits": {},
            "accounting": {split: asdict(accounts[split]) for split in splits}, "chunks": chunks,
        }  # fmt: skip
        for split in splits:
            if entries := files[split] + self._write_rest(split):
                tokens = sum(entry["tokens"] for entry in entries)
                manifest["splits"][split] = {"tokens": tokens, "files": entries}
        content = json.dumps(manifest, indent=1)
        if not earlier:
            self._save_tokenizer()
            self.folder.write(MANIFEST, content.encode())
        self.folder.remove(PROGRESS)
        if earlier and json.loads(content)["splits"] != earlier["splits"]:
            raise ValueError(f"{self.folder.url}: {', '.join(self.damaged)} cannot be made again, because "
                             "the source has other documents now. Delete the folder to prepare all again.")
        return earlier or json.loads(content)

    def _save_tokenizer(self, there: Iterable[str] = ()) -> list[str]:
        """Writes the tokenizer's files, or those that are not there. tokenizer.json is also compared; in the
        others transformers notes its environment. Returns the names of what is written."""
        written = []
        with tempfile.TemporaryDirectory() as temporary:
            for file in sorted(map(Path, self.maker.tokenizer.save_pretrained(temporary))):
                name, content = f"tokenizer/{file.name}", file.read_bytes()
                compared = file.name == "tokenizer.json"
                if file.name not in there or compared and self.folder.read(name) != content:
                    self.folder.write(name, content)
                    written.append(name)
        return written

    def _write_rest(self, split: str) -> list[dict]:
        """Writes the tokens that chunks of other splits made for this one, in files of a shard's size."""
        width = self.maker.width
        full = max(1, int(self.shard_mb * 1e6) // self.maker.dtype.itemsize // width) * width
        files, waiting = [], np.empty(0, self.maker.dtype)
        for key in [*sorted(self.chunk_records), None]:
            if key and key[0] != split:
                waiting = np.append(waiting, self._progress(key).get(split, waiting[:0]))
            while len(waiting) >= full or key is None and len(waiting):
                files.append(self._write(f"{split}-{len(files):05d}.npy", waiting[:full]))
                waiting = waiting[full:]
        return files

    # ---- Chunks

    def run(self) -> None:
        """Makes every chunk that is missing."""
        evaluated, seen, self.tokens_left = (), SeenHashes(), self.max_tokens or NO_LIMIT
        for split, corpus in self.corpora.items():
            if split == "train":
                evaluated, seen = seen, SeenHashes()
                for other in self.evaluated:
                    for _ in clean_documents(other, Accounting(), evaluated):
                        pass
            for unit in range(len(corpus.readers)):
                for key, chunk in self.chunks(split, unit, seen):
                    if self.tokens_left > 0:
                        self._make_chunk(key, chunk, evaluated, seen)
                    if self.tokens_left <= 0:
                        return

    def chunks(self, split: str, unit: int, seen: SeenHashes) -> Iterator[tuple[Key, Chunk]]:
        """The missing chunks of a unit, to be read one after the other; documents that the caller leaves
        unread are skipped. `seen` gets the hashes of the chunks that are not missing."""
        corpus, skipped, size = self.corpora[split], 0, int(self.shard_mb * 1e6 * TEXT_PER_BYTE)
        documents = filters.show_progress(corpus.documents(unit), f"preparing {corpus.name}, {split}")
        for number in itertools.count():
            key = split, unit, number
            facts = self.other_parts.get(key)
            if not facts and (record := self.chunk_records.get(key)):
                account = record["accounts"][split]
                facts = Facts(account["read"], record["last"], self._progress(key)["hashes"])
                self.tokens_left -= account["tokens"]
            if facts:
                skipped, last = skipped + facts.read, facts.last
                for one in facts.hashes.tolist():
                    seen.add(one)
            else:
                chunk = Chunk(itertools.islice(documents, skipped, None), corpus, size)
                yield key, chunk
                chunk.skip_rest()
                skipped, last = 0, chunk.last
            if last:
                return

    def _make_chunk(self, key: Key, chunk: Chunk, evaluated, seen) -> None:
        """Writes the file of a chunk and its record; with max_tokens little more than is left to make."""
        counts, started, (seed, fraction) = {key[0]: chunk.counts}, time.monotonic(), self.held_out
        written = defaultdict(partial(array, self.maker.dtype.char))  # token ids of each split
        source, column = self.corpora[key[0]].source, self.corpora[key[0]].text_column

        def wanted() -> Iterator[tuple[str, str]]:
            """(text, split) of the documents to tokenize: all that are counted."""
            for document, number, size in chunk:
                if is_wanted(number, size, chunk.counts, seen, evaluated, source.keep_duplicates):
                    text, split = document[column], key[0]
                    if split == "train" and fraction and in_validation(text, seed, fraction):
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
            record["file"] = self._write(f"{named(key)}.npy", own)
        self.tokens_left -= accounts[key[0]]["tokens"]
        progress = io.BytesIO()
        np.savez(progress, record=json.dumps(record), hashes=chunk.hashes, **tokens)
        self.folder.write(f"{PROGRESS}/{named(key)}.npz", progress.getvalue())
