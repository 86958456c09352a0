"""The documents of a corpus become shards, rows of tokens or text with all columns, from the last record on.

settings: those of the preparation, see data/prepare.py; shard_mb is the size of a shard before compression.
"""

import json
import sys
import time
from collections import deque
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from data.filters import Accounting, clean_documents, in_validation, show_progress
from data.packing import token_dtype, tokenize_texts
from data.records import SPLITS, Records
from data.shards import write_shard
from data.sources.corpus import Corpus
from data.sources.tables import rows_to_parquet, to_parquet

TEXT_ROWS_PER_GROUP = 1000


def kept_documents(corpus: Corpus, records: Records, counts: Accounting) -> Iterator[dict]:
    """Clean documents from the one after the last record's on; `counts` goes on from the record's."""
    if counts.read:
        print(f"going on after document {counts.read:,}", file=sys.stderr, flush=True)
    documents = clean_documents(corpus, counts, records)
    return show_progress(documents, counts, f"preparing {corpus.name}")


def write_token_shards(corpus: Corpus, tokenizer, records: Records, settings: dict) -> Accounting:
    """All token shards of the source. Returns the counts of its documents."""
    dtype, T = token_dtype(tokenizer), settings["block_size"]
    validation = settings["seed"], settings["validation_fraction"]
    rows = max(1, int(settings["shard_mb"] * 1e6) // (T * dtype.itemsize))
    # Tokens of a shard. Validation's is smaller, so that its waiting rows stay a small part of each record.
    full = {"train": rows * T, "validation": max(1, rows // 8) * T}
    waiting = {split: [records.pending.get(split, np.empty(0, dtype))] for split in SPLITS}
    counts, documents = Accounting(**records.counts.as_dict()), deque()
    started = time.monotonic() - counts.seconds

    def texts() -> Iterator[str]:
        for document in kept_documents(corpus, records, counts):
            text = document[corpus.text_column]
            split = SPLITS[in_validation(text, *validation)]
            documents.append((split, len(text.encode()), vars(counts).copy()))
            yield text

    def write(split: str, tokens: np.ndarray) -> None:
        rows, shards = tokens.reshape(-1, T), records.shards[split]
        counted = {"rows": len(rows), "tokens": rows.size}
        shards.append(write_shard(records.folder, split, len(shards), rows_to_parquet(rows), **counted))

    unfinished: list[np.ndarray] = []  # tokens of a document that goes on in the next batch
    for tokens, ends in tokenize_texts(texts(), tokenizer):
        start = 0
        for end in ends.tolist():
            split, size, so_far = documents.popleft()
            ids = np.concatenate([*unfinished, tokens[start:end]]) if unfinished else tokens[start:end]
            unfinished, start = [], end
            waiting[split].append(ids)
            held = records.held[split]
            held[:] = held[0] + 1, held[1] + size, held[2] + len(ids)
        if start < len(tokens):
            unfinished.append(tokens[start:])
        wrote = False
        for split in SPLITS:
            if sum(map(len, waiting[split])) >= full[split]:
                stream = np.concatenate(waiting[split])
                last = len(stream) - len(stream) % full[split]
                for begin in range(0, last, full[split]):
                    write(split, stream[begin : begin + full[split]])
                waiting[split], wrote = [stream[last:].copy()], True
        if wrote or records.due():
            waiting = {split: [np.concatenate(waiting[split])] for split in SPLITS}
            at = Accounting(**so_far | {"seconds": round(time.monotonic() - started, 3)})
            records.write(at, {split: waiting[split][0] for split in SPLITS})
    for split in SPLITS:
        rest = np.concatenate(waiting[split])
        if len(rest) >= T:
            write(split, rest[: len(rest) - len(rest) % T])
    counts.seconds = round(time.monotonic() - started, 3)
    return counts


def write_text_shards(corpus: Corpus, records: Records, settings: dict) -> Accounting:
    """All text shards of the source: kept documents, all columns. Returns the counts of its documents."""
    counts = Accounting(**records.counts.as_dict())
    started = time.monotonic() - counts.seconds
    documents: list[dict] = []
    if "documents" in records.pending:
        documents = pa.ipc.open_stream(records.pending["documents"].tobytes()).read_all().to_pylist()
    size = sum(len(document[corpus.text_column].encode()) for document in documents)

    def write() -> None:
        table, shards = documents_to_table(documents, corpus.columns, records.schema), records.shards["train"]
        data = to_parquet(table, TEXT_ROWS_PER_GROUP)
        shards.append(write_shard(records.folder, "train", len(shards), data, documents=len(documents)))
        records.schema = table.schema
        documents.clear()

    def pending() -> dict[str, np.ndarray]:
        if not documents:
            return {}
        sink, table = pa.BufferOutputStream(), documents_to_table(documents, corpus.columns, None)
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        return {"documents": np.frombuffer(sink.getvalue(), np.uint8)}

    for document in kept_documents(corpus, records, counts):
        documents.append(document)
        size += len(document[corpus.text_column].encode())
        if full := size >= settings["shard_mb"] * 1e6:
            write()
            size = 0
        if full or records.due():
            counts.seconds = round(time.monotonic() - started, 3)
            records.write(Accounting(**counts.as_dict()), pending())
    if documents:
        write()
    records.held["train"] = [counts.kept, counts.bytes, 0]
    counts.seconds = round(time.monotonic() - started, 3)
    return counts


def documents_to_table(documents: list[dict], columns: list[str], schema: pa.Schema | None) -> pa.Table:
    """The first shard (schema None) decides columns and types; values of mixed types become JSON texts.

    A later new column is left out with a warning. Raises ValueError for a later value of another type.
    """
    columns = list(dict.fromkeys([*columns, *(name for document in documents for name in document)]))
    if schema:
        if new := sorted(set(columns) - set(schema.names)):
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
