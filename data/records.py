"""Progress of a preparation: a record with every shard and every five minutes, of what is new since then."""

import hashlib
import io
import json
import time
from array import array
from dataclasses import asdict, replace
from zipfile import BadZipFile

import numpy as np

from data.filters import Accounting, SeenHashes
from data.shards import PROGRESS
from data.sources.storage import Folder
from data.sources.tables import rows_to_parquet

SECONDS_BETWEEN_RECORDS = 300
SPLITS = ("train", "validation", "test")


class Records:
    """Progress of one preparation: progress/settings.json, then numbered .npz, never rewritten.

    After __init__, as of the last record: counts {split of the source: Accounting}, the last one's is being
    read; shards {split: [entry of the manifest]}; held {split: [documents, bytes, tokens]}; pending, arrays
    that wait for their shard; seen, evaluated: hashes of kept documents, of this split and of those before.
    part: "" or the folder of a part; elsewhere: what found_elsewhere in data/parts.py has found for it.
    """

    def __init__(self, folder: Folder, part: str = "", elsewhere: dict[str, tuple] | None = None):
        self.folder, self.part, self.elsewhere, self.number = folder, part, elsewhere or {}, 0
        self.seen, self.evaluated, self.fresh = SeenHashes(), SeenHashes(), array("Q")
        self.counts: dict[str, Accounting] = {}
        self.shards: dict[str, list[dict]] = {split: [] for split in SPLITS}
        self.held = {split: [0, 0, 0] for split in SPLITS}
        self.pending: dict[str, np.ndarray] = {}
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
            self.held, self.pending = state["held"], arrays
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

    def due(self) -> bool:
        return time.monotonic() - self.last > SECONDS_BETWEEN_RECORDS

    def write(self, split: str, counts: Accounting) -> None:
        """counts: of a split, as of its last document that is in a shard or in `pending`."""
        old = self.counts.get(split, Accounting())
        new = counts.different - old.different  # one hash each; more were read ahead
        self.counts[split] = replace(counts, seconds=round(time.monotonic() - self.began, 3))
        shards = {split: shards[self.recorded[split] :] for split, shards in self.shards.items()}
        every = {split: asdict(counts) for split, counts in self.counts.items()}
        state = {"counts": every, "held": self.held, "shards": shards}
        record = io.BytesIO()
        hashes = np.array(self.fresh[:new], np.uint64)
        np.savez(record, state=json.dumps(state), hashes=hashes, **self.pending)
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
            train = replace(train, kept=train.kept - documents, bytes=train.bytes - size)
            train.validation = documents
            held_out = Accounting(read=documents, kept=documents, bytes=size, seconds=train.seconds)
            accounts |= {"train": train, "validation": held_out}
        for split, account in accounts.items():
            account.tokens = self.held[split][2]
            account.rows = sum(shard["rows"] for shard in self.shards[split])
            in_shards = sum(shard["tokens"] for shard in self.shards[split])
            account.tokens_dropped = account.tokens - in_shards
            assert [account.kept, account.bytes] == self.held[split][:2], accounts
        return accounts
