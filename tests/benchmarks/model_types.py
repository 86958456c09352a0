"""Every causal and masked model type of the installed transformers, tiny, from scratch, through the scripts.

    python -m tests.benchmarks.model_types                                # all; minutes
    python -m tests.benchmarks.model_types --mapping causal --types mamba,bloom

A type is ok where its loss and gradients are those of transformers' `model(input_ids, labels=...)` at weights
away from their initial values, one and two processes log the same three steps, and a run that is killed after
the second ends bit for bit like one that was not. Where Muon's bfloat16 makes processes differ, AdamW has to
agree, and the line says so. It is refused where the script says in one line why it cannot be trained on text
alone. Whatever else happens is failed.
"""

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: a fork would not have its threads

from transformers.models.auto.configuration_auto import model_type_to_module_name

from tests.runs import PROJECT, arguments, environment, metrics, write_corpus

SCRIPTS = {"causal": "train_clm", "masked": "train_mlm"}
T = 32  # tokens per row
TOLERANCE = 1e-4
TIME_LIMIT = 180  # seconds for a type

# Values for whatever setting a configuration has of this name.
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
# Where an architecture asks for more: settings that replace or join the above, None to leave one out.
BLT = {"vocab_size": 512, "hidden_size_global": 32}
SPECIAL = {
    "blt": dict.fromkeys(("patcher_config", "encoder_config", "decoder_config", "global_config"), BLT),
    "bailing_hybrid": {"layer_group_size": 2, "n_group": 1},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {"rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
             "num_key_value_heads": None},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {"num_hidden_layers": 2},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8},
    "gemma3n_text": {"num_hidden_layers": 5, "num_kv_shared_layers": 0, "intermediate_size": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {"mamba_n_heads": 8, "layer_types": ["mamba", "mamba", "attention", "mamba"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_dense_layers": 1},
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "mimo_v2_flash": {"head_dim": 32, "v_head_dim": 16, "num_key_value_heads": 2},
    "nemotron": {"num_key_value_heads": 4},
    "neomme": {"head_dim": 16},
    "perceiver": {"num_latents": 8, "d_latents": 32, "num_self_attends_per_block": 2,
                  "num_self_attention_heads": 4, "num_cross_attention_heads": 4, "qk_channels": 32,
                  "v_channels": 32},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8,
                       "indexer_budget": 16, "indexer_compress_ratio": 4},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_shape": [4, 8], "axial_pos_embds_dim": [16, 16],
                 "attn_layers": ["local", "lsh"], "hash_seed": 1,
                 "lsh_attn_chunk_length": 8, "local_attn_chunk_length": 8},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "num_heads": 2},
    "zamba": {"num_hidden_layers": 6, "attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "adapter_rank": 8},
}  # fmt: skip


def overrides(model_type: str) -> dict:
    """Settings that make a model of this type tiny."""
    from transformers import AutoConfig

    try:
        default = AutoConfig.for_model(model_type).to_dict()
    except Exception:  # of no use without what it belongs to
        return {}
    found = _shrunk(default)
    if "layer_types" in default and "num_hidden_layers" in found:
        found["num_hidden_layers"] = 4  # one of each kind
    for name, value in SPECIAL.get(model_type, {}).items():
        found[name] = found[name] | value if isinstance(found.get(name), dict) else value
    return {name: value for name, value in found.items() if value is not None}


def _shrunk(values: dict) -> dict:
    found = {}
    for name, value in values.items():
        if ("drop" in name or "jitter" in name) and isinstance(value, float):
            found[name] = 0.0  # so that processes can be compared
        elif name in SIZES and (isinstance(value, int) and not isinstance(value, bool) or name == "head_dim"):
            found[name] = SIZES[name] if value is None else min(value, SIZES[name])
        elif name.endswith("_config") and isinstance(value, dict):
            found |= {name: part} if (part := _shrunk(value)) else {}
    return found


def settings(mapping: str, model_type: str, folder: Path) -> dict:
    return {
        "dataset_name": str(folder / "corpus.jsonl"), "cache_dir": str(folder / "cache"),
        "validation_fraction": 0.1, "vocab_size": 400, "block_size": T, "model_type": model_type,
        "config_overrides": json.dumps(overrides(model_type)), "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 8, "max_eval_samples": 8, "max_train_steps": 3, "num_warmup_steps": 0,
        "learning_rate": 2e-3, "muon_learning_rate": 2e-3,
        "logging_steps": 1, "eval_steps": 3, "save_steps": 1, "save_total_limit": 1,
        **({"keywords": ["none"]} if mapping == "causal" else {}),
        "prompts": ["import os"] if mapping == "causal" else ["It is [MASK]."],
    }  # fmt: skip


# Their own losses compare each token's logits with its own label; those of the others with the next one's.
UNSHIFTED = """bart bigbird_pegasus blenderbot blenderbot-small cpmant marian mbart mvp pegasus plbart trocr
    whisper xlm xlnet""".split()


def compare(mapping: str, saved: Path, tokenizer) -> None:
    """AssertionError where the loss of a script is not that of transformers' model in the folder `saved`."""
    import torch
    import torch.nn.functional as F

    from utils.learning.configuration import MODEL_CLASSES
    from utils.learning.losses import CausalLMLoss, MaskedLMLoss
    from utils.learning.model import build_model

    own = MODEL_CLASSES[mapping].from_pretrained(saved, dtype=torch.float32).train()
    named = dict(model_type=None, config_overrides="", model_name_or_path=str(saved), block_size=T)
    lm = build_model(SimpleNamespace(**named, gradient_checkpointing=False), mapping, tokenizer)
    model = (CausalLMLoss if mapping == "causal" else MaskedLMLoss)(lm).train()
    own.load_state_dict(lm.state_dict())
    noise = torch.Generator().manual_seed(0)
    weights = dict(own.named_parameters())
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
        found = model(batch)
        plain = found["rows"][:, 0].sum() if "rows" in found else None
        return found["loss_sums"][0] / slots.numel(), None if plain is None else plain / slots.numel()

    if hasattr(own.config, "use_cache"):
        own.config.use_cache = False
    loss, _ = ours()
    loss.backward()
    torch.manual_seed(0)
    expected = own(input_ids=batch["input_ids"], labels=labels).loss
    expected.backward()
    loss, expected = loss.item(), expected.item()
    assert abs(loss - expected) <= TOLERANCE, f"loss {loss:.5f}, transformers {expected:.5f}"
    found = {name: parameter.grad for name, parameter in lm.named_parameters()}
    for name, parameter in own.named_parameters():
        if parameter.grad is None or not parameter.grad.any():
            continue
        assert found[name] is not None, f"{name} is not trained"
        off = ((found[name] - parameter.grad).norm() / parameter.grad.norm()).item()
        assert off <= 1e-3 or parameter.grad.norm() < 1e-5, f"the gradient of {name} differs by {off:.1e}"
    missing = [name for name, p in lm.named_parameters() if p.requires_grad and p.grad is None]
    assert not missing, f"without gradient, and waited for: {', '.join(missing[:3])}"

    model.eval()
    own.eval()
    with torch.no_grad():
        plain = ours()[1].item()
        logits = own(input_ids=batch["input_ids"])["logits"]
        moved = labels if mapping == "masked" else F.pad(ids[:, 1:], (0, 1), value=-100)
        expected = F.cross_entropy(logits.flatten(0, 1), moved.flatten()).item()
        assert abs(plain - expected) <= TOLERANCE, f"evaluated {plain:.5f}, cross-entropy {expected:.5f}"
        if mapping == "causal":
            changed = ids.clone()
            changed[:, -1] = low
            hashed = hasattr(own.config, "hash_seed")  # Reformer: what is near in a sorted row depends on all
            leak = (own(input_ids=changed)["logits"] - logits)[:, :-1].abs().max().item()
            assert hashed or leak <= TOLERANCE, f"a token sees the next one: logits move by {leak:.1e}"


def write_to(log: Path) -> None:
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)


def run_script(mapping: str, flags: dict, log: Path, die_after: int = 0, **env) -> None:
    """In a process of its own: the script's main. It kills itself when the step after `die_after` is done."""
    write_to(log)
    os.environ.update(environment(int(env.get("WORLD_SIZE", 1)), **env))
    script = importlib.import_module(SCRIPTS[mapping])
    if die_after:
        from utils.display.log import Log

        count = Log.step

        def done(log, step):
            count(log, step)
            if step > die_after:
                os.kill(os.getpid(), signal.SIGKILL)

        Log.step = done
    sys.argv = [f"{SCRIPTS[mapping]}.py", *arguments(flags)]
    script.main()


def finished(*runs: tuple) -> list[int]:
    """The exit statuses of processes that run side by side: (function, arguments, keywords)."""
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=target, args=args, kwargs=kwargs) for target, args, kwargs in runs]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def check(mapping: str, model_type: str, folder: Path) -> tuple[str, str]:
    """(verdict, reason) of a type, through its script."""
    work = Path(tempfile.mkdtemp(dir=folder))
    module = model_type_to_module_name(model_type)
    try:
        flags = settings(mapping, model_type, folder)
        importlib.import_module(f"transformers.models.{module}")  # for all runs
        return _check(mapping, flags, work)
    finally:
        shutil.rmtree(work)


def _check(mapping: str, flags: dict, work: Path) -> tuple[str, str]:
    def script(name, die_after=0, log=None, **env):
        log = work / f"{log or name}.log"
        return run_script, (mapping, flags | {"output_dir": str(work / name)}, log, die_after), env

    def end_of(name):
        return " ".join((work / f"{name}.log").read_text()[-400:].split())

    (status,) = finished(script("whole"))
    if status == 2:
        message = (work / "whole.log").read_text().partition("error:")[2].strip().splitlines()
        told = len(message) == 1 and message[0].startswith(("model_type,", "config_overrides,"))
        verdict = "refused" if told else "failed"
        return verdict, " / ".join(message)
    if status:
        return "failed", f"one process: {end_of('whole')}"
    if finished((_compare, (mapping, work), {})) != [0]:
        return "failed", end_of("compare")
    if (statuses := [*finished(script("killed", die_after=2)), *finished(script("killed"))]) != [-9, 0]:
        return "failed", f"kill and resume, statuses {statuses}: {end_of('killed')}"
    if metrics(work / "killed") != metrics(work / "whole"):
        return "failed", "resumed: another metrics.jsonl"
    weights = [(work / name / "model.safetensors").read_bytes() for name in ("whole", "killed")]
    if weights[0] != weights[1]:
        return "failed", "resumed: other weights"
    if (off := _apart(script, work, flags)) <= 1e-5:
        return "ok", ""
    flags["optimizer_type"] = "adamw"
    if finished(script("whole adamw")) != [0] or not _apart(script, work, flags, " adamw") <= 1e-5:
        return "failed", f"two processes: losses differ by {off:.1e}"
    return "ok", f"with AdamW; what Muon rounds to bfloat16 makes two processes' losses differ by {off:.1e}"


def _apart(script, work: Path, flags: dict, optimizer: str = "") -> float:
    """How far the losses of two processes are from those of one, relative to the first."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    env |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [{"RANK": rank, "LOCAL_RANK": rank, "log": f"rank{rank}{optimizer}"} for rank in "01"]
    size = flags["per_device_train_batch_size"]
    flags["per_device_train_batch_size"] = size // 2
    statuses = finished(*[script(f"two{optimizer}", **env, **rank) for rank in ranks])
    flags["per_device_train_batch_size"] = size
    if statuses != [0, 0]:
        ends = [" ".join((work / f"{rank['log']}.log").read_text()[-400:].split()) for rank in ranks]
        raise RuntimeError(f"two processes, statuses {statuses}: {' '.join(ends)}")
    one, two = (
        [line["loss/train"] for line in metrics(work / f"{name}{optimizer}") if "loss/train" in line]
        for name in ("whole", "two")
    )
    return max(abs(a - b) for a, b in zip(one, two, strict=True)) / one[0]


def _compare(mapping, work):
    from transformers import AutoTokenizer

    write_to(work / "compare.log")
    try:
        compare(mapping, work / "whole", AutoTokenizer.from_pretrained(work / "whole"))
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        print(f"\n{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})")
        raise SystemExit(1) from None


def _checked(found, *arguments) -> None:
    os.setsid()  # what it starts ends with it
    try:
        found.put(check(*arguments))
    except BaseException as error:
        found.put(("failed", f"{type(error).__name__}: {error}"))


def work_off(jobs, results, folder: Path) -> None:
    """Type after type, each in a process that cannot hang the others."""
    fork = multiprocessing.get_context("fork")
    while (job := jobs.get()) is not None:
        found, start = fork.SimpleQueue(), time.time()
        process = fork.Process(target=_checked, args=(found, *job, folder))
        process.start()
        process.join(TIME_LIMIT)
        verdict, reason = ("failed", "no end in time, or killed") if found.empty() else found.get()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
        results.put((*job, verdict, reason, time.time() - start))


def main() -> None:
    show = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=show)
    parser.add_argument("--mapping", choices=list(SCRIPTS), help="none: both")
    parser.add_argument("--types", default="", help="mamba,bloom; none: all")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    args = parser.parse_args()
    totals = Counter()
    for mapping, model_type, verdict, reason, seconds in survey(args.mapping, args.types, args.workers):
        totals[mapping, verdict] += 1
        print(f"{mapping:<7} {model_type:<26} {verdict:<8} {seconds:4.0f} s  {reason}", flush=True)
    for mapping in SCRIPTS:
        counts = ", ".join(f"{totals[mapping, verdict]} {verdict}" for verdict in ("ok", "refused", "failed"))
        print(f"{mapping}: {counts}")


def survey(mapping: str | None = None, types: str = "", workers: int = 2):
    """(mapping, type, verdict, reason, seconds) of each, as they are done."""
    from transformers.models.auto import modeling_auto

    import tests.preloaded  # noqa: F401  the processes are forked from what it has imported

    os.environ.update(environment())
    os.chdir(PROJECT)
    named = {
        "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    }
    todo = [
        (kind, name) for kind in named if mapping in (None, kind) for name in named[kind]
        if not types or name in types.split(",")
    ]  # fmt: skip
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder) / "corpus.jsonl", 12)
        jobs, results = fork.SimpleQueue(), fork.Queue()
        for job in [*todo, *[None] * workers]:
            jobs.put(job)
        crew = [fork.Process(target=work_off, args=(jobs, results, Path(folder))) for _ in range(workers)]
        for worker in crew:
            worker.start()
        for _ in todo:
            yield results.get()
        for worker in crew:
            worker.join()


if __name__ == "__main__":
    main()
