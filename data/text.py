"""Text as rows, prepared in the cache by data/preparation.py; and tokenizers trained on text.

    prepared = prepare_rows(corpus, TokenMaker(tokenizer), block_size=128, validation_fraction=0.05)
    prepared.train.ids(np.array([5, 2]))     # [2, 128]
"""

import itertools
import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

from data.cache import build_once, cache_folder, make_once
from data.encode import LEAST_CHARACTERS
from data.filters import Accounting, clean_documents, drawn_place, in_validation
from data.preparation import NO_LIMIT, Preparation, TokenMaker
from data.rows import PackedRows
from data.shards import finished_manifest, is_whole, shard_set
from data.sources.corpus import Corpus
from data.sources.files import digest
from data.tokenizer import TRAINING_BYTES, load_tokenizer, sampled, train_tokenizer
from utils.io.urls import Folder, explained

TOKENIZER_FORMAT = 4  # part of every tokenizer's cache key: raise it when training gives another tokenizer
FEW = 2000  # documents: a source with fewer may hold out more than validation_fraction
CHARACTERS = 8  # of text per token, more than usual: so much is held out for a row


class PreparedRows:
    """The rows of a folder of shards in the cache. splits: {"train": rows of the class `kind`, ...};
    accounting: each split's Accounting as a dictionary."""

    def __init__(self, folder: Path, block_size: int, kind=PackedRows):
        manifest = finished_manifest(Folder(folder))
        self.folder, self.accounting = str(folder), manifest["accounting"]
        max_rows = manifest["settings"].get("most", 0) // block_size
        tokens = shard_set(self.folder, manifest, lambda entries: folder, kind)
        self.splits = {split: tokens.rows(split, block_size, max_rows) for split in tokens.splits}
        self.train = self.splits.get("train")


def prepare_rows(corpus: Corpus, maker: TokenMaker, *, block_size: int, split: str = "train", seed: int = 0,
                 validation_fraction: float | None = None, evaluated=(), max_rows: int = 0,
                 cache_dir="cache") -> PreparedRows:
    """The rows of a corpus, made by one process and kept in the cache.

    split: what the documents are for. validation_fraction: the share of them to hold out; None: nothing.
    evaluated: corpora whose documents are not trained on. max_rows: take the first rows and read little more;
    0: all. ValueError where a split gets no row; the folder made for it is deleted."""
    others = [other for other in evaluated if other.fingerprint != corpus.fingerprint]
    held_out = (seed, validation_fraction) if validation_fraction else (0, 0.0)
    preparation = Preparation(None, {split: corpus}, maker, held_out, others, max_rows * block_size)
    folder = cache_folder(cache_dir, maker.cache, preparation.settings)
    preparation.folder = Folder(folder)
    made = make_once(folder, partial(is_whole, preparation.folder), partial(_run, preparation))
    prepared = PreparedRows(folder, block_size, maker.kind)
    for name in [split, *["validation"] * (validation_fraction is not None)]:
        if not prepared.splits.get(name):
            if made:
                shutil.rmtree(folder, ignore_errors=True)
            raise ValueError(_no_row(prepared, name, corpus, maker, block_size, validation_fraction))
    return prepared


def _run(preparation: Preparation) -> None:
    limit = f"; read only for the first {preparation.max_tokens:,} tokens" if preparation.max_tokens else ""
    for split, account in preparation.complete()["accounting"].items():
        reached = split in preparation.corpora and account["tokens"] >= preparation.max_tokens
        why = limit if reached else ""
        print(f"data       {split}: {Accounting(**account).line()}{why}", flush=True)


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
    elif fraction is not None and train.kept + train.validation == 1 and train.tokens >= block_size:
        remedy = "one document cannot be split: name validation data, or cut it into several files"
    elif split == "validation" and fraction is not None:
        remedy = f"raise validation_fraction ({fraction:.3g}), lower block_size or name validation data"
    return f"block_size {block_size}: {documents}, {account.tokens:,} tokens, not one whole row; {remedy}"


def share_to_hold_out(corpus: Corpus, seed: int, fraction: float, block_size: int, max_rows: int = 0,
                      least: int = 1) -> float:
    """`fraction`, the validation_fraction; of few documents the share that holds out the text of a row and
    `least` documents, at most half of them. max_rows: the first documents alone count, as in prepare_rows."""
    wanted, unread = CHARACTERS * block_size, max(LEAST_CHARACTERS, (max_rows or NO_LIMIT) * block_size)
    drawn, held_out = [], []  # (place, size) of each document; sizes of those that `fraction` takes
    for document in clean_documents(corpus, Accounting()):
        text = document[corpus.text_column]
        drawn.append((drawn_place(text, seed), len(text)))
        held_out += [size for place, size in drawn[-1:] if place < fraction]
        if sum(held_out) >= wanted and len(held_out) >= least or len(drawn) == FEW:
            return fraction
        if (unread := unread - len(text)) <= 0 and len(drawn) > 1:
            break
    drawn.sort()
    sizes = itertools.accumulate(size for _, size in drawn)
    number = min(max(least, 1 + sum(size < wanted for size in sizes)), len(drawn) // 2)
    share = drawn[number - 1][0] + 1e-15 if number else 0.0
    if share > fraction:
        print(f"data       validation_fraction {fraction:g} of {len(drawn)} documents fills no row of "
              f"{block_size} tokens; {number} held out instead", flush=True)
    return max(share, fraction)


def stored_share(corpus: Corpus, cache_dir, *how) -> float:
    """share_to_hold_out(corpus, *how), computed by one process and kept in the cache."""

    def build(folder: Path) -> None:
        (folder / "share.json").write_text(json.dumps(share_to_hold_out(corpus, *how)))

    folder = build_once(cache_dir, "share", [corpus.fingerprint, FEW, CHARACTERS, *how], build)
    return json.loads((folder / "share.json").read_text())


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
