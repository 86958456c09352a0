"""Text to token files, chunk by chunk: what `python -m data.prepare` and the training scripts share.

A chunk is consecutive documents of a source. Its tokens depend on its documents, on the settings, and on the
documents before it: a duplicate of those is left out. Each chunk becomes one file,

    train-00000-00007.npy           chunk 7 of unit 0 (a file of the source, or several) of the split train
    progress/train-00000-00007.npz  until all is done: its account, and its tokens for other splits

and at the end the tokens for other splits become validation-00000.npy, ..., and manifest.json is written. A
preparation that was killed resumes at the chunk that it was at: documents before it are read again where the
source cannot be sought, and never tokenized again. A file that is lost or damaged is made again from its
chunk. """

import io
import json
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from zipfile import BadZipFile

import numpy as np

from data.encode import Encoder, tokenize_documents
from data.files import write_tokens
from data.filters import Accounting, SeenHashes, in_validation, is_wanted, progress_bar, readable
from data.sources.corpus import Corpus
from utils.io.urls import Folder

PROGRESS = "progress"  # folder of a preparation that is not finished
SPLITS = ("test", "validation", "fim", "train")  # in this order: what is evaluated on is known first
SHARD_MB = 64.0
TEXT_PER_BYTE = 2.2  # bytes of text that give a byte of tokens, about: how much text a chunk takes
NO_LIMIT = float("inf")

Key = tuple[str, int, int]  # split, unit, chunk


class TokenMaker:
    """Documents to their tokens, with EOS. fim (FillInMiddle): of training documents; those for validation
    come plain, and once more, all cut, in the split "fim". leave_out: a split whose documents are not
    wanted."""

    width = 1  # of rows that have one

    def __init__(self, tokenizer, fim=None, leave_out: str = ""):
        self.encoder, self.fim, self.leave_out = Encoder.of(tokenizer), fim, leave_out
        self.dtype = np.dtype(self.encoder.dtype)

    def __call__(self, documents: Iterable[tuple[str, str]], key: Key) -> Iterator[tuple[str, np.ndarray]]:
        """(text, split) of the documents of a chunk -> (split, token ids), again and again."""
        cut = ((part, into) for text, split in documents for part, into in self._cut(text, split))
        for ids, split in tokenize_documents(cut, self.encoder, self.fim):
            yield split, ids

    def _cut(self, text: str, split: str) -> Iterator[tuple]:
        if split != self.leave_out:
            yield self.fim(text) if self.fim and split == "train" else text, split
        if self.fim and split == "validation":
            yield replace(self.fim, rate=1.0)(text), "fim"

    def account(self, made: dict[str, np.ndarray], counts: dict[str, Accounting]) -> None:
        """Adds the tokens of a chunk to the accounts of its splits."""
        if "fim" in made:
            counts["fim"] = replace(counts["validation"])
        for split, ids in made.items():
            counts.setdefault(split, Accounting()).tokens = len(ids)


@dataclass
class Factory:
    """corpora: {split: Corpus}. held_out: (seed, fraction) of the training documents that are for validation.
    evaluated: hashes of documents that are not trained on. most: (split, tokens of it after which all ends).
    part: (this one, of so many); `known` then says what other parts have (data/parts.py)."""

    folder: Folder
    corpora: dict[str, Corpus]
    make: TokenMaker
    held_out: tuple[int, float] = (0, 0.0)
    evaluated: Iterable[int] = ()
    most: tuple[str, float] = ("", NO_LIMIT)
    shard_mb: float = SHARD_MB
    part: tuple[int, int] = (0, 1)
    known: Callable[[Key], tuple] | None = None
    lines: dict[Key, dict] = field(default_factory=dict)  # of the manifest, one for each chunk that is done

    @property
    def splits(self) -> list[str]:
        return [split for split in SPLITS if split in self.corpora]

    # ---- What there is

    def resume(self) -> int:
        """Takes over the chunks that are done. Returns their number."""
        for name in self.folder.names(PROGRESS):
            split, _, numbers = name.removesuffix(".npz").partition("-")
            if split in SPLITS and name.endswith(".npz"):
                unit, chunk = map(int, numbers.split("-"))
                if record := self._record(key := (split, unit, chunk)):
                    self.lines[key] = json.loads(str(record["line"]))
        return len(self.lines)

    def _record(self, key: Key) -> dict:
        """{} where there is none, or half of one: not every file system writes whole files."""
        try:
            with np.load(io.BytesIO(self.folder.read(f"{PROGRESS}/{named(key)}.npz"))) as record:
                return dict(record)
        except (BadZipFile, ValueError, EOFError, FileNotFoundError):
            return {}

    # ---- Chunks

    def chunks(self, split: str, unit: int, chunk: int = 0, start: int = 0) -> Iterator[tuple[Key, "Chunk"]]:
        """The chunks of a unit that are this part's, from number `chunk` on, which begins at document
        `start`. To be read one after the other; what is left of one is passed over."""
        corpus, (part, parts) = self.corpora[split], self.part
        by_unit = corpus.units >= parts
        if by_unit and unit % parts != part:
            return
        documents, last = corpus.documents(start, unit), False
        while not last:
            taken = Chunk(documents, corpus, int(self.shard_mb * 1e6 * TEXT_PER_BYTE))
            if by_unit or (unit + chunk) % parts == part:
                yield (split, unit, chunk), taken
            for _ in taken:
                pass
            chunk, last = chunk + 1, taken.last

    def run(self) -> None:
        """Makes every chunk that is not there."""
        for split, evaluated, seen in self._known_documents():
            with progress_bar(f"preparing {self.corpora[split].name}, {split}") as bar:
                for unit in range(self.corpora[split].units):
                    chunk = start = 0
                    while line := self.lines.get((split, unit, chunk)):
                        for number in self._record((split, unit, chunk))["hashes"].tolist():
                            seen.add(number)
                        start, chunk = start + line["accounts"][split]["read"], chunk + 1
                        if line["last"]:
                            break
                    else:
                        for key, taken in self.chunks(split, unit, chunk, start):
                            if key not in self.lines:
                                known = self.known(key) if self.known else (evaluated, seen)
                                self._make(key, taken, *known, bar)
                            if self._left((split, unit, key[2] + 1)) <= 0:
                                return

    def make_again(self, wanted: set[Key], rest: set[str]) -> None:
        """The files of these chunks, and of these splits what comes from chunks of others. All documents are
        read again, as those of other chunks say what is a duplicate; only what is wanted is tokenized."""
        for split, evaluated, seen in self._known_documents():
            for unit in range(self.corpora[split].units):
                for key, taken in self.chunks(split, unit):
                    if key not in self.lines:
                        return
                    into = rest | {split} if key in wanted else rest - {split}
                    known = self.known(key) if self.known else (evaluated, seen)
                    documents = self._judged(key, taken, {}, *known)
                    made = self._tokens(key, ((text, to) for text, to in documents if to in into))
                    if key in wanted:
                        write_tokens(self.folder, f"{named(key)}.npy", made.pop(split))
                    self._write_record(key, self.lines[key], taken, made)

    def _known_documents(self) -> Iterator[tuple[str, SeenHashes, SeenHashes]]:
        """(split, hashes of what is evaluated on, of what was seen) for each split; the caller adds to
        them."""
        seen, evaluated = SeenHashes(), SeenHashes()
        for split in self.splits:
            if split == "train":
                for number in self.evaluated:
                    evaluated.add(number)
                own = self.corpora["train"].fingerprint
                if any(self.corpora[name].fingerprint != own for name in self.splits):
                    for number in filter(None, seen.slots):
                        evaluated.add(number)
                seen = SeenHashes()
            yield split, evaluated if split == "train" else SeenHashes(), seen

    def _judged(self, key: Key, taken: "Chunk", counts, evaluated, seen) -> Iterator[tuple[str, str]]:
        """(text, split) of the documents of a chunk that are wanted; counts: {split: Accounting}, filled."""
        corpus, (seed, fraction) = self.corpora[key[0]], self.held_out
        own = counts[key[0]] = taken.counts
        for document, number, size in taken:
            if is_wanted(number, size, own, seen, evaluated, corpus.source.keep_duplicates):
                text, split = document[corpus.text_column], key[0]
                if split == "train" and fraction and in_validation(text, seed, fraction):
                    split = "validation"
                    own.hold_out(counts.setdefault(split, Accounting()), size)
                yield text, split

    def _tokens(self, key: Key, documents) -> dict[str, np.ndarray]:
        """{split: token ids} of a chunk, little more than are left to make."""
        (full, _), left = self.most, self._left(key)
        made = {split: array(self.make.dtype.char) for split in {key[0], full} - {""}}

        def until_full() -> Iterator[tuple[str, str]]:  # what was read is tokenized: it is accounted for
            while len(made.get(full, ())) < left and (document := next(documents, None)):
                yield document

        for split, ids in self.make(until_full(), key):
            made.setdefault(split, array(self.make.dtype.char)).frombytes(ids.tobytes())
        return {split: np.frombuffer(ids, self.make.dtype) for split, ids in made.items()}

    def _make(self, key: Key, taken: "Chunk", evaluated, seen, bar) -> None:
        counts, started = {}, time.monotonic()
        documents = bar.of(self._judged(key, taken, counts, evaluated, seen), taken.counts)
        made = self._tokens(key, documents)
        if not taken.counts.read:
            return
        self.make.account(made, counts)
        taken.counts.seconds = round(time.monotonic() - started, 3)
        line = {"last": taken.last, "accounts": {split: asdict(account) for split, account in counts.items()}}
        if len(own := made.pop(key[0])):
            line |= write_tokens(self.folder, f"{named(key)}.npy", own)
        self.lines[key] = line
        self._write_record(key, line, taken, made)

    def _write_record(self, key: Key, line: dict, taken: "Chunk", rest: dict[str, np.ndarray]) -> None:
        record = io.BytesIO()
        np.savez(record, line=json.dumps(line), hashes=np.array(taken.hashes, np.uint64), **rest)
        self.folder.write(f"{PROGRESS}/{named(key)}.npz", record.getvalue())

    def _left(self, key: Key) -> float:
        """Tokens that may still be made when this chunk begins."""
        full, most = self.most
        before = (line for other, line in self.lines.items() if full and other < key)
        return most - sum(line["accounts"].get(full, {}).get("tokens", 0) for line in before)

    # ---- The end

    def finish(self) -> dict:
        """Writes what chunks have made for other splits. Returns "splits", "accounting" and "chunks" of the
        manifest."""
        splits, accounts, chunks = {}, {}, []
        for key in sorted(self.lines, key=lambda key: (SPLITS.index(key[0]), key)):
            line = dict(self.lines[key])
            for split, account in line["accounts"].items():
                accounts[split] = accounts.get(split, Accounting()) + Accounting(**account)
                splits.setdefault(split, {"tokens": 0, "files": []})
            entry = {name: line.pop(name) for name in ("file", "tokens", "size", "sha256") if name in line}
            if entry:
                splits[key[0]]["files"].append(entry | {"chunk": key})
            chunks.append({"chunk": key} | line)
        for split in splits:
            splits[split]["files"] += self.write_rest(split)
            splits[split]["tokens"] = sum(file["tokens"] for file in splits[split]["files"])
        accounting = {split: asdict(accounts[split]) for split in reversed(SPLITS) if split in accounts}
        splits = {split: splits[split] for split in accounting if splits[split]["files"]}
        return {"splits": splits, "accounting": accounting, "chunks": chunks}

    def write_rest(self, split: str) -> list[dict]:
        """What chunks of other splits have made for this one, as files of a shard's size."""
        width = self.make.width
        full = max(1, int(self.shard_mb * 1e6) // self.make.dtype.itemsize // width) * width
        files, waiting = [], np.empty(0, self.make.dtype)
        for key in [*sorted(self.lines), None]:
            more = () if key is None or key[0] == split else self._record(key).get(split, ())
            waiting = np.concatenate([waiting, np.asarray(more, self.make.dtype)])
            while len(waiting) >= full or key is None and len(waiting):
                files.append(write_tokens(self.folder, f"{split}-{len(files):05d}.npy", waiting[:full]))
                waiting = waiting[full:]
        return files


class Chunk:
    """The documents of one chunk: (document, hash of the text, bytes) each. It ends by the bytes of its text,
    before anything is left out for what other chunks hold, so that it ends alike wherever it is made."""

    def __init__(self, documents: Iterator[dict], corpus: Corpus, most: int):
        self.documents, self.corpus, self.most = documents, corpus, most
        self.counts, self.hashes, self.size, self.last = Accounting(), array("Q"), 0, False

    def __iter__(self) -> Iterator[tuple[dict, int, int]]:
        for document, number, size in readable(self._documents(), self.corpus, self.counts):
            self.size += size
            self.hashes.append(number)
            yield document, number, size

    def _documents(self) -> Iterator[dict]:
        while self.size < self.most and not self.last:
            document = next(self.documents, None)
            if document is None:
                self.last = True
            else:
                yield document


def named(key: Key) -> str:
    return f"{key[0]}-{key[1]:05d}-{key[2]:05d}"
