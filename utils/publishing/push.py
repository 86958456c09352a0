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
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import RevisionNotFoundError
from huggingface_hub.utils import disable_progress_bars
from huggingface_hub.utils.sha import git_hash

from utils.display.progress import readable
from utils.publishing.fetch import newest_checkpoint
from utils.publishing.hub_client import BESIDE, BRANCH, PUSH_SECONDS, Trouble, bound_waiting, commit, diagnose
from utils.publishing.milestones import list_milestones
from utils.state.checkpoint import step_of
from utils.state.files import find_problem

# The Hub takes about 128 commits per hour and repository; what is left is for the last push and for the user.
COMMITS_PER_HOUR, KEPT_FOR_THE_END = 100, 20
WEIGHTS = r"(best/)?model(-\d+-of-\d+)?\.safetensors(\.index\.json)?"
NOT_THE_MODEL = [word for name in ("checkpoints/*", "milestones/*", ".*") for word in ("--exclude", name)]
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
    lane: str  # in which the newest snapshot replaces the older ones: the branch, or the tag of a milestone
    tries: int = 0


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
        self.waiting: dict[str, Snapshot] = {}  # lane -> the newest snapshot that waits
        self.uploading: Snapshot | None = None
        self.wanted: dict[str, Snapshot] = {}  # lane -> the newest snapshot of all
        self.arrived: dict[str, int] = {}  # lane -> its step on the Hub
        self.finishing = self.finished = False
        self.events: list[dict] = []
        self.error = self.said = ""
        self.commit_times: deque[float] = deque()
        self.thread = threading.Thread(target=self._work, name="hub-push", daemon=True)
        bound_waiting(PUSH_SECONDS)
        os.environ.setdefault("HF_XET_CLIENT_READ_TIMEOUT", f"{PUSH_SECONDS}s")  # of 300, times its tries
        disable_progress_bars()  # they would write over ours

    def push(self, step: int, metrics: dict[str, float | None] | None = None) -> None:
        """Freeze the files of output_dir, all of one step, for the main branch; older weights there go.

        Never raises for the network or the disk. Weights are frozen as hard links, so whoever saves must
        replace them, as save_pretrained does, not rewrite them in place. The others are copied."""
        if not self.repo_id:
            return
        found = [*self.output_dir.glob("[!.]*"), *self.output_dir.glob("best/[!.]*")]
        files = [path.relative_to(self.output_dir).as_posix() for path in found if path.is_file()]
        numbers = [f"{key} {readable(value)}" for key, value in (metrics or {}).items() if value is not None]
        message = ", ".join([f"Step {step}", *numbers])
        self._freeze(step, "main", files, message)
        self.push_milestones()

    def push_milestones(self) -> None:
        """Those of output_dir that this run has not seen on the Hub; what failed is tried again."""
        with self.changed:
            known = {*self.waiting, *self.arrived, self.uploading.lane if self.uploading else ""}
        for folder in list_milestones(self.output_dir) if self.repo_id else ():
            if (tag := folder.name) not in known:
                names = sorted(path.name for path in folder.iterdir())
                self._queue(Snapshot(step_of(folder), MILESTONES, folder, names, f"Milestone {tag}", tag))

    def poll(self) -> list[dict]:
        """What has happened since the last call, as records for metrics.jsonl. Says a failure when it is new.

        Also looks for a checkpoint to push: they are written in the background and complete at any time."""
        self._push_checkpoint()
        with self.changed:
            events, self.events = self.events, []
        for event in events:
            passing = event["state"] == "retry" and event["tries"] == 2  # once is nothing to tell
            if (passing or event["state"] == "failed") and event["error"] != self.said:
                self.said = event["error"]
                place, who = self._place(event["branch"]), "this" if passing else "the next save"
                self.say(
                    f"{place}: step {event['push_step']} was not published: {event['error']}. "
                    f"Training goes on, and {who} tries again."
                )
        return events

    def finish(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for the newest snapshots to arrive: True if they did. Ends pushing."""
        self._push_checkpoint()
        self.push_milestones()
        with self.changed:
            self.finishing = True
            self.changed.notify_all()
            self.changed.wait_for(lambda: not self.waiting and self.uploading is None, timeout)
            self.finished = True
            lost = [s for lane, s in self.wanted.items() if self.arrived.get(lane) != s.step]
        shutil.rmtree(self.frozen, ignore_errors=True)  # an upload under way now fails before its commit
        for snapshot in lost:
            self.said = self.error
            self.say(
                f"{snapshot.message!r} did not reach {self._place(snapshot.branch)}: "
                f"{self.error or self.status}.\nEverything is in {self.output_dir}; this uploads it:\n"
                f"    {self._command(snapshot)}"
            )
        return not lost

    def _place(self, branch: str) -> str:
        return self.store.name if branch == BRANCH else self.repo_id

    def _command(self, snapshot: Snapshot) -> str:
        repo_id = self.store.repo_id if snapshot.branch == BRANCH else self.repo_id
        if not repo_id:
            return "the same command again"
        name = f"checkpoints/step-{snapshot.step:08d}"
        what = [str(self.output_dir / name), name, "--revision", BRANCH]
        if snapshot.branch == MILESTONES:
            what = [str(snapshot.folder), ".", "--revision", snapshot.lane, "--delete", "*"]
        if snapshot.branch == "main":
            what = [str(self.output_dir), ".", *NOT_THE_MODEL]
        return shlex.join(["hf", "upload", repo_id, *what, "--commit-message", snapshot.message])

    # ---- The caller's thread

    def _push_checkpoint(self) -> None:
        """Freeze the newest complete checkpoint and what belongs beside it, unless that was done before."""
        step, folder = newest_checkpoint(self.output_dir) if self.store else (-1, None)
        if not folder or BRANCH in self.wanted and self.wanted[BRANCH].step == step:
            return
        files = [p.relative_to(self.output_dir).as_posix() for p in folder.rglob("*") if p.is_file()]
        files += [name for name in BESIDE if (self.output_dir / name).is_file()]
        self._freeze(step, BRANCH, files, f"Training state after step {step}")

    def _freeze(self, step: int, branch: str, names: list[str], message: str) -> None:
        folder = self.frozen / f"{branch}-{step}-{time.monotonic_ns()}"
        snapshot = Snapshot(step, branch, folder, sorted(names), message, lane=branch)
        self.wanted[branch] = snapshot
        try:
            for name in snapshot.names:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                if name.endswith(".safetensors") or name.startswith("checkpoints/"):  # they never change
                    with suppress(OSError):  # a file system without hard links
                        os.link(self.output_dir / name, folder / name)
                        continue
                shutil.copyfile(self.output_dir / name, folder / name)
        except OSError as error:  # a full disk, most likely: no reason to end the training
            shutil.rmtree(folder, ignore_errors=True)
            return self._record(snapshot, "failed", error=f"{type(error).__name__}: {error}")
        self._queue(snapshot)

    def _queue(self, snapshot: Snapshot) -> None:
        with self.changed:
            if older := self.waiting.get(snapshot.lane):
                self._replace(older)
            self.waiting[snapshot.lane] = self.wanted[snapshot.lane] = snapshot
            self.changed.notify_all()
        if self.thread.ident is None:
            self.thread.start()

    # ---- Both

    def _replace(self, older: Snapshot) -> None:
        shutil.rmtree(older.folder, ignore_errors=True)
        self._record(older, "replaced")

    def _record(self, snapshot: Snapshot, state: str, **details) -> None:
        with self.changed:
            self.error = details.get("error", "" if state == "done" else self.error)
            event = {"event": "push", "push_step": snapshot.step, "branch": snapshot.branch, "state": state}
            self.events.append({**event, **details})

    # ---- The uploading thread

    def _work(self) -> None:
        failures = 0  # passing ones, in a row
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.waiting)
                self._wait_for_quota()
                if self.finished:
                    return
                lane = min(self.waiting, key=lambda lane: lane.startswith("step-"))  # milestones can wait
                snapshot = self.uploading = self.waiting.pop(lane)
            self.status = f"pushing step {snapshot.step}"
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
                self.arrived[snapshot.lane] = snapshot.step
                bucket = snapshot.branch == BRANCH and not self.store.repo_id
                if not bucket and revision != snapshot.lane:  # a tag that was there cost no commit
                    self.commit_times.append(time.monotonic())
            if snapshot.branch != MILESTONES:  # whose folders are no copies
                shutil.rmtree(snapshot.folder, ignore_errors=True)
            with self.changed:
                self.uploading = None
                self.changed.notify_all()

    def _upload(self, snapshot: Snapshot) -> str:
        """The hash of the commit, the tag of a milestone that arrived before a kill, or a bucket's folder."""
        if snapshot.branch == BRANCH:
            return self.store.upload(snapshot)
        additions = [CommitOperationAdd(name, str(snapshot.folder / name)) for name in snapshot.names]
        target = self.repo_id, snapshot.branch, additions, snapshot.message
        if snapshot.branch != MILESTONES:
            return commit(*target, replaces=WEIGHTS)
        if problem := find_problem(snapshot.folder):
            raise ValueError(f"{snapshot.folder} is damaged, {problem}")
        api, tag, tagged = HfApi(), snapshot.lane, False
        with suppress(RevisionNotFoundError):
            if not self._missing(additions, tag):
                return tag
            tagged = True  # by another run
        api.create_branch(self.repo_id, branch=MILESTONES, exist_ok=True)
        revision = commit(*target, replaces=ALL)
        if missing := self._missing(additions, revision):
            raise ConnectionError(f"{', '.join(missing)}: arrived with another hash")
        if tagged:
            api.delete_tag(self.repo_id, tag=tag)
        api.create_tag(self.repo_id, tag=tag, revision=revision)
        return revision

    def _missing(self, additions: list[CommitOperationAdd], revision: str) -> list[str]:
        """Files that the Hub has not at this revision, or with another hash."""
        expected = {addition.path_in_repo: addition for addition in additions}
        for file in HfApi().get_paths_info(self.repo_id, [*expected], revision=revision):
            ours = expected[file.path]
            if file.lfs and file.lfs.sha256 == ours.upload_info.sha256.hex():
                del expected[file.path]
            elif not file.lfs and file.blob_id == git_hash(Path(ours.path_or_fileobj).read_bytes()):
                del expected[file.path]
        return [*expected]

    def _retry_later(self, snapshot: Snapshot, trouble: Trouble, failures: int) -> None:
        """Back to the queue, unless a newer one has come, and wait: longer each time, or as long as asked."""
        delay, asked = min(120, 2.0**failures) * random.uniform(0.5, 1), trouble.retry_after is not None
        if asked:
            delay = max(delay, trouble.retry_after + random.random())
        with self.changed:
            hurry = self.finishing  # then the waits are short, and the one under way at that moment ends
            delay = min(delay, 5) if hurry and not asked else delay
            newest = self.waiting.setdefault(snapshot.lane, snapshot)
            self.uploading = None
            self.status = f"pushing step {newest.step} again in {math.ceil(delay)} s"
            self._record(snapshot, "retry", error=trouble.text, tries=snapshot.tries, wait=round(delay, 1))
            if newest is not snapshot:
                self._replace(snapshot)
            self.changed.wait_for(lambda: self.finished or self.finishing and not hurry and not asked, delay)

    def _wait_for_quota(self) -> None:
        while not self.finished:
            limit = self.commits_per_hour + (KEPT_FOR_THE_END if self.finishing else 0)
            times = self.commit_times
            seconds = 3600 - (time.monotonic() - times[-limit]) if len(times) >= limit else 0
            if seconds <= 0:
                return
            self.status = f"next push in {math.ceil(seconds / 60)} min (commit quota)"
            hurry = self.finishing
            self.changed.wait_for(lambda hurry=hurry: self.finished or self.finishing and not hurry, seconds)
