"""Configuration, tokenizer and block size agree by construction, or the settings are refused by name."""

import json
import re
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

from utils.learning.kernels import use_fast_products, use_one_kernel_gelu
from utils.learning.model import build_model, check_model, try_model

GPT2 = "n_layer=2,n_embd=32,n_head=2"
BERT = "hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=64"
ROLES = {"pad": "[PAD]", "mask": "[MASK]", "cls": "[CLS]", "sep": "[SEP]", "unk": "[UNK]"}


def settings(model_type="gpt2", config_overrides=GPT2, block_size=16, **more):
    """Of a script, those that a model is made of."""
    usual = dict(model_name_or_path=None, tokenizer_name=None, gradient_checkpointing=False, eval_only=False)
    given = dict(model_type=model_type, config_overrides=config_overrides, block_size=block_size)
    return SimpleNamespace(**usual | given | more)


def build(kind, *of, words=None, **more):
    """of: model_type, config_overrides, block_size."""
    return build_model(settings(*of, **more), kind, words or tokenizer())


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


@pytest.fixture
def named(tmp_path):
    """Saves a tokenizer and gives its folder, for check_model."""

    def save(words):
        words.save_pretrained(tmp_path / "tokenizer")
        return str(tmp_path / "tokenizer")

    return save


def test_a_causal_model_takes_vocabulary_ids_and_positions_from_the_tokenizer_and_block_size():
    model = build("causal", "gpt2", GPT2 + ",resid_pdrop=0", 24)
    config = model.config
    assert (config.n_layer, config.n_embd, config.resid_pdrop) == (2, 32, 0.0)
    ids = config.vocab_size, config.n_positions, config.eos_token_id, config.bos_token_id
    assert ids == (56, 24, 1, None)
    assert model.generation_config.eos_token_id == 1
    assert model.generation_config.max_length == 24  # pipelines ask for 256 new tokens otherwise
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert config._attn_implementation == "sdpa" and model.training


def test_end_of_text_as_padding_still_learns_its_embedding():
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
    """Whatever its configuration says: it is tried."""
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


@pytest.mark.parametrize("kind", ["masked", "pretraining"])
def test_masked_models_have_a_position_for_every_token_of_a_full_row(kind):
    model_type = "roberta" if kind == "masked" else "bert"
    model = build(kind, model_type, BERT, 16).eval()
    assert model.config.max_position_embeddings == (16 + 2 + 1 if model_type == "roberta" else 16)
    assert model.config.pad_token_id == 2 and model.config.type_vocab_size == 2
    ids = torch.full((1, 16), 9)
    assert model(ids, token_type_ids=torch.ones_like(ids)).hidden_states is None  # the last position exists
    with pytest.raises(Exception, match="size|range"):
        model(torch.full((1, 17), 9))


TINY = "hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=64"
AFTER_PAD = """camembert data2vec-text esm longformer mpnet roberta roberta-prelayernorm xlm-roberta
    xlm-roberta-xl ibert"""


@pytest.mark.parametrize("model_type", [*AFTER_PAD.split(), "bert", "modernbert", "electra", "albert"])
def test_models_that_number_positions_after_the_padding_have_so_many_more(model_type):
    """A full row has a position for each token, whatever the architecture does with the pad id."""
    pad = tokenizer(pad="[EOS]")  # 1, as MPNet has it fixed
    overrides = TINY + (",embedding_size=32" if model_type in ("electra", "albert") else "")
    overrides += ",attention_window=8" if model_type == "longformer" else ""
    model = build("masked", model_type, overrides, 16, words=pad).eval()
    assert model.config.max_position_embeddings == 16 + 2 * (model_type in AFTER_PAD.split())
    model(torch.full((1, 16), 9))


def test_the_one_kernel_gelu_computes_and_saves_the_same_in_less_memory(tmp_path):
    torch.manual_seed(0)
    sizes = dict(vocab_size=56, n_embd=32, n_layer=2, n_head=2, n_positions=8)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes))
    ids, kept = torch.randint(56, (2, 8)), []

    def logits_and_size():
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
            logits = model(ids).logits
        return logits, sum(x.nbytes for x in {x.data_ptr(): x for x in kept}.values())

    model.eval()
    expected, before = logits_and_size()
    use_one_kernel_gelu(model)
    assert not any("NewGELU" in type(module).__name__ for module in model.modules())
    logits, after = logits_and_size()
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
    assert before - after >= 2 * 3 * 2 * 8 * 4 * 32 * 4  # of each layer three [B, T, 4 D] in float32
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.config.activation_function == "gelu_new"
    torch.testing.assert_close(loaded(ids).logits, expected, rtol=1e-5, atol=1e-6)


SIZES = "hidden_size=32,num_hidden_layers=2,num_attention_heads=2,num_key_value_heads=2,intermediate_size=64"


@pytest.mark.parametrize("kind, few", [("qwen3", 9), ("llama", 5), ("gemma", 0), ("bamba", 5)])
def test_norms_in_few_kernels_have_transformers_values_and_gradients(kind, few):
    """Gemma's scale by 1 + weight and Bamba's gated ones stay as they are."""
    bamba = ",mamba_n_heads=2,mamba_d_head=32,mamba_d_state=8,attn_layer_indices=[1]"
    sizes = SIZES + bamba * (kind == "bamba")
    ours = build("causal", kind, sizes)
    theirs = AutoModelForCausalLM.from_config(ours.config)
    theirs.load_state_dict(ours.state_dict())
    ids = torch.randint(6, 50, (2, 16), generator=torch.Generator().manual_seed(0))
    for lm in (ours, theirs):
        lm(input_ids=ids, labels=ids).loss.backward()
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6, msg=name)
    assert sum("forward" in vars(module) for module in ours.modules()) == few


@pytest.mark.parametrize("block_size", [128, 512])
def test_fast_products_are_exact_and_attention_is_torchs(block_size):
    """On AMD's CPUs with AVX-512 by oneDNN, elsewhere as torch has them."""
    generator, before = torch.Generator().manual_seed(0), torch.get_float32_matmul_precision()
    x, w = (torch.randn(shape, generator=generator) for shape in ((4096, 128), (344, 128)))
    q, k, v = torch.randn(3, 2, 2, block_size, 64, generator=generator)
    use_fast_products(block_size)
    products = [(x @ w.T, x.double() @ w.double().T), (x.T @ x, x.double().T @ x.double())]
    attended = [scaled_dot_product_attention(*some, is_causal=True) for some in
                ((q, k, v), (q.double(), k.double(), v.double()))]  # fmt: skip
    for found, exact in [*products, attended]:
        assert (found - exact).abs().max() < 2e-6 * exact.abs().max()
    amd = "AuthenticAMD" in Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else False
    chosen = amd and torch.backends.cpu.get_cpu_capability() == "AVX512"
    assert torch.get_float32_matmul_precision() == ("medium" if chosen else before)
    assert torch.backends.cuda.flash_sdp_enabled() == (not chosen or block_size > 256)


def test_continuing_from_weights_keeps_them_and_trains_in_float32(tmp_path):
    saved = build("causal", "gpt2", GPT2, 24).to(torch.bfloat16)
    saved.save_pretrained(tmp_path)
    model = build("causal", None, "", 16, model_name_or_path=str(tmp_path))
    assert model.config.n_positions == 24 and model.training  # from_pretrained leaves dropout off
    for found, expected in zip(model.parameters(), saved.parameters(), strict=True):
        assert found.dtype == torch.float32 and torch.equal(found, expected.float())


def test_weights_with_settings_for_sampling_and_without_do_sample_can_be_saved(tmp_path):
    """As Llama 2 and Vicuna had them: save_pretrained refuses what from_pretrained has read."""
    build("causal", "gpt2", GPT2, 24).save_pretrained(tmp_path / "had")
    settings = {"do_sample": False, "temperature": 0.9, "top_p": 0.6}
    (tmp_path / "had" / "generation_config.json").write_text(json.dumps(settings))
    model = build("causal", None, "", 16, model_name_or_path=str(tmp_path / "had"))
    model.save_pretrained(tmp_path / "saved")
    saved = GenerationConfig.from_pretrained(tmp_path / "saved")
    assert (saved.do_sample, saved.temperature, saved.top_p) == (True, 0.9, 0.6)


def test_overrides_have_the_configurations_types():
    overrides = BERT + ",num_key_value_heads=1,rms_norm_eps=1,tie_word_embeddings=true,head_dim=8"
    config = build("causal", "llama", overrides, 16).config
    assert (config.tie_word_embeddings, config.head_dim, config.num_key_value_heads) == (True, 8, 1)
    assert type(config.rms_norm_eps) is float
    as_json = """{"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
        "num_hidden_layers": 1, "layer_types": ["full_attention"]}"""
    assert build("causal", "qwen3", as_json, 16).config.layer_types == ["full_attention"]


@pytest.mark.parametrize(
    ("kind", "of", "expected"),
    [
        ("causal", ("gpt2", "{n_head"), ["JSONDecodeError"]),
        ("causal", ("t5", ""), ["model_type, 't5': transformers has no causal language model"]),
        ("causal", ("llama", "num_attention_heads=2,hidden_size=64,num_hidden_layers=1"), []),
        ("causal", ("gpt2", "n_positions=8,vocab_size=40"), ["vocab_size 40", "needs n_positions"]),
        ("masked", ("roberta", BERT + ",max_position_embeddings=18"), ["at least 19"]),
        ("causal", ("gpt2", GPT2), []),
        ("masked", ("bert", BERT), []),
    ],
)  # fmt: skip
def test_settings_that_cannot_agree_are_all_named_and_others_are_not(kind, of, expected, named):
    """More in tests/test_bad_input.py."""
    words = tokenizer()
    problems = check_model(settings(*of, tokenizer_name=named(words)), kind)
    assert len(problems) == len(expected), problems
    assert all(part in problem for part, problem in zip(expected, problems, strict=True)), problems
    assert not any("\n" in problem for problem in problems)
    if problems:
        with pytest.raises(ValueError, match=re.escape("\n".join(problems))):
            build(kind, *of, words=words)


def test_gradient_checkpointing_that_a_model_cannot_do_is_refused():
    assert check_model(settings("ctrl", "n_layer=2"), "causal") == []
    assert check_model(settings("ctrl", "n_layer=2", gradient_checkpointing=True), "causal") == [
        "gradient_checkpointing: transformers' ctrl cannot; leave it out"
    ]
    assert build("causal", gradient_checkpointing=True).is_gradient_checkpointing


def test_weights_and_a_tokenizer_that_do_not_go_together_are_refused(tmp_path, named):
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
