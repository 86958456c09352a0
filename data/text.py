"""Text as rows, prepared in the cache by data/factory.py; and tokenizers that are trained on text.

    prepared = prepare_rows(corpus, TokenMaker(tokenizer), block_size=128, validation_fraction=0.05)
    prepared.train.__getitems__([(0, 0, 5), (1, 0, 2)])["input_ids"]     # int64 [2, 128]
"""

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path

from data.cache import build_once, cache_folder, locked
from data.encode import LEAST_CHARACTERS, Encoder, tokenize_documents, tokenizer_fingerprint
from data.factory import NO_LIMIT, Factory, TokenMaker
from data.filters import Accounting, clean_documents, in_validation
from data.rows import PackedRows
from data.shards import damaged_files, finished_manifest, rows_of
from data.sources.corpus import Corpus
from data.sources.files import digest
from data.tokenizer import TRAINING_BYTES, load_tokenizer, sampled, train_tokenizer
from utils.io.urls import Folder, explained

TOKENIZER_FORMAT = 4  # part of every cache key of a tokenizer: raise it when another would be trained
FEW = 2000  # documents: of a source with less than these the hold-out fraction may be raised


class PreparedRows:
    """The rows of a folder of shards in the cache. splits: {"train": rows, ...}; accounting: of each split,
    an Accounting as a dictionary; kind: the class of the rows."""

    def __init__(self, folder: Path, block_size: int, kind=PackedRows):
        manifest = finished_manifest(Folder(folder))
        most = (manifest["settings"].get("most") or 0) // block_size
        self.folder, self.accounting = str(folder), manifest["accounting"]
        self.splits = {split: rows_of(folder, manifest, split, entry["files"], block_size, most, kind)
                       for split, entry in manifest["splits"].items()}  # fmt: skip
        self.train = self.splits.get("train")


def prepare_rows(corpus: Corpus, maker: TokenMaker, *, block_size: int, split: str = "train", seed: int = 0,
                 validation_fraction: float | None = None, evaluated=(), max_rows: int = 0,
                 cache_dir="cache") -> PreparedRows:
    """The rows of a corpus. One process makes them, others wait; the next run finds them in the cache.

    split: what the documents are for. validation_fraction of them are for validation; of few documents more,
    until they fill a row; None: none. Documents of `evaluated` (corpora) are not trained on. max_rows: the
    first, and little more is read; 0: all. ValueError where a split gets no row; nothing stays of it then."""
    fraction = validation_fraction or 0.0
    if fraction and maker.kind is PackedRows:
        fraction = held_out_share(corpus, maker.tokenizer, block_size, fraction, seed, cache_dir, max_rows)
    held_out = (seed, fraction) if fraction else (0, 0.0)
    others = [other for other in evaluated if other.fingerprint != corpus.fingerprint]
    factory = Factory(None, {split: corpus}, maker, held_out, others, max_rows * block_size or NO_LIMIT)
    folder = cache_folder(cache_dir, maker.cache, factory.settings)
    factory.folder = Folder(folder)
    if to_make := not is_whole(factory.folder):
        with locked(folder):
            if not is_whole(factory.folder):
                for name, account in factory.complete()["accounting"].items():
                    print(f"data       {name}: {Accounting(**account).line()}", flush=True)
    prepared = PreparedRows(folder, block_size, maker.kind)
    for name in [split, *["validation"] * (validation_fraction is not None)]:
        if not prepared.splits.get(name):
            if to_make:
                shutil.rmtree(folder, ignore_errors=True)
            told = prepared.accounting, name, corpus, maker.no_row, block_size, validation_fraction
            raise ValueError(_no_row(*told))
    return prepared


def is_whole(folder: Folder) -> bool:
    """Whether a folder of shards in the cache has all its files, by their sizes."""
    try:
        manifest = finished_manifest(folder)
        return manifest is not None and not damaged_files(folder, manifest, checksums=False)
    except OSError:
        return False


def _no_row(accounts: dict, split: str, corpus: Corpus, of_pairs: str, block_size: int, fraction) -> str:
    """Why a split has no row, and the remedy. fraction: of the documents that is held out."""
    account, train = (Accounting(**accounts.get(name, {})) for name in (split, "train"))
    documents = f"the {split} split of {corpus.name} is {account.kept:,} documents"
    remedy = "lower block_size or take more text"
    if corpus.keywords and not train.kept + train.validation + train.evaluated + account.kept:
        return (f"keywords {' '.join(corpus.keywords)}: none of the {train.read or account.read:,} documents "
                f"of {corpus.name} contains any of them; name others, or none to keep everything")
    if of_pairs:
        return f"next_sentence: {documents}, {of_pairs}"
    if split == "train" and train.evaluated and not train.kept:
        remedy = "all of its documents are in the evaluation data: name other data for one of them"
    elif fraction is not None and train.kept + train.validation == 1:
        remedy = "one document cannot be split: name validation data, or cut it into several files"
    elif split == "validation" and fraction is not None:
        remedy = f"raise validation_fraction ({fraction}), lower block_size or name validation data"
    return f"block_size {block_size}: {documents}, {account.tokens:,} tokens, no whole row; {remedy}"


def held_out_share(corpus: Corpus, tokenizer, block_size: int, fraction: float, seed: int, cache_dir,
                   max_rows: int = 0) -> float:
    """The share of the documents to hold out: `fraction`, or as much more as fills a row where there are few
    documents (or few that max_rows are made of)."""

    def build(folder: Path) -> None:
        least = max(max_rows * block_size, 2 * LEAST_CHARACTERS) if max_rows else NO_LIMIT  # so much is read
        sizes, held, read, share = {}, 0, 0, fraction  # tokens of each text, of those held out; characters
        documents = itertools.islice(clean_documents(corpus, Accounting()), FEW)
        texts = ((document[corpus.text_column],) * 2 for document in documents)
        for ids, text in tokenize_documents(texts, Encoder.of(tokenizer)):
            sizes[text], read = len(ids), read + len(text)
            held += len(ids) if in_validation(text, seed, fraction) else 0
            if held >= block_size or read >= least:
                break
        while 1 < len(sizes) < FEW and share <= 0.25 and held < block_size:
            share = max(2 * share, 2 / len(sizes))
            held = sum(size for text, size in sizes.items() if in_validation(text, seed, share))
            print(f"validation_fraction {fraction} of {len(sizes)} documents fills no row of {block_size} "
                  f"tokens: holding out {min(share, 1):.2g}", flush=True)
        (folder / "share.json").write_text(json.dumps(share))

    what = corpus.fingerprint, corpus.keywords, tokenizer_fingerprint(tokenizer)
    settings = [*what, block_size, fraction, seed, max_rows]
    return json.loads((build_once(cache_dir, "held-out", settings, build) / "share.json").read_text())


def held_out_of(corpus: Corpus, seed: int, fraction: float) -> Corpus:
    """The documents of a corpus that (seed, fraction) hold out."""

    def rows():
        for document in clean_documents(corpus, Accounting()):
            if in_validation(document[corpus.text_column], seed, fraction):
                yield document

    fingerprint = digest(corpus.fingerprint, corpus.keywords, seed, fraction)
    return replace(corpus, rows=rows, pieces=[], fingerprint=fingerprint)


def trained_tokenizer(*corpora: Corpus, shares=(1.0,), vocab_size: int, algorithm: str, model_type: str,
                      cache_dir="cache", fim: bool = False, read_bytes: int = 0):
    """`train_tokenizer` on `sampled` texts of each corpus, its share of the bytes; kept in the cache."""
    used = [(corpus, share) for corpus, share in zip(corpora, shares, strict=True) if share]
    content = [[corpus.fingerprint, corpus.keywords, share] for corpus, share in used]
    settings = [TOKENIZER_FORMAT, content, vocab_size, algorithm, model_type, TRAINING_BYTES, fim, read_bytes]

    def build(folder: Path) -> None:
        texts = []
        for corpus, share in used:
            texts += sampled(corpus, int(TRAINING_BYTES * share), read_bytes=int(read_bytes * share))[0]
        tokenizer = train_tokenizer(texts, algorithm, vocab_size, model_type, fim=fim)
        with explained(f"cache_dir: {cache_dir}", "written", Exception):  # tokenizers raises no other
            tokenizer.save_pretrained(folder)

    return load_tokenizer(build_once(cache_dir, "tokenizer", settings, build))
