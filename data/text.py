"""Text as rows, prepared in the cache by data/factory.py; and tokenizers trained on text.

    prepared = prepare_rows(corpus, TokenMaker(tokenizer), block_size=128, validation_fraction=0.05)
    prepared.train.ids(np.array([5, 2]))     # [2, 128]
"""

import itertools
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

from data.cache import build_once, cache_folder, make_once
from data.encode import tokenize_documents
from data.factory import NO_LIMIT, Factory, TokenMaker
from data.filters import Accounting, clean_documents, drawn_place, in_validation
from data.rows import PackedRows
from data.shards import damaged_files, finished_manifest, shard_set
from data.sources.corpus import Corpus
from data.sources.files import digest
from data.tokenizer import TRAINING_BYTES, load_tokenizer, sampled, train_tokenizer
from utils.io.urls import Folder, explained

TOKENIZER_FORMAT = 4  # part of every tokenizer's cache key: raise it when training gives another tokenizer
FEW = 2000  # documents: a source with fewer may hold out more than validation_fraction


class PreparedRows:
    """The rows of a folder of shards in the cache. splits: {"train": rows of the class `kind`, ...};
    accounting: each split's Accounting as a dictionary; share: the fraction of the documents held out."""

    def __init__(self, folder: Path, block_size: int, kind=PackedRows):
        manifest = finished_manifest(Folder(folder))
        self.folder, self.accounting = str(folder), manifest["accounting"]
        self.share = manifest["settings"].get("validation_fraction", 0.0)
        most = manifest["settings"].get("most", 0) // block_size
        tokens = shard_set(self.folder, manifest, lambda entries: folder, kind)
        self.splits = {split: tokens.rows(split, block_size, most) for split in tokens.splits}
        self.train = self.splits.get("train")


def prepare_rows(corpus: Corpus, maker: TokenMaker, *, block_size: int, split: str = "train", seed: int = 0,
                 validation_fraction: float | None = None, evaluated=(), max_rows: int = 0,
                 cache_dir="cache") -> PreparedRows:
    """The rows of a corpus, made by one process and kept in the cache.

    split: what the documents are for. validation_fraction: the share of them to hold out (None: nothing);
    where that gives no row and documents are few, as many more as fill one, at most half. evaluated: corpora
    whose documents are not trained on. max_rows: take the first rows and read little more; 0: all.
    ValueError where a split gets no row; the folders made for it are deleted."""
    others = [other for other in evaluated if other.fingerprint != corpus.fingerprint]
    share, new_folders = validation_fraction or 0.0, []
    while True:
        held_out = (seed, share) if share else (0, 0.0)
        factory = Factory(None, {split: corpus}, maker, held_out, others, max_rows * block_size or NO_LIMIT)
        folder = cache_folder(cache_dir, maker.cache, factory.settings)
        factory.folder = Folder(folder)
        if make_once(folder, partial(_is_whole, factory.folder), partial(_make, factory)):
            new_folders.append(folder)
        prepared = PreparedRows(folder, block_size, maker.kind)
        account = Accounting(**prepared.accounting.get(split, {}))
        documents = account.kept + account.validation
        lacking = share and prepared.train and not prepared.splits.get("validation") and documents < FEW
        few = itertools.islice(clean_documents(corpus, Accounting()), max(documents, 2) if lacking else 0)
        texts = [document[corpus.text_column] for document in few]
        if not (raised := _raised(share, texts, maker, block_size, seed)):
            break
        share, number = raised
        print(f"validation_fraction {validation_fraction} of {len(texts)} documents gives no row of "
              f"{block_size} tokens: holding out {number} of them", flush=True)
    for name in [split, *["validation"] * (validation_fraction is not None)]:
        if not prepared.splits.get(name):
            for folder in new_folders:
                shutil.rmtree(folder, ignore_errors=True)
            raise ValueError(_no_row(prepared, name, corpus, maker, block_size, validation_fraction))
    return prepared


def _make(factory: Factory) -> None:
    for split, account in factory.complete()["accounting"].items():
        print(f"data       {split}: {Accounting(**account).line()}", flush=True)


def _is_whole(folder: Folder) -> bool:
    """Whether a folder of shards has every file in its size."""
    try:
        manifest = finished_manifest(folder)
        return manifest is not None and not damaged_files(folder, manifest, checksums=False)
    except OSError:
        return False


def _raised(share: float, texts: list[str], maker: TokenMaker, block_size: int, seed: int) -> tuple | None:
    """The (fraction, number of documents) to hold out so that they fill a row; None: that takes over half."""
    tokens = 0
    places = sorted((drawn_place(text, seed), text) for text in texts)
    for number, (place, text) in enumerate(places[: len(texts) // 2], 1):
        tokens += sum(len(ids) for ids, _ in tokenize_documents([(text, None)], maker.encoder))
        if tokens >= block_size and place >= share:
            return place + 1e-15, number
    return None


def _no_row(prepared: PreparedRows, split: str, corpus: Corpus, maker, block_size: int, fraction) -> str:
    """Why a split has no row, and the remedy. fraction: the validation_fraction."""
    account, train = (Accounting(**prepared.accounting.get(name, {})) for name in (split, "train"))
    documents = f"the {split} split of {corpus.name} has {account.kept:,} documents"
    remedy = "lower block_size or take more text"
    if corpus.keywords and not train.kept + train.validation + train.evaluated + account.kept:
        return (f"keywords {' '.join(corpus.keywords)}: none of the {train.read or account.read:,} documents "
                f"of {corpus.name} contains any of them; give others, or --keywords none to keep everything")
    if maker.no_row:
        return f"next_sentence: {documents}, {maker.no_row}"
    if split == "train" and train.evaluated and not train.kept:
        remedy = "all of its documents are in the evaluation data: name other data to train or evaluate on"
    elif fraction is not None and train.kept + train.validation == 1:
        remedy = "one document cannot be split: name validation data, or cut it into several files"
    elif split == "validation" and fraction is not None:
        remedy = f"raise validation_fraction ({fraction}), lower block_size or name validation data"
    return f"block_size {block_size}: {documents}, {account.tokens:,} tokens, not one whole row; {remedy}"


def held_out_of(corpus: Corpus, seed: int, fraction: float) -> Corpus:
    """The documents of a corpus that (seed, fraction) holds out."""

    def rows():
        for document in clean_documents(corpus, Accounting()):
            if in_validation(document[corpus.text_column], seed, fraction):
                yield document

    fingerprint = digest(corpus.fingerprint, corpus.keywords, seed, fraction)
    return replace(corpus, readers=[rows], fingerprint=fingerprint)


def trained_tokenizer(*corpora: Corpus, shares=(1.0,), vocab_size: int, algorithm: str, model_type: str,
                      cache_dir="cache", fim: bool = False, read_bytes: int = 0):
    """A tokenizer trained on a sample of each corpus, its share of the bytes; kept in the cache."""
    used = [(corpus, share) for corpus, share in zip(corpora, shares, strict=True) if share]
    content = [[corpus.fingerprint, corpus.keywords, share] for corpus, share in used]
    settings = [TOKENIZER_FORMAT, content, vocab_size, algorithm, model_type, TRAINING_BYTES, fim, read_bytes]

    def build(folder: Path) -> None:
        texts = []
        for corpus, share in used:
            texts += sampled(corpus, int(TRAINING_BYTES * share), read_bytes=int(read_bytes * share))[0]
        tokenizer = train_tokenizer(texts, algorithm, vocab_size, model_type, fim=fim)
        with explained(f"cache_dir: {cache_dir}", "written", Exception):  # tokenizers raises bare Exceptions
            tokenizer.save_pretrained(folder)

    return load_tokenizer(build_once(cache_dir, "tokenizer", settings, build))
