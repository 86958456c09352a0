"""Correctness and speed of the scripts on one device.

    python -m tests.benchmarks.accelerator                               # one GPU, or an Apple one
    python -m tests.benchmarks.accelerator --small                       # minutes, on a CPU, too
    python -m tests.benchmarks.accelerator --parts speed --nanogpt ../nanoGPT

--parts: same, losses against the CPU's and a run that is killed and continued; waits, host synchronisations
and graphs; speed, the scripts with the YAML file of the device as it is, AdamW and Muon, 16 and 32 rows:
tokens/s, the share of a matrix product's speed (MFU), peak memory (torch's and the device's), compilation;
others, HF Trainer as it is and tuned, and a plain loop.
--nanogpt, a checkout: its compiled bench.py before and after ours, without and with GPT-2's biases, which
ours has, and our rates as multiples of it.
GPT-2 124M and ModernBERT-base at T = 1,024 in bfloat16; --small takes tiny ones in float32.
"""

import argparse
import contextlib
import importlib
import itertools
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

from tests.benchmarks.measure import interleaved, machine, peak_memory
from tests.runs import PROJECT, arguments
from utils.display.metrics import read_metrics

PARTS = ["same", "waits", "speed", "others"]
STEPS = 24  # of the runs that are compared
BASE = {  # small and without dropout, so that runs can be compared
    "vocab_size": 4096, "block_size": 64, "per_device_train_batch_size": 8, "max_train_steps": STEPS,
    "num_warmup_steps": 4, "logging_steps": 1, "eval_steps": STEPS // 2, "save_steps": STEPS // 3,
    "save_total_limit": STEPS, "max_eval_samples": 64, "prompts": "none", "keywords": "none",
}  # fmt: skip
# Only steps, without evaluations, saves and log lines
QUIET = {"eval_steps": 1000, "save_steps": 1000, "logging_steps": 1000, "eval_at_start": "false"}
GPT2 = {"model_type": "gpt2", "learning_rate": 1e-2}
NO_DROPOUT = "resid_pdrop=0,embd_pdrop=0,attn_pdrop=0"
SMALL = {
    "clm": GPT2 | {"config_overrides": f"n_layer=2,n_embd=64,n_head=2,{NO_DROPOUT}"},
    "mlm": {
        "config_overrides": "num_hidden_layers=2,hidden_size=64,num_attention_heads=2,"
        "intermediate_size=128,local_attention=16",
    },
}  # fmt: skip
LARGE = {  # overrides BASE for well-known models with the scripts' settings
    "block_size": 1024, "per_device_train_batch_size": 16, "max_train_steps": 40,
    "logging_steps": 10, "eval_steps": 1000, "save_steps": 1000, "eval_at_start": "false",
    "max_eval_samples": 16, "per_device_eval_batch_size": 8,
}  # fmt: skip
NAMED = {
    "clm": GPT2 | {"config_overrides": f"vocab_size=50304,{NO_DROPOUT}"},  # 124 M
    "mlm": {"config_overrides": "vocab_size=50368"},  # 149 M
}


def inside(script: str, argv: list[str]) -> None:
    """Run the script in this process. The last line is {"peak", "device", "synchronisations", "graphs"}."""
    import torch

    sys.argv = [f"{script}.py", *argv]
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with contextlib.suppress(SystemExit):  # as a script ends
            importlib.import_module(script).main()
    from torch._dynamo.utils import counters

    waits = sum("synchronizing" in str(warning.message) for warning in caught)
    graphs = counters["stats"].get("unique_graphs", 0)
    free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
    report = {"peak": peak_memory(), "device": total - free, "synchronisations": waits, "graphs": graphs}
    print(json.dumps(report))


class Bench:
    def __init__(self, folder: Path, small: bool, dataset_name: str | None):
        self.folder, self.small, self.dataset_name = folder, small, dataset_name
        self.rates = {}  # of speed, tokens/s

    def run(
        self, script: str, name: str, settings: dict, env: dict | None = None, kill_at: int = 0
    ) -> dict:
        """Run a script. Returns the report of `inside` and the metrics. kill_at: SIGKILL after this step."""
        out = self.folder / name
        command = [sys.executable, "-m", "tests.benchmarks.accelerator", "--inside", f"train_{script}"]
        settings = {**settings, "output_dir": out, "cache_dir": self.folder / "cache"}
        settings |= {"dataset_name": self.dataset_name} if self.dataset_name else {}
        with open(f"{out}.log", "w") as log:
            process = subprocess.Popen(
                [*command, *arguments(settings)], cwd=PROJECT, env=os.environ | (env or {}), stdout=log,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
            while kill_at and process.poll() is None:
                if any(line["step"] >= kill_at for line in self.metrics(out)):
                    process.send_signal(signal.SIGKILL)
                time.sleep(0.02)
        status, text = process.wait(), Path(f"{out}.log").read_text()
        if status != (-signal.SIGKILL if kill_at else 0):
            line = " ".join([*command, *arguments(settings)])
            raise SystemExit(f"{line}: exit status {status}\n{text[-3000:]}")
        report = {} if kill_at else json.loads(text.strip().splitlines()[-1])
        graphs = re.findall(r"compiled graphs +(.*)", text)
        return report | {"lines": self.metrics(out), "compiled": f", graphs: {graphs[0]}" if graphs else ""}

    @staticmethod
    def metrics(out: Path) -> list[dict]:
        with contextlib.suppress(OSError, ValueError):
            return list(read_metrics(out))
        return []

    # ---- Measurements: each returns (name, result)

    def against_the_cpu(self, script: str) -> tuple[str, str]:
        settings = BASE | SMALL[script]
        on_device = self.run(script, f"{script}-here", settings)["lines"]
        cpu = self.run(script, f"{script}-cpu", settings, {"ACCELERATE_USE_CPU": "true"})["lines"]
        return f"{script}: losses against the CPU's, {STEPS} steps", largest_difference(on_device, cpu)

    def killed(self, script: str) -> tuple[str, str]:
        """Called after against_the_cpu, whose run on the device is the reference."""
        settings, name = BASE | SMALL[script], f"{script}-killed"
        self.run(script, name, settings, kill_at=STEPS // 2)
        again = self.run(script, name, settings)["lines"]
        expected = self.metrics(self.folder / f"{script}-here")
        return f"{script}: killed after step {STEPS // 2} and continued", largest_difference(again, expected)

    def waits(self, script: str) -> tuple[str, str]:
        """Those that twice the steps add, so that the start and the log line do not count."""
        import torch

        if not torch.cuda.is_available():
            return f"{script}: host synchronisations per step", "not counted on this device"
        runs = []
        for steps in (STEPS, 2 * STEPS):
            settings = BASE | SMALL[script] | QUIET | {"max_train_steps": steps}
            runs.append(self.run(script, f"{script}-waits-{steps}", settings))
        waits = [run["synchronisations"] for run in runs]
        return f"{script}: host synchronisations per step", f"{(waits[1] - waits[0]) / STEPS:.2f}"

    def graphs(self, script: str) -> tuple[str, str]:
        """By inductor on CUDA, elsewhere by a backend that only traces."""
        import torch

        backend = "inductor" if torch.cuda.is_available() else "aot_eager"
        graphs = []
        for steps in (STEPS, 2 * STEPS):
            settings = BASE | SMALL[script] | {"max_train_steps": steps}
            env = {"ACCELERATE_DYNAMO_BACKEND": backend}
            graphs.append(self.run(script, f"{script}-graphs-{steps}", settings, env)["graphs"])
        return f"{script}: graphs that {backend} compiles", f"{graphs[0]}, in twice the steps {graphs[1]}"

    def shipped(self, script: str, optimizer: str, rows: int) -> dict:
        """Settings of GPT-2 124M or ModernBERT base, or small ones."""
        settings = BASE | (SMALL[script] if self.small else LARGE | NAMED[script])
        settings |= {"optimizer_type": optimizer, "per_device_train_batch_size": rows}
        return settings | ({"learning_rate": 6e-4} if optimizer == "adamw" else {})

    def speed(self, script: str, peak: float, optimizer: str, rows: int) -> tuple[str, str]:
        """By the unchanged script and YAML: rows from disk, guard, clipping, schedule, logging."""
        from transformers import AutoTokenizer

        from utils.display.throughput import flops_per_token
        from utils.learning.model import build_model

        settings, name = self.shipped(script, optimizer, rows), f"{script}-speed-{optimizer}-{rows}"
        done = self.run(script, name, settings)
        rates = [line["tokens_per_second"] for line in done["lines"] if "tokens_per_second" in line]
        rate = sorted(rates[1:])[len(rates[1:]) // 2]
        head = 1.0 if script == "clm" else 0.3  # share of positions that the head computes
        kind, model_type = ("causal", "gpt2") if script == "clm" else ("masked", "modernbert")
        tokenizer = AutoTokenizer.from_pretrained(self.folder / name)
        named = {name: settings[name] for name in ("config_overrides", "block_size")}
        named |= dict(model_type=model_type, model_name_or_path=None, gradient_checkpointing=False)
        lm = build_model(SimpleNamespace(**named), kind, tokenizer)
        flops = flops_per_token(lm, settings["block_size"], head_share=head)
        mfu, mib = rate * flops / peak, done["peak"] / 2**20
        result = f"{rate:,.0f} tokens/s, MFU {mfu:.1%}, {mib:,.0f} MiB"
        result += f" of the device's {done['device'] / 2**20:,.0f}" if done["device"] else ""
        self.rates[script, optimizer, rows] = rate
        result += f", {1000 * rows * settings['block_size'] / rate:,.1f} ms a step{done['compiled']}"
        shape = f"{lm.num_parameters() / 1e6:,.1f} M parameters, {optimizer}, {rows} rows"
        return f"train_{script}.py, {model_type}, {shape} of {settings['block_size']}", result


def largest_difference(lines: list[dict], others: list[dict]) -> str:
    """The largest relative difference between the losses of two runs, in words."""
    pairs = [
        (line[key], other[key])
        for line, other in zip(lines, others, strict=True)
        for key in line
        if key.startswith("loss/") and "stderr" not in key
    ]
    assert pairs
    if all(a == b for a, b in pairs):
        return f"the same digits ({len(pairs)} losses)"
    return f"differ by at most {max(abs(a / b - 1) for a, b in pairs):.1e} ({len(pairs)} losses)"


def matmul_flops(small: bool) -> float:
    """FLOP/s of a large matrix product, the best of 20; in bfloat16 unless small."""
    import torch

    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    size, dtype = (1024, torch.float32) if small else (8192, torch.bfloat16)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / min(_seconds(torch.matmul, a, b) for _ in range(20))


def _seconds(function, *args) -> float:
    import torch

    start = time.perf_counter()
    function(*args)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter() - start


def beside_others(small: bool) -> list[tuple[str, str]]:
    """A step of train_clm.py, HF Trainer's and a plain loop's, which computes all logits at once."""
    shape = "--vocab_size 1024 --layers 1 --width 64 --batch_size 4 --block_size 64 --steps 4"
    if not small:
        shape = "--vocab_size 50304 --layers 12 --width 768 --batch_size 16 --block_size 1024 --steps 20"
    module, kind = [sys.executable, "-m", "tests.benchmarks.throughput"], "" if small else "-bf16"
    contenders = ("ours", "trainer", "plain") if small else ("ours", "trainer", "tuned", "plain")
    names = [f"{name}{kind}" for name in contenders]
    measured = interleaved({name: [*module, "--contender", name, *shape.split()] for name in names}, 1)
    return [
        (f"GPT-2 {shape}: {name}", f"{row['tokens_per_second']:,.0f} tokens/s, {row['mib']:,.0f} MiB")
        for name, row in measured.items()
    ]


def nanogpt(folder: str, rows: int, bias: bool) -> tuple[float, float]:
    """(tokens/s, peak memory in MiB) of a checkout's bench.py, compiled, on random tokens: forward, backward,
    fused AdamW."""
    words = [f"--batch_size={rows}", "--block_size=1024", "--real_data=False", "--compile=True"]
    code = ("import runpy, torch; runpy.run_path('bench.py', run_name='__main__'); "
            "print('peak', torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else 0)")
    command = [sys.executable, "-c", code, *words, f"--bias={bias}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    times = re.findall(r"time per iteration: ([\d.]+)ms", done.stdout)
    if not times:
        raise SystemExit(f"{folder}: bench.py: exit status {done.returncode}\n{done.stderr[-3000:]}")
    return rows * 1024 / (float(times[-1]) / 1000), float(done.stdout.split()[-1])


def speeds(bench: Bench, scripts: list[str], peak: float, checkout: str | None):
    """Each script with each optimizer; if there is a checkout, nanoGPT's bench.py before and after GPT-2."""
    for script in scripts:
        for rows in (8,) if bench.small else (16, 32):
            beside = checkout and script == "clm"
            before = nanogpt(checkout, rows, False) if beside else None
            for optimizer in ("adamw", "muon"):
                yield bench.speed(script, peak, optimizer, rows)
            if not beside:
                continue
            after = {bias: nanogpt(checkout, rows, bias) for bias in (False, True)}
            for bias, runs in (False, [before, after[False]]), (True, [after[True]]):
                name = f"nanoGPT, compiled, {rows} rows, {'with' if bias else 'without'} biases"
                rates = " and ".join(f"{rate:,.0f}" for rate, _ in runs)
                yield name, f"{rates} tokens/s, {runs[0][1]:,.0f} MiB"
                mean = statistics.mean(rate for rate, _ in runs)
                ours = (f"{optimizer} {bench.rates[script, optimizer, rows] / mean:.2f} x"
                        for optimizer in ("adamw", "muon"))
                yield f"ours to {name}", ", ".join(ours)


def main():
    if sys.argv[1:2] == ["--inside"]:
        return inside(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="tiny models, for a CPU")
    parser.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS)
    parser.add_argument("--nanogpt", metavar="DIR", help="a checkout of nanoGPT to run beside ours")
    parser.add_argument("--scripts", nargs="*", default=["clm", "mlm"])
    parser.add_argument("--dataset_name", help="what the runs train on; none: what the scripts do")
    parser.add_argument("--output_dir", help="keeps the runs")
    args = parser.parse_args()
    started, scratch = time.time(), tempfile.mkdtemp()
    try:
        folder = Path(args.output_dir or scratch).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        bench, peak = Bench(folder, args.small, args.dataset_name), matmul_flops(args.small)
        lines = [("a matrix product", f"{peak / 1e12:,.2f} TFLOP/s")]
        looks = {"same": (bench.against_the_cpu, bench.killed), "waits": (bench.waits, bench.graphs)}
        chosen = [look for part in args.parts for look in looks.get(part, ())]
        results = [(look(script) for script in args.scripts for look in chosen)]
        results += [speeds(bench, args.scripts, peak, args.nanogpt)] if "speed" in args.parts else []
        for line in itertools.chain(*results):
            lines.append(line)
            print(*line, sep=": ", flush=True)
        lines += beside_others(args.small) if "others" in args.parts else []
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    minutes = (time.time() - started) / 60
    table = [f"One device, {minutes:.0f} minutes. {machine()}", "", "| what | result |", "|---|---|"]
    table += [f"| {what} | {result} |" for what, result in lines]
    print("\n" + "\n".join(table))


if __name__ == "__main__":
    main()
