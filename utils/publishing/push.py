"""Publish a run on the Hub, and its checkpoints anywhere, while it trains: the network can neither hold it up
nor lose a model.

A push to the Hub is exactly one commit, so every revision is complete and of one step, whatever dies when.
One thread uploads; of the snapshots that wait, the newest replaces the older ones. Milestones are never
replaced: each gets a tag, step-N, and only when the Hub has its files with the hashes of its manifest.

Data loader workers forked while the thread is in an HTTP call can deadlock: start them before the first push.
"""

import math
import os
import random
import shlex
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import RevisionNotFoundError
from huggingface_hub.utils import disable_progress_bars

from utils.display.progress import readable
from utils.publishing.hub_client import BESIDE, BRANCH, PUSH_SECONDS, Trouble, commit, diagnose
from utils.publishing.milestones import list_milestones
from utils.state.checkpoint import list_checkpoints, step_of
from utils.state.files import find_problem

# The Hub takes about 128 commits per hour and repository; what is left is for the last push and for the user.
COMMITS_PER_HOUR, KEPT_FOR_THE_END = 100, 20
WEIGHTS = r"(best/)?model(-\d+-of-\d+)?\.safetensors(\.index\.json)?"
NOT_THE_MODEL = [word for name in ("checkpoints/*", "milestones/*", "replaced-*", ".*")
                 for word in ("--exclude", name)]  # fmt: skip
ALL = r"(?!\.gitattributes$).*"
MILESTONES = "milestones"  # the branch of the commits that get tags


@dataclass
class Snapshot:
    """Frozen files of one step, to become one commit or one checkpoint in a bucket."""

    step: int
    branch: str
    folder: Path
    names: list[str]  # paths in the folder and in the repository
    message: str
    tries: int = 0
    state: str = "waiting"  # uploading, retry, replaced, failed, done

    @property
    def lane(self) -> str:
        """In which the newest snapshot replaces the older ones: the branch, or the tag of a milestone."""
        return f"step-{self.step}" if self.branch == MILESTONES else self.branch


class Pusher:
    """Made on the main process, after check_hub; `poll` it at every log interval, and after `finish`.

    repo_id: where models go; store: where the newest complete checkpoint goes. Files are frozen in
    output_dir/.hub until they have arrived."""

    say: Callable[[str], Any] = print  # gets what a person should read, where `poll` and `finish` are called
    status = ""  # a few words for the progress line
    commits_per_hour = COMMITS_PER_HOUR  # beyond, pushes wait, and newer ones replace them meanwhile

    def __init__(self, repo_id: str | None, output_dir: str | os.PathLike, store=None):
        self.repo_id, self.output_dir, self.store = repo_id, Path(output_dir), store
        self.frozen = self.output_dir / ".hub"  # on the same file system, so that weights can be hard links
        shutil.rmtree(self.frozen, ignore_errors=True)  # of a killed run
        self.changed = threading.Condition()  # guards what follows
        self.newest: dict[str, Snapshot] = {}  # of each lane
        self.wanted: dict[str, Snapshot] = {}  # of each branch, also what could not be frozen
        self.finishing = self.finished = False
        self.commits: list[float] = []  # when they were made
        self.events: list[dict] = []
        self.error = self.said = ""
        os.environ.setdefault("HF_XET_CLIENT_READ_TIMEOUT", f"{PUSH_SECONDS}s")  # of 300, times its tries
        disable_progress_bars()  # they would write over ours
        threading.Thread(target=self._work, name="hub-push", daemon=True).start()

    def push(self, step: int, metrics: dict[str, float | None] | None = None) -> None:
        """Freeze the files of output_dir, all of one step, for the main branch; older weights there go.

        Never raises for the network or the disk. Weights are frozen as hard links, so whoever saves must
        replace them, as save_pretrained does, not rewrite them in place. The others are copied."""
        if not self.repo_id:
            return
        found = [*self.output_dir.glob("[!.]*"), *self.output_dir.glob("best/[!.]*")]
        files = [path.relative_to(self.output_dir).as_posix() for path in found if path.is_file()]
        numbers = [f"{key} {readable(value)}" for key, value in (metrics or {}).items() if value is not None]
        self._freeze(step, "main", files, ", ".join([f"Step {step}", *numbers]))
        self.push_milestones()

    def push_milestones(self) -> None:
        """Those of output_dir that this run has not seen on the Hub; what failed is tried again."""
        with self.changed:
            known = [lane for lane, snapshot in self.newest.items() if snapshot.state != "failed"]
        for folder in list_milestones(self.output_dir) if self.repo_id else ():
            names = sorted(path.name for path in folder.iterdir())
            snapshot = Snapshot(step_of(folder), MILESTONES, folder, names, f"Milestone {folder.name}")
            if snapshot.lane not in known:
                self._queue(snapshot)

    def poll(self) -> list[dict]:
        """What has happened since the last call, as records for metrics.jsonl. Says a failure when it is new.

        Also looks for a checkpoint to push: they are written in the background and complete at any time."""
        self._push_checkpoint()
        with self.changed:
            events, self.events = self.events, []
        for event in events:
            stays = event["state"] == "failed" or event["state"] == "retry" and event["tries"] == 2
            if stays and event["error"] != self.said:
                self.said = event["error"]
                self.say(
                    f"{self._place(event['branch'])}: step {event['push_step']} was not published: "
                    f"{self.said}. Training goes on and tries again."
                )
        return events

    def finish(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for the newest snapshots to arrive: True if they did. Ends pushing."""
        self._push_checkpoint()
        with self.changed:
            newest, self.finishing = self.newest.values(), True
            self.changed.notify_all()
            self.changed.wait_for(lambda: all(s.state in ("done", "failed") for s in newest), timeout)
            self.finished = True
            lost = [s for s in (self.newest | self.wanted).values() if s.state != "done"]
        shutil.rmtree(self.frozen, ignore_errors=True)  # an upload under way now fails before its commit
        for snapshot in lost:
            self.said, command = self.error, "the same command again"
            if snapshot.branch == "main":
                words = ["hf", "upload", self.repo_id, str(self.output_dir), ".", *NOT_THE_MODEL]
                command = shlex.join([*words, "--commit-message", snapshot.message])
            self.say(
                f"{snapshot.message!r} did not reach {self._place(snapshot.branch)}: "
                f"{self.error or self.status}.\nEverything is in {self.output_dir}; this uploads it:\n"
                f"    {command}"
            )
        return not lost

    def _place(self, branch: str) -> str:
        return self.store.name if branch == BRANCH else self.repo_id

    # ---- The caller's thread

    def _push_checkpoint(self) -> None:
        """Freeze the newest complete checkpoint and what belongs beside it, unless that was done before."""
        made = list_checkpoints(self.output_dir / "checkpoints") if self.store else []
        if not made or BRANCH in self.wanted and self.wanted[BRANCH].step == step_of(made[-1]):
            return
        files = []
        with suppress(FileNotFoundError):  # a newer one takes its place
            files = [p.relative_to(self.output_dir).as_posix() for p in made[-1].rglob("*") if p.is_file()]
        if f"checkpoints/{made[-1].name}/manifest.json" not in files:
            return
        files += [name for name in BESIDE if (self.output_dir / name).is_file()]
        self._freeze(step_of(made[-1]), BRANCH, files, f"Training state after step {step_of(made[-1])}")

    def _freeze(self, step: int, branch: str, names: list[str], message: str) -> None:
        folder = self.frozen / f"{branch}-{step}-{time.monotonic_ns()}"
        snapshot = self.wanted[branch] = Snapshot(step, branch, folder, sorted(names), message)
        try:
            for name in snapshot.names:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                if name.endswith(".safetensors") or name.startswith("checkpoints/"):  # they never change
                    with suppress(OSError):  # a file system without hard links
                        os.link(self.output_dir / name, folder / name)
                        continue
                shutil.copyfile(self.output_dir / name, folder / name)
        except OSError as error:  # a full disk, most likely: no reason to end the training
            return self._record(snapshot, "failed", error=f"{type(error).__name__}: {error}")
        self._queue(snapshot)

    def _queue(self, snapshot: Snapshot) -> None:
        with self.changed:
            waiting, older = self._waiting(), self.newest.pop(snapshot.lane, None)  # the new one goes last
            if older in waiting:
                self._record(older, "replaced")
            self.newest[snapshot.lane] = snapshot
            self.changed.notify_all()

    # ---- Both

    def _record(self, snapshot: Snapshot, state: str, **details) -> None:
        if state != "retry" and snapshot.branch != MILESTONES:  # whose folders are no copies
            shutil.rmtree(snapshot.folder, ignore_errors=True)
        with self.changed:
            snapshot.state = state
            self.error = details.get("error", "" if state == "done" else self.error)
            event = {"event": "push", "push_step": snapshot.step, "branch": snapshot.branch, "state": state}
            self.events.append({**event, **details})
            self.changed.notify_all()

    # ---- The uploading thread

    def _work(self) -> None:
        failures = 0  # passing ones, in a row
        while True:
            with self.changed:
                self.changed.wait_for(self._waiting)
                self._wait_for_quota()
                if self.finished:
                    return
                # Milestones can wait
                snapshot = min(self._waiting(), key=lambda snapshot: snapshot.branch == MILESTONES)
                snapshot.state, self.status = "uploading", f"pushing step {snapshot.step}"
            snapshot.tries += 1
            started = time.monotonic()
            try:
                revision = self._upload(snapshot)
            except Exception as error:
                trouble = diagnose(error)
                if trouble.passing:
                    failures += 1
                    self._retry_later(snapshot, trouble, failures)
                    continue
                self.status = f"step {snapshot.step} not pushed"
                told = f"{trouble.text}; {trouble.remedy}" if trouble.remedy else trouble.text
                self._record(snapshot, "failed", error=told)
            else:
                failures = 0
                self.status = f"step {snapshot.step} pushed"
                seconds = round(time.monotonic() - started, 2)
                self._record(snapshot, "done", revision=revision, tries=snapshot.tries, seconds=seconds)
                bucket = snapshot.branch == BRANCH and not self.store.repo_id
                if not bucket and revision != snapshot.lane:  # a tag that was there cost no commit
                    self.commits.append(time.monotonic())

    def _wait_for_quota(self) -> None:
        while not self.finished:
            limit = self.commits_per_hour + (KEPT_FOR_THE_END if self.finishing else 0)
            seconds = 3600 - (time.monotonic() - self.commits[-limit]) if len(self.commits) >= limit else 0
            if seconds <= 0:
                return
            self.status, hurry = f"next push in {math.ceil(seconds / 60)} min (commit quota)", self.finishing
            self.changed.wait_for(lambda hurry=hurry: self.finished or self.finishing and not hurry, seconds)

    def _waiting(self) -> list[Snapshot]:
        return [snapshot for snapshot in self.newest.values() if snapshot.state in ("waiting", "retry")]

    def _upload(self, snapshot: Snapshot) -> str:
        """The hash of the commit, the tag of a milestone that arrived before a kill, or a bucket's folder."""
        if snapshot.branch == BRANCH:
            return self.store.upload(snapshot)
        if snapshot.branch != MILESTONES:
            return commit(self.repo_id, snapshot, replaces=WEIGHTS)
        if problem := find_problem(snapshot.folder):
            raise ValueError(f"{snapshot.folder} is damaged, {problem}")
        api, tag, tagged = HfApi(), snapshot.lane, False
        with suppress(RevisionNotFoundError):
            if not self._differing(snapshot, tag):
                return tag
            tagged = True  # by another run
        api.create_branch(self.repo_id, branch=MILESTONES, exist_ok=True)
        revision = commit(self.repo_id, snapshot, replaces=ALL)
        if different := self._differing(snapshot, revision):
            raise ConnectionError(f"{', '.join(different)}: arrived with another hash")
        if tagged:
            api.delete_tag(self.repo_id, tag=tag)
        api.create_tag(self.repo_id, tag=tag, revision=revision)
        return revision

    def _differing(self, snapshot: Snapshot, revision: str) -> list[str]:
        """Files that the Hub has not at this revision, or with another hash."""
        there = HfApi().verify_repo_checksums(self.repo_id, revision=revision, local_dir=snapshot.folder)
        differing = [*there.extra_paths, *(file["path"] for file in there.mismatches)]
        return [name for name in differing if name in snapshot.names]  # not what has come since

    def _retry_later(self, snapshot: Snapshot, trouble: Trouble, failures: int) -> None:
        """Wait, longer each time, or as long as asked. By then a newer one may have come."""
        with self.changed:
            hurry, asked = self.finishing, trouble.retry_after
            seconds = max(min(5 if hurry else 60, 2.0**failures) * random.uniform(0.5, 1), asked)
            told = {"error": trouble.text, "tries": snapshot.tries, "wait": round(seconds, 1)}
            self._record(snapshot, "retry", **told)
            newest = self.newest[snapshot.lane]
            if newest is not snapshot:
                self._record(snapshot, "replaced")
            self.status = f"pushing step {newest.step} again in {math.ceil(seconds)} s"
            patient = hurry or asked
            self.changed.wait_for(lambda: self.finished or self.finishing and not patient, seconds)
