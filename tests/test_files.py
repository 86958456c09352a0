"""Files as people have them: each is read, or named in one line and counted, in bounded memory."""

import bz2
import gzip
import json
import lzma
import os
import random
import subprocess
import sys

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from data.documents.filters import Accounting, clean_documents
from data.documents.source import Source, open_corpus
from tests.runs import PROJECT

LINES = b'{"text": "one"}\n{"text": "two"}\n'
TABLE = pa.table({"text": [f"text {i} " + os.urandom(50).hex() for i in range(2000)]})
BOM = b"\xef\xbb\xbf"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
PZSTD = b"\x50\x2a\x4d\x18\x04\0\0\0\x10\0\0\0"  # a frame to be skipped: the length of the next one


def packed(ending: str, data: bytes) -> bytes:
    compress = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress,
                ".zst": lambda data: pa.compress(data, "zstd", asbytes=True)}
    return compress[ending](data)


def parquet() -> bytes:
    sink = pa.BufferOutputStream()
    pa.parquet.write_table(TABLE, sink)
    return sink.getvalue().to_pybytes()


def noise(n: int) -> bytes:
    return random.Random(0).randbytes(n)


# a folder's files -> the texts that are read of it and how many were no text, or what its one line says
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
    "semicolons": ({"a.csv": b"id;text\n1;one\n"}, "give --text_column one that holds text: id;text", 0),
    "a .zip": ({"a.jsonl.zip": b"PK"}, "holds no file of the types", 0),
    "empty lines": ({"a.jsonl": b"\n" + LINES + b"\n\n"}, ["one", "two"], 0),
    "empty files": ({"a.jsonl": LINES, "b.jsonl": b"", "c.txt": b"", "d.csv": b"",
                     "e.jsonl.gz": packed(".gz", b"")}, ["one", "two"], 0),
    "half a last line": ({"a.jsonl": LINES + b'{"text": "thr'}, "cannot be read .line 3: Unterminated", 0),
    "no last line end": ({"a.jsonl": LINES[:-1]}, ["one", "two"], 0),
    "a text that is binary": ({"a.jsonl": LINES, "b.txt": noise(1000)}, ["one", "two"], 1),
    **{f"{ending} without the ending": ({"a.jsonl": packed(ending, LINES)}, "cannot be read .*not UTF-8", 0)
       for ending in (".gz", ".xz", ".zst")},
    "zst of two parts": ({"a.jsonl.zst": packed(".zst", LINES[:16]) + packed(".zst", LINES[16:])},
                         ["one", "two"], 0),
    "zst as pzstd writes it": ({"a.txt.zst": PZSTD + packed(".zst", b"one")}, ["one"], 0),
    **{f"{damage} {ending}": ({f"a.jsonl{ending}": data}, rf"l\{ending} cannot be read .*; repair it or", 0)
       for ending in (".gz", ".bz2", ".xz", ".zst") for whole in [packed(ending, LINES + noise(9999))]
       for damage, data in (("cut", whole[:5000]), ("no", b"not compressed at all"),
                            ("flipped", whole[:4000] + b"damage" + whole[4006:]))},
    "a clone of a data set": ({"README.md": b"# A data set\n", "load.py": b"import datasets\n",
                               "data.jsonl": LINES}, ["one", "two"], 0),
    "other columns": ({"a.jsonl": b'{"content": "one"}', "b.jsonl": b'{"text": "two", "id": 1}'},
                      "document 2 has no column 'content', but text, id: name files that", 0),
    "deep folders": ({"a/b/c/x.jsonl": LINES, "a/y.jsonl": b'{"text": "three"}'}, ["one", "two", "three"], 0),
    "found late": ({"a.jsonl": LINES * 200, "b.jsonl.zst": packed(".zst", noise(9999))[:5000]},
                   "b.jsonl.zst cannot be read .*; repair it or take it out", 0),
    "cut parquet": ({"a.parquet": parquet()[:-20]}, "a.parquet cannot be read", 0),
    "parquet, a piece gone": ({"a.parquet": parquet()[:9000] + parquet()[9100:]}, "a.parquet cannot be", 0),
    "a line end that csv does not quote": ({"a.csv": b"id,text,label\n1,one\nhalf,x\n"},
                                           "a.csv cannot be read .record 1 has fewer fields", 0),
    "a pointer of Git LFS": ({"a.txt": b"one", "b.txt.gz": POINTER}, "b.txt.gz cannot be .*git lfs pull", 0),
    "no parquet": ({"a.jsonl": LINES * 100, "b.parquet": LINES}, "b.parquet cannot be read", 0),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_it_is_read_or_named_and_counted(case, tmp_path):
    files, expected, unreadable = CASES[case]
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    counts = Accounting()
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=rf"\A[^\n]*{expected}[^\n]*\Z"):
            list(clean_documents(open_corpus(Source(str(tmp_path))), counts))
        return
    corpus = open_corpus(Source(str(tmp_path)))
    assert [text for text, _, _ in clean_documents(corpus, counts)] == expected
    assert counts.unreadable == unreadable
    assert counts.read == len(expected) + unreadable + counts.empty + counts.duplicate


def test_a_column_named_file_may_hold_the_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINES.replace(b"text", b"file"))
    corpus = open_corpus(Source(str(tmp_path), text_column="file"))
    assert [text for text, _, _ in clean_documents(corpus, Accounting())] == ["one", "two"]


def test_a_stray_quote_in_a_csv_is_told_and_no_document_swallows_others(tmp_path):
    rows = [f"{i},line {i}" for i in range(200)]
    for number, stray in enumerate(('100,"line 100', '100,"line 100" and more, "with" it')):
        path = tmp_path / f"{number}.csv"
        path.write_text("\n".join(["id,text", *rows[:100], stray, *rows[101:]]) + "\n")
        with pytest.raises(ValueError, match=rf"{number}.csv cannot be read"):
            list(open_corpus(Source(str(path))))
    (tmp_path / "good.csv").write_text('id,text\n1,"a ""quoted"" word, and\na line"\n')
    assert [row["text"] for row in open_corpus(Source(str(tmp_path / "good.csv")))] == [
        'a "quoted" word, and\na line']


def test_one_folder_named_after_a_split_is_no_split(tmp_path):
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "0.jsonl").write_text(json.dumps({"text": split}))
    assert [row["text"] for row in open_corpus(Source(str(tmp_path), split="test"))] == ["test"]
    assert [row["text"] for row in open_corpus(Source(f"{tmp_path}/test"))] == ["test"]


LAYOUTS = [
    ("train.jsonl", "test.jsonl", "validation.jsonl"), ("training.jsonl", "testing.jsonl", "other.jsonl"),
    ("train/a.jsonl", "test/a.jsonl", "dev/a.jsonl"), ("train/part0/x.jsonl", "test/part0/x.jsonl"),
    ("my-train-file.jsonl", "my_val_1.jsonl", "latest.jsonl"), ("a.jsonl", "sub/b.jsonl"),
    ("data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl", "data/test-00000-of-00001.jsonl"),
    ("train/a.jsonl", "x/test.jsonl", "eval.jsonl"), ("contrasting.jsonl", "untrained.jsonl"),
]


@pytest.mark.parametrize("names", LAYOUTS)
def test_splits_are_those_of_load_dataset(names, tmp_path):
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}) + "\n")
    theirs = datasets.load_dataset(str(tmp_path), streaming=True)
    theirs = {str(split): sorted(row["text"] for row in rows) for split, rows in theirs.items()}
    for name in (tmp_path, f"{tmp_path}/**/*.jsonl"):
        ours = {split: sorted(row["text"] for row in open_corpus(Source(str(name), split=split)))
                for split in open_corpus(Source(str(name))).splits}
        assert ours == theirs


@pytest.mark.parametrize("text", ["word and\n" * 500_000, "word " * 900_000, "日本語" * 500_000])
def test_a_text_without_blank_lines_becomes_documents_of_a_megabyte_and_nothing_is_lost(tmp_path, text):
    (tmp_path / "a.txt").write_text(text)
    found = [row["text"] for row in open_corpus(Source(str(tmp_path / "a.txt")))]
    assert "".join(found) == text and len(found) > 3
    assert max(len(piece.encode()) for piece in found) <= 1 << 21


def test_other_types_are_counted_in_one_line(tmp_path, capsys):
    for name in ("a.jsonl", "b.jsonl", "b.jsonl.zip", "card.md", "train.bin", "x.pkl", "y.pkl", "LICENSE"):
        (tmp_path / name).write_bytes(LINES)
    open_corpus(Source(str(tmp_path)))
    assert capsys.readouterr().out == (
        f"data       {tmp_path}, files: train 2; 6 not read (such as .bin .md .pkl .zip no ending)\n")


def test_source_code_is_selected_by_a_glob_and_each_file_is_a_document(tmp_path):
    """Names such as train.py are no splits there."""
    written = {"a.py": "a = 1\n", "train.py": "b = 2\n", "tests/test_c.py": "c = 3\n", "d/empty.py": ""}
    for name, text in written.items():
        (tmp_path / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "src" / name).write_text(text)
    (tmp_path / "src" / "a.md").write_text("# A title\n")
    corpus = open_corpus(Source(f"{tmp_path}/src/**/*.py"))
    assert sorted(row["text"] for row in corpus) == sorted(written.values()) and [*corpus.splits] == ["train"]
    assert [row["text"] for row in open_corpus(Source(f"{tmp_path}/src/a.md"))] == ["# A title\n"]


def test_links_are_followed_once_and_one_to_nothing_is_named(tmp_path):
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
    found = [document["text"] for document in open_corpus(Source(str(inside)))]
    assert found == ["one", "two", "three", "one"], "by name: file, linked, z"
    (inside / "nothing.jsonl").symlink_to("nowhere.jsonl")
    with pytest.raises(ValueError, match="^[^\n]*inside' cannot be read: .*nothing.jsonl[^\n]*$"):
        open_corpus(Source(str(inside)))


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
def test_memory_is_bounded(tmp_path, what, most):
    """Peak MiB beyond the imports: of lines and texts of 50 MB, 10,000 small files, 50 MB of no text."""
    if what == "lines":
        with open(tmp_path / "a.jsonl", "w") as file:
            for number in range(4):
                file.write(json.dumps({"text": f"{number} word " * 6_000_000}) + "\n")
    if what == "text":
        (tmp_path / "a.txt").write_text("".join(f"word {number} and " for number in range(3_000_000)))
        pieces = -(-(tmp_path / "a.txt").stat().st_size // (1 << 20))  # without blank lines it is cut there
    if what == "binary":
        (tmp_path / "a.txt").write_bytes(noise(50_000_000))
        (tmp_path / "b.jsonl").write_bytes(LINES)
    for number in range(10_000 if what == "many" else 0):
        (tmp_path / f"{number}.jsonl").write_text(json.dumps({"text": f"text {number} " * 20}))
    done = subprocess.run([sys.executable, "-c", READ, tmp_path], cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kept, unreadable, peak = done.stdout.split()
    print(what, done.stdout)
    assert int(kept) == (pieces if what == "text" else {"lines": 4, "many": 10_000, "binary": 2}[what])
    assert float(peak) < most
    assert (int(unreadable) > 0) == (what == "binary")
