"""Text as rows: prepared in the cache by the factory of data/factory.py, or a stream's first ones.

    prepared = prepare_rows(corpus, tokenizer, block_size=128, seed=0, cache_dir="cache")
    prepared.train.__getitems__([(0, 0, 5), (1, 0, 2)])["input_ids"]     # int64 [2, 128]
"""

import errno
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from data.cache import build_once, cache_folder, locked
from data.encode import LEAST_CHARACTERS, Encoder, tokenize_documents, tokenizer_fingerprint
from data.factory import NO_LIMIT, Factory, TokenMaker
from data.filters import Accounting, SeenHashes, clean_documents, content_hash, drawn_place, in_validation
from data.rows import PackedRows
from data.shards import MANIFEST, all_files, complete, rows_of
from data.tokenizer import TRAINING_BYTES, load_tokenizer, sampled, train_tokenizer
from utils.io.urls import Folder

TOKENIZER_FORMAT = 4  # part of every cache key of a tokenizer: raise it when another would be trained
FEW = 2000  # documents: of a source with less than these the hold-out fraction may be raised


class PreparedRows:
    """The rows of a folder of shards in the cache. splits: train, and validation where anything was held out;
    accounting: of each split, an Accounting as a dictionary; kind: the class of the rows."""

    def __init__(self, folder: Path, block_size: int, max_rows: int = 0, kind=PackedRows):
        manifest = json.loads((folder / MANIFEST).read_text())
        self.folder, self.accounting, self.splits = str(folder), manifest["accounting"], {}
        for split, entry in manifest["splits"].items():
            self.splits[split] = rows_of(folder, manifest, split, entry["files"], block_size, max_rows, kind)
        self.train = self.splits.get("train")


def prepare_rows(corpus, tokenizer, *, block_size: int, validation_fraction: float | None = 0.05,
                 evaluated=(), held_elsewhere=(), seed: int = 0, cache_dir="cache", fim=None,
                 max_rows: int = 0) -> PreparedRows:
    """Rows for training and validation, from the cache where the same were prepared before.

    validation_fraction of the documents are for validation; of few documents more, until they fill a row;
    None: all are for training. Documents of `evaluated` (corpora), and those whose hash is in held_elsewhere,
    are not trained on. max_rows: the first for training, and little more is read; 0: all. fim (FillInMiddle):
    of training documents; those for validation come once more, all cut, in the split "fim". Raises ValueError
    where a split gets no row."""
    fraction = validation_fraction or 0.0
    if fraction:
        fraction, _ = held_out_share(corpus, tokenizer, block_size, fraction, seed, cache_dir, max_rows)
    settings = text_settings(corpus, evaluated, held_elsewhere, tokenizer) | {
        "held_out": [fraction, seed] if fraction else None, "fim": fim and [fim.rate, fim.seed],
        "most": max_rows * block_size,
    }  # fmt: skip

    def factory(folder: Folder) -> Factory:
        most = ("train", max_rows * block_size) if max_rows else ("", NO_LIMIT)
        hashes = itertools.chain(hashes_of(corpus, evaluated), held_elsewhere)
        return Factory(folder, {"train": corpus}, TokenMaker(tokenizer, fim), (seed, fraction), hashes, most)

    def check(made: dict) -> None:
        for split in ["train", *["validation"] * (validation_fraction is not None)]:
            check_split(made, split, corpus, block_size, validation_fraction)

    folder = in_cache(cache_dir, settings, tokenizer, factory, check)
    return PreparedRows(folder, block_size, max_rows)


def prepare_evaluation(corpus, tokenizer, *, block_size: int, held_out: tuple[int, float] = (0, 0.0),
                       cache_dir="cache", fim=None, max_rows: int = 0) -> PreparedRows:
    """Rows for evaluation, in the split "validation", and with fim all cut in "fim": of all documents, or of
    those that (seed, fraction) hold out of a stream. max_rows: the first, as a draw from all would have to
    read all; 0: all. Raises ValueError where there is no row."""
    split = "train" if held_out[1] else "validation"
    settings = text_settings(corpus, (), (), tokenizer) | {
        "evaluation": held_out, "fim": fim and [fim.rate, fim.seed], "most": max_rows * block_size,
    }  # fmt: skip

    def factory(folder: Folder) -> Factory:
        most = ("validation", max_rows * block_size) if max_rows else ("", NO_LIMIT)
        maker = TokenMaker(tokenizer, fim, leave_out="train")
        return Factory(folder, {split: corpus}, maker, held_out, (), most)

    def check(made: dict) -> None:
        check_split(made, "validation", corpus, block_size, held_out[1] or None)

    folder = in_cache(cache_dir, settings, tokenizer, factory, check)
    return PreparedRows(folder, block_size, max_rows)


def text_settings(corpus, evaluated, held_elsewhere, tokenizer) -> dict:
    """The part of a cache key that says which documents become which tokens."""
    others = [other.fingerprint for other in evaluated if other.fingerprint != corpus.fingerprint]
    return {"corpus": [corpus.fingerprint, corpus.keywords], "evaluated": others,
            "held_elsewhere": sorted(held_elsewhere), "tokenizer": tokenizer_fingerprint(tokenizer)}


def hashes_of(corpus, others) -> Iterator[int]:
    """The hashes of the documents of these corpora, of which one may be the very corpus."""
    for other in others:
        if other.fingerprint != corpus.fingerprint:
            seen = SeenHashes()
            for _ in clean_documents(other, Accounting(), seen):
                pass
            yield from filter(None, seen.slots)


def in_cache(cache_dir, settings: dict, tokenizer, factory: Callable[[Folder], Factory],
             check: Callable[[dict], None], kind: str = "rows") -> Path:
    """A folder of shards in the cache, whole. One process makes it, others wait; the next one resumes what is
    killed. What fails for want of text leaves nothing."""
    folder = cache_folder(cache_dir, kind, settings)
    if not _is_whole(folder):
        with locked(folder):
            if not _is_whole(folder):
                try:
                    manifest = complete(factory(Folder(folder)), tokenizer, settings, check)
                except ValueError:
                    shutil.rmtree(folder, ignore_errors=True)
                    raise
                for split, account in manifest["accounting"].items():
                    print(f"data       {split}: {Accounting(**account).line()}", flush=True)
    return folder


def _is_whole(folder: Path) -> bool:
    """Whether a folder of the cache has all its files, by their sizes. A manifest that cannot be read
    goes."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return all((folder / file["file"]).stat().st_size == file["size"] for file in all_files(manifest))
    except ValueError:
        (folder / MANIFEST).unlink()
    except OSError:
        pass
    return False


def check_split(made: dict, split: str, corpus, block_size: int, fraction: float | None) -> None:
    """ValueError, with the remedy, where a split has no row. fraction: of the documents that is held out."""
    account, train = (Accounting(**made["accounting"].get(name, {})) for name in (split, "train"))
    read = train.read or account.read
    if corpus.keywords and not train.kept + train.validation + train.evaluated + account.kept:
        raise ValueError(f"keywords {' '.join(corpus.keywords)}: none of the {read:,} documents of "
                         f"{corpus.name} contains any of them; name others, or none to keep everything")
    if made["splits"].get(split, {}).get("tokens", 0) >= block_size:
        return
    remedy = "lower block_size or take more text"
    if split == "train" and train.evaluated and not train.kept:
        remedy = "all of its documents are in the evaluation data: name other data for one of them"
    elif fraction is not None and train.kept + train.validation == 1:
        remedy = "one document cannot be split: name validation data, or cut it into several files"
    elif split == "validation" and fraction is not None:
        remedy = f"raise validation_fraction ({fraction}), lower block_size or name validation data"
    raise ValueError(f"block_size {block_size}: the {split} split of {corpus.name} is {account.kept:,} "
                     f"documents, {account.tokens:,} tokens, no whole row; {remedy}")


def held_out_share(corpus, tokenizer, block_size: int, fraction: float, seed: int, cache_dir,
                   max_rows: int = 0) -> tuple[float, list[int]]:
    """The share of the documents to hold out: `fraction`, or as much more as fills a row where there are few
    documents (or few that max_rows are made of); and the hashes of those that are held out beyond `fraction`,
    which no other source may train on."""

    def tokens(text: str) -> int:
        return sum(len(ids) for ids, _ in tokenize_documents([(text, None)], Encoder.of(tokenizer)))

    def build(folder: Path) -> None:
        least = max(max_rows * block_size, 2 * LEAST_CHARACTERS) if max_rows else NO_LIMIT  # so much is read
        texts, held, size, share = [], 0, 0, fraction
        for document in itertools.islice(clean_documents(corpus, Accounting()), FEW):
            texts.append(text := document[corpus.text_column])
            size, held = size + len(text), held + (tokens(text) if in_validation(text, seed, fraction) else 0)
            if held >= block_size or size >= least and len(texts) > 1:
                break
        few = texts if held < block_size and len(texts) < FEW else []
        held, places = 0, sorted((drawn_place(text, seed), text) for text in few)
        for number, (place, text) in enumerate(places[: len(few) // 2], 1):
            share, held = max(share, place + 1e-15), held + tokens(text)  # a fraction just above its place
            if held >= block_size:
                print(f"validation_fraction {fraction} of {len(few)} documents fills no row of {block_size} "
                      f"tokens: holding out {number} of them", flush=True)
                break
        more = [content_hash(text.encode()) for text in few
                if in_validation(text, seed, share) and not in_validation(text, seed, fraction)]
        (folder / "share.json").write_text(json.dumps([share, more]))

    what = corpus.fingerprint, corpus.keywords, tokenizer_fingerprint(tokenizer)
    settings = [*what, block_size, fraction, seed, max_rows]
    share, more = json.loads((build_once(cache_dir, "held", settings, build) / "share.json").read_text())
    return share, more


def trained_tokenizer(*corpora, shares=(1.0,), vocab_size: int, algorithm: str, model_type: str,
                      cache_dir="cache", fim: bool = False, read_bytes: int = 0):
    """`train_tokenizer` on `sampled` texts of each corpus, its share of the bytes, or the same one from the
    cache."""
    used = [(corpus, share) for corpus, share in zip(corpora, shares, strict=True) if share]
    content = [[corpus.fingerprint, corpus.keywords, share] for corpus, share in used]
    settings = [TOKENIZER_FORMAT, content, vocab_size, algorithm, model_type, TRAINING_BYTES, fim, read_bytes]

    def build(folder):
        texts = []
        for corpus, share in used:
            texts += sampled(corpus, int(TRAINING_BYTES * share), read_bytes=int(read_bytes * share))[0]
        tokenizer = train_tokenizer(texts, algorithm, vocab_size, model_type, fim=fim)
        try:
            tokenizer.save_pretrained(folder)
        except Exception as error:  # tokenizers raises no other
            if f"os error {errno.ENOSPC}" not in str(error):
                raise
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from error

    return load_tokenizer(build_once(cache_dir, "tokenizer", settings, build))
