"""Precision, compiler and threads: set by `accelerate launch`, or read from the YAML file of this device.

`python train_clm.py` runs as `accelerate launch` would with accelerate_configs/cpu.yaml, mps.yaml or
single_gpu.yaml, and edits of that file have their effect in both. ACCELERATE_* variables, and arguments of
Accelerator(...) in a script, win over the file.
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
from utils.state.stop_signals import keep_alive

CONFIGS = Path(__file__).resolve().parent.parent / "accelerate_configs"
STANDS_IN = "STANDS_IN_FOR_LAUNCHER"  # variable with the YAML file that is read if there is no launcher
VISIBILITY = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
PRECISIONS = {"no": "float32", "bf16": "bfloat16 autocast", "fp16": "float16 autocast with loss scaling"}


def launcher_yaml() -> Path | None:
    """The YAML file of this device. None under a launcher, on XLA, and if the environment sets precision and
    compiler."""
    all_set = {"ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND"} <= os.environ.keys()
    if all_set or "WORLD_SIZE" in os.environ or is_xla():
        return None
    return CONFIGS / {"cpu": "cpu.yaml", "mps": "mps.yaml"}.get(device_type(), "single_gpu.yaml")


def launcher_environment() -> dict[str, str]:
    """The variables for precision, compiler and GPU that `accelerate launch` would set and that are not yet
    set; {} if there is no `launcher_yaml`. A GPU without bf16 gets fp16."""
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
    except Exception as error:  # people edit the file: errors of any type
        raise ValueError(f"{path}, which is read as there is no launcher, is not valid: {error}") from None
    prefixes = ("ACCELERATE_MIXED", "ACCELERATE_DYNAMO", "CUDA_VISIBLE")
    names = [name for name in environment if name.startswith(prefixes) and name not in os.environ]
    return {STANDS_IN: str(path), **{name: environment[name] for name in names}}


def launch_options() -> dict:
    """Options of Accelerator(...). Batches are copied to the device while it computes. accelerate reads the
    precision from the environment, but on XLA it gets "no", and `forward_on_xla` uses autocast: accelerate's
    bf16 would turn weights and optimizer state into bfloat16."""
    options = {"dataloader_config": DataLoaderConfiguration(non_blocking=not is_xla())}
    if is_xla() and not is_xla(check_is_tpu=True):
        os.environ.setdefault("LOCAL_RANK", "0")  # -1 on XLA's CPU device: no process would print
    return options | ({"mixed_precision": "no"} if is_xla() else {})


def claim_threads() -> None:
    """Sets the number of threads as a launcher does: the physical cores, or one if a GPU computes. Never more
    than the cores granted to this process, also under a launcher: more threads would wait for each other."""
    threads, path = torch.get_num_threads(), os.environ.get(STANDS_IN)
    if path and not {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & os.environ.keys():
        threads = (psutil.cpu_count(logical=False) or threads) if path.endswith("cpu.yaml") else 1
    threads = min(threads, granted_cores())
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)


def launch_line(accelerator) -> str | None:
    """The line about precision, compiler and threads if there is no launcher; None under a launcher."""
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
    source = f"settings of accelerate_configs/{Path(path).name}, as there is no launcher"
    return f"launch     {source}: {', '.join(facts)}"


def launch_problems() -> list[str]:
    """A line for each reason why accelerate cannot start: torch_tpu, precision, compiler, processes."""
    problems, precision = [], os.environ.get("ACCELERATE_MIXED_PRECISION") or "no"
    compiler = os.environ.get("ACCELERATE_DYNAMO_BACKEND") or "no"
    processes, devices = local_processes(), torch.accelerator.device_count()
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not devices
    if importlib.util.find_spec("torch_tpu") and not parse_flag_from_env("ACCELERATE_USE_CPU"):
        problems.append("torch_tpu: it is installed, but accelerate 1.15 does not support it and would train "
                        "on the CPU. For a TPU install accelerate_configs/tpu-requirements.txt in an "
                        "environment without torch_tpu; for the CPU launch with accelerate_configs/cpu.yaml.")
    if precision not in PRECISIONS:
        problems.append(f"mixed_precision: {precision!r} is unknown, give no, bf16 or fp16.")
    elif precision == "fp16" and (on_cpu or is_xla()):
        problems.append("mixed_precision: fp16 needs an accelerator with loss scaling; give no on the CPU, "
                        "bf16 or no on XLA.")
    if compiler.upper() not in DynamoBackend.__members__:
        problems.append(f"dynamo_backend: {compiler!r} is unknown, give no or inductor.")
    if processes > devices and not on_cpu:  # some would fail with "invalid device ordinal"
        problems.append(f"num_processes: {processes} processes were started on this machine, which has "
                        f"{counted(devices, 'device')}{hiding()}; each process needs its own. Launch with "
                        f"--num_processes {devices}.")
    return problems


def check_launch(accelerator) -> None:
    """ValueError if several processes were started but form no group (a GPU configuration without GPUs), if
    the environment makes accelerate divide each loss a second time, or if this torch is too old for
    accelerate's compilation of blocks under FSDP."""
    keep_alive(accelerator)
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
        f"form no group, and would train on the same data and overwrite each other's files. {remedy}"
    )


def wait_on_cpus(accelerator) -> None:
    """Replaces accelerate 1.15's barrier on CPUs: it passes GPU numbers, and so fails or hangs on a machine
    with fewer GPUs than processes."""
    if accelerator.num_processes > 1 and accelerator.device.type == "cpu":
        accelerator.wait_for_everyone = dist.barrier


def keep_losses_in_float32(accelerator) -> None:
    """Keeps FSDP2 from rounding the model's outputs to bfloat16, as accelerate 1.15 asks it to: an evaluation
    loss of 5.7065 would become 5.7090, a training loss of 4.68 would become 4.66."""
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
