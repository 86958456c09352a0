"""Fill-in-the-middle: which documents are cut, that nothing of them is lost, and that a model learns it."""

import itertools
import random
import sysconfig
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from accelerate import Accelerator
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from data import encode
from data.encode import Encoder, tokenize_documents
from data.filters import in_validation
from data.fim import NAMES, fill_in_middle
from data.groups import text_groups
from data.open import Recipe, open_sources, prepare
from data.preparation import TokenMaker
from data.shards import open_shards, read_manifest
from data.sources.corpus import Corpus, Source
from data.text import prepare_rows, trained_tokenizer
from data.tokenizer import main as train_by_command
from data.tokenizer import train_tokenizer
from tests import forked, shard_data
from tests.runs import TINY, metrics

T = 32


def python_texts(number: int) -> list[str]:
    files = itertools.islice(sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")), 3 * number)
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    return [text[:2000] for text in dict.fromkeys(texts) if text.strip()][:number]


def odd_texts(number: int) -> list[str]:
    """Emoji of several code points, CJK, combining characters, and the names of special tokens."""
    parts = "👩‍👩‍👧 🏳️‍🌈 日本語 汉字 한국어 e\u0301 \u00e9 word 𝔘 <|fim_middle|> <|endoftext|> 🙂".split()
    parts += [" ", "\n", "\t"]
    rng = random.Random(0)
    return ["".join(rng.choices(parts, k=rng.randint(1, 60))) + f" {i}" for i in range(number)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(python_texts(100), "bpe", 600, "gpt2", fim=True).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def made(texts) -> Corpus:
    rows = [{"text": text} for text in texts]
    return Corpus(Source("texts.jsonl"), "text", "content", [lambda: rows])


def document_again(ids: list[int], fim, decode) -> str:
    """The text of a document without EOS, read from its tokens as the paper's section 3 says."""
    pre, suf, mid = fim.ids
    if pre not in ids:
        return decode(ids)
    assert ids[0] == pre and [ids.count(token) for token in fim.ids] == [1, 1, 1]
    suffix_at, middle_at = ids.index(suf), ids.index(mid)
    assert suffix_at < middle_at
    prefix, suffix, rest = ids[1:suffix_at], ids[suffix_at + 1 : middle_at], ids[middle_at + 1 :]
    return decode(prefix) + decode(rest) + decode(suffix)


def order(document) -> str:
    return "plain" if isinstance(document, str) else "SPM" if len(document[0][0]) == 2 else "PSM"


@pytest.mark.parametrize("texts", [python_texts(1000), odd_texts(1000)], ids=["python", "emoji and CJK"])
def test_the_parts_of_every_document_make_it_again(texts, tokenizer):
    fim = fill_in_middle(0.9, 1, tokenizer)
    documents = [(fim(text), text) for text in texts]
    assert len(texts) == 1000 and min(Counter(order(document) for document, _ in documents).values()) > 50
    places = [[], []]
    for ids, text in tokenize_documents(documents, Encoder.of(tokenizer), fim):
        assert ids[-1] == tokenizer.eos_token_id
        assert document_again(ids[:-1].tolist(), fim, tokenizer.decode) == text
    for document, text in documents:
        if order(document) == "PSM":
            (_, prefix, _), (_, suffix, _), (_, middle, _) = document
            assert prefix + middle + suffix == text
            places[0].append(len(prefix) / len(text))
            places[1].append(1 - len(suffix) / len(text))
    # Two uniform numbers in order have the means 1/3 and 2/3.
    assert [np.mean(found) for found in places] == pytest.approx([1 / 3, 2 / 3], abs=0.05)


def test_documents_are_cut_at_the_rate_in_both_orders_by_their_text_and_the_seed_alone(tokenizer):
    texts = [f"the document of number {i}" for i in range(20_000)]
    for rate in (0.3, 1.0):
        fim = fill_in_middle(rate, 7, tokenizer)
        counts = Counter(order(fim(text)) for text in texts)
        expected = {"PSM": rate / 2, "SPM": rate / 2, "plain": 1 - rate}
        assert {name: counts[name] / len(texts) for name in expected} == pytest.approx(expected, abs=0.01)
    assert {text: fim(text) for text in texts[:50]} == {text: fim(text) for text in reversed(texts[:50])}
    assert [fim(text) for text in texts[:50]] != [replace(fim, seed=8)(text) for text in texts[:50]]
    assert fill_in_middle(0.0, 7, tokenizer) is None


def stream_of(rows) -> list[int]:
    return np.concatenate(rows).reshape(-1).tolist()


def split_at(tokens: list[int], end: int) -> list[list[int]]:
    """The whole documents of a stream, without their EOS."""
    places = [-1, *(place for place, token in enumerate(tokens) if token == end)]
    return [tokens[a + 1 : b] for a, b in itertools.pairwise(places)]


def test_rows_streams_and_shards_hold_the_same_and_what_is_evaluated_stays_plain(tmp_path, tokenizer):
    texts, folder = python_texts(150), tmp_path / "tokenizer"
    tokenizer.save_pretrained(folder)
    corpus, fim = made(texts), fill_in_middle(0.5, 3, tokenizer)
    settings = {"block_size": T, "validation_fraction": 0.2, "seed": 3}
    plain, cut = (prepare_rows(corpus, TokenMaker(tokenizer, found), cache_dir=tmp_path / "cache", **settings)
                  for found in (None, fim))
    assert cut.folder != plain.folder
    assert np.array_equal(*(shard_data.all_ids(made.splits["validation"]) for made in (cut, plain)))
    assert cut.train.fingerprint != plain.train.fingerprint

    decode = tokenizer.decode
    kept = [text for text in texts if not in_validation(text, 3, 0.2)]
    documents = split_at(stream_of(shard_data.all_ids(cut.train)), tokenizer.eos_token_id)
    assert [document_again(ids, fim, decode) for ids in documents] == kept[: len(documents)]
    assert len(kept) - len(documents) <= 1
    assert 0 <= cut.accounting["train"]["tokens"] - len(cut.train) * T < T
    # Every document that is evaluated on comes a second time, cut.
    again = split_at(stream_of(shard_data.all_ids(cut.splits["fim"])), tokenizer.eos_token_id)
    held_out = [text for text in texts if in_validation(text, 3, 0.2)]
    assert [document_again(ids, fim, decode) for ids in again] == held_out[: len(again)]
    assert len(again) > 10 and all(ids[0] == fim.ids[0] for ids in again)
    assert cut.splits["fim"].bytes_per_token < cut.splits["validation"].bytes_per_token

    stream = text_groups(corpus, Encoder.of(tokenizer), T, 7, (3, 0.2), fim)
    streamed = [rows for rows, *_ in stream.rows_from(0, 0)]
    assert stream_of(streamed) == stream_of(shard_data.all_ids(cut.train))
    row = 2 * len(cut.train) // 3 // 7
    _, document, offset = next(itertools.islice(stream.rows_from(0, 0), row, None))
    resumed = next(stream.rows_from(document, offset))[0]  # from within a document
    assert resumed.tolist() == shard_data.all_ids(cut.train)[7 * (row + 1) : 7 * (row + 2)].tolist()

    source = shard_data.write_jsonl(tmp_path / "texts.jsonl", texts)
    changes = {"validation_fraction": 0.2, "seed": 3, "fim_rate": 0.5}
    assert shard_data.run(source, tmp_path / "shards", str(folder), **changes) == 0
    manifest = read_manifest(str(tmp_path / "shards"))
    assert manifest["settings"]["fim_rate"] == 0.5
    for split, rows in {"train": cut.train, "validation": plain.splits["validation"]}.items():
        shards = open_shards(str(tmp_path / "shards"), tmp_path / "cache").rows(split, T)
        assert np.array_equal(shard_data.all_ids(shards), shard_data.all_ids(rows))


def test_without_it_a_trained_tokenizer_has_no_such_tokens(tmp_path):
    plain = trained_tokenizer(made(python_texts(50)), vocab_size=600, algorithm="bpe", model_type="gpt2",
                              cache_dir=tmp_path)
    assert plain.all_special_tokens == ["<|endoftext|>"]


@pytest.mark.parametrize("lead", ["ByteLevel", "Metaspace", "Prepend"])
def test_a_long_document_that_is_encoded_in_pieces_has_the_tokens_of_one_piece(lead, monkeypatch):
    """Where a piece ends, no space comes before the next one."""
    tokenizer = given(NAMES[0], lead)
    text = " ".join(" ".join(python_texts(6)).split())[:4000]
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    original = encode.split_text
    monkeypatch.setattr(encode, "split_text", lambda text: original(text, 300))
    [(ids, _)] = tokenize_documents([(text, None)], Encoder.of(tokenizer))
    if lead == "Prepend":  # as nothing separates words there, a cut may part a token
        assert tokenizer.decode(ids[:-1]) == tokenizer.decode(whole)
    else:
        assert ids[:-1].tolist() == whole


def test_a_trained_tokenizer_keeps_its_size_and_knows_the_tokens(tokenizer, tmp_path):
    source = shard_data.write_jsonl(tmp_path / "texts.jsonl", python_texts(100))
    words = ["--output_dir", tmp_path / "made", "--dataset_name", source, "--vocab_size", "600", "--fim"]
    train_by_command([str(word) for word in words])
    assert AutoTokenizer.from_pretrained(tmp_path / "made").get_vocab() == tokenizer.get_vocab()
    assert len(tokenizer) == 600
    assert tokenizer.all_special_tokens == ["<|endoftext|>", *NAMES[0]]
    assert tokenizer.convert_tokens_to_ids([*NAMES[0]]) == [1, 2, 3]


def given(names, lead=None, special=False) -> PreTrainedTokenizerFast:
    """A tokenizer as people give them: its tokens need not be special, spaces may come before a text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=lead == "ByteLevel")
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if lead in ("Metaspace", "Prepend"):
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        if lead == "Prepend":  # Llama's
            spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
            backend.normalizer = normalizers.Sequence(spaces)
            backend.pre_tokenizer = None
        backend.decoder = decoders.Replace("▁", " ")
        alphabet = sorted({*"".join(python_texts(40)), "▁"})
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["</s>"], initial_alphabet=alphabet)
    backend.train_from_iterator(python_texts(40), trainer)
    backend.add_tokens([AddedToken(name, special=special, normalized=False) for name in names])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


@pytest.mark.parametrize("names", NAMES, ids=lambda names: names[0])
def test_tokens_of_a_given_tokenizer_are_found_and_a_document_that_mentions_them_is_text(names):
    for special in (False, True):
        tokenizer = given(names, special=special)
        fim = fill_in_middle(0.5, 2, tokenizer)
        assert [*fim.ids] == tokenizer.convert_tokens_to_ids([*names])
        texts = [f"def f{i}(): return '{' '.join(names)}'" for i in range(60)]
        documents = [(fim(text), text) for text in texts]
        for ids, text in tokenize_documents(documents, Encoder.of(tokenizer), fim):
            assert document_again(ids[:-1].tolist(), fim, tokenizer.decode) == text


@pytest.mark.parametrize("lead", ["ByteLevel", "Metaspace", "Prepend"])
def test_a_space_before_a_text_comes_only_before_the_document(lead):
    tokenizer = given(NAMES[0], lead)
    fim, texts = fill_in_middle(0.8, 2, tokenizer), [text[:300].strip() for text in python_texts(40)]
    plain, prefixes = 0, 0
    for ids, text in tokenize_documents([(fim(text), text) for text in texts], Encoder.of(tokenizer), fim):
        again = document_again(ids[:-1].tolist(), fim, tokenizer.decode)
        prefixes += again == f" {text}"
        plain += again == text  # where the prefix is empty
    assert plain + prefixes == len(texts) and prefixes > 30


def opened(folder, problems=(), **changes):
    settings = {
        "dataset_name": f"{folder}/a.jsonl", "block_size": T, "vocab_size": 400, "validation_fraction": 0.1,
        "cache_dir": f"{folder}/cache", "seed": 3, "max_eval_samples": 10, "fim_rate": 0.5,
    }  # fmt: skip
    found = []
    sources = open_sources(Recipe(**settings | changes), found)
    assert [problem for problem in found if not any(part in problem for part in problems)] == []
    assert len(found) == len(problems), found
    return found or prepare(sources, Accelerator(cpu=True))


def test_a_second_evaluation_set_comes_with_it_and_mistakes_are_told(tmp_path):
    texts = shard_data.make_texts(120)
    for name, found in {"a": texts, "b": texts[:20], "c": texts[20:50]}.items():
        shard_data.write_jsonl(tmp_path / f"{name}.jsonl", found)
    several = (f"{tmp_path}/b.jsonl", f"{tmp_path}/c.jsonl")
    data = opened(tmp_path)
    assert list(data.evals) == ["", "fim"] and len(data.tokenizer) == 400
    data.tokenizer.save_pretrained(tmp_path / "tokenizer")
    assert list(opened(tmp_path, eval_dataset_name=several).evals) == ["b", "c", "b-fim", "c-fim"]
    assert list(opened(tmp_path, eval_dataset_name=several[:1]).evals) == ["", "fim"]
    assert list(opened(tmp_path, fim_rate=0.0).evals) == [""]
    stream = {"streaming": True, "tokenizer_name": f"{tmp_path}/tokenizer"}
    streamed = opened(tmp_path, **stream)
    assert list(streamed.evals) == ["", "fim"]
    begin = data.tokenizer.convert_tokens_to_ids(NAMES[0][0])
    for found in (data, streamed):
        plain, cut = (shard_data.all_ids(found.evals[name]) for name in ("", "fim"))
        assert not (plain == begin).any() and (cut == begin).any()
    assert list(opened(tmp_path, **stream, eval_dataset_name=several).evals) == ["b", "c", "b-fim", "c-fim"]

    plain = shard_data.save_tokenizer(tmp_path / "plain")
    [problem] = opened(tmp_path, ["fim_rate"], tokenizer_name=plain)
    assert "has no tokens for it" in problem and "special_tokens=True" in problem and "\n" not in problem
    assert shard_data.run(f"{tmp_path}/a.jsonl", tmp_path / "shards", f"{tmp_path}/tokenizer") == 0
    [problem] = opened(tmp_path, ["fim_rate"], dataset_name=f"{tmp_path}/shards")
    assert "`python -m data.prepare`" in problem
    assert shard_data.run(f"{tmp_path}/a.jsonl", tmp_path / "none", plain, fim_rate=0.5) == 2
    assert not (tmp_path / "none").exists()


@pytest.mark.sweep
def test_a_small_model_learns_to_fill_a_middle(tmp_path):
    """What stands in the middle is decided by what follows it: no prefix tells."""
    rng, colours, things = random.Random(0), ["red", "blue", "green", "pink"], ["sun", "sea", "tree", "rose"]
    texts = []
    for _ in range(4000):
        which = rng.randrange(4)
        texts.append(f"{rng.randrange(1000)} {colours[which]} {things[which]} {rng.randrange(100)}")
    shard_data.write_jsonl(tmp_path / "texts.jsonl", [*dict.fromkeys(texts)])
    flags = {
        **TINY, "dataset_name": tmp_path / "texts.jsonl", "vocab_size": 300, "block_size": T,
        "config_overrides": "num_hidden_layers=2,hidden_size=64,num_attention_heads=4",
        "per_device_train_batch_size": 24, "learning_rate": 1e-2, "muon_learning_rate": 5e-3,
        "max_train_steps": 400, "num_warmup_steps": 15, "logging_steps": 100, "eval_steps": 400,
        "save_steps": 400, "keytokens": "none", "prompts": "none", "cache_dir": tmp_path / "cache",
    }  # fmt: skip
    right = {}
    for rate in (0.9, 0.0):
        run = tmp_path / f"run-{rate}"
        result = forked.run("train_clm.py", flags | {"fim_rate": rate, "output_dir": run})
        assert result.returncode == 0, result.stderr[-2000:]
        tokenizer, model = AutoTokenizer.from_pretrained(run), AutoModelForCausalLM.from_pretrained(run)

        def follows(prompt, tokenizer=tokenizer, model=model):
            ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
            out = model.generate(ids, max_new_tokens=12, max_length=None, do_sample=False, pad_token_id=0)
            return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)

        right[rate], asked = 0, random.Random(1)
        for number in range(40):
            prefix, suffix = f"{asked.randrange(1000)} ", f" {things[number % 4]} {asked.randrange(100)}"
            prompt = prefix
            if rate:
                pre, suf, mid = NAMES[0]
                psm, spm = f"{pre}{prefix}{suf}{suffix}{mid}", f"{pre}{suf}{suffix}{mid}{prefix}"
                prompt = psm if number % 8 < 4 else spm
            found = follows(prompt)
            right[rate] += found == colours[number % 4] if rate else found.startswith(colours[number % 4])
    print("right of 40:", right)
    assert right[0.9] >= 32 and right[0.0] <= 16
    logged = [line for line in metrics(tmp_path / "run-0.9") if "loss/eval" in line][-1]
    assert logged["loss/eval/fim"] < 2 and "perplexity/fim" in logged
