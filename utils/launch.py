"""What a launcher decides, and who decides it where there is none.

`python train_clm.py` runs what `accelerate launch` runs with the YAML file for this device: accelerate reads
the file, so an edit of it counts in both ways. ACCELERATE_* variables win, as do arguments that you give to
Accelerator(...) in a script.
"""

import dataclasses
import importlib.util
import os
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DataLoaderConfiguration, DistributedType, DynamoBackend, parse_flag_from_env
from accelerate.utils.launch import prepare_simple_launcher_cmd_env

from utils.devices import device_type, granted_cores, has_bf16, is_xla, local_processes

CONFIGS = Path(__file__).resolve().parent.parent / "accelerate_configs"
STANDS_IN = "STANDS_IN_FOR_LAUNCHER"  # a variable: the YAML file that was read in the place of a launcher
VISIBILITY = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
PRECISIONS = {"no": "float32", "bf16": "bfloat16 autocast", "fp16": "float16 autocast with loss scaling"}


def launcher_yaml() -> Path | None:
    """The file that counts. None under any launcher, on XLA, and where variables decide all of it."""
    decided = {"ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND"} <= os.environ.keys()
    if decided or "WORLD_SIZE" in os.environ or is_xla():
        return None
    return CONFIGS / {"cpu": "cpu.yaml", "mps": "mps.yaml"}.get(device_type(), "single_gpu.yaml")


def launcher_environment() -> dict[str, str]:
    """The variables of precision, compiler and GPU that `accelerate launch` would set, but for those that are
    set. {} where `launcher_yaml` is None. A GPU without bf16 gets fp16."""
    if "WORLD_SIZE" in os.environ and os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("-1"):
        return {"ACCELERATE_USE_CPU": "true"}  # multi_cpu.yaml hides the GPUs
    if not (path := launcher_yaml()):
        return {}
    words = ["--config_file", str(path), "--num_cpu_threads_per_process", "1", "train_clm.py"]
    try:
        args = _validate_launch_command(launch_command_parser().parse_args(words))[0]
        if args.mixed_precision == "bf16" and not has_bf16():
            args.mixed_precision = "fp16"
        environment = prepare_simple_launcher_cmd_env(args)[1]
    except Exception as error:  # of any kind, as people edit the file
        raise ValueError(f"{path} cannot be used: {error}; without a launcher its settings count") from None
    taken = ("ACCELERATE_MIXED", "ACCELERATE_DYNAMO", "CUDA_VISIBLE")
    names = [name for name in environment if name.startswith(taken) and name not in os.environ]
    return {STANDS_IN: str(path), **{name: environment[name] for name in names}}


def launch_options() -> dict:
    """For Accelerator(...): batches are copied to the device during its work. On a TPU accelerate's bf16
    turns weights and optimizer state into bfloat16, and its launcher does not pass the YAML's choice on: it
    gets "no", and `forward_on_xla` uses autocast. Elsewhere accelerate reads the environment."""
    options = {"dataloader_config": DataLoaderConfiguration(non_blocking=not is_xla())}
    if is_xla() and not is_xla(check_is_tpu=True):
        os.environ.setdefault("LOCAL_RANK", "0")  # else it is -1 on XLA's CPU: no process would print
    return options | ({"mixed_precision": "no"} if is_xla() else {})


def claim_threads() -> None:
    """As many threads as the launcher would give: physical cores, or one for a GPU. More than this process
    may use at a time would wait for each other, so the cores granted are a limit under a launcher, too."""
    threads, path = torch.get_num_threads(), os.environ.get(STANDS_IN)
    if path and not {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & os.environ.keys():
        threads = (psutil.cpu_count(logical=False) or threads) if path.endswith("cpu.yaml") else 1
    threads = min(threads, granted_cores())
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)


def launch_line(accelerator) -> str | None:
    """What counts where there is no launcher; None under one."""
    if not (path := os.environ.get(STANDS_IN)):
        return None
    plugin, precision = accelerator.state.dynamo_plugin, accelerator.mixed_precision
    facts = ["float32" if precision == "no" else precision, "not compiled"]
    if precision == "fp16" and not has_bf16():
        facts[0] += " as this GPU has no bf16"
    if plugin.backend != DynamoBackend.NO:
        facts[1] = f"{'blocks' if plugin.use_regional_compilation else 'model'} compiled"
    facts.append(counted(torch.get_num_threads(), "thread"))
    if path.endswith("cpu.yaml") and torch.get_num_threads() > 1 and psutil.cpu_percent(0.2) > 50:
        facts[-1] += " on busy cores: OMP_NUM_THREADS=1 may be faster"  # threads wait for each other
    return f"launch     no launcher: as accelerate_configs/{Path(path).name} ({', '.join(facts)})"


def launch_problems() -> list[str]:
    """What accelerate cannot start with, a line each: torch_tpu, precision, compiler, more processes than
    devices."""
    problems, precision = [], os.environ.get("ACCELERATE_MIXED_PRECISION") or "no"
    compiler = os.environ.get("ACCELERATE_DYNAMO_BACKEND") or "no"
    processes, devices = local_processes(), torch.accelerator.device_count()
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not devices
    if importlib.util.find_spec("torch_tpu") and not parse_flag_from_env("ACCELERATE_USE_CPU"):
        problems.append("torch_tpu: it is installed, and accelerate 1.15, which does not know it, would "
                        "train on the CPU. For a TPU install accelerate_configs/tpu-requirements.txt in an "
                        "environment without torch_tpu; for the CPU launch with accelerate_configs/cpu.yaml.")
    if precision not in PRECISIONS:
        problems.append(f"mixed_precision: {precision!r} is unknown, give no, bf16 or fp16.")
    elif precision == "fp16" and (on_cpu or is_xla()):
        problems.append("mixed_precision: fp16 needs an accelerator with loss scaling; give no on the CPU, "
                        "bf16 or no on XLA.")
    if compiler.upper() not in DynamoBackend.__members__:
        problems.append(f"dynamo_backend: {compiler!r} is unknown, give no or inductor.")
    if processes > devices and not on_cpu:  # some would fail with "invalid device ordinal"
        problems.append(f"num_processes: {processes} processes were started on this machine and it shows "
                        f"{counted(devices, 'device')}{hiding()}; each process needs its own. Launch with "
                        f"--num_processes {devices}.")
    return problems


def check_launch(accelerator) -> None:
    """ValueError if several processes were started and each takes itself for the only one (a GPU
    configuration without GPUs), if the environment makes accelerate divide each loss a second time, or if
    this torch is too old for accelerate's compilation of blocks under FSDP."""
    wait_on_cpus(accelerator)
    keep_losses_in_float32(accelerator)
    if line := launch_line(accelerator):
        accelerator.print(line)
    if (steps := accelerator.gradient_accumulation_steps) != 1:
        cause = f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS is {steps} in the environment"
        raise ValueError(f"{cause}: unset it, and give --gradient_accumulation_steps {steps} to the script.")
    plugin = accelerator.state.dynamo_plugin
    if accelerator.is_fsdp2 and plugin.backend != DynamoBackend.NO and plugin.use_regional_compilation:
        # accelerate 1.15 sets this option, which torch 2.9 lacks.
        if not hasattr(torch._dynamo.config, "skip_fwd_side_effects_in_bwd_under_checkpoint"):
            raise ValueError(f"dynamo_backend: torch {torch.__version__} cannot compile blocks under FSDP: "
                             "update it, or launch with --dynamo_backend no.")
    started = int(os.environ.get("WORLD_SIZE", 1))
    if started == accelerator.num_processes:
        return
    remedy = "On XLA launch with accelerate_configs/tpu.yaml: it starts one process per chip."
    if accelerator.distributed_type != DistributedType.XLA:
        remedy = (f"No accelerator is visible{hiding()}. On the CPU launch with accelerate_configs/cpu.yaml, "
                  "or multi_cpu.yaml for several processes.")
    raise ValueError(
        f"num_processes: {started} processes were started, but each sees {accelerator.num_processes}: they "
        f"form no group, would all train on the same data and overwrite each other's files. {remedy}"
    )


def wait_on_cpus(accelerator) -> None:
    """accelerate 1.15 passes GPU numbers to the barrier of processes that run on CPUs: it fails or hangs on a
    machine with fewer GPUs than processes."""
    if accelerator.num_processes > 1 and accelerator.device.type == "cpu":
        accelerator.wait_for_everyone = dist.barrier


def keep_losses_in_float32(accelerator) -> None:
    """accelerate 1.15 lets FSDP2 round to bfloat16 what the model returns: an evaluation's 5.7065 becomes
    5.7090, a training loss of 4.68 becomes 4.66."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    policy = getattr(plugin, "mixed_precision_policy", None)
    if getattr(policy, "output_dtype", None) is not None:
        plugin.mixed_precision_policy = dataclasses.replace(policy, output_dtype=None)


def counted(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith(("ss", "tch")) else "s")
    return f"{number:,.10g} {noun if number == 1 else plural}"


def hiding() -> str:
    """" (CUDA_VISIBLE_DEVICES=...)" if such a variable is set, else ""."""
    settings = [f"{name}={os.environ[name]!r}" for name in VISIBILITY if name in os.environ]
    return f" ({', '.join(settings)})" if settings else ""
