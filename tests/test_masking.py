"""Masked tokens: their shares, independence of batch size and processes, static shapes."""

import pickle

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from data.batches.masking import MaskTokens, special_ids

SPECIAL = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>",
           "cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>"}
V = 1000


def make_tokenizer(**special):
    words = list(dict.fromkeys(special.values())) + [f"w{i}" for i in range(V)]
    model = models.WordLevel({w: i for i, w in enumerate(words[:V])}, unk_token="<unk>")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), **special)


def make_batch(rows, epoch=0, T=126, seed=0):
    """Rows of random tokens, about 6 % of them special. The content depends on the row's number alone."""
    ids = np.stack([np.random.default_rng([seed, abs(r)]).integers(0, V, T) for r in rows])
    ids[:, ::20] = 2                                                         # </s> between documents
    return {"input_ids": torch.from_numpy(ids), "position": torch.tensor(rows) + epoch * 100,
            "epoch": torch.full((len(rows),), epoch), "row": torch.tensor(rows)}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(**SPECIAL)


def count_tokens(tokenizer, T, n_rows, probability=0.15):
    """Counts eligible, predicted, masked, random and unchanged tokens by comparing rows before and after."""
    collate, special = MaskTokens(tokenizer, probability, seed=7), torch.tensor(special_ids(tokenizer))
    total = dict.fromkeys(("eligible", "predicted", "masked", "random", "unchanged"), 0)
    replaced = []
    for start in range(0, n_rows, 256):
        batch = make_batch(list(range(start, min(start + 256, n_rows))), T=T)
        before = batch["input_ids"].clone()
        out = collate(batch)
        after, used = out["input_ids"][:, 1:-1], out["slot_labels"] != -100
        slots = (out["slots"] - 1).clamp(min=0)
        predicted = torch.zeros_like(before).scatter_add_(1, slots, used.long())
        assert predicted.max() <= 1, "a position is predicted twice"
        predicted = predicted.bool()
        assert not torch.isin(before[predicted], special).any(), "a special token was masked"
        assert torch.equal(before[~predicted], after[~predicted]), "a token changed without being predicted"
        assert torch.equal(before.gather(1, slots)[used], out["slot_labels"][used])
        b, a = before[predicted], after[predicted]
        total["eligible"] += (~torch.isin(before, special)).sum().item()
        total["predicted"] += predicted.sum().item()
        total["masked"] += (a == tokenizer.mask_token_id).sum().item()
        total["unchanged"] += (a == b).sum().item()
        changed = a[(a != b) & (a != tokenizer.mask_token_id)]
        total["random"] += len(changed)
        replaced.append(changed)
    return total, torch.cat(replaced)


def test_shares_of_masked_random_and_unchanged_tokens_over_a_million_tokens(tokenizer):
    total, replaced = count_tokens(tokenizer, T=126, n_rows=8600)
    assert total["eligible"] > 1_000_000
    share = {name: 100 * total[name] / total["predicted"] for name in ("masked", "random", "unchanged")}
    assert abs(100 * total["predicted"] / total["eligible"] - 15) < 0.2
    for name, expected in (("masked", 80), ("random", 10), ("unchanged", 10)):
        assert abs(share[name] - expected) < 0.5, name
    # Random replacements are never special, reach every ordinary token and are uniform.
    frequency = torch.bincount(replaced, minlength=V)
    special = torch.tensor(special_ids(tokenizer))
    assert frequency[special].sum() == 0
    ordinary = np.delete(frequency.numpy(), special)
    assert ordinary.min() > 0
    expected = ordinary.mean()
    chi2 = ((ordinary - expected) ** 2 / expected).sum() / (len(ordinary) - 1)
    assert 0.8 < chi2 < 1.2


@pytest.mark.parametrize("T", [10, 25, 33])
def test_the_masked_share_of_short_rows_is_exact_on_average(tokenizer, T):
    total, _ = count_tokens(tokenizer, T=T, n_rows=20000)
    assert abs(100 * total["predicted"] / total["eligible"] - 15) < 0.3


def test_masks_depend_on_seed_epoch_and_row_alone(tokenizer):
    collate = MaskTokens(tokenizer, seed=3)
    masked = collate(make_batch(list(range(12)), epoch=2))
    # Rows of two processes, other batch sizes and orders, a pickled copy (as data loader workers have).
    copy = pickle.loads(pickle.dumps(collate))
    for rows in ([0, 2, 4, 6], [1, 3, 5], [11, 7]):
        part = copy(make_batch(rows, epoch=2))
        for name, value in part.items():
            assert torch.equal(value, masked[name][rows]), name
    torch.manual_seed(99)
    np.random.seed(99)
    assert torch.equal(collate(make_batch(list(range(12)), epoch=2))["slots"], masked["slots"])
    for other in (collate(make_batch(list(range(12)), epoch=3)),
                  MaskTokens(tokenizer, seed=4)(make_batch(list(range(12)), epoch=2))):
        same = (other["slots"] == masked["slots"]).float().mean()
        assert same < 0.1


def test_shapes_are_static_and_padding_has_no_predictions(tokenizer):
    collate = MaskTokens(tokenizer)
    batch = make_batch([0, 1, 2, -1])
    batch["input_ids"][1] = tokenizer.pad_token_id                           # no eligible token
    batch["input_ids"][2] = 500                                              # everything may be predicted
    out = collate(batch)
    assert out["slots"].shape == out["slot_labels"].shape == (4, 19)         # ceil(0.15 * 126)
    assert out["input_ids"].shape == (4, 128)
    assert (out["slot_labels"] != -100).sum(1).tolist()[1::2] == [0, 0]
    assert (out["slot_labels"][2] != -100).sum() in (18, 19)
    assert out["input_ids"][0, 0] == tokenizer.cls_token_id
    assert out["input_ids"][0, -1] == tokenizer.sep_token_id
    assert "attention_mask" not in out


def test_random_tokens_are_existing_ids_of_a_vocabulary_with_gaps():
    words = [*dict.fromkeys(SPECIAL.values())] + [f"w{i}" for i in range(9)]
    ids = {word: i for i, word in enumerate(words)} | {"far": 70_000}
    gappy = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(ids, "<unk>")), **SPECIAL)
    batch = make_batch(list(range(64)))
    batch["input_ids"] = torch.where(batch["input_ids"] % 2 == 0, 70_000, 9)
    before = batch["input_ids"].clone()
    out = MaskTokens(gappy, 0.5)(batch)
    masked = out["input_ids"][:, 1:-1]
    changed = set(masked[(masked != before) & (masked != gappy.mask_token_id)].tolist())
    assert 70_000 in changed and changed <= set(ids.values()), "random tokens are ones that exist"
