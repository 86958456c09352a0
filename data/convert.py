"""Token files of others -> token shards, once; nothing is tokenized again, no pickle is opened.

    python -m data.convert data/train.bin tokens/ --tokenizer_name openai-community/gpt2

SOURCE is a file, folder, glob or URL of .tfrecord files (transformers' Keras example for TPUs), .bin files of
nanoGPT, llm.c and modded-nanogpt, or .ds files of datatrove; a save_to_disk folder, parquet or json file with
sentence pairs; or a data repository of the Hub that holds any of these. The words train, val and test in the
names of files or folders are splits. Every id is checked against the tokenizer, which must be the one that
made them. Then train on it: --dataset_name tokens/.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Iterable

import numpy as np

from data.documents.source import check_numbers
from data.tokens import importers
from data.tokens.encode import id_count, token_dtype, tokenizer_fingerprint
from data.tokens.preparation import SHARD_MB, SPLITS, save_tokenizer
from data.tokens.shards import FORMAT, MANIFEST, NAME, write_shard
from data.tokens.tokenizer import load_tokenizer
from utils.io.mistakes import user_mistakes
from utils.io.secrets import without_secrets
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
    add("--shard_mb", type=float, default=SHARD_MB, help=f"MB per file (default: {SHARD_MB:g})")
    return parser.parse_args(argv)


def convert(args: argparse.Namespace) -> dict:
    """Writes the shards and returns their manifest. ValueError: the user's mistake."""
    if problems := check_numbers(args, shard_mb=1e-6):
        raise ValueError("\n".join(problems))
    source = repository(os.path.expanduser(args.source))
    folder = Folder(os.path.expanduser(args.output_dir))
    with explained(folder.url, "read"):
        names = folder.names()
    if MANIFEST in names or not all(re.fullmatch(rf"tokenizer|{NAME}", name) for name in names):
        raise ValueError(f"{folder.url} is not empty: name a new folder.")
    tokenizer = load_tokenizer(args.tokenizer_name)
    imported = importers.find(source).read(source, args.dtype, tokenizer)
    if other := {*imported.splits} - {*SPLITS}:
        raise ValueError(f"{args.source}: a split {sorted(other)[0]!r}; name splits {', '.join(SPLITS)}.")
    dtype, splits, known = token_dtype(tokenizer), {}, id_count(tokenizer)
    most = int(args.shard_mb * 1e6) // dtype.itemsize // imported.width * imported.width or imported.width
    with explained(folder.url, "written", (OSError,)):
        for split, arrays in imported.splits.items():
            checked = _checked(arrays, known, dtype, imported, f"{without_secrets(source)}, {split}")
            files = [write_shard(folder, f"{split}-{number:05d}.npy", ids)
                     for number, ids in enumerate(_in_files(checked, most))]
            splits[split] = {"tokens": sum(file["tokens"] for file in files), "files": files}
            print(f"{folder.url}, {split}: {splits[split]['tokens'] // imported.width:,} "
                  f"{'tokens' if imported.width == 1 else 'rows'} in {len(files):,} files", flush=True)
        manifest = {
            "format": FORMAT, "kind": "pairs" if imported.pairs else "rows", "width": imported.width,
            "dtype": str(dtype), "tokenizer": tokenizer_fingerprint(tokenizer), "lossy": False,
            "settings": {"format": FORMAT, "converted": without_secrets(source)}, "splits": splits,
            "accounting": {split: {"bytes": 0, "tokens": found["tokens"]} for split, found in splits.items()},
        }  # fmt: skip
        save_tokenizer(folder, tokenizer)
        folder.write(MANIFEST, json.dumps(manifest, indent=1).encode())
    return manifest


def repository(source: str) -> str:
    """The URL of a data repository of the Hub that holds token files; others as they are."""
    if not os.path.exists(source) and re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        url = f"hf://datasets/{source}"
        with explained(f"{source} (no file here, and on the Hub)", "read"):
            return url if importers.kind_of(url) else source
    return source


def _checked(arrays: Iterable[np.ndarray], known: int, dtype, imported, name: str) -> Iterable[np.ndarray]:
    """The same ids as dtype, flat. ValueError: the tokenizer lacks one of them."""
    done = 0
    for array in arrays:
        ids = array[:, :-3] if imported.pairs else array
        if ids.size and not 0 <= ids.min() <= ids.max() < known:
            wrong = int(ids.max() if ids.max() >= known else ids.min())
            raise ValueError(f"{name}: the id {wrong} after {done:,} tokens, but the tokenizer has only "
                             f"{known} ids: name the tokenizer that made them, or another --dtype.")
        done += ids.size
        yield array.reshape(-1).astype(dtype)
    if not done:
        raise ValueError(f"{name}: no token.")


def _in_files(arrays: Iterable[np.ndarray], most: int) -> Iterable[np.ndarray]:
    """The same ids, `most` at a time, the last time fewer."""
    waiting, size = [], 0
    for ids in arrays:
        waiting, size = [*waiting, ids], size + len(ids)
        if size >= most:
            joined = np.concatenate(waiting)
            for start in range(0, len(joined) - most + 1, most):
                yield joined[start : start + most]
            waiting = [joined[len(joined) // most * most :]]
            size = len(waiting[0])
    if size:
        yield np.concatenate(waiting)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0 done, 2 the user's mistake, 1 a source or a target that failed."""
    try:
        with user_mistakes():
            convert(parse_args(argv))
    except SystemExit as end:
        return end.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
