"""A source as an endless stream of rows, in groups that are shuffled together and can be resumed at each."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import NamedTuple

import numpy as np

from data.encode import Encoder, tokenize_documents
from data.filters import Accounting, clean_documents, in_validation
from data.shards import read_file
from data.sources.corpus import Corpus
from utils.io.secrets import without_secrets
from utils.io.urls import Folder


class StreamPosition(NamedTuple):
    """Where a group begins."""

    group: int = 0  # its number
    first: int = 0  # rows of the stream before it
    epoch: int = 0
    row: int = 0  # rows of this epoch before it
    document: int = 0  # or shard, where its first row begins
    offset: int = 0  # tokens of the document before that


@dataclass
class Groups:
    """A source as rows of block_size tokens, in order, `size` rows at a time.

    content: changes with the rows. documents_from(first): the token ids of each document (or shard) from
    number `first` on, and its number; it pickles. n_rows: of an epoch; None: unknown before its end."""

    name: str
    content: list
    documents_from: Callable[[int], Iterator[tuple[np.ndarray, int]]]
    block_size: int
    size: int
    n_rows: int | None = None

    def rows_from(self, document: int, offset: int) -> Iterator[tuple[np.ndarray, int, int]]:
        """From token `offset` of `document` on: rows [size, T], the last time fewer, and the document and
        offset where the next row begins."""
        T, full, waiting, size = self.block_size, self.size * self.block_size, [], 0
        for ids, number in self.documents_from(document):
            waiting.append(ids[offset:])
            size, offset = size + len(waiting[-1]), 0
            if size >= full:
                rest = np.concatenate(waiting)
                while len(rest) >= full:
                    rows, rest = rest[:full], rest[full:]
                    yield rows.reshape(-1, T), number, len(ids) - len(rest)
                waiting, size = [rest], len(rest)
        if size >= T:
            yield np.concatenate(waiting)[: size // T * T].reshape(-1, T), 0, 0

    def groups_from(self, start: StreamPosition) -> Iterator[tuple[StreamPosition, np.ndarray]]:
        """(where it begins, its rows) of each group from this one on, endlessly. ValueError: an epoch has no
        row."""
        for epoch in itertools.count(start.epoch):
            for rows, document, offset in self.rows_from(start.document, start.offset):
                yield start, rows
                first, row = start.first + len(rows), start.row + len(rows)
                start = StreamPosition(start.group + 1, first, epoch, row, document, offset)
            if start.row == 0:
                raise ValueError(f"dataset_name: {self.name} gives no row of {self.block_size} tokens to "
                                 "train on. Take more text, a smaller block_size or other keywords.")
            start = StreamPosition(start.group, start.first, epoch + 1)


def text_groups(corpus: Corpus, encoder: Encoder, block_size: int, size: int, held_out: tuple = (0, 0.0),
                fim=None) -> Groups:
    """The rows of prepare_rows for training. A resumed stream reads the epoch again up to where it was,
    without tokenizing. held_out: seed, share of the documents that are for validation."""
    content = [corpus.fingerprint, corpus.keywords, encoder, held_out, fim]
    tokens = partial(_text_tokens, corpus, encoder, held_out, fim)
    return Groups(corpus.name, content, tokens, block_size, size)


def _text_tokens(corpus: Corpus, encoder: Encoder, held_out: tuple, fim, first: int) -> Iterator:
    def documents() -> Iterator[tuple]:
        counts = Accounting()
        for document in clean_documents(corpus, counts):
            text, number = document[corpus.text_column], counts.read - 1
            if number >= first and not in_validation(text, *held_out):
                yield fim(text) if fim else text, number

    return tokenize_documents(documents(), encoder, fim)


def shard_groups(url: str, entries: list[dict], block_size: int, size: int) -> Groups:
    """Token shards at a URL; entries: of the manifest."""
    content = ["shards", *(entry["sha256"] for entry in entries)]
    n_rows = sum(entry["tokens"] for entry in entries) // block_size
    tokens = partial(_shard_tokens, url, entries)
    return Groups(without_secrets(url), content, tokens, block_size, size, n_rows)


def _shard_tokens(url: str, entries: list[dict], first: int) -> Iterator:
    for number, entry in enumerate(entries[first:], first):
        yield np.load(BytesIO(read_file(Folder(url), entry))), number
