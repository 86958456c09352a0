"""Sentence pairs for next-sentence prediction (BERT, section 3.1): rows `[CLS] A [SEP] B [SEP]` of T tokens.

The shards hold rows [n, T + 3], one pair per row: T token ids, then where A ends, where B ends, and the label
(PairRows reads them).

A and B are consecutive whole sentences that fill the row, as in BERT's own preparation. In half of the rows B
follows A in its document (label 0, as in transformers' BertForPreTraining); in the other half B comes from
another document (label 1). A model must not guess the label from lengths or positions, only from the meaning:
* documents are cut into pairs (A, B) before labels are drawn; what does not fit goes on to the next pair;
* two pairs of different documents whose Bs end alike form a couple; the longer B is cut to the shorter one;
* of every two couples a coin chooses one that swaps its Bs, so both labels have Bs of the same lengths.
"""

import itertools
import random
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from data.documents.filters import Accounting
from data.tokens.encode import ChunkKey, TokenMaker

BLOCK_CHARS = 1 << 23  # characters of text whose pairs are matched with each other at a time

# A sentence ends at . ! or ? and closing quotes or brackets, if a space and what can begin a sentence follow;
# not after an initial ("H. Smith") or an abbreviation. WikiText has spaces before closing quotes.
ABBREVIATIONS = "Mr Mrs Ms Dr St Sr Jr Lt Col Gen Capt Sgt Prof Rev vs No Vol Fig ca cf e.g i.e a.k.a U.S"
NO_ABBREVIATION = "".join(rf"(?<!\b{re.escape(word)}\.)" for word in ABBREVIATIONS.split())
CLOSING, OPENING = r"(?:\s?[\"'”’)\]]+(?=\s))?", r"(?=[\"'“‘(\[]*\s?[A-ZÀ-ÖØ-ÞΑ-ΩЀ-Я0-9<])"
WITHOUT_SPACES = r"|(?<=[。！？])(?![。！？”’」』])\s*"  # Chinese and Japanese
SENTENCE_END = re.compile(
    r"(?<=[.!?])(?<!\b[A-Z]\.)" + NO_ABBREVIATION + CLOSING + r"\s+" + OPENING + WITHOUT_SPACES
)
# A line is a paragraph, unless the next line continues in lower case (hard-wrapped text).
PARAGRAPH_END = re.compile(r"\n\s*\n|\n(?![ \t]*[a-z])")


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, in order. A heading or list item on its own line is one sentence."""
    sentences = []
    for paragraph in PARAGRAPH_END.split(text):
        start = 0
        for end in SENTENCE_END.finditer(paragraph):
            sentences.append(paragraph[start : end.end()])
            start = end.end()
        sentences.append(paragraph[start:])
    return [joined for joined in (" ".join(sentence.split()) for sentence in sentences) if joined]


class SentencePair(NamedTuple):
    """Token ids of A and of the B that follows it in its document."""

    a: np.ndarray
    b: np.ndarray
    ending: int  # B ends 0: inside a sentence, 1: with a sentence, 2: with the document
    document: int
    number: int  # of the pair in its document


class PairBuilder:
    """Turns documents (lists of sentences, each an array of token ids) into (A, B, label), couple after
    couple. Pairs without a partner wait for the documents of the next call.

    room: the most tokens of A and B together."""

    def __init__(self, room: int, seed: int | str):
        self.room, self.random = room, random.Random(seed)
        self.tokens = 0  # of all sentences; the caller counts them
        self.documents = self.dropped = 0  # dropped: tokens that were cut off, or are in single sentences
        # (0, 1) or (1, 0) for every two couples, so that both labels get Bs of the same lengths.
        self.labels = (label for _ in itertools.count() for label in self.random.sample((0, 1), 2))
        self.waiting: list[SentencePair] = []

    def build(self, documents: list[list[np.ndarray]]) -> Iterator[tuple]:
        pairs = self.waiting + [pair for document in documents for pair in self.cut(document)]
        self.random.shuffle(pairs)
        pairs.sort(key=lambda pair: (pair.ending, len(pair.b)))
        return self.couple(pairs, lambda pair, other: pair.document != other.document)

    def build_rest(self) -> Iterator[tuple]:
        """Couples of the last pairs, which may be of one document if they are not neighbours."""
        yield from self.couple(self.waiting, lambda pair, other: abs(pair.number - other.number) > 1)
        self.dropped += sum(len(pair.a) + len(pair.b) for pair in self.waiting)

    def couple(self, pairs: list[SentencePair], may_couple: Callable) -> Iterator[tuple]:
        """Takes the pairs two by two; a coin decides whether they swap their Bs. The others wait."""
        self.waiting = []
        for pair in pairs:
            if not self.waiting or not may_couple(self.waiting[-1], pair):
                self.waiting.append(pair)
                continue
            other, label = self.waiting.pop(), next(self.labels)
            end = min(len(pair.b), len(other.b))
            self.dropped += len(pair.b) + len(other.b) - 2 * end
            yield other.a, (pair if label else other).b[:end], label
            yield pair.a, (other if label else pair).b[:end], label

    def cut(self, document: list[np.ndarray]) -> Iterator[SentencePair]:
        """Cuts a document into pairs. They do not depend on the labels."""
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
            # A takes at most half of the row, if it can: what does not fit is the end of B, and goes on.
            fits = np.cumsum([len(sentence) for sentence in sentences[start : end - 1]]) <= self.room // 2
            middle = start + self.random.randint(1, max(1, int(fits.sum())))
            a, b = np.concatenate(sentences[start:middle]), np.concatenate(sentences[middle:end])
            # The longer of A and B is cut: A at its beginning, B at its end, never where they meet.
            keep = min(len(a), max(self.room - self.room // 2, self.room - len(b)))
            rest = b[self.room - keep :]
            self.dropped += len(a) - keep
            if end < len(sentences):
                sentences[end] = np.concatenate([rest, sentences[end]])
            else:
                self.dropped += len(rest)
            ending = 0 if len(rest) else 1 + (end == len(sentences))
            a, b = a[len(a) - keep :], b[: self.room - keep]
            yield SentencePair(a, b, ending, self.documents, next(numbers))
            start = end


class PairMaker(TokenMaker):
    """Turns documents into rows of sentence pairs."""

    kind = "pairs"
    no_row = ("and pairs need two documents of two sentences or more. Name a source with longer texts, whose "
              "sentences end in . ! or ?; raise validation_fraction; or switch next_sentence off.")

    def __init__(self, tokenizer, block_size: int, seed: int):
        super().__init__(tokenizer)
        self.special = tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id
        self.width, self.seed = block_size + 3, seed
        self.settings |= {"block_size": block_size, "special": self.special, "seed": seed}

    def __call__(self, documents: Iterable[tuple[str, str]], key: ChunkKey) -> Iterator[tuple]:
        """Takes (text, split) of a chunk's documents and yields (split, rows, flat [n x (T + 3)])."""
        self.builders: dict[str, PairBuilder] = {}
        texts, size = {}, 0
        for text, split in itertools.chain(documents, [("", None)]):
            texts.setdefault(split, []).append(text)
            size += len(text)
            if size >= BLOCK_CHARS or split is None:
                for into in sorted(texts.keys() - {None}):
                    seed = f"{self.seed} {into} {key}"
                    builder = self.builders.setdefault(into, PairBuilder(self.width - 6, seed))
                    yield into, self.make_rows(builder.build(self.encode_sentences(builder, texts[into])))
                texts, size = {}, 0
        for split, builder in self.builders.items():
            yield split, self.make_rows(builder.build_rest())

    def encode_sentences(self, builder: PairBuilder, texts: list[str]) -> list[list[np.ndarray]]:
        """Returns the token ids of each sentence of each text."""
        documents = [[] for _ in texts]
        numbered = ((sentence, i) for i, text in enumerate(texts) for sentence in split_sentences(text))
        for ids, i in self.encoder(numbered):
            if len(ids) > 1:
                documents[i].append(ids[:-1])  # without EOS
                builder.tokens += len(ids) - 1
        return documents

    def make_rows(self, pairs: Iterable[tuple]) -> np.ndarray:
        """Returns the rows of pairs (A, B, label), flat [n x (T + 3)]."""
        cls, sep, pad = self.special
        rows = [np.empty(0, self.dtype)]
        for a, b, label in pairs:
            ids = [cls, *a, sep, *b, sep]
            rows.append(np.full(self.width, pad, self.dtype))
            rows[-1][: len(ids)], rows[-1][-3:] = ids, (len(a) + 2, len(ids), label)
        return np.concatenate(rows)

    def count_tokens(self, tokens: dict[str, np.ndarray], counts: dict[str, Accounting]) -> None:
        for split, builder in self.builders.items():
            counts[split].tokens, counts[split].tokens_dropped = builder.tokens, builder.dropped
