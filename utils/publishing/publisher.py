"""One queue of snapshots, and one thread that uploads them during training: model, milestones, checkpoints.

Data loader workers that are forked during an HTTP call of the thread can deadlock: start them before it.
"""

import math
import os
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
from utils.publishing.remote import BESIDE, CHECKPOINTS, MILESTONES, Bucket, Hub, open_remote, repo_name
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
        """Only the newest snapshot of a slot waits: a newer one replaces it."""
        return self.tag or self.branch


class Publisher:
    """Exists on all processes, of which the first pushes. Call `poll` at every log interval and after
    `finish`. Neither the network nor a full disk ends the run.

    models: where the model and milestones go; checkpoints: where checkpoints go; None: nowhere."""

    say = print  # called by `poll` and `finish` with messages for the user
    status = ""  # a few words for the progress line

    def __init__(self, output_dir, models: Hub | None = None, checkpoints: Hub | Bucket | None = None):
        self.output_dir, self.models, self.checkpoints = Path(output_dir), models, checkpoints
        self.remotes = {"main": models, MILESTONES: models, CHECKPOINTS: checkpoints}
        self.frozen = self.output_dir / ".hub"  # on the same disk, so that weights can be hard links
        self.last_error = ""  # that the user has been told
        self.ending, self.finished = threading.Event(), False
        self.changed = threading.Condition()  # guards what follows
        self.events = []
        self.newest, self.waiting, self.uploading = {}, {}, None  # snapshots by slot; and one

    def start(self) -> "Publisher":
        """On the first process, in a locked output_dir."""
        shutil.rmtree(self.frozen, ignore_errors=True)  # left by a killed run
        if self.models or self.checkpoints:
            os.environ.setdefault("HF_XET_CLIENT_READ_TIMEOUT", f"{SILENCE}s")  # default: 300 s for each try
            disable_progress_bars()  # they would overwrite ours
            threading.Thread(target=self._work, name="uploads", daemon=True).start()
        return self

    # ---- On the caller's thread

    def push(self, step: int, metrics: dict[str, float | None] | None = None) -> None:
        """Push the files of output_dir, all of one step, to the main branch, and new milestones."""
        if not self.models:
            return
        names = filter_repo_objects(self._files("*", "best/*"), ignore_patterns=unpublished(self.output_dir))
        results = [f"{name} {readable(x)}" for name, x in (metrics or {}).items() if x is not None]
        self._freeze(step, "main", [*names], ", ".join([f"Step {step}", *results]))
        self.push_milestones()

    def push_milestones(self) -> None:
        """Push the milestones of output_dir that this process has not pushed yet, or that failed."""
        for folder in list_milestones(self.output_dir) if self.models else ():
            tag, names = folder.name, sorted(path.name for path in folder.iterdir())
            if tag not in self.newest or self.newest[tag].state == "failed":
                self._put(Snapshot(step_of(folder), MILESTONES, folder, names, f"Milestone {tag}", tag))

    def _push_checkpoint(self) -> None:
        """Push the newest complete checkpoint and the files beside it, unless this was done before."""
        checkpoints = list_checkpoints(self.output_dir / "checkpoints") if self.checkpoints else []
        last, step = self.newest.get(CHECKPOINTS), step_of(checkpoints[-1]) if checkpoints else 0
        if not checkpoints or last and last.step == step:
            return
        names = self._files(f"checkpoints/{checkpoints[-1].name}/**", *BESIDE)
        if f"checkpoints/{checkpoints[-1].name}/manifest.json" in names:  # else a newer one has replaced it
            self._freeze(step, CHECKPOINTS, names, f"Training state after step {step}")

    def poll(self) -> list[dict]:
        """The events since the last call, for metrics.jsonl. Tells the user each new failure. Also pushes the
        newest checkpoint, as checkpoints are completed in the background at any time."""
        self._push_checkpoint()
        with self.changed:
            events, self.events = self.events, []
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
        self.ending.set()
        with self.changed:
            self.changed.wait_for(lambda: not (self.waiting or self.uploading), timeout)
            self.finished = True
            self.changed.notify_all()
            lost = [snapshot for snapshot in self.newest.values() if snapshot.state != "done"]
        if self.newest:
            shutil.rmtree(self.frozen, ignore_errors=True)  # an upload in progress fails before its commit
        for snapshot in lost:
            remote, command = self.remotes[snapshot.branch], "the same command again"
            if snapshot.branch == "main":
                options = "--commit-message", snapshot.message
                command = upload_command(remote.repo_id, self.output_dir, *options)
            self.say(f"{snapshot.message!r} did not reach {remote.name}: {snapshot.error or self.status}.\n"
                     f"Everything is in {self.output_dir}; this uploads it:\n    {command}")
        return not lost

    def _files(self, *patterns: str) -> list[str]:
        """The names of files in output_dir, without hidden ones."""
        names = chain(*(glob(pattern, root_dir=self.output_dir, recursive=True) for pattern in patterns))
        return sorted(name for name in names if (self.output_dir / name).is_file())

    def _freeze(self, step: int, branch: str, names: list[str], message: str) -> None:
        """Queue hard links of weights and checkpoints, which are replaced and never rewritten, and copies of
        the other files."""
        folder = self.frozen / f"{branch}-{step}-{time.monotonic_ns()}"
        snapshot = Snapshot(step, branch, folder, names, message)
        try:
            for name in names:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                if name.endswith(".safetensors") or name.startswith("checkpoints/"):
                    with suppress(OSError):  # this file system has no hard links
                        os.link(self.output_dir / name, folder / name)
                        continue
                shutil.copyfile(self.output_dir / name, folder / name)
        except OSError as error:  # most likely a full disk; an older snapshot keeps waiting
            self.newest[snapshot.slot] = snapshot
            self._record(snapshot, "failed", error=f"{type(error).__name__}: {error}")
        else:
            self._put(snapshot)

    def _put(self, snapshot: Snapshot) -> None:
        with self.changed:
            self.newest[snapshot.slot] = snapshot
            if older := self.waiting.pop(snapshot.slot, None):
                self._record(older, "replaced")
            self.waiting[snapshot.slot] = snapshot
            self.changed.notify_all()

    def _record(self, snapshot: Snapshot, state: str, **details) -> None:
        with self.changed:
            snapshot.state, snapshot.error = state, details.get("error", "")
            event = {"event": "push", "push_step": snapshot.step, "branch": snapshot.branch, "state": state}
            self.events.append(event | details)
        if state != "retry" and not snapshot.tag:
            shutil.rmtree(snapshot.folder, ignore_errors=True)

    # ---- On the thread

    def _work(self) -> None:
        failures = 0  # in a row
        while snapshot := self._next():
            started, remote = time.monotonic(), self.remotes[snapshot.branch]
            self.status, snapshot.tries = f"pushing step {snapshot.step}", snapshot.tries + 1
            try:
                revision = remote.upload(snapshot)
            except Exception as error:
                failures += 1
                self._failed(snapshot, diagnose(error), failures)
                continue
            failures, self.status = 0, f"step {snapshot.step} pushed"
            seconds = round(time.monotonic() - started, 2)
            self._record(snapshot, "done", revision=revision, tries=snapshot.tries, seconds=seconds)

    def _next(self) -> Snapshot | None:
        """Waits for a snapshot to upload. None after `finish`."""
        with self.changed:
            self.uploading = None
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.waiting or self.finished)
            if not self.finished:
                slot = min(self.waiting, key=lambda slot: slot not in self.remotes)  # tags last
                self.uploading = self.waiting.pop(slot)
            return self.uploading

    def _failed(self, snapshot: Snapshot, trouble, failures: int) -> None:
        """Retry what may pass, after a wait that grows with each failure or that the Hub asks for."""
        if not trouble.transient:
            self.status = f"step {snapshot.step} not pushed"
            remedy = self.remotes[snapshot.branch].remedies.get(trouble.status, "")
            return self._record(snapshot, "failed", error=f"{trouble.text}{remedy}")
        ending = self.ending.is_set()
        backoff = min(5 if ending else 60, 2.0**failures) * random.uniform(0.5, 1)
        wait = max(backoff, trouble.retry_after)
        self.status = f"pushing step {snapshot.step} again in {math.ceil(wait)} s"
        with self.changed:
            self._record(snapshot, "retry", error=trouble.text, tries=snapshot.tries, wait=round(wait, 1))
            if self.waiting.setdefault(snapshot.slot, snapshot) is not snapshot:
                self._record(snapshot, "replaced")
        if ending:
            time.sleep(wait)
        else:
            self.ending.wait(wait)  # `finish` ends this wait


def open_publisher(args, is_main_process: bool) -> Publisher:
    """Of the places that the settings name. ValueError if a push could not work."""
    models = checkpoints = None
    if is_main_process and not args.eval_only and not args.show:
        if args.push_to_hub:
            models = Hub(repo_name(args), args.hub_private_repo)
        if args.checkpoint_url:
            checkpoints = open_remote(args.checkpoint_url, args.hub_private_repo, args.save_total_limit)
    return Publisher(args.output_dir, models, checkpoints)


def unpublished(output_dir) -> list[str]:
    """Patterns of what is not published: folders but best/, hidden files, earlier metrics, logs."""
    folders = sorted(path.name for path in Path(output_dir).glob("[!.]*") if path.is_dir())
    others = [f"{name}/*" for name in folders if name != "best"]
    return [*others, ".*", "*/.*", "replaced-*", "*.out", "*.log"]


def upload_command(repo_id: str, output_dir, *options: str) -> str:
    """A shell command that uploads the same files as `push`."""
    words = [word for pattern in unpublished(output_dir) for word in ("--exclude", pattern)]
    return shlex.join(["hf", "upload", repo_id, str(output_dir), ".", *words, *options])
