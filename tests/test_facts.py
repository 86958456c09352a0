"""The start-up lines and their warnings, and launches that are refused."""

import re

import torch
from accelerate import Accelerator

import train_clm
from utils.display.start import launch_facts, start_lines
from utils.io.mistakes import lost_peer
from utils.launch import launch_problems
from utils.steps import Steps


def block(model="m", parameters=1, start=0, rows=10**6, **changes):
    """The start-up lines of 600 steps of 32 rows x 8 micro-batches of 128 tokens."""
    accelerator = Accelerator(cpu=True)
    changes = {"dataset_name": ["texts"], "gradient_accumulation_steps": 8, "max_train_steps": 600} | changes
    args = train_clm.TrainArgs(**changes)
    steps = Steps(args, accelerator, range(rows))
    facts = {"launch": launch_facts(accelerator, "sdpa"), "model_type": model, "parameters": parameters,
             "optimizer": ["AdamW"], "settings": vars(args), "script": train_clm.__file__}  # fmt: skip
    return "\n".join(start_lines(args, accelerator, steps, start, "", facts)) + "\n"


def test_start_up_lines():
    text = block("gpt2", 124_000_000, start=100)
    assert "32 rows x 8 micro-batches x 1 process = 256 rows = 32,768 tokens per step\n" in text
    assert "600 steps = 19.7 M tokens = 0.154 passes over 1,000,000 rows\n" in text
    assert "gpt2 on texts, 124.0 M parameters, attention: sdpa" in text  # a resumed run is not from scratch
    assert "gpt2 from scratch on texts" in block("gpt2", 124_000_000)
    assert "device     1 process, cpu" in text and "float32" in text
    assert "continues at step 100 in runs/clm; stop it any time: the same command resumes it" in text
    assert "run        starts in runs/clm" in block()
    assert "19.7 M tokens = 15.4 passes over 10,000 rows" in block(rows=10_000)
    new = dict(resume_from_checkpoint="none", model_name_or_path="runs/other", dataset_name=[*"abcde"])
    other = block("gpt2", **new)
    assert "ruin trained weights: try a twentieth, --learning_rate 0.002" in other
    assert "tracker    tensorboard --logdir runs/clm" in block(report_to=["tensorboard", "wandb"])
    assert "tracker " not in other
    assert "any time\n" in other and "weights of runs/other on a, b, c and 2 more" in other


def test_more_processes_than_devices_are_refused(monkeypatch):
    def check(processes, devices):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: devices)
        return launch_problems()

    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    [problem] = check(processes=4, devices=2)
    assert re.match(r"num_processes: 4 processes .* 2 devices.*--num_processes 2", problem)
    assert check(processes=2, devices=2) == check(processes=4, devices=0) == []  # 0: the CPU


def test_fp16_on_xla_is_refused(monkeypatch):
    monkeypatch.setattr("utils.launch.is_xla", lambda: True)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    assert re.match("mixed_precision: fp16 .* bf16 or no on XLA", launch_problems()[0])


def test_torch_tpu_is_refused(monkeypatch, tmp_path):
    (tmp_path / "torch_tpu.py").touch()
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    assert not launch_problems()
    monkeypatch.syspath_prepend(tmp_path)
    assert re.match("torch_tpu: .*/tpu-requirements.txt .*/cpu.yaml", launch_problems()[0])
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert not launch_problems()


def test_device_warnings(monkeypatch):
    assert "warning" not in block()
    monkeypatch.setattr("utils.display.start.has_bf16", lambda device: False)
    monkeypatch.setattr(Accelerator, "mixed_precision", "bf16")
    assert "warning    mixed_precision: bf16 is emulated and slow here" in block()
    monkeypatch.setattr("utils.display.start.device_name", str)
    monkeypatch.setattr(Accelerator, "device", torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    assert "warning    num_processes: 1 of 8 devices are used" in block()


def test_lost_peer_message():
    """With the error messages of torch 2.13."""
    gloo = (
        "[/gloo/transport/tcp/pair.cc:537] Read error [10.77.0.2]:13958: Connection reset by peer. This is "
        "typically caused by a remote worker hanging or bugs in the application."
    )
    assert "Read error [10.77.0.2]:13958: Connection reset by peer. Its own" in lost_peer(RuntimeError(gloo))
    gone = RuntimeError("[/pair.cc:553] Connection closed by peer [10.77.0.1]:27549. This is typically")
    assert "gone: Connection closed by peer [10.77.0.1]:27549. Its own" in lost_peer(gone)
    assert lost_peer(RuntimeError("CUDA out of memory")) is None
    assert lost_peer(RuntimeError("the data ended at step 3 of 9")) is None
