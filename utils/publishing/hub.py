"""Pushes the saved model to the Hub in a thread, while training goes on. Neither a network error nor a full
disk ends the run.

Data loader workers that are forked while the thread makes a request can deadlock: start them before that.
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
from utils.publishing.export import TEMPORARY
from utils.publishing.model_card import repo_name
from utils.state.stop_signals import received_signal

START_TIMEOUT, TIMEOUT = 5, 60  # seconds until a request without an answer fails: before training, and later
FINISH_SECONDS, STOPPED_SECONDS = 600, 20  # for the last push: at the end of a run, after a stop signal
LONGEST_PAUSE = 60  # seconds between attempts to push the last save
MAY_PASS = (408, 409, 412, 423, 425, 429)  # HTTP statuses below 500 after which another attempt may succeed
COMMIT_METRICS = ("loss/eval", "perplexity", "accuracy")  # in the commit message
WEIGHTS = r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?"  # a commit deletes older files of this name
# Not published: folders, hidden files, earlier metrics, logs, and the script, which may contain a password.
UNPUBLISHED = ["*/*", ".*", "replaced-*", "*.out", "*.log", "*.py"]
LOGIN = "run `hf auth login`, or set HF_TOKEN, with a token that may write (https://hf.co/settings/tokens)"


class Hub:
    """The repository of a run. All processes create this object; with push_to_hub the main process pushes. A
    save is skipped while an older one is being pushed, except for the last save.

    Creates the repository at once. ValueError on all processes if the token may not write there, or if the
    Hub does not answer within seconds. repo_id: user/name, or "" if this process pushes nothing. status: the
    state of the last push in a few words."""

    def __init__(self, args, accelerator):
        self.output_dir = Path(args.output_dir)
        self.frozen = self.output_dir / ".hub"  # on the same disk, so that weights can be hard links
        self.api, self.name, self.repo_id, self.status = HfApi(), repo_name(args), "", ""
        self.thread, self.error = threading.Thread(), ""  # of the last push
        # Steps: of the newest save, and of the last that was pushed, refused by the Hub, reported as failed.
        self.newest = self.pushed = self.refused = self.reported = None
        if not args.push_to_hub:
            return
        repo_id = on_main_process(accelerator, open_repository, self.api, self.name, args.hub_private_repo)
        self.repo_id = repo_id if accelerator.is_main_process else ""
        os.environ.setdefault("HF_XET_CLIENT_READ_TIMEOUT", f"{TIMEOUT}s")  # default: 300 s per attempt
        disable_progress_bars()  # they would overwrite ours

    @property
    def published(self) -> str:
        """The model's page if it shows the newest save, else ""."""
        arrived = self.newest is not None and self.newest == self.pushed
        return f"{self.api.endpoint}/{self.repo_id}" if arrived else ""

    def command(self, *options: str) -> str:
        """A shell command that uploads the same files as `push`."""
        exclude = [word for pattern in UNPUBLISHED for word in ("--exclude", pattern)]
        upload = ["hf", "upload", self.repo_id or self.name, str(self.output_dir), "."]
        return ("" if get_token() else "hf auth login && ") + shlex.join([*upload, *exclude, *options])

    def push(self, step: int) -> None:
        """Pushes the files of output_dir after the save of `step`, unless the model could not be saved."""
        if not self.repo_id or (self.output_dir / TEMPORARY).exists():
            return
        self.newest = step
        if self.thread.is_alive():
            return
        message, self.status = commit_message(self.output_dir, step), f"pushing step {step}"
        try:
            freeze(self.output_dir, self.frozen)
        except OSError as error:  # most likely the disk is full
            shutil.rmtree(self.frozen, ignore_errors=True)
            return self._failed(step, error)
        self.thread = threading.Thread(target=self._upload, args=(step, message), daemon=True)
        self.thread.start()

    def finish(self, step: int) -> bool:
        """Pushes the save of this step until that succeeds, for at most ten minutes, or 20 s after a stop
        signal. If it does not succeed, prints how to upload the files and returns False."""
        if self.newest != step:  # saved by an earlier start of the run
            self.push(step)
        deadline, next_attempt, pause = time.monotonic() + FINISH_SECONDS, 0.0, 1
        if self.newest != self.pushed:
            tqdm.write(f"hub        pushing step {self.newest} to {self.repo_id}, for at most "
                       f"{FINISH_SECONDS // 60} minutes; Ctrl-C ends that", file=sys.stdout)  # fmt: skip
        while self.thread.is_alive() or self.newest not in (self.pushed, self.refused):
            if received_signal():
                deadline = min(deadline, time.monotonic() + STOPPED_SECONDS)
            if time.monotonic() > deadline:
                break
            if not self.thread.is_alive() and time.monotonic() > next_attempt:
                self.push(self.newest)
                next_attempt, pause = time.monotonic() + pause, min(2 * pause, LONGEST_PAUSE)
            time.sleep(0.05)
        if self.newest == self.pushed:
            return True
        shutil.rmtree(self.frozen, ignore_errors=True)  # an upload in progress fails before its commit
        message = commit_message(self.output_dir, self.newest)
        print(f"{message!r} did not reach {self.repo_id}: {self.error or self.status}.\nAll files are in "
              f"{self.output_dir}. To upload them:\n    {self.command('--commit-message', message)}",
              flush=True)  # fmt: skip
        return False

    def _upload(self, step: int, message: str) -> None:
        """Runs in the thread."""
        try:
            commit(self.api, self.repo_id, self.frozen, message)
            self.error, self.status, self.pushed = "", f"step {step} pushed", step
        except Exception as error:
            self._failed(step, error)
        shutil.rmtree(self.frozen, ignore_errors=True)

    def _failed(self, step: int, error: Exception) -> None:
        """Prints a failure if it differs from the last one, at most once per save."""
        before, self.error, self.status = self.error, describe_error(error), f"step {step} not pushed"
        if self.error != before and self.reported != step:
            self.reported = step
            tqdm.write(f"{self.repo_id}: step {step} was not published: {self.error}. Training goes on; the "
                       "next save, or the end of the run, tries again.", file=sys.stdout)  # fmt: skip
        status = getattr(getattr(error, "response", None), "status_code", 500)
        if 400 <= status < 500 and status not in MAY_PASS:
            self.refused = step


def freeze(output_dir: Path, frozen: Path) -> None:
    """Copies output_dir to `frozen`. Weights become hard links, as later saves replace those files and never
    write into them."""
    shutil.rmtree(frozen, ignore_errors=True)  # of a killed run
    frozen.mkdir(parents=True)
    names = [path.name for path in output_dir.iterdir() if path.is_file()]
    for name in filter_repo_objects(names, ignore_patterns=UNPUBLISHED):
        if name.endswith(".safetensors"):
            with contextlib.suppress(OSError):  # if this file system has no hard links, copy
                os.link(output_dir / name, frozen / name)
                continue
        shutil.copyfile(output_dir / name, frozen / name)


def open_repository(api: HfApi, name: str, private: bool) -> str:
    """Creates the repository if it is missing, and returns its id, user/name. ValueError, within seconds, if
    the token may not write there or the Hub does not answer."""
    if not get_token():
        raise ValueError(f"push_to_hub: found no Hub token; {LOGIN}.")
    set_timeout(START_TIMEOUT)
    try:
        repo_id = api.create_repo(name, private=private, exist_ok=True).repo_id
        # create_repo accepts a repository that we may only read. This is the first request of every push.
        api.preupload_lfs_files(repo_id, [CommitOperationAdd("README.md", b"-")])
    except Exception as error:
        raise ValueError(f"hub_model_id {name}: {describe_error(error)}. Check that you may write to this "
                         f"name, and that this machine can reach {api.endpoint}. If the token is revoked or "
                         f"may only read: {LOGIN}. Or train without push_to_hub.") from None  # fmt: skip
    set_timeout(TIMEOUT)
    return repo_id


def set_timeout(seconds: float) -> None:
    """Sets a timeout for each connect, read and write of the Hub's client, which has none by default."""

    def factory():
        client = default_client_factory()
        client.timeout = seconds
        return client

    set_client_factory(factory)


def commit(api: HfApi, repo_id: str, folder: Path, message: str) -> None:
    """Pushes all files in `folder` as a single commit. upload_folder could make several, and between them the
    repository would have weights and configuration of different steps."""
    names, published = sorted(os.listdir(folder)), api.list_repo_files(repo_id)
    stale = [name for name in published if re.fullmatch(WEIGHTS, name) and name not in names]
    additions = [CommitOperationAdd(name, str(folder / name)) for name in names]
    for addition in additions:  # one by one: threads for several would delay the exit of the process
        api.preupload_lfs_files(repo_id, [addition], free_memory=False)
    api.create_commit(repo_id, [*additions, *map(CommitOperationDelete, stale)], commit_message=message)


def describe_error(error: Exception) -> str:
    """An exception as one line without secrets."""
    if getattr(error, "response", None) is None:  # an error of LFS: its cause says more
        error = error.__cause__ or error
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return without_secrets(text)[:400].rstrip(".")


def commit_message(output_dir: Path, step: int) -> str:
    """Step N, loss/eval 1.23, ...: with the results of the last evaluation in metrics.jsonl."""
    results = newest(read_metrics(output_dir), "loss/eval")[0].items()
    texts = (f"{key} {readable(value)}" for key, value in results
             if key.startswith(COMMIT_METRICS) and value is not None and "_stderr" not in key)  # fmt: skip
    return ", ".join([f"Step {step}", *texts])

