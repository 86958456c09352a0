"""Small copies of the presets' datasets and tokenizers, with the layout that they have on the Hub.

    publish(hub)        # on a HubServer: then each preset finds its data

The layout means configurations, splits, files and columns. codeparrot-ds-valid has only a validation split,
wikitext has four configurations and no default, fineweb-edu has only a train split. Code is the source of
Python's library, English text its docstrings.
"""

import ast
import gzip
import io
import json
import sysconfig
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import yaml
from tokenizers.implementations import BertWordPieceTokenizer, ByteLevelBPETokenizer
from tokenizers.processors import BertProcessing
from transformers import PreTrainedTokenizerFast

WIKITEXT = ("wikitext-103-raw-v1", "wikitext-103-v1", "wikitext-2-raw-v1", "wikitext-2-v1")
BERT = {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]",
        "mask_token": "[MASK]"}  # fmt: skip
GPT2 = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
TOKENIZERS = {  # name: model_type of its config.json, algorithm, special tokens
    "huggingface-course/code-search-net-tokenizer": (None, ByteLevelBPETokenizer, GPT2),
    "openai-community/gpt2": ("gpt2", ByteLevelBPETokenizer, GPT2),
    "google-bert/bert-base-cased": ("bert", BertWordPieceTokenizer, BERT),
}


def publish(hub) -> None:
    """Publish the datasets and tokenizers of all presets, and the dataset that the course filters."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:120]
    sources = [file.read_text(encoding="utf-8")[:6000] for file in files]
    english = [text for file in files if len(text := _docstrings(file.read_text(encoding="utf-8"))) > 500]
    code = [{"repo_name": "python/cpython", "path": file.name, "copies": "1", "size": str(len(source)),
             "content": source, "license": "other"} for file, source in zip(files, sources, strict=True)]
    splits = {"train": "data/train-00000-of-00001.parquet", "validation": "data/validation.parquet"}
    for end, split, rows in (("train", "train", code[:90]), ("valid", "validation", code[90:])):
        put_data(hub, f"huggingface-course/codeparrot-ds-{end}", {"default": {split: splits[split]}},
                 {splits[split]: rows})

    documents = [row | {"content": "import pandas as pd\n" * (i % 3 == 0) + row["content"]}
            for i, row in enumerate(code[:90])]  # fmt: skip
    lines = "".join(json.dumps(row) + "\n" for row in documents).encode()
    file = {"file-000000000000.json.gz": gzip.compress(lines)}
    hub.put("transformersbook/codeparrot-train", file, "datasets")

    parts = {"train": english[:50], "validation": english[50:60], "test": english[60:75]}
    configs = {name: {split: f"{name}/{split}-00000-of-00001.parquet" for split in parts}
               for name in WIKITEXT}  # fmt: skip
    rows = {path: [{"text": f"{name}\n"}] for name, paths in configs.items() for path in paths.values()}
    for split, articles in parts.items():  # other configurations hold their name only
        rows[configs[WIKITEXT[0]][split]] = _wikitext(articles)
    put_data(hub, "Salesforce/wikitext", configs, rows)

    configs = {"default": {"train": "data/*/*"}, "CC-MAIN-2013-20": {"train": "data/CC-MAIN-2013-20/*"}}
    configs |= {f"sample-{size}BT": {"train": f"sample/{size}BT/*"} for size in (10, 100, 350)}
    same = {"dump": "CC-MAIN-2013-20", "file_path": "", "language": "en", "language_score": 0.9}
    web = [{"text": text, "id": f"<urn:uuid:{i}>", "url": f"https://example.org/{i}", **same,
            "token_count": len(text) // 4, "score": 3.0, "int_score": 3}
           for i, text in enumerate(english)]  # fmt: skip
    rows = {"data/CC-MAIN-2013-20/train-00000-of-00001.parquet": web[:3]}
    rows |= {f"sample/{size}BT/00{i}_00000.parquet": web[i::2] for size in (10, 100, 350) for i in (0, 1)}
    put_data(hub, "HuggingFaceFW/fineweb-edu", configs, rows)

    for name, (model_type, algorithm, special) in TOKENIZERS.items():
        tokenizer = algorithm(lowercase=name.endswith("uncased"))
        tokens = [*dict.fromkeys(special.values())]
        tokenizer.train_from_iterator(english + sources[:20], 900, special_tokens=tokens)
        if special is BERT:
            ends = ((token, tokenizer.token_to_id(token)) for token in ("[SEP]", "[CLS]"))
            tokenizer.post_processor = BertProcessing(*ends)
        with tempfile.TemporaryDirectory() as folder:
            PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, **special).save_pretrained(folder)
            if model_type:
                Path(folder, "config.json").write_text(json.dumps({"model_type": model_type}))
            hub.put(name, {file.name: file.read_bytes() for file in Path(folder).iterdir()})


def put_data(hub, name: str, configs: dict, rows: dict) -> None:
    """Publish a dataset. configs: {name: {split: path or glob}}; rows: {path: rows of a parquet file}."""
    card = [{"config_name": config, "data_files": [{"split": s, "path": path} for s, path in splits.items()]}
            for config, splits in configs.items()]  # fmt: skip
    files = {"README.md": f"---\n{yaml.safe_dump({'configs': card})}---\n".encode()}
    for path, content in rows.items():
        pyarrow.parquet.write_table(pa.Table.from_pylist(content), file := io.BytesIO())
        files[path] = file.getvalue()
    hub.put(name, files, "datasets")


def _docstrings(source: str) -> str:
    nodes = [node for node in ast.walk(ast.parse(source))
             if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]  # fmt: skip
    return "\n\n".join(filter(None, map(ast.get_docstring, nodes)))[:6000]


def _wikitext(articles: list[str]) -> list[dict]:
    """A row for each line. An article begins with a line " = Title = \\n" between empty lines."""
    rows = []
    for number, article in enumerate(articles):
        lines = [line for line in article.splitlines() if line.strip()]
        rows += ["", f" = Article {number} = \n", "", *(f" {line.strip()} \n" for line in lines)]
    return [{"text": text} for text in rows]
