"""The documents of a source, or rows that are made already, become shards of token rows.

settings: those of the preparation, see data/prepare.py; shard_mb is the size of a shard before compression.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from data.filters import Accounting, clean_documents, in_validation, show_progress
from data.fim import fill_in_middle
from data.packing import PackedRows, token_dtype, tokenize_documents
from data.records import SPLITS, Records
from data.sources.corpus import Corpus


def write_token_shards(corpora: dict[str, Corpus], tokenizer, records: Records, settings: dict) -> None:
    """{split: Corpus}, those that are evaluated on before the training documents, from the last record on."""
    dtype, T = token_dtype(tokenizer), settings["block_size"]
    validation = settings["seed"], 0 if "validation" in corpora else settings["validation_fraction"]
    fim = fill_in_middle(settings.get("fim_rate", 0), settings["seed"], tokenizer)
    rows = max(1, int(settings["shard_mb"] * 1e6) // (T * dtype.itemsize))
    # Tokens of a shard. Validation's is smaller, so that its waiting rows stay a small part of each record.
    full = dict.fromkeys(SPLITS, max(1, rows // 8) * T) | {"train": rows * T}
    waiting = {split: [records.pending.get(split, np.empty(0, dtype))] for split in SPLITS}
    lengths = {split: len(ids) for split, [ids] in waiting.items()}

    def documents_of(name: str, corpus: Corpus, counts: Accounting) -> Iterator[tuple[str, tuple]]:
        """(text, (split of its tokens, its bytes, the account up to it))"""
        documents = clean_documents(corpus, counts, records, records.evaluated)
        for document in show_progress(documents, counts, f"preparing {corpus.name}, {name}"):
            text = document[corpus.text_column]
            split = SPLITS[in_validation(text, *validation)] if name == "train" else name
            note = split, len(text.encode()), replace(counts)
            yield fim(text) if fim and split == "train" else text, note

    def write(split: str, unit: int) -> None:
        """The multiple of `unit` tokens that waits, as shards."""
        stream = np.concatenate(waiting[split])
        last = len(stream) - len(stream) % unit
        for begin in range(0, last, full[split]):
            records.write_shard(split, stream[begin : min(begin + full[split], last)].reshape(-1, T))
        waiting[split], lengths[split] = [stream[last:].copy()], len(stream) - last

    for name in [*corpora][max(0, len(records.counts) - 1) :]:
        counts = records.begin(name)
        if counts.read:
            print(f"{name}: going on after document {counts.read:,}", file=sys.stderr, flush=True)
        documents = documents_of(name, corpora[name], counts)
        for ids, (split, size, so_far) in tokenize_documents(documents, tokenizer, fim):
            waiting[split].append(ids)
            held = records.held[split]
            held[:] = held[0] + 1, held[1] + size, held[2] + len(ids)
            lengths[split] += len(ids)
            if wrote := lengths[split] >= full[split]:
                write(split, full[split])
            if wrote or records.due():
                records.pending = {split: np.concatenate(ids) for split, ids in waiting.items()}
                waiting |= {split: [ids] for split, ids in records.pending.items()}
                records.write(name, so_far)
        for split in SPLITS:
            write(split, T)
        records.pending = {split: ids for split, [ids] in waiting.items()}  # what fills no row
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
