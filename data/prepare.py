"""Source -> filter -> duplicates -> tokens -> shards, from any source, to any fsspec URL.

    python -m data.prepare --dataset_name installed-python --tokenizer_name gpt2 --output_dir shards

Memory grows only by the hashes that find exact duplicates: about 12 bytes per document. After a kill the
same command resumes, to the same bytes. In a finished folder it makes lost and damaged files again.

On many machines, --parts 64 --part 7 makes every 64th unit of the source (usually a file) or, where it has
fewer units, every 64th chunk. Each part first writes the hashes of its documents. Once all parts have done
so, each knows which of its documents another part has, too, and makes its chunks. The part that finishes last
writes the manifest, the same as that of one preparation.
"""

import argparse
import contextlib
import io
import json
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout

from data.filters import Accounting, Facts, SeenHashes
from data.fim import fill_in_middle
from data.preparation import SHARD_MB, Preparation, TokenMaker, key_of, named
from data.shards import MANIFEST, PROGRESS, finished_manifest
from data.sources.corpus import Corpus, add_source_flags, check_numbers, load_corpus, source_of
from data.token_files import holds_token_files
from data.tokenizer import load_tokenizer
from utils.io.mistakes import user_mistakes
from utils.io.retry import FIRST_CONTACT, bound_waiting, with_retries
from utils.io.urls import Folder, explained

OWN = rf"{PROGRESS}|tokenizer|{MANIFEST}|[a-z]+-[\d-]+\.npy|README\.md|\.gitattributes"  # names in the folder
HASHES, MADE = PROGRESS + "/hashes-{:05d}.npz", PROGRESS + "/part-{:05d}.json"  # written by a part


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    about = __doc__.split("\n")[0]
    parser = argparse.ArgumentParser("python -m data.prepare", description=about, allow_abbrev=False)
    add = parser.add_argument
    add("--output_dir", required=True, help="folder or URL: s3://, hf://datasets/user/x (made, private), ...")
    add_source_flags(add)  # with the split train come the source's splits validation and test
    add("--tokenizer_name", help="Hub id or folder")
    share = "share of the documents, where the source has no validation split (default: 0.005; 0: none)"
    add("--validation_fraction", type=float, default=0.005, help=share)
    add("--seed", type=int, default=0, help="chooses validation documents and FIM cuts (default: 0)")
    add("--fim_rate", type=float, default=0.0, help="share of the documents to fill in (default: 0)")
    size = f"MB per file (default: {SHARD_MB:g}; choose more for hf://)"
    add("--shard_mb", type=float, default=SHARD_MB, help=size)
    add("--parts", type=int, default=1, help="number of parts, one per machine or job (default: 1)")
    add("--part", type=int, help="number of this part: 0 to parts - 1")
    return parser.parse_args(argv)


def check_args(args: argparse.Namespace) -> None:
    """ValueError with one line for each wrong value."""
    problems = check_numbers(args, shard_mb=1e-6, seed=0, parts=1)
    if args.part not in ((None, 0) if args.parts == 1 else range(args.parts)):
        problems.append(f"part: must be 0 to {args.parts - 1} (parts - 1), is {args.part}.")
    if not args.tokenizer_name:
        problems.append("tokenizer_name: none given. `python -m data.tokenizer` makes one.")
    if not 0 <= args.fim_rate <= 1:
        problems.append(f"fim_rate: must be 0 (off) to 1, is {args.fim_rate}.")
    if holds_token_files(args.dataset_name):
        problems.append(f"dataset_name: {args.dataset_name} holds tokens already: train on it as it is.")
    if not 0 <= args.validation_fraction < 1:
        problems.append(f"validation_fraction: must be in [0, 1), is {args.validation_fraction}.")
    if problems:
        raise ValueError("\n".join(problems))


def prepare(args: argparse.Namespace) -> dict | None:
    """Runs or resumes the preparation, prints its accounting. Returns the manifest, or None for a part while
    others are missing. ValueError: the user's mistake. ConnectionError: source or target stay away."""
    check_args(args)
    bound_waiting()
    folder, tokenizer = Folder(args.output_dir), load_tokenizer(args.tokenizer_name)
    maker = TokenMaker(tokenizer, fill_in_middle(args.fim_rate, args.seed, tokenizer))
    corpora = with_retries(partial(open_text, args), f"opening {args.dataset_name}", FIRST_CONTACT)
    held_out = args.seed, 0.0 if "validation" in corpora else args.validation_fraction
    preparation = Preparation(folder, corpora, maker, held_out, shard_mb=args.shard_mb)
    finished = earlier_manifest(preparation, args.parts)
    in_parts = args.parts > 1 and not finished
    with only_run(folder, "lock", wait=-1 if finished or in_parts else 0):
        if not finished:
            with explained(folder.url, "written"):
                folder.make(FIRST_CONTACT)
                settings = json.dumps(preparation.settings | {"parts": args.parts}, indent=1)
                folder.write(f"{PROGRESS}/settings.json", settings.encode(), FIRST_CONTACT)
        manifest = None if in_parts else preparation.complete()
    if in_parts:
        with only_run(folder, f"lock-{args.part}", wait=0):
            manifest = prepare_part(preparation, args.part, args.parts)
    if manifest is None:
        return None
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
    source = source_of(args, streaming=True)
    train, names = load_corpus(source), ("test", "validation") if source.split == "train" else ()
    others = {name: load_corpus(replace(source, split=name)) for name in names if name in train.splits}
    return others | {"train": train}


def earlier_manifest(preparation: Preparation, parts: int) -> dict | None:
    """The manifest of a finished preparation; None if it must begin or resume. ValueError where the folder
    holds something else, or a preparation with other settings."""
    folder, settings = preparation.folder, preparation.settings
    with explained(folder.url, "read"):
        names = folder.names(retries=FIRST_CONTACT)
    manifest = finished_manifest(folder) if MANIFEST in names else None
    if manifest:
        old = manifest.get("settings", {})
    elif PROGRESS in names and "settings.json" in folder.names(PROGRESS):
        old = json.loads(folder.read(f"{PROGRESS}/settings.json"))
        settings |= {"parts": parts}
    elif not all(re.fullmatch(OWN, name) for name in names):
        raise ValueError(f"output_dir: {folder.url} is not empty and holds no shards. Name a new folder.")
    else:
        return None
    if old != settings:
        pairs = ((name, old.get(name), settings.get(name)) for name in {**settings, **old})
        changes = ", ".join(f"{name} {was!r}, now {now!r}" for name, was, now in pairs if was != now)
        raise ValueError(f"output_dir: {folder.url} holds a preparation with other settings "
                         f"({changes}). Name another folder, or delete this one.")
    return manifest


def only_run(folder: Folder, name: str, wait: float):
    """Locks a local folder: two runs would write the same files. The lock ends with the process."""
    if not folder.local:
        return contextlib.nullcontext()
    progress = Path(folder.path(PROGRESS))
    with explained(folder.url, "written"):
        progress.mkdir(parents=True, exist_ok=True)
    try:
        return FileLock(progress / name).acquire(timeout=wait)
    except Timeout as error:
        raise ValueError(f"output_dir: another run is preparing {folder.url}. Wait for it.") from error


# ---- In parts


def prepare_part(preparation: Preparation, part: int, parts: int) -> dict | None:
    """Does what one part can do now. Returns the manifest once all parts are done."""
    folder = preparation.folder
    for state, kind, work in ("read", HASHES, read_hashes), ("made", MADE, make_chunks):
        if part in lacking(folder, kind, parts):
            content = work(preparation, part, parts)
            earlier_manifest(preparation, parts)  # ValueError: another part has begun with other settings
            folder.write(kind.format(part), content)
        if others := lacking(folder, kind, parts):
            if not (manifest := earlier_manifest(preparation, parts)):
                print(f"part {part} is {state}. Run the same command again when these are:", *others)
            return manifest
    with contextlib.suppress(FileNotFoundError), only_run(folder, "lock", wait=-1):
        if not earlier_manifest(preparation, parts):
            preparation.resume()
            return preparation.finish()
    return earlier_manifest(preparation, parts)  # another part has just written it


def lacking(folder: Folder, kind: str, parts: int) -> list[int]:
    """The parts whose file of this kind is missing."""
    names = folder.names(PROGRESS)
    return [part for part in range(parts) if kind.format(part).split("/")[1] not in names]


def read_hashes(preparation: Preparation, part: int, parts: int) -> bytes:
    """The file HASHES: of each chunk of the part an array of its Facts."""
    facts, data = {}, io.BytesIO()
    for split, corpus in preparation.corpora.items():
        units = len(corpus.readers)
        for unit in range(part, units, parts) if units >= parts else range(units):
            for key, chunk in preparation.chunks(split, unit, SeenHashes()):
                chunk.skip_rest()
                if units >= parts or (unit + key[2]) % parts == part:
                    facts[named(key)] = np.array([chunk.counts.read, chunk.last, *chunk.hashes], np.uint64)
    np.savez(data, **facts)
    return data.getvalue()


def make_chunks(preparation: Preparation, part: int, parts: int) -> bytes:
    """Makes the chunks of the part; of other parts' hashes it keeps only those of its own documents. Returns
    the content of MADE."""

    def facts_of(part: int) -> dict[str, Facts]:
        with np.load(io.BytesIO(preparation.folder.read(HASHES.format(part)))) as arrays:
            return {name: Facts(int(array[0]), bool(array[1]), array[2:]) for name, array in arrays.items()}

    hashes = [facts.hashes for facts in facts_of(part).values()]
    own = np.unique(np.concatenate([np.empty(0, np.uint64), *hashes]))
    for other in set(range(parts)) - {part}:
        for name, facts in facts_of(other).items():
            shared = np.intersect1d(facts.hashes, own)
            preparation.other_parts[key_of(name)] = facts._replace(hashes=shared)
    preparation.resume()
    preparation.run()
    return b"{}"


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
