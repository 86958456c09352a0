"""Source -> filter -> duplicates -> tokens -> shards, from any source, to any fsspec URL.

    python -m data.prepare --dataset_name installed-python --tokenizer_name gpt2 --output_dir shards

Memory grows only by the hashes that find exact duplicates: about 12 bytes per document. It uses all cores.
After a kill the same command resumes, to the same bytes. A finished folder with damaged files is made again
whole.
"""

import argparse
import contextlib
import json
import os
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from filelock import FileLock, Timeout

from data.documents.filters import Accounting, HoldOut, few_to_hold_out
from data.documents.source import Corpus, add_source_flags, check_numbers, open_corpus, source_of
from data.tokens import importers
from data.tokens.preparation import NO_LIMIT, SHARD_MB, Preparation, TokenMaker
from data.tokens.shards import MANIFEST, NAME, PROGRESS, Shards, read_manifest
from data.tokens.tokenizer import load_tokenizer
from utils.io.mistakes import user_mistakes
from utils.io.retry import FIRST_CONTACT, bound_waiting, with_retries
from utils.io.urls import Folder, explained

OWN = rf"{PROGRESS}|tokenizer|{MANIFEST}|{NAME}|README\.md|\.gitattributes"  # names in the folder


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    about = __doc__.split("\n")[0]
    parser = argparse.ArgumentParser("python -m data.prepare", description=about, allow_abbrev=False)
    add = parser.add_argument
    add("--output_dir", required=True, help="folder or URL: s3://, hf://datasets/user/x (made, private), ...")
    add_source_flags(add)  # with the split train come the source's splits validation and test
    add("--tokenizer_name", help="Hub id or folder")
    share = "share of the documents, where the source has no validation split (default: 0.005; 0: none)"
    add("--validation_fraction", type=float, default=0.005, help=share)
    add("--seed", type=int, default=0, help="chooses validation documents (default: 0)")
    size = f"MB per file (default: {SHARD_MB:g}; choose more for hf://)"
    add("--shard_mb", type=float, default=SHARD_MB, help=size)
    return parser.parse_args(argv)


def check_args(args: argparse.Namespace) -> None:
    """ValueError with one line for each wrong value."""
    problems = check_numbers(args, shard_mb=1e-6, seed=0)
    if not args.tokenizer_name:
        problems.append("tokenizer_name: none given. `python -m data.tokens.tokenizer` makes one.")
    if importers.kind_of(args.dataset_name):
        problems.append(f"dataset_name: {args.dataset_name} holds token ids: use `python -m data.convert`.")
    if not 0 <= args.validation_fraction < 1:
        problems.append(f"validation_fraction: must be in [0, 1), is {args.validation_fraction}.")
    if problems:
        raise ValueError("\n".join(problems))


def prepare(args: argparse.Namespace) -> dict:
    """Runs or resumes the preparation, prints its accounting. Returns the manifest. ValueError: the user's
    mistake. ConnectionError: source or target stay away."""
    check_args(args)
    bound_waiting()
    folder, tokenizer = Folder(os.path.expanduser(args.output_dir)), load_tokenizer(args.tokenizer_name)
    corpora = with_retries(partial(open_text, args), f"opening {args.dataset_name}", FIRST_CONTACT)
    preparation = Preparation(folder, corpora, TokenMaker(tokenizer), shard_mb=args.shard_mb)
    if "validation" not in corpora and args.validation_fraction:
        held_out = args.seed, args.validation_fraction
        few = few_to_hold_out(corpora["train"], *held_out, wanted=0, least=1, unread=NO_LIMIT)
        preparation.hold_out = HoldOut(*held_out, frozenset(few))
    manifest = finished(preparation)
    with only_run(folder):
        if not manifest:
            with explained(folder.url, "written"):
                folder.make(FIRST_CONTACT)
                settings = json.dumps(preparation.settings, indent=1)
                folder.write(f"{PROGRESS}/settings.json", settings.encode(), FIRST_CONTACT)
            manifest = preparation.make()
    folder.remove(PROGRESS)
    if "train" not in manifest["splits"]:
        for name in folder.names():
            if name.endswith(".npy") or name in (MANIFEST, "tokenizer"):
                folder.remove(name)
        counts = Accounting(**manifest["accounting"].get("train", {}))
        raise ValueError(f"dataset_name: {corpora['train'].name} gives nothing to train on. Check keywords, "
                         f"or take more text: {counts.line()}.")
    for split, account in manifest["accounting"].items():
        print(f"{folder.url}, {split}: {Accounting(**account).line()}")
    return manifest


def open_text(args: argparse.Namespace) -> dict[str, Corpus]:
    """{"test", "validation", "train": Corpus}; a split other than train comes alone, as train."""
    source = replace(source_of(args, streaming=True), divide=args.validation_fraction > 0)
    train = open_corpus(source)
    names = ("test", "validation") if train.source.split == "train" else ()
    others = {name: open_corpus(replace(train.source, split=name)) for name in names if name in train.splits}
    return others | {"train": train}


def finished(preparation: Preparation) -> dict | None:
    """The manifest of a finished preparation; None if it must begin, resume, or be made again. ValueError
    where the folder holds something else, or a preparation with other settings."""
    folder, settings = preparation.folder, preparation.settings
    with explained(folder.url, "read"):
        names, manifest = folder.names(retries=FIRST_CONTACT), read_manifest(folder)
    if manifest:
        old = manifest["settings"]
    elif PROGRESS in names and "settings.json" in folder.names(PROGRESS):
        old = json.loads(folder.read(f"{PROGRESS}/settings.json"))
    elif not all(re.fullmatch(OWN, name) for name in names):
        raise ValueError(f"output_dir: {folder.url} is not empty and holds no shards. Name a new folder.")
    else:
        return None
    if old != json.loads(json.dumps(settings)):
        pairs = ((name, old.get(name), settings.get(name)) for name in {**settings, **old})
        changes = ", ".join(f"{name} {was!r}, now {now!r}" for name, was, now in pairs if was != now)
        raise ValueError(f"output_dir: {folder.url} holds a preparation with other settings "
                         f"({changes}). Name another folder, or delete this one.")
    if manifest:
        shards = Shards(folder.root, manifest) if folder.local else None
        problem = shards.check() if shards else ""
        print(f"{folder.url} is finished: {f'{problem}, all is made again' if problem else 'nothing to do'}")
        if problem:
            for name in names:
                folder.remove(name)
            return None
    return manifest


def only_run(folder: Folder):
    """Locks a local folder: two runs would write the same files. The lock ends with the process."""
    if not folder.local:
        return contextlib.nullcontext()
    progress = Path(folder.path(PROGRESS))
    with explained(folder.url, "written"):
        progress.mkdir(parents=True, exist_ok=True)
    try:
        return FileLock(progress / "lock").acquire(timeout=0)
    except Timeout as error:
        raise ValueError(f"output_dir: another run is preparing {folder.url}. Wait for it.") from error


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0 done, 2 the user's mistake, 1 a source or a target that failed."""
    try:
        with user_mistakes():
            prepare(parse_args(argv))
    except SystemExit as end:
        return end.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
