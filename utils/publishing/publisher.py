"""One queue of snapshots, and one thread that uploads them beside training: model, milestones, checkpoints.

A newer snapshot for the same branch replaces one that waits. A milestone is a snapshot with a tag: nothing
replaces it, and the others go first. A push to the Hub is one commit, complete and of one step.

Data loader workers forked while the thread is in an HTTP call can deadlock: start them before the first push.
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
from pathlib import Path

from huggingface_hub.utils import disable_progress_bars

from utils.display.progress import readable
from utils.io.retry import SILENCE, diagnose
from utils.publishing.export import list_milestones
from utils.publishing.places import BESIDE, CHECKPOINTS, MILESTONES, Bucket, Hub
from utils.state.folders import list_checkpoints, step_of


@dataclass
class Snapshot:
    """Files of one step that do not change, to become one commit, or one checkpoint in a bucket."""

    step: int
    branch: str
    folder: Path
    names: list[str]  # paths in the folder and in the repository
    message: str
    tag: str = ""  # of a milestone, whose folder is no copy
    tries: int = 0
    state: str = ""  # what happened last: retry, replaced, failed, done
    error: str = ""  # of the last try


class Publisher:
    """Made on all processes; the first alone has places. `poll` it at every log interval, and after `finish`.
    Neither the network nor a full disk ends a run.

    models: where the model and milestones go; checkpoints: where training states go; None: nowhere."""

    say = print  # gets what a person should read, where `poll` and `finish` are called
    status = ""  # in a few words, for the progress line

    def __init__(self, output_dir, models: Hub | None = None, checkpoints: Hub | Bucket | None = None):
        self.output_dir, self.models, self.checkpoints = Path(output_dir), models, checkpoints
        self.places = {"main": models, MILESTONES: models, CHECKPOINTS: checkpoints}
        self.frozen = self.output_dir / ".hub"  # on the same disk, so that weights can be hard links
        self.events = queue.SimpleQueue()  # what happened to snapshots, as records for metrics.jsonl
        self.said = ""  # the last error that was
        self.changed = threading.Condition()  # guards what follows
        self.newest: dict[str, Snapshot] = {}  # of each branch, and each milestone by its tag
        self.waiting: dict[str, Snapshot] = {}  # likewise
        self.uploading: Snapshot | None = None
        self.failures, self.next_try, self.asked = 0, 0.0, 0.0  # in a row; seconds that the Hub asked for
        self.longest_wait, self.finished = 60, False

    def start(self) -> "Publisher":
        """On the first process, in a locked output_dir."""
        shutil.rmtree(self.frozen, ignore_errors=True)  # of a killed run
        if self.models or self.checkpoints:
            os.environ.setdefault("HF_XET_CLIENT_READ_TIMEOUT", f"{SILENCE}s")  # of 300, times its tries
            disable_progress_bars()  # they would write over ours
            threading.Thread(target=self._work, name="uploads", daemon=True).start()
        return self

    # ---- On the caller's thread

    def push(self, step: int, metrics: dict[str, float | None] | None = None) -> None:
        """The files of output_dir, all of one step, for the main branch; older weights there go."""
        if self.models:
            files = [*self.output_dir.glob("[!.]*"), *self.output_dir.glob("best/[!.]*")]
            known = [(name, value) for name, value in (metrics or {}).items() if value is not None]
            message = ", ".join([f"Step {step}", *(f"{name} {readable(value)}" for name, value in known)])
            self._freeze(step, "main", filter(Path.is_file, files), message)
            self.push_milestones()

    def push_milestones(self) -> None:
        """Those of output_dir that this process has not pushed, or that failed."""
        for folder in list_milestones(self.output_dir) if self.models else ():
            tag, names = folder.name, sorted(path.name for path in folder.iterdir())
            if tag not in self.newest or self.newest[tag].state == "failed":
                self._put(Snapshot(step_of(folder), MILESTONES, folder, names, f"Milestone {tag}", tag))

    def poll(self) -> list[dict]:
        """What has happened since the last call, as records for metrics.jsonl. Says a failure when it is new.

        Also looks for a checkpoint to push: they are written in the background and complete at any time."""
        self._push_checkpoint()
        events = [self.events.get() for _ in range(self.events.qsize())]
        for event in events:
            stays = event["state"] == "failed" or event["state"] == "retry" and event["tries"] == 2
            if stays and event["error"] != self.said and not self.finished:
                self.said, place = event["error"], self.places[event["branch"]]
                words = f"{place.name}: step {event['push_step']} was not published: {self.said}."
                self.say(f"{words} Training goes on and tries again.")
        return events

    def finish(self, timeout: float) -> bool:
        """Waits up to `timeout` seconds for the newest snapshots: True if they arrived. Ends pushing."""
        self._push_checkpoint()
        with self.changed:
            self.longest_wait, self.next_try = 5, self.next_try if self.asked else 0.0
            self.changed.notify_all()
            self.changed.wait_for(lambda: not (self.waiting or self.uploading), timeout)
            self.finished = True
            self.changed.notify_all()
            lost = [snapshot for snapshot in self.newest.values() if snapshot.state != "done"]
        if self.newest:
            shutil.rmtree(self.frozen, ignore_errors=True)  # an upload under way fails before its commit
        for snapshot in lost:
            place, command = self.places[snapshot.branch], "the same command again"
            if snapshot.branch == "main":
                command = upload_command(place.repo_id, self.output_dir, "--commit-message", snapshot.message)
            reason = snapshot.error or self.status
            self.say(f"{snapshot.message!r} did not reach {place.name}: {reason}.\n"
                     f"Everything is in {self.output_dir}; this uploads it:\n    {command}")  # fmt: skip
        return not lost

    def _push_checkpoint(self) -> None:
        """Freezes the newest complete checkpoint and what belongs beside it, unless that was done before."""
        made = list_checkpoints(self.output_dir / "checkpoints") if self.checkpoints else []
        last = self.newest.get(CHECKPOINTS)
        if not made or last and last.step == step_of(made[-1]):
            return
        with suppress(FileNotFoundError):  # a newer one takes its place
            files = [path for path in made[-1].rglob("*") if path.is_file()]
            if made[-1] / "manifest.json" in files:
                step, beside = step_of(made[-1]), (self.output_dir / name for name in BESIDE)
                files += filter(Path.exists, beside)
                self._freeze(step, CHECKPOINTS, files, f"Training state after step {step}")

    def _freeze(self, step: int, branch: str, files, message: str) -> None:
        """Weights and checkpoints as hard links: they are replaced, not rewritten. The others are copied."""
        folder, error = self.frozen / f"{branch}-{step}-{time.monotonic_ns()}", ""
        names = sorted(path.relative_to(self.output_dir).as_posix() for path in files)
        try:
            for name in names:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                if name.endswith(".safetensors") or name.startswith("checkpoints/"):
                    with suppress(OSError):  # a file system without hard links
                        os.link(self.output_dir / name, folder / name)
                        continue
                shutil.copyfile(self.output_dir / name, folder / name)
        except OSError as failure:  # a full disk, most likely: no reason to end the training
            error = f"{type(failure).__name__}: {failure}"
        self._put(Snapshot(step, branch, folder, names, message), error)

    def _put(self, snapshot: Snapshot, error: str = "") -> None:
        """error: why it could not be frozen; then an older one goes on waiting."""
        with self.changed:
            slot = snapshot.tag or snapshot.branch
            self.newest[slot] = snapshot
            if error:
                return self._record(snapshot, "failed", error=error)
            if older := self.waiting.pop(slot, None):
                self._record(older, "replaced")
            self.waiting[slot] = snapshot
            self.changed.notify_all()

    def _record(self, snapshot: Snapshot, state: str, **details) -> None:
        if state != "retry" and not snapshot.tag:
            shutil.rmtree(snapshot.folder, ignore_errors=True)
        snapshot.state, snapshot.error = state, details.get("error", "")
        event = {"event": "push", "push_step": snapshot.step, "branch": snapshot.branch, "state": state}
        self.events.put(event | details)

    # ---- The thread

    def _work(self) -> None:
        while snapshot := self._next():
            started = time.monotonic()
            try:
                revision = self.places[snapshot.branch].upload(snapshot)
            except Exception as error:
                self._failed(snapshot, error)
                continue
            self.failures, self.status = 0, f"step {snapshot.step} pushed"
            seconds = round(time.monotonic() - started, 2)
            self._record(snapshot, "done", revision=revision, tries=snapshot.tries, seconds=seconds)

    def _next(self) -> Snapshot | None:
        """The snapshot to upload, when its time has come; None at the end."""
        with self.changed:
            self.uploading = None
            self.changed.notify_all()
            while not self.finished:
                slot = min(self.waiting, key=lambda slot: slot not in self.places, default=None)  # tags last
                seconds = self.next_try - time.monotonic()
                if slot and seconds <= 0:
                    self.uploading = snapshot = self.waiting.pop(slot)
                    self.status, snapshot.tries = f"pushing step {snapshot.step}", snapshot.tries + 1
                    return snapshot
                if slot:
                    self.status = f"pushing step {self.waiting[slot].step} again in {math.ceil(seconds)} s"
                self.changed.wait(seconds if slot else None)

    def _failed(self, snapshot: Snapshot, error: Exception) -> None:
        """What may pass is tried again: later each time, or when the Hub asks us to."""
        trouble = diagnose(error)
        if not trouble.passing:
            self.status = f"step {snapshot.step} not pushed"
            remedy = self.places[snapshot.branch].remedies.get(trouble.status, "")
            return self._record(snapshot, "failed", error=f"{trouble.text}{remedy}")
        with self.changed:
            self.failures, self.asked = self.failures + 1, trouble.retry_after
            wait = max(min(self.longest_wait, 2.0**self.failures) * random.uniform(0.5, 1), self.asked)
            self.next_try = time.monotonic() + wait
            self._record(snapshot, "retry", error=trouble.text, tries=snapshot.tries, wait=round(wait, 1))
            slot = snapshot.tag or snapshot.branch
            if self.waiting.setdefault(slot, snapshot) is not snapshot:
                self._record(snapshot, "replaced")


def upload_command(repo_id: str, output_dir, *more: str) -> str:
    """For a shell: what `push` sends."""
    excluded = "checkpoints/*", "milestones/*", "replaced-*", ".*"
    words = [word for name in excluded for word in ("--exclude", name)]
    return shlex.join(["hf", "upload", repo_id, str(output_dir), ".", *words, *more])
