"""Text to training rows: tokenize, end every document with EOS, cut the stream of tokens into rows of T.

    prepared = prepare_rows(corpus, tokenizer, block_size=128, seed=0, cache_dir="cache")
    prepared.train.__getitems__([(0, 5), (0, 2)])["input_ids"]     # int64 [2, 128]

Rows carry over document boundaries; one remainder, shorter than a row, is dropped at the end of each split.
Letters: B rows of a batch, T tokens of a row (block_size), n rows of a split.
"""

import hashlib
import json
import os
import shutil
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from tokenizers import Tokenizer

from data.filters import Accounting, clean_documents, in_validation, show_progress
from data.tokenizer import TRAINING_BYTES, load_tokenizer, sample_texts, split_text, train_tokenizer

MANIFEST = "sizes.json"
SPLITS = ("train", "validation")
FORMAT = 2  # part of every cache key: raise it when rows of old caches would differ
BATCH_CHARACTERS = 1 << 20  # encoded in one call; the encodings of one batch take about 50 MB


def token_dtype(tokenizer) -> np.dtype:
    """uint16 where every token id fits, else uint32."""
    return np.dtype(np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32)


def tokenizer_fingerprint(tokenizer) -> str:
    """Changes with anything that shapes token ids."""
    content = json.dumps([tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token_id])
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def tokenize_texts(texts: Iterable[str], tokenizer) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (tokens [k], ends [d]) in the order of texts: token ids with EOS after each document, in
    `token_dtype`, and int64 offsets in `tokens` just after those EOS. A long document spans several yields.

    Special tokens written out in a text are text, as with nanoGPT's encode_ordinary: a document that
    mentions <|endoftext|> does not end there. The tokenizers library uses all cores; one batch is encoded
    while the one before is converted. ValueError where the tokenizer has no token to end documents with."""
    eos = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    if eos is None:
        raise ValueError(f"tokenizer_name {tokenizer.name_or_path!r} has no eos_token to end documents with; "
                         "choose another tokenizer")
    dtype = token_dtype(tokenizer)
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())  # a copy, to be set up for whole texts
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True

    def convert(encodings, lasts):
        tokens, ends = [], []
        for encoding, last in zip(encodings, lasts, strict=True):
            tokens += encoding.ids
            if last:
                tokens.append(eos)
                ends.append(len(tokens))
        # array() reads a list of ints in half of the time that numpy takes
        return np.frombuffer(array("I", tokens), np.uint32).astype(dtype), np.array(ends, np.int64)

    running = deque()
    with ThreadPoolExecutor(1) as encoder:
        for pieces, lasts in _batches(texts):
            batch = encoder.submit(backend.encode_batch_fast, pieces, add_special_tokens=False)
            running.append((batch, lasts))
            if len(running) == 2:
                encodings, lasts = running.popleft()
                yield convert(encodings.result(), lasts)
        for encodings, lasts in running:
            yield convert(encodings.result(), lasts)


def _batches(texts) -> Iterator[tuple[list[str], list[bool]]]:
    """Pieces of documents, about BATCH_CHARACTERS at a time, and whether each is the last of its document."""
    pieces, lasts, size = [], [], 0
    for text in texts:
        for piece in split_text(text):
            if size >= BATCH_CHARACTERS:
                yield pieces, lasts
                pieces, lasts, size = [], [], 0
            pieces.append(piece)
            lasts.append(False)
            size += len(piece)
        lasts[-1] = True
    if pieces:
        yield pieces, lasts


class RowPacker:
    """Tokens in, rows of T tokens out; what does not fill a row waits in `rest` (fewer than T tokens)."""

    def __init__(self, block_size: int, dtype):
        self.block_size = block_size
        self.rest = np.empty(0, dtype)

    def add(self, tokens: np.ndarray) -> np.ndarray:
        """tokens [k] -> the rows they complete [n, T], n >= 0."""
        tokens = np.concatenate([self.rest, tokens])
        cut = len(tokens) - len(tokens) % self.block_size
        self.rest = tokens[cut:].copy()  # a copy, which does not keep the whole array alive
        return tokens[:cut].reshape(-1, self.block_size)


class RowFile:
    """Writes a .npy file [n, T] whose n is known only at the end: the header, of fixed size, comes last."""

    HEADER = 128

    def __init__(self, path, block_size: int, dtype):
        self.file, self.block_size, self.dtype, self.rows = open(path, "wb"), block_size, np.dtype(dtype), 0
        self.file.write(bytes(self.HEADER))

    def write(self, rows: np.ndarray) -> None:
        """rows [n, T]"""
        self.file.write(np.ascontiguousarray(rows).data)
        self.rows += len(rows)

    def close(self) -> None:
        shape = (self.rows, self.block_size)
        header = repr({"descr": self.dtype.str, "fortran_order": False, "shape": shape}).encode()
        self.file.seek(0)
        self.file.write(b"\x93NUMPY\x01\x00" + (self.HEADER - 10).to_bytes(2, "little"))
        self.file.write(header.ljust(self.HEADER - 11) + b"\n")
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()




class PackedRows(torch.utils.data.Dataset):
    """Rows of a .npy file [n, T], memory-mapped. Keys are (epoch, row). It pickles as its path alone."""

    def __init__(self, path, max_rows: int | None = None):
        self.path, self.max_rows = str(path), max_rows
        self.rows = np.load(self.path, mmap_mode="r")[:max_rows]

    def __reduce__(self):
        return PackedRows, (self.path, self.max_rows)

    @property
    def block_size(self) -> int:
        return self.rows.shape[1]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, keys: list[tuple[int, int]]) -> dict:
        """keys (epoch, row) -> {"input_ids": int64 [B, T], "row": int64 [B], "epoch": int64 [B]}; row -1 is
        padding, zeros. For a DataLoader whose collate_fn passes batches on unchanged."""
        epoch, row = np.array(keys, np.int64).reshape(-1, 2).T
        tokens = self.rows[np.maximum(row, 0)].astype(np.int64)
        tokens[row < 0] = 0
        return {"input_ids": torch.from_numpy(tokens), "row": torch.tensor(row), "epoch": torch.tensor(epoch)}


@dataclass
class PreparedRows:
    train: PackedRows
    eval: PackedRows
    accounting: dict[str, dict]  # "train" and "validation" -> Accounting.as_dict()
    eval_bytes_per_token: float  # UTF-8 bytes of the validation documents / their tokens, EOS included
    folder: str


def prepare_rows(corpus, tokenizer, *, block_size: int, keywords=(), validation_fraction: float = 0.05,
                 eval_corpus=None, seed: int = 0, cache_dir="cache", progress=True) -> PreparedRows:
    """Rows for training and evaluation, from the cache where the same were prepared before.

    Evaluation rows come from eval_corpus, or else from about validation_fraction of the documents, chosen by
    content hash and seed; of few documents more are held out, until they fill a row. The cache key covers
    everything that shapes the rows. Several processes may call this at once: one prepares, the others wait.
    Raises ValueError where a split gets no row."""
    settings = {
        "format": FORMAT,
        "corpus": [corpus.fingerprint, corpus.text_column],
        "eval_corpus": eval_corpus and [eval_corpus.fingerprint, eval_corpus.text_column],
        "validation": None if eval_corpus else [validation_fraction, seed],
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "keywords": sorted(set(keywords)),
        "block_size": block_size,
    }

    def build(folder):
        fraction = validation_fraction
        while True:
            splits = _write_splits(folder, corpus, eval_corpus, tokenizer, settings, fraction, progress)
            train, validation = splits["train"].counts, splits["validation"].counts
            if validation.rows or eval_corpus is not None or not train.rows or not 0 < fraction <= 0.25:
                break
            fraction = max(2 * fraction, 2 / train.kept)  # holds out what the smaller one did, and more
            print(f"validation_fraction {validation_fraction} of {train.kept} documents fills no row of "
                  f"{block_size} tokens: holding out {fraction:.2g}", flush=True)
        if progress:
            print(train.table(f"{corpus.name}, train"))
            print(validation.table(f"{(eval_corpus or corpus).name}, validation"))
            if keywords:
                print(train.share_after_filtering(), flush=True)
        _check_rows(train, validation, corpus, eval_corpus, settings, validation_fraction)
        manifest = {
            "settings": settings,
            "accounting": {name: split.counts.as_dict() for name, split in splits.items()},
            "eval_bytes_per_token": validation.bytes / validation.tokens,
        }
        (folder / "preparation.json").write_text(json.dumps(manifest, indent=1))

    folder = build_once(cache_dir, "rows", settings, build)
    manifest = json.loads((folder / "preparation.json").read_text())
    return PreparedRows(PackedRows(folder / "train.npy"), PackedRows(folder / "validation.npy"),
                        manifest["accounting"], manifest["eval_bytes_per_token"], str(folder))


class Split:
    """The rows of one split on their way to disk, and their account."""

    def __init__(self, path, block_size, tokenizer):
        self.counts = Accounting()
        self.packer = RowPacker(block_size, token_dtype(tokenizer))
        self.file = RowFile(path, block_size, token_dtype(tokenizer))

    def add(self, tokens: np.ndarray):
        self.counts.tokens += len(tokens)
        self.file.write(self.packer.add(tokens))

    def close(self):
        self.file.close()
        self.counts.rows, self.counts.tokens_dropped = self.file.rows, len(self.packer.rest)


def _write_splits(folder, corpus, eval_corpus, tokenizer, settings, fraction, progress) -> dict[str, Split]:
    keywords, (_, seed) = settings["keywords"], settings["validation"] or (0, 0)
    splits = {name: Split(folder / f"{name}.npy", settings["block_size"], tokenizer) for name in SPLITS}
    train, validation = splits.values()

    def split_of(text):
        return validation if eval_corpus is None and in_validation(text, seed, fraction) else train

    _pack(corpus, tokenizer, keywords, split_of, train.counts, progress)
    if eval_corpus is not None:
        _pack(eval_corpus, tokenizer, keywords, lambda text: validation, validation.counts, progress)
    for split in splits.values():
        split.close()
    return splits


def _pack(corpus, tokenizer, keywords, split_of: Callable[[str], Split], counts: Accounting, progress):
    """One pass over a corpus, counted in `counts`; each document's tokens go to the split of its text."""
    started, splits = time.monotonic(), deque()  # splits: of the documents that are being tokenized

    def texts():
        documents = clean_documents(corpus, keywords, counts)
        for document in show_progress(documents, counts, f"preparing {corpus.name}", progress):
            text = document[corpus.text_column]
            splits.append(split_of(text))
            if splits[-1].counts is not counts:
                counts.hold_out(splits[-1].counts, len(text.encode()))
            yield text

    for tokens, ends in tokenize_texts(texts(), tokenizer):
        parts, start = {}, 0
        for end in ends.tolist():
            parts.setdefault(splits.popleft(), []).append(tokens[start:end])
            start = end
        if start < len(tokens):  # a document that goes on in the next batch
            parts.setdefault(splits[0], []).append(tokens[start:])
        for split, found in parts.items():
            split.add(np.concatenate(found))
    counts.seconds = round(time.monotonic() - started, 3)


def _check_rows(train, validation, corpus, eval_corpus, settings, fraction):
    keywords, block_size = settings["keywords"], settings["block_size"]
    if keywords and not train.kept + train.validation:
        raise ValueError(f"keywords {' '.join(keywords)}: none of the {train.read:,} documents of "
                         f"{corpus.name} contains any of them; name others, or none to keep everything")
    sources = (("train", train, corpus), ("validation", validation, eval_corpus or corpus))
    for split, counts, source in sources:
        if not counts.rows:
            remedy = "lower block_size or take more text"
            if eval_corpus is None and train.kept + validation.kept == 1:
                remedy = "one document cannot be split: name validation data, or cut it into several files"
            elif eval_corpus is None and split == "validation":
                remedy = f"raise validation_fraction ({fraction}), lower block_size or name validation data"
            raise ValueError(f"block_size {block_size}: the {split} split of {source.name} is "
                             f"{counts.kept:,} documents, {counts.tokens:,} tokens, no whole row; {remedy}")


def trained_tokenizer(corpus, *, vocab_size: int, algorithm: str, model_type: str, keywords=(),
                      max_bytes: int = TRAINING_BYTES, seed: int = 0, cache_dir="cache", progress=True):
    """A tokenizer trained on a sample of at most max_bytes of the corpus, or the same one from the cache."""
    settings = [FORMAT, corpus.fingerprint, corpus.text_column, sorted(set(keywords)), vocab_size, algorithm,
                model_type, max_bytes, seed]

    def build(folder):
        counts = Accounting()
        documents = clean_documents(corpus, keywords, counts)
        documents = show_progress(documents, counts, f"reading {corpus.name} for the tokenizer", progress)
        texts = sample_texts((document[corpus.text_column] for document in documents), max_bytes, seed=seed)
        if not texts:
            raise ValueError(f"keywords {' '.join(keywords)}: none of the {counts.read:,} documents of "
                             f"{corpus.name} contains any of them, so no tokenizer can be trained")
        train_tokenizer(texts, algorithm, vocab_size, model_type).save_pretrained(folder)

    return load_tokenizer(build_once(cache_dir, "tokenizer", settings, build))


def build_once(cache_dir, kind: str, settings, build: Callable[[Path], None]) -> Path:
    """The folder of `cache_dir` that build(folder) filled for these settings, or fills it now.

    It appears by a rename, complete, with the size of every file on record. Of several processes one builds
    and the others wait; a killed one leaves neither a lock nor a folder that could be taken for whole."""
    key = hashlib.blake2b(json.dumps(settings).encode(), digest_size=12).hexdigest()
    folder, building = Path(cache_dir) / f"{kind}-{key}", Path(cache_dir) / f"{kind}-{key}.tmp"
    if _is_whole(folder):
        return folder
    os.makedirs(cache_dir, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not _is_whole(folder):
            for leftover in (building, folder):
                shutil.rmtree(leftover, ignore_errors=True)
            building.mkdir()
            try:
                build(building)
                sizes = {file.name: file.stat().st_size for file in building.iterdir()}
                (building / MANIFEST).write_text(json.dumps(sizes))
                building.rename(folder)
            finally:
                shutil.rmtree(building, ignore_errors=True)
    return folder


def _is_whole(folder: Path) -> bool:
    try:
        sizes = json.loads((folder / MANIFEST).read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False
