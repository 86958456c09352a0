"""Text as rows, prepared in the cache by data/factory.py; and tokenizers that are trained on text.

    prepared = prepare_rows(corpus, TokenMaker(tokenizer), block_size=128, validation_fraction=0.05)
    prepared.train.__getitems__([(0, 0, 5), (1, 0, 2)])["input_ids"]     # int64 [2, 128]
"""

import itertools
import shutil
from dataclasses import replace
from pathlib import Path

from data.cache import build_once, cache_folder, locked
from data.encode import tokenize_documents
from data.factory import NO_LIMIT, Factory, TokenMaker
from data.filters import Accounting, clean_documents, drawn_place, in_validation
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
    an Accounting as a dictionary; share: of the documents that is held out; kind: the class of the rows."""

    def __init__(self, folder: Path, block_size: int, kind=PackedRows):
        manifest = finished_manifest(Folder(folder))
        self.folder, self.accounting = str(folder), manifest["accounting"]
        self.share = manifest["settings"].get("validation_fraction", 0.0)
        most = manifest["settings"].get("most", 0) // block_size
        self.splits = {split: rows_of(folder, manifest, split, entry["files"], block_size, most, kind)
                       for split, entry in manifest["splits"].items()}  # fmt: skip
        self.train = self.splits.get("train")


def prepare_rows(corpus: Corpus, maker: TokenMaker, *, block_size: int, split: str = "train", seed: int = 0,
                 validation_fraction: float | None = None, evaluated=(), max_rows: int = 0,
                 cache_dir="cache") -> PreparedRows:
    """The rows of a corpus. One process makes them, others wait; the next run finds them in the cache.

    split: what the documents are for. validation_fraction of them are for validation; of few documents as
    many more as give a row, at most half; None: none. Documents of `evaluated` (corpora) are not trained on.
    max_rows: the first, and little more is read; 0: all. ValueError where a split gets no row; what was made
    then goes."""
    others = [other for other in evaluated if other.fingerprint != corpus.fingerprint]
    share, made = validation_fraction or 0.0, []
    while True:
        held_out = (seed, share) if share else (0, 0.0)
        factory = Factory(None, {split: corpus}, maker, held_out, others, max_rows * block_size or NO_LIMIT)
        folder = cache_folder(cache_dir, maker.cache, factory.settings)
        made += [folder] if _complete(factory, folder) else []
        prepared = PreparedRows(folder, block_size, maker.kind)
        account = Accounting(**prepared.accounting.get(split, {}))
        documents = account.kept + account.validation
        lacking = share and prepared.train and not prepared.splits.get("validation") and documents < FEW
        few = itertools.islice(clean_documents(corpus, Accounting()), max(documents, 2) if lacking else 0)
        texts = [document[corpus.text_column] for document in few]
        if not (more := _raised(share, texts, maker, block_size, seed)):
            break
        share, held = more
        print(f"validation_fraction {validation_fraction} of {len(texts)} documents gives no row of "
              f"{block_size} tokens: holding out {held} of them", flush=True)
    for name in [split, *["validation"] * (validation_fraction is not None)]:
        if not prepared.splits.get(name):
            for folder in made:
                shutil.rmtree(folder, ignore_errors=True)
            told = prepared.accounting, name, corpus, maker.no_row, block_size, validation_fraction
            raise ValueError(_no_row(*told))
    return prepared


def _raised(share: float, texts: list[str], maker: TokenMaker, block_size: int, seed: int) -> tuple | None:
    """(fraction, documents) to hold out instead: as many more as fill a row; None: more than half of all."""
    held = 0
    places = sorted((drawn_place(text, seed), text) for text in texts)
    for number, (place, text) in enumerate(places[: len(texts) // 2], 1):
        held += sum(len(ids) for ids, _ in tokenize_documents([(text, None)], maker.encoder))
        if held >= block_size and place >= share:
            return place + 1e-15, number
    return None


def _complete(factory: Factory, folder: Path) -> bool:
    """Whether anything was missing of a folder of the cache: then one process makes it, others wait."""
    factory.folder = Folder(folder)
    if is_whole(factory.folder):
        return False
    with locked(folder):
        if not is_whole(factory.folder):
            for split, account in factory.complete()["accounting"].items():
                print(f"data       {split}: {Accounting(**account).line()}", flush=True)
    return True


def is_whole(folder: Folder) -> bool:
    """Whether a folder of shards has all its files, by their sizes."""
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


def held_out_of(corpus: Corpus, seed: int, fraction: float) -> Corpus:
    """The documents of a corpus that (seed, fraction) hold out."""

    def rows():
        for document in clean_documents(corpus, Accounting()):
            if in_validation(document[corpus.text_column], seed, fraction):
                yield document

    fingerprint = digest(corpus.fingerprint, corpus.keywords, seed, fraction)
    return replace(corpus, readers=[rows], fingerprint=fingerprint)


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
