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
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token, set_client_factory
from huggingface_hub.utils import disable_progress_bars, filter_repo_objects
from huggingface_hub.utils._http import default_client_factory
from tqdm import tqdm

from utils.display.metrics import newest, read_metrics, readable
from utils.io.mistakes import on_main_process
from utils.io.text import without_secrets
from utils.publishing.export import ASIDE
from utils.publishing.model_card import repo_name
from utils.state.stop_signals import requested

CHECK_SECONDS, SILENCE = 5, 60  # without an answer until a request fails: before training, and later
FINISH_SECONDS, STOPPED_SECONDS = 600, 20  # for the last push: at the end of a run, after a stop signal
LONGEST_PAUSE = 60  # seconds between pushes of the last save
MAY_PASS = (408, 409, 412, 423, 425, 429)  # HTTP statuses below 500
SHOWN = ("loss/eval", "perplexity", "accuracy")  # metrics of a commit message
WEIGHTS = r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?"  # a commit deletes those that it lacks
# Folders, hidden files, earlier metrics, logs, the script (somebody's may hold a password).
UNPUBLISHED = ["*/*", ".*", "replaced-*", "*.out", "*.log", "*.py"]
LOGIN = "run `hf auth login`, or set HF_TOKEN, with a token that may write (https://hf.co/settings/tokens)"


class Hub:
    """The repository of a run. All processes make it; the main process pushes, if push_to_hub is set. A
    save that comes while another one is pushed is not pushed, unless it is the last.

    The repository is made now: ValueError on all processes if we may not write there or the Hub does not
    answer within seconds. repo_id: user/name, or "" without pushes; url: of the model's page; status: a few
    words on the last push."""

    def __init__(self, args, accelerator):
        self.output_dir = Path(args.output_dir)
        self.frozen = self.output_dir / ".hub"  # on the same disk, so that weights can be hard links
        self.api, self.repo_id, self.url, self.status = HfApi(), "", "", ""
        self.named = repo_name(args)
        self.thread, self.error = threading.Thread(), ""  # of the last push
        self.newest = self.arrived = self.refused = self.told = None  # steps of saves
        if not args.push_to_hub:
            return
        repo_id = on_main_process(accelerator, open_repository, self.api, self.named, args.hub_private_repo)
        self.repo_id = repo_id if accelerator.is_main_process else ""
        self.url = self.repo_id and f"{self.api.endpoint}/{self.repo_id}"
        os.environ.setdefault("HF_XET_CLIENT_READ_TIMEOUT", f"{SILENCE}s")  # default: 300 s for each try
        disable_progress_bars()  # they would overwrite ours

    @property
    def published(self) -> str:
        """The page of the model, if the newest save has arrived there, else ""."""
        return self.url if self.newest is not None and self.newest == self.arrived else ""

    def command(self, *options: str) -> str:
        """A shell command that uploads the same files as `push`."""
        words = [word for pattern in UNPUBLISHED for word in ("--exclude", pattern)]
        where = self.repo_id or self.named, str(self.output_dir), "."
        login = "" if get_token() else "hf auth login && "
        return login + shlex.join(["hf", "upload", *where, *words, *options])

    def push(self, step: int) -> None:
        """Push the files of output_dir, whose save is of this step, unless the model could not be saved."""
        if not self.repo_id or (self.output_dir / ASIDE).exists():
            return
        self.newest = step
        if self.thread.is_alive():
            return
        message, self.status = commit_message(self.output_dir, step), f"pushing step {step}"
        try:
            freeze(self.output_dir, self.frozen)
        except OSError as error:  # most likely a full disk, which needs the room
            shutil.rmtree(self.frozen, ignore_errors=True)
            return self._failed(step, error)
        self.thread = threading.Thread(target=self._upload, args=(step, message), daemon=True)
        self.thread.start()

    def finish(self, step: int) -> bool:
        """Push the save of this step until it arrives, for at most ten minutes, or 20 s after a stop signal.
        If it does not arrive, print how to upload it and return False."""
        if self.newest != step:  # an earlier start has saved it
            self.push(step)
        deadline, again, pause = time.monotonic() + FINISH_SECONDS, 0.0, 1
        if self.newest != self.arrived:
            tqdm.write(f"hub        waits up to {FINISH_SECONDS // 60} minutes until {self.repo_id} has "
                       f"step {self.newest}; Ctrl-C ends that", file=sys.stdout)  # fmt: skip
        while self.thread.is_alive() or self.newest not in (self.arrived, self.refused):
            if requested():
                deadline = min(deadline, time.monotonic() + STOPPED_SECONDS)
            if time.monotonic() > deadline:
                break
            if not self.thread.is_alive() and time.monotonic() > again:
                self.push(self.newest)
                again, pause = time.monotonic() + pause, min(2 * pause, LONGEST_PAUSE)
            time.sleep(0.05)
        if self.newest == self.arrived:
            return True
        shutil.rmtree(self.frozen, ignore_errors=True)  # an upload in progress fails before its commit
        message = commit_message(self.output_dir, self.newest)
        print(f"{message!r} did not reach {self.repo_id}: {self.error or self.status}.\nEverything is in "
              f"{self.output_dir}; this uploads it:\n    {self.command('--commit-message', message)}",
              flush=True)  # fmt: skip
        return False

    def _upload(self, step: int, message: str) -> None:
        """The thread."""
        try:
            commit(self.api, self.repo_id, self.frozen, message)
            self.error, self.status, self.arrived = "", f"step {step} pushed", step
        except Exception as error:
            self._failed(step, error)
        shutil.rmtree(self.frozen, ignore_errors=True)

    def _failed(self, step: int, error: Exception) -> None:
        """Tell the user each new failure, once for each save."""
        before, self.error, self.status = self.error, reason(error), f"step {step} not pushed"
        if self.error != before and self.told != step:
            self.told = step
            tqdm.write(f"{self.repo_id}: step {step} was not published: {self.error}. Training goes on; the "
                       "next save, or the end of the run, tries again.", file=sys.stdout)  # fmt: skip
        status = getattr(getattr(error, "response", None), "status_code", 500)
        if 400 <= status < 500 and status not in MAY_PASS:
            self.refused = step


def freeze(output_dir: Path, frozen: Path) -> None:
    """Hard links of weights, which are replaced and never rewritten, and copies of the other files."""
    shutil.rmtree(frozen, ignore_errors=True)  # left by a killed run
    frozen.mkdir(parents=True)
    names = [path.name for path in output_dir.iterdir() if path.is_file()]
    for name in filter_repo_objects(names, ignore_patterns=UNPUBLISHED):
        if name.endswith(".safetensors"):
            with contextlib.suppress(OSError):  # this file system has no hard links
                os.link(output_dir / name, frozen / name)
                continue
        shutil.copyfile(output_dir / name, frozen / name)


def open_repository(api: HfApi, name: str, private: bool) -> str:
    """The id user/name of the repository, which is created if it is missing. ValueError, within seconds, if
    we may not write there or the Hub does not answer."""
    if not get_token():
        raise ValueError(f"push_to_hub: found no Hub token; {LOGIN}.")
    bound_waiting(CHECK_SECONDS)
    try:
        repo_id = api.create_repo(name, private=private, exist_ok=True).repo_id
        # create_repo accepts a repository that we may only read; this is the first request of every push.
        api.preupload_lfs_files(repo_id, [CommitOperationAdd("README.md", b"-")])
    except Exception as error:
        raise ValueError(f"hub_model_id {name}: {reason(error)}. Is it a name that you may write to, and can "
                         f"{api.endpoint} be reached from here? If the token is missing, revoked or may only "
                         f"read: {LOGIN}. Or train without push_to_hub.") from None  # fmt: skip
    bound_waiting(SILENCE)
    return repo_id


def bound_waiting(seconds: float) -> None:
    """Sets a timeout for each connect, read and write of the Hub's client, which has none."""

    def factory():
        client = default_client_factory()
        client.timeout = seconds
        return client

    set_client_factory(factory)


def commit(api: HfApi, repo_id: str, folder: Path, message: str) -> None:
    """One commit of all files in `folder`. upload_folder may divide files over several commits, the first of
    which have weights and configurations of different steps."""
    names, there = sorted(os.listdir(folder)), api.list_repo_files(repo_id)
    stale = [name for name in there if re.fullmatch(WEIGHTS, name) and name not in names]
    additions = [CommitOperationAdd(name, str(folder / name)) for name in names]
    for addition in additions:  # several at once would start threads that delay the exit of the process
        api.preupload_lfs_files(repo_id, [addition], free_memory=False)
    api.create_commit(repo_id, [*additions, *map(CommitOperationDelete, stale)], commit_message=message)


def reason(error: Exception) -> str:
    """An exception as a line without secrets."""
    if getattr(error, "response", None) is None:  # of LFS the cause says more
        error = error.__cause__ or error
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return without_secrets(text)[:400].rstrip(".")


def commit_message(output_dir: Path, step: int) -> str:
    """Step N, loss/eval 1.23, ...: results of the last evaluation in metrics.jsonl."""
    results = newest(read_metrics(output_dir), "loss/eval")[0].items()
    known = (f"{key} {readable(value)}" for key, value in results
             if key.startswith(SHOWN) and value is not None and "_stderr" not in key)  # fmt: skip
    return ", ".join([f"Step {step}", *known])

