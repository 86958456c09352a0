"""Source -> filter -> duplicates -> tokens -> rows -> shards, in one pass over any source, to any fsspec URL.

    python -m data.prepare --dataset_name installed-python --tokenizer_name gpt2 --output_dir shards

The source is streamed: memory grows by 10 to 20 bytes per kept document only (the hashes that find exact
duplicates). Killed at any moment, the same command goes on from the last record in output_dir/progress, and
the files come out byte for byte as if nothing had happened. Token files (data/foreign.py) keep their rows.
"""

import argparse
import contextlib
import json
import sys
import tempfile
import traceback
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from data.filters import Accounting
from data.fim import fill_in_middle
from data.foreign import is_foreign, open_splits
from data.packing import token_dtype, tokenizer_fingerprint
from data.parts import HASHES, MADE, found_elsewhere, join_parts, lacking, read_hashes, summary
from data.records import Records, write_row_shards, write_token_shards
from data.shards import FORMAT, MANIFEST, PROGRESS
from data.sources.corpus import Corpus, add_source_flags, check_numbers, has_split, load_corpus, source_of
from data.sources.storage import FIRST_CONTACT, Folder, bound_waiting, explained, printable, with_retries
from data.tokenizer import load_tokenizer


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    about = __doc__.split("\n")[0]
    parser = argparse.ArgumentParser("python -m data.prepare", description=about, allow_abbrev=False)
    add = parser.add_argument
    add("--output_dir", required=True, help="folder or URL: s3://, hf://datasets/user/x (made, private), ...")
    add_source_flags(add)  # of the split train the source's validation and test come too
    add("--tokenizer_name", help="Hub id or folder")
    add("--block_size", type=int, default=1024, help="tokens per row (default: 1024)")
    add("--validation_fraction", type=float, default=0.005,
        help="of the documents, where the source has no validation split (default: 0.005; 0: none)")
    add("--seed", type=int, default=0, help="chooses validation documents, and cuts (default: 0)")
    add("--fim_rate", type=float, default=0.0, help="share of the documents to fill in (default: 0)")
    add("--shard_mb", type=float, default=64, help="before compression (default: 64; hf://: better more)")
    add("--parts", type=int, default=1, help="of a preparation on many machines (default: 1)")
    add("--part", type=int, help="this one: 0 to parts - 1")
    return parser.parse_args(argv)


def check_args(args: argparse.Namespace) -> None:
    """ValueError with one line for each value that cannot be."""
    problems = check_numbers(args, block_size=2, shard_mb=1e-6, seed=0, parts=1)
    if args.part not in ((None, 0) if args.parts == 1 else range(args.parts)):
        problems.append(f"part: must be 0 to {args.parts - 1}, one less than parts, is {args.part}.")
    if not args.tokenizer_name:
        problems.append("tokenizer_name: none given. `python -m data.tokenizer` makes one.")
    if not 0 <= args.fim_rate <= 1:
        problems.append(f"fim_rate: must be 0 (off) to 1, is {args.fim_rate}.")
    of_text = args.keywords or args.fim_rate or args.split != "train" or args.parts > 1
    if of_text and is_foreign(args.dataset_name):
        problems.append("dataset_name: tokens have no text, leave out keywords, split, fim_rate, parts.")
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
    if is_foreign(args.dataset_name):
        write = write_row_shards
        splits, settings = open_splits(args.dataset_name, args.block_size, tokenizer)
    else:
        fill_in_middle(args.fim_rate, args.seed, tokenizer)  # its mistakes, before any work
        write, what = write_token_shards, f"opening {args.dataset_name}"
        splits, settings = with_retries(partial(open_text, args), what, FIRST_CONTACT)
    settings |= {"format": FORMAT, "shard_mb": args.shard_mb, "tokenizer": tokenizer_fingerprint(tokenizer),
                 "block_size": args.block_size}
    if manifest := finished_manifest(folder, settings):
        print(f"{folder.url} is finished: nothing to do")
    else:
        with _only_run(folder, wait=-(args.parts > 1)):
            with explained(folder.url, "written"):
                folder.make(FIRST_CONTACT)
                content = json.dumps(settings, indent=1).encode()
                folder.write(f"{PROGRESS}/settings.json", content, FIRST_CONTACT)
            if args.parts == 1:
                write(splits, tokenizer, records := Records(folder), settings)
                manifest = finish(settings, tokenizer, records)
        if args.parts > 1:
            manifest = prepare_part(args, settings, splits, tokenizer, folder)
    if not manifest:
        return None
    folder.remove(PROGRESS)
    for split, account in manifest["accounting"].items():
        if account["read"] or account["rows"]:
            shards = len(manifest["splits"][split]["shards"])
            print(Accounting(**account).table(f"{folder.url}, {split}: {shards} shards"))
    return manifest


def open_text(args: argparse.Namespace) -> tuple[dict[str, Corpus], dict[str, Any]]:
    """{"test", "validation", "train": Corpus}, so that what is evaluated on is known when training documents
    come (of another split than train only that, as train), and the settings that shape their shards."""
    source = replace(source_of(args, streaming=True), part=(args.part or 0, args.parts))
    names = ("test", "validation") if source.split == "train" else ()
    splits = {name: load_corpus(replace(source, split=name)) for name in names if has_split(source, name)}
    splits["train"] = corpus = load_corpus(source)
    settings = {
        "dataset_name": corpus.name, "dataset_config_name": args.dataset_config_name, "split": args.split,
        "content": {name: corpus.fingerprint for name, corpus in splits.items()},
        "text_column": corpus.text_column, "keywords": corpus.keywords,
        "validation_fraction": args.validation_fraction, "seed": args.seed,
    }  # fmt: skip
    more = {"fim_rate": args.fim_rate, "parts": args.parts if args.parts > 1 else 0}
    return splits, settings | {name: value for name, value in more.items() if value}


def finished_manifest(folder: Folder, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The manifest if this preparation is finished, None if it is to begin or to go on. ValueError when
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


def prepare_part(args, settings: dict[str, Any], splits, tokenizer, folder: Folder) -> dict[str, Any] | None:
    """One part, as far as it gets; the manifest, where all are done."""
    place = f"part-{args.part:05d}/"

    def make_shards() -> bytes:
        records = Records(folder, place, found_elsewhere(folder, args.part, args.parts))
        write_token_shards(splits, tokenizer, records, settings)
        return summary(records)

    with _only_run(folder, place):
        for done, kind, work in ("read", HASHES, partial(read_hashes, splits)), ("made", MADE, make_shards):
            if args.part in lacking(folder, kind, args.parts):
                data = work()
                finished_manifest(folder, settings)  # of two that began at once with others only one is right
                folder.write(kind.format(args.part), data)
            if left := lacking(folder, kind, args.parts):
                if not (manifest := finished_manifest(folder, settings)):
                    print(f"part {args.part} is {done}. The same command goes on when these are:", *left)
                return manifest
    with contextlib.suppress(FileNotFoundError), _only_run(folder, wait=-1):
        return finish(settings, tokenizer, join_parts(folder, settings, token_dtype(tokenizer)))
    return finished_manifest(folder, settings)  # another one has just written it


def finish(settings: dict[str, Any], tokenizer, records: Records) -> dict[str, Any]:
    """The manifest, written last. ValueError where there is nothing to train on."""
    folder, shards = records.folder, records.shards
    if not shards["train"]:
        for name in {PROGRESS, *(shard["file"].split("/")[0] for shard in sum(shards.values(), []))}:
            folder.remove(name)
        raise ValueError(f"dataset_name: {settings['dataset_name']} gives nothing to train on. Check "
                         f"keywords, or take more text.\n{records.counts['train'].table()}")
    with tempfile.TemporaryDirectory() as temporary:
        for file in sorted(tokenizer.save_pretrained(temporary)):
            folder.write(f"tokenizer/{Path(file).name}", Path(file).read_bytes())
    manifest = {"format": FORMAT, "block_size": settings["block_size"], "dtype": str(token_dtype(tokenizer))}
    manifest |= {name: settings[name] for name in ("tokenizer", "whole") if name in settings}
    manifest |= {"settings": settings, "splits": {}, "accounting": {}}
    for split, account in records.accounts().items():
        manifest["splits"][split] = {"rows": account.rows, "shards": shards[split]}
        manifest["accounting"][split] = asdict(account)
    folder.write(MANIFEST, json.dumps(manifest, indent=1).encode())
    return manifest


def _only_run(folder: Folder, part: str = "", wait: float = 0):
    """Two runs at once would write the same files. The lock ends with the process; local disks only."""
    if not folder.local:
        return contextlib.nullcontext()
    progress = Path(folder.path(f"{PROGRESS}/{part}"))
    with explained(folder.url, "written"):
        progress.mkdir(parents=True, exist_ok=True)
    try:
        return FileLock(progress / "lock").acquire(timeout=wait)
    except Timeout as error:
        raise ValueError(f"output_dir: another run is preparing {folder.url}. Wait for it.") from error


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 done, 2 the user's mistake, 1 a source or a target that failed."""
    try:
        prepare(parse_args(argv))
    except OSError as error:
        print(printable(f"error: {error}\nThe same command goes on where this one stopped."), file=sys.stderr)
        return 1
    except ValueError as error:
        here, raised = Path(__file__).parent, traceback.extract_tb(error.__traceback__)[-1].filename
        if not Path(raised).is_relative_to(here):
            raise  # a library's: keep its traceback
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
