"""Remote storage for snapshots: a repository on the Hub, or a folder at any fsspec URL.

A checkpoint that is listed there is complete, whatever dies when: on the Hub it is one commit; in a bucket
its manifest.json is written last and deleted first.
"""

import json
import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import RevisionNotFoundError

from utils.io.files import verify_checksums
from utils.io.retry import FIRST_CONTACT, bound_waiting, diagnose, with_retries
from utils.io.secrets import without_secrets
from utils.io.urls import Folder, explained
from utils.state.folders import list_checkpoints, step_of

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
        """Creates the repository if it is missing. ValueError, within seconds, if we may not write there or
        the Hub does not answer. setting: push_to_hub, or checkpoint_url."""
        bound_waiting(CHECK_SECONDS)
        if not get_token():
            raise ValueError(f"{setting}: found no Hub token; {LOGIN}.")
        self.api, self.subject = HfApi(), setting  # looks the token up at each call: a renewed login counts
        user = self._ask(self.api.whoami)["name"]
        self.repo_id = self.name = repo_id if "/" in repo_id else f"{user}/{repo_id}"
        self.subject = f"hub_model_id {self.repo_id}"
        self._ask(self.api.create_repo, self.repo_id, private=private, exist_ok=True)
        # create_repo accepts a repository that we may only read; this is the first request of every push.
        self._ask(self.api.preupload_lfs_files, self.repo_id, [CommitOperationAdd("README.md", b"-")])
        bound_waiting()
        if setting == "checkpoint_url":
            self.name = f"hf://{self.repo_id}"
            self._ask(self.api.create_branch, self.repo_id, branch=CHECKPOINTS, exist_ok=True)

    def _ask(self, call, *args, **kwargs):
        """call(...), with retries. ValueError that says what to do."""
        try:
            return with_retries(lambda: call(*args, **kwargs), self.subject, FIRST_CONTACT)
        except Exception as error:
            trouble = diagnose(error)
            away = f"; can {self.api.endpoint} be reached from here? If not, train without push_to_hub"
            remedy = self.remedies.get(trouble.status, away if trouble.transient else "")
            raise ValueError(f"{self.subject}: {trouble.text}{remedy}.") from None

    def upload(self, snapshot) -> str:
        """Returns the hash of the commit, or the tag of a milestone that was there already."""
        if not (tag := snapshot.tag):
            return self._commit(snapshot)
        if problem := verify_checksums(snapshot.folder):
            raise ValueError(f"{snapshot.folder} is damaged, {problem}")
        with suppress(RevisionNotFoundError):
            if not self._differing(snapshot, tag):
                return tag
        self.api.create_branch(self.repo_id, branch=MILESTONES, exist_ok=True)
        revision = self._commit(snapshot)
        if different := self._differing(snapshot, revision):
            raise ConnectionError(f"{', '.join(different)}: arrived with another hash")
        with suppress(RevisionNotFoundError):
            self.api.delete_tag(self.repo_id, tag=tag)  # another run's
        self.api.create_tag(self.repo_id, tag=tag, revision=revision)
        return revision

    def _commit(self, snapshot) -> str:
        """One commit of all files; upload_folder would split many files over several commits."""
        repo, names, branch = self.repo_id, snapshot.names, snapshot.branch
        there = self.api.list_repo_files(repo, revision=branch)
        stale = [name for name in there if re.fullmatch(REPLACED[branch], name) and name not in names]
        additions = [CommitOperationAdd(name, str(snapshot.folder / name)) for name in names]
        for addition in additions:  # several at once would start threads that delay the exit of the process
            self.api.preupload_lfs_files(repo, [addition], revision=branch, free_memory=False)
        changes = [*additions, *map(CommitOperationDelete, stale)]
        return self.api.create_commit(repo, changes, commit_message=snapshot.message, revision=branch).oid

    def _differing(self, snapshot, revision: str) -> list[str]:
        """Files of the snapshot that the revision lacks or has with another hash."""
        there = self.api.verify_repo_checksums(self.repo_id, revision=revision, local_dir=snapshot.folder)
        differing = [*there.extra_paths, *(file["path"] for file in there.mismatches)]
        return [name for name in differing if name in snapshot.names]  # the folder may have newer files

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, in order. `download` uses the same revision."""
        self.revision = self._ask(self.api.repo_info, self.repo_id, revision=CHECKPOINTS).sha
        return _complete(self._ask(self.api.list_repo_files, self.repo_id, revision=self.revision))

    def download(self, step: int, to: Path) -> None:
        """Copies checkpoints/step-N and BESIDE into the folder `to`, unverified. ValueError if that fails."""
        wanted = {"local_dir": to, "allow_patterns": [f"checkpoints/step-{step:08d}/*", *BESIDE]}
        self._ask(self.api.snapshot_download, self.repo_id, revision=self.revision, **wanted)


class Bucket:
    """A folder at a URL. Each checkpoint is a folder in its checkpoints/, together with its BESIDE.

    limit: how many of the newest checkpoints are kept there, 0 for all."""

    remedies = {}

    def __init__(self, url: str, limit: int = 0):
        """ValueError if nothing can be written there."""
        bound_waiting()  # for hf://buckets
        self.url, self.name, self.limit = url, without_secrets(url), limit
        self.subject, folder = f"checkpoint_url {self.name}", self.folder()
        with explained(self.subject, "written", Exception):
            folder.write(".writable", Path(__file__), FIRST_CONTACT)
            folder.remove(".writable", FIRST_CONTACT)

    def folder(self) -> Folder:
        """A new connection: a file system that has lost its connection (ftp) never makes another."""
        return Folder(self.url, skip_instance_cache=True)

    def upload(self, snapshot) -> str:
        """Returns the name of the checkpoint's folder. Deletes checkpoints beyond the limit, and later steps:
        here they were damaged or set aside."""
        target = _folder_of(snapshot.step)
        manifest = f"{target}/manifest.json"
        try:
            folder = self.folder()
            there = _files(folder, retries=0)
            if manifest not in there or folder.read(manifest, 0) != (snapshot.folder / manifest).read_bytes():
                _remove(folder, target)
                for name in sorted(snapshot.names, key=lambda name: name == manifest):
                    folder.write(f"{target}/{name}" if name in BESIDE else name, snapshot.folder / name, 0)
            older = [step for step in _complete(there) if step < snapshot.step]
            kept = map(_folder_of, [*older, snapshot.step][-self.limit :])
            for old in {"/".join(name.split("/")[:2]) for name in there}.difference(kept):
                _remove(folder, old)
        except PermissionError:
            raise
        except Exception as error:  # each client has its own exceptions; all of them may pass
            raise ConnectionError(str(error)) from error
        return target

    def steps(self) -> list[int]:
        with explained(self.subject, "listed", Exception):
            return _complete(_files(self.folder(), FIRST_CONTACT))

    def download(self, step: int, to: Path) -> None:
        with explained(self.subject, "read", Exception):
            folder = self.folder()
            for name in _files(folder, FIRST_CONTACT):
                if name.startswith(f"{_folder_of(step)}/"):
                    file = Path(name).name
                    folder.copy(name, to / (file if file in BESIDE else name), FIRST_CONTACT)


def _folder_of(step: int) -> str:
    return f"checkpoints/step-{step:08d}"


def _files(folder: Folder, retries: int) -> list[str]:
    """The files of a bucket's checkpoints. Others are not ours, and no name may lead out of its folder."""
    names = folder.files("checkpoints", retries)
    return [name for name in names if re.fullmatch(r"checkpoints/step-\d{8}(/\w[\w.-]*)+", name)]


def _remove(folder: Folder, checkpoint: str) -> None:
    """Deletes the manifest first: half deleted it must not look complete."""
    folder.remove(f"{checkpoint}/manifest.json", retries=0)
    folder.remove(checkpoint, retries=0)


def _complete(names: list[str]) -> list[int]:
    """The steps of the checkpoints that have a manifest, in order."""
    matches = (re.fullmatch(r"checkpoints/step-(\d{8})/manifest\.json", name) for name in names)
    return sorted(int(match[1]) for match in matches if match)


def repo_name(args) -> str:
    """The repository of a run: hub_model_id, or the name of output_dir."""
    return args.hub_model_id or Path(args.output_dir).resolve().name


def open_remote(url: str, private: bool = False, limit: int = 0) -> Hub | Bucket:
    """The storage at checkpoint_url. private: a Hub repository that is created now."""
    hub = url.startswith("hf://") and not url.startswith("hf://buckets/")
    return Hub(url.removeprefix("hf://"), private, "checkpoint_url") if hub else Bucket(url, limit)


def fetch_checkpoint(remote: Hub | Bucket, output_dir, check=lambda folder: None) -> Path | None:
    """Downloads the newest valid checkpoint of `remote` and BESIDE, after check(folder): whole, or nothing.
    Returns its folder; None if output_dir has one as new, or has another run. ValueError if the remote cannot
    be read or has only damaged checkpoints."""
    output_dir, steps = Path(output_dir), remote.steps()
    for left in output_dir.glob(".fetch-*"):  # by a kill
        shutil.rmtree(left, ignore_errors=True)
    paths = list_checkpoints(output_dir / "checkpoints")
    newest = max((step_of(path) for path in paths if (path / "manifest.json").exists()), default=-1)
    for step in reversed([step for step in steps if step > newest]):
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=output_dir) as scratch:
            remote.download(step, Path(scratch))
            if newest >= 0 and _differing_runs(scratch, output_dir):
                return None
            fetched, checkpoint = Path(scratch, _folder_of(step)), output_dir / _folder_of(step)
            if problem := verify_checksums(fetched):
                print(f"warning: {remote.name}: the checkpoint of step {step} is damaged ({problem})")
                continue
            check(fetched)
            for file in filter(Path.is_file, Path(scratch).iterdir()):
                os.replace(file, output_dir / file.name)
            checkpoint.parent.mkdir(exist_ok=True)
            shutil.rmtree(checkpoint, ignore_errors=True)  # an incomplete one, without a manifest
            os.replace(fetched, checkpoint)
        print(f"continues  step {step}, from {remote.name}")
        return checkpoint
    if steps and newest < 0:
        raise ValueError(f"{remote.name} holds no valid checkpoint: name another checkpoint_url, or empty it")
    return None


def refuse_another(remote: Hub | Bucket | None, output_dir, step: float) -> None:
    """ValueError if a bucket has a checkpoint of another run or after `step`. On the Hub the next commit
    replaces such a checkpoint, and the history keeps it."""
    steps = remote.steps() if isinstance(remote, Bucket) else []
    if steps and (steps[-1] > step or _differing_runs(f"{remote.url}/{_folder_of(steps[-1])}", output_dir)):
        raise ValueError(f"checkpoint_url {remote.name} holds step {steps[-1]} of another run, or after this "
                         "run's start: name another URL, or resume it in an empty output_dir.")


def _differing_runs(*places) -> bool:
    """Whether the run.json in these folders have ids that differ. One may be missing, or not ours."""
    ids = set()
    for place in places:
        with suppress(OSError, ValueError, KeyError, TypeError):
            ids.add(json.loads(Folder(place).read("run.json", FIRST_CONTACT))["id"])
    return len(ids) > 1
