"""Sentence pairs for next-sentence prediction (BERT, section 3.1): rows `[CLS] A [SEP] B [SEP]` of T tokens.

    pairs = prepare_pairs(corpus, tokenizer, block_size=128, seed=0, cache_dir="cache")
    pairs.train.__getitems__([(0, 0, 5), (1, 0, 2)])     # input_ids, token_type_ids, ... int64 [2, 128]

A and B are runs of whole sentences that fill the row, as in BERT's own preparation. In half of the rows B is
what follows A in its document (label 0, as in transformers' BertForPreTraining), in the other half text of
another document (label 1). Nothing but the meaning may tell the two apart, so
* a row of either label begins as a chunk of two sentences or more: a last single one is counted, not used;
* text from elsewhere is as long as the text it stands for, which goes on to the next row;
* what does not fit is cut from the longer side, A at its beginning and B at its end, never where they meet.
"""

import itertools
import random
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from data.cache import RowFile, checksum
from data.filters import Accounting, show_progress
from data.packing import (
    SPLITS,
    PackedRows,
    PreparedRows,
    preparation_settings,
    prepare_splits,
    split_documents,
    token_dtype,
    tokenize_texts,
    tokenizer_fingerprint,
)
from data.sources.corpus import Corpus, Source, load_corpus

FORMAT = 1  # part of every cache key: raise it when rows of old caches would differ
BLOCK = 1 << 23  # characters of text in hand at a time, from which the B of label 1 are drawn
COLUMNS = ("input_ids", "token_type_ids", "attention_mask", "next_sentence_label")  # of prepared pairs

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


def truncate_pair(a: np.ndarray, b: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """At most `room` tokens in all, taken from the longer side first: A's first tokens, B's last ones."""
    if len(a) + len(b) <= room:
        return a, b
    if len(a) <= len(b):
        keep = min(len(a), room - room // 2)
        return a[len(a) - keep :], b[: room - keep]
    keep = min(len(b), room // 2)
    return a[len(a) - (room - keep) :], b[:keep]


class PairBuilder:
    """Documents (lists of sentences, each an array of token ids) to (A, B, label), in the documents' order.

    Text for label 1 comes from the documents in hand: those of this call and of the one before. So memory is
    bounded by what the caller gives at a time. Attributes count what became of the text."""

    def __init__(self, room: int, seed: int):
        self.room = room  # tokens of A and B together
        self.random = random.Random(seed)
        self.labels = [0, 0]  # pairs made, by label
        self.single_sentence = 0  # documents
        self.unpaired = self.truncated = 0  # tokens: of single sentences, cut off
        self.previous: list[list[np.ndarray]] = []

    def pairs(self, documents: list[list[np.ndarray]]) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
        pool = self.previous + documents
        for number, document in enumerate(documents, start=len(self.previous)):
            self.single_sentence += len(document) == 1
            yield from self._pairs_of(number, pool)
        self.previous = documents

    def _pairs_of(self, number, pool):
        sentences, start = list(pool[number]), 0
        while start < len(sentences):
            end, length = start, 0
            while end < len(sentences) and (length < self.room or end - start < 2):
                length += len(sentences[end])
                end += 1
            if end - start < 2:
                self.unpaired += length
                return
            # A takes at most half of the row where it can, so that what does not fit is B's, and goes on.
            fits = np.cumsum([len(sentence) for sentence in sentences[start : end - 1]]) <= self.room // 2
            middle = start + self.random.randint(1, max(1, int(fits.sum())))
            a, b = np.concatenate(sentences[start:middle]), np.concatenate(sentences[middle:end])
            # Whichever label is behind; a coin while both are even: equal halves, whatever the corpus.
            behind = int(self.labels[0] > self.labels[1])
            label = behind if self.labels[0] != self.labels[1] else self.random.randrange(2)
            if label == 1 and len(pool) > 1:
                start = middle
                cut_a, cut_b = truncate_pair(a, self._text_from_elsewhere(number, pool, len(b)), self.room)
            else:
                label, start = 0, end
                cut_a, cut_b = truncate_pair(a, b, self.room)
                rest = b[len(cut_b) :]  # of B's last sentence: goes on into the next row, with the next one
                if len(rest) and end < len(sentences):
                    sentences[end] = np.concatenate([rest, sentences[end]])
                else:
                    self.truncated += len(rest)
            self.labels[label] += 1
            self.truncated += len(a) - len(cut_a)
            yield cut_a, cut_b, label

    def _text_from_elsewhere(self, own: int, pool: list, wanted: int) -> np.ndarray:
        """Whole sentences from a random place in another document, as close to `wanted` tokens as can be."""
        best, best_length = [], 0
        for _ in range(10):  # a place near the end of its document may give too little: try others
            other = self.random.randrange(len(pool) - 1)
            document = pool[other + (other >= own)]
            first = last = self.random.randrange(len(document))
            length = 0
            while last < len(document) and abs(length + len(document[last]) - wanted) < abs(length - wanted):
                length += len(document[last])
                last += 1
            if abs(length - wanted) < abs(best_length - wanted):
                best, best_length = document[first:last], length
            if abs(best_length - wanted) * 4 <= wanted:
                break
        return np.concatenate(best or [document[first]])


class PairRows(PackedRows):
    """Pairs in two .npy files: token ids [n, T]; spans [n, 3]: the ends of A and of the row, the label."""

    def __init__(self, path):
        super().__init__(path)
        self.spans = np.load(spans_of(path), mmap_mode="r")

    @property
    def fingerprint(self) -> str:
        return f"{super().fingerprint} {checksum(spans_of(self.path))}"

    def __getitems__(self, keys: list[tuple[int, int, int]]) -> dict:
        """As PackedRows, with token_type_ids and attention_mask int64 [B, T], next_sentence_label int64 [B].

        Row -1 is padding: label -100, and attention to all: for attention to none kernels may give NaN."""
        batch = super().__getitems__(keys)
        spans = torch.from_numpy(self.spans[batch["row"].clamp(min=0).numpy()].astype(np.int64))  # [B, 3]
        spans[batch["row"] < 0] = torch.tensor([self.block_size, self.block_size, -100])
        end_of_a, end, label = spans.T
        place = torch.arange(self.block_size)
        real = place < end[:, None]  # [B, T]
        return batch | {"token_type_ids": (real & (place >= end_of_a[:, None])).long(),
                        "attention_mask": real.long(), "next_sentence_label": label.contiguous()}  # fmt: skip


def spans_of(path) -> str:
    return str(path).removesuffix(".npy") + ".spans.npy"


def load_pair_source(source: Source) -> Corpus:
    """load_corpus for text, or for pairs prepared elsewhere, which have no column of text."""
    try:
        return load_corpus(source)
    except ValueError:
        for column in COLUMNS if source.text_column is None else ():
            with suppress(ValueError):
                return load_corpus(replace(source, text_column=column))
        raise


def holds_pairs(corpus: Corpus) -> bool:
    """Whether a source has pairs that were prepared elsewhere, complete or not."""
    return any(column in corpus.columns for column in COLUMNS)


def prepare_pairs(corpus, tokenizer, *, block_size: int, validation_fraction: float | None = 0.05,
                  eval_corpus=None, seed: int = 0, cache_dir="cache", progress=True,
                  label_is_next: int = 0) -> PreparedRows:
    """prepare_rows for sentence pairs: the same arguments, cache and accounts; train and eval are PairRows.

    A source with columns of COLUMNS holds pairs prepared elsewhere: they are taken as they are, every row
    checked; without eval_corpus the last validation_fraction of them is held out. label_is_next: their label
    that means that B follows A; it becomes 0, as in transformers. Raises ValueError where the
    text gives no pairs or prepared ones are not right."""
    fraction = None if eval_corpus else validation_fraction
    names = SPLITS if eval_corpus or fraction is not None else SPLITS[:1]
    settings = preparation_settings(FORMAT, corpus, eval_corpus) | {
        "validation": fraction,
        "tokenizer": [tokenizer_fingerprint(tokenizer), tokenizer.cls_token_id, tokenizer.sep_token_id],
        "keywords": sorted(set(corpus.keywords)),
        "block_size": block_size,
        "seed": seed,
    }
    if label_is_next and holds_pairs(corpus):
        settings["label_is_next"] = label_is_next

    def write(folder: Path) -> dict[str, dict]:
        splits = {name: _PairFile(folder / f"{name}.npy", tokenizer, block_size, seed, label_is_next)
                  for name in names}
        _read(corpus, splits["train"], splits.get("validation"), fraction or 0, seed, progress)
        if eval_corpus is not None:
            _read(eval_corpus, splits["validation"], None, 0, seed, progress)
        for (name, split), source in zip(splits.items(), (corpus, eval_corpus or corpus), strict=False):
            split.close()
            if progress:
                print(split.counts.table(f"{name} split, pairs in rows of {block_size} tokens"))
                print(split.report(), flush=True)
            split.check(f"the {name} split of {source.name}")
        return {name: split.account() for name, split in splits.items()}

    return prepare_splits(cache_dir, "pairs", settings, write, PairRows)


def _read(corpus, file, held_out, fraction, seed, progress):
    """One pass over a source into `file`. A fraction of its documents goes to `held_out`; of prepared pairs
    the last ones, because neighbours share their documents."""
    started, counts = time.monotonic(), file.counts
    if holds_pairs(corpus):
        if missing := [column for column in COLUMNS if column not in corpus.columns]:
            raise ValueError(f"dataset_name {corpus.name!r}: sentence pairs without the column "
                             f"{', '.join(missing)}. Prepared pairs need {', '.join(COLUMNS)}.")
        n = sum(1 for _ in corpus) if fraction else 0
        for number, pair in enumerate(show_progress(corpus, counts, f"reading {corpus.name}", progress)):
            into = held_out if fraction and number >= n - max(1, round(n * fraction)) else file
            into.add_prepared(pair, f"dataset_name {corpus.name!r}, pair {number}: ")
    else:
        for text, into in split_documents(corpus, file, held_out, seed, fraction, progress):
            into.add(text)
    counts.seconds = round(time.monotonic() - started, 3)


class _PairFile:
    """The pairs of one split on their way to the disk, and the account of them."""

    def __init__(self, path, tokenizer, block_size, seed, label_is_next):
        self.label_is_next, self.prepared = label_is_next, False
        self.dtype, self.block_size, self.tokenizer = token_dtype(tokenizer), block_size, tokenizer
        self.rows, self.spans = RowFile(path, block_size, self.dtype), RowFile(spans_of(path), 3, np.int32)
        self.builder, self.counts = PairBuilder(block_size - 3, seed), Accounting()
        self.labels, self.padding = [0, 0], 0  # rows by label; tokens
        self.documents, self.characters = [], 0

    def add(self, text: str):
        self.documents.append(split_sentences(text))
        self.characters += len(text)
        if self.characters >= BLOCK:
            self.flush()

    def flush(self):
        """Tokenize the documents in hand and write their pairs."""
        found = list(tokenize_texts(itertools.chain(*self.documents), self.tokenizer))
        if not found:
            return
        starts = np.cumsum([0] + [len(tokens) for tokens, _ in found])
        ends = np.concatenate([ends + start for (_, ends), start in zip(found, starts, strict=False)])
        sentences = iter(np.split(np.concatenate([tokens for tokens, _ in found]), ends))
        documents = []
        for document in self.documents:
            found = [sentence[:-1] for sentence in itertools.islice(sentences, len(document))]  # without EOS
            documents.append([sentence for sentence in found if len(sentence)])
        self.counts.tokens += sum(len(sentence) for document in documents for sentence in document)
        cls, sep = self.tokenizer.cls_token_id, self.tokenizer.sep_token_id
        for a, b, label in self.builder.pairs([document for document in documents if document]):
            self.write([cls, *a, sep, *b, sep], len(a) + 2, label)
        self.documents, self.characters = [], 0

    def add_prepared(self, pair: dict, where: str):
        """One row of pairs prepared elsewhere. ValueError beginning with `where` for what is not right."""
        ids, types, mask, label = (pair[column] for column in COLUMNS)
        problem = ""
        if label not in (0, 1):
            problem = f"next_sentence_label is {label}, must be 0 or 1"
        elif not len(ids) == len(types) == len(mask):
            problem = f"{len(ids)} input_ids, {len(types)} token_type_ids, {len(mask)} attention_mask"
        elif len(ids) > self.block_size:
            problem = f"{len(ids)} tokens, more than block_size {self.block_size}: set block_size {len(ids)}"
        elif sum(mask) == 0 or mask != sorted(mask, reverse=True):
            problem = "attention_mask must be ones, then zeros (padding on the right)"
        elif types[: sum(mask)] != sorted(types[: sum(mask)]) or not {*types} <= {0, 1}:
            problem = "token_type_ids must be zeros for A, then ones for B"
        elif not 0 <= min(ids) <= max(ids) < len(self.tokenizer):
            problem = (f"token id {max(ids)}, but the tokenizer has {len(self.tokenizer)} tokens: set "
                       "tokenizer_name to the tokenizer that made the pairs")  # fmt: skip
        if problem:
            raise ValueError(where + problem)
        end = sum(mask)
        self.counts.read, self.counts.kept = self.counts.read + 1, self.counts.kept + 1
        self.counts.tokens += end
        self.prepared = True
        self.write(ids[:end], end - sum(types[:end]), label ^ self.label_is_next)

    def write(self, ids: list[int], end_of_a: int, label: int):
        row = np.full((1, self.block_size), self.tokenizer.pad_token_id, self.dtype)
        row[0, : len(ids)] = ids
        self.rows.write(row)
        self.spans.write(np.array([[end_of_a, len(ids), label]], np.int32))
        self.labels[label] += 1
        self.padding += self.block_size - len(ids)

    def close(self):
        self.flush()
        self.rows.close()
        self.spans.close()
        self.counts.rows = self.rows.rows
        self.counts.tokens_dropped = self.builder.unpaired + self.builder.truncated

    def check(self, where: str):
        """ValueError where there are no pairs, or no other documents for the random ones."""
        if not self.counts.rows:
            raise ValueError(f"next_sentence: {where} has {self.counts.kept:,} documents, none of two "
                             "sentences, so no pairs. Remedies: name a source whose rows are whole documents "
                             "with sentences that end in . ! or ?, raise validation_fraction, or switch "
                             "next_sentence off.")
        if self.builder.labels[0] > 1 and not self.builder.labels[1]:
            raise ValueError(f"next_sentence: {where} has one document, so no text of another one to pair "
                             "with. Name a source of more documents, or raise validation_fraction.")

    def account(self) -> dict:
        return self.counts.as_dict() | {
            "pairs_next": self.labels[0], "pairs_random": self.labels[1], "padding_tokens": self.padding,
            "single_sentence_documents": self.builder.single_sentence,
            "tokens_unpaired": self.builder.unpaired, "tokens_truncated": self.builder.truncated,
        }  # fmt: skip

    def report(self) -> str:
        n, builder = max(self.counts.rows, 1), self.builder
        meaning = f"  pairs prepared elsewhere: label {self.label_is_next} is taken for B follows A"
        return (f"{meaning}\n" if self.prepared else "") + (
            f"  label 0, B follows A: {self.labels[0] / n:.1%}; label 1, B from another document: "
            f"{self.labels[1] / n:.1%}; padding: {self.padding / n / self.block_size:.1%} of the tokens\n"
            f"  dropped tokens: {builder.unpaired:,} of sentences left alone ({builder.single_sentence:,} "
            f"documents have no other), {builder.truncated:,} cut off"
        )
