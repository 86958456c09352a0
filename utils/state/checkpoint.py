"""The complete training state on disk: written aside, checksummed, renamed; verified before it is loaded.

    checkpoints/step-00001000/
        model.safetensors      weights and buffers by name, tied ones once; with config.json and tokenizer,
                               so that from_pretrained and pipeline() of transformers load it too
        optimizer.safetensors  and one such file for each other kept thing that has tensors
        state.json             everything else: JSON values of the kept things and of the run
        manifest.json          size and checksum of each file, written last

A sharded thing (FSDP) has a folder with a safetensors file of each process instead. All load with any number
of processes, sharded or not, and nothing that is read back can run code. Other names in checkpoints/: .tmp-*
is being written or deleted; bad-* is damaged, and deleted at the next save; replaced-* is newer than the step
that the run was told to resume from, and never deleted. Every machine must see output_dir.
"""

import json
import logging
import shutil
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException; of a full disk
from torch.distributed.tensor import DTensor

from utils.devices import free_memory, local_processes
from utils.io.files import flush, seal, set_aside, verify_checksums, write_file
from utils.state import folders, training_state
from utils.state.files import safetensors_chunks, transformers_names, write_shards
from utils.state.training_state import bare_optimizer, gather_json
from utils.xla import sync

logger = logging.getLogger(__name__)

WRITER = "checkpoint"  # name of the thread that writes in the background
SPARE_MEMORY = 1 << 30  # bytes that must stay free beside the copies of background saves


class Checkpoints:
    """Saves to and loads from output_dir/checkpoints. All processes make the same calls.

    save_total_limit: how many complete checkpoints are kept, not counting the one of kept_step."""

    def __init__(self, accelerator, output_dir, save_total_limit: int = 2, kept_step: int = 0):
        self.accelerator, self.folder = accelerator, Path(output_dir) / "checkpoints"
        self.save_total_limit, self.kept_step = save_total_limit, kept_step
        self.background = True  # copy the state in memory and write it during training, if memory allows
        self.last_good = None  # Path of the newest complete checkpoint
        self.origin = None  # {"run": name, "step": step} of the checkpoint that was loaded, if another run's
        self.failure = None  # message of the newest save, if it failed
        self._origins = []  # paths given to --resume_from_checkpoint from which this run descends
        self._thread = None  # writes in the background
        self._copies = {}  # {(thing, tensor name): host memory}
        self._group = None  # gloo, for shards that are written during training
        for left in self.folder.glob(".tmp-*") if accelerator.is_main_process else ():
            complete = self.folder / left.name.removeprefix(".tmp-")
            if left.name.startswith(".tmp-step-") and not complete.exists() and not verify_checksums(left):
                left.rename(complete)  # the run was killed just before it did this
            else:
                shutil.rmtree(left, ignore_errors=True)

    # Saving

    def save(self, step: int, model, keep: dict, extra: dict, final: bool = False, beside=()) -> None:
        """keep: {name: what has state_dict and load_state_dict}; extra: JSON values; beside: (name, bytes) of
        more files. A save that fails logs a warning, and the last good checkpoint stays. final: write it
        before returning, and raise RuntimeError on every process if it fails."""
        self.wait()
        accelerator, scaler = self.accelerator, self.accelerator.scaler
        sync()
        trees, tensors, sharded = self._collect(model, keep)
        state = dict(format=folders.FORMAT, step=step, processes=accelerator.num_processes, extra=extra,
                     origins=self._origins, keep=trees, scaler=scaler and scaler.state_dict(),
                     classes={name: _class_name(thing) for name, thing in keep.items()})
        if sharded and self._group is None and accelerator.num_processes > 1:
            self._group = dist.new_group(backend="gloo")
        if sharded or accelerator.is_main_process:
            files = [*beside, ("state.json", json.dumps(state).encode())]
            arguments = step, files, tensors, sharded
            if self.background and not final and self._copy_to_host(tensors, sharded):
                # Not a daemon: when the script fails, the interpreter and entry_point still wait for it.
                self._thread = threading.Thread(target=self._write, args=arguments, name=WRITER)
                self._thread.start()
            else:
                self._write(*arguments)
        if final and any(gather_json(accelerator, self.failure is not None)):
            cause = self.failure or "see the main process"
            raise RuntimeError(f"{self.folder}: the state of step {step} was not saved: {cause}")

    def reserve(self, model, keep: dict) -> None:
        """Allocate buffers for background saves now, or the first save stalls three times as long."""
        if self.background:
            self._copy_to_host(*self._collect(model, keep)[1:])

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._thread:
            self._thread.join()

    def _collect(self, model, keep) -> tuple[dict, dict, set]:
        """{name: tree}, {name: {path: tensor}} of the model and kept things; names of sharded things."""
        if "model" in keep:
            raise ValueError("keep: the name model is the model's own; give yours another name")
        training_state.reshard(model)
        trees, tensors = {}, {}
        for name, thing in {"model": model, **keep}.items():
            state = training_state.collect_state(thing, model)
            if thing is not model and not bare_optimizer(thing):
                state = training_state.gather_differing(self.accelerator, *state)
            trees[name], tensors[name] = state
        sharded = {n for n, named in tensors.items() if any(isinstance(t, DTensor) for t in named.values())}
        return trees, tensors, sharded

    @torch.no_grad()
    def _copy_to_host(self, tensors, sharded) -> bool:
        """Replace the tensors by copies; False if there is too little memory.

        Unsharded tensors go into reused buffers: new pages cost more than the copy."""
        main = self.accelerator.is_main_process
        pin = self.accelerator.device.type not in ("cpu", "mps", "xla")
        whole = [(name, path) for name in tensors if main and name not in sharded for path in tensors[name]]
        missing = sum(tensors[name][path].nbytes for name, path in whole if (name, path) not in self._copies)
        missing *= 2 if pin else 1  # torch pins memory in powers of two
        shards = (training_state.local(tensor) for name in sharded for tensor in tensors[name].values())
        needed = missing + local_processes() * sum(shard.nbytes for shard in shards)
        if needed and free_memory() < needed + SPARE_MEMORY:
            message = "no memory for a copy of %s: training waits while checkpoints are written"
            logger.warning(message, folders.size_text(needed))
            self.background = False
            return False
        for name, path in whole:
            tensor = tensors[name][path]
            if (name, path) not in self._copies:
                self._copies[name, path] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin)
            tensors[name][path] = self._copies[name, path].copy_(tensor, non_blocking=pin)
        for name in sharded:
            tensors[name] = {path: value.to("cpu", copy=True) for path, value in tensors[name].items()}
        if pin:
            torch.accelerator.synchronize()
        return True

    def _write(self, step, small_files, tensors, sharded):
        main, name = self.accelerator.is_main_process, f"step-{step:08d}"
        aside, complete, files, self.failure = self.folder / f".tmp-{name}", self.folder / name, {}, None
        try:
            aside.mkdir(parents=True, exist_ok=True)
            for thing, named in tensors.items():
                if thing in sharded:
                    files |= write_shards(aside, thing, named, self.accelerator, self._group)
                elif main and named:
                    file = f"{thing}.safetensors"
                    named = transformers_names(named) if thing == "model" else named
                    files[file] = write_file(aside / file, safetensors_chunks(named))
            if not main:
                return
            files |= {file: write_file(aside / file, [content]) for file, content in small_files}
            seal(aside, files, step=step, torch=torch.__version__)
            if complete.exists():  # the same step was saved before
                set_aside(complete, ".tmp-old-")
            aside.rename(complete)
            flush(self.folder)
            self.last_good = complete
            old = folders.list_checkpoints(self.folder)[: -self.save_total_limit]
            for path in (*old, *self.folder.glob("bad-*")):
                if path.name != f"step-{self.kept_step:08d}":
                    set_aside(path, ".tmp-old-")  # half deleted it must not look like a damaged one
            for path in self.folder.glob(".tmp-old-*"):
                shutil.rmtree(path, ignore_errors=True)
        except (Exception, CheckpointException) as error:  # training goes on without this checkpoint
            good = f". The last good checkpoint is {self.last_good}" if self.last_good else ""
            self.failure = f"{str(error) or repr(error)}{good}"
            if main:
                shutil.rmtree(aside, ignore_errors=True)
                logger.warning("%s was not saved: %s", name, self.failure)

    # Loading

    def load(self, resume_from: str, model, keep: dict, check=None) -> dict | None:
        """Restore the model and kept things. Returns the extra that was saved, None without a checkpoint.

        resume_from: "auto" for the newest valid checkpoint; "none"; or a checkpoint's path. A path means the
        newest checkpoint that descends from it, if any, so that the same command resumes. check(extra) may
        raise before anything is loaded. ValueError if no checkpoint is valid, or it does not fit."""
        self.wait()
        extra, step = None, -1
        if folder := self._choose(resume_from):
            state = folders.read_state(folder)
            extra, step, self._origins = state["extra"], state["step"], state.get("origins", [])
            if check:
                check(extra)
            training_state.reshard(model)
            things = {"model": model, **keep}
            for name in restore_kept(folder, state, things, model, self.accelerator.process_index):
                logger.warning("%s: not in %s, so it starts anew", name, folder)
            for name in state["keep"].keys() - things.keys():
                logger.warning("%s: in %s, but no longer in keep", name, folder)
            if state["scaler"] and self.accelerator.scaler:
                self.accelerator.scaler.load_state_dict(state["scaler"])
            origin = folders.origin_path(self.folder, resume_from)
            if resume_from != "auto" and origin not in self._origins:
                self._origins.append(origin)
            self.last_good = folder
            if folder.resolve().parent != self.folder.resolve():
                self.origin = {"run": folders.run_name(folder), "step": step}
        if self.accelerator.is_main_process:
            folders.set_aside_newer(folders.list_checkpoints(self.folder), step)
        self.accelerator.wait_for_everyone()
        return extra

    def _choose(self, resume_from) -> Path | None:
        """The verified checkpoint to load. The main process chooses, all return the same."""
        chosen, problem, damaged = "", "", {}
        main = self.accelerator.is_main_process
        for chosen in folders.candidates(self.folder, resume_from) if main else ():
            if not (problem := verify_checksums(chosen)):
                break
            damaged[chosen] = problem
        for path, damage in {} if problem else damaged.items():
            logger.warning("%s is damaged (%s): going back to %s", path, damage, chosen)
            set_aside(path, "bad-")
        if chosen and not problem and resume_from != "auto" and chosen != Path(resume_from):
            logger.warning("%s descends from %s: resuming there", chosen, resume_from)
        chosen, problem = gather_json(self.accelerator, [str(chosen), problem])[0]
        if problem:
            there = ", ".join(path.name for path in folders.list_checkpoints(self.folder)) or "none"
            raise ValueError(f"resume_from_checkpoint {resume_from}: no checkpoint is valid ({problem}). In "
                             f"{self.folder}: {there}. Repair one, or start from the beginning with "
                             "--resume_from_checkpoint none")
        return Path(chosen) if chosen else None


def restore_average(args, accelerator, model, keep: dict) -> None:
    """Restores the modules of `keep`, such as an average of the weights, from the newest valid checkpoint of
    output_dir, if its model is evaluated. Prints which are missing. Writes nothing."""
    modules = {name: thing for name, thing in keep.items() if isinstance(thing, torch.nn.Module)}
    evaluated = modules and args.model_name_or_path == args.output_dir
    paths = folders.candidates(Path(args.output_dir, "checkpoints"), "auto") if evaluated else []
    folder = next((path for path in paths if not verify_checksums(path)), None)
    state = folders.read_state(folder) if folder else {"keep": {}}
    for name in restore_kept(folder, state, modules, model, accelerator.process_index):
        accelerator.print(f"warning: no checkpoint here has {name}: it is evaluated as new", file=sys.stderr)


def restore_kept(folder: Path | None, state: dict, things: dict, model, process: int) -> list[str]:
    """Restore things {name: model or kept thing} from a verified checkpoint with this state.json. Returns the
    names that it lacks. ValueError for what does not fit or cannot be read."""
    for name, tree in state["keep"].items():  # in the same order on all processes
        if name not in things:
            continue
        thing, was = things[name], state["classes"].get(name)
        if thing is not model and was != (now := _class_name(thing)):
            other = f"{name} is a {was} in {folder}, and a {now} now"
            raise ValueError(f"keep: {other}; {training_state.ANOTHER}")
        if isinstance(tree, dict) and (trees := tree.get("__processes__")):
            tree = trees[process % len(trees)]  # there may be more processes now
        try:
            training_state.restore(folder, name, thing, tree, model)
        except ValueError:
            raise
        except Exception as error:  # its checksums are right, but its content is not
            cause = f"{type(error).__name__}: {error}"
            raise ValueError(f"{folder} is damaged: {name} cannot be restored ({cause}). Move it away to "
                             "resume from the one before it") from error
    return sorted(things.keys() - state["keep"].keys())


def _class_name(thing) -> str:
    return type(bare_optimizer(thing) or thing).__name__
