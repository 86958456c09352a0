"""Sentence pairs for next-sentence prediction (BERT, section 3.1): rows `[CLS] A [SEP] B [SEP]` of T tokens.

    pairs = prepare_pairs(corpus, tokenizer, block_size=128, seed=0, cache_dir="cache")
    pairs.train.__getitems__([(0, 0, 5), (1, 0, 2)])     # input_ids, token_type_ids, ... int64 [2, 128]

A and B are runs of whole sentences that fill the row, as in BERT's own preparation. In half of the rows B is
what follows A in its document (label 0, as in transformers' BertForPreTraining), in the other half text of
another document (label 1). Nothing but the meaning can tell the two apart, whatever the text:
* documents are cut into chunks A B before anything has a label, what does not fit goes on to the next chunk;
* chunks of two documents whose Bs end alike become a couple, and the longer B is cut to the shorter one;
* one of two couples, by a coin, swaps its Bs. So rows of both labels are the same As before Bs of the same
  lengths, and no text is left out or used twice for the sake of a label.
"""

import itertools
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.order import drawn_order
from data.packing import (
    SPLITS,
    PackedRows,
    PreparedRows,
    Split,
    documents_of,
    preparation_settings,
    prepare_splits,
    tokenize_documents,
    tokenizer_fingerprint,
)

FORMAT = 3  # part of every cache key: raise it when rows of old caches would differ
PACKING = 1  # part of the fingerprint of packed rows: raise it when shared_rows gives others
BLOCK = 1 << 23  # characters of text in hand at a time, whose chunks become couples

# A sentence ends at . ! or ? and what closes it, before a space and what can open another one. Not after an
# initial ("H. Smith") nor these abbreviations. A space before the closing quote is WikiText's spelling.
ABBREVIATIONS = (
    "Mr", "Mrs", "Ms", "Dr", "St", "Sr", "Jr", "Lt", "Col", "Gen", "Capt", "Sgt", "Prof", "Rev",
    "vs", "No", "Vol", "Fig", "ca", "cf", "e.g", "i.e", "a.k.a", "U.S",
)  # fmt: skip
SENTENCE_END = re.compile(
    r"(?<=[.!?])(?<!\b[A-Z]\.)" + "".join(rf"(?<!\b{re.escape(word)}\.)" for word in ABBREVIATIONS)
    + r"(?:\s?[\"'”’)\]]+(?=\s))?\s+(?=[\"'“‘(\[]*\s?[A-Z0-9<])"
)  # fmt: skip
# A line is a paragraph, unless the next line goes on in lower case (hard-wrapped text).
PARAGRAPH_END = re.compile(r"\n\s*\n|\n(?![ \t]*[a-z])")


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, in order. Headings and list items on lines of their own count as one each."""
    sentences = []
    for paragraph in PARAGRAPH_END.split(text):
        start = 0
        for end in SENTENCE_END.finditer(paragraph):
            sentences.append(paragraph[start : end.end()])
            start = end.end()
        sentences.append(paragraph[start:])
    return [joined for joined in (" ".join(sentence.split()) for sentence in sentences) if joined]


class Chunk(NamedTuple):
    """A and the B that follows it, arrays of token ids."""

    a: np.ndarray
    b: np.ndarray
    ending: int  # of B: 0 cut off, 1 with a sentence, 2 with the document
    document: int


class PairBuilder:
    """Documents (lists of sentences, each an array of token ids) to (A, B, label), couple after couple.
    Couples are made of the documents of one call and the chunks of one document that wait for another one, so
    what the caller gives at a time bounds the memory."""

    def __init__(self, room: int, seed: int):
        self.room = room  # tokens of A and B together
        self.random = random.Random(seed)
        # A coin for the first of two couples, the other label for the second: equal halves, of alike Bs.
        self.labels = (label for _ in itertools.count() for label in self.random.sample((0, 1), 2))
        self.documents = self.dropped = 0  # dropped: tokens, of single sentences or cut off
        self.waiting: list[Chunk] = []

    def pairs(self, documents: list[list[np.ndarray]]) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
        chunks = self.waiting + [chunk for document in documents for chunk in self.chunks(document)]
        self.random.shuffle(chunks)
        chunks.sort(key=lambda chunk: (chunk.ending, len(chunk.b)))
        self.waiting = []
        for chunk in chunks:
            if not self.waiting or self.waiting[-1].document == chunk.document:
                self.waiting.append(chunk)
                continue
            other, label = self.waiting.pop(), next(self.labels)
            end = min(len(chunk.b), len(other.b))
            self.dropped += len(chunk.b) + len(other.b) - 2 * end
            yield other.a, (chunk if label else other).b[:end], label
            yield chunk.a, (other if label else chunk).b[:end], label

    @property
    def left_over(self) -> int:
        """Tokens of the chunks that wait."""
        return sum(len(chunk.a) + len(chunk.b) for chunk in self.waiting)

    def chunks(self, document: list[np.ndarray]) -> Iterator[Chunk]:
        """The chunks of a document, which no label has a part in."""
        sentences, start = list(document), 0
        self.documents += 1
        while start < len(sentences):
            end, length = start, 0
            while end < len(sentences) and (length < self.room or end - start < 2):
                length += len(sentences[end])
                end += 1
            if end - start < 2:
                self.dropped += length
                return
            # A takes at most half of the row where it can, so that what does not fit is B's, and goes on.
            fits = np.cumsum([len(sentence) for sentence in sentences[start : end - 1]]) <= self.room // 2
            middle = start + self.random.randint(1, max(1, int(fits.sum())))
            a, b = np.concatenate(sentences[start:middle]), np.concatenate(sentences[middle:end])
            # Cut from the longer side: A at its beginning and B at its end, never where they meet.
            keep = min(len(a), max(self.room - self.room // 2, self.room - len(b)))
            rest = b[self.room - keep :]
            self.dropped += len(a) - keep
            if end < len(sentences):
                sentences[end] = np.concatenate([rest, sentences[end]])
            else:
                self.dropped += len(rest)
            ending = 0 if len(rest) else 1 + (end == len(sentences))
            yield Chunk(a[len(a) - keep :], b[: self.room - keep], ending, self.documents)
            start = end


class PairRows(PackedRows):
    """Pairs of a .npy file [n, T + 3]: token ids, then spans: where A ends, where the row ends, the label.

    pack: a row holds as many pairs as fit, M at most, instead of one and padding; M as in the fullest row."""

    # Attention to all: for attention to none kernels may give NaN.
    blanks = {"input_ids": 0, "token_type_ids": 0, "attention_mask": 1, "next_sentence_label": -100,
              "pair": -1}

    def __init__(self, path, pack: bool = False):
        super().__init__(path)
        self.pack = pack
        self.rows, self.spans = self.rows[:, :-3], self.rows[:, -3:]

    @cached_property
    def members(self) -> np.ndarray:
        """The pairs of each packed row, -1 for none [rows, M]: made when asked for, as many files are only
        opened to see whether they are those of a run."""
        return shared_rows(self.spans[:, 1], self.block_size)

    def __len__(self) -> int:
        return len(self.members if self.pack else self.rows)

    @property
    def fingerprint(self) -> str:
        return super().fingerprint + f"-packed-{PACKING}" * self.pack

    @property
    def padding(self) -> float:
        """Share of the tokens."""
        return 1 - self.spans[:, 1].sum() / len(self) / self.block_size

    @staticmethod
    def align(sources: Iterable["PairRows"]) -> None:
        """One M for all of them."""
        most = max(rows.members.shape[1] for rows in sources)
        for rows in sources:
            missing = most - rows.members.shape[1]
            rows.members = np.pad(rows.members, ((0, 0), (0, missing)), constant_values=-1)

    def take(self, row: np.ndarray) -> dict[str, np.ndarray]:
        """As PackedRows, with token_type_ids, attention_mask [B, T]: 1 in the first pair of a row, 2 in the
        second, ..., 0 in padding; next_sentence_label [B]. Packed, position_ids [B, T], from 0 on in each
        pair, too, and of each pair [B, M] its number, pair (-1: none), where it begins, pair_start, and its
        next_sentence_label (-100: none)."""
        pair = self.members[row] if self.pack else row[:, None]
        each, place = np.arange(len(row))[:, None], np.arange(self.block_size)
        end_of_a, length, label = np.moveaxis(self.spans[pair].astype(np.int64), 2, 0)  # [B, M]
        label, length = np.where(pair < 0, -100, label), np.where(pair < 0, 0, length)
        ends = length.cumsum(1)
        nth = (place >= ends[:, :, None]).sum(1)  # [B, T], M at the padding
        real, nth = nth < pair.shape[1], np.minimum(nth, pair.shape[1] - 1)
        if not self.pack:
            return super().take(row) | {"token_type_ids": real & (place >= end_of_a), "attention_mask": real,
                                        "next_sentence_label": label[:, 0]}  # fmt: skip
        position = np.where(real, place - (ends - length)[each, nth], 0)
        return {
            "input_ids": np.where(real, self.rows[pair[each, nth], position], 0), "position_ids": position,
            "token_type_ids": real & (position >= end_of_a[each, nth]),
            "attention_mask": np.where(real, nth + 1, 0), "pair": pair,
            "pair_start": np.where(pair < 0, 0, ends - length), "next_sentence_label": label,
        }  # fmt: skip


def shared_rows(lengths: np.ndarray, room: int) -> np.ndarray:
    """Which of n pairs share a row of `room` tokens: int32 [rows, M] of their numbers, -1 for none.

    Row after row takes the longest pair that leaves no room or what another one fills, or else the longest
    that fits."""
    waiting, rows = [[] for _ in range(room + 1)], []
    for pair in drawn_order(len(lengths), 0, 0).tolist():  # not numpy's: a run goes on with these rows
        waiting[lengths[pair]].append(pair)
    there = sum(1 << length for length, pairs in enumerate(waiting) if pairs)  # a bit for each length
    filled_by = sum(1 << room - length for length, pairs in enumerate(waiting) if pairs or not length)
    while there:
        rows.append([])
        left = room
        while fits := there & ((2 << left) - 1):
            exact = fits & (filled_by >> room - left)
            length = (exact or fits).bit_length() - 1
            rows[-1].append(waiting[length].pop())
            left -= length
            if not waiting[length]:
                there ^= 1 << length
                filled_by ^= 1 << room - length
    members = np.full((len(rows), max(map(len, rows), default=1)), -1, np.int32)
    for number, row in enumerate(rows):
        members[number, : len(row)] = row
    return members


def prepare_pairs(corpus, tokenizer, *, block_size: int, validation_fraction: float | None = 0.05,
                  eval_corpus=None, also_evaluated=(), seed: int = 0, cache_dir="cache",
                  pack: bool = False) -> PreparedRows:
    """prepare_rows for sentence pairs: the same arguments, cache and accounts; the splits are PairRows,
    which `pack` makes of the same files. Raises ValueError where the text gives no pairs."""
    fraction = None if eval_corpus else validation_fraction
    names = SPLITS if eval_corpus or fraction is not None else SPLITS[:1]
    settings = preparation_settings(FORMAT, corpus, eval_corpus, also_evaluated) | {
        "validation": fraction,
        "tokenizer": [tokenizer_fingerprint(tokenizer), tokenizer.cls_token_id, tokenizer.sep_token_id],
        "block_size": block_size,
        "seed": seed,
    }

    def write(folder: Path) -> dict[str, dict]:
        splits = {name: _PairFile(folder / f"{name}.npy", block_size, tokenizer, seed) for name in names}
        for documents in documents_of(splits, corpus, eval_corpus, also_evaluated, seed, fraction or 0):
            for text, into in documents:
                into.add(text)
        for (name, split), source in zip(splits.items(), (corpus, eval_corpus or corpus), strict=False):
            split.close()
            print(split.counts.table(f"{name} split, pairs in rows of {block_size} tokens"), flush=True)
            split.check(f"the {name} split of {source.name}")
        return {name: asdict(split.counts) for name, split in splits.items()}

    return prepare_splits(cache_dir, "pairs", settings, write, partial(PairRows, pack=pack))


class _PairFile(Split):
    """The pairs of one split on their way to the disk, and the account of them."""

    def __init__(self, path, block_size, tokenizer, seed):
        super().__init__(path, block_size + 3, tokenizer)
        self.tokenizer, self.builder = tokenizer, PairBuilder(block_size - 3, seed)
        self.documents, self.characters = [], 0

    def add(self, text: str):
        self.documents.append(split_sentences(text))
        self.characters += len(text)
        if self.characters >= BLOCK:
            self.flush()

    def flush(self):
        """Tokenize the documents in hand and write their pairs."""
        documents = [[] for _ in self.documents]
        sentences = ((sentence, i) for i, document in enumerate(self.documents) for sentence in document)
        for ids, i in tokenize_documents(sentences, self.tokenizer):
            if len(ids) > 1:
                documents[i].append(ids[:-1])  # without EOS
                self.counts.tokens += len(ids) - 1
        cls, sep, pad = (getattr(self.tokenizer, f"{name}_token_id") for name in ("cls", "sep", "pad"))
        for a, b, label in self.builder.pairs(documents):
            row = np.full(self.file.block_size, pad, self.file.dtype)
            ids = [cls, *a, sep, *b, sep]
            row[: len(ids)], row[-3:] = ids, (len(a) + 2, len(ids), label)
            self.file.write(row[None])
        self.documents, self.characters = [], 0

    def close(self):
        self.flush()
        super().close()
        self.counts.tokens_dropped = self.builder.dropped + self.builder.left_over

    def check(self, where: str):
        """ValueError where there are no pairs, for want of sentences or of a second document."""
        if not self.counts.rows:
            found = f"{self.counts.kept:,} documents, none of two sentences, so no pairs"
            if self.builder.waiting:
                found = "one document of two sentences, so no text of another one to pair with"
            raise ValueError(f"next_sentence: {where} has {found}. Remedies: name a source of more, whole "
                             "documents with sentences that end in . ! or ?, raise validation_fraction, or "
                             "switch next_sentence off.")
