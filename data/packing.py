"""Text to training rows: tokenize, end every document with EOS, cut the stream of tokens into rows of T.

    prepared = prepare_rows(corpus, tokenizer, block_size=128, seed=0, cache_dir="cache")
    prepared.train.__getitems__([(0, 0, 5), (1, 0, 2)])["input_ids"]     # int64 [2, 128]

Rows carry over document boundaries; one remainder, shorter than a row, is dropped at the end of each split.
Letters: B rows of a batch, T tokens of a row (block_size), n rows of a split.
"""

import hashlib
import json
import math
import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from data.cache import RowFile, build_once
from data.filters import Accounting, SeenHashes, clean_documents, in_validation, show_progress
from data.tokenizer import TRAINING_BYTES, id_count, load_tokenizer, sampled, split_text, train_tokenizer

SPLITS = ("train", "validation")
FORMAT = 3  # part of every cache key: raise it when rows of old caches would differ
TOKENIZER_FORMAT = 3  # the same of trained tokenizers
BATCH_CHARACTERS = 1 << 20  # encoded in one call; the encodings of one batch take about 50 MB
LEAST_CHARACTERS = 1 << 14  # of the first batches, so that a sample of a corpus reads little ahead


def token_dtype(tokenizer) -> np.dtype:
    """uint16 where every token id fits, else uint32."""
    return np.dtype(np.uint16 if id_count(tokenizer) <= 1 << 16 else np.uint32)


def tokenizer_fingerprint(tokenizer) -> str:
    """Changes with anything that shapes token ids."""
    content = json.dumps([tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token_id])
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def tokenize_documents(documents: Iterable[tuple], tokenizer, fim=None) -> Iterator[tuple]:
    """(text, note) of each document -> (its token ids in `token_dtype`, with EOS, note). A text may be the
    pieces that `fim` (FillInMiddle) has made of it.

    Special tokens written out in a text are text, as with nanoGPT's encode_ordinary: a document that
    mentions <|endoftext|> does not end there. The tokenizers library uses all cores; one batch is encoded
    while the one before is converted. ValueError where the tokenizer has no token to end documents with."""
    eos = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    if eos is None:
        raise ValueError(f"tokenizer_name {tokenizer.name_or_path!r} has no eos_token to end documents with; "
                         "choose another tokenizer")
    dtype, tokens = token_dtype(tokenizer), array("I")
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())  # a copy, to be set up for whole texts
    backend.no_truncation()
    backend.no_padding()
    backends = [backend, *([fim.inside(backend)] if fim else [])]
    for each in backends:
        each.encode_special_tokens = True

    def encode(pieces, places):
        found = []
        for inside, each in enumerate(backends):
            chosen = [piece for piece, place in zip(pieces, places, strict=True) if place[1] == inside]
            found.append(iter(each.encode_batch_fast(chosen, add_special_tokens=False)))
        return [next(found[place[1]]) for place in places]

    def convert(batch, places):
        for encoding, (before, _, last, note) in zip(batch.result(), places, strict=True):
            tokens.extend(before)
            tokens.extend(encoding.ids)
            if last:
                tokens.append(eos)
                yield np.array(tokens, dtype), note
                del tokens[:]

    running = deque()
    with ThreadPoolExecutor(1) as encoder:
        for pieces, places in _batches(documents):
            running.append((encoder.submit(encode, pieces, places), places))
            if len(running) == 2:
                yield from convert(*running.popleft())
        for batch, places in running:
            yield from convert(batch, places)


def _batches(documents) -> Iterator[tuple[list[str], list[list]]]:
    """Pieces of documents, about BATCH_CHARACTERS at a time, and of each: the ids before it, whether it
    begins inside its document, whether it is the last of it, the document's note."""
    pieces, places, size, done = [], [], 0, 0
    for text, note in documents:
        for before, part, inside in [([], text, False)] if isinstance(text, str) else text:
            for piece in split_text(part):
                if size >= min(BATCH_CHARACTERS, max(LEAST_CHARACTERS, done // 8)):
                    yield pieces, places
                    pieces, places, size, done = [], [], 0, done + size
                pieces.append(piece)
                places.append([before, inside, False, note])
                before, size = [], size + len(piece)
        places[-1][2] = True
    if pieces:
        yield pieces, places


class PackedRows(torch.utils.data.Dataset):
    """Rows of a .npy file [n, T], or the first `most`, memory-mapped."""

    bytes_per_token = 0.0  # UTF-8 bytes of the documents / their tokens, EOS included; where that is known
    blanks = {"input_ids": 0}  # what a row of padding holds in each column

    def __init__(self, path, most: int = 0):
        self.path, self.most = str(path), most
        self.rows = np.asarray(np.load(path, mmap_mode="r"))[: most or None]  # a memmap is slow to index

    @property
    def block_size(self) -> int:
        return self.rows.shape[1]

    @property
    def n_rows(self) -> int:
        return len(self)

    @property
    def fingerprint(self) -> str:
        """Changes with the content of the rows, and with nothing else: the checksum that RowFile has kept, of
        the first `most` with their number."""
        kept = Path(f"{self.path}.xxh3").read_text()
        return f"{kept}-{len(self)}" if self.most else kept

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, row: np.ndarray) -> dict[str, np.ndarray]:
        """The rows of these numbers, [B, ...] of any integers."""
        return {"input_ids": self.rows[row]}

    def __getitems__(self, keys: list[tuple[int, int, int]]) -> dict:
        """keys (position, epoch, row) -> {"input_ids": int64 [B, T], "position", "epoch", "row": int64 [B]};
        row -1 is padding. For a DataLoader whose collate_fn passes batches on unchanged."""
        position, epoch, row = np.array(keys, np.int64).reshape(-1, 3).T
        columns = self.take(row)
        if (padding := row < 0).any():
            for name in columns.keys() & self.blanks.keys():
                columns[name][padding] = self.blanks[name]
        return as_batch(columns | {"position": position, "epoch": epoch, "row": row})


def as_batch(columns: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    whole = {name: np.ascontiguousarray(column, np.int64) for name, column in columns.items()}
    return {name: torch.from_numpy(column) for name, column in whole.items()}


class PreparedRows:
    """splits of a folder: train, and validation where anything was to be held out; accounting: of each, an
    Accounting as a dictionary; rows: the class of the splits."""

    def __init__(self, folder: Path, rows=PackedRows):
        self.folder = str(folder)
        self.accounting = json.loads((folder / "preparation.json").read_text())["accounting"]
        self.splits = {split: rows(folder / f"{split}.npy") for split in self.accounting}
        for split, account in self.accounting.items():
            self.splits[split].bytes_per_token = account["bytes"] / max(account["tokens"], 1)
        self.train = self.splits.get("train")


def prepare_rows(corpus, tokenizer, *, block_size: int, validation_fraction: float | None = 0.05,
                 eval_corpus=None, also_evaluated=(), seed: int = 0, cache_dir="cache", fim=None,
                 max_rows: int = 0) -> PreparedRows:
    """Rows for training and evaluation, from the cache where the same were prepared before (`build_once`).

    Evaluation rows come from eval_corpus, or else from about validation_fraction of the documents; of few
    documents more are held out, until they fill a row. With neither (None) all is for training. Documents
    of eval_corpus and also_evaluated are not trained on. max_rows: the first for training, and little more is
    read; 0: all. fim (FillInMiddle): of training documents; those for evaluation stay plain and
    come once more, all cut, in the split "fim". Raises ValueError where a split gets no row."""
    hold_out = eval_corpus is None and validation_fraction is not None
    names = SPLITS if hold_out or eval_corpus is not None else SPLITS[:1]
    names += ("fim",) * (fim is not None and len(names) > 1)
    settings = preparation_settings(FORMAT, corpus, eval_corpus, also_evaluated) | {
        "validation": [validation_fraction, seed] if hold_out else None,
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "block_size": block_size,
    } | ({"fim": [fim.rate, fim.seed]} if fim else {}) | ({"max_rows": max_rows} if max_rows else {})

    def write(folder: Path) -> dict[str, dict]:
        fraction = validation_fraction if hold_out else 0
        while True:
            splits = {split: Split(folder / f"{split}.npy", block_size, tokenizer) for split in names}
            splits["train"].most = max_rows or math.inf
            for documents in documents_of(splits, corpus, eval_corpus, also_evaluated, seed, fraction):
                if fim:
                    documents = _cut_documents(documents, splits, fim)
                for ids, into in tokenize_documents(documents, tokenizer, fim):
                    into.add(ids)
            if "fim" in splits:
                counts = splits["validation"].counts
                splits["fim"].counts = replace(counts, tokens=splits["fim"].counts.tokens)
            for split in splits.values():
                split.close()
            train = splits["train"].counts
            if not 0 < fraction <= 0.25 or not train.rows or splits["validation"].counts.rows:
                break
            fraction = max(2 * fraction, 2 / train.kept)  # holds out what the smaller one did, and more
            print(f"validation_fraction {validation_fraction} of {train.kept} documents fills no row of "
                  f"{block_size} tokens: holding out {min(fraction, 1):.2g}", flush=True)
        for (name, split), source in zip(splits.items(), (corpus, eval_corpus or corpus), strict=False):
            print(split.counts.table(f"{source.name}, {name}"))
        if train.evaluated:
            print(f"{train.evaluated:,} documents of {corpus.name} are in the evaluation data too: they are "
                  "not trained on", flush=True)
        _check_rows(splits, corpus, eval_corpus, block_size, validation_fraction)
        return {name: asdict(split.counts) for name, split in splits.items()}

    return prepare_splits(cache_dir, "rows", settings, write)


def preparation_settings(version: int, corpus, eval_corpus, also_evaluated) -> dict:
    """The part of a cache key that says which documents are prepared."""
    assert eval_corpus is None or eval_corpus.keywords == corpus.keywords
    return {
        "format": version,
        "corpus": [corpus.fingerprint, corpus.text_column],
        "eval_corpus": eval_corpus and [eval_corpus.fingerprint, eval_corpus.text_column],
        "also_evaluated": [other.fingerprint for other in also_evaluated
                           if other.fingerprint != corpus.fingerprint],
        "keywords": corpus.keywords,
    }


def prepare_splits(cache_dir, kind: str, settings: dict, write, rows=PackedRows) -> PreparedRows:
    """The .npy files, opened as `rows`, that write(folder) -> {split: account} makes for these settings."""

    def build(folder: Path) -> None:
        manifest = {"settings": settings, "accounting": write(folder)}
        (folder / "preparation.json").write_text(json.dumps(manifest, indent=1))

    return PreparedRows(build_once(cache_dir, kind, settings, build), rows)


class Split:
    """The rows of one split on their way to disk, and their account."""

    def __init__(self, path, block_size, tokenizer):
        self.counts, self.file = Accounting(), RowFile(path, block_size, token_dtype(tokenizer))
        self.most, self.rest = math.inf, np.empty(0, self.file.dtype)  # rows; what does not fill one

    def add(self, tokens: np.ndarray):
        self.counts.tokens += len(tokens)
        stream, T = np.concatenate([self.rest, tokens]), self.file.block_size
        end = min(len(stream) // T, self.most - self.file.rows) * T
        self.file.write(stream[:end].reshape(-1, T))
        self.rest = stream[end:]

    def close(self):
        self.file.close()
        self.counts.rows, self.counts.tokens_dropped = self.file.rows, len(self.rest)


def documents_of(splits, corpus, eval_corpus, also_evaluated, seed, fraction) -> Iterator[Iterator[tuple]]:
    """Of each source its documents, (text, split) each: a fraction of the training documents is held out,
    those that are evaluated on are left out. What the caller does with them is timed."""
    sources = {"train": _split_documents(corpus, splits["train"], splits.get("validation"), seed, fraction,
                                         (eval_corpus, *also_evaluated))}
    if eval_corpus is not None:
        sources["validation"] = _split_documents(eval_corpus, splits["validation"])
    for name, documents in sources.items():
        started = time.monotonic()
        yield documents
        splits[name].counts.seconds = round(time.monotonic() - started, 3)


def _split_documents(corpus, split, held_out=None, seed=0, fraction=0, evaluated=()) -> Iterator[tuple]:
    """(text, split or held_out) of the documents to prepare, until `split` is full. One of `evaluated` may be
    the very corpus."""
    hashes = SeenHashes()
    for other in evaluated:
        if other is not None and other.fingerprint != corpus.fingerprint:
            deque(clean_documents(other, Accounting(), hashes), maxlen=0)
    documents = clean_documents(corpus, split.counts, evaluated=hashes)
    for document in show_progress(documents, split.counts, f"preparing {corpus.name}"):
        text = document[corpus.text_column]
        if fraction and in_validation(text, seed, fraction):
            split.counts.hold_out(held_out.counts, len(text.encode()))
            yield text, held_out
        else:
            yield text, split
        if split.file.rows >= split.most:
            return


def _cut_documents(documents, splits, fim) -> Iterator[tuple]:
    """Those for training as `fim` orders them, those for evaluation plain, and all cut for split "fim"."""
    for text, into in documents:
        if into is splits["train"]:
            yield fim(text), into
        else:
            yield text, into
            yield replace(fim, rate=1.0)(text), splits["fim"]


def _check_rows(splits, corpus, eval_corpus, block_size, fraction):
    train = splits["train"].counts
    if corpus.keywords and not train.kept + train.validation + train.evaluated:
        raise ValueError(f"keywords {' '.join(corpus.keywords)}: none of the {train.read:,} documents of "
                         f"{corpus.name} contains any of them; name others, or none to keep everything")
    held_out = "validation" in splits and eval_corpus is None
    for (name, split), source in zip(splits.items(), (corpus, eval_corpus or corpus), strict=False):
        if not split.counts.rows:
            remedy = "lower block_size or take more text"
            if train.evaluated and not train.kept:
                remedy = "all of its documents are in the evaluation data: name other data for one of them"
            elif held_out and train.kept + train.validation == 1:
                remedy = "one document cannot be split: name validation data, or cut it into several files"
            elif held_out and name == "validation":
                remedy = f"raise validation_fraction ({fraction}), lower block_size or name validation data"
            raise ValueError(f"block_size {block_size}: the {name} split of {source.name} is "
                             f"{split.counts.kept:,} documents, {split.counts.tokens:,} tokens, no whole "
                             f"row; {remedy}")


def trained_tokenizer(*corpora, shares=(1.0,), vocab_size: int, algorithm: str, model_type: str,
                      cache_dir="cache", fim: bool = False, read_bytes: int = 0):
    """`train_tokenizer` on `sampled` texts of each corpus, its share of the bytes, or the same one from the
    cache."""
    used = [(corpus, share) for corpus, share in zip(corpora, shares, strict=True) if share]
    content = [x for corpus, _ in used for x in (corpus.fingerprint, corpus.text_column, corpus.keywords)]
    settings = [TOKENIZER_FORMAT, *content, vocab_size, algorithm, model_type, TRAINING_BYTES, 0]
    settings += [share for _, share in used] if len(used) > 1 else []
    settings += ["fim"] * fim + [read_bytes] * (read_bytes > 0)

    def build(folder):
        texts = []
        for corpus, share in used:
            texts += sampled(corpus, int(TRAINING_BYTES * share), read_bytes=int(read_bytes * share))[0]
        train_tokenizer(texts, algorithm, vocab_size, model_type, fim=fim).save_pretrained(folder)

    return load_tokenizer(build_once(cache_dir, "tokenizer", settings, build))
