"""Every causal and masked model type of the installed transformers, tiny, from scratch.

    python -m tests.benchmarks.model_types                                # all; minutes
    python -m tests.benchmarks.model_types --mapping causal --types mamba,bloom

A type is "ok" if its loss and gradients equal those of transformers' `model(input_ids, labels=...)` at
weights away from their initial values. It is "refused" if the script says in one line why it cannot be
trained on text alone. Everything else is "failed".
"""

import argparse
import json
import multiprocessing
import os
import tempfile
import time
import traceback
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: a fork would not have its threads

T = 32  # tokens per row
TOLERANCE = 1e-4
TIME_LIMIT = 180  # seconds for a type

# {size: settings that get it, in all configurations that have a setting of this name}
SIZES = {
    32: """hidden_size d_model n_embd dim emb_dim model_dim embed_dim embedding_size word_embed_proj_dim
        embedding_dim hidden_size_per_layer_input hidden_size_global""",
    64: """intermediate_size d_ff d_inner n_inner ffn_dim ffn_hidden_size hidden_dim decoder_ffn_dim
        encoder_ffn_dim shared_intermediate_size moe_intermediate_size moe_shared_expert_intermediate_size
        shared_expert_intermediate_size intermediate_size_mlp expert_ffn_hidden_size feed_forward_size
        dense_intermediate_size entity_vocab_size pronunciation_vocab_size shape_vocab_size
        encoder_hash_byte_group_vocab""",
    2: """num_hidden_layers n_layer num_layers n_layers decoder_layers encoder_layers num_experts_per_tok
        top_k num_experts_per_token moe_k moe_topk experts_per_token""",
    4: """num_attention_heads n_head n_heads num_heads num_key_value_heads num_kv_heads
        decoder_attention_heads encoder_attention_heads linear_num_heads linear_num_key_heads
        linear_num_value_heads num_experts num_local_experts n_routed_experts moe_num_experts""",
    8: """head_dim linear_head_dim linear_key_head_dim linear_value_head_dim qk_rope_head_dim qk_nope_head_dim
        v_head_dim""",
    16: "q_lora_rank kv_lora_rank mamba_d_state mamba_chunk_size chunk_size",
    1: "n_group topk_group",
    1024: "vocab_size_per_layer_input",
}
SIZES = {name: size for size, names in SIZES.items() for name in names.split()}
# Settings of single architectures that replace or extend the above; None removes one.
BLT = {"vocab_size": 512, "hidden_size_global": 32}
SPECIAL = {
    "blt": dict.fromkeys(("patcher_config", "encoder_config", "decoder_config", "global_config"), BLT),
    "bailing_hybrid": {"layer_group_size": 2, "n_group": 1},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8}, "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {"rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
             "num_key_value_heads": None},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {"num_hidden_layers": 2}, "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8},
    "gemma3n_text": {"num_hidden_layers": 5, "num_kv_shared_layers": 0, "intermediate_size": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]}, "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {"mamba_n_heads": 8, "layer_types": ["mamba", "mamba", "attention", "mamba"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_dense_layers": 1},
    "longcat_flash": {"zero_expert_num": 2}, "mamba2": {"num_heads": 8, "head_dim": 8},
    "mimo_v2_flash": {"head_dim": 32, "v_head_dim": 16, "num_key_value_heads": 2},
    "nemotron": {"num_key_value_heads": 4}, "neomme": {"head_dim": 16},
    "perceiver": {"num_latents": 8, "d_latents": 32, "num_self_attends_per_block": 2,
                  "num_self_attention_heads": 4, "num_cross_attention_heads": 4, "qk_channels": 32,
                  "v_channels": 32},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8,
                       "indexer_budget": 16, "indexer_compress_ratio": 4},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_shape": [4, 8], "axial_pos_embds_dim": [16, 16], "attn_layers": ["local", "lsh"],
                 "hash_seed": 1, "lsh_attn_chunk_length": 8, "local_attn_chunk_length": 8},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "num_heads": 2},
    "zamba": {"num_hidden_layers": 6, "attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "adapter_rank": 8},
}  # fmt: skip


def overrides(model_type: str) -> dict:
    """Settings that make a model of this type tiny."""
    from transformers import AutoConfig

    try:
        default = AutoConfig.for_model(model_type).to_dict()
    except Exception:  # part of another model only
        return {}
    sizes = _shrunk(default)
    if "layer_types" in default and "num_hidden_layers" in sizes:
        sizes["num_hidden_layers"] = 4  # one of each kind
    for name, value in SPECIAL.get(model_type, {}).items():
        sizes[name] = sizes[name] | value if isinstance(sizes.get(name), dict) else value
    return {name: value for name, value in sizes.items() if value is not None}


def _shrunk(values: dict) -> dict:
    sizes = {}
    for name, value in values.items():
        if ("drop" in name or "jitter" in name) and isinstance(value, float):
            sizes[name] = 0.0  # so that processes can be compared
        elif name in SIZES and (isinstance(value, int) and not isinstance(value, bool) or name == "head_dim"):
            sizes[name] = SIZES[name] if value is None else min(value, SIZES[name])
        elif name.endswith("_config") and isinstance(value, dict):
            sizes |= {name: part} if (part := _shrunk(value)) else {}
    return sizes


# Types whose loss compares a token's logits with its own label instead of the next token's.
UNSHIFTED = """bart bigbird_pegasus blenderbot blenderbot-small cpmant marian mbart mvp pegasus plbart trocr
    whisper xlm xlnet""".split()


def compare(mapping: str, saved: Path, tokenizer) -> None:
    """Raises AssertionError if our loss differs from that of transformers' model in the folder `saved`."""
    import torch
    import torch.nn.functional as F

    from utils.learning.configuration import MODEL_CLASSES
    from utils.learning.losses import CausalLMLoss, MaskedLMLoss
    from utils.learning.model import build_model

    reference = MODEL_CLASSES[mapping].from_pretrained(saved, dtype=torch.float32).train()
    named = dict(model_type=None, config_overrides="", model_name_or_path=str(saved), block_size=T)
    lm = build_model(SimpleNamespace(**named, gradient_checkpointing=False), mapping, tokenizer)
    model = (CausalLMLoss if mapping == "causal" else MaskedLMLoss)(lm).train()
    reference.load_state_dict(lm.state_dict())
    noise = torch.Generator().manual_seed(0)
    weights = dict(reference.named_parameters())
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=noise))
            weights[name].copy_(parameter)
    low = 10  # not a special token
    ids = torch.randint(low, len(tokenizer), (3, T), generator=noise)
    batch = {"input_ids": ids}
    if mapping == "causal":
        labels = ids
        if lm.config.model_type in UNSHIFTED:
            labels = F.pad(ids[:, 1:], (0, 1), value=-100)
    else:
        slots = torch.stack([torch.randperm(T, generator=noise)[:5] for _ in ids])
        batch |= {"slots": slots, "slot_labels": ids.gather(1, slots)}
        batch["input_ids"] = ids.scatter(1, slots, tokenizer.mask_token_id)
        labels = torch.full_like(ids, -100).scatter(1, slots, batch["slot_labels"])

    def ours():
        torch.manual_seed(0)  # of dropout
        if mapping == "causal":
            loss, row_losses = model(batch)
            return loss, row_losses.mean()
        losses = model(batch)
        rows = losses.get("rows", torch.zeros(1, 1))
        return losses["loss_sums"][0] / slots.numel(), rows[:, 0].sum() / slots.numel()

    if hasattr(reference.config, "use_cache"):
        reference.config.use_cache = False
    loss, _ = ours()
    loss.backward()
    torch.manual_seed(0)
    expected = reference(input_ids=batch["input_ids"], labels=labels).loss
    expected.backward()
    loss, expected = loss.item(), expected.item()
    assert abs(loss - expected) <= TOLERANCE, f"loss {loss:.5f}, transformers {expected:.5f}"
    gradients = {name: parameter.grad for name, parameter in lm.named_parameters()}
    for name, parameter in reference.named_parameters():
        if parameter.grad is None or not parameter.grad.any():
            continue
        assert gradients[name] is not None, f"{name} is not trained"
        off = ((gradients[name] - parameter.grad).norm() / parameter.grad.norm()).item()
        assert off <= 1e-3 or parameter.grad.norm() < 1e-5, f"the gradient of {name} differs by {off:.1e}"
    missing = [name for name, p in lm.named_parameters() if p.requires_grad and p.grad is None]
    assert not missing, f"without gradient, and waited for: {', '.join(missing[:3])}"

    model.eval()
    reference.eval()
    with torch.no_grad():
        plain = ours()[1].item()
        logits = reference(input_ids=batch["input_ids"])["logits"]
        moved = labels if mapping == "masked" else F.pad(ids[:, 1:], (0, 1), value=-100)
        expected = F.cross_entropy(logits.flatten(0, 1), moved.flatten()).item()
        assert abs(plain - expected) <= TOLERANCE, f"evaluated {plain:.5f}, cross-entropy {expected:.5f}"
        if mapping == "causal":
            changed = ids.clone()
            changed[:, -1] = low
            hashed = hasattr(reference.config, "hash_seed")  # Reformer hashes the complete row
            leak = (reference(input_ids=changed)["logits"] - logits)[:, :-1].abs().max().item()
            assert hashed or leak <= TOLERANCE, f"a token sees the next one: logits move by {leak:.1e}"


def check(mapping: str, model_type: str, folder: Path) -> tuple[str, str]:
    """(verdict, reason) of a type."""
    from tests.test_model import build, settings, tokenizer
    from utils.learning.model import check_model

    words, sizes = tokenizer(words=400), json.dumps(overrides(model_type))
    problems = check_model(settings(model_type, sizes, T), mapping)
    try:
        if not problems:
            build(mapping, model_type, sizes, T, words=words).save_pretrained(folder)
    except ValueError as error:
        problems = [str(error)]
    if problems:
        plain = len(problems) == 1 and problems[0].startswith(("model_type,", "config_overrides,"))
        return "refused" if plain else "failed", " / ".join(problems)
    compare(mapping, folder, words)
    return "ok", ""


def check_apart(mapping: str, model_type: str) -> tuple[str, str]:
    """`check` in a process that may crash or hang."""

    def work():
        with open(os.devnull, "w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
            try:
                answers.put(check(mapping, model_type, Path(folder)))
            except BaseException as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                place = f"{Path(where.filename).name}:{where.lineno}"
                answers.put(("failed", f"{type(error).__name__}: {error} ({place})"))

    fork = multiprocessing.get_context("fork")
    answers = fork.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        process = fork.Process(target=work)
        process.start()
        process.join(TIME_LIMIT)
        process.kill()
        process.join()
    return ("failed", "no end in time, or killed") if answers.empty() else answers.get()


def main() -> None:
    from transformers.models.auto import modeling_auto

    import tests.preloaded  # noqa: F401  the processes are forked from what it has imported

    types = {
        "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    }
    show = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=show)
    parser.add_argument("--mapping", nargs="*", choices=list(types), default=list(types))
    parser.add_argument("--types", default="", help="mamba,bloom; none: all")
    args = parser.parse_args()
    totals = Counter()
    for mapping in args.mapping:
        for model_type in types[mapping]:
            if args.types and model_type not in args.types.split(","):
                continue
            start = time.time()
            verdict, reason = check_apart(mapping, model_type)
            totals[mapping, verdict] += 1
            seconds = f"{time.time() - start:4.0f} s"
            print(f"{mapping:<7} {model_type:<26} {verdict:<8} {seconds}  {reason}", flush=True)
    for mapping in args.mapping:
        counts = ", ".join(f"{totals[mapping, verdict]} {verdict}" for verdict in ("ok", "refused", "failed"))
        print(f"{mapping}: {counts}")


if __name__ == "__main__":
    main()
