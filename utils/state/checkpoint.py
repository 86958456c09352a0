"""The complete training state on disk: written aside, checksummed, renamed; verified before it is loaded.

    checkpoints/step-00001000/
        model.safetensors      weights and buffers by name, tied ones once
        optimizer.safetensors  optimizer state, "name of the parameter/key"
        state.json             the script's extra, optimizer groups, random states of every process
        manifest.json          size and checksum of each file, written last

A sharded (FSDP) model has torch.distributed.checkpoint's files instead of the two safetensors. They load with
any number of processes, sharded or not. Other names in checkpoints/: .tmp-* is being written or deleted,
bad-* failed verification and goes with the next complete save, replaced-* is newer than the step this run was
told to start from and yours to delete. Every machine must see output_dir.
"""

import json
import logging
import os
import shutil
import threading
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import xxhash
from accelerate.utils import DistributedType, broadcast
from torch.utils._pytree import tree_map

from utils.state import training_state

logger = logging.getLogger(__name__)

SPARE_MEMORY = 1 << 30  # bytes that saving in the background leaves to others


class Checkpoints:
    """Saves to and loads from output_dir/checkpoints; all processes make the same calls.

    save_total_limit: complete checkpoints to keep, 0 or None for all. background: copy the state in memory
    and write it beside training where memory allows; the memory of the copy is kept for the next save.
    """

    def __init__(self, accelerator, output_dir, save_total_limit: int | None = 2, background: bool = True):
        self.accelerator = accelerator
        self.folder = Path(output_dir) / "checkpoints"
        self.save_total_limit = save_total_limit
        self.background = background
        self.last_good = None  # Path of the newest complete checkpoint
        self.failure = None  # why the newest save failed, None when it did not
        self._written = None  # (step, state.json) of last_good
        self._thread = None
        self._copies = {}  # {(file, tensor name): host memory}
        self._group = None  # gloo, for shards that are written beside training
        if accelerator.is_main_process:
            for stale in self.folder.glob(".tmp-*"):
                shutil.rmtree(stale, ignore_errors=True)

    # Saving

    def save(self, step: int, model, optimizer, extra: dict, final: bool = False) -> float:
        """Returns the seconds that training stood still. extra: JSON values and small tensors.

        A save that fails warns and returns, and the last good checkpoint stays. With final=True nothing is
        left to the background, and a failure raises RuntimeError on every process.
        """
        start = time.perf_counter()
        self.wait()
        accelerator = self.accelerator
        if accelerator.distributed_type == DistributedType.XLA:
            import torch_xla

            torch_xla.sync()
        optimizer = getattr(optimizer, "optimizer", optimizer)  # out of accelerate's wrapper
        background = self.background and not final
        scaler = accelerator.scaler
        state = {
            "step": step,
            "processes": accelerator.num_processes,
            "extra": extra,
            "scaler": scaler.state_dict() if scaler is not None else None,
            "random": training_state.gather_random_states(accelerator),
        }
        if training_state.reshard(model):
            if self._group is None and accelerator.num_processes > 1:
                self._group = dist.new_group(backend="gloo")
            tensors = training_state.shards(model, optimizer, cpu_offload=True)
            state["shards"] = list(tensors)
            if background and accelerator.device.type == "cpu":  # where offloading copies nothing
                tensors = tree_map(lambda value: value.clone() if torch.is_tensor(value) else value, tensors)
            self._run(background, step, _to_json(state), tensors, True)
        elif accelerator.is_main_process:
            state["groups"] = training_state.optimizer_groups(model, optimizer)
            text = _to_json(state)
            if (step, text) != self._written:
                tensors = _tensors_by_file(model, optimizer)
                background = background and self._copy_to_host(tensors)
                self._run(background, step, text, tensors, False)
        if final:
            self._raise_if_failed()
        return time.perf_counter() - start

    def reserve(self, model, optimizer) -> None:
        """Take the memory that background saves copy into: the first save would, and stall twice as long."""
        if self.background and self.accelerator.is_main_process and not training_state.reshard(model):
            self._copy_to_host(_tensors_by_file(model, getattr(optimizer, "optimizer", optimizer)))

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, background, *arguments):
        if background:
            # Not a daemon: when the script fails, the interpreter still waits for the checkpoint.
            self._thread = threading.Thread(target=self._write, args=arguments, name="checkpoint")
            self._thread.start()
        else:
            self._write(*arguments)

    @torch.no_grad()
    def _copy_to_host(self, tensors) -> bool:
        """Replace the tensors by copies, in memory that is kept: fresh pages cost more than the copying."""
        pin = self.accelerator.device.type not in ("cpu", "mps", "xla")
        places = [(file, name) for file, named in tensors.items() for name in named]
        missing = sum(tensors[file][name].nbytes for file, name in places if (file, name) not in self._copies)
        needed = missing * 2 if pin else missing  # torch pins memory in powers of two
        if missing and available_memory() < needed + SPARE_MEMORY:
            logger.warning("no memory for a copy of %s: training waits for its checkpoints", _size(missing))
            self.background = False
            return False
        for file, name in places:
            tensor = tensors[file][name]
            if (file, name) not in self._copies:
                self._copies[file, name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin)
            tensors[file][name] = self._copies[file, name].copy_(tensor, non_blocking=pin)
        if pin:
            torch.accelerator.synchronize()
        return True

    def _write(self, step, text, tensors, sharded):
        name = f"step-{step:08d}"
        aside = self.folder / f".tmp-{name}"
        self.failure = None
        try:
            aside.mkdir(parents=True, exist_ok=True)
            if sharded:
                files = training_state.save_shards(aside, tensors, self.accelerator, self._group)
            else:
                files = {
                    file: training_state.write_file(aside / file, training_state.safetensors_chunks(named))
                    for file, named in tensors.items()
                }
            if not self.accelerator.is_main_process:
                return
            files["state.json"] = training_state.write_file(aside / "state.json", [text.encode()])
            manifest = {"step": step, "torch": torch.__version__, "files": files}
            manifest["checksum"] = _checksum(manifest)
            training_state.write_file(aside / "manifest.json", [json.dumps(manifest, indent=1).encode()])
            _sync_folder(aside)
            self._delete(self.folder / name)  # there when a run has started again from an older step
            aside.rename(self.folder / name)
            _sync_folder(self.folder)
            self.last_good, self._written = self.folder / name, (step, text)
            keep = self.save_total_limit or 0
            for path in (*list_checkpoints(self.folder)[:-keep], *self.folder.glob("bad-*")):
                self._delete(path)
        except Exception as error:  # whatever it is, training is worth more than this checkpoint
            self.failure = error
            if self.accelerator.is_main_process:
                shutil.rmtree(aside, ignore_errors=True)
                logger.warning("%s was not saved: %s. %s", name, _reason(error), self._where())

    def _delete(self, path):
        """Renamed before: a half deleted checkpoint must not look like a damaged one."""
        if path.exists():
            aside = path.with_name(f".tmp-old-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)

    def _where(self):
        return f"The last good checkpoint is {self.last_good or 'missing'}"

    def _raise_if_failed(self):
        failed = torch.tensor([int(self.failure is not None)]).to(self.accelerator.device)
        if self.accelerator.num_processes > 1:
            failed = self.accelerator.gather(failed)
        if any(failed.tolist()):
            raise RuntimeError(f"the last state was not saved: {_reason(self.failure)}. {self._where()}")

    # Loading

    def load(self, resume_from: str, model, optimizer, check=None) -> dict | None:
        """Restore model, optimizer and random states. Returns the extra given to save, None at the beginning.

        resume_from: "auto" for the newest valid checkpoint, with a warning about newer ones that are damaged;
        "none"; or a checkpoint's path. check(extra) is called before anything is restored and may raise.
        Raises ValueError when the path, or every checkpoint there is, is invalid, or when it does not fit.
        """
        self.wait()
        folder = self._choose(resume_from)
        extra, step = None, -1
        if folder is not None:
            state = _from_json((folder / "state.json").read_text())
            extra, step = state["extra"], state["step"]
            if check is not None:
                check(extra)
            optimizer = getattr(optimizer, "optimizer", optimizer)
            training_state.restore(folder, model, optimizer, state)
            if state["scaler"] is not None and self.accelerator.scaler is not None:
                self.accelerator.scaler.load_state_dict(state["scaler"])
            if self.accelerator.process_index < len(state["random"]):
                mine = state["random"][self.accelerator.process_index]
                training_state.set_random_state(mine, self.accelerator.device)
            self.last_good = folder
            self.reserve(model, optimizer)
        if self.accelerator.is_main_process:
            for path in list_checkpoints(self.folder):
                if _step(path) > step:
                    logger.warning("%s is newer than this start: renamed to replaced-%s", path, path.name)
                    _set_aside(path, "replaced-")
        self.accelerator.wait_for_everyone()
        return extra

    def _choose(self, resume_from) -> Path | None:
        """The verified checkpoint to load: the main process looks, all return the same."""
        if resume_from == "none":
            return None
        auto = resume_from == "auto"
        chosen, problem, damaged = None, "", []
        if self.accelerator.is_main_process:
            for path in _candidates(self.folder, resume_from):
                problem = find_problem(path)
                if not problem:
                    chosen = path
                    break
                damaged.append((path, problem))
            if auto and chosen:
                for path, what in damaged:
                    logger.warning("%s is damaged (%s): going back to %s", path, what, chosen)
                    _set_aside(path, "bad-")
        step = _step(chosen) if auto and chosen else -1
        if self.accelerator.num_processes > 1:
            found = torch.tensor([step, bool(problem)], device=self.accelerator.device)
            step, bad = broadcast(found).tolist()
            problem = problem or ("see the main process" if bad else "")
        if problem and auto:
            raise ValueError(
                f"no checkpoint in {self.folder} is valid ({problem}): repair one, or start from the "
                "beginning with --resume_from_checkpoint none"
            )
        if problem:
            there = ", ".join(path.name for path in list_checkpoints(self.folder)) or "none"
            raise ValueError(f"resume_from_checkpoint {resume_from}: {problem}. In {self.folder}: {there}")
        if auto:
            return self.folder / f"step-{step:08d}" if step >= 0 else None
        return Path(resume_from)


def _tensors_by_file(model, optimizer) -> dict[str, dict]:
    return {
        "model.safetensors": training_state.named_tensors(model),
        "optimizer.safetensors": training_state.optimizer_tensors(model, optimizer),
    }


def _candidates(folder, resume_from: str) -> list[Path]:
    """What resume_from may mean, the first choice first; nothing is verified."""
    if resume_from == "none":
        return []
    return list_checkpoints(folder)[::-1] if resume_from == "auto" else [Path(resume_from)]


def list_checkpoints(folder) -> list[Path]:
    """Complete checkpoints by their names, oldest first; nothing is verified."""
    return sorted(Path(folder).glob("step-" + "[0-9]" * 8))


def find_problem(folder: Path) -> str:
    """What is wrong with a checkpoint; "" when every file has the size and checksum of the manifest."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        if manifest.pop("checksum") != _checksum(manifest):
            return "manifest.json: wrong checksum"
        for name, entry in manifest["files"].items():
            size = (folder / name).stat().st_size
            if size != entry["bytes"]:
                return f"{name}: {size} bytes instead of {entry['bytes']}"
            if training_state.checksum_file(folder / name) != entry:
                return f"{name}: wrong checksum"
    except OSError as error:
        return f"{Path(error.filename or folder).name}: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return "manifest.json: not readable"
    return ""


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _set_aside(path: Path, prefix: str):
    target = path.with_name(prefix + path.name)
    shutil.rmtree(target, ignore_errors=True)
    path.rename(target)


def _checksum(value) -> str:
    return xxhash.xxh3_128(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _sync_folder(path: Path):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _to_json(state) -> str:
    return json.dumps(state, default=lambda t: {"tensor": t.tolist(), "dtype": str(t.dtype)[len("torch.") :]})


def _from_json(text):
    def hook(value):
        if value.keys() != {"tensor", "dtype"}:
            return value
        return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))

    return json.loads(text, object_hook=hook)


# Before training


def disk_space(output_dir, model, save_total_limit: int | None) -> tuple[bool, str]:
    """Whether the disk has room for the checkpoints of a run with AdamW, and a sentence that says so.

    Call it before the model is sharded. While a checkpoint is written, save_total_limit complete ones are
    there too; the model for users is also replaced by a new file.
    """
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    count = (save_total_limit or 1) + 1
    needed = 3 * weights * count + 2 * weights
    folder = Path(output_dir).absolute()
    own = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free + own
    text = f"{count} checkpoints of {_size(3 * weights)} and the model need {_size(needed)} in {output_dir}"
    if needed <= free:
        return True, f"{text}; {_size(free)} are free"
    return False, f"{text}, but {_size(free)} are free: choose another output_dir or lower save_total_limit"


def changed_settings(saved: dict, now: dict, may_change: set[str]) -> list[str]:
    """A line for each setting that differs and may not: "learning_rate: 0.0005 in the run, 0.001 now"."""
    lines = [
        f"{name}: {saved.get(name, 'missing')} in the run, {now.get(name, 'missing')} now"
        for name in sorted((saved.keys() | now.keys()) - may_change)
        if name not in saved or name not in now or saved[name] != now[name]
    ]
    first = f"{now['output_dir']} holds a run with other settings: give these, or another output_dir"
    return [first, *lines] if lines else []


def other_run(args: dict, may_change: set[str]) -> list[str]:
    """changed_settings against the checkpoint that these settings would continue from, told before any work.

    What cannot be read says nothing here: `load` verifies it, and compares what only the data tell.
    """
    found = _candidates(Path(args["output_dir"]) / "checkpoints", args["resume_from_checkpoint"])
    try:
        saved = json.loads((found[0] / "state.json").read_text())["extra"]["settings"]
        return changed_settings({name: saved[name] for name in args}, args, may_change)
    except (IndexError, KeyError, OSError, TypeError, ValueError):
        return []


def available_memory() -> int:
    """Bytes that can be taken now: of the machine, or of this container (cgroup v2)."""
    free = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())  # "max" without a limit
        return min(free, limit - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        return free


def _reason(error) -> str:
    return "see the main process" if error is None else str(error) or repr(error)


def _size(count) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
