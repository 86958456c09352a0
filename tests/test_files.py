"""Files as people have them: each is read, or named in one line and counted, in bounded memory."""

import bz2
import gzip
import json
import lzma
import os
import random
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet
import pytest

from data.filters import Accounting, clean_documents
from data.sources.corpus import Source, load_corpus
from tests.runs import PROJECT

LINES = b'{"text": "one"}\n{"text": "two"}\n'
TABLE = pa.table({"text": [f"text {i} " + os.urandom(50).hex() for i in range(2000)]})
BOM = b"\xef\xbb\xbf"


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
    "CRLF, WikiText": ({"a.txt": b" = A = \r\n \r\n x \r\n \r\n = B = \r\n \r\n y \r\n"},
                       [" = A = \r\n \r\n x \r\n \r\n", " = B = \r\n \r\n y \r\n"], 0),
    "UTF-16": ({"a.jsonl": LINES, "b.jsonl": LINES.decode().encode("utf-16"), "c.txt": "x".encode("utf-16")},
               ["one", "two"], 3),
    "empty lines": ({"a.jsonl": b"\n" + LINES + b"\n\n"}, ["one", "two"], 3),
    "empty files": ({"a.jsonl": LINES, "b.jsonl": b"", "c.txt": b"", "d.csv": b"",
                     "e.jsonl.gz": packed(".gz", b"")}, ["one", "two"], 0),
    "half a last line": ({"a.jsonl": LINES + b'{"text": "thr'}, ["one", "two"], 1),
    "no last line end": ({"a.jsonl": LINES[:-1]}, ["one", "two"], 0),
    "a text that is binary": ({"a.jsonl": LINES, "b.txt": noise(1000), "c.jsonl": b"\0\xff" * 50},
                              ["one", "two"], 2),
    "nested": ({"a/b/c/x.jsonl": LINES, "a/y.jsonl": b'{"text": "three"}'}, ["one", "two", "three"], 0),
    **{f"{ending} without saying so": ({"a.jsonl": packed(ending, LINES)}, ["one", "two"], 0)
       for ending in (".gz", ".bz2", ".xz", ".zst")},
    "zst": ({"a.jsonl.zst": packed(".zst", LINES), "b.txt.zst": packed(".zst", b"three"),
             "c.csv.zst": packed(".zst", b"text\nfour\n")}, ["one", "two", "three", "four"], 0),
    "zst of two parts": ({"a.jsonl.zst": packed(".zst", LINES[:16]) + packed(".zst", LINES[16:])},
                         ["one", "two"], 0),
    **{f"cut {ending}": ({f"a.jsonl{ending}": packed(ending, LINES + noise(9999))[:5000]},
                         rf"a.jsonl\{ending} is damaged .*; repair it or", 0)
       for ending in (".gz", ".bz2", ".xz", ".zst")},
    "found late": ({"a.jsonl": LINES * 200, "b.jsonl.zst": packed(".zst", noise(9999))[:5000]},
                   "b.jsonl.zst is damaged .*; repair it or take it out", 0),
    "cut parquet": ({"a.parquet": parquet()[:-20]}, "a.parquet is damaged", 0),
    "parquet, a piece gone": ({"a.parquet": parquet()[:9000] + parquet()[9100:]}, "a.parquet is damaged", 0),
    "no parquet": ({"a.jsonl": LINES * 100, "b.parquet": LINES}, "b.parquet is damaged", 0),
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
            list(clean_documents(load_corpus(Source(str(tmp_path))), counts))
        return
    corpus = load_corpus(Source(str(tmp_path)))
    assert [document["text"] for document in clean_documents(corpus, counts)] == expected
    assert counts.unreadable == unreadable
    assert counts.read == len(expected) + unreadable + counts.empty + counts.duplicate


def test_a_stray_quote_in_a_csv_is_told_and_no_document_swallows_others(tmp_path):
    rows = [f"{i},line {i}" for i in range(200)]
    for number, stray in enumerate(('100,"line 100', '100,"line 100" and more, "with" it')):
        path = tmp_path / f"{number}.csv"
        path.write_text("\n".join(["id,text", *rows[:100], stray, *rows[101:]]) + "\n")
        with pytest.raises(ValueError, match=rf"{number}.csv is damaged"):
            list(load_corpus(Source(str(path))))
    (tmp_path / "good.csv").write_text('id,text\n1,"a ""quoted"" word, and\na line"\n')
    assert [row["text"] for row in load_corpus(Source(str(tmp_path / "good.csv")))] == [
        'a "quoted" word, and\na line']


def test_folders_named_after_splits_are_splits_and_one_folder_alone_says_nothing(tmp_path):
    for split in ("train", "validation", "test"):
        (tmp_path / "texts" / split).mkdir(parents=True)
        (tmp_path / "texts" / split / "0.jsonl").write_text(json.dumps({"text": split}))
    for split in ("train", "validation", "test"):
        assert [row["text"] for row in load_corpus(Source(f"{tmp_path}/texts", split=split))] == [split]
    assert [row["text"] for row in load_corpus(Source(f"{tmp_path}/texts/test"))] == ["test"]


def test_files_of_different_columns_are_told(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"content": "one"}) + "\n")
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "two", "id": 1}) + "\n")
    with pytest.raises(ValueError, match="document 2 has no column 'content', but text, id: name files that"):
        list(clean_documents(load_corpus(Source(str(tmp_path))), Accounting()))


@pytest.mark.parametrize("text", ["word and\n" * 500_000, "word " * 900_000, "日本語" * 500_000])
def test_a_text_without_blank_lines_becomes_documents_of_a_megabyte_and_nothing_is_lost(tmp_path, text):
    (tmp_path / "a.txt").write_text(text)
    found = [row["text"] for row in load_corpus(Source(str(tmp_path / "a.txt")))]
    assert "".join(found) == text and len(found) > 3
    assert max(len(piece.encode()) for piece in found) <= 1 << 21


def test_other_types_are_counted_in_one_line(tmp_path, capsys):
    for name in ("a.jsonl", "b.jsonl", "b.jsonl.zip", "card.md", "train.bin", "x.pkl", "y.pkl", "LICENSE"):
        (tmp_path / name).write_bytes(LINES)
    load_corpus(Source(str(tmp_path)))
    assert capsys.readouterr().out == (
        f"{tmp_path}: 2 files are read, others are not: .bin 1, .md 1, .pkl 2, .zip 1, without any 1\n")


def test_source_code_is_selected_by_a_glob_and_each_file_is_a_document(tmp_path):
    """Names such as train.py are no splits there. A folder is not read so, as it may hold anything."""
    written = {"a.py": "a = 1\n", "train.py": "b = 2\n", "tests/test_c.py": "c = 3\n", "d/empty.py": ""}
    for name, text in written.items():
        (tmp_path / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "src" / name).write_text(text)
    (tmp_path / "src" / "a.md").write_text("# A title\n")
    corpus = load_corpus(Source(f"{tmp_path}/src/**/*.py"))
    assert sorted(row["text"] for row in corpus) == sorted(written.values()) and [*corpus.splits] == ["train"]
    assert [row["text"] for row in load_corpus(Source(f"{tmp_path}/src/a.md"))] == ["# A title\n"]
    with pytest.raises(ValueError, match="holds no file of the types"):
        load_corpus(Source(f"{tmp_path}/src"))


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
    found = [document["text"] for document in load_corpus(Source(str(inside)))]
    assert found == ["one", "two", "three", "one"], "by name: file, linked, z"
    (inside / "nothing.jsonl").symlink_to("nowhere.jsonl")
    with pytest.raises(ValueError, match="^[^\n]*inside' cannot be read: .*nothing.jsonl[^\n]*$"):
        load_corpus(Source(str(inside)))


READ = """
import re, sys
from data.filters import Accounting, clean_documents
from data.sources.corpus import Source, load_corpus
def peak(): return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 2**10
before = peak()
counts = Accounting()
for document in clean_documents(load_corpus(Source(sys.argv[1])), counts): pass
print(counts.kept, counts.unreadable, peak() - before)
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
