"""A preparation in parts, on many machines: what each knows of the others.

    progress/hashes-00007.npz  the hashes of part 7's documents, chunk by chunk. When all parts have left
    theirs,
                               each knows which documents come first elsewhere, and makes its chunks;
    progress/part-00007.json   says that they are made

A part makes every `parts`-th unit of the source (files, usually) or, where it has fewer units, every
`parts`-th chunk. When all have been made, whoever finds that writes the manifest: that of one preparation.
"""

import io
from functools import cached_property

import numpy as np

from data.factory import PROGRESS, SPLITS, Factory, Key, named
from data.filters import SeenHashes, progress_bar

HASHES, MADE = PROGRESS + "/hashes-{:05d}.npz", PROGRESS + "/part-{:05d}.json"


def lacking(folder, kind: str, parts: int) -> list[int]:
    """The parts that have not left their file of this kind."""
    names = folder.names(PROGRESS)
    return [part for part in range(parts) if kind.format(part).split("/")[1] not in names]


def read_hashes(factory: Factory) -> bytes:
    """HASHES of a part, whose documents are read."""
    hashes, data = {}, io.BytesIO()
    for split in factory.splits:
        with progress_bar(f"reading {factory.corpora[split].name}, {split}") as bar:
            for unit in range(factory.corpora[split].units):
                for key, taken in factory.chunks(split, unit):
                    for _ in bar.of(taken, taken.counts):
                        pass
                    hashes[named(key)] = np.array(taken.hashes, np.uint64)
    np.savez(data, **hashes)
    return data.getvalue()


class Elsewhere:
    """Which documents of a part's own chunks come first in another chunk: from one pass over all hashes."""

    def __init__(self, factory: Factory):
        self.factory = factory

    def __call__(self, key: Key) -> tuple[set[int], SeenHashes]:
        """Hashes of this chunk's documents that are evaluated on, and of those that an earlier chunk
        holds."""
        numbers, first = self.found
        own = self.own[named(key)]
        places, place = first[np.searchsorted(numbers, own)], self._place(named(key))
        train = self._place("train-0-0")
        evaluated = places < train if key[0] == "train" else np.zeros(len(own), bool)
        before = SeenHashes()
        for number in own[(places < place) & ~evaluated].tolist():
            before.add(number)
        return set(own[evaluated].tolist()), before

    @cached_property
    def own(self) -> dict[str, np.ndarray]:
        return self._hashes(self.factory.part[0])

    @cached_property
    def found(self) -> tuple[np.ndarray, np.ndarray]:
        """The hashes of the part's own documents, sorted, and the place of the first chunk that holds
        each."""
        numbers = np.unique(np.concatenate([np.empty(0, np.uint64), *self.own.values()]))
        first = np.full(len(numbers), np.iinfo(np.int64).max)
        for other in range(self.factory.part[1]):
            for name, hashes in self._hashes(other).items():
                here = np.searchsorted(numbers, np.intersect1d(numbers, hashes))
                first[here] = np.minimum(first[here], self._place(name))
        return numbers, first

    def _place(self, name: str) -> int:
        """In the order of all chunks."""
        split, unit, chunk = name.split("-")
        return (SPLITS.index(split) << 60) + (int(unit) << 32) + int(chunk)

    def _hashes(self, part: int) -> dict[str, np.ndarray]:
        with np.load(io.BytesIO(self.factory.folder.read(HASHES.format(part)))) as hashes:
            return dict(hashes)
