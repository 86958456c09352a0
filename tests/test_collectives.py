"""Collectives and their bytes in a step, a log line, an evaluation and a save, counted (tests/collectives.py)
in runs of two and four processes."""

import itertools

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.collectives import counted_run
from tests.runs import TINY, write_corpus

CONFIG = AutoConfig.for_model("gpt2", n_layer=2, n_embd=32, n_head=2, n_positions=32, vocab_size=512)
MICRO_BATCHES, RUNS = 2, [(kind, processes) for kind in ("ddp", "fsdp") for processes in (2, 4)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{(kind, processes): [{phase: [collectives of each occurrence]} for each process]}"""
    folder = tmp_path_factory.mktemp("collectives")
    settings = TINY | {
        "model_type": "gpt2", "config_overrides": "n_layer=2,n_embd=32,n_head=2",
        "dataset_name": write_corpus(folder / "corpus.jsonl"), "cache_dir": folder / "cache", "save_steps": 4,
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": MICRO_BATCHES, "max_train_steps": 4,
        "eval_steps": 4, "logging_steps": 4, "per_device_eval_batch_size": 64,
    }  # fmt: skip
    counted = {}
    for kind, processes in RUNS:
        name, phases = f"{kind}-{processes}", []
        flags = settings | {"output_dir": folder / "runs" / name}
        for records in counted_run(folder / name, "train_clm", flags, processes, kind == "fsdp"):
            phases.append({})
            for phase, collectives in records:
                phases[-1].setdefault(phase, []).append(collectives)
        counted[kind, processes] = phases
    return counted


def sizes():
    """Returns the numbers of elements of each block, of the rest and of Muon's matrices, and of tensors."""
    lm = AutoModelForCausalLM.from_config(CONFIG)
    blocks = [sum(p.numel() for p in block.parameters()) for block in lm.transformer.h]
    matrices = sum(p.numel() for p in lm.transformer.h.parameters() if p.ndim == 2)
    return blocks, lm.num_parameters() - sum(blocks), matrices, len([*lm.parameters()])


@pytest.mark.parametrize("kind, processes", RUNS)
def test_a_step_sends_each_gradient_and_each_update_once(runs, kind, processes):
    """A stop signal takes four bytes more. In each micro-batch FSDP gathers a block twice and the rest once.
    The first two steps differ: DDP arranges its buckets, and FSDP still has weights of the evaluation."""
    blocks, rest, matrices, tensors = sizes()
    # Not muon.PRECISION, which tests/small_run.py changes if both run in one process.
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
    steps = [phases["step"][2:] for phases in runs[kind, processes]]
    if kind == "fsdp":  # a process with more of the matrices receives more bytes
        swaps = [step.pop(swapped) for step in itertools.chain(*steps)]
        norms = [step.pop("all_reduce float32") for step in itertools.chain(*steps)]
        assert all(norm in ([1, 4 * tensors], [2, 8]) for norm in norms)  # torch 2.9: two sums
        assert {calls for calls, _ in swaps} == {2 * shapes}
        assert sum(size for _, size in swaps) == 2 * 2 * updates  # there and back, in two steps
    assert steps == [[expected] * 2] * processes
    flags = [stop for phases in runs[kind, processes] for stop in phases["stop"] if stop]
    assert flags and all(stop == {"allreduce_ int32": [1, 4]} for stop in flags)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_more_processes_send_no_more_messages(runs, kind):
    """In no phase. Bytes at most double with the number of processes: gathers, and the index of a sharded
    checkpoint."""
    for few, many in zip(runs[kind, 2], runs[kind, 4][:2], strict=True):
        assert few.keys() == many.keys() > {"step", "log", "evaluation", "save", "load", "start"}
        for phase in few:
            for two, four in zip(few[phase], many[phase], strict=True):
                calls = [{name: calls for name, (calls, _) in counts.items()} for counts in (two, four)]
                assert calls[0] == calls[1]
                assert all(four[name][1] <= 2.2 * size for name, (_, size) in two.items())


@pytest.mark.parametrize("kind, processes", RUNS)
def test_the_loop_has_no_barrier(runs, kind, processes):
    for phases in runs[kind, processes]:
        assert phases["log"] == [{"allgather_ float32": [1, processes * 4 * 4]}]  # 2 losses, steps, norm
        for phase in ("step", "stop", "log", "evaluation", "save"):
            assert not [name for collectives in phases[phase] for name in collectives if "barrier" in name]
        assert phases["end"] == [{}]
