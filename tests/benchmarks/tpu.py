"""What a training step needs on a TPU, by the TPU's own compiler, on a machine without one.

    python3.11 -m venv .venv-tpu && .venv-tpu/bin/pip install -r accelerate_configs/tpu-requirements.txt
    .venv-tpu/bin/python -m tests.benchmarks.tpu train_clm.py --preset codeparrot --dataset_name texts/ ...
    .venv-tpu/bin/python -m tests.benchmarks.tpu --chip v6e --plain false train_mlm.py ...

The script runs with these flags on XLA's CPU device. Its graphs with a forward pass are recorded instead of
computed, and their results are zeros. libtpu compiles each graph for a v5e or v6e and reports bytes moved,
memory and products. For comparison it compiles a plain loop with transformers: the same model and rows,
clipping and AdamW. A graph takes half a minute to some minutes.
"""

import argparse
import gc
import hashlib
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.measure import PROJECT

CHIPS = {  # topology, peak products (bfloat16) and memory per second, GB of memory; cloud.google.com/tpu/docs
    "v5e": ("v5e:1x1", 197e12, 819e9, 16), "v6e": ("v6e:1x1", 918e12, 1640e9, 32),
}  # fmt: skip
SHORT = dict(  # settings of the recorded run: steps without optimizer state, and with it
    max_train_steps=3, num_train_epochs=1, max_eval_samples=1, eval_steps=3, save_steps=3, logging_steps=1,
    num_warmup_steps=1, prompts="none", report_to="none", save_total_limit=1, eval_at_start="false",
)  # fmt: skip
HEADINGS = "graph|GB moved|temporaries|arguments|results|in all, GB|TFLOP|ms of products, memory"


class Recorder:
    """Writes the StableHLO of each graph with a forward pass to `folder` instead of computing it."""

    def __init__(self, folder: Path):
        import torch
        import torch_xla
        import torch_xla.core.xla_model as xm
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self.torch, self.xla, self.xm, self.compute = torch, torch_xla, xm, torch_xla.sync
        self.folder, self.forward, self.stepped, self.names = folder, None, False, {}
        torch.nn.modules.module.register_module_forward_hook(self._forward)
        register_optimizer_step_post_hook(self._step)
        torch_xla.sync = self.sync

    def _forward(self, module, *_):
        if not hasattr(module, "lm"):  # not the loss module around the model
            return
        self.forward = "training" if self.torch.is_grad_enabled() else "evaluation"
        config = module.lm.config.to_dict() | {"_attn_implementation": "sdpa"}
        (self.folder / "model.json").write_text(json.dumps([type(module.lm).__name__, config], default=str))

    def _step(self, *_):
        self.stepped = True

    def sync(self, *args, **options):
        if self.forward is None:
            return self.compute(*args, **options)
        text, name = self.xm.get_stablehlo_bytecode([]), self.forward
        if name == "training":
            name = "step" if self.stepped else "micro-batch"
        digest = hashlib.sha256(text).hexdigest()[:8]
        if digest not in self.names:
            self.names[digest] = f"{len(self.names) + 1}-{name}"
            (self.folder / f"{self.names[digest]}.mlir").write_bytes(text)
        self.forward, self.stepped = None, False
        self._take_zeros()

    def _take_zeros(self):
        torch = self.torch
        tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
        tensors = [x for x in tensors if x.device.type == "xla"]
        tensors += [x.grad for x in tensors if x.is_leaf and x.grad is not None]
        tensors = list({id(x): x for x in tensors}.values())
        pending = self.xla._XLAC._check_tensor_need_materialization(tensors)
        for tensor, wait in zip(tensors, pending, strict=True):
            if wait:
                tensor.data = torch.zeros(tensor.shape, dtype=tensor.dtype).to(tensor.device)


def lower_for_tpus():
    """Make torch_xla lower its kernels for a TPU instead of this machine."""
    import inspect

    import torch_xla.experimental.custom_kernel as kernels
    from jax._src.interpreters import mlir
    from jax.experimental.pallas.ops.tpu import flash_attention as _  # noqa: F401  jax wants this order

    source, before = inspect.getsource(kernels.trace_pallas), ".lower(*jax_args, **kwargs)"
    assert before in source
    after = ".trace(*jax_args, **kwargs).lower(lowering_platforms=('tpu',), _private_parameters=EXPORT)"
    kernels.EXPORT = mlir.LoweringParameters(for_export=True)
    exec(source.replace(before, after), kernels.__dict__)


def record(folder: str, script: str, *flags: str) -> None:
    """Record the graphs of a script; runs in a separate process."""
    Recorder(Path(folder))
    import utils.devices

    utils.devices.is_tpu = lambda: True
    lower_for_tpus()
    sys.argv = [script, *flags]
    runpy.run_path(script, run_name="__main__")


def record_plain(folder: str, rows: str, tokens: str) -> None:
    """Record two steps of the plain loop with the model of model.json; runs in a separate process."""
    recorder = Recorder(Path(folder))
    import torch
    import torch_xla
    import transformers

    name, config = json.loads((Path(folder).parent / "ours" / "model.json").read_text())
    model_class = getattr(transformers, name)
    model, device = model_class(model_class.config_class.from_dict(config)), torch_xla.device()
    model.to(device)
    model.tie_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    recorder.compute()
    ids = torch.ones(int(rows), int(tokens), dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    if "PreTraining" in name:  # sentence pairs, padded
        mask = (torch.arange(ids.shape[1]) < ids.shape[1] - 1) * ids
        batch |= {"attention_mask": mask, "token_type_ids": ids, "next_sentence_label": ids[:, 0]}
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    for _ in range(2):
        with torch.autocast("xla", dtype=torch.bfloat16):
            loss = model(**batch).loss
        recorder.forward = "training"
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()


def compile_graph(file: str, chip: str) -> None:
    """Print what a graph needs; in a separate process, as jax and torch_xla cannot share a libtpu."""
    import numpy as np
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir
    from jax.experimental import topologies
    from jaxlib import xla_client as xc

    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=CHIPS[chip][0], chips_per_host_bounds=(1, 1, 1), num_slices=1
    )
    device, options = topology.devices[0], xc.CompileOptions()
    options.num_replicas = options.num_partitions = 1
    options.device_assignment = xc.DeviceAssignment.create(np.array([[0]]))
    with mlir.make_ir_context():
        module = xc._xla.mlir.deserialize_portable_artifact(Path(file).read_bytes())
        module = ir.Module.parse(module) if isinstance(module, (str, bytes)) else module
        bytecode, devices = mlir.module_to_bytecode(module), xc._xla.DeviceList((device,))
        try:
            executable = device.client.compile(bytecode, devices, options)
        except xc._xla.XlaRuntimeError as error:
            if not (used := re.search(r"Used ([\d.]+)G of ([\d.]+)G hbm", str(error))):
                raise
            return print(json.dumps({"in all, GB": float(used[1]) * 2**30 / 1e9}))
    memory, cost = executable.get_compiled_memory_stats(), executable.cost_analysis()
    cost = cost[0] if isinstance(cost, list) else cost
    temporaries, arguments, results = (getattr(memory, f"{kind}_size_in_bytes") / 1e9
                                       for kind in ("temp", "argument", "output"))  # fmt: skip
    _, products, moved, _ = CHIPS[chip]
    print(json.dumps({
        "GB moved": cost["bytes accessed"] / 1e9, "temporaries": temporaries, "arguments": arguments,
        "results": results, "in all, GB": temporaries + arguments + results, "TFLOP": cost["flops"] / 1e12,
        "ms of products, memory": [1e3 * cost["flops"] / products, 1e3 * cost["bytes accessed"] / moved],
    }))  # fmt: skip


def run_part(*words, **environment) -> str:
    """Run a part of this module in a separate process. Returns its output."""
    command = [sys.executable, "-m", "tests.benchmarks.tpu", *map(str, words)]
    env = os.environ | environment
    done = subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit status {done.returncode}\n{done.stderr[-3000:]}")
    return done.stdout


TRACING = {"PJRT_DEVICE": "CPU", "LOCAL_RANK": "0", "ACCELERATE_MIXED_PRECISION": "bf16"}
COMPILING = {  # no look for a TPU machine's metadata
    "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1", "TPU_WORKER_HOSTNAMES": "localhost",
}  # fmt: skip


def main() -> None:
    plain_text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain_text)
    parser.add_argument("--chip", choices=CHIPS, default="v5e")
    parser.add_argument("--plain", choices=("true", "false"), default="true", help="the plain loop, too")
    parser.add_argument("--folder", help="where the graphs stay")
    parser.add_argument("script")
    args, flags = parser.parse_known_args()
    folder = Path(args.folder or tempfile.mkdtemp())
    for name in ("ours", "plain"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    short = [word for name, value in SHORT.items() for word in (f"--{name}", str(value))]
    run = ["--cache_dir", str(folder / "cache"), "--output_dir", str(folder / "run")]
    output = run_part("--record", folder / "ours", args.script, *flags, *short, *run, **TRACING)
    print(re.search(r"model  .*", output)[0], re.search(r"batch  .*", output)[0], sep="\n", flush=True)
    if args.plain == "true":
        rows, tokens = re.search(r"(\d+) rows? x .* = ([\d,]+) rows = ([\d,]+) tokens", output).group(1, 3)
        total = int(re.search(r"= ([\d,]+) rows", output)[1].replace(",", ""))
        run_part("--plain-loop", folder / "plain", rows, int(tokens.replace(",", "")) // total, **TRACING)
    print("| " + HEADINGS.replace("|", " | ") + " |\n" + "|---" * len(HEADINGS.split("|")) + "|", flush=True)
    for file in sorted((folder / "ours").glob("*.mlir")) + sorted((folder / "plain").glob("*.mlir"))[-1:]:
        needs = json.loads(run_part("--compile", file, args.chip, **COMPILING).splitlines()[-1])
        numbers = [needs.get(heading, ()) for heading in HEADINGS.split("|")[1:]]  # some unknown if too large
        cells = [", ".join(f"{x:.0f}" for x in n) if isinstance(n, Sequence) else f"{n:.2f}" for n in numbers]
        cells[5] += "" if needs["in all, GB"] <= CHIPS[args.chip][3] else f", above {CHIPS[args.chip][3]}"
        print("| " + " | ".join([f"{file.parent.name}: {file.stem}", *cells]) + " |", flush=True)


PARTS = {"--record": record, "--plain-loop": record_plain, "--compile": compile_graph}

if __name__ == "__main__":
    PARTS[sys.argv[1]](*sys.argv[2:]) if sys.argv[1:2] and sys.argv[1] in PARTS else main()
