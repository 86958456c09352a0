"""Saves and loads the complete training state.

    checkpoints/step-00001000/
        model.safetensors  weights and buffers by transformers' names; tied weights are stored once
        config.json ...    with the tokenizer's files, so that from_pretrained and pipeline() load the folder
        state.safetensors  the tensors of the optimizer and of all other objects
        state.json         their other values, and the settings
        manifest.json      size and checksum of each file, written last

A checkpoint is written under a temporary name, then renamed. Its checksums are verified before it is loaded.
Under FSDP each process writes its shards: model-00001-of-00008.safetensors. A checkpoint can be loaded by any
number of processes, with or without FSDP, and loading it never runs code from it. Every machine must see
output_dir. Other names in checkpoints/:
    .tmp-*       is being written or deleted
    bad-*        is damaged; the next save deletes it
    replaced-*   belongs to an earlier run, which --resume_from_checkpoint none replaced; it is never deleted
"""

import json
import logging
import shutil
from pathlib import Path

import torch
from accelerate.utils import gather_object
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException
from torch.distributed.tensor import DTensor

from utils.devices import sync
from utils.io.files import flush, seal, write_file
from utils.io.mistakes import RunFailed, on_main_process
from utils.io.text import without_secrets
from utils.state import resume, stateful
from utils.state.tensors import describe_tensors, part_to_write, read_tensors, safetensors_chunks

logger = logging.getLogger(__name__)

# Files of the model in output_dir that a checkpoint copies: pipeline() reads them.
MODEL_FILES = ("tokenizer*.json", "generation_config.json")


class Checkpoints:
    """Saves to and loads from output_dir/checkpoints. All processes make the same calls.

    rows_fingerprint: identifies the training rows. may_change: settings that may differ at a resume.
    objects: model=..., and modules, optimizers, torch.Generators or objects with state_dict and
    load_state_dict. What is not sharded is saved by the main process.

    Locks output_dir until the process ends. ValueError if another run uses it, or if an object cannot be
    saved."""

    def __init__(self, args, accelerator, steps, rows_fingerprint: str, may_change, **objects):
        self.args, self.accelerator, self.steps = args, accelerator, steps
        self.fingerprint, self.may_change = rows_fingerprint, set(may_change)
        objects = objects if accelerator.scaler is None else {"scaler": accelerator.scaler} | objects
        self.objects = {name: stateful.as_stateful(name, obj) for name, obj in objects.items()}
        self.model, self.folder = objects["model"], Path(args.output_dir, "checkpoints")
        self._lock = None  # the main process holds it until it ends
        self._exported = False  # whether the model and the tokenizer in output_dir are those of this run
        sharded = any(isinstance(tensor, DTensor) for tensor in self.model.state_dict().values())
        self._writers = accelerator.num_processes if sharded else 1
        on_main_process(accelerator, self._open)

    def _open(self):
        self._lock = resume.lock_output_dir(self.args.output_dir)
        for unfinished in self.folder.glob(".tmp-*"):  # of a killed run
            shutil.rmtree(unfinished, ignore_errors=True)

    def save(self, step: int, stopping: bool = False) -> None:
        """Saves the state after `step` steps and returns when it is on the disk, or at once if this step has
        been saved before.

        If that fails, it warns and keeps the older checkpoints. RunFailed on all processes if it fails at
        step 0 or when the run is stopping, or if a weight is not finite."""
        folder = self.folder / f"step-{step:08d}"
        if on_main_process(self.accelerator, folder.exists):
            return
        sync()
        records, parts, finite = self._collect()
        if self.accelerator.num_processes > 1:
            finite = self.accelerator.gather(torch.tensor([finite], device=self.accelerator.device)).all()
        if not finite:
            raise RunFailed(f"weights are not finite after step {step}, so they were not saved; "
                            f"{self._newest()}. Lower the learning rate, or look at the last rows")
        state = {"format": resume.FORMAT, "step": step, "things": records}
        state |= resume.describe_experiment(self.args, self.steps, step, self.fingerprint)
        temporary = folder.with_name(f".tmp-{folder.name}")
        written = [self._write(temporary, parts)]
        if self._writers > 1:
            written = gather_object(written)
        failure = on_main_process(self.accelerator, self._complete, temporary, folder, state, written)
        if failure and (step == 0 or stopping):
            raise RunFailed(f"{folder} was not saved: {failure}; {self._newest()}")
        self._exported = True  # the script exports the model after each checkpoint

    def _newest(self) -> str:
        complete = resume.list_checkpoints(self.folder)
        return f"the last good checkpoint is {complete[-1]}" if complete else "there is no checkpoint"

    def _collect(self) -> tuple[dict, dict, bool]:
        """Returns {object: JSON values}, {name: (tensor, offsets)} that this process writes, and whether all
        weights among these tensors are finite."""
        records, parts, sums = {}, {}, []
        stateful.reshard(self.model)
        for name, obj in self.objects.items():
            records[name], tensors = stateful.collect_state(name, obj, self.model)
            for key, tensor in tensors.items():
                if part := part_to_write(tensor, self.accelerator.is_main_process):
                    parts[key] = part
                    if obj is self.model and isinstance(tensor, torch.nn.Parameter):
                        sums.append(part[0].sum(dtype=torch.float32))  # isfinite takes ten times as long
        return records, parts, not sums or bool(torch.stack(sums).isfinite().all())

    def _write(self, folder: Path, parts: dict) -> tuple[dict, str]:
        """Writes this process's tensors. Returns {file: size and checksum}, and why it failed or ""."""
        shard = f"-{self.accelerator.process_index + 1:05d}-of-{self._writers:05d}" * (self._writers > 1)
        entries = {}
        try:
            for kind in ("model", "state"):
                if named := {key: part for key, part in parts.items() if ("/" in key) == (kind == "state")}:
                    folder.mkdir(parents=True, exist_ok=True)
                    file = f"{kind}{shard}.safetensors"
                    entries[file] = write_file(folder / file, safetensors_chunks(named))
        except Exception as error:  # save reports it after every process has written
            return {}, str(error) or repr(error)
        return entries, ""

    def _complete(self, temporary: Path, folder: Path, state: dict, written: list) -> str:
        """Completes the checkpoint once all processes have written their tensors. Returns why it could not
        be saved, or ""."""
        failure = next((failure for _, failure in written if failure), "")
        try:
            if not failure:
                entries = {file: entry for entries, _ in written for file, entry in entries.items()}
                files = {"state.json": json.dumps(state).encode()} | self._model_files()
                entries |= {name: write_file(temporary / name, [data]) for name, data in files.items()}
                seal(temporary, entries)
                temporary.rename(folder)
                flush(self.folder)
                resume.delete_old(self.folder, self.args.save_total_limit)
        except Exception as error:  # training goes on without this checkpoint
            failure = "" if folder.exists() else str(error) or repr(error)
        if failure:
            shutil.rmtree(temporary, ignore_errors=True)
            logger.warning("%s was not saved: %s; %s", folder.name, failure, self._newest())
        return failure

    def _model_files(self) -> dict:
        """{file name: content} that from_pretrained and pipeline need beside the weights."""
        model, files = self.accelerator.unwrap_model(self.model, keep_torch_compile=False), {}
        if config := getattr(getattr(model, "lm", None), "config", None):
            files["config.json"] = without_secrets(config.to_json_string()).encode()
        for pattern in MODEL_FILES if self._exported else ():
            files |= {path.name: path.read_bytes() for path in Path(self.args.output_dir).glob(pattern)}
        return files

    def load(self) -> int:
        """Restores all objects from the checkpoint that resume_from_checkpoint selects. Returns its step, or
        0 in a new run.

        ValueError on all processes if no checkpoint is valid, or if its settings, rows or tensors differ from
        those of this run."""
        step = 0
        if chosen := on_main_process(self.accelerator, resume.choose_checkpoint, self.folder, self.args):
            step, self._exported = self._restore(Path(chosen)), Path(chosen).parent == self.folder
        return step

    def _restore(self, folder) -> int:
        try:
            state, targets = resume.read_state(folder), {}
            saved, stored = state["things"], describe_tensors(folder)
            resume.check_experiment(state, self.args, self.steps, self.fingerprint, self.may_change,
                                    self.objects.get("schedule"))
            objects = self._objects_in(saved, folder)
            stateful.reshard(self.model)
            for name, obj in objects.items():
                targets |= stateful.find_targets(name, obj, saved[name], stored, self.model)
            read_tensors(folder, targets)
            for name, obj in objects.items():
                stateful.restore_state(obj, saved[name], targets)
            return state["step"]
        except resume.CheckpointMismatch as error:
            raise ValueError(f"{folder} {error}") from error
        except (Exception, CheckpointException) as error:  # wrong content with valid checksums
            raise ValueError(f"{folder} cannot be restored ({type(error).__name__}: {error}). Move it away, "
                             "to resume from an older one") from error

    def _objects_in(self, saved: dict, folder: Path) -> dict:
        """The objects that the checkpoint has. Warns of the others."""
        if self.accelerator.is_main_process:
            for name in sorted(self.objects.keys() - saved.keys()):
                logger.warning("%s is not in %s, so it starts from its initial state", name, folder)
            for name in sorted(saved.keys() - self.objects.keys()):
                logger.warning("%s is in %s, but was not passed to Checkpoints", name, folder)
        return {name: obj for name, obj in self.objects.items() if name in saved}
