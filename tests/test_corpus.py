"""Documents of every source and file format; files that cannot be read are refused in one line."""

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
from data.documents.filters import Accounting, clean_documents, show_progress
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


def test_installed_python_is_the_source_code_on_this_machine():
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


def test_the_fingerprint_of_the_installation_changes_only_with_its_files(tmp_path):
    """In a new virtual environment, by a change that leaves the size of the file as it is."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    [packages] = (tmp_path / "env/lib").glob("*/site-packages")
    code = ("from data.documents.source import Source, open_corpus\n"
            "print(open_corpus(Source('installed-python')).fingerprint)")  # fmt: skip

    def fingerprint(seed):
        env = {"PYTHONPATH": os.pathsep.join([str(PROJECT), *sys.path]), "PYTHONHASHSEED": seed}
        done = subprocess.run([tmp_path / "env/bin/python", "-c", code], env=os.environ | env,
                              capture_output=True, text=True)  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    (packages / "module.py").write_text("x = 1\n")
    before = fingerprint("0")
    assert fingerprint("7") == before
    (packages / "module.py").write_text("x = 2\n")
    assert fingerprint("0") != before


def test_installed_docs_are_the_docstrings_that_ast_parses():
    matched = missed = wrong = 0
    for document in itertools.islice(load("installed-python"), 0, 1200, 6):
        try:
            tree = ast.parse(document["content"] or "")
        except SyntaxError:  # lib2to3's test data
            continue
        by_ast = [node.body[0].value.value for node in ast.walk(tree)
                  if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
                  and ast.get_docstring(node) and "\\" not in ast.get_docstring(node)]
        lexical = [match[2] for match in DOCSTRING.finditer(document["content"] or "")]
        triple = [text for text in by_ast if "\n" in text]  # docstrings of one line may have single quotes
        matched += sum(text in lexical for text in triple)
        missed += sum(text not in lexical for text in triple)
        wrong += sum("\\" not in text and cleandoc(text) not in map(cleandoc, by_ast) for text in lexical)
    assert matched > 500 and missed < 0.02 * matched and wrong < 0.03 * matched
    documents = list(itertools.islice(load("installed-docs"), 50))
    assert all(len(document["text"]) >= 400 and ">>>" not in document["text"] for document in documents)


def csv_of(rows, separator=",") -> bytes:
    cells = (separator.join('"{}"'.format(text.replace('"', '""')) for text in row.values()) for row in rows)
    return "\r\n".join([separator.join(ROWS[0]), *cells, ""]).encode()


def parquet_of(rows) -> bytes:
    pa.parquet.write_table(pa.Table.from_pylist(rows), sink := pa.BufferOutputStream())
    return sink.getvalue().to_pybytes()


NO_NUL = [row for row in ROWS if "\0" not in row["text"]]  # Python 3.10's csv stops at NUL
JSONL = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)
BOM = b"\xef\xbb\xbf"
FORMATS = {  # file: content, documents
    "a.jsonl": (JSONL, ROWS), "a.ndjson": (JSONL, ROWS), "a.jsonlines": (JSONL, ROWS),
    "a.json": (BOM + json.dumps(ROWS, indent=1).encode(), ROWS), "b.json": (JSONL, ROWS),
    "a.csv": (csv_of(NO_NUL), NO_NUL), "a.tsv": (csv_of(NO_NUL, "\t"), NO_NUL),
    "a.parquet": (parquet_of(ROWS), ROWS), "a.txt": (TEXTS[3].encode(), [{"text": TEXTS[3]}]),
}  # fmt: skip
PACKED = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
PACKED[".zst"] = lambda data: pa.compress(data, "zstd", asbytes=True)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_and_compression_gives_the_same_documents(name, tmp_path):
    """Named as a file, a folder, a glob or a URL; also from a pickled corpus."""
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


def test_unusable_documents_are_dropped_and_counted(tmp_path):
    long = "word and " * 5_600_000  # 50 MB on one line
    rows = [{"text": ""}, {"text": long}, {"text": "a\0b"}, {"text": None}, {"text": 7}, {"text": ["x"]},
            {"other": "x"}, {"text": "good"}, {"text": "good"}, {"text": " \n\t"}, {"text": "\ud800"}]
    path = write_lines(tmp_path / "odd.jsonl", [
        *(json.dumps(row).encode() for row in rows),
        b"", b'{"text": "last"}'])
    counts = Accounting()
    documents = [text for text, _, _ in clean_documents(load(path), counts)]
    assert documents == [long, "a\0b", "good", "last"]
    assert (counts.read, counts.used, counts.duplicate, counts.empty, counts.unreadable) == (12, 4, 1, 2, 5)
    assert counts.bytes == len(long) + 3 + 4 + 4


ARTICLE = " \n = Title {0} = \n \n Some text of {0} . \n \n = = Part = = \n \n More , with a = b = c . \n"


def test_wikitext_becomes_one_document_per_article(tmp_path):
    text = "".join(ARTICLE.format(i) for i in range(5))
    rows = [json.dumps({"text": line.strip(" \n") and line}).encode() for line in text.splitlines(True)]
    lines = write_lines(tmp_path / "wiki.jsonl", rows)  # one row per line, as on the Hub
    articles = texts(load(lines))
    assert len(articles) == 5 and all(f"Title {i} =" in text for i, text in enumerate(articles))
    assert "".join("".join(articles).split()) == "".join(text.split())


random_line = random.Random(0).random
PARAGRAPHS = "".join(f"line {random_line()}\n" + "\n" * (random_line() < 0.2) for _ in range(60_000))


@pytest.mark.parametrize("text, documents", [
    ("oneword", range(1, 2)), ("one\ntwo", range(2, 3)), ("words  of one line " * 500, range(25, 32)),
    ("a line of 400 kB " * 24_000, range(25, 32)), ("half " * 9000 + "\n" + "half " * 9000, range(25, 32)),
    ("one\r\ntwo\r\n\r\n" * 999, range(25, 32)), ("ä ö\n" * 40_000, range(25, 32)),
    (PARAGRAPHS[:LONG_FILE], range(25, 32)), (PARAGRAPHS, range(18, 25)),
    ("word and\n" * 500_000, range(4, 99)), ("word " * 900_000, range(4, 99)),
    ("日本語" * 500_000, range(4, 99)),
], ids=itertools.count())  # fmt: skip
def test_a_text_file_is_divided_and_nothing_is_lost(text, documents, tmp_path):
    """Long files always, at blank lines. A single small file too, so that a part can be held out."""
    path = tmp_path / "alone.txt"
    path.write_bytes(text.encode())
    pieces = texts(load(path))
    assert "".join(pieces) == text and len(pieces) in documents
    assert max(len(piece.encode()) for piece in pieces) <= 1 << 21
    if text == PARAGRAPHS:
        assert all(CUT_AFTER <= len(piece) < CUT_AFTER + 4096 for piece in pieces[:-1])
        assert all(piece.endswith("\n\n") for piece in pieces[:-1])
    if len(text.encode()) <= LONG_FILE:
        assert texts(load(path, divide=False)) == [text]
        (tmp_path / "second.txt").write_text("another\n" * 99)
        assert len(texts(load(tmp_path))) == 2


def test_a_folder_of_source_files_is_read_as_code(tmp_path, capsys):
    """Each file is a document. Names such as train.py mean no split, and package.json is no data."""
    files = {"train.py": "import os\n" * 99, "test/b.py": "import sys\n" * 99, "lib/c.js": "let x = 1\n",
             "package.json": "{}", "notes.txt": "words", ".git/config.py": "hidden", "logo.png": "\x89PNG",
             "test/empty.py": ""}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    corpus = load(tmp_path)
    python = ["train.py", "test/b.py", "test/empty.py"]
    read = [*python, "lib/c.js", "notes.txt"]
    assert sorted(texts(corpus)) == sorted(files[name] for name in read)
    assert [*corpus.splits] == ["train"]
    assert "read as text, a document each: 3 .py, 1 .js, 1 .txt; 3 not read" in capsys.readouterr().out
    by_glob = load(f"{tmp_path}/**/*.py")
    assert sorted(texts(by_glob)) == sorted(files[name] for name in python) and [*by_glob.splits] == ["train"]
    (tmp_path / "a.md").write_text("# A title\n")
    assert texts(load(tmp_path / "a.md")) == ["# A title\n"]


def test_saved_data_sets_and_their_splits(tmp_path):
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "alone"))
    assert list(load(tmp_path / "alone")) == ROWS
    parts = {"train": ROWS[:4], "validation": ROWS[4:]}
    saved = datasets.DatasetDict({split: datasets.Dataset.from_list(rows) for split, rows in parts.items()})
    saved.save_to_disk(str(tmp_path / "saved"))
    for split, rows in parts.items():
        assert list(load(tmp_path / "saved", split=split)) == rows
        assert split in splits_of(Source(str(tmp_path / "saved")))
    with pytest.raises(ValueError, match="no split 'test'"):
        load(tmp_path / "saved", split="test")
    (tmp_path / "dict").mkdir()
    for content in ("{}", "[", '{"splits": ["train"]}'):
        (tmp_path / "dict" / "dataset_dict.json").write_text(content)
        with pytest.raises(ValueError, match="dict' cannot be loaded"):
            load(tmp_path / "dict")
    next((tmp_path / "alone").glob("*.arrow")).write_bytes(b"damage")
    with pytest.raises(ValueError, match="alone' cannot be loaded"):
        load(tmp_path / "alone")


def folder_of(path, *names) -> str:
    path.mkdir()
    for name in names:
        write_lines(path / name, [json.dumps({"text": name}).encode()])
    return str(path)


def test_the_text_column_is_the_named_one_or_content_or_text(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [b'{"title": "x", "body": "y", "file": "z"}'])
    with pytest.raises(ValueError, match="no column content or text.*title, body"):
        load(path)
    with pytest.raises(ValueError, match="no column 'words'.*title, body"):
        load(path, text_column="words")
    for column, text in (("body", "y"), ("file", "z")):
        documents = clean_documents(load(path, text_column=column), Accounting())
        assert [document for document, _, _ in documents] == [text]
    rows = [b'{"content": null}', b'{"content": "z"}']
    assert texts(load(write_lines(tmp_path / "null.jsonl", rows))) == [None, "z"]


@pytest.mark.parametrize("name", ["x" * 300, "y" * 300 + ".jsonl", "./" + "z" * 300])
def test_a_name_too_long_for_a_file_is_one_message(name):
    assert find_shards(name) is None
    with pytest.raises(ValueError, match="dataset_name"):
        load(name)


def test_brackets_in_the_name_of_an_existing_file_are_no_glob(tmp_path):
    for name in ("my[1].jsonl", "what?.jsonl", "all*.jsonl"):
        folder_of(tmp_path / f"in {name}", name, "my1.jsonl", "whats.jsonl", "allen.jsonl")
        path = tmp_path / f"in {name}" / name
        assert texts(load(path)) == [name] and find_shards(str(path)) is None
    folder = sorted(texts(load(tmp_path / "in my[1].jsonl")))
    assert folder == ["allen.jsonl", "my1.jsonl", "my[1].jsonl", "whats.jsonl"]
    assert texts(load(tmp_path / "in what?.jsonl" / "wha*.jsonl")) == ["what?.jsonl", "whats.jsonl"]


LINES = b'{"text": "one"}\n{"text": "two"}\n'
RANDOM_PARQUET = parquet_of([{"text": f"text {i} " + os.urandom(50).hex()} for i in range(2000)])
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
PZSTD = b"\x50\x2a\x4d\x18\x04\0\0\0\x10\0\0\0"  # a skippable frame with the length of the next frame
NUMBERED = [f"{i},line {i}" for i in range(200)]


def csv_with(line: str) -> bytes:
    """A CSV file of 200 rows with `line` as row 100."""
    return "\n".join(["id,text", *NUMBERED[:100], line, *NUMBERED[101:], ""]).encode()


def noise(n: int) -> bytes:
    return random.Random(0).randbytes(n)


# case: (files of a folder, texts that are read or the error message, number of unreadable documents)
CASES = {
    "BOM": ({"a.jsonl": BOM + LINES, "b.csv": BOM + b"text\nthree\n", "c.txt": BOM + b"four"},
            ["one", "two", "three", "four"], 0),
    "CRLF": ({"a.jsonl": LINES.replace(b"\n", b"\r\n"), "b.csv": b"id,text\r\n1,three\r\n"},
             ["one", "two", "three"], 0),
    **{f"{encoding} {name}": ({name: "text\n".encode(encoding)},
                              f"{name} cannot be read .*not UTF-8; convert it, as by .iconv -f utf-16", 0)
       for encoding in ("utf-16", "utf-32") for name in ("a.jsonl", "b.csv")},
    "utf-16, text": ({"a.txt": b"one", "b.txt": "é".encode("utf-16")}, ["one"], 1),
    "Latin-1": ({"a.jsonl": LINES + "{\"text\": \"é\"}".encode("latin-1")},
                "a.jsonl cannot be read .line 3: it is not UTF-8; convert it", 0),
    "Latin-1, csv": ({"a.csv": "text\né\n".encode("latin-1")}, "a.csv cannot be read .it is not UTF-8", 0),
    "Latin-1, text": ({"a.txt": b"one", "b.txt": "é".encode("latin-1")}, ["one"], 1),
    "lone surrogates": ({"a.jsonl": LINES + b'{"text": "\\ud800"}\n'}, ["one", "two"], 1),
    "null": ({"a.jsonl": LINES + b'{"text": null}\n'}, ["one", "two"], 1),
    "lists": ({"a.jsonl": LINES + b'["three"]\n'}, "a.jsonl cannot be read .line 3: must be an object", 0),
    "nested 10,000 deep": ({"a.jsonl": LINES + b"[" * 100_000}, "a.jsonl cannot be read .line 3", 0),
    "other columns of other types": ({"a.jsonl": b'{"text": "one", "m": 1}\n{"text": "two", "m": ["x"]}\n'},
                                     ["one", "two"], 0),
    "a text like a date": ({"a.jsonl": b'{"text": "2020-01-01T00:00:00"}'}, ["2020-01-01T00:00:00"], 0),
    "texts that csv readers take for none": ({"a.csv": b"text\nNA\nnull\n007\n"}, ["NA", "null", "007"], 0),
    "hidden": ({"a.txt": b"one", ".env.txt": b"x", ".git/b.txt": b"x", "__MACOSX/d.txt": b"x",
                "._c.txt": b"x",
                ".ipynb_checkpoints/a-checkpoint.txt": b"x"}, ["one"], 0),
    "semicolons": ({"a.csv": b"id;text\n1;one\n"}, "choose --text_column from: id;text", 0),
    "a .zip": ({"a.jsonl.zip": b"PK"}, "holds no file of the types", 0),
    "empty lines": ({"a.jsonl": b"\n" + LINES + b"\n\n"}, ["one", "two"], 0),
    "empty files": ({"a.jsonl": LINES, "b.jsonl": b"", "c.txt": b"", "d.csv": b"",
                     "e.jsonl.gz": PACKED[".gz"](b"")}, ["one", "two"], 0),
    "half a last line": ({"a.jsonl": LINES + b'{"text": "thr'}, "cannot be read .line 3: Unterminated", 0),
    "no last line end": ({"a.jsonl": LINES[:-1]}, ["one", "two"], 0),
    "a text that is binary": ({"a.jsonl": LINES, "b.txt": noise(1000)}, ["one", "two"], 1),
    **{f"{ending} without the ending": ({"a.jsonl": PACKED[ending](LINES)}, "cannot be read .*not UTF-8", 0)
       for ending in (".gz", ".xz", ".zst")},
    "zst of two parts": ({"a.jsonl.zst": PACKED[".zst"](LINES[:16]) + PACKED[".zst"](LINES[16:])},
                         ["one", "two"], 0),
    "zst as pzstd writes it": ({"a.txt.zst": PZSTD + PACKED[".zst"](b"one")}, ["one"], 0),
    **{f"{damage} {ending}": ({f"a.jsonl{ending}": data}, rf"l\{ending} cannot be read .*; repair it or", 0)
       for ending in (".gz", ".bz2", ".xz", ".zst") for compressed in [PACKED[ending](LINES + noise(9999))]
       for damage, data in (("cut", compressed[:5000]), ("no", b"not compressed at all"),
                            ("flipped", compressed[:4000] + b"damage" + compressed[4006:]))},
    "a clone of a dataset": ({"README.md": b"# A dataset\n", "load.py": b"import datasets\n",
                               "data.jsonl": LINES}, ["one", "two"], 0),
    "other columns": ({"a.jsonl": b'{"content": "one"}', "b.jsonl": b'{"text": "two", "id": 1}'},
                      "document 2 has no column 'content', but text, id: name files that", 0),
    "deep folders": ({"a/b/c/x.jsonl": LINES, "a/y.jsonl": b'{"text": "three"}'}, ["one", "two", "three"], 0),
    "found late": ({"a.jsonl": LINES * 200, "b.jsonl.zst": PACKED[".zst"](noise(9999))[:5000]},
                   "b.jsonl.zst cannot be read .*; repair it or take it out", 0),
    "cut parquet": ({"a.parquet": RANDOM_PARQUET[:-20]}, "a.parquet cannot be read", 0),
    "parquet, a piece gone": ({"a.parquet": RANDOM_PARQUET[:9000] + RANDOM_PARQUET[9100:]},
                              "a.parquet cannot be read", 0),
    "a line end that csv does not quote": ({"a.csv": b"id,text,label\n1,one\nhalf,x\n"},
                                           "a.csv cannot be read .record 1 has fewer fields", 0),
    "a pointer of Git LFS": ({"a.txt": b"one", "b.txt.gz": POINTER}, "b.txt.gz cannot be .*git lfs pull", 0),
    **{f"a stray quote {n}": ({"a.csv": csv_with(line)}, "a.csv cannot be read", 0)
       for n, line in enumerate(('100,"line 100', '100,"line 100" and more, "with" it'))},
    "quotes": ({"a.csv": b'id,text\n1,"a ""quoted"" word, and\na line"\n'},
               ['a "quoted" word, and\na line'], 0),
    "a file of two splits": ({"train-1.jsonl": LINES, "dev.jsonl": LINES, "train_val.jsonl": LINES},
                             "words of two splits: train_val.jsonl; rename", 0),
    "files that are no data": ({"train-1.jsonl": LINES, "dev.jsonl": LINES, "manifest.json": LINES,
                                "card.md": b"x"}, ["one", "two"], 0),
    "names that mean no split": ({"part1.jsonl": LINES[:16], "test_of_it.jsonl": LINES[16:]},
                                 ["one", "two"], 0),
    "a state.json of another program": ({"a.jsonl": LINES, "state.json": b'{"text": "x"}'},
                                        ["one", "two"], 0),
    "no parquet": ({"a.jsonl": LINES * 100, "b.parquet": LINES}, "b.parquet cannot be read", 0),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_file_is_read_or_refused_in_one_line(case, tmp_path):
    files, expected, unreadable = CASES[case]
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    counts = Accounting()
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=rf"\A[^\n]*{expected}[^\n]*\Z"):
            list(clean_documents(load(tmp_path), counts))
        return
    assert [text for text, _, _ in clean_documents(load(tmp_path), counts)] == expected
    assert counts.unreadable == unreadable
    assert counts.read == len(expected) + unreadable + counts.empty + counts.duplicate


LAYOUTS = [
    ("train.jsonl", "test.jsonl", "validation.jsonl"), ("training.jsonl", "testing.jsonl", "other.jsonl"),
    ("train/a.jsonl", "test/a.jsonl", "dev/a.jsonl"), ("train/part0/x.jsonl", "test/part0/x.jsonl"),
    ("my-train-file.jsonl", "my_val_1.jsonl", "latest.jsonl"), ("a.jsonl", "sub/b.jsonl"),
    ("data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl", "data/test-00000-of-00001.jsonl"),
    ("train/a.jsonl", "x/test.jsonl", "eval.jsonl"), ("contrasting.jsonl", "untrained.jsonl"),
]


@pytest.mark.parametrize("names", LAYOUTS)
def test_splits_are_those_of_datasets_load_dataset(names, tmp_path):
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}) + "\n")
    theirs = datasets.load_dataset(str(tmp_path), streaming=True)
    theirs = {str(split): sorted(row["text"] for row in rows) for split, rows in theirs.items()}
    for name in (tmp_path, f"{tmp_path}/**/*.jsonl"):
        ours = {split: sorted(row["text"] for row in open_corpus(Source(str(name), split=split)))
                for split in open_corpus(Source(str(name))).splits}
        assert ours == theirs


def test_a_split_folder_can_be_named_alone(tmp_path):
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "0.jsonl").write_text(json.dumps({"text": split}))
    assert [row["text"] for row in open_corpus(Source(str(tmp_path), split="test"))] == ["test"]
    assert [row["text"] for row in open_corpus(Source(f"{tmp_path}/test"))] == ["test"]


def test_files_of_other_types_are_counted_in_one_line(tmp_path, capsys):
    for name in ("a.jsonl", "b.jsonl", "b.jsonl.zip", "card.md", "train.bin", "x.pkl", "y.pkl", "LICENSE"):
        (tmp_path / name).write_bytes(LINES)
    load(tmp_path)
    assert capsys.readouterr().out == (
        f"data       {tmp_path}, files: train 2; 6 not read (such as .bin .md .pkl .zip no ending)\n")


def test_symbolic_links_are_followed_once_and_a_broken_link_is_refused(tmp_path):
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    (inside / "z").mkdir(parents=True)
    outside.mkdir()
    (inside / "z" / "a.jsonl").write_bytes(b'{"text": "one"}')
    (outside / "b.jsonl").write_bytes(b'{"text": "two"}')
    (outside / "c.jsonl").write_bytes(b'{"text": "three"}')
    (inside / "linked").symlink_to("../outside")
    (inside / "again").symlink_to("z")
    (inside / "z" / "loop").symlink_to("..")
    (outside / "loop").symlink_to("../inside/linked")
    (inside / "file.jsonl").symlink_to("z/a.jsonl")
    documents = [document["text"] for document in load(inside)]
    assert documents == ["one", "two", "three", "one"], "by name: file, linked, z"
    (inside / "nothing.jsonl").symlink_to("nowhere.jsonl")
    with pytest.raises(ValueError, match="^[^\n]*inside' cannot be read: .*nothing.jsonl[^\n]*$"):
        load(inside)


READ = """
import re, sys
import datasets

from data.documents.filters import Accounting, clean_documents
from data.documents.source import Source, open_corpus
def peak(): return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 2**10
before = peak()
counts = Accounting()
for document in clean_documents(open_corpus(Source(sys.argv[1])), counts): pass
print(counts.used, counts.unreadable, peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="asks Linux")
@pytest.mark.parametrize("what, most", [("lines", 350), ("text", 250), ("many", 60), ("binary", 60)])
def test_reading_takes_bounded_memory(tmp_path, what, most):
    """`most`: peak MiB beyond imports, for lines and texts of 50 MB, 10,000 small files, 50 MB of noise."""
    if what == "lines":
        with open(tmp_path / "a.jsonl", "w") as file:
            for number in range(4):
                file.write(json.dumps({"text": f"{number} word " * 6_000_000}) + "\n")
    if what == "text":
        (tmp_path / "a.txt").write_text("".join(f"word {number} and " for number in range(3_000_000)))
        pieces = -(-(tmp_path / "a.txt").stat().st_size // (1 << 20))  # cut each MiB
    if what == "binary":
        (tmp_path / "a.txt").write_bytes(noise(50_000_000))
        (tmp_path / "b.jsonl").write_bytes(LINES)
    for number in range(10_000 if what == "many" else 0):
        (tmp_path / f"{number}.jsonl").write_text(json.dumps({"text": f"text {number} " * 20}))
    done = subprocess.run([sys.executable, "-c", READ, tmp_path], cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    documents, unreadable, peak = done.stdout.split()
    print(what, done.stdout)
    assert int(documents) == (pieces if what == "text" else {"lines": 4, "many": 10_000, "binary": 2}[what])
    assert float(peak) < most
    assert (int(unreadable) > 0) == (what == "binary")


def test_a_file_is_read_from_a_web_address(tmp_path):
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
def test_a_missing_package_for_a_url_is_named(url, line):
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
    filtered = clean_documents(corpus, counts)
    selected = [text for text, _, _ in show_progress(filtered, "filtering")]
    expected = [text for text in documents if "pandas" in text or "seaborn" in text]
    assert selected == expected and counts.filtered == 500 - len(expected)
    assert f"{counts.filtered:,} without a keyword" in counts.line()


def test_reading_text_imports_neither_datasets_nor_pyarrow(tmp_path):
    """They would take 85 MB and half a second in each process of each run."""
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
