"""The metrics log, throughput, trackers and what a terminal or a log file shows."""

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
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from tests.runs import PATIENCE, PROJECT
from utils.display import throughput
from utils.display.metrics import (
    Metrics,
    duration,
    log_to_trackers,
    newest,
    read_args,
    read_metrics,
    readable,
    start_trackers,
    tracker_problems,
)
from utils.display.throughput import Throughput, flops_per_token, peak_flops
from utils.io.files import replacing


def python(code, *arguments, capture_output=True, **options):
    return subprocess.run([sys.executable, "-c", code, *arguments], cwd=PROJECT, text=True, timeout=PATIENCE,
                          capture_output=capture_output, **options)  # fmt: skip


def strict_lines(folder):
    """Lines as a strict JSON reader sees them: NaN and Infinity are errors."""

    def refuse(name):
        raise ValueError(name)

    text = (folder / "metrics.jsonl").read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


LAUNCH = {"device": "cpu", "processes": 1}
WHAT = ({"seed": 1}, "rows", LAUNCH, {"python": "3"})  # settings, rows, launch, environment


def started(folder, step, resume="auto", writes=True):
    """The metrics of a run that begins or continues at `step`."""
    args = SimpleNamespace(output_dir=str(folder), resume_from_checkpoint=resume)
    metrics = Metrics(args, step, writes)
    metrics.start(step, *WHAT)
    return metrics


def starts(folder):
    return [start["step"] for start in read_args(folder)["starts"]]


def test_a_line_is_in_the_file_when_write_returns_and_is_strict_json(tmp_path):
    run = started(tmp_path / "new", 0)
    run.write({"step": 1, "loss/train": math.nan, "grad_norm": math.inf, "mfu": None})
    assert strict_lines(tmp_path / "new") == [{"step": 1, "loss/train": None, "grad_norm": None, "mfu": None}]


def test_a_file_that_could_not_be_written_leaves_nothing_behind(tmp_path):
    (tmp_path / "curves.png").write_text("old")
    with pytest.raises(OSError, match="full"), replacing(tmp_path / "curves.png") as temporary:
        temporary.write_text("ha")
        raise OSError("the disk is full")
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]
    assert (tmp_path / "curves.png").read_text() == "old"


@pytest.mark.parametrize("end", ['{"step": 8, "loss/tr', "\0\0\0", "not json\n", "[1]\n", "\n",
                                 '{"loss": 1}\n', '{"step": "x"}\n', "\udcff\n"])  # fmt: skip
def test_a_resumed_run_leaves_the_lines_of_an_uninterrupted_one(tmp_path, end):
    """Killed two lines after its checkpoint, in the middle of a line or with what a power cut leaves."""
    whole, killed = started(tmp_path / "whole", 0), started(tmp_path / "killed", 0)
    for step in range(1, 11):
        whole.write({"step": step, "loss/train": 1 / step, "seconds": 2.0 * step})
        if step <= 7:
            killed.write({"step": step, "loss/train": 1 / step, "seconds": 2.0 * step})
    with open(killed.path, "a", errors="surrogateescape") as file:
        file.write(end)
    resumed = started(tmp_path / "killed", 5)
    assert resumed.seconds == 10 and resumed.run_id == killed.run_id
    assert newest(resumed.kept, "loss/train") == ({"loss/train": 1 / 5, "seconds": 10.0}, 5)
    for step in range(6, 11):
        resumed.write({"step": step, "loss/train": 1 / step, "seconds": 2.0 * step})
    assert strict_lines(tmp_path / "killed") == strict_lines(tmp_path / "whole")
    assert starts(tmp_path / "killed") == [0, 5] and starts(tmp_path / "whole") == [0]
    started(tmp_path / "killed", 3)  # its newest checkpoints were damaged
    assert starts(tmp_path / "killed") == [0, 3] and len(strict_lines(tmp_path / "killed")) == 3


@pytest.mark.parametrize("resume", ["auto", "none"])
def test_a_new_run_begins_an_empty_log_and_keeps_the_old_one_aside(tmp_path, resume, capsys):
    first = started(tmp_path, 0)
    first.write({"step": 1})
    first.finish(1, "")
    assert started(tmp_path, 1).finished == 1  # args.json says so until the run goes on
    assert read_args(tmp_path)["finished"] is None
    new = started(tmp_path, 0, resume)
    assert new.run_id != first.run_id and new.finished is None and strict_lines(tmp_path) == []
    assert (tmp_path / "replaced-metrics.jsonl").read_text() == '{"step": 1}\n'
    assert "begins anew" in capsys.readouterr().out


def test_args_json_holds_settings_and_versions_and_shows_a_change_of_devices(tmp_path):
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
    assert started(tmp_path, 2).known["settings"] == {"seed": 1}  # and the run goes on


def test_only_the_main_process_writes(tmp_path):
    metrics = started(tmp_path, 0, writes=False)
    metrics.write({"step": 1})
    metrics.finish(1, "")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_costs_lines_not_the_run(tmp_path):
    """RLIMIT_FSIZE cuts a write short, as a full disk does."""
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


def test_read_metrics_skips_what_is_not_a_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n[1]\n\xff\xfe\n{"step": 2}\n{"ste')
    assert read_metrics(tmp_path) == [{"step": 1}, {"step": 2}]
    assert read_metrics(tmp_path / "missing") == []


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves when told."""
    now = [100.0]
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: now[0])
    return now


class Constant:
    """Steps of `tokens` tokens each."""

    def __init__(self, last, tokens):
        self.last, self.tokens = last, tokens

    def tokens_before(self, step):
        return step * self.tokens


def test_tokens_per_second_leave_evaluation_out_and_mfu_is_flops_over_peak(clock):
    meter = Throughput(Constant(100, 1000), flops_per_token=6e6, peak=1e10, seconds=50)
    unknown = Throughput(Constant(100, 1000), flops_per_token=6e6, peak=peak_flops("cpu"))
    clock[0] += 4.0  # ten steps
    assert unknown.measure(10)["mfu"] is None
    with meter.apart("evaluation"):
        clock[0] += 16.0
    assert meter.measure(10) == {"seconds": 70.0, "tokens_per_second": 2500.0, "mfu": 1.5}
    clock[0] += 2.0
    with meter.apart("save"):  # how long training stood still for it is logged
        clock[0] += 3.0
    record = meter.measure(20)
    assert record["tokens_per_second"] == 5000.0 and record["save_seconds"] == 3.0


def test_time_left_is_what_the_rest_of_the_run_takes(clock):
    """A run of 95 steps of 2 s with an evaluation of 7 s each 20 and a save of 3 s each 50 and at the end,
    resumed at step 10: what the time left is wrong by is one evaluation and one save at most."""
    meter = Throughput(Constant(95, 1), step=10)
    left = {}
    assert meter.eta is None
    for step in range(11, 96):
        clock[0] += 2
        if step % 5 == 0:
            meter.measure(step)
        if step % 20 == 0 or step == 95:
            with meter.apart("evaluation"):
                clock[0] += 7
        if step % 50 == 0 or step == 95:
            with meter.apart("save"):
                clock[0] += 3
        if step % 5 == 0:
            left[step] = meter.eta, clock[0]
    for step in range(50, 95, 5):
        eta, at = left[step]
        assert eta == pytest.approx(clock[0] - at, abs=10), step


def test_the_time_left_of_a_growing_batch_follows_its_tokens(clock):
    """Step s takes s + 1 seconds for as many thousand tokens: the rate stays, the time left is exact."""

    steps = SimpleNamespace(last=20, tokens_before=lambda step: 1000 * step * (step + 1) // 2)
    meter = Throughput(steps, step=4)
    for step in range(5, 21):
        clock[0] += step
        if step % 4 == 0:
            assert meter.measure(step)["tokens_per_second"] == 1000
            assert meter.eta == pytest.approx(sum(range(step + 1, 21)))


@pytest.mark.parametrize("name, tflops", [
    ("NVIDIA A100-SXM4-40GB", 312), ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756),
    ("NVIDIA H200", 989), ("NVIDIA L4", 121), ("NVIDIA L40S", 362), ("Tesla V100-SXM2-16GB", 125),
    ("NVIDIA GeForce RTX 4090", 165), ("AMD Instinct MI250X", 191.5), ("AMD Instinct MI300X", 1307),
    ("TPU v4-8", 275), ("TPU v5litepod-4", 197), ("TPU v5p-8", 459), ("TPU v6e-8", 918), ("cpu", None),
    ("mps", None), ("TPU ?", None), ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("NVIDIA GeForce GTX 1080", None),
])  # fmt: skip
def test_peak_flops_are_those_of_the_device_by_its_name_or_none(name, tflops):
    assert peak_flops(name) == (tflops and tflops * 1e12)


def counted_flops(model, T):
    """Of a training step, by torch's counter of the matrix products that run, per token."""
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
def test_flops_per_token_agree_with_torchs_count_of_a_training_step(model):
    """6 N also has biases and norms: within 2 %."""
    assert flops_per_token(model, 64) == pytest.approx(counted_flops(model, 64), rel=0.02)


def test_where_one_layer_of_three_attends_longer_rows_cost_one_layer_more():
    """Torch's counter says more of convolutions than they do, but the same of each token."""
    model = Lfm2ForCausalLM(Lfm2Config(full_attn_idxs=[1], **BLOCKS))
    ours = flops_per_token(model, 256) - flops_per_token(model, 64)
    counted = counted_flops(model, 256) - counted_flops(model, 64)
    assert ours == 12 * 64 * 192 == pytest.approx(counted, rel=0.02)


def test_flops_per_token_of_gpt2_are_the_published_855_million():
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config())
    assert flops_per_token(model, 1024) == pytest.approx(855e6, rel=1e-3)


class ListTracker(GeneralTracker):
    """accelerate's interface for trackers of one's own, kept in a list."""

    name, requires_logging_directory = "list", False
    tracker = property(lambda self: self.logged)

    def start(self):
        self.settings, self.logged = None, []

    def store_init_configuration(self, values):
        self.settings = values

    def log(self, values, step=None, **_):
        self.logged.append((step, values))


def test_trackers_get_the_numbers_of_a_record_at_its_step(tmp_path):
    tracker = ListTracker()
    accelerator = Accelerator(cpu=True, log_with=tracker)
    settings = {"seed": 1, "prompts": ["a"], "name": None}
    start_trackers(accelerator, "project", tmp_path, "id", settings, 0)  # tests/trackers: real ones
    log_to_trackers(accelerator, {"step": 7, "loss/train": 2.5, "mfu": None, "event": "text"})
    assert tracker.settings == {"seed": 1, "prompts": "['a']", "name": "None"}
    assert tracker.logged == [(7, {"loss/train": 2.5})]


def test_a_tracker_that_is_not_installed_is_named_with_its_remedy():
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
progress.close()
"""


def test_there_is_a_line_per_log_interval_and_evaluation():
    result = python(RUN)
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0] == "step 10/40  loss 0.1000  tok/s 12,346  left 1 h 1 min  hub ok"
    assert lines[4] == "step 40/40  eval loss a 0.2500, b -  perplexity a 1.28, b 60,000.00"
    assert lines[5] == "step 40/40  eval loss 0.5000  perplexity 1.65"
    assert lines[6:] == ["step 40/40  eval loss 0.5000 ± 0.0123  perplexity 1.65", "a completion"]
    assert len(lines) == 8 and not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", result.stdout)


def test_on_a_terminal_the_lines_stand_above_one_bar():
    """In a real pseudo-terminal of 110 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 110, 0, 0))
    streams = {"capture_output": False, "stdout": theirs, "stderr": theirs}
    result = python(RUN, env={**os.environ, "TERM": "xterm"}, **streams)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # how Linux says that the other end is closed
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
def test_libraries_are_silent_unless_asked(level):
    loud = {f"{name}_VERBOSITY": level for name in ("TRANSFORMERS", "DATASETS") if level}
    result = python(NOISE, env={**os.environ, "HF_HUB_OFFLINE": "1", **loud})
    assert result.returncode == 0 and "ours warns" in result.stderr, result.stderr
    for noise in ("a file is open", "a library warns", "Map"):
        assert noise not in result.stderr
    for noise in ("transformers warns", "datasets warns"):
        assert (noise in result.stderr) == (level == "info"), noise


@pytest.mark.parametrize("write, value, text", [
    *((readable, *pair) for pair in (
        (0.33333, "0.3333"), (12.18, "12.18"), (999.96, "1,000"), (65023.6, "65,024"), (4000, "4,000"),
        (1e9, "1,000,000,000"), (True, "True"), ("runs/clm", "runs/clm"))),
    *((duration, *pair) for pair in (
        (0.4, "0 s"), (42, "42 s"), (60, "1 min 0 s"), (200.4, "3 min 20 s"), (3599.7, "1 h 0 min"),
        (18720, "5 h 12 min"), (273600, "3 d 4 h"))),
])  # fmt: skip
def test_numbers_and_durations_read_well(write, value, text):
    assert write(value) == text
