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

# Seconds, of every guard against hangs in the tests: what takes longer does not end, on whatever machine.
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
    """Real Python source, the same on every machine with this Python: modules of the standard library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))[:documents]
    with open(path, "w", encoding="utf-8") as out:
        for file in files:
            out.write(
                json.dumps({"path": file.name, "content": file.read_text(encoding="utf-8")[:4000]}) + "\n"
            )
    return path


def write_english(path: Path, part: int = 6000) -> Path:
    """Python's own help topics: prose, some of it in short documents, of at most `part` characters."""
    with open(path, "w", encoding="utf-8") as out:
        for name, text in sorted(topics.items()):
            for start in range(0, min(len(text), 6000), part):
                out.write(json.dumps({"text": text[start : start + part], "topic": name}) + "\n")
    return path


def command(script: str, flags: dict, processes: int = 1) -> list[str]:
    """`accelerate launch ...` as a user types it, with the interpreter of the tests."""
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
    """What the launcher hands on with fsdp.yaml and these flags, for processes of the CPU."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    config = ["--config_file", f"accelerate_configs/{yaml}.yaml", "--num_processes", str(processes)]
    args = launch_command_parser().parse_args([*config, "--mixed_precision", "no", *words, "a_script"])
    return prepare_multi_gpu_env(_validate_launch_command(args)[0]) | environment(processes)


def run(script: str, flags: dict, processes: int = 1, **env) -> subprocess.CompletedProcess:
    """Runs to the end; stdout and stderr as text."""
    return subprocess.run(
        command(script, flags, processes), cwd=PROJECT, env=environment(processes, **env),
        capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip


def kill_family(pid: int) -> None:
    """SIGKILL to a process and all below it (torchrun's workers are not in its process group); those below
    are gone then, the process itself is for its owner to wait for."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(family[1:])


def metrics(output_dir) -> list[dict]:
    """metrics.jsonl without what the clock decides."""
    lines = [json.loads(line) for line in (Path(output_dir) / "metrics.jsonl").read_text().splitlines()]
    clock = ("seconds", "tokens_per_second", "mfu", "save_seconds", "peak_memory")
    return [{k: v for k, v in line.items() if k not in clock} for line in lines]


def tolerance(key: str, rel: float = 1e-5) -> float:
    """Relative, between two runs' values of a metric that may differ in the order of their sums, `rel` for
    losses. A standard error is a small difference of large numbers: row losses that are 1e-5 apart can move
    it by 1e-3. A gradient's norm is of weights that Muon has rounded to bfloat16 on their way. A perplexity's
    is that of its loss times the loss."""
    if "stderr" in key or key.startswith("perplexity"):
        return (100 if "stderr" in key else 10) * rel
    return 1e-4 if key == "grad_norm" else rel
