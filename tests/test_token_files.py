"""Token files that other projects wrote: their rows as they were put in, what is wrong with them in a line.

tests/tfrecords was written by TensorFlow 2.21, in the way of transformers' prepare_tfrecord_shards.py:

    with tf.io.TFRecordWriter(f"{split}/dataset-{shard}-{records}.tfrecord") as out:
        lists = {"input_ids": record(n), "attention_mask": [1] * 32}
        lists = {name: tf.train.Feature(int64_list=tf.train.Int64List(value=x)) for name, x in lists.items()}
        out.write(tf.train.Example(features=tf.train.Features(feature=lists)).SerializeToString())
"""

import gzip
import shutil
import struct
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from accelerate import Accelerator
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from data.open import Recipe, open_sources, prepare
from data.token_files import _full_row, _records, holds_token_files, open_token_files
from data.tokenizer import train_tokenizer
from tests import forked
from tests.runs import PROJECT, TINY, metrics
from tests.shard_data import batch_of, make_texts, save_tokenizer, write_jsonl

RECORDS = PROJECT / "tests" / "tfrecords"
T, KNOWN = 32, 400  # tokens of a row; ids of the tokenizers below


def record(n: int) -> list[int]:
    """The numbers of record n of tests/tfrecords, which goes on from file to file."""
    return [(n * 31 + t * t) % 300 for t in range(T)]


def ids(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, KNOWN, n)


def write_nanogpt(path, tokens) -> str:
    """As its data/*/prepare.py."""
    np.array(tokens, dtype=np.uint16).tofile(path)
    return str(path)


def write_llmc(path, tokens, magic=20240520, version=1, told=None, letter="H") -> str:
    """By its format's description alone: a header of 256 int32, then the tokens."""
    header = struct.pack("<256i", magic, version, len(tokens) if told is None else told, *[0] * 253)
    Path(path).write_bytes(header + struct.pack(f"<{len(tokens)}{letter}", *map(int, tokens)))
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("foreign")
    save_tokenizer(folder / "bpe")
    train_tokenizer(make_texts(50), "bpe", KNOWN, "roberta").save_pretrained(folder / "masked")
    write_nanogpt(folder / "train.bin", ids(3000))
    write_nanogpt(folder / "val.bin", ids(700, 1))
    (folder / "fineweb").mkdir()
    for number, size in enumerate((1000, 20, 500)):
        write_llmc(folder / "fineweb" / f"fineweb_train_{number:06}.bin", ids(size, number))
    write_llmc(folder / "fineweb" / "fineweb_val_000000.bin", ids(300, 9))
    write_llmc(folder / "llama.bin", ids(900), 20240801, 7, letter="I")
    return folder


def opened(name, split="train", block_size=T) -> np.ndarray:
    with tempfile.TemporaryDirectory() as cache:
        rows = open_token_files(str(name), cache).rows(split, block_size)
        return batch_of(rows, [(0, 0, row) for row in range(len(rows))])["input_ids"].numpy()


def cut(*streams) -> np.ndarray:
    stream = np.concatenate(streams)
    return stream[: len(stream) // T * T].reshape(-1, T)


def test_rows_are_those_that_were_put_in(folder):
    assert np.array_equal(opened(folder / "train.bin"), cut(ids(3000)))
    assert np.array_equal(opened(folder / "llama.bin"), cut(ids(900)))
    expected = cut(ids(1000), ids(20, 1), ids(500, 2))
    assert np.array_equal(opened(folder / "fineweb"), expected)
    assert np.array_equal(opened(folder / "fineweb", "validation"), cut(ids(300, 9)))
    assert np.array_equal(opened(folder / "fineweb" / "*train*.bin"), expected)
    assert holds_token_files(str(folder / "fineweb")) and not holds_token_files(str(folder / "bpe"))


def test_records_that_tensorflow_wrote_are_read(tmp_path):
    shutil.copytree(RECORDS, tmp_path / "records")
    splits = {"train": range(40), "validation": range(40, 48), "test": range(48, 49)}
    for split, numbers in splits.items():
        assert opened(tmp_path / "records", split).tolist() == [record(n) for n in numbers]
    assert opened(tmp_path / "records" / "train", "train").tolist() == [record(n) for n in range(40)]
    # one of 0, 127, 128, 16383, 16384, 2**21, 2**31 and 2**32 - 1, of one to five bytes each
    wide = (
        "4c00000000000000f5d4a2a00a4a0a280a09696e7075745f696473121b1a190a17007f8001ff7f80800180808001"
        "8080808008ffffffff0f0a1e0a0e617474656e74696f6e5f6d61736b120c1a0a0a080101010101010101be7232e3"
    )
    (tmp_path / "wide").write_bytes(bytes.fromhex(wide))
    with open(tmp_path / "wide", "rb") as file:
        (found,) = map(_full_row, _records(file))
    assert found.tolist() == [0, 127, 128, 16383, 16384, 2**21, 2**31, 2**32 - 1]


def damaged(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def bad_files(folder: Path) -> dict[str, tuple[str, str]]:
    """Name -> (path, what its line must say)."""
    whole = (RECORDS / "train" / "dataset-0-24.tfrecord").read_bytes()
    flat = np.array(ids(3000), np.uint16).tobytes()
    files = {
        "odd.bin": (flat[:-1], "truncated: 5,999 bytes"),
        "empty.bin": (b"", "truncated: 0 bytes"),
        "int32.bin": (np.array(ids(3000), np.int32).tobytes(), r"ids look like uint32: add \?dtype"),
        "cut-record.tfrecord": (whole[:-7], "record 23: truncated after it"),
        "cut-head.tfrecord": (whole[:-136], "record 23: truncated after it"),
        "dataset-0-24.tfrecord": (whole[: 16 + whole[0]], "record 1: truncated: .*name says there are more"),
        "nothing.tfrecord": (b"", "record 0: truncated"),
        "length.tfrecord": (damaged(whole, 2), "record 0: the next record's checksum is wrong"),
        "data.tfrecord": (damaged(whole, 500), "record 3: the next record's checksum is wrong"),
        "other.tfrecord": (flat, "record 0: the next record's checksum is wrong"),
    }
    for name, (data, _) in files.items():
        (folder / name).write_bytes(data)
    found = {name: (str(folder / name), line) for name, (_, line) in files.items()}
    heads = {
        "magic.bin": ({"magic": 20240522}, "a header with magic 20240522; supported are 20240520, 20240801"),
        "version.bin": ({"version": 2}, "version 2 of magic 20240520, but only 1 is supported"),
        "short.bin": ({"told": 101}, "truncated: 1,224 bytes, but its header says 101 tokens"),
        "wide.bin": ({"letter": "I"}, "truncated: 1,424 bytes, but its header says 100 tokens"),
    }
    for name, (settings, line) in heads.items():
        found[name] = write_llmc(folder / name, ids(100), **settings), line
    (folder / "head.bin").write_bytes(struct.pack("<ii", 20240520, 1))
    found["head.bin"] = str(folder / "head.bin"), "truncated: 8 bytes"
    return found


def test_each_broken_file_is_a_line(tmp_path):
    for name, (path, line) in bad_files(tmp_path).items():
        with pytest.raises(ValueError, match=rf"^[^\n]*{name}\S* {line}[^\n]*$"):
            open_token_files(path, str(tmp_path / "cache"))
    several = tmp_path / "several"
    several.mkdir()
    for name in ("odd.bin", "magic.bin"):
        shutil.copy(tmp_path / name, several)
    with pytest.raises(ValueError, match=r"^[^\n]*magic.bin: .*\n[^\n]*odd.bin: [^\n]*$"):
        open_token_files(str(several), str(tmp_path / "cache"))
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} <= {".lock"}, "nothing is remembered"


def write_records(path, rows, masks=None) -> str:
    """By the descriptions of TFRecord and protobuf: this once in plain Python, bit by bit."""
    table = [0] * 256
    for n in range(256):
        crc = n
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        table[n] = crc

    def masked(data):
        crc = 0xFFFFFFFF
        for byte in data:
            crc = crc >> 8 ^ table[(crc ^ byte) & 255]
        crc ^= 0xFFFFFFFF
        return struct.pack("<I", ((crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8) & 0xFFFFFFFF)

    def varint(n):
        return bytes([n]) if n < 128 else bytes([n & 127 | 128]) + varint(n >> 7)

    def field(number, content):
        return varint(number * 8 + 2) + varint(len(content)) + content

    out = b""
    for n, row in enumerate(rows):
        mask = [1] * len(row) if masks is None else masks[n]
        entries = {b"attention_mask": mask, b"input_ids": row}
        features = b"".join(
            field(1, field(1, name) + field(2, field(3, field(1, b"".join(map(varint, values))))))
            for name, values in entries.items())
        data = field(1, features)
        length = struct.pack("<Q", len(data))
        out += length + masked(length) + data + masked(data)
    Path(path).write_bytes(out)
    return str(path)


def problems_of(folder, name, **changes) -> list[str]:
    problems = []
    settings = {"tokenizer_name": str(folder / "bpe"), "eval_dataset_name": (str(folder / "val.bin"),)}
    settings |= {"block_size": T}
    recipe = Recipe(str(name), cache_dir=str(folder / "cache"), **settings | changes)
    open_sources(recipe, problems)
    return problems


def test_what_does_not_fit_the_model_is_said_before_anything_else(folder, tmp_path):
    name = folder / "train.bin"
    assert problems_of(folder, name) == [] == problems_of(folder, RECORDS, n_special=0)
    (line,) = problems_of(folder, name, tokenizer_name=None, eval_dataset_name=(str(name),))
    assert line.startswith(f"tokenizer_name: {name} has none") and "gpt2" in line
    (line,) = problems_of(folder, write_nanogpt(tmp_path / "beyond.bin", [*ids(3000), KNOWN]))
    assert line.startswith("tokenizer_name:") and "has the id 400, but the tokenizer has only 400 ids" in line
    rows = [[1] * T, [KNOWN, *[2] * (T - 1)]]
    (line,) = problems_of(folder, write_records(tmp_path / "beyond.tfrecord", rows))
    assert "has the id 400, but the tokenizer has only 400 ids" in line
    (line,) = problems_of(folder, RECORDS, n_special=2, block_size=T + 2)
    assert line == f"block_size: {T + 2}, but rows of {RECORDS} have {T} tokens: set --block_size {T}."
    (line,) = problems_of(folder, write_records(tmp_path / "two.tfrecord", [[1] * T, [1] * 9]))
    assert "two.tfrecord: record 2: 9 tokens, but those before it have 32" in line
    for split, length in (("train", T), ("val", 16)):
        (tmp_path / "lengths" / split).mkdir(parents=True)
        write_records(tmp_path / "lengths" / split / "a.tfrecord", [[1] * length] * 4)
    (line,) = problems_of(folder, tmp_path / "lengths")
    assert "records differ in length (train 32, validation 16 tokens)" in line
    masks = [[1] * T, [1] * 9 + [0] * (T - 9)]
    (line,) = problems_of(folder, write_records(tmp_path / "padded.tfrecord", [[1] * T] * 2, masks))
    assert "padded.tfrecord: record 2: padding" in line
    (line,) = problems_of(folder, write_nanogpt(tmp_path / "few.bin", [1] * 31))
    assert line == (f"{tmp_path}/few.bin has no row of 32 tokens for train, only for none: lower block_size "
                    "or name other data.")
    (line,) = problems_of(folder, folder / "none.bin")
    assert "none.bin': no such file" in line
    (line,) = problems_of(folder, name, next_sentence=True)
    assert line.startswith("next_sentence:")
    shutil.copytree(RECORDS, tmp_path / "mixed")
    shutil.copy(name, tmp_path / "mixed" / "train.bin")
    (line,) = problems_of(folder, tmp_path / "mixed")
    assert ".bin and .tfrecord" in line
    (line,) = problems_of(folder, folder / "train.bin", eval_dataset_name=())
    assert "no row of 32 tokens for validation, only for train" in line and "eval_dataset_name" in line


def data_of(folder, name, **changes):
    problems, settings = [], {"tokenizer_name": str(folder / "bpe"), "block_size": T}
    recipe = Recipe(str(name), cache_dir=str(folder / "cache"), **settings | changes)
    sources = open_sources(recipe, problems)
    assert not problems
    return prepare(sources, Accelerator(cpu=True))


def test_files_are_read_from_end_to_end_once_and_followed(folder, tmp_path, monkeypatch):
    path, cache = write_nanogpt(tmp_path / "a.bin", ids(500)), str(tmp_path)
    first = open_token_files(path, cache).rows("train", T)
    assert isinstance(first.views[0].base.base, np.memmap), "nothing is copied"
    assert not list(tmp_path.rglob("*.npy"))
    read = []
    monkeypatch.setattr("data.token_files._account", lambda *_: read.append(1) or 1 / 0)
    again, other = (open_token_files(path, cache).rows("train", n) for n in (T, 2 * T))
    monkeypatch.undo()
    assert not read and again.fingerprint == first.fingerprint != other.fingerprint
    shutil.copy(path, tmp_path / "b.bin")
    assert open_token_files(str(tmp_path / "b.bin"), cache).rows("train", T).fingerprint == first.fingerprint
    write_nanogpt(tmp_path / "a.bin", ids(500, 1))
    assert open_token_files(path, cache).rows("train", T).fingerprint != first.fingerprint


def test_of_either_kind_the_first_rows_may_do(folder, tmp_path):
    for name in (folder / "fineweb", RECORDS):
        every, few = (open_token_files(str(name), str(tmp_path)).rows("train", T, most) for most in (0, 5))
        assert len(few) == 5 < len(every)
        keys = [(row, 0, row) for row in range(5)]
        assert batch_of(few, keys)["input_ids"].equal(batch_of(every, keys)["input_ids"])


def test_ids_of_other_types_are_asked_for_and_read(folder, tmp_path):
    """What their own programs write: nothing tells the type but the name."""
    wide = np.random.default_rng(0).integers(0, 100_000, 2000)
    for dtype in ("uint32", "int64"):
        wide.astype(dtype).tofile(tmp_path / f"{dtype}.bin")
        with pytest.raises(ValueError, match=rf"ids look like {dtype}: add \?dtype={dtype} to the name"):
            open_token_files(str(tmp_path / f"{dtype}.bin"), str(tmp_path / "cache"))
        assert np.array_equal(opened(f"{tmp_path}/{dtype}.bin?dtype={dtype}"), cut(wide))
    with pytest.raises(ValueError, match="dtype is one of uint16, uint32, int64"):
        open_token_files(f"{tmp_path}/uint32.bin?dtype=float32", str(tmp_path / "cache"))
    # Uint16 that looks like anything else is taken as it is named.
    zeros = np.zeros(600, np.uint16)
    zeros[::2] = 7
    write_nanogpt(tmp_path / "few.bin", zeros)
    assert np.array_equal(opened(f"{tmp_path}/few.bin?dtype=uint16"), cut(zeros))


def test_a_wide_vocabulary_asks_for_the_type(folder, tmp_path):
    vocabulary = {f"w{i}": i for i in range(70_000)} | {"[UNK]": 70_000}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    wide = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="w0", unk_token="[UNK]")
    wide.save_pretrained(tmp_path)
    (line,) = problems_of(folder, folder / "train.bin", tokenizer_name=str(tmp_path), eval_dataset_name=(
        f"{folder}/val.bin?dtype=uint16",))  # fmt: skip
    assert "whether its ids have 2 or 4 bytes" in line and "?dtype=uint16 or ?dtype=uint32" in line


def test_what_is_no_token_file_under_its_name_is_refused(folder, tmp_path):
    text = b"Plain text, as people have it.\n" * 20
    np.save(tmp_path / "array.npy", ids(500))
    contents = {"text": text, "gz": gzip.compress(text), "npy": (tmp_path / "array.npy").read_bytes()}
    for name, data in contents.items():
        (tmp_path / f"{name}.bin").write_bytes(data + b"x" * (len(data) % 2))
        with pytest.raises(ValueError, match="under this name"):
            open_token_files(str(tmp_path / f"{name}.bin"), str(tmp_path / "cache"))


def test_lists_that_are_not_packed_are_read(tmp_path):
    """As protobuf's older writers have it: the field's number before each of its numbers."""
    def varint(n):
        return bytes([n]) if n < 128 else bytes([n & 127 | 128]) + varint(n >> 7)

    def field(number, content):
        return varint(number * 8 + 2) + varint(len(content)) + content

    values = [5, 300, 2**21, 0]
    numbers = b"".join(b"\x08" + varint(value) for value in values)
    example = field(1, field(1, field(1, b"input_ids") + field(2, field(3, numbers))))
    assert _full_row(example).tolist() == values


# format -> script, its tokenizer, training data, evaluation data
RUNS = {
    "nanogpt": ("train_clm.py", "bpe", "train.bin", "val.bin"),
    "records": ("train_mlm.py", "masked", RECORDS, None),
    "llm.c": ("train_clm.py", "bpe", "fineweb", None),
    "records, causal": ("train_clm.py", "masked", RECORDS, None),
    "nanogpt, masked": ("train_mlm.py", "masked", "train.bin", "val.bin"),
    "zst": ("train_clm.py", "bpe", "texts.jsonl.zst", None),
}
SMALL_MLM = (
    "num_hidden_layers=2,hidden_size=32,num_attention_heads=2,intermediate_size=64,hidden_dropout_prob=0,"
    "attention_probs_dropout_prob=0"
)


@pytest.mark.parametrize("kind", [
    kind if kind in ("nanogpt", "records") else pytest.param(kind, marks=pytest.mark.slow) for kind in RUNS])
def test_a_run_on_them_that_is_killed_goes_on_bit_for_bit(folder, tmp_path, kind):
    script, tokenizer, train, held_out = RUNS[kind]
    write_jsonl(tmp_path / "texts.jsonl", make_texts(80))
    text = (tmp_path / "texts.jsonl").read_bytes()
    (folder / "texts.jsonl.zst").write_bytes(pa.compress(text, "zstd", asbytes=True))
    flags = TINY | {"dataset_name": folder / train, "tokenizer_name": folder / tokenizer, "save_steps": 1,
                    "cache_dir": tmp_path / "cache", "max_train_steps": 8, "per_device_train_batch_size": 4}
    masked = {"model_type": "roberta", "config_overrides": SMALL_MLM, "prompts": ["<mask> e"]}
    flags |= masked if "mlm" in script else {}
    flags |= {"eval_dataset_name": folder / held_out} if held_out else {}
    done = forked.run(script, flags | {"output_dir": tmp_path / "whole"})
    assert done.returncode == 0, done.stderr
    process = forked.start(PROJECT, script, flags | {"output_dir": tmp_path / "killed"}, tmp_path / "log")
    while not list((tmp_path / "killed").glob("checkpoints/step-*3/*")) and process.is_alive():
        time.sleep(0.005)
    process.kill()
    process.join()
    assert process.exitcode == -9, (tmp_path / "log").read_text()
    done = forked.run(script, flags | {"output_dir": tmp_path / "killed"})
    assert done.returncode == 0, done.stderr
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")
    weights, again = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed"))
    assert all(weights[name].equal(again[name]) for name in weights)
    if script == "train_clm.py" and kind != "zst":
        assert metrics(tmp_path / "whole")[-1]["bits_per_byte"] is None, "nobody knows the bytes"
        summary = (tmp_path / "whole/summary.json").read_text()
        evaluated = forked.run(script, flags | {"output_dir": tmp_path / "whole", "eval_only": True}).stdout
        assert '"bits_per_byte": null' in evaluated and "NaN" not in evaluated + summary, "no JSON"


def test_records_are_masked_as_they_are_and_flat_rows_get_their_special_tokens(folder, tmp_path):
    for name, size in ((RECORDS, T), (folder / "train.bin", T - 2)):
        flags = TINY | {
            "dataset_name": name, "eval_dataset_name": folder / "val.bin", "show": 2, "model_type": "roberta",
            "tokenizer_name": folder / "masked", "cache_dir": tmp_path / "c", "output_dir": tmp_path / "o",
            "config_overrides": SMALL_MLM, "prompts": ["<mask> e"], "mlm_probability": 1e-9,
        }
        done = forked.run("train_mlm.py", flags)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("<s>") == (2 if size < T else 0), done.stdout


def test_a_mistake_in_them_ends_a_run_with_status_2_and_a_line(folder, tmp_path):
    bad = write_llmc(tmp_path / "bad.bin", ids(100), told=7)
    done = forked.run("train_clm.py", TINY | {
        "dataset_name": bad, "tokenizer_name": folder / "bpe", "output_dir": tmp_path / "out",
        "cache_dir": tmp_path / "cache"})
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"{bad}: truncated: 1,224 bytes, but its header says 7 tokens." in done.stderr


def test_a_run_on_the_first_records_goes_on_with_those(folder, tmp_path):
    """Not with all of them, which the cache has."""
    settings = {"tokenizer_name": str(folder / "masked"), "max_train_samples": 9}
    first = data_of(folder, RECORDS, **settings)
    first.tokenizer.save_pretrained(tmp_path)
    saved = first.fingerprints | {"dataset_name": [str(RECORDS)]}
    again = data_of(folder, RECORDS, **settings, saved=saved, output_dir=str(tmp_path))
    assert again.length == first.length == 9 and again.fingerprints == first.fingerprints


def test_whole_records_and_rows_that_get_special_tokens_are_not_mixed(folder, tmp_path):
    problems, names = [], (str(folder / "train.bin"), str(RECORDS))
    recipe = Recipe(names, (0.5, 0.5), tokenizer_name=str(folder / "masked"), block_size=T, n_special=2,
                    eval_dataset_name=str(folder / "val.bin"), cache_dir=str(tmp_path))
    open_sources(recipe, problems)
    assert [line[:37] for line in problems] == ["mixture: records have special tokens "]
    problems.clear()
    open_sources(replace(recipe, dataset_name=names[:1] * 2), problems)
    open_sources(replace(recipe, n_special=0), problems)
    assert not problems


def test_streaming_them_is_reading_them_where_they_lie(folder):
    evals = {"eval_dataset_name": (str(folder / "val.bin"),)}
    streamed, mapped = (data_of(folder, folder / "train.bin", streaming=on, **evals) for on in (True, False))
    assert streamed.fingerprints == mapped.fingerprints and streamed.train.state_dict(0) is None


def test_no_pickle_is_opened(folder, tmp_path):
    (tmp_path / "char").mkdir()
    write_nanogpt(tmp_path / "char" / "train.bin", ids(500))
    touch = b"cos\nsystem\n(S'touch " + bytes(tmp_path / "opened") + b"'\ntR."
    (tmp_path / "char" / "meta.pkl").write_bytes(touch)
    rows = open_token_files(str(tmp_path / "char"), str(tmp_path)).rows("train", T)
    assert len(rows) == 15
    assert not (tmp_path / "opened").exists()
    code = "import sys, data.kinds; print('crc32c' in sys.modules, 'tensorflow' in sys.modules)"
    assert forked.run_code(code).stdout == "False False\n"
