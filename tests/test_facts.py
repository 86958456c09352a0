"""The start-up block and its warnings; the launches it must refuse."""

import ast
import re
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

import train_clm
from tests import forked
from tests.runs import environment
from utils.display.start import launch_facts, start_lines
from utils.io.mistakes import lost_peer
from utils.launch import launch_problems
from utils.steps import Steps

PROJECT = Path(__file__).resolve().parents[1]
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def block(model="m", parameters=1, start=0, micro_batches=None, rows=10**6, **changes):
    """32 rows x 8 micro-batches of 128 tokens, 600 steps."""
    accelerator = Accelerator(cpu=True)
    changes = {"dataset_name": ["texts"], "gradient_accumulation_steps": 8, "max_train_steps": 600} | changes
    args = train_clm.TrainArgs(**changes)
    steps = Steps(args, accelerator, range(rows), micro_batches)
    facts = {"launch": launch_facts(accelerator, "sdpa"), "model_type": model, "parameters": parameters,
             "size": "", "settings": vars(args), "script": train_clm.__file__}  # fmt: skip
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2, 2))])
    return "\n".join(start_lines(args, accelerator, steps, start, optimizer, facts)) + "\n"


def test_the_block_says_what_is_trained_on_what_and_multiplies_the_batch_out():
    text = block("gpt2", 124_000_000, start=100)
    assert "32 rows x 8 micro-batches x 1 process = 256 rows = 32,768 tokens per step\n" in text
    assert "600 steps = 19.7 M tokens = 0.154 passes over 1,000,000 rows\n" in text
    assert "gpt2 on texts, 124.0 M parameters, attention: sdpa" in text  # no longer from scratch
    assert "gpt2 from scratch on texts" in block("gpt2", 124_000_000)
    assert "target     1 process, cpu" in text and "float32" in text
    assert "continues at step 100, in runs/clm; stop it any time; the same command resumes it" in text
    assert "run        begins, in runs/clm" in block()
    assert "19.7 M tokens = 15.4 passes over 10,000 rows" in block(rows=10_000)
    new = dict(resume_from_checkpoint="none", model_name_or_path="runs/other", dataset_name=[*"abcde"])
    other = block("gpt2", **new)
    assert "ruin trained weights: try a twentieth, --learning_rate 0.002" in other
    assert "any time\n" in other and "weights of runs/other on a, b, c and 2 more" in other


def test_the_block_says_when_the_batch_changes():
    text = block(micro_batches=lambda step: 16 if step else 8)
    assert "32,768 tokens per step at first" in text and "600 steps = 39.3 M tokens" in text


def test_a_dashboard_has_its_line():
    assert "tracker    tensorboard --logdir runs/clm" in block(report_to=["tensorboard", "wandb"])
    assert "tracker " not in block()


def test_more_processes_than_devices_are_refused_with_the_number_to_use(monkeypatch):
    def check(processes, devices):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: devices)
        return launch_problems()

    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    [problem] = check(processes=4, devices=2)
    assert re.match(r"num_processes: 4 processes .* 2 devices.*--num_processes 2", problem)
    assert check(processes=2, devices=2) == check(processes=4, devices=0) == []  # 0: the CPU


@pytest.mark.parametrize("config", ["multi_gpu", "fsdp"])
def test_processes_that_form_no_group_are_refused(config, tmp_path):
    """A GPU configuration on a machine without GPUs starts N processes that each believe to be alone."""
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator: the launch is right")
    script = tmp_path / "script.py"
    script.write_text(
        "from accelerate import Accelerator\nfrom utils.launch import check_launch, launch_problems\n"
        "assert not launch_problems()\ncheck_launch(Accelerator(mixed_precision='no'))\nprint('trains')\n"
    )
    words = ["--config_file", f"accelerate_configs/{config}.yaml", "--num_processes", "2", str(script)]
    args = _validate_launch_command(launch_command_parser().parse_args(words))[0]
    env = prepare_multi_gpu_env(args) | environment()  # what the launcher hands on
    env.pop("ACCELERATE_USE_CPU", None)
    done = forked.run(str(script), [], processes=2, env=env)
    assert done.returncode != 0 and "trains" not in done.stdout
    assert re.search(r"2 processes were started, but each sees 1.*multi_cpu.yaml", done.stderr)


def test_fp16_on_xla_is_refused_with_the_settings(monkeypatch):
    monkeypatch.setattr("utils.launch.is_xla", lambda: True)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    assert re.match("mixed_precision: fp16 .* bf16 or no on XLA", launch_problems()[0])


def test_torch_tpu_is_refused_as_accelerate_would_train_on_the_cpu(monkeypatch, tmp_path):
    (tmp_path / "torch_tpu.py").touch()
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    assert not launch_problems()
    monkeypatch.syspath_prepend(tmp_path)
    assert re.match("torch_tpu: .*/tpu-requirements.txt .*/cpu.yaml", launch_problems()[0])
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert not launch_problems()


def test_each_doubt_about_devices_has_its_line_and_a_sound_launch_has_none(monkeypatch):
    assert "warning" not in block()
    monkeypatch.setattr("utils.display.start.has_bf16", lambda device: False)
    monkeypatch.setattr(Accelerator, "mixed_precision", "bf16")
    assert "warning    mixed_precision: bf16 is emulated and slow here" in block()
    monkeypatch.setattr("utils.display.start.device_name", str)
    monkeypatch.setattr(Accelerator, "device", torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    assert "warning    num_processes: 1 of 8 devices are used" in block()


def test_the_end_of_another_process_is_told_from_errors_of_our_own():
    """Texts as torch 2.13 raises them."""
    gloo = (
        "[/gloo/transport/tcp/pair.cc:537] Read error [10.77.0.2]:13958: Connection reset by peer. This is "
        "typically caused by a remote worker hanging or bugs in the application."
    )
    assert "Read error [10.77.0.2]:13958: Connection reset by peer. Its own" in lost_peer(RuntimeError(gloo))
    gone = RuntimeError("[/pair.cc:553] Connection closed by peer [10.77.0.1]:27549. This is typically")
    assert "gone: Connection closed by peer [10.77.0.1]:27549. Its own" in lost_peer(gone)
    assert lost_peer(RuntimeError("CUDA out of memory")) is None
    assert lost_peer(RuntimeError("the data ended at step 3 of 9")) is None


# Where "cuda" is meant as torch's name of a device type, not as "an accelerator".
MEANS_CUDA = {
    "utils/learning/optim.py": 1,  # where fused AdamW is known to obey found_inf
    "utils/learning/muon.py": 1,  # where bfloat16 is the fastest
    "utils/learning/kernels.py": 1,  # torch.backends.cuda switches the attention of CPUs, too
}


def test_no_code_says_cuda_where_it_means_an_accelerator():
    """ROCm is "cuda" to torch, others are not. Docstrings and comments may say it."""
    found = {}
    for path in [*PROJECT.glob("*.py"), *PROJECT.glob("data/**/*.py"), *PROJECT.glob("utils/**/*.py")]:
        tree = ast.parse(path.read_text())
        documented = [node for node in ast.walk(tree) if isinstance(node, DOCUMENTED)]
        docstrings = {ast.get_docstring(node, clean=False) for node in documented}
        for node in ast.walk(tree):
            named = isinstance(node, ast.Attribute) and node.attr == "cuda"
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if named or re.search(r"\bcuda\b", text) and text not in docstrings:
                name = str(path.relative_to(PROJECT))
                found[name] = found.get(name, 0) + 1
    assert found == MEANS_CUDA
