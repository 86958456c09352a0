"""What a run publishes: snapshots of its model, milestones and checkpoints go to places, beside training.

A push to the Hub is exactly one commit, so every revision is complete and of one step, whatever dies when.
One thread uploads. Of the snapshots that wait for a branch, the newest replaces the older ones. A milestone
is a snapshot with a tag: it is never replaced, and the others go first.

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
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.utils import disable_progress_bars

from utils.display.progress import readable
from utils.io.retry import SILENCE, diagnose
from utils.publishing.milestones import keep_milestone, list_milestones
from utils.publishing.places import BESIDE, CHECKPOINTS, MILESTONES, Bucket, Hub, refuse_another, with_remedy
from utils.state.folders import list_checkpoints, outdate, step_of


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
    state: str = "waiting"  # uploading, retry, replaced, failed, done
    error: str = ""  # of the last try


class Publisher:
    """Held by a run on all processes; the first alone has places. `poll` it at every log interval, and after
    `finish`. Neither the network nor a full disk ends a run.

    models: where the model and milestones go; checkpoints: where training states go; None: nowhere."""

    say: Callable[[str], Any] = print  # gets what a person should read, where `poll` and `finish` are called
    status = ""  # in a few words, for the progress line

    def __init__(self, output_dir, models: Hub | None = None, checkpoints: Hub | Bucket | None = None):
        self.output_dir, self.models, self.checkpoints = Path(output_dir), models, checkpoints
        self.places = {"main": models, MILESTONES: models, CHECKPOINTS: checkpoints}
        self.frozen = self.output_dir / ".hub"  # on the same disk, so that weights can be hard links
        self.milestones: set[int] = set()  # steps whose models are kept for good
        self.events = queue.SimpleQueue()  # what happens to snapshots, as records for metrics.jsonl
        self.said = ""
        self.changed = threading.Condition()  # guards what follows
        self.snapshots: list[Snapshot] = []  # all, oldest first
        self.failures, self.next_try, self.asked = 0, 0.0, 0.0  # in a row; seconds that the Hub asked for
        self.finishing = self.finished = False

    def start(self, step: int = 0, auto: bool = True) -> "Publisher":
        """On the first process, in a locked output_dir. step: from which the run goes on; auto: its newest.

        Sets milestones after this step aside, and names the tags that the Hub has as a run begins. ValueError
        where a bucket has what is not of this run."""
        refuse_another(self.checkpoints, self.output_dir, math.inf if auto else step)
        shutil.rmtree(self.frozen, ignore_errors=True)  # of a killed run
        outdate(list_milestones(self.output_dir), step)
        if self.models and not step and (tags := self.models.milestones()):
            moved, repo_id = " (until this run makes it)", self.models.repo_id
            names = ", ".join(f"step-{tag}{moved if tag in self.milestones else ''}" for tag in tags)
            found = f"{repo_id} has revisions of an earlier run: {names}"
            print(f"hub        {found}; `hf repos tag delete {repo_id} NAME` deletes one", flush=True)
        if self.models or self.checkpoints:
            os.environ.setdefault("HF_XET_CLIENT_READ_TIMEOUT", f"{SILENCE}s")  # of 300, times its tries
            disable_progress_bars()  # they would write over ours
            threading.Thread(target=self._work, name="uploads", daemon=True).start()
        return self

    # ---- On the caller's thread

    def keep_milestone(self, accelerator, model, tokenizer, step: int) -> None:
        """If this step is one. Called on all processes."""
        if step in self.milestones:
            keep_milestone(accelerator, model, tokenizer, self.output_dir, step)
            self._push_milestones()

    def push(self, step: int, metrics: Mapping[str, float | None] | None = None) -> None:
        """The files of output_dir, all of one step, for the main branch; older weights there go."""
        if self.models:
            found = [*self.output_dir.glob("[!.]*"), *self.output_dir.glob("best/[!.]*")]
            files = [path for path in found if path.is_file()]
            known = [(name, value) for name, value in (metrics or {}).items() if value is not None]
            numbers = [f"{name} {readable(value)}" for name, value in known]
            self._freeze(step, "main", files, ", ".join([f"Step {step}", *numbers]))
            self._push_milestones()

    def poll(self) -> list[dict]:
        """What has happened since the last call, as records for metrics.jsonl. Says a failure when it is new.

        Also looks for a checkpoint to push: they are written in the background and complete at any time."""
        self._push_checkpoint()
        events = [self.events.get() for _ in range(self.events.qsize())]
        for event in events:
            stays = event["state"] == "failed" or event["state"] == "retry" and event["tries"] == 2
            if stays and event["error"] != self.said and not self.finished:
                self.said, place = event["error"], self.places[event["branch"]]
                self.say(
                    f"{place.name}: step {event['push_step']} was not published: {self.said}. "
                    "Training goes on and tries again."
                )
        return events

    def finish(self, timeout: float) -> bool:
        """Waits up to `timeout` seconds for the newest snapshots: True if they arrived. Ends pushing."""
        self._push_checkpoint()
        with self.changed:
            self.finishing, self.next_try = True, self.next_try if self.asked else 0.0
            self.changed.notify_all()
            self.changed.wait_for(lambda: not self._in("waiting", "retry", "uploading"), timeout)
            self.finished = True
            self.changed.notify_all()
            newest = {snapshot.tag or snapshot.branch: snapshot for snapshot in self.snapshots}
            lost = [snapshot for snapshot in newest.values() if snapshot.state != "done"]
        if newest:
            shutil.rmtree(self.frozen, ignore_errors=True)  # an upload under way fails before its commit
        for snapshot in lost:
            place, command = self.places[snapshot.branch], "the same command again"
            if snapshot.branch == "main":
                command = upload_command(place.repo_id, self.output_dir, "--commit-message", snapshot.message)
            self.say(
                f"{snapshot.message!r} did not reach {place.name}: {snapshot.error or self.status}.\n"
                f"Everything is in {self.output_dir}; this uploads it:\n    {command}"
            )
        return not lost

    def _push_milestones(self) -> None:
        """Those of output_dir that this process has not pushed, or that failed."""
        states = {snapshot.tag: snapshot.state for snapshot in self.snapshots}
        for folder in list_milestones(self.output_dir) if self.models else ():
            if states.get(folder.name, "failed") == "failed":
                names, tag = sorted(path.name for path in folder.iterdir()), folder.name
                self._put(Snapshot(step_of(folder), MILESTONES, folder, names, f"Milestone {tag}", tag))

    def _push_checkpoint(self) -> None:
        """Freezes the newest complete checkpoint and what belongs beside it, unless that was done before."""
        made = list_checkpoints(self.output_dir / "checkpoints") if self.checkpoints else []
        pushed = [snapshot.step for snapshot in self.snapshots if snapshot.branch == CHECKPOINTS]
        if not made or (step := step_of(made[-1])) in pushed:
            return
        with suppress(FileNotFoundError):  # a newer one takes its place
            files = [path for path in made[-1].rglob("*") if path.is_file()]
            if made[-1] / "manifest.json" in files:
                beside = [path for name in BESIDE if (path := self.output_dir / name).exists()]
                self._freeze(step, CHECKPOINTS, files + beside, f"Training state after step {step}")

    def _freeze(self, step: int, branch: str, files: list[Path], message: str) -> None:
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
        """error: why it could not be frozen; then those that wait stay."""
        with self.changed:
            self.snapshots.append(snapshot)
            if error:
                return self._record(snapshot, "failed", error=error)
            self._replace_older(snapshot.branch)
            self.changed.notify_all()

    def _in(self, *states: str) -> list[Snapshot]:
        return [snapshot for snapshot in self.snapshots if snapshot.state in states]

    def _replace_older(self, branch: str) -> None:
        waiting = [snapshot for snapshot in self._in("waiting", "retry") if not snapshot.tag]
        for older in [snapshot for snapshot in waiting if snapshot.branch == branch][:-1]:
            self._record(older, "replaced")

    def _record(self, snapshot: Snapshot, state: str, **details) -> None:
        if state != "retry" and not snapshot.tag:
            shutil.rmtree(snapshot.folder, ignore_errors=True)
        event = {"event": "push", "push_step": snapshot.step, "branch": snapshot.branch, "state": state}
        with self.changed:
            snapshot.state, snapshot.error = state, details.get("error", "")
            self.events.put({**event, **details})
            self.changed.notify_all()

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
            while not self.finished:
                waiting = self._in("waiting", "retry")
                seconds = self._pause(waiting[-1].step) if waiting else None
                if waiting and seconds <= 0:
                    snapshot = min(waiting, key=lambda snapshot: bool(snapshot.tag))
                    snapshot.state, self.status = "uploading", f"pushing step {snapshot.step}"
                    snapshot.tries += 1
                    return snapshot
                self.changed.wait(seconds)

    def _pause(self, step: int) -> float:
        """Seconds until the next try after a failure, or until the Hub takes more commits."""
        seconds = self.next_try - time.monotonic()
        if seconds > 0:
            self.status = f"pushing step {step} again in {math.ceil(seconds)} s"
        return seconds

    def _failed(self, snapshot: Snapshot, error: Exception) -> None:
        """What may pass is tried again: later each time, or when the Hub asks us to."""
        trouble = diagnose(error)
        if not trouble.passing:
            self.status = f"step {snapshot.step} not pushed"
            return self._record(snapshot, "failed", error=with_remedy(trouble))
        with self.changed:
            self.failures, self.asked = self.failures + 1, trouble.retry_after
            longest = 5 if self.finishing else 60
            wait = max(min(longest, 2.0**self.failures) * random.uniform(0.5, 1), self.asked)
            self.next_try = time.monotonic() + wait
            self._record(snapshot, "retry", error=trouble.text, tries=snapshot.tries, wait=round(wait, 1))
            self._replace_older(snapshot.branch)  # where a newer one has come


def upload_command(repo_id: str, output_dir, *more: str) -> str:
    """For a shell: what `push` sends."""
    excluded = "checkpoints/*", "milestones/*", "replaced-*", ".*"
    words = [word for name in excluded for word in ("--exclude", name)]
    return shlex.join(["hf", "upload", repo_id, str(output_dir), ".", *words, *more])
