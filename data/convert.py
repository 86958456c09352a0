"""Token files of others -> token shards, once; nothing is tokenized again, no pickle is opened.

    python -m data.convert data/train.bin tokens/ --tokenizer_name openai-community/gpt2

SOURCE is a file, folder, glob or URL of .tfrecord files (transformers' Keras example for TPUs), .bin files of
nanoGPT, llm.c and modded-nanogpt, or .ds files of datatrove; a save_to_disk folder, parquet or json file with
sentence pairs; or a data set of the Hub that holds any of these. The words train, val and test in the
names of files or folders are splits. Every id is checked against the tokenizer, which must be the one that
made them. Then train on it: --dataset_name tokens/. Of a source without a split to evaluate on,
--validation_fraction 0.05 takes the last rows.
"""

import argparse
import itertools
import math
import os
import re
from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np

from data.documents.source import check_numbers
from data.tokens import importers
from data.tokens.encode import id_count, token_dtype
from data.tokens.shards import FORMAT, MANIFEST, NAME, SHARD_MB, SPLITS, finish, write_shards
from data.tokens.tokenizer import load_tokenizer
from utils.io.mistakes import user_mistakes
from utils.io.text import without_secrets
from utils.io.urls import Folder, explained


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m data.convert", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("source", help="files, folder, glob, URL or Hub id")
    add("output_dir", help="a new folder, or URL")
    add("--tokenizer_name", required=True, help="Hub id or folder of the tokenizer that made the ids")
    add("--dtype", choices=["uint8", "uint16", "uint32", "int32", "int64"],
        help="type of the ids where the file does not say (default: uint16)")
    add("--validation_fraction", type=float, default=0.0,
        help="share of the rows, the last ones, where there is only the split train (default: 0)")
    add("--shard_mb", type=float, default=SHARD_MB, help=f"MB per file (default: {SHARD_MB:g})")
    return parser.parse_args(argv)


def convert(args: argparse.Namespace) -> dict:
    """Writes the shards and returns their manifest. ValueError: the user's mistake."""
    problems = check_numbers(args, shard_mb=1e-6)
    if not 0 <= args.validation_fraction < 1:
        problems.append(f"validation_fraction: must be in [0, 1), is {args.validation_fraction}.")
    if problems:
        raise ValueError("\n".join(problems))
    source = os.path.expanduser(args.source)
    folder = Folder(os.path.expanduser(args.output_dir))
    with explained(folder.url, "read"):
        names = folder.names()
    if MANIFEST in names or not all(re.fullmatch(rf"tokenizer|{NAME}", name) for name in names):
        raise ValueError(f"{folder.url} is not empty: name a new folder.")
    tokenizer = load_tokenizer(args.tokenizer_name)
    read = partial(importers.read, source, args.dtype, tokenizer)
    imported = read()
    if args.validation_fraction and [*imported.splits] == ["train"]:
        rows = sum(map(len, read().splits["train"]))
        first = rows - math.ceil(args.validation_fraction * rows)
        imported.splits = {"train": _between(0, first, imported.splits["train"]),
                           "validation": _between(first, rows, read().splits["train"])}
    if other := {*imported.splits} - {*SPLITS}:
        raise ValueError(f"{args.source}: a split {sorted(other)[0]!r}; name splits {', '.join(SPLITS)}.")
    dtype, width, entries, accounting = token_dtype(tokenizer), imported.width, {}, {}
    with explained(folder.url, "written", (OSError,)):
        for split, arrays in imported.splits.items():
            name = f"{without_secrets(source)}, {split}"
            checked = _checked(arrays, id_count(tokenizer), dtype, imported.pairs, name)
            first = next(checked)
            arrays = itertools.chain([first], checked)
            entries[split] = write_shards(folder, split, arrays, dtype, width, args.shard_mb)
            tokens = sum(entry["tokens"] for entry in entries[split])
            begins = repr(tokenizer.decode(first[:30]))  # the reader sees whether these ids are text
            accounting[split] = {"bytes": 0, "tokens": tokens}
            print(f"{folder.url}, {split}: {tokens // width:,} {'tokens' if width == 1 else 'rows'} in "
                  f"{len(entries[split]):,} files; begins {begins}", flush=True)
        return finish(
            folder, tokenizer, entries, kind="pairs" if imported.pairs else "rows", width=width,
            dtype=str(dtype), lossy=False, accounting=accounting,
            settings={"format": FORMAT, "converted": without_secrets(source)},
        )  # fmt: skip


def _between(first: int, end: int, arrays: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """The rows first to end - 1 of these arrays."""
    done = 0
    for array in arrays:
        if len(rows := array[max(first - done, 0) : max(end - done, 0)]):
            yield rows
        done += len(array)


def _checked(arrays: Iterable[np.ndarray], known: int, dtype, pairs: bool, name: str) -> Iterator[np.ndarray]:
    """The same ids as dtype, flat. ValueError: the tokenizer lacks one of them."""
    done = 0
    for array in arrays:
        ids = array[:, :-3] if pairs else array
        if ids.size and not 0 <= ids.min() <= ids.max() < known:
            wrong = int(ids.max() if ids.max() >= known else ids.min())
            raise ValueError(f"{name}: the id {wrong} after {done:,} tokens, but the tokenizer has only "
                             f"{known} ids: name the tokenizer that made them, or another --dtype.")
        done += ids.size
        yield array.reshape(-1).astype(dtype)
    if not done:
        raise ValueError(f"{name}: no token.")


@user_mistakes()
def main(argv: list[str] | None = None) -> None:
    """Exit status 0: done, 2: the user's mistake, 1: a source or a target that failed."""
    convert(parse_args(argv))


if __name__ == "__main__":
    main()
