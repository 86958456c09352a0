"""Sentence pairs for next-sentence prediction (BERT, section 3.1): rows `[CLS] A [SEP] B [SEP]` of T tokens.

    pairs = prepare_rows(corpus, PairMaker(tokenizer, block_size=128, seed=0), block_size=128)
    pairs.train.__getitems__([(0, 0, 5), (1, 0, 2)])     # input_ids, token_type_ids, ... int64 [2, 128]

A and B are runs of whole sentences that fill the row, as in BERT's own preparation. In half of the rows B is
what follows A in its document (label 0, as in transformers' BertForPreTraining), in the other half text of
another document (label 1). Nothing but the meaning can tell the two apart:
* documents are cut into chunks A B before anything has a label, what does not fit goes on to the next chunk;
* chunks of two documents whose Bs end alike become a couple, and the longer B is cut to the shorter one;
* one of two couples, by a coin, swaps its Bs: both labels have the same As, and Bs of the same lengths.
"""

import itertools
import random
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from data.encode import tokenize_documents
from data.factory import Key, TokenMaker
from data.filters import Accounting
from data.pair_rows import PairRows

BLOCK = 1 << 23  # characters of text in hand at a time, whose chunks become couples

# A sentence ends at . ! or ? and what closes it, before a space and what can open another one. Not after an
# initial ("H. Smith") nor these abbreviations. A space before the closing quote is WikiText's spelling.
ABBREVIATIONS = "Mr Mrs Ms Dr St Sr Jr Lt Col Gen Capt Sgt Prof Rev vs No Vol Fig ca cf e.g i.e a.k.a U.S"
SENTENCE_END = re.compile(
    r"(?<=[.!?])(?<!\b[A-Z]\.)" + "".join(rf"(?<!\b{re.escape(word)}\.)" for word in ABBREVIATIONS.split())
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
    number: int  # in its document


class PairBuilder:
    """Documents (lists of sentences, each an array of token ids) to (A, B, label), couple after couple, of
    the documents of one call and the chunks of one document that still wait for another one."""

    def __init__(self, room: int, seed: int | str):
        self.room, self.tokens = room, 0  # tokens of A and B together; of all sentences, as the caller counts
        self.random = random.Random(seed)
        # A coin for the first of two couples, the other label for the second: equal halves, of alike Bs.
        self.labels = (label for _ in itertools.count() for label in self.random.sample((0, 1), 2))
        self.documents = self.dropped = 0  # dropped: tokens, of single sentences or cut off
        self.waiting: list[Chunk] = []

    def pairs(self, documents: list[list[np.ndarray]]) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
        chunks = self.waiting + [chunk for document in documents for chunk in self.chunks(document)]
        self.random.shuffle(chunks)
        chunks.sort(key=lambda chunk: (chunk.ending, len(chunk.b)))
        return self.couples(chunks, lambda one, other: one.document != other.document)

    def rest(self) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
        """At the end: chunks of one document that still wait, paired with each other where they do not touch.
        What is left then is dropped."""
        yield from self.couples(self.waiting, lambda one, other: abs(one.number - other.number) > 1)
        self.dropped += sum(len(chunk.a) + len(chunk.b) for chunk in self.waiting)

    def couples(self, chunks: list[Chunk], may_be: Callable) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
        """Two by two their As, with their own Bs or each other's. Who finds no partner waits."""
        self.waiting = []
        for chunk in chunks:
            if not self.waiting or not may_be(self.waiting[-1], chunk):
                self.waiting.append(chunk)
                continue
            other, label = self.waiting.pop(), next(self.labels)
            end = min(len(chunk.b), len(other.b))
            self.dropped += len(chunk.b) + len(other.b) - 2 * end
            yield other.a, (chunk if label else other).b[:end], label
            yield chunk.a, (other if label else chunk).b[:end], label

    def chunks(self, document: list[np.ndarray]) -> Iterator[Chunk]:
        """The chunks of a document, which no label has a part in."""
        sentences, start, numbers = list(document), 0, itertools.count()
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
            yield Chunk(a[len(a) - keep :], b[: self.room - keep], ending, self.documents, next(numbers))
            start = end


class PairMaker(TokenMaker):
    """The documents of a chunk to rows of PairRows, by random numbers of its own. pack: theirs."""

    cache = "pairs"
    no_row = ("and pairs need two documents of two sentences or more. Remedies: name a source of more, whole "
              "documents with sentences that end in . ! or ?, raise validation_fraction, or switch "
              "next_sentence off.")

    def __init__(self, tokenizer, block_size: int, seed: int, pack: bool = False):
        super().__init__(tokenizer)
        self.special = tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id
        self.width, self.seed, self.kind = block_size + 3, seed, partial(PairRows, pack=pack)
        self.settings |= {"block_size": block_size, "special": self.special, "seed": seed}

    def __call__(self, documents: Iterable[tuple[str, str]], key: Key) -> Iterator[tuple[str, np.ndarray]]:
        """(text, split) of the documents of a chunk -> (split, rows [n x (T + 3)]), again and again."""
        self.builders: dict[str, PairBuilder] = {}
        texts, size = {}, 0
        for text, split in itertools.chain(documents, [("", None)]):
            texts.setdefault(split, []).append(text)
            size += len(text)
            if size >= BLOCK or split is None:
                for into in sorted(texts.keys() - {None}):
                    seed = f"{self.seed} {into} {key}"
                    builder = self.builders.setdefault(into, PairBuilder(self.width - 6, seed))
                    yield into, self.rows(builder.pairs(self.sentences(builder, texts[into])))
                texts, size = {}, 0
        for split, builder in self.builders.items():
            yield split, self.rows(builder.rest())

    def sentences(self, builder: PairBuilder, texts: list[str]) -> list[list[np.ndarray]]:
        """The token ids of each sentence of each text."""
        documents = [[] for _ in texts]
        numbered = ((sentence, i) for i, text in enumerate(texts) for sentence in split_sentences(text))
        for ids, i in tokenize_documents(numbered, self.encoder):
            if len(ids) > 1:
                documents[i].append(ids[:-1])  # without EOS
                builder.tokens += len(ids) - 1
        return documents

    def rows(self, pairs: Iterable[tuple]) -> np.ndarray:
        cls, sep, pad = self.special
        rows = [np.empty(0, self.dtype)]
        for a, b, label in pairs:
            ids = [cls, *a, sep, *b, sep]
            rows.append(np.full(self.width, pad, self.dtype))
            rows[-1][: len(ids)], rows[-1][-3:] = ids, (len(a) + 2, len(ids), label)
        return np.concatenate(rows)

    def account(self, made: dict[str, np.ndarray], counts: dict[str, Accounting]) -> None:
        for split, builder in self.builders.items():
            counts[split].tokens, counts[split].tokens_dropped = builder.tokens, builder.dropped
