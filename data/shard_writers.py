"""The documents of a source become shards, rows of tokens or text with all columns, from the last record on.

corpora: {split: Corpus}, those that are evaluated on before the training documents.
settings: those of the preparation, see data/prepare.py; shard_mb is the size of a shard before compression.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa

from data.filters import Accounting, clean_documents, in_validation, show_progress
from data.fim import fill_in_middle
from data.packing import PackedRows, token_dtype, tokenize_documents
from data.records import SPLITS, Records
from data.sources.corpus import Corpus
from data.sources.tables import rows_to_parquet, to_parquet

TEXT_ROWS_PER_GROUP = 1000


def clean_splits(corpora, records: Records) -> Iterator[tuple[str, Corpus, Accounting, Iterator[dict]]]:
    """(split, its corpus, its account, its clean documents) from the one after the last record's on. Their
    records end with a split, so that it is known whose hashes they hold."""
    for split in [*corpora][max(0, len(records.counts) - 1) :]:
        corpus, counts = corpora[split], records.begin(split)
        if counts.read:
            print(f"{split}: going on after document {counts.read:,}", file=sys.stderr, flush=True)
        documents = clean_documents(corpus, counts, records, records.evaluated)
        documents = show_progress(documents, counts, f"preparing {corpus.name}, {split}")
        yield split, corpus, counts, documents
        records.write(split, counts)


def write_token_shards(corpora: dict[str, Corpus], tokenizer, records: Records, settings: dict) -> None:
    dtype, T = token_dtype(tokenizer), settings["block_size"]
    validation = settings["seed"], 0 if "validation" in corpora else settings["validation_fraction"]
    fim = fill_in_middle(settings.get("fim_rate", 0), settings["seed"], tokenizer)
    rows = max(1, int(settings["shard_mb"] * 1e6) // (T * dtype.itemsize))
    # Tokens of a shard. Validation's is smaller, so that its waiting rows stay a small part of each record.
    full = dict.fromkeys(SPLITS, max(1, rows // 8) * T) | {"train": rows * T}
    waiting = {split: [records.pending.get(split, np.empty(0, dtype))] for split in SPLITS}
    lengths = {split: len(ids) for split, [ids] in waiting.items()}

    def noted(name, corpus, counts, found) -> Iterator[tuple[str, tuple]]:
        for document in found:
            text = document[corpus.text_column]
            split = SPLITS[in_validation(text, *validation)] if name == "train" else name
            note = split, len(text.encode()), replace(counts)
            yield fim(text) if fim and split == "train" else text, note

    def write(split: str, unit: int) -> None:
        """The multiple of `unit` tokens that waits, as shards."""
        stream = np.concatenate(waiting[split])
        last = len(stream) - len(stream) % unit
        for begin in range(0, last, full[split]):
            rows = stream[begin : min(begin + full[split], last)].reshape(-1, T)
            records.write_shard(split, rows_to_parquet(rows), rows=len(rows), tokens=rows.size)
        waiting[split], lengths[split] = [stream[last:].copy()], len(stream) - last

    for name, corpus, counts, found in clean_splits(corpora, records):
        noted_documents = noted(name, corpus, counts, found)
        for ids, (split, size, so_far) in tokenize_documents(noted_documents, tokenizer, fim):
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


def write_row_shards(splits: dict[str, PackedRows], tokenizer, records: Records, settings: dict) -> None:
    """Rows that are made already; there are no documents to account for."""
    dtype, T = token_dtype(tokenizer), settings["block_size"]
    full = max(1, int(settings["shard_mb"] * 1e6) // (T * dtype.itemsize))
    for split, rows in splits.items():
        records.counts[split], records.held[split] = Accounting(), [0, 0, len(rows) * T]
        for first in range(0, len(rows), full):
            part = rows.rows[np.arange(first, min(first + full, len(rows)))].astype(dtype)
            records.write_shard(split, rows_to_parquet(part), rows=len(part), tokens=part.size)


def write_text_shards(corpora: dict[str, Corpus], _, records: Records, settings: dict) -> None:
    """All text shards of the source: kept documents, all columns."""

    def write(split: str, documents: list[dict], columns: list[str]) -> None:
        table = documents_to_table(documents, columns, records.schema)
        records.write_shard(split, to_parquet(table, TEXT_ROWS_PER_GROUP), documents=len(documents))
        records.schema = table.schema
        documents.clear()

    for split, corpus, counts, found in clean_splits(corpora, records):
        documents, size = [], 0
        for document in found:
            documents.append(document)
            size += len(document[corpus.text_column].encode())
            records.held[split] = [counts.kept, counts.bytes, 0]
            if size >= settings["shard_mb"] * 1e6:
                write(split, documents, corpus.columns)
                # Here alone: what waits is read again anyway, and no format keeps mixed types as they were.
                records.write(split, counts)
                size = 0
        if documents:
            write(split, documents, corpus.columns)


def documents_to_table(documents: list[dict], columns: list[str], schema: pa.Schema | None) -> pa.Table:
    """The first shard (schema None) decides columns and types; values of mixed types become JSON texts. A
    later column is left out with a warning; ValueError for a later value of another type."""
    columns = list(dict.fromkeys([*columns, *(name for document in documents for name in document)]))
    if schema:
        if new := sorted({*columns} - {*schema.names}):
            print(f"warning: left out, the first shard has no such column: {', '.join(new)}", file=sys.stderr)
        columns = schema.names

    def as_text(value) -> str | None:
        text = value if value is None or isinstance(value, str) else json.dumps(value, default=str)
        return text and text.encode("utf-8", "replace").decode()

    arrays = []
    for column in columns:
        values = [document.get(column) for document in documents]
        wanted = schema.field(column).type if schema else None
        try:
            array = pa.array(values, wanted)
        except (pa.ArrowException, TypeError, OverflowError, UnicodeError) as error:
            if wanted not in (None, pa.string()):
                mixed = f"a value is not {wanted}, as the ones before it were ({error})"
                raise ValueError(f"column {column}: {mixed}. Make it of one type in the source.") from error
            array = pa.array(map(as_text, values), pa.string())
        arrays.append(array.cast(pa.string()) if pa.types.is_null(array.type) else array)
    return pa.table(arrays, names=columns)
