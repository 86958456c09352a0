"""Source -> filter -> duplicates -> tokens -> shards, from any source, to any fsspec URL.

    python -m data.prepare --dataset_name installed-python --tokenizer_name gpt2 --output_dir shards

Memory grows only by the hashes that find exact duplicates: about 80 bytes per document. It uses all cores.
After a kill the same command resumes, to the same bytes. A finished folder with damaged files is made again
whole.
"""

import argparse
import os
from dataclasses import replace

from data.documents.filters import Accounting, hold_out_of
from data.documents.source import Corpus, add_source_flags, check_numbers, open_corpus, source_of
from data.tokens.encode import TokenMaker
from data.tokens.preparation import Preparation
from data.tokens.shards import SHARD_MB
from data.tokens.tokenizer import load_tokenizer
from utils.io.mistakes import user_mistakes
from utils.io.urls import Folder


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    about = __doc__.split("\n")[0]
    parser = argparse.ArgumentParser("python -m data.prepare", description=about, allow_abbrev=False)
    add = parser.add_argument
    add("--output_dir", required=True, help="folder or URL: s3://, hf://datasets/user/x, ...")
    add_source_flags(add)  # with the split train come the source's splits validation and test
    add("--tokenizer_name", required=True, help="Hub id or folder; data.tokens.tokenizer makes one")
    share = "share of the documents, where the source has no validation split (default: 0.05; 0: none)"
    add("--validation_fraction", type=float, default=0.05, help=share)
    size = f"MB per file (default: {SHARD_MB:g}; choose more for hf://)"
    add("--shard_mb", type=float, default=SHARD_MB, help=size)
    return parser.parse_args(argv)


def prepare(args: argparse.Namespace) -> dict:
    """Runs or resumes the preparation. Returns the manifest. ValueError: the user's mistake."""
    problems = check_numbers(args, shard_mb=1e-6)
    if not 0 <= args.validation_fraction < 1:
        problems.append(f"validation_fraction: must be in [0, 1), is {args.validation_fraction}.")
    if problems:
        raise ValueError("\n".join(problems))
    folder, tokenizer = Folder(os.path.expanduser(args.output_dir)), load_tokenizer(args.tokenizer_name)
    corpora = open_text(args)
    preparation = Preparation(folder, corpora, TokenMaker(tokenizer), shard_mb=args.shard_mb)
    if "validation" not in corpora and args.validation_fraction:
        preparation.hold_out = hold_out_of(corpora["train"], args.validation_fraction, size=0, least=1)
    manifest = preparation.make()
    if "train" not in manifest["splits"]:
        preparation.empty()
        counts = Accounting(**manifest["accounting"].get("train", {}))
        raise ValueError(f"dataset_name: {corpora['train'].name} gives nothing to train on. Check keywords, "
                         f"or take more text: {counts.line()}.")
    print(f"{folder.url} is finished: {', '.join(manifest['splits'])}")
    return manifest


def open_text(args: argparse.Namespace) -> dict[str, Corpus]:
    """{"test", "validation", "train": Corpus}; a split other than train comes alone, as train."""
    source = replace(source_of(args), divide=args.validation_fraction > 0)
    train = open_corpus(source)
    names = ("test", "validation") if train.source.split == "train" else ()
    others = {name: open_corpus(replace(train.source, split=name)) for name in names if name in train.splits}
    return others | {"train": train}


@user_mistakes()
def main(argv: list[str] | None = None) -> None:
    """Exit status 0: done, 2: the user's mistake, 1: a source or a target that failed."""
    prepare(parse_args(argv))


if __name__ == "__main__":
    main()
