"""Progress of a preparation: what data/prepare.py needs to go on where it stopped, with nothing lost.

A record is written with every shard and every five minutes. It holds what is new since the last one, so that
all of them together grow with the source only.
"""

import io
import json
import time
from array import array
from zipfile import BadZipFile

import numpy as np
import pyarrow as pa

from data.filters import Accounting, SeenHashes
from data.shards import PROGRESS
from data.sources.storage import Folder

SECONDS_BETWEEN_RECORDS = 300
SPLITS = ("train", "validation")


class Records:
    """Progress of one preparation: progress/settings.json, then numbered .npz, never rewritten.

    After __init__, as of the last record: counts of all documents; shards {split: [entry of the manifest]};
    held {split: [documents, bytes, tokens]}; pending, arrays that wait for their shard; seen, hashes of kept
    documents.
    """

    def __init__(self, folder: Folder):
        self.folder, self.number = folder, 0
        self.counts, self.seen, self.fresh = Accounting(), SeenHashes(), array("Q")
        self.shards: dict[str, list[dict]] = {split: [] for split in SPLITS}
        self.held = {split: [0, 0, 0] for split in SPLITS}
        self.schema: pa.Schema | None = None
        self.pending: dict[str, np.ndarray] = {}
        for name in (name for name in folder.names(PROGRESS) if name.endswith(".npz")):
            try:
                with np.load(io.BytesIO(folder.read(f"{PROGRESS}/{name}"))) as record:
                    arrays = dict(record)
            except (BadZipFile, ValueError, EOFError):
                break  # a file system without whole writes: as if it were not there
            state = json.loads(str(arrays.pop("state")))
            for number in arrays.pop("hashes").tolist():
                self.seen.add(number)
            for split, shards in state["shards"].items():
                self.shards[split] += shards
            self.counts, self.held, self.pending = Accounting(**state["counts"]), state["held"], arrays
            schema = bytes.fromhex(state["schema"])
            self.schema = pa.ipc.read_schema(pa.py_buffer(schema)) if schema else None
            self.number += 1
        self._recorded()

    def _recorded(self) -> None:
        self.recorded = {split: len(shards) for split, shards in self.shards.items()}
        self.last = time.monotonic()

    def add(self, number: int) -> bool:
        """SeenHashes.add, and remembers what the next record must hold."""
        new = self.seen.add(number)
        if new:
            self.fresh.append(number)
        return new

    def due(self) -> bool:
        return time.monotonic() - self.last > SECONDS_BETWEEN_RECORDS

    def write(self, counts: Accounting, pending: dict[str, np.ndarray]) -> None:
        """counts: as of the last document that is in a shard or in `pending`."""
        new = counts.kept - self.counts.kept  # one hash each; the others were read ahead
        shards = {split: shards[self.recorded[split] :] for split, shards in self.shards.items()}
        schema = self.schema.serialize().to_pybytes().hex() if self.schema else ""
        state = {"counts": counts.as_dict(), "held": self.held, "shards": shards, "schema": schema}
        record = io.BytesIO()
        np.savez(record, state=json.dumps(state), hashes=np.array(self.fresh[:new], np.uint64), **pending)
        self.folder.write(f"{PROGRESS}/{self.number:06d}.npz", record.getvalue())
        del self.fresh[:new]
        self.counts, self.number = counts, self.number + 1
        self._recorded()

    def accounts(self, counts: Accounting) -> dict[str, Accounting]:
        """The account of each split: of `counts`, all documents of the source, validation's are held out."""
        train, validation = Accounting(**counts.as_dict()), Accounting(seconds=counts.seconds)
        documents, size, _ = self.held["validation"]
        train.kept, train.validation, train.bytes = train.kept - documents, documents, train.bytes - size
        validation.read, validation.kept, validation.bytes = documents, documents, size
        accounts = {"train": train, "validation": validation}
        for split, account in accounts.items():
            account.tokens = self.held[split][2]
            account.rows = sum(shard.get("rows", 0) for shard in self.shards[split])
            in_shards = sum(shard.get("tokens", 0) for shard in self.shards[split])
            account.tokens_dropped = account.tokens - in_shards
            assert [account.kept, account.bytes] == self.held[split][:2], accounts
        return accounts
