"""The shards of a preparation, and its progress: a record with every shard and every five minutes."""

import hashlib
import io
import json
import sys
import time
from array import array
from collections.abc import Iterator
from dataclasses import asdict, replace
from zipfile import BadZipFile

import numpy as np

from data.filters import Accounting, SeenHashes, clean_documents, in_validation, show_progress
from data.fim import fill_in_middle
from data.packing import PackedRows, token_dtype, tokenize_documents
from data.shards import PROGRESS
from data.sources.corpus import Corpus
from data.sources.storage import Folder
from data.sources.tables import rows_to_parquet

SECONDS_BETWEEN_RECORDS = 300
SPLITS = ("train", "validation", "test")


class Records:
    """Progress of one preparation: progress/settings.json, then numbered .npz, never rewritten.

    After __init__, as of the last record: counts {split of the source: Accounting}, the last one's is being
    read; shards {split: [entry of the manifest]}; held {split: [documents, bytes, tokens]}; pending {split:
    ids without a shard}; seen, evaluated: hashes of kept documents, of this split and of those before.
    part: "" or the folder of a part; elsewhere: what found_elsewhere in data/parts.py has found for it.
    """

    def __init__(self, folder: Folder, part: str = "", elsewhere: dict[str, tuple] | None = None):
        self.folder, self.part, self.elsewhere, self.number = folder, part, elsewhere or {}, 0
        self.seen, self.evaluated, self.fresh = SeenHashes(), SeenHashes(), array("Q")
        self.counts: dict[str, Accounting] = {}
        self.shards: dict[str, list[dict]] = {split: [] for split in SPLITS}
        self.held = {split: [0, 0, 0] for split in SPLITS}
        self.pending: dict[str, array] = {}
        for name in (name for name in folder.names(f"{PROGRESS}/{part}") if name.endswith(".npz")):
            try:
                with np.load(io.BytesIO(folder.read(f"{PROGRESS}/{part}{name}"))) as record:
                    arrays = dict(record)
            except (BadZipFile, ValueError, EOFError):
                break  # a file system without whole writes: as if it were not there
            state = json.loads(str(arrays.pop("state")))
            self.begin([*state["counts"]][-1])
            for number in arrays.pop("hashes").tolist():
                self.seen.add(number)
            for split, shards in state["shards"].items():
                self.shards[split] += shards
            self.counts = {split: Accounting(**counts) for split, counts in state["counts"].items()}
            self.held = state["held"]
            self.pending = {split: array(ids.dtype.char, ids.tobytes()) for split, ids in arrays.items()}
            self.number += 1
        self._recorded()

    def _recorded(self) -> None:
        self.recorded = {split: len(shards) for split, shards in self.shards.items()}
        self.last = time.monotonic()

    def begin(self, split: str) -> Accounting:
        """This split is read now, from the document after those of its account on. What was read before the
        training documents is evaluated on."""
        if split not in self.counts:
            if split == "train":
                self.evaluated, self.seen = self.seen, SeenHashes()
            hashes = self.evaluated, self.seen
            for those, known in zip(self.elsewhere.get(split, ()), hashes, strict=False):
                for number in those:
                    known.add(number)
        counts = replace(self.counts.get(split, Accounting()))
        self.began = time.monotonic() - counts.seconds
        return counts

    def add(self, number: int) -> bool:
        """SeenHashes.add, and remembers what the next record must hold."""
        if new := self.seen.add(number):
            self.fresh.append(number)
        return new

    def write_shard(self, split: str, rows: np.ndarray) -> None:
        """The next one of a split: rows [n, T]."""
        name, data = f"{self.part}{split}-{len(self.shards[split]):05d}.parquet", rows_to_parquet(rows)
        self.folder.write(name, data)
        entry = {"file": name, "rows": len(rows), "tokens": rows.size, "size": len(data)}
        self.shards[split].append(entry | {"sha256": hashlib.sha256(data).hexdigest()})

    def write(self, split: str, counts: Accounting) -> None:
        """counts: of a split, as of its last document that is in a shard or in `pending`."""
        old = self.counts.get(split, Accounting())
        new = counts.different - old.different  # one hash each; more were read ahead
        self.counts[split] = replace(counts, seconds=round(time.monotonic() - self.began, 3))
        shards = {split: shards[self.recorded[split] :] for split, shards in self.shards.items()}
        state = json.dumps({"counts": self.counts, "held": self.held, "shards": shards}, default=asdict)
        record = io.BytesIO()
        np.savez(record, state=state, hashes=np.array(self.fresh[:new], np.uint64), **self.pending)
        self.folder.write(f"{PROGRESS}/{self.part}{self.number:06d}.npz", record.getvalue())
        self.number += 1
        del self.fresh[:new]
        self._recorded()

    def accounts(self) -> dict[str, Accounting]:
        """The account of each split, of a finished preparation. What was held out for validation is in the
        account of the split that it was held out of."""
        accounts = {split: self.counts[split] for split in SPLITS if split in self.counts}
        if "validation" not in accounts:
            train, (documents, size, _) = accounts["train"], self.held["validation"]
            left = {"kept": train.kept - documents, "bytes": train.bytes - size, "validation": documents}
            held_out = Accounting(read=documents, kept=documents, bytes=size, seconds=train.seconds)
            accounts |= {"train": replace(train, **left), "validation": held_out}
        for split, account in accounts.items():
            account.tokens = self.held[split][2]
            account.rows = sum(shard["rows"] for shard in self.shards[split])
            account.tokens_dropped = account.tokens - sum(shard["tokens"] for shard in self.shards[split])
            assert [account.kept, account.bytes] == self.held[split][:2], accounts
        return accounts


def write_token_shards(corpora: dict[str, Corpus], tokenizer, records: Records, settings: dict) -> None:
    """{split: Corpus}, those that are evaluated on before the training documents, from the last record on."""
    dtype, T = token_dtype(tokenizer), settings["block_size"]
    validation = settings["seed"], 0 if "validation" in corpora else settings["validation_fraction"]
    fim = fill_in_middle(settings.get("fim_rate", 0), settings["seed"], tokenizer)
    rows = max(1, int(settings["shard_mb"] * 1e6) // (T * dtype.itemsize))
    # Tokens of a shard. Validation's is smaller, so that its waiting rows stay a small part of each record.
    full = dict.fromkeys(SPLITS, max(1, rows // 8) * T) | {"train": rows * T}
    waiting = records.pending = {split: array(dtype.char) for split in SPLITS} | records.pending

    def noted(name: str, corpus: Corpus, counts: Accounting) -> Iterator[tuple[str, tuple]]:
        """(text, (split of its tokens, its bytes, the account up to it))"""
        documents = clean_documents(corpus, counts, records, records.evaluated)
        for document in show_progress(documents, counts, f"preparing {corpus.name}, {name}"):
            text = document[corpus.text_column]
            split = SPLITS[in_validation(text, *validation)] if name == "train" else name
            note = split, len(text.encode()), replace(counts)
            yield fim(text) if fim and split == "train" else text, note

    def write(split: str, unit: int) -> None:
        """The multiple of `unit` tokens that waits, as shards."""
        stream = np.array(waiting[split][: len(waiting[split]) // unit * unit], dtype)
        for begin in range(0, len(stream), full[split]):
            records.write_shard(split, stream[begin : begin + full[split]].reshape(-1, T))
        del waiting[split][: len(stream)]

    for name in [*corpora][max(0, len(records.counts) - 1) :]:
        counts = records.begin(name)
        if counts.read:
            print(f"{name}: going on after document {counts.read:,}", file=sys.stderr, flush=True)
        documents = noted(name, corpora[name], counts)
        for ids, (split, size, so_far) in tokenize_documents(documents, tokenizer, fim):
            waiting[split].frombytes(ids.tobytes())
            held = records.held[split]
            held[:] = held[0] + 1, held[1] + size, held[2] + len(ids)
            if wrote := len(waiting[split]) >= full[split]:
                write(split, full[split])
            if wrote or time.monotonic() - records.last > SECONDS_BETWEEN_RECORDS:
                records.write(name, so_far)
        for split in SPLITS:
            write(split, T)  # what fills no row waits
        records.write(name, counts)  # so that it is known whose hashes the records hold


def write_row_shards(splits: dict[str, PackedRows], tokenizer, records: Records, settings: dict) -> None:
    """Rows that are made already; there are no documents to account for."""
    dtype, T = token_dtype(tokenizer), settings["block_size"]
    full = max(1, int(settings["shard_mb"] * 1e6) // (T * dtype.itemsize))
    for split, rows in splits.items():
        records.counts[split], records.held[split] = Accounting(), [0, 0, len(rows) * T]
        for first in range(0, len(rows), full):
            part = rows.rows[np.arange(first, min(first + full, len(rows)))]
            records.write_shard(split, part.astype(dtype))
