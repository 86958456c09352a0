"""A preparation in parts, on many machines: what a part knows of the others, and how all are joined.

    progress/hashes-00007           {split: hashes of its documents}, of part 7, which has been read. When all
    part-00007/train-00000.parquet  have, each knows what to leave out, and makes its shards;
    progress/part-00007.json        its counts, and the ids that fill no row

When all of these are there, whoever finds that writes the manifest, and what fills rows together as a shard.
"""

import io
import json
from collections import deque
from dataclasses import asdict
from typing import Any

import numpy as np

from data.filters import Accounting, SeenHashes, clean_documents, show_progress
from data.records import Records
from data.shards import PROGRESS
from data.sources.storage import Folder

HASHES, MADE = PROGRESS + "/hashes-{:05d}", PROGRESS + "/part-{:05d}.json"


def lacking(folder: Folder, kind: str, parts: int) -> list[int]:
    """The parts that have not left their file of this kind."""
    names = folder.names(PROGRESS)
    return [part for part in range(parts) if kind.format(part).split("/")[1] not in names]


def read_hashes(corpora) -> bytes:
    """HASHES of a part, whose documents are read."""
    found, data = {}, io.BytesIO()
    for split, corpus in corpora.items():
        counts, seen = Accounting(), SeenHashes()
        documents = clean_documents(corpus, counts, seen)
        deque(show_progress(documents, counts, f"reading {corpus.name}, {split}"), maxlen=0)
        found[split] = np.unique(seen.slots)  # with 0, the free ones, in any
    np.savez(data, **found)
    return data.getvalue()


def found_elsewhere(folder: Folder, part: int, parts: int) -> dict[str, tuple[list, list]]:
    """Hashes of this part's documents that come in this split of an earlier part, or of any part in a split
    before it: {split: (those of training documents of the second kind, all others)}."""

    def hashes_of(part: int) -> dict[str, np.ndarray]:
        with np.load(io.BytesIO(folder.read(HASHES.format(part)))) as hashes:
            return dict(hashes)

    own = hashes_of(part)
    found = {split: ([], []) for split in own}
    for other in range(parts):
        theirs = hashes_of(other)
        for i, split in enumerate(own):
            for name in [*own][: i + (other < part)]:
                both = np.intersect1d(own[split], theirs[name], assume_unique=True)
                found[split][name == split or split != "train"].extend(both.tolist())
    return found


def summary(records: Records) -> bytes:
    """MADE of a part."""
    rest = {split: ids.tolist() for split, ids in records.pending.items()}
    made = {"counts": records.counts, "held": records.held, "shards": records.shards, "rest": rest}
    return json.dumps(made, default=asdict).encode()


def join_parts(folder: Folder, settings: dict[str, Any], dtype) -> Records:
    """As of one preparation. FileNotFoundError where a part is not done."""
    T, records = settings["block_size"], Records(folder)
    every = [json.loads(folder.read(MADE.format(part))) for part in range(settings["parts"])]
    for split, shards in records.shards.items():
        shards += sum((made["shards"][split] for made in every), [])
        records.held[split] = np.sum([made["held"][split] for made in every], 0).tolist()
        rest = np.array(sum((made["rest"].get(split, []) for made in every), []), dtype)
        if len(rows := rest[: len(rest) // T * T].reshape(-1, T)):
            records.write_shard(split, rows)
    for split in every[0]["counts"]:
        numbers = zip(*(made["counts"][split].values() for made in every), strict=True)
        records.counts[split] = Accounting(*(round(sum(each), 3) for each in numbers))
    return records
