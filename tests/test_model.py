"""Configuration, tokenizer and block size agree by construction, or the settings are refused by name."""

import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from utils.learning.model import build_model, model_problems, use_one_kernel_gelu
from utils.learning.one_kernel import RMSNorm, use_one_kernel_rms_norm

GPT2 = "n_layer=2,n_embd=32,n_head=2"
BERT = "hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=64"
ROLES = {"pad": "[PAD]", "mask": "[MASK]", "cls": "[CLS]", "sep": "[SEP]", "unk": "[UNK]"}


def tokenizer(words=50, eos="[EOS]", pad="[PAD]", **roles):
    """Word-level; [PAD] is 2, all roles of a masked model unless told otherwise; None removes a role."""
    vocabulary = ["[CLS]", "[EOS]", "[PAD]", "[SEP]", "[MASK]", "[UNK]", *(f"w{i}" for i in range(words))]
    model = models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="[UNK]")
    named = {
        f"{role}_token": token
        for role, token in (ROLES | {"eos": eos, "pad": pad} | roles).items()
        if token
    }
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), **named)


def test_a_causal_model_takes_vocabulary_ids_and_positions_from_the_tokenizer_and_block_size():
    model = build_model("causal", "gpt2", GPT2 + ",resid_pdrop=0", None, 24, tokenizer())
    config = model.config
    assert (config.n_layer, config.n_embd, config.resid_pdrop) == (2, 32, 0.0)
    assert (config.vocab_size, config.n_positions, config.eos_token_id, config.bos_token_id) == (
        56,
        24,
        1,
        None,
    )
    assert model.generation_config.eos_token_id == 1
    assert model.generation_config.max_length == 24  # pipelines ask for 256 new tokens otherwise
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert config._attn_implementation == "sdpa"


def test_end_of_text_as_padding_still_learns_its_embedding():
    """A pad id in the configuration would freeze that row of the embedding (nn.Embedding's padding_idx)."""
    model = build_model("causal", "llama", BERT + ",num_key_value_heads=2", None, 8, tokenizer(pad="[EOS]"))
    model(torch.ones(1, 8, dtype=torch.long)).logits.sum().backward()
    assert model.config.pad_token_id is None and model.config.eos_token_id == 1
    assert model.model.embed_tokens.weight.grad[1].abs().sum() > 0


@pytest.mark.parametrize("model_type", ["bert", "roberta"])
def test_an_encoder_as_causal_model_does_not_see_the_next_token(model_type):
    model = build_model("causal", model_type, BERT, None, 8, tokenizer()).eval()
    ids = torch.arange(8)[None] + 10
    before, after = model(ids).logits, model(torch.cat([ids[:, :-1], ids[:, :1]], 1)).logits
    assert torch.equal(before[:, :-1], after[:, :-1]) and not torch.equal(before[:, -1], after[:, -1])


@pytest.mark.parametrize("kind", ["masked", "pretraining"])
def test_masked_models_have_a_position_for_every_token_of_a_full_row(kind):
    model_type = "roberta" if kind == "masked" else "bert"
    model = build_model(kind, model_type, BERT, None, 16, tokenizer()).eval()
    assert model.config.max_position_embeddings == (16 + 2 + 1 if model_type == "roberta" else 16)
    assert model.config.pad_token_id == 2 and model.config.type_vocab_size == 2
    ids = torch.full((1, 16), 9)
    assert model(ids, token_type_ids=torch.ones_like(ids)).hidden_states is None  # the last position exists
    with pytest.raises(Exception, match="size|range"):
        model(torch.full((1, 17), 9))


TINY = "hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=64"
AFTER_PAD = (
    "camembert data2vec-text esm longformer mpnet roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl "
    "ibert luke xmod"
)


@pytest.mark.parametrize("model_type", [*AFTER_PAD.split(), "bert", "modernbert", "electra", "albert"])
def test_models_that_number_positions_after_the_padding_have_so_many_more(model_type):
    """A full row has a position for each token, whatever the architecture does with the pad id."""
    pad = tokenizer(pad="[EOS]")  # 1, as MPNet has it fixed
    overrides = TINY + (",embedding_size=32" if model_type in ("electra", "albert") else "")
    overrides += ",attention_window=8" if model_type == "longformer" else ""
    model = build_model("masked", model_type, overrides, None, 16, pad).eval()
    more = 2 if model_type in AFTER_PAD.split() else 0
    assert model.config.max_position_embeddings == 16 + more
    if model_type == "xmod":
        model.set_default_language("en_XX")
    model(torch.full((1, 16), 9))


def test_the_one_kernel_gelu_computes_and_saves_the_same(tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("gpt2", vocab_size=56, n_embd=32, n_layer=2, n_head=2)
    )
    ids = torch.randint(56, (2, 8))
    expected = model.eval()(ids).logits
    use_one_kernel_gelu(model)
    assert not any("NewGELU" in type(module).__name__ for module in model.modules())
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-5, atol=1e-6)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.config.activation_function == "gelu_new"
    torch.testing.assert_close(loaded(ids).logits, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("model_type", ["qwen3", "llama", "olmo2", "gemma3_text"])
def test_the_one_kernel_rms_norm_computes_and_saves_the_same(model_type, tmp_path):
    """Gemma's formula is another one: it is left alone."""
    torch.manual_seed(0)
    shape = BERT + ",num_key_value_heads=2,head_dim?=8"
    model = build_model("causal", model_type, shape, None, 16, tokenizer()).eval()
    few = [module for module in model.modules() if isinstance(module, RMSNorm)]
    assert bool(few) == (model_type != "gemma3_text")
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn_like(weight)
    model.save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.randint(56, (2, 8))
    for lm in (model, theirs):
        lm(ids, labels=ids).loss.backward()
    torch.testing.assert_close(model(ids).logits, theirs(ids).logits, rtol=1e-6, atol=1e-6)
    for (name, ours), own in zip(model.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, own.grad, rtol=1e-5, atol=1e-6, msg=name)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(ids).logits, theirs(ids).logits, rtol=1e-2, atol=1e-2)
    copy = pickle.loads(pickle.dumps(model)).to(torch.bfloat16)
    for norm, own in zip(copy.modules(), theirs.to(torch.bfloat16).modules(), strict=True):
        if isinstance(norm, RMSNorm):
            x = 1e4 * torch.randn(4, len(norm.weight), dtype=torch.bfloat16)
            assert torch.equal(norm(x), own(x))


def test_norms_of_another_formula_are_left_alone():
    class BiasedRMSNorm(nn.Module):
        def __init__(self, bias):
            super().__init__()
            self.weight, self.variance_epsilon, self.bias = nn.Parameter(torch.ones(8)), 1e-6, bias

        def forward(self, x):
            return F.rms_norm(x, (8,), 1 + self.weight, self.variance_epsilon) / 2 + (self.bias or 0)

    class GatedRMSNorm(BiasedRMSNorm):  # as Bamba's
        def forward(self, x, gate=None):
            return F.rms_norm(x if gate is None else x * F.silu(gate), (8,), self.weight, 1e-6)

    norms = BiasedRMSNorm(None), BiasedRMSNorm(nn.Parameter(torch.zeros(()))), GatedRMSNorm(None)
    model = nn.ModuleList(norms)
    use_one_kernel_rms_norm(model)
    assert [*model] == [*norms] and all(norm.weight.eq(1).all() for norm in model)


def test_continuing_from_weights_keeps_them_and_trains_in_float32(tmp_path):
    saved = build_model("causal", "gpt2", GPT2, None, 24, tokenizer()).to(torch.bfloat16)
    saved.save_pretrained(tmp_path)
    model = build_model("causal", "gpt2", "", str(tmp_path), 16, tokenizer())
    assert model.config.n_positions == 24 and model.training  # from_pretrained leaves dropout off
    for found, expected in zip(model.parameters(), saved.parameters(), strict=True):
        assert found.dtype == torch.float32 and torch.equal(found, expected.float())


def test_overrides_are_typed_by_the_configuration():
    overrides = BERT + ",num_key_value_heads=1,rms_norm_eps=1e-3,tie_word_embeddings=true,head_dim=8"
    config = build_model("causal", "llama", overrides, None, 16, tokenizer()).config
    assert (
        config.rms_norm_eps,
        config.tie_word_embeddings,
        config.head_dim,
        config.num_key_value_heads,
    ) == (1e-3, True, 8, 1)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (("causal", "gpt2", "n_layr=3,n_head=x,foo", None, 16), ["name=value", "n_layer", "'x' is no int"]),
        (("causal", "gpt3", "", None, 16), ["model_type, 'gpt3': unknown to transformers; near: gpt"]),
        (("causal", "t5", "", None, 16), ["model_type, 't5': transformers has no causal language model"]),
        (("causal", "gpt2", "n_embd=100,n_head=3", None, 16), ["divisible"]),
        (("causal", "llama", "num_attention_heads=2,hidden_size=64", None, 16), []),
        (("causal", "llama", BERT + ",num_key_value_heads=4", None, 16), ["size"]),
        (("causal", "gpt2", "n_positions=8,vocab_size=40", None, 16), ["vocab_size 40", "needs n_positions"]),
        (("causal", "gpt2", GPT2, "/no/such/folder", 16), ["config_overrides", "model_name_or_path, '/no"]),
        (("pretraining", "roberta", BERT, None, 16), ["no next-sentence head"]),
        (("pretraining", "bert", BERT + ",type_vocab_size=1", None, 16), ["type_vocab_size 1"]),
        (("masked", "roberta", BERT + ",max_position_embeddings=18", None, 16), ["at least 19"]),
        (("causal", "gpt2", GPT2, None, 16), []),
        (("masked", "bert", BERT, None, 16), []),
    ],
)  # fmt: skip
def test_settings_that_cannot_agree_are_all_named_and_others_are_not(settings, expected):
    problems = model_problems(*settings, tokenizer())
    assert len(problems) == len(expected), problems
    assert all(part in problem for part, problem in zip(expected, problems, strict=True)), problems
    if problems:
        with pytest.raises(ValueError, match=re.escape("\n".join(problems))):
            build_model(*settings[:5], tokenizer())


def test_weights_and_a_tokenizer_that_do_not_go_together_are_refused(tmp_path):
    build_model("masked", "roberta", BERT, None, 16, tokenizer()).save_pretrained(tmp_path)
    problems = model_problems("masked", None, "", str(tmp_path), 32, tokenizer(words=70, pad="[EOS]"))
    assert len(problems) == 3
    assert "vocab_size 56 is smaller than the tokenizer's 76" in problems[0]
    assert "its pad_token_id is 2, the tokenizer's is 1" in problems[1]
    assert "block_size, 32" in problems[2]


def test_a_tokenizer_without_the_tokens_of_a_masked_model_is_refused():
    (problem,) = model_problems("masked", "bert", BERT, None, 16, tokenizer(mask=None, cls=None))
    assert "mask, cls token" in problem


def test_before_there_is_a_tokenizer_the_rest_is_checked():
    assert model_problems("masked", "roberta", BERT, None, 16) == []
    assert "n_positions" in model_problems("causal", "gpt2", "n_positions=8", None, 16)[0]
