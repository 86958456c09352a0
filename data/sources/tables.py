"""Parquet: documents from such files.

Imported where a table is at hand only: pyarrow takes 30 MB that a run from prepared rows need not hold.
"""

from collections.abc import Iterable, Iterator

import pyarrow.parquet as pq


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
