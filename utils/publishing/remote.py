"""Remote storage for snapshots: a repository on the Hub, or a folder at any fsspec URL.

A checkpoint that is listed there is complete, whatever dies when: on the Hub it is one commit; in a bucket
its manifest.json is written last and deleted first. The Hub's client looks the token up at each call: a
renewed login counts, and nothing is stored.
"""

import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, HfFileSystem, get_token
from huggingface_hub.errors import RevisionNotFoundError

from utils.io.files import verify_checksums
from utils.io.retry import FIRST_CONTACT, bound_waiting, diagnose, with_retries
from utils.io.secrets import without_secrets
from utils.io.urls import Folder, explained
from utils.state.folders import list_checkpoints, step_of

logger = logging.getLogger(__name__)

CHECK_SECONDS = 5  # without an answer of the Hub before training; later it is SILENCE
CHECKPOINTS, MILESTONES = "checkpoints", "milestones"  # branches beside main, which has the model
BESIDE = ("args.json", "metrics.jsonl", "run.json")  # stored with each checkpoint: a resume appends to them
REPLACED = {  # of each branch: files that a commit deletes, unless it contains them
    "main": r"(best/)?model(-\d+-of-\d+)?\.safetensors(\.index\.json)?",
    CHECKPOINTS: "checkpoints/.*",
    MILESTONES: r"(?!\.gitattributes$).*",
}
TOKENS = "https://huggingface.co/settings/tokens"
LOGIN = f"run `hf auth login`, or set HF_TOKEN, with a token that may write ({TOKENS})"


class Hub:
    """A repository: the model on main, milestones as tags, checkpoints as the history of a branch."""

    remedies = {  # by HTTP status
        401: f"; the token is missing, revoked or expired: {LOGIN}",
        403: f"; this token may not write there: choose another hub_model_id, or {LOGIN}",
        404: "; there is no such repository: create it, or choose another hub_model_id",
        413: "; too large for the Hub, see https://huggingface.co/docs/hub/storage-limits",
    }

    def __init__(self, repo_id: str, private: bool = False, setting: str = "push_to_hub"):
        """Creates the repository if it is missing. ValueError with the remedy, within seconds, if we may not
        write there or the Hub does not answer. setting: push_to_hub, or checkpoint_url."""
        bound_waiting(CHECK_SECONDS)
        if not get_token():
            raise ValueError(f"{setting}: found no Hub token; {LOGIN}.")
        api, self.subject, self.revision = HfApi(), setting, CHECKPOINTS
        user = self._ask(api.whoami)["name"]
        self.repo_id = self.name = repo_id if "/" in repo_id else f"{user}/{repo_id}"
        self.subject = f"hub_model_id {self.repo_id}"
        self._ask(api.create_repo, self.repo_id, private=private, exist_ok=True)
        # create_repo accepts a repository that we may only read; this is the first request of every push.
        self._ask(api.preupload_lfs_files, self.repo_id, [CommitOperationAdd("README.md", b"-")])
        bound_waiting()
        if setting == "checkpoint_url":
            self.name = f"hf://{self.repo_id}"
            self._ask(api.create_branch, self.repo_id, branch=CHECKPOINTS, exist_ok=True)

    def _ask(self, call: Callable, *args, **kwargs) -> Any:
        """call(...), with retries. ValueError that says what to do."""
        try:
            return with_retries(partial(call, *args, **kwargs), self.subject, FIRST_CONTACT)
        except Exception as error:
            trouble = diagnose(error)
            away = f"; can {HfApi().endpoint} be reached from here? If not, train without push_to_hub"
            remedy = self.remedies.get(trouble.status, away if trouble.transient else "")
            raise ValueError(f"{self.subject}: {trouble.text}{remedy}.") from None

    def upload(self, snapshot) -> str:
        """Returns the hash of the commit, or the tag of a milestone that was there already."""
        api, tag, moves = HfApi(), snapshot.tag, False
        if not tag:
            return self._commit(snapshot)
        if problem := verify_checksums(snapshot.folder):
            raise ValueError(f"{snapshot.folder} is damaged, {problem}")
        with suppress(RevisionNotFoundError):
            if not self._differing(snapshot, tag):
                return tag
            moves = True  # the tag is another run's
        api.create_branch(self.repo_id, branch=MILESTONES, exist_ok=True)
        revision = self._commit(snapshot)
        if different := self._differing(snapshot, revision):
            raise ConnectionError(f"{', '.join(different)}: arrived with another hash")
        if moves:
            api.delete_tag(self.repo_id, tag=tag)
        api.create_tag(self.repo_id, tag=tag, revision=revision)
        return revision

    def _commit(self, snapshot) -> str:
        """One commit of all files; upload_folder would split many files over several commits."""
        api, names, branch = HfApi(), snapshot.names, snapshot.branch
        there = api.list_repo_files(self.repo_id, revision=branch)
        stale = [name for name in there if re.fullmatch(REPLACED[branch], name) and name not in names]
        additions = [CommitOperationAdd(name, str(snapshot.folder / name)) for name in names]
        for addition in additions:  # several at once would start threads that delay the exit of the process
            api.preupload_lfs_files(self.repo_id, [addition], revision=branch, free_memory=False)
        changes = [*additions, *map(CommitOperationDelete, stale)]
        return api.create_commit(self.repo_id, changes, commit_message=snapshot.message, revision=branch).oid

    def _differing(self, snapshot, revision: str) -> list[str]:
        """Files of the snapshot that the revision lacks or has with another hash."""
        there = HfApi().verify_repo_checksums(self.repo_id, revision=revision, local_dir=snapshot.folder)
        differing = [*there.extra_paths, *(file["path"] for file in there.mismatches)]
        return [name for name in differing if name in snapshot.names]  # the folder may have newer files

    def milestones(self) -> list[int]:
        """The steps of the tags step-N, in order."""
        names = (tag.name for tag in self._ask(HfApi().list_repo_refs, self.repo_id).tags)
        return sorted(int(name[5:]) for name in names if re.fullmatch(r"step-\d+", name, re.ASCII))

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, in order. `read` and `download` use the revision of now."""
        self.revision = self._ask(HfApi().repo_info, self.repo_id, revision=CHECKPOINTS).sha
        return _complete(self._ask(HfApi().list_repo_files, self.repo_id, revision=self.revision))

    def read(self, step: int, name: str) -> bytes:
        """One of BESIDE. FileNotFoundError if it is missing."""
        return HfFileSystem().cat_file(f"{self.repo_id}@{self.revision}/{name}")

    def download(self, step: int, folder: Path) -> None:
        """Copies checkpoints/step-N and BESIDE into `folder`, unverified. ValueError if that fails."""
        wanted = {"local_dir": folder, "allow_patterns": [f"checkpoints/step-{step:08d}/*", *BESIDE]}
        self._ask(HfApi().snapshot_download, self.repo_id, revision=self.revision, **wanted)


class Bucket:
    """A folder at a URL. Each checkpoint is a folder in its checkpoints/, together with its BESIDE.

    limit: how many of the newest checkpoints are kept there, 0 for all."""

    remedies = {}

    def __init__(self, url: str, limit: int = 0):
        """ValueError if nothing can be written there."""
        bound_waiting()  # for hf://buckets
        self.url, self.name, self.limit = url, without_secrets(url), limit
        self._folder()  # raises for an unknown protocol

        def try_writing(folder: Folder) -> None:
            folder.put(Path(__file__), ".writable")
            folder.fs.rm_file(folder.path(".writable"))

        self._ask("written", try_writing)

    def _folder(self) -> Folder:
        """A new connection: a file system that has lost its connection (ftp) never makes another."""
        return Folder(f"{self.url}/checkpoints", skip_instance_cache=True)

    def _ask(self, verb: str, use: Callable[[Folder], Any]) -> Any:
        with explained(f"checkpoint_url {self.name}", verb, kinds=Exception):
            return with_retries(lambda: use(self._folder()), self.name, FIRST_CONTACT)

    def upload(self, snapshot) -> str:
        """Returns the name of the checkpoint's folder. Deletes checkpoints beyond the limit, and later steps:
        here they were damaged or set aside."""
        target, checkpoint = f"step-{snapshot.step:08d}", snapshot.folder / "checkpoints"
        sealed = f"{target}/manifest.json"
        try:
            folder = self._folder()
            there = _names(folder)
            older = [step for step in _complete(there) if step < snapshot.step]
            kept = {f"step-{step:08d}" for step in [*older, snapshot.step][-self.limit :]}
            manifest = (checkpoint / sealed).read_bytes()
            if sealed not in there or folder.fs.cat_file(folder.path(sealed)) != manifest:
                _remove(folder, there, target)
                for name in sorted(snapshot.names, key=lambda name: name.endswith("/manifest.json")):
                    relative = name.removeprefix(f"checkpoints/{target}/")
                    folder.put(snapshot.folder / name, f"{target}/{relative}")
            for old in {name.split("/")[0] for name in there} - kept:
                _remove(folder, there, old)
        except PermissionError:
            raise
        except Exception as error:  # each client has its own exceptions; all of them may pass
            raise ConnectionError(str(error)) from error
        return target

    def steps(self) -> list[int]:
        return _complete(self._ask("listed", _names))

    def read(self, step: int, name: str) -> bytes:
        return self._folder().read(f"step-{step:08d}/{name}")

    def download(self, step: int, to: Path) -> None:
        def copy(folder: Folder) -> None:
            for name in _names(folder):
                if name.startswith(f"step-{step:08d}/"):
                    beside = Path(name).name in BESIDE
                    folder.get(name, to / Path(name).name if beside else to / "checkpoints" / name)

        self._ask("read", copy)


def _names(folder: Folder) -> list[str]:
    """The files step-N/... of the bucket. Others are not ours, and no name may lead out of its folder."""
    return [name for name in folder.find() if re.fullmatch(r"step-\d{8}(/\w[\w.-]*)+", name)]


def _remove(folder: Folder, there: list[str], target: str) -> None:
    """Deletes a checkpoint, its manifest first: half deleted it must not look complete."""
    if f"{target}/manifest.json" in there:
        folder.fs.rm_file(folder.path(f"{target}/manifest.json"))
    if any(name.startswith(f"{target}/") for name in there):
        folder.fs.rm(folder.path(target), recursive=True)


def _complete(names: Iterable[str]) -> list[int]:
    """The steps of the checkpoints that have a manifest, in order."""
    matches = (re.search(r"(?:^|/)step-(\d{8})/manifest\.json$", name) for name in names)
    return sorted(int(match[1]) for match in matches if match)


def open_remote(url: str, private: bool = False, limit: int = 0) -> Hub | Bucket:
    """The storage at checkpoint_url. private: a Hub repository that is created now."""
    hub = url.startswith("hf://") and not url.startswith("hf://buckets/")
    return Hub(url.removeprefix("hf://"), private, "checkpoint_url") if hub else Bucket(url, limit)


def fetch_checkpoint(remote: Hub | Bucket, output_dir, check=lambda folder: None) -> Path | None:
    """Downloads the newest valid checkpoint of `remote` and BESIDE, unless output_dir has one as new, or has
    another run. Returns its folder, or None.

    It appears whole, verified and after check(folder), or not at all. ValueError if the remote cannot be read
    or has only damaged checkpoints."""
    output_dir, steps = Path(output_dir), remote.steps()
    for left in output_dir.glob(".fetch-*"):  # by a kill
        shutil.rmtree(left, ignore_errors=True)
    checkpoints = list_checkpoints(output_dir / "checkpoints")
    newest = max((step_of(path) for path in checkpoints if (path / "manifest.json").exists()), default=-1)
    if newest >= 0 and _another_run(remote, steps, output_dir):
        return None
    for step in reversed([step for step in steps if step > newest]):
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=output_dir) as scratch:
            remote.download(step, Path(scratch))
            fetched = Path(scratch, "checkpoints", f"step-{step:08d}")
            if problem := verify_checksums(fetched):
                logger.warning("%s: the checkpoint of step %s is damaged (%s)", remote.name, step, problem)
                continue
            check(fetched)
            for file in filter(Path.is_file, Path(scratch).iterdir()):
                os.replace(file, output_dir / file.name)
            checkpoint = output_dir / "checkpoints" / fetched.name
            checkpoint.parent.mkdir(exist_ok=True)
            shutil.rmtree(checkpoint, ignore_errors=True)  # an incomplete one, without a manifest
            os.replace(fetched, checkpoint)
        print(f"continues  step {step}, from {remote.name}")
        return checkpoint
    if steps and newest < 0:
        raise ValueError(f"{remote.name} holds no valid checkpoint: name another checkpoint_url, or empty it")
    return None


def refuse_another(remote: Hub | Bucket | None, output_dir: Path, step: float) -> None:
    """ValueError if a bucket has a checkpoint of another run or after `step`. On the Hub the next commit
    replaces such a checkpoint, and the history keeps it."""
    steps = remote.steps() if isinstance(remote, Bucket) else []
    if steps and (steps[-1] > step or _another_run(remote, steps, output_dir)):
        raise ValueError(f"checkpoint_url {remote.name} holds step {steps[-1]} of another run, or after this "
                         "run's start: name another URL, or resume it in an empty output_dir.")


def _another_run(remote: Hub | Bucket, steps: list[int], output_dir: Path) -> bool:
    """Whether both have a run.json with an id, and the ids differ."""
    with suppress(OSError, ValueError, KeyError, IndexError, TypeError):  # missing, or not ours
        ours = json.loads((output_dir / "run.json").read_bytes())["id"]
        return ours != json.loads(remote.read(steps[-1], "run.json"))["id"]
    return False
