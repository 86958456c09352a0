"""Trained tokenizers: special tokens of each model family, reproducibility, errors."""

import itertools
import json
import random
import shlex
import statistics
import subprocess
import sys

import pytest
from transformers import AutoConfig, AutoTokenizer

from data.documents.source import Source, open_corpus
from data.tokens.encode import split_text
from data.tokens.tokenizer import find_or_train_tokenizer, load_tokenizer, sample_texts, train_tokenizer
from tests import forked
from tests.runs import PROJECT

USUAL = [("bpe", "gpt2"), ("unigram", "roberta")]
FAMILIES = [*USUAL, ("bpe", "roberta"), ("unigram", "bert")]


@pytest.fixture(scope="module")
def english():
    return [document["text"] for document in itertools.islice(open_corpus(Source("installed-docs")), 150)]


@pytest.fixture(scope="module")
def trained(english):
    return {family: train_tokenizer(english, family[0], 1000, family[1]) for family in FAMILIES}


def test_model_types_of_one_family_share_a_tokenizer(tmp_path):
    (tmp_path / "a.txt").write_text("def f(x):\n    return x\n\n" * 99)
    corpus, options = open_corpus(Source(str(tmp_path / "a.txt"))), {"cache_dir": tmp_path / "cache"}
    gpt, mamba, bert, modernbert, roberta = (
        find_or_train_tokenizer(
            [corpus], [1.0], vocab_size=300, algorithm="bpe", model_type=model_type, **options
        ).name_or_path
        for model_type in ("qwen3", "mamba", "bert", "modernbert", "roberta")
    )
    assert gpt == mamba != bert != modernbert != roberta


@pytest.mark.parametrize("family", FAMILIES, ids="-".join)
def test_special_ids_are_those_of_the_model_family_also_after_loading(trained, family, tmp_path):
    tokenizer, (algorithm, model_type) = trained[family], family
    tokenizer.save_pretrained(tmp_path)
    config = AutoConfig.for_model(model_type)
    text, pair = "The first sentence .", "and a second"
    for beside_a_model in (False, True):  # a config.json may make AutoTokenizer choose another class
        if beside_a_model:
            config.save_pretrained(tmp_path)
        loaded = AutoTokenizer.from_pretrained(tmp_path)
        assert loaded(text, pair) == tokenizer(text, pair)
        assert loaded.all_special_ids == tokenizer.all_special_ids
        assert len(loaded) == 1000 == max(loaded.get_vocab().values()) + 1
    if model_type == "gpt2":
        assert loaded.eos_token_id == loaded.bos_token_id == 0 and loaded.pad_token_id is None
        return
    assert loaded.pad_token_id == config.pad_token_id
    if model_type == "roberta":
        mask = "[MASK]" if algorithm == "unigram" else "<mask>"  # as in the Keras example
        assert loaded.convert_tokens_to_ids(["<s>", "<pad>", "</s>", "<unk>", mask]) == [0, 1, 2, 3, 4]
        assert (loaded.bos_token_id, loaded.eos_token_id) == (config.bos_token_id, config.eos_token_id)
    a, b = (loaded(part, add_special_tokens=False)["input_ids"] for part in (text, pair))
    cls, sep = loaded.cls_token_id, loaded.sep_token_id
    between = [sep] if model_type == "roberta" else []
    encoded = loaded(text, pair)
    assert encoded["input_ids"] == [cls, *a, sep, *between, *b, sep]
    assert loaded(f"a {loaded.mask_token} .")["input_ids"].count(loaded.mask_token_id) == 1
    if model_type == "bert":
        assert encoded["token_type_ids"] == [0] * (len(a) + 2) + [1] * (len(b) + 1)


@pytest.mark.parametrize("model_type, bos", [("roberta-prelayernorm", "<s>"), ("modernbert", None)])
def test_every_masked_model_type_gets_the_tokens_that_masking_needs(english, model_type, bos):
    tokenizer = train_tokenizer(english[:50], "unigram", 500, model_type)
    assert tokenizer.bos_token == bos and tokenizer.pad_token and tokenizer.cls_token
    before = tokenizer("It is")["input_ids"][:-1]  # without </s>; [MASK] includes the space before it
    masked = tokenizer(f"It is {tokenizer.mask_token}.")["input_ids"]
    assert masked[: len(before) + 1] == [*before, tokenizer.mask_token_id]
    takes_types = hasattr(AutoConfig.for_model(model_type), "type_vocab_size")
    assert ("token_type_ids" in tokenizer("It is")) == (takes_types and bos is None)
    with pytest.raises(ValueError, match="unknown to transformers"):
        train_tokenizer(english[:50], "unigram", 500, model_type + "x")


def test_byte_level_bpe_round_trips_arbitrary_text(trained):
    tokenizer, draw = trained["bpe", "gpt2"], random.Random(0)
    letters = [chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000]
    hard = ["", " ", "\0\r\n\t \u00a0\u3000", "do n't , can 't .", "  two  spaces ", "e\u0301 \ufeff\ufffd"]
    for text in hard + ["".join(draw.choices(letters, k=200)) for _ in range(50)]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_unigram_splits_at_line_ends_and_loses_nothing(trained, english):
    """Unlike sentencepiece's corpora, documents have line ends between their paragraphs."""
    for family in (("unigram", "roberta"), ("unigram", "bert")):
        tokenizer = trained[family]
        glued = [token for token in tokenizer.get_vocab() if "\n" in token and token.strip("\n\u2581")]
        assert not glued and "\n" in tokenizer.get_vocab()
        for text in ["a\n\n b", "\n\nIt is\n", "a  b\n   c\n\n\nd ", *english[:50]]:
            text = text.replace("``", '"').replace("''", '"').lstrip(" ")  # as the normalizer does
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            if tokenizer.unk_token_id not in ids:
                assert tokenizer.decode(ids) == text


def test_training_gives_the_same_ids_in_every_process(capsys):
    """The tokenizers library orders equal scores by hash, and hashes differ between processes."""
    code = ("import itertools, hashlib; from data.tokens.tokenizer import train_tokenizer\n"
            "from data.documents.source import Source, open_corpus\n"
            "texts = [row['text'] for row in itertools.islice(open_corpus(Source('installed-docs')), 60)]\n"
            "made = train_tokenizer(texts, 'unigram', 800, 'roberta').backend_tokenizer.to_str()\n"
            "print(hashlib.md5(made.encode()).hexdigest())")
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=PROJECT, text=True, capture_output=True, check=True)
    exec(code, {})
    assert len(done.stdout) > 32 and done.stdout == capsys.readouterr().out


def test_a_vocabulary_smaller_than_asked_for_is_reported(english, capsys):
    for algorithm, model_type in USUAL:
        tokenizer = train_tokenizer(english[:1], algorithm, 60_000, model_type)
        assert len(tokenizer) < 60_000
        warning = capsys.readouterr().err
        assert "60,000" in warning and f"{len(tokenizer):,}" in warning
    with pytest.raises(ValueError, match="vocab_size 200 is too small; bpe needs 257"):
        train_tokenizer(english, "bpe", 200, "gpt2")
    with pytest.raises(ValueError, match="tokenizer_name './nowhere'"):
        load_tokenizer("./nowhere")


def test_a_long_text_in_pieces_has_the_same_tokens(trained, english):
    text = "\n\n".join(english)[:300_000]
    for family in USUAL:
        backend = trained[family].backend_tokenizer
        pieces = list(split_text(text, 1000))
        assert "".join(pieces) == text and len(pieces) > 200
        assert max(map(len, pieces)) < 2000
        ids = [i for piece in pieces for i in backend.encode(piece, add_special_tokens=False).ids]
        assert ids == backend.encode(text, add_special_tokens=False).ids
    for hostile in ("x" * 100_000, "x\n" * 50_000, " " * 100_000):  # without a place between two words
        pieces = list(split_text(hostile, 1000))
        assert "".join(pieces) == hostile and max(map(len, pieces)) <= 1000 + (1 << 16)


def test_the_sample_is_uniform_bounded_and_independent_of_order():
    texts = [f"document {i:06d} " + "x" * 84 for i in range(20_000)]  # 100 bytes each
    sample = sample_texts(iter(texts), 200_000)
    assert len(sample) == 2000 == len(set(sample))
    shuffled = random.Random(0).sample(texts, len(texts))
    assert sample_texts(shuffled, 200_000) == sample
    positions = [int(text.split()[1]) for text in sample]
    # the mean of 2000 uniform draws: standard deviation 20000 / sqrt(12 x 2000) = 129
    assert abs(statistics.mean(positions) - 10_000) < 4 * 129
    assert abs(sum(position < 2000 for position in positions) - 200) < 4 * 14
    assert sample_texts(["y" * 999], 10) == ["y" * 999]  # at least one text


def command_line(*arguments):
    return forked.run("data.tokens.tokenizer", list(arguments))


def test_the_command_trains_on_a_bounded_sample(english, tmp_path):
    source = tmp_path / "text.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in english) + '{"text": null}\n')
    done = command_line("--algorithm", "unigram", "--vocab_size", 600, "--dataset_name", source,
                        "--max_bytes", 50_000, "--output_dir", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "1 unreadable" in done.stdout and "600 tokens, saved" in done.stdout
    assert done.stdout.endswith(f"hf upload user/name {tmp_path / 'out'}\n")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(tokenizer) == 600 and tokenizer.mask_token_id == 4 and tokenizer.pad_token_id == 1


def test_a_full_disk_is_one_message(english, tmp_path):
    source = tmp_path / "text.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in english[:20]))
    words = ["--dataset_name", source, "--vocab_size", 600, "--output_dir", tmp_path / "out"]
    # ulimit: files may have 1 KiB.
    line = shlex.join([sys.executable, "-m", "data.tokens.tokenizer", *map(str, words)])
    line = ["bash", "-c", f"ulimit -f 1; exec {line}"]
    done = subprocess.run(line, cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert f"output_dir {tmp_path / 'out'} cannot be written" in done.stderr and "room" in done.stderr


def test_a_vocabulary_too_small_for_the_characters_is_refused():
    texts = ["".join(chr(0x4E00 + (7 * i + j) % 6000) for j in range(300)) for i in range(300)]
    with pytest.raises(ValueError, match="raise vocab_size"):
        train_tokenizer(texts, "unigram", 1000, "roberta")
