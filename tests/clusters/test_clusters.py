"""accelerate_configs/clusters and the line in docs/clusters.md: as their projects read them, and run here on
two processes that are killed and resume in the same folder, which on a cluster is mounted.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from tests import forked
from tests.runs import PROJECT, TINY, arguments, environment, kill_family, metrics, write_corpus

CLUSTERS = PROJECT / "accelerate_configs/clusters"
NEEDED = "in an environment with tests/clusters/requirements.txt"
PAGE = (PROJECT / "docs/clusters.md").read_text()
HF = re.search(r"^hf jobs run .*$", PAGE, re.M)[0]


def test_kubeflow_takes_the_train_job():
    """Its models drop what they do not know, so nothing may be missing afterwards."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason=NEEDED)
    job = yaml.safe_load((CLUSTERS / "trainjob.yaml").read_text())
    assert models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job
    job["spec"]["podTemplateOverrides"] = []  # 2.2 has dropped it
    assert models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() != job


def test_skypilot_takes_the_task():
    sky = pytest.importorskip("sky", reason=NEEDED)
    task = sky.Task.from_yaml(str(CLUSTERS / "skypilot.yaml"))
    (resources,) = task.resources
    assert resources.use_spot and resources.accelerators == {"H100": 8}
    assert resources.job_recovery["max_restarts_on_errors"] == 3
    assert list(task.storage_mounts) == ["/runs"]
    text = (CLUSTERS / "skypilot.yaml").read_text()
    with pytest.raises(ValueError):
        sky.Task.from_yaml_str(text.replace("use_spot", "use_spots"))


def test_hf_takes_the_line():
    env = environment(HF_TOKEN="hf_none", HF_HUB_OFFLINE="0")
    line = [str(Path(sys.executable).with_name("hf")), *shlex.split(HF)[1:]]
    if not Path(line[0]).exists():
        pytest.skip("no huggingface_hub")
    told = subprocess.run([*line[:3], "--help"], env=env, capture_output=True, text=True).stdout
    if "--dry-run" not in told:
        pytest.skip("an older huggingface_hub")
    done = subprocess.run([*line[:3], "--dry-run", *line[3:]], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for told in "a100x4", "attempts  5", "torchrun --nproc_per_node 4", "HF_TOKEN=***":
        assert told in done.stdout


def command(kind, flags) -> str:
    """What each of them runs, with flags after it; only the number of processes is another."""
    words = shlex.join(flags)
    if kind == "kubeflow":
        job = yaml.safe_load((CLUSTERS / "trainjob.yaml").read_text())
        return f"{shlex.join(job['spec']['trainer']['command'])} {words}"
    if kind == "skypilot":
        return f"{yaml.safe_load((CLUSTERS / 'skypilot.yaml').read_text())['run']} {words}"
    if kind == "hf":
        line = shlex.split(HF)[-1].split(" && ")[-1]
        return f"{line.replace('per_node 4', 'per_node 2')} {words}"
    return f"bash accelerate_configs/clusters/elastic.sh train_clm.py --preset gpt2-124m {words}"


def start(kind, flags, log, port, **more):
    """The launchers: two of elastic.sh, as on two machines of one GPU, of the others one."""
    env = environment(2, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    env |= {"ACCELERATE_MIXED_PRECISION": "no", "SKYPILOT_NUM_GPUS_PER_NODE": "2"}
    env |= {"HOST": "127.0.0.1", "PORT": str(port), "NODES": "1:2", "GPUS": "1", "PROCESSES": "2"}
    env |= {"RENDEZVOUS": "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"} | more
    if kind == "kubeflow":  # as its controller sets them
        env |= {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "0"}
        env |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}
    with open(log, "w") as out:
        line = ["bash", "-c", command(kind, flags)]
        return [subprocess.Popen(line, cwd=PROJECT, env=env, stdout=out, stderr=out)
                for _ in range(2 if kind == "elastic" else 1)]  # fmt: skip


def kill(launcher):
    kill_family(launcher.pid)
    launcher.wait(60)


def flags_of(folder, output_dir, **more):
    settings = {**TINY, "preset": "laptop", "dataset_name": folder / "corpus.jsonl", "max_train_steps": 200,
                "per_device_train_batch_size": 4, "save_steps": 10, "eval_steps": 100, "prompts": ["none"],
                "cache_dir": folder / "cache", "output_dir": folder / output_dir, **more}  # fmt: skip
    return arguments(settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With an unbroken run on two processes."""
    folder = tmp_path_factory.mktemp("clusters")
    write_corpus(folder / "corpus.jsonl", 30)
    log = folder / "log"
    forked.finish(forked.start_all(PROJECT, "train_clm.py", flags_of(folder, "unbroken"), log, 2), log, 600)
    return folder


def wait_for(told, launchers, log):
    until = time.monotonic() + 240
    while not told():
        assert time.monotonic() < until and launchers[0].poll() is None, log.read_text()[-4000:]
        time.sleep(0.02)


@pytest.mark.parametrize("kind", [
    pytest.param("kubeflow", marks=pytest.mark.slow), pytest.param("elastic", marks=pytest.mark.slow),
    pytest.param("skypilot", marks=pytest.mark.sweep), pytest.param("hf", marks=pytest.mark.sweep),
])  # fmt: skip
def test_killed_it_goes_on(folder, kind):
    """From a checkpoint after step 0, to the records of the unbroken run."""
    log, port, checkpoints = folder / f"log-{kind}", 29400 + os.getpid() % 1000, folder / kind / "checkpoints"
    launchers = start(kind, flags_of(folder, kind), log, port)
    wait_for(lambda: any(checkpoints.glob("step-*[1-9]*/manifest.json")), launchers, log)
    for launcher in launchers:
        kill(launcher)
    assert metrics(folder / kind)[-1]["step"] < 200
    launchers = start(kind, flags_of(folder, kind), log, port + 1)
    statuses = [launcher.wait(240) for launcher in launchers]
    assert statuses == [0] * len(launchers), log.read_text()[-4000:]
    assert metrics(folder / kind) == metrics(folder / "unbroken")


@pytest.mark.slow
def test_one_machine_less_and_the_other_goes_on_with_twice_the_micro_batches(folder):
    log, port = folder / "log-less", 29600 + os.getpid() % 1000
    launchers = start("elastic", flags_of(folder, "less", max_train_steps=600), log, port)
    wait_for(lambda: any((folder / "less/checkpoints").glob("step-*")), launchers, log)
    owner = min(launchers, key=lambda launcher: not listens(launcher, port))
    (other,) = [launcher for launcher in launchers if launcher is not owner]
    kill(other)
    assert owner.wait(300) == 0, log.read_text()[-4000:]
    steps = [line["step"] for line in metrics(folder / "less") if "loss/train" in line]
    assert steps == list(range(1, 601))
    assert json.loads((folder / "less/args.json").read_text())["settings"]["gradient_accumulation_steps"] == 2


@pytest.mark.slow
def test_a_number_of_processes_that_does_not_divide_the_rows_waits_for_another(tmp_path):
    """Rather than train with other rows per step, or be refused and started again a hundred times."""
    log, port = tmp_path / "log", 29500 + os.getpid() % 1000
    launchers = start("elastic", flags_of(tmp_path, "run"), log, port, PROCESSES="3")
    try:
        wait_for(lambda: "PROCESSES: 3 is no multiple of 2" in log.read_text(), launchers, log)
        launchers[0].send_signal(signal.SIGTERM)  # it is torchrun itself that waits
        assert launchers[0].wait(60) != 0
        assert not (tmp_path / "run").exists()
    finally:
        for launcher in launchers:
            if launcher.poll() is None:
                kill(launcher)


def listens(launcher, port):
    """Whether it, or what it has started, is the one that others meet at."""
    family = [psutil.Process(launcher.pid), *psutil.Process(launcher.pid).children(recursive=True)]
    ends = [end for process in family for end in process.net_connections("tcp")]
    return any(end.laddr.port == port and end.status == "LISTEN" for end in ends)
