"""Texts, a tokenizer and the command line of data.prepare for the tests of shards and streams."""

import json
import random
from pathlib import Path

import numpy as np

from data import prepare
from data.mixture import MixedRows
from data.rows import PackedRows
from data.tokenizer import train_tokenizer


def make_texts(n: int, seed: int = 0, words: int = 120) -> list[str]:
    """n different texts of 1 to 2 x `words` made-up words."""
    rng = random.Random(seed)
    vocabulary = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(1, 8))) for _ in range(400)]
    return [f"{i} " + " ".join(rng.choices(vocabulary, k=rng.randint(1, 2 * words))) for i in range(n)]


def write_jsonl(path: Path, texts: list) -> str:
    rows = (json.dumps({"id": i, "text": text, "source": f"s{i % 7}"}) + "\n" for i, text in enumerate(texts))
    path.write_text("".join(rows))
    return str(path)


def save_tokenizer(path: Path, seed: int = 0) -> str:
    train_tokenizer(make_texts(50, seed), "bpe", 400, "gpt2").save_pretrained(path)
    return str(path)


def command(source: str, folder, tokenizer: str | None, **settings) -> list[str]:
    """Arguments of `python -m data.prepare` for small shards, of about 9 kB of text."""
    usual = {"dataset_name": source, "output_dir": folder, "shard_mb": 0.004096, "validation_fraction": 0.05}
    settings = usual | ({"tokenizer_name": tokenizer} if tokenizer else {}) | settings
    words = []
    for name, value in settings.items():
        words += [f"--{name}", *([str(value)] if not isinstance(value, list) else value)]
    return words


def run(*arguments, **settings) -> int:
    return prepare.main(command(*arguments, **settings))


def packed(path, kind=PackedRows, **settings):
    """Rows of a .npy file of rows [n, T], or of pairs [n, T + 3]."""
    rows = np.load(path)
    width = rows.shape[1] - (3 if kind is not PackedRows else 0)
    return kind([rows.ravel()], width, content=str(path), **settings)


def all_ids(rows: PackedRows) -> np.ndarray:
    """The token ids of all rows, [n, T]."""
    return rows.ids(np.arange(len(rows)))


def batch_of(rows: PackedRows, keys: list[tuple]) -> dict:
    """The batch of these (position, epoch, row)."""
    return MixedRows(None, {"": rows}).__getitems__([(*key, 0) for key in keys])


def shard_bytes(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).glob("*.npy")}


def files_of(folder) -> dict[str, bytes]:
    """All that lies there; of the manifest without the seconds, of the tokenizer without what transformers
    notes of the environment."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    del found["tokenizer/tokenizer_config.json"]
    manifest = json.loads(found.pop("manifest.json"))
    for account in [*manifest["accounting"].values(),
                    *(account for line in manifest["chunks"] for account in line["accounts"].values())]:
        del account["seconds"]
    return found | {"manifest.json": manifest}


def manifest_of(folder) -> dict:
    return json.loads((Path(folder) / "manifest.json").read_text())


def tokens_of(folder, split: str) -> np.ndarray:
    """All of a split, as the manifest orders its files; read without the project's code."""
    files = manifest_of(folder)["splits"].get(split, {"files": []})["files"]
    return np.concatenate([np.empty(0, int), *(np.load(Path(folder, file["file"])) for file in files)])
