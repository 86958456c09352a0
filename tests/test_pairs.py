"""Sentence pairs for next-sentence prediction: sentence splitting, pairs of both labels, prepared rows."""

import functools
import itertools
import json
import random

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import BertForPreTraining

from data import convert
from data.batches.masking import MaskTokens
from data.documents.source import Source, open_corpus
from data.load import eval_loader, train_loader
from data.tokens.pairs import PairBuilder, split_sentences
from data.tokens.tokenizer import train_tokenizer
from tests.data_runs import all_columns, all_ids, exit_status, load, settings

WORDS = "the of and to in is for on with as by at from that which this it are was were be has".split()


def write_documents(path, n=40, sentences=(2, 30), seed=0):
    """Writes n documents whose sentences begin with their numbers, such as "D7 s3 of the and to ... ." """
    rng = random.Random(seed)
    with open(path, "w") as file:
        for d in range(n):
            parts = (f"D{d} s{i} {' '.join(rng.choices(WORDS, k=rng.randint(3, 25)))}."
                     for i in range(rng.randint(*sentences)))  # fmt: skip
            file.write(json.dumps({"text": " ".join(parts)}) + "\n")
    return str(path)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    texts = [" ".join(WORDS) + "." + " ".join(f"D{i} s{i}" for i in range(60))] * 5
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(texts, "unigram", 400, "bert").save_pretrained(folder)
    return str(folder)


def test_sentences_end_where_a_reader_ends_them():
    assert split_sentences('He met Mr. J. Smith . It is " H. gammarus " , he said . Costs 3 @.@ 5 !') == [
        "He met Mr. J. Smith .", 'It is " H. gammarus " , he said .', "Costs 3 @.@ 5 !",
    ]  # fmt: skip
    assert split_sentences("Is it (e.g. this one?) Yes. It is") == ["Is it (e.g. this one?)", "Yes.", "It is"]
    # Headings and paragraphs end a sentence, line breaks within a paragraph do not.
    assert split_sentences(" = Title = \n\nOne line\ngoes on. Two\nThree") == [
        "= Title =", "One line goes on.", "Two", "Three",
    ]  # fmt: skip
    assert split_sentences("Это первое. Вот второе! И третье?") == ["Это первое.", "Вот второе!", "И третье?"]
    assert split_sentences("Er kam. Über uns. Sie ging.") == ["Er kam.", "Über uns.", "Sie ging."]
    assert split_sentences("他来了。他说：“好。”我走了！") == ["他来了。", "他说：“好。”我走了！"]
    assert split_sentences(" \n ") == []


def load_pairs(folder, *names, **changes):
    usual = dict(next_sentence=True, algorithm="unigram", model_type="bert", block_size=64)
    return load(folder, *names, **{**usual, **changes})


def test_evaluation_documents_are_never_trained_on(tokenizer, tmp_path):
    lines = open(write_documents(tmp_path / "all.jsonl")).readlines()
    (tmp_path / "some.jsonl").write_text("".join(lines[:15]))
    names = dict(tokenizer_name=tokenizer, eval_dataset_name=[str(tmp_path / "some.jsonl")])
    known, train, evals = load_pairs(tmp_path, tmp_path / "all.jsonl", **names)
    rows = [known.decode(row).lower() for row in all_ids(train)]
    assert not any(f" d{d} s" in row for row in rows for d in range(15))
    assert any(f" d{d} s" in row for row in rows for d in range(15, 40)) and len(evals[""])


def number_tokens(lengths):
    """Documents with sentences of these lengths. Token ids count up, so that an id shows its origin."""
    count = itertools.count()
    return [[np.array(list(itertools.islice(count, n))) for n in document] for document in lengths]


def random_lengths(n, sentences, words, seed=1):
    rng = random.Random(seed)
    return [[rng.randint(*words) for _ in range(rng.randint(*sentences))] for _ in range(n)]


@pytest.mark.parametrize("sentences, words", [((1, 4), (3, 20)), ((5, 60), (3, 60)), ((2, 12), (50, 300))])
def test_half_of_the_pairs_follow_each_other_and_labels_say_which(sentences, words):
    documents = number_tokens(random_lengths(300, sentences, words))
    document_of = np.concatenate([np.full(sum(map(len, d)), i) for i, d in enumerate(documents)])
    builder = PairBuilder(room=125, seed=0)
    pairs = [pair for start in range(0, 300, 60) for pair in builder.build(documents[start : start + 60])]
    for a, b, label in pairs:
        assert 0 < len(a) and 0 < len(b) and len(a) + len(b) <= 125
        assert (np.diff(a) == 1).all() and (np.diff(b) == 1).all()  # running text
        assert (b[0] == a[-1] + 1) if label == 0 else (document_of[b[0]] != document_of[a[0]])
    labels = [label for _, _, label in pairs]
    assert abs(2 * sum(labels) - len(labels)) <= 2
    # Every token is in one pair, or dropped and counted, or still waiting.
    used = np.concatenate([side for a, b, _ in pairs for side in (a, b)])
    assert len(np.unique(used)) == len(used)
    assert len(used) + builder.dropped + count_waiting(builder) == len(document_of)
    assert count_waiting(builder) <= 125


def count_waiting(builder) -> int:
    """Number of tokens of the pairs that wait for a partner."""
    return sum(len(pair.a) + len(pair.b) for pair in builder.waiting)


@pytest.mark.parametrize("short_documents", [0, 3])
def test_a_last_long_document_is_paired_with_its_own_distant_chunks(short_documents):
    documents = number_tokens([[10] * 2000] + [[10] * 20] * short_documents)
    builder = PairBuilder(room=60, seed=0)
    rows = [*builder.build(documents), *builder.build_rest()]
    used = np.concatenate([side for a, b, _ in rows for side in (a, b)])
    total = sum(len(sentence) for document in documents for sentence in document)
    assert len(np.unique(used)) == len(used) == total - builder.dropped and builder.dropped < 0.05 * total
    assert abs(2 * sum(label for *_, label in rows) - len(rows)) <= 2
    for a, b, label in rows:
        assert (b[0] == a[-1] + 1) if label == 0 else (b[0] != a[-1] + 1 and a[0] != b[-1] + 1)


def surface_features(pairs, lengths, room):
    """Lengths, positions and cuts of the pairs: features float64 [n, features] and labels [n]."""
    starts, ends, positions, document_ends, n = set(), set(), [], set(), 0
    for document in lengths:
        positions += [i / sum(document) for i in range(sum(document))]
        for length in document:
            starts.add(n)
            n += length
            ends.add(n - 1)
        document_ends.add(n - 1)
    rows = [[a[0] in starts, positions[a[0]], positions[a[0]] == 0, len(a), len(b), room - len(a) - len(b),
             len(a) + len(b) == room, b[0] in starts, b[-1] in ends, b[-1] in document_ends]
            for a, b, _ in pairs]  # fmt: skip
    return torch.tensor(rows, dtype=torch.float64), torch.tensor([label for *_, label in pairs]).double()


def accuracy_on_the_other_half(x, y):
    """Accuracy of a logistic regression on features and their products, trained on half of the rows."""
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
    texts = (document["text"] for document in itertools.islice(open_corpus(Source(corpus)), 2600))
    return [[len(sentence.split()) for sentence in split_sentences(text)] for text in texts]


@pytest.mark.parametrize("room", [61, 125])
@pytest.mark.parametrize("corpus", ["installed-docs", "articles"])
def test_lengths_and_cuts_say_nothing_about_the_label(corpus, room):
    """On 4,000 pairs of real sentences (each word is a token), or of long articles such as WikiText's."""
    lengths = random_lengths(180, (60, 180), (3, 50)) if corpus == "articles" else real_lengths(corpus)
    accuracies = []
    for seed in range(3):
        pairs = list(PairBuilder(room, seed).build(number_tokens(lengths)))
        random.Random(seed).shuffle(pairs)
        x, y = surface_features(pairs[:4000], lengths, room)
        assert len(x) == 4000 or corpus == "installed-docs" and len(x) > 2000  # few packages are installed
        assert abs(y[x[:, 0] == 0].mean() - 0.5) < 0.05  # pairs whose A starts in mid-sentence
        accuracies.append(accuracy_on_the_other_half(x, y))
    assert sum(accuracies) / 3 <= 0.53, accuracies


def test_rows_are_pairs_with_their_masks(tmp_path, tokenizer):
    name = write_documents(tmp_path / "a.jsonl")
    known, rows, evals = load_pairs(tmp_path, name, tokenizer_name=tokenizer, validation_fraction=0.2)
    args, documents = settings(tmp_path, name), {"train": set(), "eval": set()}
    for batch in train_loader(rows, args):
        assert {value.dtype for value in batch.values()} == {torch.int64}
        for i, ids in enumerate(batch["input_ids"]):
            n, tokens = batch["attention_mask"][i].sum(), known.convert_ids_to_tokens(ids.tolist())
            seps = [k for k, token in enumerate(tokens) if token == "[SEP]"]
            assert tokens[0] == "[CLS]" and len(seps) == 2 and seps[1] == n - 1
            assert set(tokens[n:]) <= {"[PAD]"} and batch["attention_mask"][i, :n].all()
            of_b = [int(seps[0] < k <= seps[1]) for k in range(64)]  # A's [SEP] belongs to A
            assert batch["token_type_ids"][i].tolist() == of_b
    labels = all_columns(rows)["next_sentence_label"]
    assert abs(2 * sum(labels) - len(labels)) <= 2
    for split, split_rows in (("train", rows), ("eval", evals[""])):
        for ids in all_ids(split_rows):
            documents[split] |= {word for word in known.decode(ids).split() if word.startswith("D")}
    assert documents["eval"] and not documents["train"] & documents["eval"]
    mask = MaskTokens(known, 0.15, 0)
    *_, last = eval_loader(evals[""], args, mask)
    filled = last["row"] < 0
    if filled.any():  # padding rows: not counted, attention not empty
        assert (last["next_sentence_label"][filled] == -100).all() and last["attention_mask"][filled].all()
    batch = next(iter(train_loader(rows, args, collate=mask)))
    for slots, slot_labels, row in zip(batch["slots"], batch["slot_labels"], batch["row"], strict=True):
        unmasked = all_ids(rows)[row].copy()
        hidden = slot_labels != -100
        assert (unmasked[slots[hidden]] == slot_labels[hidden].numpy()).all() and hidden.any()
        assert not {*unmasked[slots[hidden]].tolist()} & {*known.all_special_ids}


def test_label_0_means_that_b_follows_a_as_in_transformers():
    text = " ".join(BertForPreTraining.forward.__doc__.split())
    assert "0 indicates sequence B is a continuation of sequence A" in text
    assert "1 indicates sequence B is a random sequence" in text


def test_documents_without_sentence_breaks_are_refused(tmp_path, tokenizer):
    lines = (json.dumps({"text": f"no end {i} " * 40}) + "\n" for i in range(50))
    (tmp_path / "a.jsonl").write_text("".join(lines))
    with pytest.raises(ValueError, match="pairs need two documents of two sentences or more"):
        load_pairs(tmp_path, tmp_path / "a.jsonl", tokenizer_name=tokenizer)


ROW = {
    "input_ids": [2, 11, 12, 3, 21, 3, 0, 0], "token_type_ids": [0, 0, 0, 0, 1, 1, 0, 0],
    "attention_mask": [1, 1, 1, 1, 1, 1, 0, 0], "next_sentence_label": 1,
}  # fmt: skip
WRONG = [
    ({"next_sentence_label": 2}, "its label is"),
    ({"next_sentence_label": -100}, "its label is"),
    ({"input_ids": [2, 11, 9999, 3, 21, 3, 0, 0]}, "the id 9999"),
    ({"attention_mask": [1, 1, 0, 1, 1, 1, 0, 0]}, "no single run of ones"),
    ({"token_type_ids": [0, 1, 0, 0, 1, 1, 0, 0]}, "not zeros, then ones"),
]


@pytest.mark.parametrize("form", ["saved", "parquet", "jsonl", "left", "no mask", "labels"])
def test_converted_pairs_are_those_of_the_file(form, tmp_path, tokenizer):
    row = {**ROW}
    if form == "left":
        row |= {name: [0, 0, *values[:6]] for name, values in ROW.items() if name != "next_sentence_label"}
    if form == "no mask":
        del row["attention_mask"]
    if form == "labels":
        row["labels"] = [row.pop("next_sentence_label")]
    rows = [row] * 12
    dataset, name = datasets.Dataset.from_list(rows), str(tmp_path / f"pairs.{form}")
    if form == "parquet":
        dataset.to_parquet(name)
    elif form == "jsonl":
        dataset.to_json(name)
    else:
        datasets.DatasetDict(train=dataset, test=dataset).save_to_disk(name)
    assert exit_status(convert.main, [name, tmp_path / "out", "--tokenizer_name", tokenizer]) == 0
    evaluated = [write_documents(tmp_path / "a.jsonl")]
    _, converted_rows, _ = load_pairs(tmp_path, tmp_path / "out", block_size=8, eval_dataset_name=evaluated)
    columns = all_columns(converted_rows)
    assert columns | {name: [value] * 12 for name, value in ROW.items()} == columns


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_invalid_pairs_are_refused(change, message, tmp_path, tokenizer, capsys):
    rows = [ROW] * 1100 + [ROW | change]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "pairs"))
    words = [tmp_path / "pairs", tmp_path / "out", "--tokenizer_name", tokenizer]
    assert exit_status(convert.main, words) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out" / "manifest.json").exists()
    with pytest.raises(ValueError, match="python -m data.convert"):
        load_pairs(tmp_path, tmp_path / "pairs", tokenizer_name=tokenizer)
