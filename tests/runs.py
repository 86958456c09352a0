"""Real runs of the scripts, small enough for tests."""

import json
import os
import subprocess
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path
from pydoc_data.topics import topics

import psutil

PROJECT = Path(__file__).resolve().parent.parent

# Seconds until a test gives up on a process that seems to hang; enough for slow machines.
PATIENCE = 600

# A model and a batch that take milliseconds; dropout off and rates low, so that processes can be compared.
SIZES = "num_hidden_layers=2,hidden_size=32,num_attention_heads=2,num_key_value_heads=2"
SIZES += ",intermediate_size=64,tie_word_embeddings=true"
TINY = {
    "vocab_size": 512, "block_size": 32, "keywords": ["none"], "validation_fraction": 0.1,
    "config_overrides": SIZES + ",head_dim=16",
    "per_device_train_batch_size": 8, "per_device_eval_batch_size": 16, "max_eval_samples": 50,
    "learning_rate": 2e-3, "muon_learning_rate": 2e-3, "max_train_steps": 6, "num_warmup_steps": 2,
    "logging_steps": 1, "eval_steps": 3, "save_steps": 3, "prompts": ["none"],
}  # fmt: skip
DROPOUT = {"config_overrides": TINY["config_overrides"] + ",attention_dropout=0.1"}


def write_corpus(path: Path, documents: int = 60) -> Path:
    """Write modules of the standard library as documents: the same text on every machine with this Python."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))[:documents]
    with open(path, "w", encoding="utf-8") as out:
        for file in files:
            out.write(
                json.dumps({"path": file.name, "content": file.read_text(encoding="utf-8")[:4000]}) + "\n"
            )
    return path


def write_english(path: Path, part: int = 6000) -> Path:
    """Write Python's help topics, which are prose, as documents of at most `part` characters."""
    with open(path, "w", encoding="utf-8") as out:
        for name, text in sorted(topics.items()):
            for start in range(0, min(len(text), 6000), part):
                out.write(json.dumps({"text": text[start : start + part], "topic": name}) + "\n")
    return path


def command(script: str, flags: dict, processes: int = 1) -> list[str]:
    """The words of `accelerate launch ...` as a user types it, with the interpreter of the tests."""
    config = "cpu" if processes == 1 else "multi_cpu"
    launcher = [sys.executable, "-m", "accelerate.commands.launch"]
    launcher += ["--config_file", f"accelerate_configs/{config}.yaml"]
    if processes > 1:
        launcher += ["--num_processes", str(processes)]
    return [*launcher, script, *arguments(flags)]


def arguments(flags: dict) -> list[str]:
    """{"max_train_steps": 6, "keywords": ["a", "b"]} -> --max_train_steps 6 --keywords a b"""
    words = []
    for name, value in flags.items():
        words += [f"--{name}", *(map(str, value) if isinstance(value, list) else [str(value)])]
    return words


def environment(processes: int = 1, **changes: str) -> dict[str, str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **changes}
    if processes > 1:
        env["ACCELERATE_USE_CPU"] = "true"
    return env


def fsdp_environment(processes: int, *words: str, yaml: str = "fsdp") -> dict[str, str]:
    """The environment that `accelerate launch` sets for fsdp.yaml and these flags, on CPU processes."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    config = ["--config_file", f"accelerate_configs/{yaml}.yaml", "--num_processes", str(processes)]
    args = launch_command_parser().parse_args([*config, "--mixed_precision", "no", *words, "a_script"])
    return prepare_multi_gpu_env(_validate_launch_command(args)[0]) | environment(processes)


def run(script: str, flags: dict, processes: int = 1, **env) -> subprocess.CompletedProcess:
    """Run `accelerate launch` to the end; stdout and stderr as text."""
    return subprocess.run(
        command(script, flags, processes), cwd=PROJECT, env=environment(processes, **env),
        capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip


def kill_family(pid: int) -> None:
    """Send SIGKILL to a process and all its descendants (torchrun's workers are not in its process group).
    Waits for the descendants; the caller waits for the process."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(family[1:])


def metrics(output_dir) -> list[dict]:
    """The lines of metrics.jsonl without the values that depend on the clock."""
    lines = [json.loads(line) for line in (Path(output_dir) / "metrics.jsonl").read_text().splitlines()]
    clock = ("seconds", "tokens_per_second", "mfu", "save_seconds", "peak_memory")
    return [{k: v for k, v in line.items() if k not in clock} for line in lines]


def tolerance(key: str, rel: float = 1e-5) -> float:
    """Relative tolerance for a metric of two runs that differ in the order of sums; `rel` for losses.

    A standard error is a small difference of large numbers: row losses 1e-5 apart can move it by 1e-3. A
    gradient norm depends on weights that Muon rounded to bfloat16. A perplexity moves by its loss times the
    loss's error."""
    if "stderr" in key or key.startswith("perplexity"):
        return (100 if "stderr" in key else 10) * rel
    return 1e-4 if key == "grad_norm" else rel


def assert_same_metrics(folder, other_folder, rel: float = 1e-5) -> None:
    """Compare the metrics of two output folders, up to the order of sums."""
    from pytest import approx

    for line, other_line in zip(metrics(folder), metrics(other_folder), strict=True):
        assert line.keys() == other_line.keys()
        for key, value in line.items():
            assert value == approx(other_line[key], rel=tolerance(key, rel)), (key, line, other_line)


def first_moments(output_dir):
    """AdamW's first moments and Muon's momenta after step 1 in one vector: proportional to the gradients."""
    import torch
    from safetensors.torch import load_file

    saved = load_file(output_dir / "checkpoints" / "step-00000001" / "state.safetensors")
    names = (name for name in sorted(saved) if name.endswith(("exp_avg", "momentum_buffer")))
    return torch.cat([saved[name].flatten() for name in names])
