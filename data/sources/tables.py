"""Parquet: documents from such files, token rows to and from them.

Imported where a table is at hand only: pyarrow takes 30 MB that a run from prepared rows need not hold.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROW_GROUP_TOKENS = 2**22


def parquet_documents(file) -> Iterator[dict]:
    """One dict of columns per row of a Parquet file, open for reading."""
    for batch in pq.ParquetFile(file).iter_batches(batch_size=256):
        yield from table_documents(batch)


def table_documents(table) -> Iterable[dict]:
    """The rows of a table or batch; a text that is not UTF-8 is None."""
    try:
        return table.to_pylist()
    except UnicodeDecodeError:  # one bad value spoils the whole table: read it value by value
        def read(value):
            try:
                return value.as_py()
            except UnicodeDecodeError:
                return None

        rows = zip(*(map(read, column) for column in table.columns), strict=True)
        return [dict(zip(table.column_names, row, strict=True)) for row in rows]


def rows_to_parquet(rows: np.ndarray) -> bytes:
    """One shard file from token rows, uint16 or uint32 [n, T]. The same bytes for the same rows, always.

    Byte-stream split and zstd bring token ids (4 bytes each in Parquet) below 2, faster than a dictionary."""
    n, block_size = rows.shape
    column = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), block_size)
    counts = {"rows": str(n), "tokens": str(rows.size)}
    table = pa.table({"input_ids": column}).replace_schema_metadata(counts)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=max(1, ROW_GROUP_TOKENS // block_size), compression="zstd",
                   use_dictionary=False, use_byte_stream_split=True, write_statistics=False)
    return sink.getvalue().to_pybytes()


def parquet_to_rows(data: bytes) -> np.ndarray:
    """Token rows, uint16 or uint32 [n, T], of one shard file."""
    file = pq.ParquetFile(pa.BufferReader(data))
    column = file.schema_arrow.field("input_ids").type
    rows = np.empty((file.metadata.num_rows, column.list_size), column.value_type.to_pandas_dtype())
    rest = rows
    for group in range(file.num_row_groups):  # group by group: all at once would hold every token twice
        ids = file.read_row_group(group, use_threads=False).column(0).combine_chunks().flatten().to_numpy()
        count = len(ids) // column.list_size
        rest[:count], rest = ids.reshape(count, column.list_size), rest[count:]
    return rows
