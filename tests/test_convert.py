"""data.convert reads the token files of other projects, or says in one line what is wrong with them.

TensorFlow 2.21 wrote tests/tfrecords as transformers' prepare_tfrecord_shards.py does:

    with tf.io.TFRecordWriter(f"{split}/dataset-{shard}-{records}.tfrecord") as out:
        lists = {"input_ids": record(n), "attention_mask": [1] * 32}
        lists = {name: tf.train.Feature(int64_list=tf.train.Int64List(value=x)) for name, x in lists.items()}
        out.write(tf.train.Example(features=tf.train.Features(feature=lists)).SerializeToString())
"""

import gzip
import os
import pickle
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from crc32c import crc32c

from data import convert
from tests.data_runs import all_ids, exit_status, load, save_tokenizer, tokens_of
from tests.runs import PROJECT

RECORDS = PROJECT / "tests" / "tfrecords"
T, KNOWN = 32, 400  # tokens of a row; vocabulary size of the tokenizers


def record(n: int) -> list[int]:
    """Token ids of record n of tests/tfrecords. n counts over all files."""
    return [(n * 31 + t * t) % 300 for t in range(T)]


def ids(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, KNOWN, n)


def nanogpt(path, tokens, kind="<u2") -> str:
    """Writes a .bin file as nanoGPT's data/*/prepare.py does."""
    np.array(tokens, dtype=kind).tofile(path)
    return str(path)


def llmc(path, tokens, magic=20240520, version=1, count=None, letter="H") -> str:
    """Writes a .bin file by llm.c's description: a header of 256 int32, then the tokens."""
    header = struct.pack("<256i", magic, version, len(tokens) if count is None else count, *[0] * 253)
    Path(path).write_bytes(header + struct.pack(f"<{len(tokens)}{letter}", *map(int, tokens)))
    return str(path)


def datatrove(path, documents: list, eos=None, count=None) -> str:
    """Writes a .ds file by its description: ids of all documents, the end of each, and metadata."""
    flat = [[*document, *([] if eos is None else [eos])] for document in documents]
    np.concatenate(flat).astype("<u2").tofile(path)
    np.cumsum([len(document) for document in flat]).astype("<u8").tofile(f"{path}.index")
    count = sum(map(len, flat)) if count is None else count
    Path(f"{path}.metadata").write_text(f"gpt2|2\n{count}\n{count} T")
    return str(path)


def varint(n: int) -> bytes:
    return (bytes([n & 127 | 128]) + varint(n >> 7)) if n > 127 else bytes([n])


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def feature(name: bytes, kind: int, values: bytes) -> bytes:
    return field(1, field(1, name) + field(2, field(kind, values)))


def tfrecord(path, examples: list[bytes]) -> str:
    def checked(data: bytes) -> bytes:
        crc = crc32c(data)
        return data + struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32)

    data = [field(1, b"".join(features)) for features in examples]
    parts = (part for record in data for part in (struct.pack("<Q", len(record)), record))
    Path(path).write_bytes(b"".join(map(checked, parts)))
    return str(path)


INT, FLOAT, MASK = 3, 2, b"attention_mask"
IDS = feature(b"input_ids", INT, field(1, bytes([7, 8, 9, 4])))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def convert_file(source, out, tokenizer, *words) -> Path:
    assert exit_status(convert.main, [source, out, "--tokenizer_name", tokenizer, *words]) == 0
    return out


def fail_to_convert(source, out, tokenizer, capsys, *words) -> str:
    assert exit_status(convert.main, [source, out, "--tokenizer_name", tokenizer, *words]) == 2
    assert not (Path(out) / "manifest.json").exists()
    return capsys.readouterr().err


def test_converted_ids_are_those_of_the_file(tmp_path, tokenizer):
    (tmp_path / "in").mkdir()
    nanogpt(tmp_path / "in" / "train.bin", ids(3000))
    nanogpt(tmp_path / "in" / "val.bin", ids(700, 1))
    out = convert_file(tmp_path / "in", tmp_path / "out", tokenizer, "--shard_mb", "0.001")
    assert tokens_of(out, "train").tolist() == ids(3000).tolist() and len(list(out.glob("train-*"))) == 6
    assert tokens_of(out, "validation").tolist() == ids(700, 1).tolist()
    fineweb = tmp_path / "fineweb"
    fineweb.mkdir()
    for number, size in enumerate((1000, 20, 500)):
        llmc(fineweb / f"fineweb_train_{number:06}.bin", ids(size, number))
    llmc(fineweb / "fineweb_val_000000.bin", ids(300, 9))
    out = convert_file(fineweb, tmp_path / "two", tokenizer)
    assert tokens_of(out, "train").tolist() == [*ids(1000), *ids(20, 1), *ids(500, 2)]
    llama = llmc(tmp_path / "llama.bin", ids(900), 20240801, 7, letter="I")
    out = convert_file(llama, tmp_path / "three", tokenizer)
    assert tokens_of(out, "train").tolist() == ids(900).tolist()
    for kind, name in (("<u4", "uint32"), ("<i8", "int64"), ("<i4", "int32")):
        path = nanogpt(tmp_path / f"{name}.bin", ids(500), kind)
        out = convert_file(path, tmp_path / name, tokenizer, "--dtype", name)
        assert tokens_of(out, "train").tolist() == ids(500).tolist()


def test_a_missing_crc32c_names_the_command_that_installs_it(tmp_path, tokenizer, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "crc32c", None)  # importing it fails
    assert "pip install crc32c" in fail_to_convert(RECORDS, tmp_path / "out", tokenizer, capsys)


def test_tfrecords_written_by_tensorflow_become_rows(tmp_path, tokenizer):
    out = convert_file(RECORDS, tmp_path / "out", tokenizer, "--shard_mb", "0.0001")
    splits = {"train": range(40), "validation": range(40, 48), "test": range(48, 49)}
    for split, numbers in splits.items():
        assert tokens_of(out, split).reshape(-1, T).tolist() == [record(n) for n in numbers]
    _, rows, evals = load(tmp_path, out, block_size=T)
    assert all_ids(rows).tolist() == [record(n) for n in range(40)] and np.isnan(evals[""].bytes_per_token)
    with pytest.raises(ValueError, match="have 32 tokens: set --block_size 32"):
        load(tmp_path, out, block_size=16)


def test_datatrove_documents_end_with_eos(tmp_path, tokenizer):
    documents = [ids(size, size) % (KNOWN - 1) + 1 for size in (30, 7, 100)]
    expected = [token for document in documents for token in [*document, 0]]
    for name, eos in (("with", 0), ("without", None)):
        (tmp_path / name).mkdir()
        datatrove(tmp_path / name / "00000_a.ds", documents[:2], eos)
        datatrove(tmp_path / name / "00001_a.ds", documents[2:], eos)
        out = convert_file(tmp_path / name, tmp_path / f"{name} out", tokenizer)
        assert tokens_of(out, "train").tolist() == expected


@pytest.mark.parametrize(("write", "message"), [
    (lambda p: llmc(p / "a.bin", ids(100), count=101), "header says 101 tokens"),
    (lambda p: llmc(p / "a.bin", ids(100), version=2), "version 2 of magic 20240520"),
    (lambda p: llmc(p / "a.bin", ids(100), magic=77), "a header with magic 77"),
    (lambda p: nanogpt(p / "a.bin", [*ids(500), 400]), "the id 400"),
    (lambda p: nanogpt(p / "a.bin", ids(500), "<u4"), "look like uint32: give --dtype uint32"),
    (lambda p: nanogpt(p / "a.bin", ids(500), "<i8"), "look like int64: give --dtype int64"),
    (lambda p: (p / "a.bin").write_bytes(b"odd") and p / "a.bin", "truncated: 3 bytes"),
    (lambda p: (p / "a.bin").write_text("a text " * 99) and p / "a.bin", "text, an array or a compressed "
                                                                         "file"),
    (lambda p: (p / "a.bin").write_bytes(gzip.compress(os.urandom(999))) and p / "a.bin", "compressed file"),
    (lambda p: tfrecord(p / "a.tfrecord", [[IDS], [feature(b"input_ids", INT, field(1, bytes([1])))]]),
     "record 2: 1 tokens, but the first one has 4"),
    (lambda p: tfrecord(p / "a.tfrecord", [[IDS, feature(MASK, INT, field(1, bytes([1, 1, 1, 0])))]]),
     "padding: attention_mask is not all ones"),
    (lambda p: tfrecord(p / "a.tfrecord", [[IDS, feature(MASK, FLOAT, field(1, struct.pack(
        "<4f", 1, 1, 0, 0)))]]), "padding: attention_mask is not all ones"),
    (lambda p: tfrecord(p / "a.tfrecord", [[feature(b"input_ids", FLOAT, field(1, struct.pack("<f", 1.0)))]]),
     "no int64 list input_ids"),
    (lambda p: tfrecord(p / "a.tfrecord", [[feature(b"text", 1, field(1, b"words"))]]), "but text"),
    (lambda p: (p / "a.tfrecord").write_bytes(next(RECORDS.rglob("*.tfrecord")).read_bytes()[:99])
     and p / "a.tfrecord", "truncated"),
    (lambda p: datatrove(p / "a.ds", [ids(10)], count=11), "its metadata says 11"),
    (lambda p: p / "gone.bin", "no such file"),
    (lambda p: p / "gone", "no token files; as a dataset of sentence pairs it cannot be read"),
])  # fmt: skip
def test_each_broken_file_is_one_line(write, message, tmp_path, tokenizer, capsys):
    error = fail_to_convert(write(tmp_path), tmp_path / "out", tokenizer, capsys)
    assert message in error and "Traceback" not in error and error.count("\n") == 1


def test_without_a_validation_file_the_last_rows_are_held_out(tmp_path, tokenizer, capsys):
    """The last ids of a .bin file, as nanoGPT does; the last rows of TFRecords."""
    path, more = nanogpt(tmp_path / "one.bin", ids(1000)), ("--validation_fraction", "0.101")
    out = convert_file(path, tmp_path / "ids", tokenizer, *more)
    assert tokens_of(out, "train").tolist() == ids(1000)[:899].tolist()
    assert tokens_of(out, "validation").tolist() == ids(1000)[899:].tolist()
    assert len(load(tmp_path, out)[2][""]) == 101 // 16
    (tmp_path / "in").mkdir()
    for file in RECORDS.glob("train/*"):
        (tmp_path / "in" / file.name).write_bytes(file.read_bytes())
    out = convert_file(tmp_path / "in", tmp_path / "rows", tokenizer, *more)
    for split, numbers in {"train": range(35), "validation": range(35, 40)}.items():
        assert tokens_of(out, split).reshape(-1, T).tolist() == [record(n) for n in numbers]
    plain, fraction = (convert_file(RECORDS, tmp_path / f"{n}", tokenizer, *more[:n]) for n in (0, 2))
    assert all((tokens_of(plain, split) == tokens_of(fraction, split)).all() for split in ("train", "test"))
    assert "validation_fraction: must be in [0, 1), is 1.0" in fail_to_convert(
        path, tmp_path / "no", tokenizer, capsys, "--validation_fraction", "1")


def test_training_on_token_files_names_the_convert_command(tmp_path, tokenizer):
    path = nanogpt(tmp_path / "train.bin", ids(500))
    for name in (path, tmp_path, f"{tmp_path}/*.bin"):
        with pytest.raises(ValueError, match=r"holds token ids: run `python -m data.convert "):
            load(tmp_path, name, tokenizer_name=tokenizer)


def test_a_folder_in_use_and_another_tokenizer_are_refused(tmp_path, tokenizer, capsys):
    path, other = nanogpt(tmp_path / "train.bin", ids(500)), save_tokenizer(tmp_path / "other", seed=3)
    out = convert_file(path, tmp_path / "out", tokenizer)
    assert exit_status(convert.main, [path, out, "--tokenizer_name", tokenizer]) == 2
    assert "is not empty: name a new folder" in capsys.readouterr().err
    with pytest.raises(ValueError, match="not the tokenizer that made"):
        load(tmp_path, out, tokenizer_name=other, eval_dataset_name=[path])
    with pytest.raises(ValueError, match="set eval_dataset_name"):
        load(tmp_path, out)
    with pytest.raises(ValueError, match="is also the training data: name other data to evaluate on"):
        load(tmp_path, out, eval_dataset_name=[str(out)])


def test_no_pickle_is_opened(tmp_path, tokenizer):
    class Harm:
        def __reduce__(self):
            return Path.touch, (tmp_path / "harm",)

    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "meta.pkl").write_bytes(pickle.dumps(Harm()))
    nanogpt(tmp_path / "in" / "train.bin", ids(500))
    convert_file(tmp_path / "in", tmp_path / "out", tokenizer)
    assert not (tmp_path / "harm").exists()
