"""Text to training rows: tokenize, end every document with EOS, cut the stream of tokens into rows of
block_size.

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
from collections.abc import Iterable, Iterator
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
FORMAT = 1  # part of every cache key: raise it when rows of old caches would differ
BATCH_BYTES = 1 << 21  # characters encoded in one call; the encodings of one batch take about 100 MB


def token_dtype(tokenizer) -> np.dtype:
    """uint16 where every token id fits, else uint32."""
    return np.dtype(np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32)


def tokenizer_fingerprint(tokenizer) -> str:
    """Changes with anything that shapes token ids."""
    content = json.dumps([tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token_id])
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def tokenize_texts(texts: Iterable[str], tokenizer) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (tokens [n], ends [d]) in the order of texts: token ids with EOS after each document, in
    `token_dtype`, and int64 offsets in `tokens` just after those EOS. A very long document spans several
    yields.

    Special tokens written out in a text are text (nanoGPT's encode_ordinary): a document that mentions
    <|endoftext|> does not end there. The tokenizers library uses all cores; one batch is encoded while the
    last is converted. Raises ValueError where the tokenizer has no EOS token."""
    eos = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    if eos is None:
        raise ValueError(
            "the tokenizer has no eos_token, which ends documents: choose another --tokenizer_name"
        )
    dtype = token_dtype(tokenizer)
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
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
        # array() reads a list of ints in half of numpy's time
        return np.frombuffer(array("I", tokens), np.uint32).astype(dtype), np.array(ends, np.int64)

    running = deque()
    with ThreadPoolExecutor(1) as encoder:
        for pieces, lasts in _batches(texts):
            running.append(
                (encoder.submit(backend.encode_batch_fast, pieces, add_special_tokens=False), lasts)
            )
            if len(running) == 2:
                encodings, lasts = running.popleft()
                yield convert(encodings.result(), lasts)
        for encodings, lasts in running:
            yield convert(encodings.result(), lasts)


def _batches(texts) -> Iterator[tuple[list[str], list[bool]]]:
    """Pieces of documents, about BATCH_BYTES at a time, and whether each is its document's last."""
    pieces, lasts, size = [], [], 0
    for text in texts:
        for piece in split_text(text):
            pieces.append(piece)
            lasts.append(False)
            size += len(piece)
            if size >= BATCH_BYTES and len(pieces) > 1:
                held = [pieces.pop()], [lasts.pop()]
                yield pieces, lasts
                (pieces, lasts), size = held, len(piece)
        lasts[-1] = True
    if pieces:
        yield pieces, lasts


class RowPacker:
    """Tokens in, rows of T tokens out; what does not fill a row waits in `rest` (fewer than T tokens)."""

    def __init__(self, block_size: int, dtype):
        self.block_size = block_size
        self.rest = np.empty(0, dtype)

    def add(self, tokens: np.ndarray) -> np.ndarray:
        """tokens [n] -> the rows they complete [k, T], k >= 0."""
        tokens = np.concatenate([self.rest, tokens])
        cut = len(tokens) - len(tokens) % self.block_size
        self.rest = tokens[cut:].copy()  # a copy, so that the whole array is not kept alive
        return tokens[:cut].reshape(-1, self.block_size)


class PackedRows(torch.utils.data.Dataset):
    """Rows of a .npy file [n, T], memory-mapped. Keys are (epoch, row); it pickles as its path alone."""

    def __init__(self, path, max_rows: int | None = None):
        self.path, self.max_rows = str(path), max_rows
        self._open()

    def _open(self):
        self.rows = np.load(self.path, mmap_mode="r")[: self.max_rows]

    @property
    def block_size(self) -> int:
        return self.rows.shape[1]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, keys: list[tuple[int, int]]) -> dict:
        """keys (epoch, row) -> {"input_ids": int64 [B, T], "row": int64 [B], "epoch": int64 [B]}; row -1 is
        padding, zeros."""
        epoch, row = torch.tensor(keys, dtype=torch.int64).reshape(-1, 2).T.contiguous()
        tokens = self.rows[row.clamp(min=0).numpy()].astype(np.int64)
        tokens[row.numpy() < 0] = 0
        return {"input_ids": torch.from_numpy(tokens), "row": row, "epoch": epoch}

    def __getitem__(self, key: tuple[int, int]) -> dict:
        return {name: value[0] for name, value in self.__getitems__([key]).items()}

    def __getstate__(self):
        return {"path": self.path, "max_rows": self.max_rows}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._open()


class _RowFile:
    """A .npy file [n, T] whose n is known only at the end: the header has a fixed size and is written
    last."""

    HEADER = 128

    def __init__(self, path, block_size, dtype):
        self.file, self.block_size, self.dtype, self.rows = open(path, "wb"), block_size, np.dtype(dtype), 0
        self.file.write(bytes(self.HEADER))

    def write(self, rows: np.ndarray):
        self.file.write(rows.data)
        self.rows += len(rows)

    def close(self):
        shape = (self.rows, self.block_size)
        header = repr({"descr": self.dtype.str, "fortran_order": False, "shape": shape}).encode()
        self.file.seek(0)
        self.file.write(b"\x93NUMPY\x01\x00" + (self.HEADER - 10).to_bytes(2, "little"))
        self.file.write(header.ljust(self.HEADER - 11) + b"\n")
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()


@dataclass
class PreparedRows:
    train: PackedRows
    eval: PackedRows
    accounting: dict[str, dict]  # "train" and "validation" -> Accounting.as_dict()
    eval_bytes_per_token: float  # UTF-8 bytes of the validation documents / their tokens, EOS included
    folder: str


def prepare_rows(
    corpus,
    tokenizer,
    *,
    block_size: int,
    keywords=(),
    validation_fraction: float = 0.05,
    eval_corpus=None,
    seed: int = 0,
    cache_dir="cache",
    progress=True,
) -> PreparedRows:
    """Rows for training and evaluation, from the cache where the same were prepared before.

    Evaluation rows come from eval_corpus, or else from about validation_fraction of the documents (by
    content hash and seed). The cache key covers everything that shapes the rows. Several processes may call
    this at once: one prepares, the others wait. Raises ValueError where either split has no row."""
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
        manifest = _write_rows(
            folder,
            corpus,
            tokenizer,
            block_size,
            settings["keywords"],
            validation_fraction,
            eval_corpus,
            seed,
            progress,
        )
        manifest["settings"] = settings
        (folder / "preparation.json").write_text(json.dumps(manifest, indent=1))

    folder = build_once(cache_dir, "rows", settings, build)
    manifest = json.loads((folder / "preparation.json").read_text())
    return PreparedRows(
        PackedRows(folder / "train.npy"),
        PackedRows(folder / "validation.npy"),
        manifest["accounting"],
        manifest["eval_bytes_per_token"],
        str(folder),
    )


def _write_rows(
    folder, corpus, tokenizer, block_size, keywords, fraction, eval_corpus, seed, progress
) -> dict:
    dtype, splits = token_dtype(tokenizer), ("train", "validation")
    counts = {split: Accounting() for split in splits}
    packers = {split: RowPacker(block_size, dtype) for split in splits}
    files = {split: _RowFile(folder / f"{split}.npy", block_size, dtype) for split in splits}

    def prepare(source, read, split_of):
        """One pass over a source, counted in `read`; each document's tokens go to the rows of its split."""
        started, owners = time.monotonic(), deque()  # the splits of the documents that are being tokenized

        def texts():
            documents = clean_documents(source, keywords, read)
            for document in show_progress(documents, read, f"preparing {source.name}", progress):
                text = document[source.text_column]
                owners.append(counts[split_of(text)])
                if owners[-1] is not read:
                    read.hold_out(owners[-1], len(text.encode()))
                yield text

        for tokens, ends in tokenize_texts(texts(), tokenizer):
            parts, start = {split: [] for split in splits}, 0
            for end in ends.tolist():
                parts[owner(owners.popleft())].append(tokens[start:end])
                start = end
            if start < len(tokens):  # a document that goes on in the next batch
                parts[owner(owners[0])].append(tokens[start:])
            for split in splits:
                if parts[split]:
                    found = np.concatenate(parts[split])
                    counts[split].tokens += len(found)
                    files[split].write(packers[split].add(found))
        read.seconds = round(time.monotonic() - started, 3)

    def owner(account):
        return splits[account is counts["validation"]]

    if eval_corpus is None:
        prepare(corpus, counts["train"], lambda text: splits[in_validation(text, seed, fraction)])
    else:
        prepare(corpus, counts["train"], lambda text: "train")
        prepare(eval_corpus, counts["validation"], lambda text: "validation")
    for split in splits:
        files[split].close()
        counts[split].rows, counts[split].tokens_dropped = files[split].rows, len(packers[split].rest)
    if progress:
        if keywords:
            print(counts["train"].share_after_filtering())
        for split in splits:
            print(counts[split].table(f"{split} split, rows of {block_size} tokens"), flush=True)
    _check_rows(counts, corpus, eval_corpus, keywords, block_size, fraction)
    return {
        "accounting": {split: counts[split].as_dict() for split in splits},
        "eval_bytes_per_token": counts["validation"].bytes / counts["validation"].tokens,
    }


def _check_rows(counts, corpus, eval_corpus, keywords, block_size, fraction):
    train, validation = counts["train"], counts["validation"]
    if keywords and not train.kept + train.validation:
        raise ValueError(
            f"keywords {' '.join(keywords)}: none of the {train.read:,} documents of {corpus.name} contains any"
            " of them. Name other keywords, or none to keep everything."
        )
    for split, count, source in (("train", train, corpus), ("validation", validation, eval_corpus or corpus)):
        if count.rows == 0:
            remedy = "lower block_size or name more text"
            if split == "validation" and eval_corpus is None:
                remedy = f"raise validation_fraction ({fraction}), lower block_size, or name validation data"
            raise ValueError(
                f"block_size {block_size}: the {split} split of {source.name} has {count.kept:,} documents"
                f" with {count.tokens:,} tokens, less than one row. Remedy: {remedy}."
            )


def trained_tokenizer(
    corpus,
    *,
    vocab_size: int,
    algorithm: str,
    model_type: str,
    keywords=(),
    max_bytes: int = TRAINING_BYTES,
    seed: int = 0,
    cache_dir="cache",
    progress=True,
):
    """A tokenizer trained on at most max_bytes of the corpus, or the same one from the cache."""
    settings = [
        FORMAT,
        corpus.fingerprint,
        corpus.text_column,
        sorted(set(keywords)),
        vocab_size,
        algorithm,
        model_type,
        max_bytes,
        seed,
    ]

    def build(folder):
        counts = Accounting()
        documents = clean_documents(corpus, keywords, counts)
        documents = show_progress(documents, counts, f"reading {corpus.name} for the tokenizer", progress)
        texts = sample_texts((document[corpus.text_column] for document in documents), max_bytes, seed=seed)
        if not texts:
            raise ValueError(
                f"{corpus.name} has no text to train a tokenizer on, with keywords {list(keywords)}"
            )
        train_tokenizer(texts, algorithm, vocab_size, model_type, progress=progress).save_pretrained(folder)

    return load_tokenizer(build_once(cache_dir, "tokenizer", settings, build))


def build_once(cache_dir, kind: str, settings, build) -> Path:
    """The folder of `cache_dir` that build(folder) filled for these settings (JSON), built if it is missing
    or damaged.

    It appears by a rename, complete; a manifest written last holds the size of every file. Of several
    processes one builds and the others wait; a killed one leaves neither a lock nor a folder that would be
    taken for whole."""
    key = hashlib.blake2b(json.dumps(settings).encode(), digest_size=12).hexdigest()
    folder, building = Path(cache_dir) / f"{kind}-{key}", Path(cache_dir) / f"{kind}-{key}.tmp"
    if _is_intact(folder):
        return folder
    os.makedirs(cache_dir, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not _is_intact(folder):
            shutil.rmtree(building, ignore_errors=True)
            shutil.rmtree(folder, ignore_errors=True)
            building.mkdir()
            try:
                build(building)
                sizes = {file.name: file.stat().st_size for file in building.iterdir()}
                (building / MANIFEST).write_text(json.dumps(sizes))
                building.rename(folder)
            finally:
                shutil.rmtree(building, ignore_errors=True)
    return folder


def _is_intact(folder: Path) -> bool:
    try:
        sizes = json.loads((folder / MANIFEST).read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False
