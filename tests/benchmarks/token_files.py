"""Rows per second of other projects' token files against the rows that this project prepares.

    python -m tests.benchmarks.token_files --megabytes 200

The same random ids as rows of this project, as nanoGPT's .bin, as eight of llm.c's and as eight TFRecord
files, drawn in the order of training, 32 rows of 1,024 tokens a batch, from one thread. Batches of all take
turns, so that their ratio holds on a busy machine. first pass: rows/s of what is done once, when a file is
new.
"""

import argparse
import struct
import tempfile
import time

import numpy as np
from crc32c import crc32c

from data.order import epochs_and_rows
from data.rows import PackedRows
from data.token_files import open_token_files
from tests.benchmarks.measure import print_table
from tests.shard_data import batch_of

T, B, ROUNDS = 1024, 32, 5


def masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32)


def example(row: np.ndarray) -> bytes:
    """A tf.train.Example of one list, input_ids."""
    def varint(n: int) -> bytes:
        return bytes([n]) if n < 128 else bytes([n % 128 + 128]) + varint(n // 128)

    def field(number: int, content: bytes) -> bytes:
        return bytes([8 * number + 2]) + varint(len(content)) + content

    values = field(3, field(1, b"".join(map(varint, row.tolist()))))
    return field(1, field(1, field(1, b"input_ids") + field(2, values)))


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--megabytes", type=float, default=200, help="of uint16 ids")
    parser.add_argument("--append", help="a file that the table is appended to, such as README.md")
    args = parser.parse_args()
    n = int(args.megabytes * 1e6 / 2 / T) // 8 * 8
    ids = np.random.default_rng(0).integers(0, 50257, (n, T), np.uint16)
    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/native.npy", ids.ravel())
        ids.tofile(f"{folder}/train.bin")
        for number, part in enumerate(np.split(ids, 8)):
            header = np.zeros(256, np.int32)
            header[:3] = 20240520, 1, part.size
            with open(f"{folder}/llmc_{number}.bin", "wb") as out:
                out.write(header.tobytes() + part.tobytes())
            with open(f"{folder}/dataset-{number}-{len(part)}.tfrecord", "wb") as out:
                for record in map(example, part):
                    length = struct.pack("<Q", len(record))
                    out.write(length + masked(length) + record + masked(record))
        native = np.load(f"{folder}/native.npy", mmap_mode="r")
        sources, lines = {"native": PackedRows([native], T)}, {"native": {}}
        names = {"nanoGPT": "train.bin", "llm.c, 8 files": "llmc_*.bin", "TFRecord, 8 files": "*.tfrecord"}
        for name, files in names.items():
            start = time.perf_counter()
            sources[name] = open_token_files(f"{folder}/{files}", f"{folder}/cache").rows("train", T)
            lines[name] = {"first": n / (time.perf_counter() - start)}
            assert np.array_equal(batch_of(sources[name], [(0, 0, n - 1)])["input_ids"][0], ids[-1])
        seconds = {name: [] for name in sources}
        for _ in range(ROUNDS):
            spent = dict.fromkeys(sources, 0.0)
            for first in range(0, n // B * B, B):
                epochs, numbers = epochs_and_rows(first, first + B, n, 0)
                keys = [*zip(range(first, first + B), epochs.tolist(), numbers.tolist(), strict=True)]
                for name, rows in sources.items():
                    start = time.perf_counter()
                    batch_of(rows, keys)
                    spent[name] += time.perf_counter() - start
            for name, spent_on in spent.items():
                seconds[name].append(spent_on)
        for name, found in seconds.items():
            lines[name]["rows"] = n // B * B / float(np.median(found))
    print_table(f"{n:,} rows of {T} tokens", lines, {"rows": "rows/s", "first": "first pass, rows/s"},
                {"rows": "of native"}, args.append)


if __name__ == "__main__":
    main()
