"""What processes send each other in a step, a log line, an evaluation and a save: each collective and its
bytes, counted (tests/collectives.py) in runs of two and four processes.
"""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.collectives import counted_run
from tests.runs import TINY, write_corpus

CONFIG = AutoConfig.for_model("gpt2", n_layer=2, n_embd=32, n_head=2, n_positions=32, vocab_size=512)
MICRO_BATCHES, RUNS = 2, [(kind, processes) for kind in ("ddp", "fsdp") for processes in (2, 4)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{(kind, processes): of each process {phase: [collectives of each time]}}"""
    folder = tmp_path_factory.mktemp("collectives")
    settings = TINY | {
        "model_type": "gpt2", "config_overrides": "n_layer=2,n_embd=32,n_head=2",
        "dataset_name": write_corpus(folder / "corpus.jsonl"), "cache_dir": folder / "cache", "save_steps": 4,
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": MICRO_BATCHES, "max_train_steps": 4,
        "eval_steps": 4, "logging_steps": 4, "per_device_eval_batch_size": 64,
    }  # fmt: skip
    found = {}
    for kind, processes in RUNS:
        name, phases = f"{kind}-{processes}", []
        flags = settings | {"output_dir": folder / "runs" / name}
        for records in counted_run(folder / name, "train_clm", flags, processes, kind == "fsdp"):
            phases.append({})
            for phase, collectives in records:
                phases[-1].setdefault(phase, []).append(collectives)
        found[kind, processes] = phases
    return found


def sizes():
    """Elements of each block, of the rest, of Muon's matrices; tensors."""
    lm = AutoModelForCausalLM.from_config(CONFIG)
    blocks = [sum(p.numel() for p in block.parameters()) for block in lm.transformer.h]
    matrices = sum(p.numel() for p in lm.transformer.h.parameters() if p.ndim == 2)
    return blocks, lm.num_parameters() - sum(blocks), matrices, len([*lm.parameters()])


@pytest.mark.parametrize("kind, processes", RUNS)
def test_a_step_sends_each_gradient_and_each_update_once(runs, kind, processes):
    """And before it one flag of four bytes for a stop. FSDP gathers a block twice in a micro-batch, the rest
    once, and scatters each once. In the first two steps DDP arranges its buckets, and FSDP still has the rest
    from the evaluation before."""
    blocks, rest, matrices, tensors = sizes()
    # Not muon.PRECISION: tests/small_run.py changes it where both run in one process.
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    shapes, precision = 4, torch.bfloat16 if fast else torch.float32
    updates, swapped = precision.itemsize * matrices, f"alltoall_base_ {str(precision)[6:]}"
    if kind == "ddp":
        expected = {"allreduce_ float32": [1, 4 * (sum(blocks) + rest)], swapped: [shapes, updates]}
    else:
        gathered = MICRO_BATCHES * (2 * sum(blocks) + rest)
        expected = {
            "_allgather_base_ float32": [MICRO_BATCHES * (2 * len(blocks) + 1), 4 * gathered],
            "_reduce_scatter_base_ float32": [len(blocks) + 1, 4 * (sum(blocks) + rest)],
        }
    found = [phases["step"][2:] for phases in runs[kind, processes]]
    if kind == "fsdp":  # who has more of the matrices gets more bytes
        swaps = [step.pop(swapped) for steps in found for step in steps]
        norms = [step.pop("all_reduce float32") for steps in found for step in steps]
        assert all(norm in ([1, 4 * tensors], [2, 8]) for norm in norms)  # torch 2.9: two sums
        assert {calls for calls, _ in swaps} == {2 * shapes}
        assert sum(size for _, size in swaps) == 2 * 2 * updates  # there and back, in two steps
    assert found == [[expected] * 2] * processes
    flags = [found for phases in runs[kind, processes] for found in phases["stop"] if found]
    assert flags and all(found == {"allreduce_ int32": [1, 4]} for found in flags)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_with_more_processes_there_are_no_more_messages(runs, kind):
    """Nowhere. Twice the processes, twice the bytes, at most: of what is gathered from each, and of the list
    of who has what of a sharded checkpoint."""
    for few, many in zip(runs[kind, 2], runs[kind, 4][:2], strict=True):
        assert few.keys() == many.keys() > {"step", "log", "evaluation", "save", "load", "start"}
        for phase in few:
            for two, four in zip(few[phase], many[phase], strict=True):
                calls = [{name: calls for name, (calls, _) in found.items()} for found in (two, four)]
                assert calls[0] == calls[1]
                assert all(four[name][1] <= 2.2 * size for name, (_, size) in two.items())


@pytest.mark.parametrize("kind, processes", RUNS)
def test_the_loop_has_no_barrier(runs, kind, processes):
    for phases in runs[kind, processes]:
        assert phases["log"] == [{"allgather_ float32": [1, processes * 4 * 4]}]  # 2 losses, steps, norm
        loop = [found for name in ("step", "stop", "log", "evaluation", "save") for found in phases[name]]
        assert not [name for found in loop for name in found if "barrier" in name]
        assert phases["end"] == [{}]
