"""metrics.jsonl, throughput, trackers, and the lines on a terminal or in a log file."""

import contextlib
import fcntl
import json
import math
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from tests.runs import PATIENCE, PROJECT
from utils.display import throughput
from utils.display.metrics import (
    Metrics,
    log_to_trackers,
    newest,
    read_args,
    start_trackers,
    tracker_problems,
)
from utils.display.throughput import Throughput, flops_per_token, peak_flops


def python(code, *arguments, capture_output=True, **options):
    return subprocess.run([sys.executable, "-c", code, *arguments], cwd=PROJECT, text=True, timeout=PATIENCE,
                          capture_output=capture_output, **options)  # fmt: skip


def strict_lines(folder):
    """The lines of metrics.jsonl. NaN and Infinity, which are not JSON, are errors."""

    def refuse(name):
        raise ValueError(name)

    text = (folder / "metrics.jsonl").read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


LAUNCH = {"device": "cpu", "processes": 1}
FACTS = ({"seed": 1}, "rows", LAUNCH, {"python": "3"})  # settings, rows, launch, environment


def started(folder, step, resume="auto", writes=True):
    """The Metrics of a run that begins or resumes at `step`."""
    args = SimpleNamespace(output_dir=str(folder), resume_from_checkpoint=resume)
    metrics = Metrics(args, step, writes)
    metrics.start(step, *FACTS)
    return metrics


def starts(folder):
    return [start["step"] for start in read_args(folder)["starts"]]


@pytest.mark.parametrize("end", ['{"step": 8, "loss/tr', "\0\0\0", "not json\n", "[1]\n", "\n",
                                 '{"loss": 1}\n', '{"step": "x"}\n', "\udcff\n"])  # fmt: skip
def test_metrics_after_resume_equal_an_uninterrupted_run(tmp_path, end):
    """The run was killed two lines after its checkpoint, within a line or with zeros of a power failure."""
    uninterrupted, killed = started(tmp_path / "whole", 0), started(tmp_path / "killed", 0)
    for step in range(1, 11):
        line = {"step": step, "loss/train": 1 / step, "grad_norm": math.nan, "seconds": 2.0 * step}
        uninterrupted.write(line)
        if step <= 7:
            killed.write(line)
    with open(killed.path, "a", errors="surrogateescape") as file:
        file.write(end)
    resumed = started(tmp_path / "killed", 5)
    assert resumed.seconds == 10 and resumed.run_id == killed.run_id
    numbers = {"loss/train": 1 / 5, "grad_norm": None, "seconds": 10.0}
    assert newest(resumed.lines, "loss/train") == (numbers, 5)
    for step in range(6, 11):
        resumed.write(line | {"step": step, "loss/train": 1 / step, "seconds": 2.0 * step})
    assert strict_lines(tmp_path / "killed") == strict_lines(tmp_path / "whole")
    assert starts(tmp_path / "killed") == [0, 5] and starts(tmp_path / "whole") == [0]
    started(tmp_path / "killed", 3)  # its newest checkpoints were damaged
    assert starts(tmp_path / "killed") == [0, 3] and len(strict_lines(tmp_path / "killed")) == 3


@pytest.mark.parametrize("resume", ["auto", "none"])
def test_new_run_keeps_the_old_metrics_under_another_name(tmp_path, resume, capsys):
    first = started(tmp_path, 0)
    first.write({"step": 1})
    first.finish(1, "")
    assert read_args(tmp_path)["finished"] == 1
    assert started(tmp_path, 1).run_id == first.run_id  # the run resumes
    assert read_args(tmp_path)["finished"] is None
    new = started(tmp_path, 0, resume)
    assert new.run_id != first.run_id and new.args_json["finished"] is None and strict_lines(tmp_path) == []
    assert (tmp_path / "replaced-metrics.jsonl").read_text() == '{"step": 1}\n'
    assert "starts again" in capsys.readouterr().out


def test_args_json(tmp_path):
    started(tmp_path, 0)
    known = json.loads((tmp_path / "args.json").read_text())
    assert known["settings"] == {"seed": 1} and known["rows"] == "rows" and known["python"] == "3"
    assert known["starts"] == [{"step": 0, **LAUNCH}]
    args = SimpleNamespace(output_dir=str(tmp_path), resume_from_checkpoint="auto")
    changes = Metrics(args, 3, True).changes({"device": "cpu", "processes": 4, "new": 1})
    assert changes == ["launch     processes: 1 so far, 4 now"]
    for damaged in ("[1]", '{"run_id": 3}', "{", '{"run_id": "x", "settings": {}, "starts": [3]}'):
        (tmp_path / "args.json").write_text(damaged)
        assert read_args(tmp_path) == {}
    assert started(tmp_path, 2).args_json["settings"] == {"seed": 1}  # the run resumes


def test_full_disk_loses_metrics_lines_only(tmp_path):
    """RLIMIT_FSIZE truncates a write as a full disk does."""
    code = """
import resource, sys, types, warnings
from utils.display.metrics import Metrics
args = types.SimpleNamespace(output_dir=sys.argv[1], resume_from_checkpoint="auto")
metrics = Metrics(args, 0, True)
metrics.start(0, {}, "rows", {}, {})
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
for step in range(9):
    metrics.write({"step": step, "text": "x" * 20})
"""
    result = python(code, str(tmp_path))
    assert result.returncode == 0 and "a line is lost" in result.stderr, result.stderr
    assert [line["step"] for line in strict_lines(tmp_path)] == [0, 1]


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves."""
    now = [100.0]
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: now[0])
    return now


class Constant:
    """Steps of `tokens` tokens each."""

    def __init__(self, last, tokens):
        self.last, self.tokens = last, tokens

    def tokens_before(self, step):
        return step * self.tokens


def test_tokens_per_second_exclude_evaluation_and_saves(clock):
    meter = Throughput(Constant(100, 1000), flops_per_token=6e6, peak=1e10, seconds=50)
    unknown = Throughput(Constant(100, 1000), flops_per_token=6e6, peak=peak_flops("cpu"))
    clock[0] += 4.0  # ten steps
    assert unknown.measure(10)["mfu"] is None
    with meter.excluding("evaluation"):
        clock[0] += 16.0
    assert meter.measure(10) == {"seconds": 70.0, "tokens_per_second": 2500.0, "mfu": 1.5}
    clock[0] += 2.0
    with meter.excluding("save"):  # the log has how long training waited for it
        clock[0] += 3.0
    record = meter.measure(20)
    assert record["tokens_per_second"] == 5000.0 and record["save_seconds"] == 3.0


def test_time_left(clock):
    """A run of 95 steps of 2 s, an evaluation of 7 s every 20 steps and a save of 3 s every 50, both also at
    the end, resumed at step 10. The error is at most one evaluation and one save."""
    meter = Throughput(Constant(95, 1), step=10)
    left = {}
    assert meter.eta is None
    for step in range(11, 96):
        clock[0] += 2
        if step % 5 == 0:
            meter.measure(step)
        if step % 20 == 0 or step == 95:
            with meter.excluding("evaluation"):
                clock[0] += 7
        if step % 50 == 0 or step == 95:
            with meter.excluding("save"):
                clock[0] += 3
        if step % 5 == 0:
            left[step] = meter.eta, clock[0]
    for step in range(50, 95, 5):
        eta, at = left[step]
        assert eta == pytest.approx(clock[0] - at, abs=10), step


@pytest.mark.parametrize("name, tflops", [
    ("NVIDIA A100-SXM4-40GB", 312), ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756),
    ("NVIDIA H200", 989), ("NVIDIA L4", 121), ("NVIDIA L40S", 362), ("Tesla V100-SXM2-16GB", 125),
    ("NVIDIA GeForce RTX 4090", 165), ("AMD Instinct MI250X", 191.5), ("AMD Instinct MI300X", 1307),
    ("TPU v4-8", 275), ("TPU v5litepod-4", 197), ("TPU v5p-8", 459), ("TPU v6e-8", 918), ("cpu", None),
    ("mps", None), ("TPU ?", None), ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("NVIDIA GeForce GTX 1080", None),
])  # fmt: skip
def test_peak_flops_by_device_name(name, tflops):
    assert peak_flops(name) == (tflops and tflops * 1e12)


def counted_flops(model, T):
    """FLOPs of a training step per token, by torch's counter of the matrix products that run."""
    tokens = torch.randint(500, (2, T))
    with FlopCounterMode(display=False) as counter:
        model(tokens, labels=tokens).loss.backward()
    return counter.get_total_flops() / tokens.numel()


EAGER = {"vocab_size": 500, "attn_implementation": "eager"}
BLOCKS = EAGER | {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3}
BLOCKS |= {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize("model", [
    GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=64, n_head=4, n_positions=64, **EAGER)),
    LlamaForCausalLM(LlamaConfig(head_dim=32, tie_word_embeddings=False, **BLOCKS)),
], ids=["tied", "untied, grouped queries"])  # fmt: skip
def test_flops_per_token_match_torch(model):
    """Within 2 %, as 6 N also counts biases and norms."""
    assert flops_per_token(model, 64) == pytest.approx(counted_flops(model, 64), rel=0.02)


class ListTracker(GeneralTracker):
    """A custom tracker of accelerate that stores its values in a list."""

    name, requires_logging_directory = "list", False
    tracker = property(lambda self: self.logged)

    def start(self):
        self.settings, self.logged = None, []

    def store_init_configuration(self, values):
        self.settings = values

    def log(self, values, step=None, **_):
        self.logged.append((step, values))


def test_trackers_receive_numbers_at_their_step(tmp_path):
    tracker = ListTracker()
    accelerator = Accelerator(cpu=True, log_with=tracker)
    settings = {"seed": 1, "prompts": ["a"], "name": None}
    start_trackers(accelerator, "project", tmp_path, "id", settings, 0)  # tests/trackers has real ones
    log_to_trackers(accelerator, {"step": 7, "loss/train": 2.5, "mfu": None, "event": "text"})
    assert tracker.settings == {"seed": 1, "prompts": "['a']", "name": "None"}
    assert tracker.logged == [(7, {"loss/train": 2.5})]


def test_missing_tracker_is_named():
    assert tracker_problems([]) == []
    assert [*map(bool, tracker_problems(["nothere", "tensorboard,wandb"]))] == [True, True]


RUN = """
import sys
from accelerate.utils import tqdm
from utils.display.log import Progress
progress = Progress(40, 0)
for step in range(1, 41):
    progress.update(step)
    if step % 10 == 0:
        progress.update(step, {"loss/train": 1 / step, "tokens_per_second": 12345.6, "mfu": None}, 3700, "ok")
for _ in tqdm(range(3), desc="evaluating", leave=False, disable=not sys.stderr.isatty()):
    pass
progress.update(40, {"loss/eval/a": 0.25, "loss/eval/b": None, "perplexity/a": 1.284, "perplexity/b": 6e4})
progress.update(40, {"loss/eval": 0.5, "perplexity": 1.6487})
progress.update(40, {"loss/eval": 0.5, "loss/eval_stderr": 0.01234, "perplexity": 1.6487})
progress.write("a completion")
progress.bar.close()
"""


def test_printed_lines():
    result = python(RUN)
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0] == "step 10/40  loss 0.1000  tok/s 12,346  left 1 h 1 min  hub ok"
    assert lines[4] == "step 40/40  eval loss a 0.2500, b -  perplexity a 1.28, b 60,000.00"
    assert lines[5] == "step 40/40  eval loss 0.5000  perplexity 1.65"
    assert lines[6:] == ["step 40/40  eval loss 0.5000 ± 0.0123  perplexity 1.65", "a completion"]
    assert len(lines) == 8 and not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", result.stdout)


def test_terminal_shows_lines_above_a_progress_bar():
    """On a pseudo-terminal of 110 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 110, 0, 0))
    streams = {"capture_output": False, "stdout": theirs, "stderr": theirs}
    result = python(RUN, env={**os.environ, "TERM": "xterm"}, **streams)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # Linux raises it when the other end is closed
        while part := os.read(ours, 65536):
            shown += part
    os.close(ours)
    assert result.returncode == 0
    parts = [part.strip() for part in re.split(r"[\r\n]", shown.decode())]
    bars = [part for part in parts if part.startswith("40/40 100% |")]
    assert re.search(r"\| \d+:\d+, left 00:00, .*it/s$", bars[-1])
    lines = [part for part in parts if part.startswith("step") or part == "a completion"]
    assert lines == python(RUN).stdout.splitlines()


NOISE = """
import sys, warnings
from utils.display.start import quiet_libraries
quiet_libraries()
import datasets, transformers
transformers.utils.logging.get_logger("transformers.x").warning("transformers warns")
datasets.utils.logging.get_logger("datasets.x").warning("datasets warns")
warnings.warn_explicit("a library warns", UserWarning, "x.py", 1, module="some.library")
warnings.warn_explicit("a file is open", ResourceWarning, "x.py", 1, module="data.documents.source")
warnings.warn_explicit("ours warns", UserWarning, "x.py", 1, module="utils.state.checkpoint")
datasets.Dataset.from_dict({"a": [1, 2]}).map(lambda row: row)
"""


@pytest.mark.parametrize("level", [None, "info"])
def test_library_warnings_are_hidden_unless_requested(level):
    loud = {f"{name}_VERBOSITY": level for name in ("TRANSFORMERS", "DATASETS") if level}
    result = python(NOISE, env={**os.environ, "HF_HUB_OFFLINE": "1", **loud})
    assert result.returncode == 0 and "ours warns" in result.stderr, result.stderr
    for noise in ("a file is open", "a library warns", "Map"):
        assert noise not in result.stderr
    for noise in ("transformers warns", "datasets warns"):
        assert (noise in result.stderr) == (level == "info"), noise
