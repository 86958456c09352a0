"""Small corpora, tokenizers and settings for the tests of data/."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from data.load import load_rows
from data.tokens.tokenizer import train_tokenizer

SETTINGS = dict(
    dataset_name=[], keywords=[], dataset_config_name=None, text_column=None, eval_dataset_name=[],
    validation_fraction=0.1, tokenizer_name=None, vocab_size=400, block_size=16, max_train_samples=0,
    streaming=False, model_type="gpt2", model_name_or_path=None, seed=42, eval_only=False,
    per_device_train_batch_size=4, per_device_eval_batch_size=4, max_eval_samples=0,
    resume_from_checkpoint="auto", mixture=[],
)  # fmt: skip


def settings(folder, *names, **changes) -> SimpleNamespace:
    """Settings as a script passes them, with cache_dir and output_dir in `folder`."""
    folders = dict(
        dataset_name=[str(name) for name in names], cache_dir=f"{folder}/cache", output_dir=f"{folder}/run"
    )
    return SimpleNamespace(**{**SETTINGS, **folders, **changes})


def load(folder, *names, algorithm="bpe", n_special=0, **changes) -> tuple:
    """Returns (tokenizer, rows, {name: evaluation rows}) as load_rows does."""
    args = settings(folder, *names, **changes)
    return load_rows(args, algorithm, n_special)


def exit_status(main, words) -> int:
    """Runs a command of data/ and returns its exit status."""
    try:
        main([str(word) for word in words])
    except SystemExit as end:
        return end.code
    return 0


def make_texts(n: int, seed: int = 0, words: int = 120) -> list[str]:
    """n different texts of 1 to 2 * `words` random words."""
    rng = random.Random(seed)
    vocabulary = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(1, 8))) for _ in range(400)]
    return [f"{i} " + " ".join(rng.choices(vocabulary, k=rng.randint(1, 2 * words))) for i in range(n)]


def write_jsonl(path: Path, texts: list) -> str:
    rows = (json.dumps({"id": i, "text": text, "source": f"s{i % 7}"}) + "\n" for i, text in enumerate(texts))
    path.write_text("".join(rows))
    return str(path)


def save_tokenizer(path: Path, seed: int = 0, algorithm: str = "bpe", model_type: str = "gpt2") -> str:
    train_tokenizer(make_texts(50, seed), algorithm, 400, model_type).save_pretrained(path)
    return str(path)


def all_ids(rows) -> np.ndarray:
    """Token ids of all rows, [n, T]."""
    return rows.columns(np.arange(len(rows)), np.zeros(len(rows), int))["input_ids"]


def all_columns(rows) -> dict[str, list]:
    columns = rows.columns(np.arange(len(rows)), np.zeros(len(rows), int))
    return {name: np.asarray(values).astype(int).tolist() for name, values in columns.items()}


def files_of(folder) -> dict[str, bytes]:
    """Returns the content of each file, without seconds (in the manifest) and tokenizer_config.json, which
    depends on the environment."""
    folder = Path(folder)
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    del files["tokenizer/tokenizer_config.json"]
    manifest = json.loads(files.pop("manifest.json"))
    for account in manifest["accounting"].values():
        account.pop("seconds", None)
    return files | {"manifest.json": manifest}


def manifest_of(folder) -> dict:
    return json.loads((Path(folder) / "manifest.json").read_text())


def tokens_of(folder, split: str) -> np.ndarray:
    """Token ids of a split in the order of the manifest's files, read by numpy alone."""
    files = manifest_of(folder)["splits"].get(split, {"files": []})["files"]
    return np.concatenate([np.empty(0, int), *(np.load(Path(folder, file["file"])) for file in files)])
