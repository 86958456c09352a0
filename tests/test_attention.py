"""What computes attention: a setting of both scripts that changes no loss, or is refused with its reason."""

import itertools
import json
import runpy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, Gemma2ForCausalLM
from transformers.masking_utils import sdpa_mask, sliding_window_bidirectional_mask_function

import train_mlm
from tests import forked
from tests.runs import TINY, metrics, write_corpus
from tests.test_edits import FOLDER, apply
from tests.test_model import BERT, GPT2, tokenizer
from utils.learning import local_attention as local_attention_module
from utils.learning.local_attention import local_attention, local_mask
from utils.learning.losses import CausalLMLoss, MaskedLMLoss
from utils.learning.model import (
    _without_attention,
    build_model,
    fastest_attention,
    model_problems,
)

NO_DROPOUT = ",resid_pdrop=0,embd_pdrop=0,attn_pdrop=0"
SHAPES = {
    "gpt2": ("causal", GPT2 + NO_DROPOUT),
    "modernbert": ("masked", BERT + ",local_attention=8"),
    "bert": ("masked", BERT + ",hidden_dropout_prob=0,attention_probs_dropout_prob=0"),
}


def losses(model_type, attention, T=24):
    """The loss and its gradients; of a masked model one row in two is padded."""
    kind, overrides = SHAPES[model_type]
    torch.manual_seed(0)
    lm = build_model(kind, model_type, overrides, None, T, tokenizer(), attention)
    ids = torch.randint(6, 50, (2, T))
    if kind == "causal":
        loss = CausalLMLoss(lm)({"input_ids": ids})[0]
    else:
        mask = torch.ones_like(ids)
        mask[1, T // 2 :] = 0
        slots = torch.arange(0, T // 2, 3).expand(2, -1)
        batch = {"input_ids": ids, "attention_mask": mask, "slots": slots, "slot_labels": slots + 6}
        loss = MaskedLMLoss(lm)(batch)["mlm_loss_sum"] / slots.numel()
    loss.backward()
    return loss.item(), [p.grad for p in lm.parameters() if p.requires_grad], lm.config._attn_implementation


@pytest.mark.parametrize("model_type", SHAPES)
def test_losses_and_gradients_are_the_same_by_each(model_type):
    loss, gradients, named = losses(model_type, "sdpa")
    assert named == "sdpa" and losses(model_type, "auto")[0] == loss  # exactly what transformers takes
    other, theirs, named = losses(model_type, "eager")
    assert named == "eager" and abs(other - loss) < 1e-5
    for mine, other in zip(gradients, theirs, strict=True):
        assert (mine - other).abs().max() < 1e-5


def sliding(model_type="modernbert", reach=4, **settings):
    """A model of two sliding layers and one that sees all, with a reach of so many tokens."""
    shape = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
    shape |= {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    window = {"local_attention": 2 * reach}
    if model_type != "modernbert":
        window = {"sliding_window": reach + 1, "head_dim": 8}
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **shape, **window, layer_types=layers, **settings)
    model = (AutoModelForMaskedLM if model_type == "modernbert" else AutoModelForCausalLM).from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():  # as large as a trained one's, or all attend alike
            parameter.mul_(4 if parameter.ndim > 1 else 1)
    return model


def both_ways(model, batch, counted=True):
    """Logits and gradients by sdpa and by local, of the tokens that are counted."""
    found = []
    for name in ("sdpa", "local"):
        model.set_attn_implementation(name)
        model.zero_grad()
        logits = model(**batch).logits * counted
        logits.logsumexp(2).mean().backward()
        found.append([logits.detach().float(), *(p.grad for p in model.parameters() if p.grad is not None)])
    return zip(*found, strict=True)


@pytest.mark.parametrize("T", [3, 5, 40, 64, 65, 124, 128, 200])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("reach", [4, 70])
def test_local_attention_gives_transformers_own_logits_and_gradients(T, padded, reach):
    batch, counted = {"input_ids": torch.randint(1, 64, (3, T))}, torch.ones(3, T, 1)
    if padded:
        for row, length in enumerate((T, T // 2 + 1, 1)):
            counted[row, length:] = 0
        batch["attention_mask"] = counted[:, :, 0].long()
    for mine, theirs in both_ways(sliding(reach=reach), batch, counted):
        assert mine.isfinite().all() and (mine - theirs).abs().max() < 1e-5 * max(1, theirs.abs().max())


@pytest.mark.parametrize("model_type", ["ministral", "gemma3_text"])
def test_causal_windows_shared_heads_and_documents_kept_apart_are_the_same_too(model_type):
    model, T = sliding(model_type, num_key_value_heads=2), 150
    positions = torch.cat([torch.arange(90), torch.arange(T - 90)])
    other = torch.cat([torch.arange(33), torch.arange(T - 33)])
    ids = torch.randint(1, 64, (2, T))
    for more in ({}, {"position_ids": torch.stack([positions, other])}):
        for mine, theirs in both_ways(model, {"input_ids": ids, "use_cache": False, **more}):
            assert (mine - theirs).abs().max() < 1e-5 * max(1, theirs.abs().max())
    model.eval()
    texts = []
    for name in ("sdpa", "local"):  # with a cache, as samples are written
        model.set_attn_implementation(name)
        texts.append(model.generate(ids[:, :100], max_new_tokens=12, do_sample=False))
    assert torch.equal(*texts)


def test_local_attention_in_bfloat16():
    model, batch = sliding(), {"input_ids": torch.randint(1, 64, (2, 150))}
    with torch.autocast("cpu", torch.bfloat16):
        for mine, theirs in both_ways(model, batch):
            assert (mine - theirs).abs().max() < 0.05 * theirs.abs().max()


@pytest.mark.slow
def test_local_attention_compiled_in_one_graph():
    model, batch = sliding(), {"input_ids": torch.randint(1, 64, (2, 150))}
    model.set_attn_implementation("local")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert (compiled(**batch).logits - model(**batch).logits).abs().max() < 1e-5


def by_definition(query, key, value, starts, _, most, __, dropout, is_causal, debug, scale, window_size_left,
                  window_size_right):  # fmt: skip
    """What torch documents of its kernel, which no CPU has: lines [tokens, H, D] that hold documents, each
    seeing itself, and of that so many tokens before and after. None: all of them."""
    assert dropout == 0 and not debug and starts.dtype == torch.int32 and query.dtype == torch.bfloat16
    assert starts[0] == 0 and starts[-1] == len(query)
    outs = []
    for begin, end in itertools.pairwise(starts.tolist()):
        assert 0 <= end - begin <= most
        q, k, v = (x[begin:end].transpose(0, 1) for x in (query, key, value))
        place = torch.arange(end - begin)
        ahead = place[None] - place[:, None]
        left, right = (most if reach is None else reach for reach in (window_size_left, window_size_right))
        seen = (ahead >= -left) & (ahead <= (0 if is_causal else right))
        out = F.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True)
        outs.append(out.transpose(0, 1))
    return torch.cat(outs), None


WINDOWED = [("modernbert", {}), ("ministral", {"num_key_value_heads": 2})]


GPT2_NAMES = "hidden_size=32,num_hidden_layers=2,num_attention_heads=4"
needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


ON_BOTH = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_a_gpu)])


@pytest.fixture
def kernel(device, monkeypatch):
    """On a CPU the kernel by its definition. Lists the masks that sdpa gets."""
    if device == "cpu":
        monkeypatch.setattr(local_attention_module, "_kernel", by_definition)
    masks = []
    monkeypatch.setattr(
        local_attention_module, "sdpa_mask", lambda *a, **k: masks.append(k) or sdpa_mask(*a, **k)
    )
    return masks


def assert_window_is_sdpa(lm, loss, device):
    """Losses and gradients in bfloat16."""
    found = []
    for name in ("sdpa", "window"):
        lm.set_attn_implementation(name)
        lm.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            out = loss()
        out.float().logsumexp(-1).mean().backward()
        gradients = (p.grad for p in lm.parameters() if p.grad is not None)
        found.append([out.detach().float(), *gradients])
    for one, other in zip(*found, strict=True):
        assert (one - other).abs().max() < 0.06 * max(other.abs().max(), 1e-3)


@ON_BOTH
@pytest.mark.parametrize("model_type, settings", WINDOWED)
@pytest.mark.parametrize("T", [3, 40, 130])
def test_windows_without_masks_give_sdpas_logits_and_gradients(T, model_type, settings, device, kernel):
    """A padded row gets a mask, and so do the layers that see all of it."""
    model = sliding(model_type, reach=2, **settings).to(device)
    ids = torch.randint(1, 64, (3, T), device=device)
    padding = {"attention_mask": (torch.arange(T) < T - 1).long().repeat(3, 1).to(device)}
    for more in [{}, padding]:
        kernel.clear()
        assert_window_is_sdpa(model, lambda more=more: model(input_ids=ids, **more).logits, device)
        assert any(mask.get("local_size") is not None for mask in kernel) == bool(more)


@ON_BOTH
@pytest.mark.parametrize("model_type, settings", [*WINDOWED[1:], ("llama", {}), ("gpt2", {})])
def test_documents_are_kept_apart_without_masks(model_type, settings, device, kernel):
    """In sliding and in other layers. Another document in the row moves nothing."""
    if model_type == "ministral":
        model = sliding(model_type, reach=2, **settings).to(device)
    else:
        model = build_model("causal", model_type, GPT2_NAMES, None, 130, tokenizer()).to(device)
    model.eval()
    places = torch.stack([torch.cat([torch.arange(n), torch.arange(130 - n)]) for n in (1, 64, 129)])
    ids = torch.randint(1, 50, (3, 130), device=device)
    inputs = {"position_ids": places.to(device), "use_cache": False}
    assert_window_is_sdpa(model, lambda: model(input_ids=ids, **inputs).logits, device)
    assert not kernel
    other = ids.clone()
    other[1, :64] = ids[1, :64].flip(0)
    with torch.autocast(device, torch.bfloat16):
        one, two = (model(input_ids=x, **inputs).logits for x in (ids, other))
    assert torch.equal(one[1, 64:], two[1, 64:]) and not torch.equal(one[1, :64], two[1, :64])


@ON_BOTH
def test_packed_pairs_are_kept_apart_without_masks(device, kernel):
    """Rows of one to three pairs, a full one, one with padding, one of an evaluation's padding. The shape of
    what says where they begin does not depend on them."""
    lengths, T = [[20], [9, 8], [3, 5, 4], []], 20
    pair = torch.tensor([[i if i < len(row) else -1 for i in range(3)] for row in lengths])
    which = [[n + 1 for n, size in enumerate(row) for _ in range(size)] for row in lengths[:3]] + [[1] * T]
    mask = torch.tensor([row + [0] * (T - len(row)) for row in which])
    start = torch.tensor([[sum(row[:i]) if i < len(row) else 0 for i in range(3)] for row in lengths])
    batch = {"input_ids": torch.randint(6, 50, (4, T)), "attention_mask": mask}
    batch |= {"pair": pair, "pair_start": start}
    batch["next_sentence_label"] = torch.where(pair < 0, -100, pair % 2)
    batch["position_ids"] = torch.stack([torch.arange(T) - row[which] for row, which in zip(
        F.pad(start, (1, 0)), mask, strict=True)])
    batch["slots"], batch["slot_labels"] = torch.zeros(4, 2).long(), torch.tensor([[9, 8]] * 3 + [[-100] * 2])
    batch = {name: column.to(device) for name, column in batch.items()}
    lm = build_model("pretraining", "bert", BERT, None, T, tokenizer()).to(device).eval()
    model = MaskedLMLoss(lm)

    def losses():
        sums = model(batch)
        return torch.stack([sums["mlm_loss_sum"], sums["nsp_loss_sum"]])

    assert_window_is_sdpa(lm, losses, device)
    with torch.autocast(device, torch.bfloat16):
        starts = model.model_inputs(batch)["attention_mask"]
    assert starts.flatten().tolist() == [
        0, 0, 20, 20, 20, 20, 20, 29, 37, 37, 40, 40, 43, 48, 52, 60, 80, 80, 80, 80, 80,
    ]  # fmt: skip


def test_auto_is_what_was_measured_as_fastest_on_each_device(monkeypatch):
    """A model that slides, in bfloat16 as by the GPUs' YAML files; one that does not is transformers' own."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    slides, plain = sliding(reach=64).config, AutoConfig.for_model("gpt2")
    expected = {"cpu": "local", "cuda": "window", "xla": "auto", "mps": "auto", "xpu": "auto"}
    assert {device: fastest_attention("masked", slides, 1024, device) for device in expected} == expected
    assert fastest_attention("masked", slides, 128, "cpu") == "auto"  # rows too short for blocks
    assert fastest_attention("masked", slides, 128, "cuda") == "window"
    assert {fastest_attention("causal", plain, 1024, device) for device in expected} == {"auto"}
    pairs = AutoConfig.for_model("bert")  # several to a row
    assert {device for device in expected if fastest_attention("pretraining", pairs, 128, device) != "auto"} \
        == {"cuda"}  # fmt: skip
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")  # the kernel is one for half precision
    assert fastest_attention("masked", slides, 1024, "cuda") == "auto"


@pytest.fixture(scope="module")
def refuse_documents_in_touch(tmp_path_factory):
    """From the file that docs/edits/isolated-documents.diff adds."""
    folder = tmp_path_factory.mktemp("isolated")
    apply(FOLDER / "isolated-documents.diff", folder)
    return runpy.run_path(str(folder / "utils/learning/isolation.py"))["refuse_documents_in_touch"]


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "opt", "bloom", "mpt", "mamba"])
def test_documents_that_a_model_cannot_keep_apart_are_refused(model_type, refuse_documents_in_touch):
    shape = "hidden_size=32,num_hidden_layers=2,num_attention_heads?=2"
    lm = build_model("causal", model_type, shape, None, 32, tokenizer())
    if model_type in ("gpt2", "llama"):
        assert refuse_documents_in_touch(lm) is None and lm.training
    else:
        with pytest.raises(ValueError, match=f"in a {model_type} documents of a row see each other"):
            refuse_documents_in_touch(lm)


def test_dropout_is_that_of_sdpa():
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 80, 8)
    near = sliding_window_bidirectional_mask_function(4)
    mask = local_mask(batch_size=1, q_length=80, kv_length=80, mask_function=near, attention_mask=None,
                      local_size=4, use_vmap=False, device="cpu")  # fmt: skip
    module, total = torch.nn.Module(), 0
    for _ in range(400):
        total = total + local_attention(module, query, key, value, mask, dropout=0.5)[0] / 400
    assert 0 < (total - local_attention(module, query, key, value, mask)[0]).abs().mean() < 0.05


def test_local_attention_makes_nothing_of_the_size_of_all_pairs():
    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(tensor, torch.Tensor):
                    self.size = max(self.size, tensor.numel())
            return out

    T, model, largest = 1024, sliding(), {}
    for name in ("sdpa", "local"):
        model.set_attn_implementation(name)
        with Largest() as mode:
            model(torch.ones(1, T, dtype=torch.long)).logits.sum().backward()
        largest[name] = mode.size
    assert largest["sdpa"] == T * T and largest["local"] <= T * 5 * 32


def test_auto_takes_it_where_rows_are_many_windows_long():
    def used(T, overrides=BERT, kind="masked", model_type="modernbert", **more):
        made = build_model(kind, model_type, overrides, None, T, tokenizer(), **more)
        return made.config._attn_implementation

    assert used(512) == "local" and used(511) == "sdpa" and used(512, attn="sdpa") == "sdpa"
    assert used(512, BERT + ",local_attention=256") == "sdpa" and used(128, train_mlm.SMALL) == "sdpa"
    assert used(512, GPT2, "causal", "gpt2") == "sdpa"


def test_a_model_without_sdpa_gets_what_transformers_takes():
    assert build_model("causal", "bloom", "n_layer=1,hidden_size=32,n_head=2", None, 8, tokenizer()).config \
        ._attn_implementation == "eager"  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "attention", "device", "precision", "reason"),
    [
        ("gpt2", "spda", "cpu", "no", "unknown, give one of auto, eager, sdpa"),
        ("bloom", "sdpa", "cuda", "bf16", "transformers' bloom cannot"),
        ("bloom", "window", "cuda", "bf16", "transformers' bloom cannot"),
        ("gpt2", "flash_attention_2", "cuda", "bf16", "unknown, give one of auto, eager, sdpa"),
        ("gpt2", "window", "cpu", "bf16", "cannot train on cpu"),
        ("gpt2", "window", "xla", "bf16", "cannot train on xla"),
        ("gpt2", "window", "cuda", "no", "needs --mixed_precision bf16 or fp16 of the launcher"),
        ("gpt2", "window", "cuda", "bf16", ""),
        ("gpt2", "local", "cpu", "no", "none of its layers is a sliding one"),
        pytest.param("gemma2", "local", "cpu", "no", "transformers' gemma2 cannot",  # caps scores
                     marks=pytest.mark.skipif(Gemma2ForCausalLM._supports_sdpa, reason="old transformers")),
        ("ministral", "local", "xla", "no", "cannot train on xla"),
        ("ministral", "local", "cuda", "bf16", ""),
        ("bloom", "eager", "cpu", "no", ""),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_its_reason(
    model_type, attention, device, precision, reason, monkeypatch
):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    config = AutoConfig.for_model(model_type)
    kind = "masked" if model_type == "bert" else "causal"
    found = _without_attention(attention, kind, config, device)
    assert found.startswith(reason) and bool(found) == bool(reason)
    if device == "cpu" and reason:
        (problem,) = model_problems(kind, model_type, "", None, 8, attn=attention)
        assert problem == f"attn_implementation, {attention!r}: {found}; auto takes what can"


def test_the_head_is_split_though_the_kernel_cannot_run_where_the_model_is_built():
    lm = build_model(*SHAPES["modernbert"][:1], "modernbert", BERT, None, 16, tokenizer(), "window")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert MaskedLMLoss(lm).splits_head
    assert lm.config._attn_implementation == "window"


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    folder = tmp_path_factory.mktemp("attention")
    corpus = write_corpus(folder / "corpus.jsonl")
    return {**TINY, "dataset_name": corpus, "cache_dir": folder / "cache", "output_dir": folder / "run",
            "max_train_steps": 3, "eval_at_start": False}  # fmt: skip


@pytest.mark.parametrize("script", ["train_clm.py", "train_mlm.py"])
def test_a_run_says_what_is_used_and_saves_what_transformers_loads(script, flags, tmp_path):
    mine = {**flags, "output_dir": tmp_path}
    made = AutoModelForCausalLM
    if script == "train_mlm.py":
        mine |= {"config_overrides": BERT + ",local_attention=8", "prompts": ["none"], "block_size": 96}
        made = AutoModelForMaskedLM
    name = "local" if script == "train_mlm.py" else "eager"
    done = forked.run(script, {**mine, "attn_implementation": name})
    assert done.returncode == 0 and f"parameters, attention: {name}\n" in done.stdout, done.stderr
    record = json.loads((tmp_path / "args.json").read_text())
    assert (record["launch"]["attention"], record["settings"]["attn_implementation"]) == (name, name)
    assert "attn" not in "".join(key for key in json.loads((tmp_path / "config.json").read_text())
                                 if "implementation" in key)  # fmt: skip
    plain = made.from_pretrained(tmp_path)
    assert plain.config._attn_implementation == "sdpa"
    ids = torch.randint(6, 500, (2, mine["block_size"]))
    with torch.no_grad():
        logits = plain(ids).logits
        plain.set_attn_implementation(name)
        assert (plain(ids).logits - logits).abs().max() < 1e-5


def test_a_run_goes_on_with_another(flags):
    first = forked.run("train_clm.py", {**flags, "attn_implementation": "eager", "max_train_steps": 3,
                                        "lr_scheduler_type": "constant"})  # fmt: skip
    more = forked.run("train_clm.py", {**flags, "max_train_steps": 4, "lr_scheduler_type": "constant"})
    assert first.returncode == more.returncode == 0, more.stderr
    assert "attention: sdpa\n" in more.stdout and metrics(flags["output_dir"])[-1]["step"] == 4


def test_a_script_refuses_and_writes_nothing(flags, tmp_path):
    folder = tmp_path / "run"
    done = forked.run("train_mlm.py", {"output_dir": folder, "attn_implementation": "window"})
    assert done.returncode == 2 and not folder.exists()
    assert "attn_implementation, 'window': cannot train on cpu; auto" in done.stderr
