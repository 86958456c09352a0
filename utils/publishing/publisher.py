"""One queue of snapshots, and one thread that uploads them during training: model, milestones, checkpoints.

A newer snapshot of a branch replaces the one that waits. A milestone is a snapshot with a tag: it is never
replaced, and is uploaded after the others. A push to the Hub is one commit, complete and of one step.

Data loader workers that are forked during an HTTP call of the thread can deadlock: start them before it.
"""

import math
import os
import queue
import random
import shlex
import shutil
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from glob import glob
from itertools import chain
from pathlib import Path

from huggingface_hub.utils import disable_progress_bars, filter_repo_objects

from utils.display.progress import readable
from utils.io.retry import SILENCE, diagnose
from utils.publishing.export import list_milestones
from utils.publishing.remote import BESIDE, CHECKPOINTS, MILESTONES, Bucket, Hub
from utils.state.folders import list_checkpoints, step_of


@dataclass
class Snapshot:
    """Files of one step that no longer change. They become one commit, or one checkpoint in a bucket."""

    step: int
    branch: str
    folder: Path
    names: list[str]  # paths in the folder and in the repository
    message: str
    tag: str = ""  # of a milestone, which is uploaded from its own folder
    tries: int = 0
    state: str = ""  # the last event: retry, replaced, failed, done
    error: str = ""  # of the last try

    @property
    def slot(self) -> str:
        """Only one snapshot of a slot waits, the newest."""
        return self.tag or self.branch


class Publisher:
    """Exists on all processes, of which the first pushes. Call `poll` at every log interval and after
    `finish`. Neither the network nor a full disk ends the run.

    models: where the model and milestones go; checkpoints: where training states go; None: nowhere."""

    say = print  # called by `poll` and `finish` with messages for the user
    status = ""  # a few words for the progress line

    def __init__(self, output_dir, models: Hub | None = None, checkpoints: Hub | Bucket | None = None):
        self.output_dir, self.models, self.checkpoints = Path(output_dir), models, checkpoints
        self.remotes = {"main": models, MILESTONES: models, CHECKPOINTS: checkpoints}
        self.snapshots = self.output_dir / ".hub"  # on the same disk, so that weights can be hard links
        self.events = queue.SimpleQueue()  # records for metrics.jsonl
        self.last_error = ""  # that the user has been told
        self.changed = threading.Condition()  # guards what follows
        self.newest: dict[str, Snapshot] = {}  # by slot
        self.waiting: dict[str, Snapshot] = {}  # by slot
        self.uploading: Snapshot | None = None
        self.failures, self.next_try = 0, 0.0  # in a row; time of the next try
        self.asked = 0.0  # seconds that the Hub asked us to wait
        self.longest_wait, self.finished = 60, False

    def start(self) -> "Publisher":
        """On the first process, in a locked output_dir."""
        shutil.rmtree(self.snapshots, ignore_errors=True)  # left by a killed run
        if self.models or self.checkpoints:
            os.environ.setdefault("HF_XET_CLIENT_READ_TIMEOUT", f"{SILENCE}s")  # default: 300 s for each try
            disable_progress_bars()  # they would overwrite ours
            threading.Thread(target=self._work, name="uploads", daemon=True).start()
        return self

    # ---- On the caller's thread

    def push(self, step: int, metrics: dict[str, float | None] | None = None) -> None:
        """Push the files of output_dir, all of one step, to the main branch, and new milestones."""
        if self.models:
            names = self._files("*", "best/*")
            names = [*filter_repo_objects(names, ignore_patterns=unpublished(self.output_dir))]
            known = {name: value for name, value in (metrics or {}).items() if value is not None}
            message = ", ".join([f"Step {step}", *(f"{name} {readable(known[name])}" for name in known)])
            self._snapshot(step, "main", names, message)
            self.push_milestones()

    def push_milestones(self) -> None:
        """Push the milestones of output_dir that this process has not pushed yet, or that failed."""
        for folder in list_milestones(self.output_dir) if self.models else ():
            tag, names = folder.name, sorted(path.name for path in folder.iterdir())
            if tag not in self.newest or self.newest[tag].state == "failed":
                self._put(Snapshot(step_of(folder), MILESTONES, folder, names, f"Milestone {tag}", tag))

    def poll(self) -> list[dict]:
        """The events since the last call, as records for metrics.jsonl. Tells the user each new failure.

        Also pushes the newest checkpoint, as checkpoints are completed in the background at any time."""
        self._push_checkpoint()
        events = [self.events.get() for _ in range(self.events.qsize())]
        for event in events:
            lasting = event["state"] == "failed" or event["state"] == "retry" and event["tries"] == 2
            if lasting and event["error"] != self.last_error and not self.finished:
                self.last_error, remote = event["error"], self.remotes[event["branch"]].name
                self.say(f"{remote}: step {event['push_step']} was not published: {self.last_error}. "
                         "Training goes on and tries again.")
        return events

    def finish(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for the newest snapshots, then end pushing. True if all arrived."""
        self._push_checkpoint()
        with self.changed:
            self.longest_wait, self.next_try = 5, self.next_try if self.asked else 0.0
            self.changed.notify_all()
            self.changed.wait_for(lambda: not (self.waiting or self.uploading), timeout)
            self.finished = True
            self.changed.notify_all()
            lost = [snapshot for snapshot in self.newest.values() if snapshot.state != "done"]
        if self.newest:
            shutil.rmtree(self.snapshots, ignore_errors=True)  # an upload in progress fails before its commit
        for snapshot in lost:
            remote, command = self.remotes[snapshot.branch], "the same command again"
            if snapshot.branch == "main":
                options = "--commit-message", snapshot.message
                command = upload_command(remote.repo_id, self.output_dir, *options)
            self.say(f"{snapshot.message!r} did not reach {remote.name}: {snapshot.error or self.status}.\n"
                     f"Everything is in {self.output_dir}; this uploads it:\n    {command}")
        return not lost

    def _push_checkpoint(self) -> None:
        """Freeze the newest complete checkpoint and the files beside it, unless this was done before."""
        checkpoints = list_checkpoints(self.output_dir / "checkpoints") if self.checkpoints else []
        last = self.newest.get(CHECKPOINTS)
        if not checkpoints or last and last.step == step_of(checkpoints[-1]):
            return
        folder, step = f"checkpoints/{checkpoints[-1].name}", step_of(checkpoints[-1])
        names = self._files(f"{folder}/**", *BESIDE)
        if f"{folder}/manifest.json" in names:  # else a newer checkpoint has replaced this one
            self._snapshot(step, CHECKPOINTS, names, f"Training state after step {step}")

    def _files(self, *patterns: str) -> list[str]:
        """The names of files in output_dir, without hidden ones."""
        found = (glob(pattern, root_dir=self.output_dir, recursive=True) for pattern in patterns)
        return sorted(name for name in chain(*found) if (self.output_dir / name).is_file())

    def _snapshot(self, step: int, branch: str, names: list[str], message: str) -> None:
        """Hard-link weights and checkpoints, which are replaced and never rewritten; copy the other files."""
        folder, error = self.snapshots / f"{branch}-{step}-{time.monotonic_ns()}", ""
        try:
            for name in names:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                if name.endswith(".safetensors") or name.startswith("checkpoints/"):
                    with suppress(OSError):  # this file system has no hard links
                        os.link(self.output_dir / name, folder / name)
                        continue
                shutil.copyfile(self.output_dir / name, folder / name)
        except OSError as failure:  # most likely a full disk
            error = f"{type(failure).__name__}: {failure}"
        self._put(Snapshot(step, branch, folder, names, message), error)

    def _put(self, snapshot: Snapshot, error: str = "") -> None:
        """Queue a snapshot. With an error it could not be frozen, and an older one keeps waiting."""
        with self.changed:
            self.newest[snapshot.slot] = snapshot
            if error:
                return self._record(snapshot, "failed", error=error)
            if older := self.waiting.pop(snapshot.slot, None):
                self._record(older, "replaced")
            self.waiting[snapshot.slot] = snapshot
            self.changed.notify_all()

    def _record(self, snapshot: Snapshot, state: str, **details) -> None:
        if state != "retry" and not snapshot.tag:
            shutil.rmtree(snapshot.folder, ignore_errors=True)
        snapshot.state, snapshot.error = state, details.get("error", "")
        event = {"event": "push", "push_step": snapshot.step, "branch": snapshot.branch, "state": state}
        self.events.put(event | details)

    # ---- On the thread

    def _work(self) -> None:
        while snapshot := self._next():
            started = time.monotonic()
            try:
                revision = self.remotes[snapshot.branch].upload(snapshot)
            except Exception as error:
                self._failed(snapshot, error)
                continue
            self.failures, self.status = 0, f"step {snapshot.step} pushed"
            seconds = round(time.monotonic() - started, 2)
            self._record(snapshot, "done", revision=revision, tries=snapshot.tries, seconds=seconds)

    def _next(self) -> Snapshot | None:
        """The next snapshot to upload, once its time has come. None after `finish`."""
        with self.changed:
            self.uploading = None
            self.changed.notify_all()
            while not self.finished:
                slot = min(self.waiting, key=lambda slot: slot not in self.remotes, default=None)  # tags last
                seconds = self.next_try - time.monotonic()
                if slot and seconds <= 0:
                    self.uploading = snapshot = self.waiting.pop(slot)
                    self.status, snapshot.tries = f"pushing step {snapshot.step}", snapshot.tries + 1
                    return snapshot
                if slot:
                    self.status = f"pushing step {self.waiting[slot].step} again in {math.ceil(seconds)} s"
                self.changed.wait(seconds if slot else None)

    def _failed(self, snapshot: Snapshot, error: Exception) -> None:
        """Retry what may pass, after a wait that grows with each failure or that the Hub asks for."""
        trouble = diagnose(error)
        if not trouble.transient:
            self.status = f"step {snapshot.step} not pushed"
            remedy = self.remotes[snapshot.branch].remedies.get(trouble.status, "")
            return self._record(snapshot, "failed", error=f"{trouble.text}{remedy}")
        with self.changed:
            self.failures, self.asked = self.failures + 1, trouble.retry_after
            wait = max(min(self.longest_wait, 2.0**self.failures) * random.uniform(0.5, 1), self.asked)
            self.next_try = time.monotonic() + wait
            self._record(snapshot, "retry", error=trouble.text, tries=snapshot.tries, wait=round(wait, 1))
            if self.waiting.setdefault(snapshot.slot, snapshot) is not snapshot:
                self._record(snapshot, "replaced")


def unpublished(output_dir) -> list[str]:
    """Patterns of what is not published: folders but best/, hidden files, earlier metrics, logs."""
    folders = sorted(path.name for path in Path(output_dir).glob("[!.]*") if path.is_dir())
    others = [f"{name}/*" for name in folders if name != "best"]
    return [*others, ".*", "*/.*", "replaced-*", "*.out", "*.log"]


def upload_command(repo_id: str, output_dir, *options: str) -> str:
    """A shell command that uploads the same files as `push`."""
    words = [word for pattern in unpublished(output_dir) for word in ("--exclude", pattern)]
    return shlex.join(["hf", "upload", repo_id, str(output_dir), ".", *words, *options])
