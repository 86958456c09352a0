"""Pushes of saves to the Hub, by a thread during training. Neither the network nor a full disk ends the run.

Data loader workers that are forked during an HTTP call of the thread can deadlock: start them before it.
"""

import contextlib
import os
import re
import shlex
import shutil
import sys
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.utils import disable_progress_bars, filter_repo_objects
from tqdm import tqdm

from utils.display.metrics import newest, read_metrics
from utils.display.progress import readable
from utils.io.mistakes import on_main_process
from utils.io.retry import FIRST_CONTACT, SILENCE, bound_waiting, diagnose, with_retries
from utils.publishing.export import ASIDE
from utils.publishing.model_card import repo_name
from utils.state.stop_signals import requested

CHECK_SECONDS = 5  # without an answer of the Hub before training; later it is SILENCE
FINISH_SECONDS, STOPPED_SECONDS = 600, 20  # for the last push: at the end of a run, after a stop signal
SHOWN = ("loss/eval", "perplexity", "accuracy")  # metrics of a commit message
WEIGHTS = r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?"  # a commit deletes those that it lacks
LOGIN = "run `hf auth login`, or set HF_TOKEN, with a token that may write (https://hf.co/settings/tokens)"
REMEDIES = {  # by HTTP status
    401: f"; the token is missing, revoked or expired: {LOGIN}",
    403: f"; this token may not write there: choose another hub_model_id, or {LOGIN}",
    404: "; there is no such repository: create it, or choose another hub_model_id",
    413: "; too large for the Hub, see https://huggingface.co/docs/hub/storage-limits",
}


@dataclass
class Snapshot:
    """The files of one save, which no longer change. They become one commit."""

    step: int
    folder: Path
    message: str
    state: str = ""  # the last event: replaced, failed, done
    error: str = ""


class Hub:
    """The repository of a run. All processes make it; the main process pushes, if push_to_hub is set and the
    run trains. At most one save waits, the newest.

    repo_id: user/name, or "" without pushes; url: of the model's page; status: a few words on the last push.
    problems: what is wrong so far. Without any the repository is made now; a line is added, on all processes,
    if we may not write there or the Hub does not answer within seconds."""

    def __init__(self, args, accelerator, problems: list[str]):
        self.output_dir = Path(args.output_dir)
        self.frozen = self.output_dir / ".hub"  # on the same disk, so that weights can be hard links
        self.api, self.repo_id, self.url, self.status = HfApi(), "", "", ""
        self.named = repo_name(args)
        self.last_error = ""  # that the user has been told
        self.changed, self.finished, self.events = threading.Condition(), False, []  # it guards what follows
        self.newest = self.waiting = self.uploading = None  # snapshots
        if not args.push_to_hub or args.eval_only or args.show or problems:
            return
        try:
            where = self.named, args.hub_private_repo
            repo_id = on_main_process(accelerator, open_repository, self.api, *where)
        except ValueError as error:
            return problems.append(str(error))
        self.repo_id = repo_id if accelerator.is_main_process else ""
        self.url = self.repo_id and f"{self.api.endpoint}/{self.repo_id}"

    @property
    def published(self) -> str:
        """The page of the model, if the newest save has arrived there, else ""."""
        return self.url if self.newest and self.newest.state == "done" else ""

    @property
    def command(self) -> str:
        """A shell command that uploads what push does of the folders and files that are there now."""
        login = "" if get_token() else "hf auth login && "
        return login + upload_command(self.repo_id or self.named, self.output_dir)

    def push(self, step: int) -> None:
        """Push the files of output_dir, whose save is of this step, unless the model could not be saved."""
        if not self.repo_id or (self.output_dir / ASIDE).exists():
            return
        if not self.newest:  # not earlier: now output_dir is locked
            shutil.rmtree(self.frozen, ignore_errors=True)  # left by a killed run
            os.environ.setdefault("HF_XET_CLIENT_READ_TIMEOUT", f"{SILENCE}s")  # default: 300 s for each try
            disable_progress_bars()  # they would overwrite ours
            threading.Thread(target=self._work, name="uploads", daemon=True).start()
        folder, message = self.frozen / f"{step}-{time.monotonic_ns()}", commit_message(self.output_dir, step)
        snapshot = Snapshot(step, folder, message)
        try:
            self._freeze(folder)
        except OSError as error:  # most likely a full disk; an older snapshot keeps waiting
            self.newest = snapshot
            return self._record(snapshot, "failed", error=f"{type(error).__name__}: {error}")
        with self.changed:
            if self.waiting:
                self._record(self.waiting, "replaced")
            self.newest = self.waiting = snapshot
            self.changed.notify_all()

    def poll(self) -> list[dict]:
        """The events since the last call, for metrics.jsonl. Tells the user each new failure."""
        with self.changed:
            events, self.events = self.events, []
        for event in events:
            if event.get("error", self.last_error) != self.last_error and not self.finished:
                self.last_error = event["error"]
                tqdm.write(f"{self.repo_id}: step {event['push_step']} was not published: {self.last_error}. "
                           "Training goes on and tries again.", file=sys.stdout)  # fmt: skip
        return events

    def finish(self) -> bool:
        """Wait for the newest save to arrive: ten minutes, or 20 s after a stop signal. If it does not, print
        how to upload it and return False."""
        deadline = time.monotonic() + FINISH_SECONDS
        with self.changed:
            if self.waiting or self.uploading:
                tqdm.write(f"hub        waits up to {FINISH_SECONDS // 60} minutes until {self.repo_id} has "
                           f"step {self.newest.step}; Ctrl-C ends that", file=sys.stdout)
            while (self.waiting or self.uploading) and time.monotonic() < deadline:
                if requested():
                    deadline = min(deadline, time.monotonic() + STOPPED_SECONDS)
                self.changed.wait(0.1)
            self.finished, last = True, self.newest
            self.changed.notify_all()
        if last:
            shutil.rmtree(self.frozen, ignore_errors=True)  # an upload in progress fails before its commit
        if not last or last.state == "done":
            return True
        command = upload_command(self.repo_id, self.output_dir, "--commit-message", last.message)
        print(f"{last.message!r} did not reach {self.repo_id}: {last.error or self.status}.\n"
              f"Everything is in {self.output_dir}; this uploads it:\n    {command}", flush=True)  # fmt: skip
        return False

    def _freeze(self, folder: Path) -> None:
        """Hard links of weights, which are replaced and never rewritten, and copies of the other files."""
        folder.mkdir(parents=True)
        names = [path.name for path in self.output_dir.iterdir() if path.is_file()]
        for name in filter_repo_objects(names, ignore_patterns=unpublished(self.output_dir)):
            if name.endswith(".safetensors"):
                with contextlib.suppress(OSError):  # this file system has no hard links
                    os.link(self.output_dir / name, folder / name)
                    continue
            shutil.copyfile(self.output_dir / name, folder / name)

    def _record(self, snapshot: Snapshot, state: str, **details) -> None:
        shutil.rmtree(snapshot.folder, ignore_errors=True)
        with self.changed:
            snapshot.state, snapshot.error = state, details.get("error", "")
            self.events.append({"event": "push", "push_step": snapshot.step, "state": state} | details)

    def _work(self) -> None:
        """The thread."""
        while snapshot := self._next():
            started, self.status = time.monotonic(), f"pushing step {snapshot.step}"
            upload = partial(commit, self.api, self.repo_id, snapshot.folder, snapshot.message)
            try:
                revision = with_retries(upload, self.status)
            except Exception as error:
                trouble, self.status = diagnose(error), f"step {snapshot.step} not pushed"
                self._record(snapshot, "failed", error=f"{trouble.text}{REMEDIES.get(trouble.status, '')}")
                continue
            self.status = f"step {snapshot.step} pushed"
            seconds = round(time.monotonic() - started, 2)
            self._record(snapshot, "done", revision=revision, seconds=seconds)

    def _next(self) -> Snapshot | None:
        """Waits for a snapshot to upload. None after `finish`."""
        with self.changed:
            self.uploading = None
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.waiting or self.finished)
            if not self.finished:
                self.uploading, self.waiting = self.waiting, None
            return self.uploading


def open_repository(api: HfApi, name: str, private: bool) -> str:
    """The id user/name of the repository, which is created if it is missing. ValueError, within seconds, if
    we may not write there or the Hub does not answer."""

    def ask(call, *args, **settings):
        try:
            return with_retries(lambda: call(*args, **settings), subject, FIRST_CONTACT)
        except Exception as error:
            trouble = diagnose(error)
            away = f"; can {api.endpoint} be reached from here? If not, train without push_to_hub"
            remedy = REMEDIES.get(trouble.status, away if trouble.transient else "")
            raise ValueError(f"{subject}: {trouble.text}{remedy}.") from None

    bound_waiting(CHECK_SECONDS)
    subject = "push_to_hub"
    if not get_token():
        raise ValueError(f"{subject}: found no Hub token; {LOGIN}.")
    user = ask(api.whoami)["name"]
    repo_id = name if "/" in name else f"{user}/{name}"
    subject = f"hub_model_id {repo_id}"
    ask(api.create_repo, repo_id, private=private, exist_ok=True)
    # create_repo accepts a repository that we may only read; this is the first request of every push.
    ask(api.preupload_lfs_files, repo_id, [CommitOperationAdd("README.md", b"-")])
    bound_waiting()
    return repo_id


def commit(api: HfApi, repo_id: str, folder: Path, message: str) -> str:
    """One commit of all files in `folder`; returns its hash. upload_folder may divide files over several
    commits, the first of which have weights and configurations of different steps."""
    names, there = sorted(os.listdir(folder)), api.list_repo_files(repo_id)
    stale = [name for name in there if re.fullmatch(WEIGHTS, name) and name not in names]
    additions = [CommitOperationAdd(name, str(folder / name)) for name in names]
    for addition in additions:  # several at once would start threads that delay the exit of the process
        api.preupload_lfs_files(repo_id, [addition], free_memory=False)
    changes = [*additions, *map(CommitOperationDelete, stale)]
    return api.create_commit(repo_id, changes, commit_message=message).oid


def commit_message(output_dir: Path, step: int) -> str:
    """Step N, loss/eval 1.23, ...: results of the last evaluation in metrics.jsonl."""
    results = newest(read_metrics(output_dir), "loss/eval")[0].items()
    known = (f"{key} {readable(value)}" for key, value in results
             if key.startswith(SHOWN) and value is not None and "_stderr" not in key)  # fmt: skip
    return ", ".join([f"Step {step}", *known])


def unpublished(output_dir) -> list[str]:
    """Patterns of what is not published: folders, hidden files, earlier metrics, logs."""
    folders = sorted(path.name for path in Path(output_dir).glob("[!.]*") if path.is_dir())
    return [*(f"{name}/*" for name in folders), ".*", "replaced-*", "*.out", "*.log"]


def upload_command(repo_id: str, output_dir, *options: str) -> str:
    """A shell command that uploads the same files as `push`."""
    words = [word for pattern in unpublished(output_dir) for word in ("--exclude", pattern)]
    return shlex.join(["hf", "upload", repo_id, str(output_dir), ".", *words, *options])
