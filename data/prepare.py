"""Source -> filter -> duplicates -> tokens -> shards, from any source, to any fsspec URL.

    python -m data.prepare --dataset_name installed-python --tokenizer_name gpt2 --output_dir shards

The source is streamed: memory grows by 10 to 20 bytes per kept document only (the hashes that find exact
duplicates). Killed at any moment, the same command resumes, and the files come out byte for byte as if
nothing had happened; where files of a finished folder are lost or damaged, it makes them again. Rows of any
length can be cut from shards, so there is no block_size. """

import argparse
import contextlib
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from data.encode import tokenizer_fingerprint
from data.factory import PROGRESS, SHARD_MB, Factory, TokenMaker
from data.filters import Accounting
from data.fim import fill_in_middle
from data.foreign import is_foreign
from data.parts import HASHES, MADE, Elsewhere, lacking, read_hashes
from data.shards import FORMAT, MANIFEST, complete, write_manifest
from data.sources.corpus import Corpus, add_source_flags, check_numbers, has_split, load_corpus, source_of
from data.tokenizer import load_tokenizer
from utils.io.mistakes import user_mistakes
from utils.io.retry import FIRST_CONTACT, bound_waiting, with_retries
from utils.io.urls import Folder, explained


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    about = __doc__.split("\n")[0]
    parser = argparse.ArgumentParser("python -m data.prepare", description=about, allow_abbrev=False)
    add = parser.add_argument
    add("--output_dir", required=True, help="folder or URL: s3://, hf://datasets/user/x (made, private), ...")
    add_source_flags(add)  # of the split train the source's validation and test come too
    add("--tokenizer_name", help="Hub id or folder")
    add("--validation_fraction", type=float, default=0.005,
        help="of the documents, where the source has no validation split (default: 0.005; 0: none)")
    add("--seed", type=int, default=0, help="chooses validation documents, and cuts (default: 0)")
    add("--fim_rate", type=float, default=0.0, help="share of the documents to fill in (default: 0)")
    size = f"of a file (default: {SHARD_MB:g}; hf://: better more)"
    add("--shard_mb", type=float, default=SHARD_MB, help=size)
    add("--parts", type=int, default=1, help="of a preparation on many machines (default: 1)")
    add("--part", type=int, help="this one: 0 to parts - 1")
    return parser.parse_args(argv)


def check_args(args: argparse.Namespace) -> None:
    """ValueError with one line for each value that cannot be."""
    problems = check_numbers(args, shard_mb=1e-6, seed=0, parts=1)
    if args.part not in ((None, 0) if args.parts == 1 else range(args.parts)):
        problems.append(f"part: must be 0 to {args.parts - 1}, one less than parts, is {args.part}.")
    if not args.tokenizer_name:
        problems.append("tokenizer_name: none given. `python -m data.tokenizer` makes one.")
    if not 0 <= args.fim_rate <= 1:
        problems.append(f"fim_rate: must be 0 (off) to 1, is {args.fim_rate}.")
    if is_foreign(args.dataset_name):
        problems.append(f"dataset_name: {args.dataset_name} holds tokens already: train on it as it is.")
    if not 0 <= args.validation_fraction < 1:
        problems.append(f"validation_fraction: must be in [0, 1), is {args.validation_fraction}.")
    if problems:
        raise ValueError("\n".join(problems))


def prepare(args: argparse.Namespace) -> dict[str, Any] | None:
    """Runs or resumes the preparation, prints its accounting and returns the manifest; None of a part while
    others are to come. ValueError for a user's mistake, ConnectionError when source or target stay away."""
    check_args(args)
    bound_waiting()
    folder, tokenizer = Folder(args.output_dir), load_tokenizer(args.tokenizer_name)
    maker = TokenMaker(tokenizer, fill_in_middle(args.fim_rate, args.seed, tokenizer))
    corpora = with_retries(partial(open_text, args), f"opening {args.dataset_name}", FIRST_CONTACT)
    settings = settings_of(args, corpora, tokenizer)
    held_out = args.seed, 0.0 if "validation" in corpora else args.validation_fraction
    part = args.part or 0, args.parts
    factory = Factory(folder, corpora, maker, held_out, shard_mb=args.shard_mb, part=part)
    check = partial(check_made, factory)
    finished = finished_manifest(folder, settings)
    with _only_run(folder, wait=-(args.parts > 1)):
        if not finished:
            with explained(folder.url, "written"):
                folder.make(FIRST_CONTACT)
                content = json.dumps(settings, indent=1).encode()
                folder.write(f"{PROGRESS}/settings.json", content, FIRST_CONTACT)
        if finished or args.parts == 1:
            whole = replace(factory, part=(0, 1))
            manifest = complete(whole, tokenizer, settings, check)
            if finished == manifest:
                print(f"{folder.url} is finished: nothing to do")
    if not finished and args.parts > 1:
        manifest = prepare_part(factory, settings, tokenizer, check)
    if manifest:
        folder.remove(PROGRESS)
        for split, account in manifest["accounting"].items():
            print(f"{folder.url}, {split}: {Accounting(**account).line()}")
    return manifest


def open_text(args: argparse.Namespace) -> dict[str, Corpus]:
    """{"test", "validation", "train": Corpus}; of another split than train only that, as train."""
    source = source_of(args, streaming=True)
    names = ("test", "validation") if source.split == "train" else ()
    splits = {name: load_corpus(replace(source, split=name)) for name in names if has_split(source, name)}
    return splits | {"train": load_corpus(source)}


def settings_of(args: argparse.Namespace, corpora: dict[str, Corpus], tokenizer) -> dict[str, Any]:
    """What shapes the shards. The number of parts does not."""
    corpus = corpora["train"]
    return {
        "dataset_name": corpus.name, "dataset_config_name": args.dataset_config_name, "split": args.split,
        "content": {name: corpus.fingerprint for name, corpus in corpora.items()},
        "text_column": corpus.text_column, "keywords": corpus.keywords,
        "validation_fraction": args.validation_fraction, "seed": args.seed, "fim_rate": args.fim_rate,
        "format": FORMAT, "shard_mb": args.shard_mb, "tokenizer": tokenizer_fingerprint(tokenizer),
    }  # fmt: skip


def finished_manifest(folder: Folder, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The manifest if this preparation is finished, None if it is to begin or to resume. ValueError when
    something else lies there, or a preparation with other settings."""
    with explained(folder.url, "read"):
        names = folder.names(tries=FIRST_CONTACT)
    manifest = json.loads(folder.read(MANIFEST)) if MANIFEST in names else None
    if manifest:
        old = manifest.get("settings", {})
    elif PROGRESS in names and "settings.json" in folder.names(PROGRESS):
        old = json.loads(folder.read(f"{PROGRESS}/settings.json"))
    elif set(names) - {PROGRESS, "README.md", ".gitattributes"}:
        raise ValueError(f"output_dir: {folder.url} is not empty and holds no shards. Name a new folder.")
    else:
        return None
    if old != settings:
        pairs = ((name, old.get(name), settings.get(name)) for name in {**settings, **old})
        changes = ", ".join(f"{name} {was!r}, now {now!r}" for name, was, now in pairs if was != now)
        raise ValueError(f"output_dir: {folder.url} holds a preparation with other settings "
                         f"({changes}). Name another folder, or delete this one.")
    return manifest


def prepare_part(factory: Factory, settings: dict[str, Any], tokenizer, check) -> dict[str, Any] | None:
    """One part, as far as it gets; the manifest, where all are done."""
    folder, (part, parts) = factory.folder, factory.part
    for name in folder.names(PROGRESS):
        if name.startswith("parts-") and name != f"parts-{parts}":
            raise ValueError(f"parts: {folder.url} is being prepared in {name[6:]}, now {parts}.")
    folder.write(f"{PROGRESS}/parts-{parts}", b"")

    def make_chunks() -> bytes:
        factory.known = Elsewhere(factory)
        factory.resume()
        factory.run()
        return b"{}"

    with _only_run(folder, f"lock-{part}"):
        for done, kind, work in ("read", HASHES, partial(read_hashes, factory)), ("made", MADE, make_chunks):
            if part in lacking(folder, kind, parts):
                content = work()
                finished_manifest(folder, settings)  # of two that began at once with others only one is right
                folder.write(kind.format(part), content)
            if left := lacking(folder, kind, parts):
                if not (manifest := finished_manifest(folder, settings)):
                    print(f"part {part} is {done}. Run the same command again when these are:", *left)
                return manifest
    with contextlib.suppress(FileNotFoundError), _only_run(folder, wait=-1):
        if not finished_manifest(folder, settings):
            factory.resume()
            return write_manifest(factory, tokenizer, settings, check)
    return finished_manifest(folder, settings)  # another one has just written it


def check_made(factory: Factory, made: dict) -> None:
    """ValueError where there is nothing to train on; then nothing stays."""
    if made["splits"].get("train", {"tokens": 0})["tokens"]:
        return
    folder = factory.folder
    for name in [PROGRESS, *(file["file"] for split in made["splits"].values() for file in split["files"])]:
        folder.remove(name)
    counts = Accounting(**made["accounting"].get("train", {}))
    raise ValueError(f"dataset_name: {factory.corpora['train'].name} gives nothing to train on. Check "
                     f"keywords, or take more text: {counts.line()}.")


def _only_run(folder: Folder, name: str = "lock", wait: float = 0):
    """Two runs at once would write the same files. The lock ends with the process; local disks only."""
    if not folder.local:
        return contextlib.nullcontext()
    progress = Path(folder.path(PROGRESS))
    with explained(folder.url, "written"):
        progress.mkdir(parents=True, exist_ok=True)
    try:
        return FileLock(progress / name).acquire(timeout=wait)
    except Timeout as error:
        raise ValueError(f"output_dir: another run is preparing {folder.url}. Wait for it.") from error


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 done, 2 the user's mistake, 1 a source or a target that failed."""
    try:
        with user_mistakes():
            prepare(parse_args(argv))
    except SystemExit as end:
        return end.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
