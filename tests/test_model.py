"""Models get sizes and ids from settings and tokenizer; settings that do not match are refused by name."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from data.tokens.tokenizer import LIKE_ROBERTA
from utils.learning.kernels import use_fast_products, use_one_kernel_gelu
from utils.learning.model import build_model, check_model, try_model

GPT2 = "n_layer=2,n_embd=32,n_head=2"
BERT = "hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=64"
ROLES = {"pad": "[PAD]", "mask": "[MASK]", "cls": "[CLS]", "sep": "[SEP]", "unk": "[UNK]"}


def settings(model_type="gpt2", config_overrides=GPT2, block_size=16, **more):
    """The settings of a script that a model is built from."""
    usual = dict(model_name_or_path=None, tokenizer_name=None, gradient_checkpointing=False, eval_only=False)
    model = dict(model_type=model_type, config_overrides=config_overrides, block_size=block_size)
    return SimpleNamespace(**usual | model | more)


def build(kind, *of, words=None, **more):
    """of: model_type, config_overrides, block_size. words: a tokenizer."""
    return build_model(settings(*of, **more), kind, words or tokenizer())


def tokenizer(words=50, eos="[EOS]", pad="[PAD]", **roles):
    """A word-level tokenizer with all special tokens of a masked model ([PAD] is 2). None removes one."""
    vocabulary = ["[CLS]", "[EOS]", "[PAD]", "[SEP]", "[MASK]", "[UNK]", *(f"w{i}" for i in range(words))]
    model = models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="[UNK]")
    named = {
        f"{role}_token": token
        for role, token in (ROLES | {"eos": eos, "pad": pad} | roles).items()
        if token
    }
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), **named)


@pytest.fixture
def named(tmp_path):
    """A function that saves a tokenizer and returns its folder, for check_model."""

    def save(words):
        words.save_pretrained(tmp_path / "tokenizer")
        return str(tmp_path / "tokenizer")

    return save


def test_a_causal_model_takes_ids_from_the_tokenizer_and_positions_from_block_size():
    model = build("causal", "gpt2", GPT2 + ",resid_pdrop=0", 24)
    config = model.config
    assert (config.n_layer, config.n_embd, config.resid_pdrop) == (2, 32, 0.0)
    ids = config.vocab_size, config.n_positions, config.eos_token_id, config.bos_token_id
    assert ids == (56, 24, 1, None)
    assert model.generation_config.eos_token_id == 1
    assert model.generation_config.max_length == 24  # pipelines ask for 256 new tokens otherwise
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert config._attn_implementation == "sdpa" and model.training
    assert build("causal", gradient_checkpointing=True).is_gradient_checkpointing


def test_eos_used_as_padding_still_learns_its_embedding():
    """A pad id in the configuration would freeze that row of the embedding (nn.Embedding's padding_idx)."""
    model = build("causal", "llama", BERT + ",num_key_value_heads=2", 8, words=tokenizer(pad="[EOS]"))
    model(torch.ones(1, 8, dtype=torch.long)).logits.sum().backward()
    assert model.config.pad_token_id is None and model.config.eos_token_id == 1
    assert model.model.embed_tokens.weight.grad[1].abs().sum() > 0


@pytest.mark.parametrize("model_type", ["bert", "roberta", "xlm"])
def test_an_encoder_as_causal_model_does_not_see_the_next_token(model_type):
    overrides = BERT if model_type != "xlm" else "emb_dim=32,n_layers=2,n_heads=2"
    model = build("causal", model_type, overrides, 8).eval()
    ids = torch.arange(8)[None] + 10
    before, after = model(ids).logits, model(torch.cat([ids[:, :-1], ids[:, :1]], 1)).logits
    assert torch.equal(before[:, :-1], after[:, :-1]) and not torch.equal(before[:, -1], after[:, -1])


def test_a_causal_model_that_sees_the_next_token_is_refused():
    """build_model tries it, whatever the configuration says."""
    with pytest.raises(ValueError, match="model_type, 'bert': cannot be trained .* sees the next one"):
        build("causal", "bert", BERT + ",is_decoder=false", 8)

    class Looks(GPT2LMHeadModel):
        def forward(self, input_ids, **more):
            out = super().forward(input_ids, **more)
            out["logits"] = out["logits"] + out["logits"].mean(1, keepdim=True)
            return out

    model = Looks(AutoConfig.for_model("gpt2", n_embd=32, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match="sees the next one"):
        try_model(model, "causal", 16)


AFTER_PAD = [*LIKE_ROBERTA, "ibert"]


@pytest.mark.parametrize("model_type", [*AFTER_PAD, "bert", "modernbert", "electra", "albert"])
def test_a_masked_model_has_a_position_for_every_token_of_a_full_row(model_type):
    """Models whose positions start after the pad id have two more, and RoBERTa's special tokens."""
    pad = tokenizer(pad="[EOS]")  # id 1, which MPNet requires
    overrides = BERT + (",embedding_size=32" if model_type in ("electra", "albert") else "")
    overrides += ",attention_window=8" if model_type == "longformer" else ""
    kind = "pretraining" if model_type == "bert" else "masked"
    model = build(kind, model_type, overrides, 16, words=pad).eval()
    assert model.config.max_position_embeddings == 16 + 2 * (model_type in AFTER_PAD)
    ids = torch.full((1, 16), 9)
    model(ids)
    if model_type in ("bert", "roberta"):
        assert (model.config.pad_token_id, model.config.type_vocab_size) == (1, 2)
        model(ids, token_type_ids=torch.ones_like(ids))
        with pytest.raises(Exception, match="size|range"):
            model(torch.full((1, 17), 9))
    if model_type == "roberta":
        with pytest.raises(ValueError, match="at least 18"):
            build(kind, model_type, f"{overrides},max_position_embeddings=17", 16, words=pad)


def test_the_fused_gelu_equals_transformers_gelu_also_after_saving(tmp_path):
    torch.manual_seed(0)
    sizes = dict(vocab_size=56, n_embd=32, n_layer=2, n_head=2, n_positions=8)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes))
    ids = torch.randint(56, (2, 8))
    expected = model.eval()(ids).logits
    use_one_kernel_gelu(model)
    assert not any("NewGELU" in type(module).__name__ for module in model.modules())
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-5, atol=1e-6)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.config.activation_function == "gelu_new"
    torch.testing.assert_close(loaded(ids).logits, expected, rtol=1e-5, atol=1e-6)


SIZES = "hidden_size=32,num_hidden_layers=2,num_attention_heads=2,num_key_value_heads=2,intermediate_size=64"


@pytest.mark.parametrize("kind, few", [("qwen3", 9), ("llama", 5), ("gemma", 0), ("bamba", 5)])
def test_fused_norms_have_the_gradients_of_transformers_norms(kind, few):
    """Gemma's norms (scaled by 1 + weight) and Bamba's gated norms are not replaced. few: replaced norms."""
    bamba = ",mamba_n_heads=2,mamba_d_head=32,mamba_d_state=8,attn_layer_indices=[1]"
    sizes = SIZES + bamba * (kind == "bamba")
    ours = build("causal", kind, sizes)
    theirs = AutoModelForCausalLM.from_config(ours.config)
    theirs.load_state_dict(ours.state_dict())
    ids = torch.randint(6, 50, (2, 16), generator=torch.Generator().manual_seed(0))
    for lm in (ours, theirs):
        lm(input_ids=ids, labels=ids).loss.backward()
    for (name, parameter), reference in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, reference.grad, rtol=1e-4, atol=1e-6, msg=name)
    assert sum("forward" in vars(module) for module in ours.modules()) == few


@pytest.mark.parametrize("block_size", [128, 512])
def test_fast_matrix_products_and_attention_are_exact(block_size):
    """By oneDNN on AMD CPUs with AVX-512, elsewhere by torch's default."""
    generator, before = torch.Generator().manual_seed(0), torch.get_float32_matmul_precision()
    x, w = (torch.randn(shape, generator=generator) for shape in ((4096, 128), (344, 128)))
    q, k, v = torch.randn(3, 2, 2, block_size, 64, generator=generator)
    use_fast_products(block_size)
    products = [(x @ w.T, x.double() @ w.double().T), (x.T @ x, x.double().T @ x.double())]
    attended = [scaled_dot_product_attention(*inputs, is_causal=True) for inputs in
                ((q, k, v), (q.double(), k.double(), v.double()))]  # fmt: skip
    for result, exact in [*products, attended]:
        assert (result - exact).abs().max() < 2e-6 * exact.abs().max()
    amd = "AuthenticAMD" in Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else False
    chosen = amd and torch.backends.cpu.get_cpu_capability() == "AVX512"
    assert torch.get_float32_matmul_precision() == ("medium" if chosen else before)
    assert torch.backends.cuda.flash_sdp_enabled() == (not chosen or block_size > 256)


def test_loaded_weights_are_unchanged_and_in_float32(tmp_path):
    saved = build("causal", "gpt2", GPT2, 24).to(torch.bfloat16)
    saved.save_pretrained(tmp_path)
    model = build("causal", None, "", 16, model_name_or_path=str(tmp_path))
    assert model.config.n_positions == 24 and model.training  # from_pretrained calls eval()
    for parameter, expected in zip(model.parameters(), saved.parameters(), strict=True):
        assert parameter.dtype == torch.float32 and torch.equal(parameter, expected.float())


def test_weights_with_sampling_settings_but_no_do_sample_can_be_saved(tmp_path):
    """As in Llama 2 and Vicuna, whose generation_config.json save_pretrained refuses to write."""
    build("causal", "gpt2", GPT2, 24).save_pretrained(tmp_path / "had")
    settings = {"do_sample": False, "temperature": 0.9, "top_p": 0.6}
    (tmp_path / "had" / "generation_config.json").write_text(json.dumps(settings))
    model = build("causal", None, "", 16, model_name_or_path=str(tmp_path / "had"))
    model.save_pretrained(tmp_path / "saved")
    saved = GenerationConfig.from_pretrained(tmp_path / "saved")
    assert (saved.do_sample, saved.temperature, saved.top_p) == (True, 0.9, 0.6)


def test_overrides_get_the_types_of_the_configuration():
    overrides = BERT + ",num_key_value_heads=1,rms_norm_eps=1,tie_word_embeddings=true,head_dim=8"
    config = build("causal", "llama", overrides, 16).config
    assert (config.tie_word_embeddings, config.head_dim, config.num_key_value_heads) == (True, 8, 1)
    assert type(config.rms_norm_eps) is float
    as_json = """{"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
        "num_hidden_layers": 1, "layer_types": ["full_attention"]}"""
    assert build("causal", "qwen3", as_json, 16).config.layer_types == ["full_attention"]


def test_weights_and_a_tokenizer_that_do_not_match_are_refused(tmp_path, named):
    build("masked", "roberta", BERT, 16).save_pretrained(tmp_path / "model")
    of = settings(None, "", 32, model_name_or_path=str(tmp_path / "model"))
    of.tokenizer_name = named(tokenizer(words=70))
    problems = check_model(of, "masked")
    assert len(problems) == 2
    assert "vocab_size 56 is smaller than the tokenizer's 76" in problems[0]
    assert "block_size, 32" in problems[1]
    of.tokenizer_name = named(tokenizer(pad="[EOS]"))  # another pad id: all positions would be off by one
    (problem,) = check_model(of, "masked")
    assert "positions count from its pad_token_id, 2, and the tokenizer's is" in problem
