"""data/pairs.py: sentences, pairs of both labels, rows on disk."""

import functools
import itertools
import json
import math
import random

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from transformers import BertForPreTraining

from data.masking import MaskTokens
from data.open import Recipe, open_sources, prepare
from data.pair_rows import PairRows, shared_rows
from data.pairs import PairBuilder, PairMaker, split_sentences
from data.sources.corpus import Source, load_corpus
from data.text import prepare_rows
from data.tokenizer import train_tokenizer
from tests import shard_data

WORDS = "the of and to in is for on with as by at from that which this it are was were be has".split()


def load(name):
    return load_corpus(Source(str(name)))


def write_documents(path, n=40, sentences=(2, 30), seed=0):
    """A .jsonl of documents whose sentences tell document and number: "D7 s3 of the and to ... ." """
    rng = random.Random(seed)
    with open(path, "w") as file:
        for d in range(n):
            text = " ".join(
                f"D{d} s{i} {' '.join(rng.choices(WORDS, k=rng.randint(3, 25)))}."
                for i in range(rng.randint(*sentences))
            )
            file.write(json.dumps({"text": text}) + "\n")
    return str(path)


@pytest.fixture(scope="module")
def tokenizer():
    texts = [" ".join(WORDS) + "." + " ".join(f"D{i} s{i}" for i in range(60))] * 5
    return train_tokenizer(texts, "wordpiece", 400, "bert")


def test_sentences_end_where_a_reader_ends_them():
    assert split_sentences('He met Mr. J. Smith . It is " H. gammarus " , he said . Costs 3 @.@ 5 !') == [
        "He met Mr. J. Smith .", 'It is " H. gammarus " , he said .', "Costs 3 @.@ 5 !",
    ]  # fmt: skip
    assert split_sentences("Is it (e.g. this one?) Yes. It is") == ["Is it (e.g. this one?)", "Yes.", "It is"]
    # A heading is a sentence; so is each paragraph at least; a hard-wrapped line goes on.
    assert split_sentences(" = Title = \n\nOne line\ngoes on. Two\nThree") == [
        "= Title =", "One line goes on.", "Two", "Three",
    ]  # fmt: skip
    assert split_sentences(" \n ") == []


def prepare_pairs(corpus, tokenizer, block_size: int, seed: int, **settings):
    maker = PairMaker(tokenizer, block_size, seed)
    return prepare_rows(corpus, maker, block_size=block_size, seed=seed, **settings)


def test_what_is_evaluated_on_is_not_trained_on(tokenizer, tmp_path):
    lines = open(write_documents(tmp_path / "all.jsonl")).readlines()
    (tmp_path / "some.jsonl").write_text("".join(lines[:15]))
    corpus, some = load(tmp_path / "all.jsonl"), load(tmp_path / "some.jsonl")
    made = prepare_pairs(corpus, tokenizer, 64, 1, cache_dir=str(tmp_path), evaluated=(some,),
                         validation_fraction=0.2)
    train = made.accounting["train"]
    assert (train["evaluated"], train["kept"] + train["validation"]) == (15, 25)
    rows = [tokenizer.decode(row).lower() for row in shard_data.all_ids(made.train)]
    assert not any(f" d{d} s" in row for row in rows for d in range(15))
    assert any(f" d{d} s" in row for row in rows for d in range(15, 40))


def test_truncation_takes_from_the_longer_side_token_by_token():
    for len_a in range(1, 14):
        for len_b in range(1, 14):
            a, b = np.arange(len_a), np.arange(100, 100 + len_b)
            expected_a, expected_b = list(a), list(b)
            while len(expected_a) + len(expected_b) > 9:
                if len(expected_a) > len(expected_b):
                    expected_a.pop(0)  # A keeps its end and B its beginning: they still meet
                else:
                    expected_b.pop()
            [pair] = PairBuilder(room=9, seed=0).cut([a, b])
            assert (list(pair.a), list(pair.b)) == (expected_a, expected_b)


def numbered(lengths):
    """Documents of sentences of these lengths. A token's id is its number: it tells where it comes from."""
    count = itertools.count()
    return [[np.array(list(itertools.islice(count, n))) for n in document] for document in lengths]


def random_lengths(n, sentences, words, seed=1):
    rng = random.Random(seed)
    return [[rng.randint(*words) for _ in range(rng.randint(*sentences))] for _ in range(n)]


@pytest.mark.parametrize("sentences, words", [((1, 4), (3, 20)), ((5, 60), (3, 60)), ((2, 12), (50, 300))])
def test_pairs_are_what_their_label_says_and_half_of_each(sentences, words):
    documents = numbered(random_lengths(300, sentences, words))
    document_of = np.concatenate([np.full(sum(map(len, d)), i) for i, d in enumerate(documents)])
    builder = PairBuilder(room=125, seed=0)
    pairs = [pair for start in range(0, 300, 60) for pair in builder.pairs(documents[start : start + 60])]
    for a, b, label in pairs:
        assert 0 < len(a) and 0 < len(b) and len(a) + len(b) <= 125
        assert (np.diff(a) == 1).all() and (np.diff(b) == 1).all()  # running text
        assert (b[0] == a[-1] + 1) if label == 0 else (document_of[b[0]] != document_of[a[0]])
    labels = [label for _, _, label in pairs]
    assert abs(2 * sum(labels) - len(labels)) <= 2
    # Every token is used once, whatever the label, or counted among what was not.
    used = np.concatenate([side for a, b, _ in pairs for side in (a, b)])
    assert len(np.unique(used)) == len(used)
    assert len(used) + builder.dropped + left_over(builder) == len(document_of)
    assert left_over(builder) <= 125


def left_over(builder) -> int:
    """Tokens of the pairs that wait."""
    return sum(len(pair.a) + len(pair.b) for pair in builder.waiting)


def test_chunks_of_a_long_document_wait_for_others():
    """Nothing is paired with its own document while others may come."""
    book, *tales = numbered([[10] * 200] + [[10] * 20] * 30)
    builder = PairBuilder(room=20, seed=0)
    assert list(builder.pairs([book])) == [] and left_over(builder) == 2000
    rows = list(builder.pairs(tales[:5]))  # 10 chunks each
    assert 1000 <= left_over(builder) == 3000 - 20 * len(rows) < 1400
    assert {pair.document for pair in builder.waiting} == {1}
    assert all(a[0] < 2000 or b[0] < 2000 or a[0] // 200 != b[0] // 200 for a, b, label in rows if label == 1)
    assert {a[0] < 2000 for a, _, _ in builder.pairs(tales[5:])} == {True, False}
    assert left_over(builder) == 0


@pytest.mark.parametrize("tales", [0, 3])
def test_a_long_document_at_the_end_is_paired_with_itself_where_chunks_do_not_touch(tales):
    documents = numbered([[10] * 2000] + [[10] * 20] * tales)
    builder = PairBuilder(room=60, seed=0)
    rows = [*builder.pairs(documents), *builder.rest()]
    used = np.concatenate([side for a, b, _ in rows for side in (a, b)])
    total = sum(len(sentence) for document in documents for sentence in document)
    assert len(np.unique(used)) == len(used) == total - builder.dropped and builder.dropped < 0.05 * total
    assert abs(2 * sum(label for *_, label in rows) - len(rows)) <= 2
    for a, b, label in rows:
        assert (b[0] == a[-1] + 1) if label == 0 else (b[0] != a[-1] + 1 and a[0] != b[-1] + 1)


def surface(pairs, lengths, room):
    """What can be seen of the rows without reading them, and more (places): float64 [n, features], labels."""
    starts, ends, places, document_ends, n = set(), set(), [], set(), 0
    for document in lengths:
        places += [i / sum(document) for i in range(sum(document))]
        for length in document:
            starts.add(n)
            n += length
            ends.add(n - 1)
        document_ends.add(n - 1)
    rows = [[a[0] in starts, places[a[0]], places[a[0]] == 0, len(a), len(b), room - len(a) - len(b),
             len(a) + len(b) == room, b[0] in starts, b[-1] in ends, b[-1] in document_ends]
            for a, b, _ in pairs]  # fmt: skip
    return torch.tensor(rows, dtype=torch.float64), torch.tensor([label for *_, label in pairs]).double()


def accuracy_on_the_other_half(x, y):
    """Of a logistic regression on features and their products, trained on half of the rows."""
    i, j = torch.triu_indices(x.shape[1], x.shape[1])
    x = (x - x.mean(0)) / (x.std(0) + 1e-9)
    x = torch.cat([x, x[:, i] * x[:, j], torch.ones(len(x), 1)], 1)
    w = torch.zeros(x.shape[1], dtype=x.dtype, requires_grad=True)
    half, optimizer = len(x) // 2, torch.optim.LBFGS([w], max_iter=100, line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(x[:half] @ w, y[:half]) + 1e-3 * w.square().sum()
        loss.backward()
        return loss

    optimizer.step(loss)
    return ((x[half:] @ w > 0) == (y[half:] > 0)).double().mean().item()


@functools.cache
def real_lengths(corpus):
    texts = (document["text"] for document in itertools.islice(load_corpus(Source(corpus)), 2600))
    return [[len(sentence.split()) for sentence in split_sentences(text)] for text in texts]


@pytest.mark.parametrize("room", [61, 125])
@pytest.mark.parametrize("corpus", ["installed-docs", "articles"])
def test_the_surface_does_not_give_the_label_away(corpus, room):
    """4,000 pairs of real sentences (a token a word here), or of long articles such as WikiText's."""
    lengths = random_lengths(180, (60, 180), (3, 50)) if corpus == "articles" else real_lengths(corpus)
    found = []
    for seed in range(3):
        pairs = list(PairBuilder(room, seed).pairs(numbered(lengths)))
        random.Random(seed).shuffle(pairs)
        x, y = surface(pairs[:4000], lengths, room)
        assert len(x) == 4000 or corpus == "installed-docs" and len(x) > 2000  # of few packages
        assert abs(y[x[:, 0] == 0].mean() - 0.5) < 0.05  # of rows whose A starts in mid-sentence
        found.append(accuracy_on_the_other_half(x, y))
    assert sum(found) / 3 <= 0.53, found


def test_rows_on_disk(tmp_path, tokenizer):
    corpus = load(write_documents(tmp_path / "a.jsonl"))
    cache = {"validation_fraction": 0.2, "cache_dir": tmp_path / "cache"}
    pairs = prepare_pairs(corpus, tokenizer, 64, 3, **cache)
    keys = [(row, 0, row) for row in range(len(pairs.train))] + [(-1, 5, -1)]
    batch = shard_data.batch_of(pairs.train, keys)
    assert {value.dtype for value in batch.values()} == {torch.int64}
    documents = {"train": set(), "validation": set()}
    for i, ids in enumerate(batch["input_ids"][:-1]):
        n = batch["attention_mask"][i].sum()
        tokens = tokenizer.convert_ids_to_tokens(ids.tolist())
        seps = [k for k, token in enumerate(tokens) if token == "[SEP]"]
        assert tokens[0] == "[CLS]" and len(seps) == 2 and seps[1] == n - 1
        assert set(tokens[n:]) <= {"[PAD]"}
        assert batch["token_type_ids"][i].tolist() == [
            int(seps[0] < k <= seps[1]) for k in range(64)
        ]  # A's [SEP] belongs to A
        documents["train"] |= {word for word in tokenizer.decode(ids).split() if word.startswith("D")}
    labels = batch["next_sentence_label"][:-1]
    assert abs(2 * labels.sum() - len(labels)) <= 2
    # Padding of the last evaluation batch: never counted, and attention is not empty.
    assert batch["next_sentence_label"][-1] == -100 and batch["attention_mask"][-1].all()
    validation = pairs.splits["validation"]
    held_out = shard_data.batch_of(validation, [(row, 0, row) for row in range(len(validation))])
    for ids in held_out["input_ids"]:
        documents["validation"] |= {word for word in tokenizer.decode(ids).split() if word.startswith("D")}
    assert documents["train"] and documents["validation"]
    assert not documents["train"] & documents["validation"], "a document is on both sides"
    account = pairs.accounting["train"]
    used = batch["attention_mask"][:-1].sum().item() - 3 * len(pairs.train)
    assert account["tokens"] == used + account["tokens_dropped"]

    again = prepare_pairs(corpus, tokenizer, 64, 3, **cache)
    assert again.folder == pairs.folder
    other = prepare_pairs(corpus, tokenizer, 64, 4, **cache)
    assert other.folder != pairs.folder


def test_label_0_means_that_b_follows_as_in_transformers():
    text = " ".join(BertForPreTraining.forward.__doc__.split())
    assert "0 indicates sequence B is a continuation of sequence A" in text
    assert "1 indicates sequence B is a random sequence" in text


def test_documents_without_sentence_breaks_are_refused(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"no breaks in number {i}"}) + "\n" for i in range(50))
    )
    with pytest.raises(ValueError, match="documents, and pairs need two documents of two sentences"):
        prepare_pairs(load(tmp_path / "a.jsonl"), tokenizer, 32, 0, cache_dir=tmp_path)


def test_a_source_without_text_is_refused(tmp_path):
    rows = {"input_ids": [[2, 5, 3, 6, 3]], "token_type_ids": [[0, 0, 0, 1, 1]]}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "pairs")
    with pytest.raises(ValueError, match="--text_column one that holds text: input_ids, token_type_ids"):
        load(tmp_path / "pairs")


@pytest.mark.parametrize("pack", [False, True])
def test_pairs_that_others_have_saved_are_trained_on(tmp_path, tokenizer, pack):
    """As BertForPreTraining's data set of the AMD example: rows padded by transformers."""
    texts = [(f"first {i} " + "a " * (i % 9), f"second {i} " + "b " * (i % 5), i % 2) for i in range(60)]
    encoded = tokenizer([a for a, *_ in texts], [b for _, b, _ in texts], padding="max_length", max_length=64)
    columns = {**encoded, "next_sentence_label": [label for *_, label in texts]}
    whole = datasets.Dataset.from_dict(columns)
    splits = {"train": whole.select(range(50)), "validation": whole.select(range(50, 60))}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    settings = {
        "dataset_name": f"{tmp_path}/saved", "tokenizer_name": f"{tmp_path}/tokenizer", "block_size": 64,
        "next_sentence": True, "pack_pairs": pack, "cache_dir": f"{tmp_path}/cache",
    }  # fmt: skip
    sources = open_sources(Recipe(**settings), problems := [])
    assert not problems, problems
    data = prepare(sources, Accelerator(cpu=True))
    (rows,) = data.train.sources.values()
    assert len(rows.spans) == 50 and len(data.evals[""].spans) == 10
    batch = shard_data.batch_of(rows, [(i, 0, i) for i in range(len(rows))])
    if pack:
        found = one_by_one(batch)
        for i in range(50):
            length = sum(columns["attention_mask"][i])
            assert found[i]["input_ids"] == columns["input_ids"][i][:length]
            assert found[i]["token_type_ids"] == columns["token_type_ids"][i][:length]
            assert found[i]["label"] == columns["next_sentence_label"][i]
    else:
        for name in columns:
            assert batch[name].tolist() == columns[name][:50], name
    problems = []
    wrong = {"block_size": 32, "next_sentence": False, "tokenizer_name": None}
    open_sources(Recipe(**settings | wrong), problems)
    told = "set --block_size 64", "--next_sentence true", "tokenizer_name:"
    assert all(any(part in line for line in problems) for part in told), problems


def test_saved_pairs_without_training_rows_are_for_evaluation(tmp_path, tokenizer):
    texts = [(f"first {i}", f"second {i}", 0) for i in range(20)]
    encoded = tokenizer([a for a, *_ in texts], [b for _, b, _ in texts], padding="max_length", max_length=16,
                        truncation=True)
    whole = datasets.Dataset.from_dict({**encoded, "next_sentence_label": [label for *_, label in texts]})
    datasets.DatasetDict({"test": whole}).save_to_disk(tmp_path / "test")
    whole.save_to_disk(tmp_path / "train")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    shared = {"tokenizer_name": f"{tmp_path}/tokenizer", "block_size": 16, "next_sentence": True,
              "cache_dir": f"{tmp_path}/cache"}  # fmt: skip
    recipe = Recipe(f"{tmp_path}/train", eval_dataset_name=f"{tmp_path}/test", **shared)
    sources = open_sources(recipe, problems := [])
    assert not problems and len(prepare(sources, Accelerator(cpu=True)).evals[""]) == 20
    open_sources(Recipe(f"{tmp_path}/test", **shared), problems)
    assert problems[0] == (f"{tmp_path}/test has no row of 16 tokens for train, only for test: lower "
                           "block_size or name other data.")
    assert "for validation, only for test: set eval_dataset_name." in problems[1]


# ---- Several pairs to a row


def write_pairs(path, lengths, T, ids=(10, 200), seed=0):
    """A file of PairRows: [CLS] A [SEP] B [SEP] of random tokens, so many in all, and labels."""
    rng, rows = np.random.default_rng(seed), np.zeros((len(lengths), T + 3), np.uint16)
    for row, length in zip(rows, lengths, strict=True):
        end_of_a = rng.integers(3, length - 1)
        row[:length] = rng.integers(*ids, length)
        row[[0, end_of_a - 1, length - 1]] = 2, 3, 3
        row[T:] = end_of_a, length, rng.integers(2)
    np.save(path, rows)
    return path


def all_rows(rows: PairRows, epoch=0) -> dict:
    """And one of padding."""
    return shard_data.batch_of(rows, [(i, epoch, i) for i in range(len(rows))] + [(-1, epoch, -1)])


def one_by_one(batch: dict) -> dict[int, dict[str, list]]:
    """{number: the columns of that pair} of packed rows."""
    found = {}
    for row, pairs in enumerate(batch["pair"].tolist()):
        for which, pair in enumerate(pairs):
            if pair >= 0:
                own = batch["attention_mask"][row] == which + 1
                assert pair not in found and own.nonzero()[0] == batch["pair_start"][row, which]
                columns = ("input_ids", "token_type_ids", "position_ids")
                found[pair] = {name: batch[name][row][own].tolist() for name in columns}
                found[pair]["label"] = batch["next_sentence_label"][row, which].item()
    return found


@pytest.mark.parametrize("T", [32, 128])
def test_packed_rows_hold_every_pair_once_and_whole(tmp_path, T):
    lengths = np.random.default_rng(1).integers(8, T + 1, 300)
    file = write_pairs(tmp_path / "pairs.npy", lengths, T)
    plain, packed = shard_data.packed(file, PairRows), shard_data.packed(file, PairRows, pack=True)
    assert packed.fingerprint != plain.fingerprint
    assert "members" not in vars(packed), "a resume looks at the fingerprints of all files in the cache"
    batch, alone = all_rows(packed), all_rows(plain)
    assert {value.dtype for value in batch.values()} == {torch.int64} and packed.block_size == T
    assert batch["input_ids"].shape == (len(packed) + 1, T)
    found = one_by_one(batch)
    assert found.keys() == set(range(300))
    for pair, columns in found.items():
        n = lengths[pair]
        assert columns["input_ids"] == alone["input_ids"][pair, :n].tolist()
        assert columns["token_type_ids"] == alone["token_type_ids"][pair, :n].tolist()
        assert columns["position_ids"] == list(range(n))
        assert columns["label"] == alone["next_sentence_label"][pair]
    padding = (batch["attention_mask"][:-1] == 0).float().mean().item()
    assert packed.padding == pytest.approx(padding) and padding < plain.padding - 0.1
    last = {name: value[-1] for name, value in batch.items()}
    assert last["attention_mask"].all() and (last["pair"] < 0).all()
    assert (last["next_sentence_label"] == -100).all()


def test_rows_are_filled_as_well_as_can_be():
    rng = np.random.default_rng(0)
    lengths = rng.integers(48, 129, 20_000)  # 31 % of rows of 128 would be padding
    members = shared_rows(lengths, 512)
    assert sorted(members[members >= 0].tolist()) == list(range(20_000))
    filled = np.where(members >= 0, lengths[members], 0).sum(1)
    assert filled.max() <= 512 and filled.mean() > 0.99 * 512
    assert members.shape[1] == (members >= 0).sum(1).max() == 9
    assert (shared_rows(np.array([3, 9, 7, 1]), 10) >= 0).sum(1).tolist() == [2, 2]
    assert shared_rows(np.array([], int), 10).shape == (0, 1)


def test_pairs_share_the_same_rows_wherever_a_run_goes_on():
    """Whatever numpy's generators draw in other versions."""
    members = [row[row >= 0].tolist() for row in shared_rows(np.repeat([8, 4, 5], 4), 16)]
    assert members == [[2, 1], [3, 0], [8, 9, 11], [10, 6, 4], [5, 7]]


def test_packed_pairs_have_the_masks_that_they_would_have_alone(tmp_path, tokenizer):
    T = 64
    lengths = np.random.default_rng(1).integers(8, 50, 200)
    file = write_pairs(tmp_path / "pairs.npy", lengths, T)
    for rate in (0.15, 0.9):
        mask = MaskTokens(tokenizer, rate, seed=5)
        alone = mask(all_rows(shard_data.packed(file, PairRows), epoch=3))
        packed = mask(all_rows(shard_data.packed(file, PairRows, pack=True), epoch=3))
        K = math.ceil(rate * T) + packed["pair"].shape[1]
        assert packed["slots"].shape == packed["slot_labels"].shape == (len(packed["row"]), K)
        assert (packed["slot_labels"][-1] == -100).all()
        shown, seen = one_by_one(packed), 0
        predicted = {}
        for row, (slots, labels) in enumerate(zip(packed["slots"], packed["slot_labels"], strict=True)):
            for slot, label in zip(slots.tolist(), labels.tolist(), strict=True):
                if label != -100:
                    which = packed["attention_mask"][row, slot] - 1
                    pair, start = packed["pair"][row, which].item(), packed["pair_start"][row, which]
                    predicted.setdefault(pair, set()).add((slot - start.item(), label))
        for pair, n in enumerate(lengths):
            slots, labels = alone["slots"][pair].tolist(), alone["slot_labels"][pair].tolist()
            expected = {(s, label) for s, label in zip(slots, labels, strict=True) if label != -100}
            assert predicted.get(pair, set()) == expected
            assert shown[pair]["input_ids"] == alone["input_ids"][pair, :n].tolist()
            seen += len(expected)
        assert seen == (packed["slot_labels"] != -100).sum() > 0.9 * rate * (lengths - 3).sum()
