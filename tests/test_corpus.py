"""Every source gives the same documents, everything odd is counted, and mistakes are named."""

import ast
import bz2
import contextlib
import gzip
import itertools
import json
import lzma
import os
import pickle
import random
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from inspect import cleandoc

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet
import pytest

from data.documents.files import CUT_AFTER, LONG_FILE
from data.documents.filters import Accounting, HoldOut, clean_documents, show_progress
from data.documents.installed import DOCSTRING
from data.documents.source import Source, open_corpus, splits_of
from data.tokens.shards import find_shards
from tests.runs import PROJECT
from utils.io.urls import Folder

TEXTS = ["plain", "two\nlines\n", 'quotes " and, commas', "été 日本 🎉", "tab\tand \x00 NUL", "   indented"]
ROWS = [{"text": text, "id": str(i)} for i, text in enumerate(TEXTS)]


def load(name, **settings):
    return open_corpus(Source(str(name), **settings))


def texts(corpus):
    return [document[corpus.text_column] for document in corpus]


def write_lines(path, lines):
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return str(path)


def test_installed_python_is_the_source_on_this_machine():
    corpus = load("installed-python")
    assert list(next(iter(corpus))) == ["repo_name", "path", "copies", "size", "content", "license"]
    assert corpus.text_column == "content" and "validation" not in corpus.splits
    head = list(itertools.islice(corpus, 400))
    assert head == list(itertools.islice(corpus, 400))
    by_path = {document["path"]: document for document in corpus}
    assert not any(os.path.isabs(path) or path.endswith(".pyc") for path in by_path)
    for module, owner in ((json, "CPython"), (pytest, "pytest"), (datasets, "datasets")):
        name = f"{module.__name__}/__init__.py"
        with open(module.__file__, encoding="utf-8", newline="") as source:
            assert by_path[name]["content"] == source.read()
        assert by_path[name]["repo_name"].startswith(owner)
    assert int(by_path["json/__init__.py"]["size"]) == os.path.getsize(json.__file__)


def test_the_fingerprint_of_the_installation_is_the_same_in_another_process():
    command = (
        "from data.documents.source import Source, open_corpus;"
        "print(open_corpus(Source('installed-docs')).fingerprint)"
    )
    other = subprocess.run([sys.executable, "-c", command], cwd=PROJECT, capture_output=True, text=True,
                           env=os.environ | {"PYTHONHASHSEED": "7"}, check=True)
    assert other.stdout.strip() == load("installed-docs").fingerprint


def test_the_fingerprint_of_the_installation_knows_content_and_the_generators_code(tmp_path):
    """In an environment of its own: a file of the same size with other content, and a generator edited."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    script = """
import importlib, os, pathlib, sys, sysconfig
from data.documents import installed
from data.documents.source import Source
def fingerprint(name):
    installed._list_files.cache_clear()
    return installed.open_units(Source(name))[0]
module = pathlib.Path(sysconfig.get_path("purelib"), "module.py")
module.write_text("x = 1\\n")
first = fingerprint("installed-python")
assert fingerprint("installed-python") == first
module.write_text("x = 2\\n")
assert fingerprint("installed-python") != first, "content"
own = pathlib.Path(sys.argv[1], "own.py")
sys.path.insert(0, sys.argv[1])
found = []
for text in ("one", "two"):
    own.write_text(f"def rows():\\n    yield dict(text='{text}')\\n")
    import own as module
    installed.INSTALLED["own"] = importlib.reload(module).rows
    found.append(fingerprint("own"))
assert found[0] != found[1], "code"
"""
    path = os.pathsep.join([str(PROJECT), *sys.path])
    done = subprocess.run([tmp_path / "env" / "bin" / "python", "-c", script, tmp_path], capture_output=True,
                          text=True, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr


def test_installed_docs_are_the_docstrings_that_ast_finds():
    found = missed = wrong = 0
    for document in itertools.islice(load("installed-python"), 0, 1200, 6):
        try:
            tree = ast.parse(document["content"] or "")
        except SyntaxError:  # lib2to3's test data
            continue
        by_ast = [node.body[0].value.value for node in ast.walk(tree)
                  if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
                  and ast.get_docstring(node) and "\\" not in ast.get_docstring(node)]
        lexical = [match[2] for match in DOCSTRING.finditer(document["content"] or "")]
        triple = [text for text in by_ast if "\n" in text]  # the others may stand in single quotes
        found += sum(text in lexical for text in triple)
        missed += sum(text not in lexical for text in triple)
        wrong += sum("\\" not in text and cleandoc(text) not in map(cleandoc, by_ast) for text in lexical)
    assert found > 500 and missed < 0.02 * found and wrong < 0.03 * found
    documents = list(itertools.islice(load("installed-docs"), 50))
    assert all(len(document["text"]) >= 400 and ">>>" not in document["text"] for document in documents)


def csv_of(rows, separator=",") -> bytes:
    cells = (separator.join('"{}"'.format(text.replace('"', '""')) for text in row.values()) for row in rows)
    return "\r\n".join([separator.join(ROWS[0]), *cells, ""]).encode()


def parquet_of(rows) -> bytes:
    pa.parquet.write_table(pa.Table.from_pylist(rows), sink := pa.BufferOutputStream())
    return sink.getvalue().to_pybytes()


NO_NUL = [row for row in ROWS if "\0" not in row["text"]]  # Python 3.10's csv stops at NUL
LINES = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)
FORMATS = {  # file: content, documents
    "a.jsonl": (LINES, ROWS), "a.ndjson": (LINES, ROWS), "a.jsonlines": (LINES, ROWS),
    "a.json": (b"\xef\xbb\xbf" + json.dumps(ROWS, indent=1).encode(), ROWS), "b.json": (LINES, ROWS),
    "a.csv": (csv_of(NO_NUL), NO_NUL), "a.tsv": (csv_of(NO_NUL, "\t"), NO_NUL),
    "a.parquet": (parquet_of(ROWS), ROWS), "a.txt": (TEXTS[3].encode(), [{"text": TEXTS[3]}]),
}  # fmt: skip
PACKED = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
PACKED[".zst"] = lambda data: pa.compress(data, "zstd", asbytes=True)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_documents_however_it_is_packed_and_named(name, tmp_path):
    """Alone, in a folder, by a glob, by a URL; also after a trip to another process."""
    content, rows = FORMATS[name]
    for ending, pack in PACKED.items():
        if ending and name.endswith(".parquet"):
            continue
        folder = tmp_path / f"in{ending}"
        folder.mkdir()
        path = folder / f"{name}{ending}"
        path.write_bytes(pack(content))
        for place in (path, folder, f"{folder}/*", f"file://{path}"):
            corpus = load(place, divide=False)
            assert list(corpus) == rows == list(pickle.loads(pickle.dumps(corpus))), place


def test_a_saved_data_set_and_a_folder_of_texts_give_the_same_documents(tmp_path):
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "txt").mkdir()
    for row in ROWS:
        (tmp_path / "txt" / f"{row['id']}.txt").write_bytes(row["text"].encode())
    assert list(load(tmp_path / "saved")) == ROWS and texts(load(tmp_path / "txt")) == TEXTS


def test_odd_documents_are_counted(tmp_path):
    long = "word and " * 5_600_000  # 50 MB on one line
    rows = [{"text": ""}, {"text": long}, {"text": "a\0b"}, {"text": None}, {"text": 7}, {"text": ["x"]},
            {"other": "x"}, {"text": "good"}, {"text": "good"}, {"text": " \n\t"}, {"text": "\ud800"}]
    path = write_lines(tmp_path / "odd.jsonl", [
        *(json.dumps(row).encode() for row in rows),
        b"", b'{"text": "last"}'])
    counts = Accounting()
    kept = [text for text, _, _ in clean_documents(load(path), counts)]
    assert kept == [long, "a\0b", "good", "last"]
    assert (counts.read, counts.used, counts.duplicate, counts.empty, counts.unreadable) == (12, 4, 1, 2, 5)
    assert counts.bytes == len(long) + 3 + 4 + 4


ARTICLE = " \n = Title {0} = \n \n Some text of {0} . \n \n = = Part = = \n \n More , with a = b = c . \n"


def test_wikitext_becomes_one_document_per_article(tmp_path):
    whole = "".join(ARTICLE.format(i) for i in range(5))
    rows = [json.dumps({"text": line.strip(" \n") and line}).encode() for line in whole.splitlines(True)]
    lines = write_lines(tmp_path / "wiki.jsonl", rows)  # as the Hub has it: a row per line
    articles = texts(load(lines))
    assert len(articles) == 5 and all(f"Title {i} =" in text for i, text in enumerate(articles))
    assert "".join("".join(articles).split()) == "".join(whole.split())


def test_a_long_text_file_is_cut_at_blank_lines_and_nothing_is_lost(tmp_path):
    draw = random.Random(0)
    whole = "".join(f"line {draw.random()}\n" + "\n" * (draw.random() < 0.2) for _ in range(60_000))
    (tmp_path / "long.txt").write_text(whole)
    pieces = texts(load(tmp_path / "long.txt"))
    assert "".join(pieces) == whole and len(whole) > LONG_FILE
    assert all(CUT_AFTER <= len(piece) < CUT_AFTER + 4096 and piece.endswith("\n\n") for piece in pieces[:-1])
    (tmp_path / "short.txt").write_text(whole[: LONG_FILE])
    assert texts(load(tmp_path / "short.txt", divide=False)) == [whole[: LONG_FILE]]


@pytest.mark.parametrize("text, documents", [
    ("oneword", range(1, 2)), ("one\ntwo", range(2, 3)), ("words  of one line " * 500, range(25, 32)),
    ("a line of 400 kB " * 24_000, range(25, 32)), ("half " * 9000 + "\n" + "half " * 9000, range(25, 32)),
    ("one\r\ntwo\r\n\r\n" * 999, range(25, 32)), ("ä ö\n" * 40_000, range(25, 32))])  # fmt: skip
def test_a_small_text_file_that_is_alone_is_divided_if_some_is_to_be_held_out(tmp_path, text, documents):
    path = tmp_path / "alone.txt"
    path.write_bytes(text.encode())
    pieces = [document["text"] for document in open_corpus(Source(str(path)))]
    assert "".join(pieces) == text and len(pieces) in documents
    assert [document["text"] for document in open_corpus(Source(str(path), divide=False))] == [text]
    (tmp_path / "second.txt").write_text("another\n" * 99)
    assert len([*open_corpus(Source(str(tmp_path)))]) == 2


def test_a_folder_of_source_files_is_read_as_code(tmp_path, capsys):
    """Each file is a document; its few .json files are no data."""
    files = {"a.py": "import os\n" * 99, "test/b.py": "import sys\n" * 99, "lib/c.js": "let x = 1\n",
             "package.json": "{}", "notes.txt": "words", ".git/config.py": "hidden", "logo.png": "\x89PNG"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    corpus = open_corpus(Source(str(tmp_path)))
    read = ("a.py", "test/b.py", "lib/c.js", "notes.txt")
    assert sorted(texts(corpus)) == sorted(files[name] for name in read)
    assert [*corpus.splits] == ["train"]
    assert "read as text, a document each: 2 .py, 1 .js, 1 .txt; 3 not read" in capsys.readouterr().out


def test_splits_of_saved_data_sets_and_of_files_whose_names_mean_none(tmp_path):
    """tests/test_files.py has those of folders."""
    parts = {"train": ROWS[:4], "validation": ROWS[4:]}
    saved = datasets.DatasetDict({split: datasets.Dataset.from_list(rows) for split, rows in parts.items()})
    saved.save_to_disk(str(tmp_path / "saved"))
    for split, rows in parts.items():
        assert list(load(tmp_path / "saved", split=split)) == rows
        assert split in splits_of(Source(str(tmp_path / "saved")))
    folder = folder_of(tmp_path / "plain", "part1.jsonl", "test_of_it.jsonl")  # no file says train
    assert len(texts(load(folder))) == 2 and "test" not in splits_of(Source(folder))
    with pytest.raises(ValueError, match="no split 'test'"):
        load(tmp_path / "saved", split="test")


def test_mistakes_are_named_with_their_remedy(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [b'{"title": "x", "body": "y"}'])
    with pytest.raises(ValueError, match="neither a column content nor text.*title, body"):
        load(path)
    with pytest.raises(ValueError, match="no column 'words'.*title, body"):
        load(path, text_column="words")
    assert texts(load(path, text_column="body")) == ["y"]
    assert texts(load(write_lines(tmp_path / "content.jsonl", [b'{"content": "z"}']))) == ["z"]
    rows = [b"{\"content\": null}", b"{\"content\": \"z\"}"]
    assert texts(load(write_lines(tmp_path / "null.jsonl", rows))) == [None, "z"]
    for name in ("x" * 300, "y" * 300 + ".jsonl", "./" + "z" * 300):
        assert find_shards(name) is None
        with pytest.raises(ValueError, match="dataset_name"):
            load(name)


def folder_of(path, *names) -> str:
    path.mkdir()
    for name in names:
        write_lines(path / name, [json.dumps({"text": name}).encode()])
    return str(path)


def test_a_file_of_two_splits_is_named_and_refused(tmp_path):
    clean = "train-1.jsonl", "train-2.jsonl", "dev.jsonl"
    assert len(texts(load(folder_of(tmp_path / "clean", *clean, "manifest.json", "card.md")))) == 2
    folder = folder_of(tmp_path / "two", *clean, "train_val.jsonl")
    with pytest.raises(ValueError, match="words of two splits: train_val.jsonl; rename"):
        load(folder)
    assert len(texts(load(f"{folder}/train-*"))) == 2


def test_a_name_with_brackets_is_a_name(tmp_path):
    for name in ("my[1].jsonl", "what?.jsonl", "all*.jsonl"):
        folder_of(tmp_path / f"in {name}", name, "my1.jsonl", "whats.jsonl", "allen.jsonl")
        path = tmp_path / f"in {name}" / name
        assert texts(load(path)) == [name] and find_shards(str(path)) is None
    folder = sorted(texts(load(tmp_path / "in my[1].jsonl")))
    assert folder == ["allen.jsonl", "my1.jsonl", "my[1].jsonl", "whats.jsonl"]
    assert texts(load(tmp_path / "in what?.jsonl" / "wha*.jsonl")) == ["what?.jsonl", "whats.jsonl"]


def test_a_data_folder_with_a_state_json_and_a_damaged_saved_data_set(tmp_path):
    folder = folder_of(tmp_path / "folder", "a.jsonl")
    (tmp_path / "folder" / "state.json").write_text('{"text": "of another program"}')
    assert texts(load(folder)) == ["a.jsonl"]
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    next((tmp_path / "saved").glob("*.arrow")).write_bytes(b"damage")
    with pytest.raises(ValueError, match="saved' cannot be loaded"):
        load(tmp_path / "saved")
    (tmp_path / "dict").mkdir()
    for content in ("{}", "[", '{"splits": ["train"]}'):
        (tmp_path / "dict" / "dataset_dict.json").write_text(content)
        with pytest.raises(ValueError, match="dict' cannot be loaded"):
            load(tmp_path / "dict")


def test_one_file_of_the_web_is_read_and_followed(tmp_path):
    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *words):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        lines = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)
        (tmp_path / "a.jsonl").write_bytes(lines)
        (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines))
        for name in ("a.jsonl", "b.jsonl.gz", "a.jsonl?download=true", "b.jsonl.gz?download=true"):
            assert find_shards(f"{url}/{name}") is None
            assert texts(load(f"{url}/{name}")) == TEXTS
        first = load(f"{url}/a.jsonl").fingerprint
        (tmp_path / "a.jsonl").write_bytes(lines.replace(b"plain", b"PLAIN"))
        os.utime(tmp_path / "a.jsonl", (1, 1))
        fsspec.filesystem("http").invalidate_cache()
        assert load(f"{url}/a.jsonl").fingerprint != first, "the same size, another content"
        with pytest.raises(ValueError, match="no such file"):
            load(f"{url}/missing.jsonl")
    finally:
        server.shutdown()
    with pytest.raises(ValueError, match="cannot be listed.*Check"):
        load("http://127.0.0.1:9/a.jsonl")


@pytest.mark.parametrize("url, line", [
    ("gs://bucket/texts", "install gcsfs"), ("abfs://container@account/texts.jsonl", "Install adlfs"),
    ("smb://host/texts", "smbprotocol"),
])
def test_a_package_that_a_url_needs_is_named(url, line):
    with contextlib.suppress(ImportError):
        fsspec.core.url_to_fs(url)
        pytest.skip("the package is there")
    for use in (load, find_shards, Folder):
        if use is not find_shards or not url.endswith("jsonl"):
            with pytest.raises(ValueError, match=line):
                use(url)


def test_keywords_keep_documents_that_contain_any_of_them(tmp_path):
    draw = random.Random(1)
    words = ["import pandas as pd", "np.zeros", "seaborn", "pass", "return x"]
    documents = [" ".join(draw.choices(words, k=2)) + f" {i}" for i in range(500)]
    path = write_lines(tmp_path / "a.jsonl", [json.dumps({"content": text}).encode() for text in documents])
    counts = Accounting()
    corpus = load(path, keywords=("pandas", "seaborn"))
    documents_kept = clean_documents(corpus, counts)
    kept = [text for text, _, _ in show_progress(documents_kept, "filtering")]
    expected = [text for text in documents if "pandas" in text or "seaborn" in text]
    assert kept == expected and counts.filtered == 500 - len(expected)
    assert f"{counts.filtered:,} filtered" in counts.line()


def test_the_validation_split_is_a_function_of_content():
    documents = [f"document {i}" for i in range(20_000)]
    held_out = {text for text in documents if HoldOut(0.05)(text, 0)}
    assert abs(len(held_out) - 1000) < 4 * 31  # four standard deviations
    assert held_out < {text for text in documents if HoldOut(0.1)(text, 0)}
    assert not any(HoldOut(0.0)(text, 0) for text in documents)


def test_text_files_and_installed_sources_need_no_library_of_tables(tmp_path):
    """datasets and pyarrow are 85 MB and half a second, of each process of each run."""
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    code = (
        "import sys, data.load; from data.documents.source import Source, open_corpus;"
        "list(open_corpus(Source(sys.argv[1]))); next(iter(open_corpus(Source('installed-docs'))));"
        "print({'datasets', 'pandas', 'pyarrow'} & sys.modules.keys())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a.jsonl")], cwd=PROJECT, capture_output=True, text=True
    )
    assert result.stdout.strip() == "set()", result.stderr
