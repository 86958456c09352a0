"""Converts the token files of other projects to token shards. It opens no pickle.

    python -m data.convert data/train.bin tokens/ --tokenizer_name openai-community/gpt2

SOURCE is a file, folder, glob or URL of .tfrecord files (transformers' Keras example for TPUs), .bin files
(nanoGPT, llm.c, modded-nanogpt) or .ds files (datatrove); a save_to_disk folder, parquet or json file with
sentence pairs; or a Hub dataset that holds any of these. The words train, val and test in the names of files
or folders are splits. Without a validation split, --validation_fraction 0.05 holds out the last rows. The
tokenizer must be the one that made the ids; all are checked. Then train on them: --dataset_name tokens/.
"""

import argparse
import itertools
import math
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from functools import partial

import numpy as np

from data.documents.names import is_files, list_files, suffix
from data.documents.source import check_numbers
from data.tokens.encode import id_count, token_dtype
from data.tokens.importers import Imported
from data.tokens.importers.flat import DTYPES, open_flat
from data.tokens.importers.pairs import open_pairs
from data.tokens.importers.tfrecord import open_tfrecords
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
    add("--dtype", choices=list(DTYPES), help="type of the ids in files without a header (default: uint16)")
    add("--validation_fraction", type=float, default=0.0,
        help="share of the rows, the last ones, to hold out if train is the only split (default: 0)")
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
    import_tokens = partial(open_token_files, source, args.dtype, tokenizer)
    imported = import_tokens()
    if args.validation_fraction and [*imported.splits] == ["train"]:
        n_rows = sum(map(len, import_tokens().splits["train"]))
        first = n_rows - math.ceil(args.validation_fraction * n_rows)
        imported.splits = {"train": _slice_rows(imported.splits["train"], 0, first),
                           "validation": _slice_rows(import_tokens().splits["train"], first, n_rows)}
    if other := {*imported.splits} - {*SPLITS}:
        raise ValueError(f"{args.source}: split {min(other)!r} is none of {', '.join(SPLITS)}: leave it out.")
    dtype, width, entries, accounting = token_dtype(tokenizer), imported.width, {}, {}
    with explained(folder.url, "written", (OSError,)):
        for split, arrays in imported.splits.items():
            name = f"{without_secrets(source)}, {split}"
            checked = _check_ids(arrays, id_count(tokenizer), dtype, imported.pairs, name)
            first = next(checked)
            arrays = itertools.chain([first], checked)
            entries[split] = write_shards(folder, split, arrays, dtype, width, args.shard_mb)
            tokens = sum(entry["tokens"] for entry in entries[split])
            text = repr(tokenizer.decode(first[:30]))  # nonsense if another tokenizer made the ids
            accounting[split] = {"bytes": 0, "tokens": tokens}
            print(f"{folder.url}, {split}: {tokens // width:,} {'tokens' if width == 1 else 'rows'} in "
                  f"{len(entries[split]):,} files; the text begins {text}", flush=True)
        return finish(
            folder, tokenizer, entries, kind="pairs" if imported.pairs else "rows", width=width,
            dtype=str(dtype), lossy=False, accounting=accounting,
            settings={"format": FORMAT, "converted": without_secrets(source)},
        )  # fmt: skip


def open_token_files(name: str, dtype: str | None, tokenizer) -> Imported:
    """The token ids of a source. A source without token files is read as a dataset of sentence pairs."""
    url, context = name, nullcontext()
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not os.path.exists(name):
        url, context = f"hf://datasets/{name}", explained(f"{name} (no file here, and on the Hub)", "read")
    with context:
        endings = {suffix(url), *map(suffix, list_files(url)[2] if is_files(url) else ())}
    if endings & {".tfrecord", ".tfrecords"}:
        return open_tfrecords(url)
    if endings & {".bin", ".ds"}:
        return open_flat(url, dtype, tokenizer.eos_token_id)
    return open_pairs(name, tokenizer.pad_token_id or 0)


def _slice_rows(arrays: Iterable[np.ndarray], first: int, end: int) -> Iterator[np.ndarray]:
    """Rows first to end - 1 of the concatenation of these arrays."""
    done = 0
    for array in arrays:
        if len(rows := array[max(first - done, 0) : max(end - done, 0)]):
            yield rows
        done += len(array)


def _check_ids(arrays: Iterable[np.ndarray], n_ids: int, dtype, pairs: bool, name: str) -> Iterator:
    """The arrays, flat, as dtype. ValueError: an id is outside [0, n_ids), or there is none."""
    done = 0
    for array in arrays:
        ids = array[:, :-3] if pairs else array
        if ids.size and not 0 <= ids.min() <= ids.max() < n_ids:
            wrong = int(ids.max() if ids.max() >= n_ids else ids.min())
            raise ValueError(f"{name}: the id {wrong} after {done:,} tokens, but the tokenizer has only "
                             f"{n_ids} ids: name the tokenizer that made them, or another --dtype.")
        done += ids.size
        yield array.reshape(-1).astype(dtype)
    if not done:
        raise ValueError(f"{name} holds no tokens.")


@user_mistakes()
def main(argv: list[str] | None = None) -> None:
    """Exit status 0: done, 2: the user's mistake, 1: a source or a target that failed."""
    convert(parse_args(argv))


if __name__ == "__main__":
    main()
