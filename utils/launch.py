"""What a launcher decides, and who decides it where there is none.

`python train_clm.py` runs what `accelerate launch` runs with the YAML file for this device. The file itself
is read, so an edit of it counts in both ways. ACCELERATE_* variables win, as do arguments that you give to
Accelerator(...) in a script.
"""

import os
from itertools import pairwise
from pathlib import Path

import psutil
import torch
import yaml
from accelerate.utils import (
    DistributedType,
    DynamoBackend,
    TorchDynamoPlugin,
    parse_flag_from_env,
    patch_environment,
)

from utils import patches
from utils.devices import device_type, granted_cores, local_processes
from utils.xla import is_xla

CONFIGS = Path(__file__).resolve().parent.parent / "accelerate_configs"
DEFAULTS = {"mixed_precision": "no", "dynamo_backend": "no"}
OURS = {**DEFAULTS, "dynamo_use_dynamic": "no"}  # the launcher hands on this one although no file names it
THREADS = "OMP_NUM_THREADS", "MKL_NUM_THREADS"
VISIBILITY = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
PRECISIONS = {"no": "float32", "bf16": "bfloat16 autocast", "fp16": "float16 autocast with loss scaling"}


def launcher_yaml() -> Path | None:
    """The file that counts. None under any launcher, on XLA, and where variables decide all of it."""
    decided = all(f"ACCELERATE_{name.upper()}" in os.environ for name in DEFAULTS)
    if decided or "WORLD_SIZE" in os.environ or is_xla():
        return None
    return CONFIGS / {"cpu": "cpu.yaml", "mps": "mps.yaml"}.get(device_type(), "single_gpu.yaml")


def launcher_settings() -> dict[str, str]:
    """mixed_precision, dynamo_backend and the other dynamo_...: from the environment, else from the file."""
    settings = dict(DEFAULTS)
    if path := launcher_yaml():
        content = _read(path)
        content |= content.pop("dynamo_config", None) or {}
        settings = OURS | {name: "no" if value is False else str(value) for name, value in content.items()
                           if name == "mixed_precision" or name.startswith("dynamo_")}  # fmt: skip
        if settings["mixed_precision"] == "bf16" and not _has_bf16():
            settings["mixed_precision"] = "fp16"
    prefix = "ACCELERATE_"
    given = {name.removeprefix(prefix).lower(): value for name, value in os.environ.items()
             if name.startswith((prefix + "MIXED", prefix + "DYNAMO"))}  # fmt: skip
    return settings | given


def _read(path: Path) -> dict:
    try:
        return yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read: {error}; without a launcher its settings count") from None


def _has_bf16() -> bool:
    """False for GPUs that would emulate it, slowly (NVIDIA's before Ampere)."""
    ask = getattr(torch.get_device_module(), "is_bf16_supported", None)
    return ask is None or ask(including_emulation=False)


def launch_options() -> dict:
    """Precision and compiler for Accelerator(...): {} where accelerate takes them from its launcher.

    On a TPU accelerate's bf16 turns weights and optimizer state into bfloat16, and its launcher does not pass
    the YAML's choice on. So on XLA accelerate gets "no", and utils/xla.py uses autocast."""
    if is_xla():
        if not is_xla(check_is_tpu=True):
            os.environ.setdefault("LOCAL_RANK", "0")  # else it is -1 on XLA's CPU: no process would print
        return {"mixed_precision": "no"}
    if not launcher_yaml():
        return {}
    settings = launcher_settings()
    with patch_environment(**{f"ACCELERATE_{name}": value for name, value in settings.items()}):
        return {"mixed_precision": settings["mixed_precision"], "dynamo_plugin": TorchDynamoPlugin()}


def claim_hardware() -> None:
    """Before the first GPU is looked for: choose threads and GPU as the launcher would.

    accelerate's launcher sets as many threads as there are physical cores, for a GPU one. More than this
    process may use at a time would wait for each other, so the cores granted are a limit under it, too."""
    if launcher_yaml() and "CUDA_VISIBLE_DEVICES" not in os.environ:
        wanted = str(_read(CONFIGS / "single_gpu.yaml").get("gpu_ids") or "all")
        if wanted != "all":
            os.environ["CUDA_VISIBLE_DEVICES"] = wanted
    threads = torch.get_num_threads()
    if (path := launcher_yaml()) and not any(name in os.environ for name in THREADS):
        physical = psutil.cpu_count(logical=False) or threads
        threads = physical if path.name == "cpu.yaml" else 1
    threads = min(threads, granted_cores())
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)


def launch_line(accelerator) -> str | None:
    """What counts where there is no launcher; None under one."""
    if not (path := launcher_yaml()):
        return None
    plugin, precision = accelerator.state.dynamo_plugin, accelerator.mixed_precision
    asked, threads = _read(path).get("mixed_precision"), torch.get_num_threads()
    facts = ["float32" if precision == "no" else precision, f"{threads} thread" + "s" * (threads > 1)]
    if precision == "fp16" and asked == "bf16":
        facts[0] += " as this GPU has no bf16"
    what = "blocks" if plugin.use_regional_compilation else "model"
    facts.insert(1, "not compiled" if plugin.backend.value == "NO" else f"{what} compiled")
    return f"launch     no launcher: as {path.parent.name}/{path.name} ({', '.join(facts)})"


def check_devices() -> None:
    """Before the Accelerator is made: ValueError if this machine has more processes than accelerators, as
    some would fail with "invalid device ordinal". `check_launch` deals with machines without any."""
    processes, devices = local_processes(), torch.accelerator.device_count()
    if processes > devices > 0 and not parse_flag_from_env("ACCELERATE_USE_CPU"):
        raise ValueError(
            f"num_processes: {processes} processes were started on this machine and it shows "
            f"{counted(devices, 'device')}{hiding()}; each process needs its own. Launch with "
            f"--num_processes {devices}."
        )


def check_launcher() -> None:
    """ValueError if the launcher's precision, compiler or number of processes cannot be used here."""
    settings, path = launcher_settings(), launcher_yaml()
    (precision, of_precision), (compiler, of_compiler) = (
        (settings[name], "from the launcher" if f"ACCELERATE_{name.upper()}" in os.environ else f"in {path}")
        for name in DEFAULTS
    )
    if precision not in PRECISIONS:
        raise ValueError(f"mixed_precision: {precision!r} {of_precision}; give no, bf16 or fp16.")
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    if precision == "fp16" and (on_cpu or is_xla()):
        raise ValueError(f"mixed_precision: fp16 {of_precision} needs an accelerator with loss scaling; "
                         "give no on the CPU, bf16 or no on XLA.")
    if compiler.upper() not in DynamoBackend.__members__:
        raise ValueError(f"dynamo_backend: {compiler!r} {of_compiler}; give no or inductor.")
    if (asked := processes_asked()) > 1 and "WORLD_SIZE" not in os.environ and not is_xla():
        raise ValueError(
            f"num_processes: accelerate starts one process with this YAML file, not {asked}; launch with "
            "accelerate_configs/multi_gpu.yaml, whose first lines show how to start several CPU processes."
        )


def processes_asked() -> int:
    """--num_processes in the command of `accelerate launch`; 1 if there is none, or another parent."""
    try:
        command = psutil.Process().parent().cmdline()
    except (psutil.Error, AttributeError):  # AttributeError: no parent
        return 1
    words = " ".join(command).replace("=", " ").split()
    numbers = [number for flag, number in pairwise(words) if flag in ("--num_processes", "--num-processes")]
    return int(numbers[-1]) if "launch" in words and numbers and numbers[-1].isdecimal() else 1


def check_launch(accelerator) -> None:
    """ValueError if several processes were started and each takes itself for the only one (a GPU
    configuration without GPUs), or if the environment makes accelerate divide each loss a second time."""
    patches.wait_on_cpus(accelerator)
    if line := launch_line(accelerator):
        accelerator.print(line)
    if (steps := accelerator.gradient_accumulation_steps) != 1:
        cause = f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS is {steps} in the environment"
        raise ValueError(f"{cause}: unset it, and give --gradient_accumulation_steps {steps} to the script.")
    started = int(os.environ.get("WORLD_SIZE", 1))
    if started == accelerator.num_processes:
        return
    remedy = "On XLA launch with accelerate_configs/tpu.yaml: it starts one process per chip."
    if accelerator.distributed_type != DistributedType.XLA:
        flags = "set ACCELERATE_USE_CPU=true and give --mixed_precision no --dynamo_backend no"
        cpu = f"launch with accelerate_configs/cpu.yaml, or for several processes {flags}"
        remedy = f"No accelerator is visible{hiding()}. On the CPU {cpu}."
    raise ValueError(
        f"num_processes: {started} processes were started, but each sees {accelerator.num_processes}: they "
        f"form no group, would all train on the same data and overwrite each other's files. {remedy}"
    )


def counted(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith(("ss", "tch")) else "s")
    return f"{number:,.10g} {noun if number == 1 else plural}"


def hiding() -> str:
    """" (CUDA_VISIBLE_DEVICES=...)" if such a variable is set, else ""."""
    settings = [f"{name}={os.environ[name]!r}" for name in VISIBILITY if name in os.environ]
    return f" ({', '.join(settings)})" if settings else ""
