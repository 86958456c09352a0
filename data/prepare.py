"""Text to token shards: filter, drop duplicates, hold out a validation split, tokenize, write.

    python -m data.prepare --dataset_name installed-python --tokenizer_name gpt2 --output_dir shards

The output may be a folder or any fsspec URL. All cores are used. Memory grows by about 80 bytes per document,
for the hashes that find exact duplicates. If it is killed, run the same command again: it resumes, and the
files get the same bytes. It repairs a finished folder with damaged files by preparing all of it again.
`prepare_all` does the same for the datasets of a run, in its cache_dir.
"""

import argparse
import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

from data.documents.filters import Accounting, HoldOut, choose_hold_out
from data.documents.source import Corpus, add_source_flags, check_numbers, open_corpus, source_of
from data.tokens.cache import cache_path
from data.tokens.encode import TokenMaker
from data.tokens.pairs import PairMaker
from data.tokens.preparation import NO_LIMIT, Recipe, delete_shards, make_shards
from data.tokens.shards import MANIFEST, SHARD_MB, Shards
from data.tokens.tokenizer import explain_no_text, load_tokenizer
from utils.io.files import write_json
from utils.io.mistakes import user_mistakes
from utils.io.urls import Folder

CHARS_PER_TOKEN = 8  # generous: hold out at least this much text per token of one validation row


def prepare_all(args, train: dict, evals: dict, tokenizer, n_special: int = 0) -> tuple[dict, dict]:
    """Makes token shards on this machine of the datasets that open_all returned. Returns ({name: training
    shards}, {name: evaluation shards}). With eval_only the training shards may be evaluation shards."""
    size, pairs = args.block_size - n_special, getattr(args, "next_sentence", False)
    divided = [name for name, data in evals.items() if data is None]  # into train and validation
    hold_out = plan_hold_out(args, [train[name] for name in divided], size)
    maker = PairMaker(tokenizer, size, args.seed) if pairs else TokenMaker(tokenizer)
    to_shards = partial(as_shards, maker=maker, size=size, cache_dir=args.cache_dir)
    eval_shards = {name: data and to_shards(data, "validation") for name, data in evals.items()}
    if args.eval_only and all(eval_shards.values()):
        return dict(list(eval_shards.items())[:1]), eval_shards
    train_shards, eval_corpora = {}, [data for data in evals.values() if isinstance(data, Corpus)]
    for name, data in train.items():
        if name in divided:
            train_shards[name] = to_shards(data, "train", hold_out, eval_corpora, args.max_train_samples)
            eval_shards[name] = train_shards[name].with_split("validation")
        else:
            excluded = eval_corpora + [hold_out.select(train[name]) for name in divided]
            train_shards[name] = to_shards(data, "train", None, excluded, args.max_train_samples)
    tokens = [data.name for data in train.values() if isinstance(data, Shards)]
    if args.eval_dataset_name and tokens and eval_corpora:
        print(f"data       {', '.join(tokens)} holds tokens, not text: documents of the evaluation set "
              "cannot be removed from it", flush=True)
    return train_shards, eval_shards


def plan_hold_out(args, corpora: list[Corpus], size: int) -> HoldOut:
    """Decides which documents of these corpora are for validation, by one rule for all, before any row is
    made. size: tokens per row, without special tokens."""
    max_chars = max(args.max_train_samples * size or NO_LIMIT, 1 << 14)  # a token has one or more
    min_documents = 1 + getattr(args, "next_sentence", False)
    settings = args.validation_fraction, CHARS_PER_TOKEN * size, min_documents, max_chars
    rules = []
    for corpus in corpora:
        path = cache_path(args.cache_dir, "hold-out", [corpus.fingerprint, settings]).with_suffix(".json")
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, choose_hold_out(corpus, *settings).settings)
        rules.append(json.loads(path.read_text()))
    return HoldOut(max((fraction for fraction, _ in rules), default=0.0),
                   frozenset().union(*(hashes for _, hashes in rules)))


def as_shards(data: Corpus | Shards, split: str, hold_out: HoldOut | None = None, excluded=(),
              max_rows: int = 0, *, maker: TokenMaker, size: int, cache_dir) -> Shards:
    """Returns a dataset as token shards on this machine. Text is prepared in the cache, by one process.

    split: what the documents are for. hold_out: the rule for documents that become the validation split.
    excluded: corpora whose documents are not trained on. max_rows: prepare little more than the first so many
    rows of `size` tokens; 0: all. ValueError if a split gets no row."""
    if isinstance(data, Shards):
        return data.local(cache_dir, data.entries(max_rows * max(size, data.width)))
    recipe = Recipe({split: data}, maker, hold_out, excluded, max_rows * size)
    folder = cache_path(cache_dir, maker.kind, recipe.settings)
    if Path(folder, MANIFEST).exists():
        print(f"data       {data.name}: using the rows prepared in {folder}", flush=True)
    shards = Shards(folder, split, make_shards(Folder(folder), recipe))
    divided = hold_out is not None  # into train and validation
    for name in [split, *["validation"] * divided]:
        if name not in shards.with_rows(size):
            raise ValueError(_explain_no_row(shards.with_split(name), data, maker, size, divided))
    return shards


def _explain_no_row(shards: Shards, corpus: Corpus, maker: TokenMaker, size: int, divided: bool) -> str:
    """Says why the split has no row, and what to do."""
    split, accounts = shards.split, shards.manifest["accounting"]
    account, train = (Accounting.from_record(accounts.get(name, {})) for name in (split, "train"))
    if not train.used + train.validation + train.evaluated + account.used:
        return explain_no_text(corpus, train if train.read else account)
    message = (f"the {split} split of {corpus.name}, column {corpus.text_column}, has {account.used:,} "
               "documents")
    if maker.no_row:
        return f"next_sentence: {message}, {maker.no_row}"
    remedy = "lower block_size or take more text"
    if split == "train" and train.evaluated and not train.used:
        remedy = "all of its documents are in the evaluation data: name other data to train or evaluate on"
    elif divided and train.used + train.validation == 1 and account.used == 0:
        remedy = "one document cannot be divided: name text to evaluate on: --eval_dataset_name FILE"
    elif divided and split == "validation":
        remedy += ", raise validation_fraction or set eval_dataset_name"
    return f"block_size {size}: {message}, {account.tokens:,} tokens, less than a row; {remedy}"


# ---- The command


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    about = __doc__.split("\n")[0]
    parser = argparse.ArgumentParser("python -m data.prepare", description=about, allow_abbrev=False)
    add = parser.add_argument
    add("--output_dir", required=True, help="folder or URL: s3://, hf://datasets/user/x, ...")
    add_source_flags(add)  # --split train also prepares the splits validation and test of the source
    add("--tokenizer_name", required=True, help="Hub id or folder; data.tokens.tokenizer makes one")
    share = "share of the documents, if the source has no validation split (default: 0.05; 0: none)"
    add("--validation_fraction", type=float, default=0.05, help=share)
    size = f"MB per file (default: {SHARD_MB:g}; choose more for hf://)"
    add("--shard_mb", type=float, default=SHARD_MB, help=size)
    return parser.parse_args(argv)


def prepare(args: argparse.Namespace) -> dict:
    """Runs or resumes the preparation and returns the manifest. ValueError for the user's mistakes."""
    problems = check_numbers(args, shard_mb=1e-6)
    if not 0 <= args.validation_fraction < 1:
        problems.append(f"validation_fraction: must be in [0, 1), is {args.validation_fraction}.")
    if problems:
        raise ValueError("\n".join(problems))
    folder, tokenizer = Folder(os.path.expanduser(args.output_dir)), load_tokenizer(args.tokenizer_name)
    corpora, hold_out = open_text(args), None
    if "validation" not in corpora and args.validation_fraction:
        hold_out = choose_hold_out(corpora["train"], args.validation_fraction, min_chars=0, min_documents=1)
    recipe = Recipe(corpora, TokenMaker(tokenizer), hold_out, shard_mb=args.shard_mb)
    manifest = make_shards(folder, recipe)
    if "train" not in manifest["splits"]:
        delete_shards(folder)
        counts = Accounting.from_record(manifest["accounting"].get("train", {}))
        raise ValueError(f"dataset_name: {corpora['train'].name} gives nothing to train on "
                         f"({counts.line()}). Check keywords, or take more text.")
    print(f"{folder.url} is finished: {', '.join(manifest['splits'])}")
    return manifest


def open_text(args: argparse.Namespace) -> dict[str, Corpus]:
    """Returns {split: Corpus} of test, validation and train. With --split other than train: that split alone,
    as train."""
    source = replace(source_of(args), divide=args.validation_fraction > 0)
    train = open_corpus(source)
    names = ("test", "validation") if train.source.split == "train" else ()
    others = {name: open_corpus(replace(train.source, split=name)) for name in names if name in train.splits}
    return others | {"train": train}


@user_mistakes()
def main(argv: list[str] | None = None) -> None:
    """Exit status 0: done, 2: a mistake of the user, 1: a source or a target failed."""
    prepare(parse_args(argv))


if __name__ == "__main__":
    main()
