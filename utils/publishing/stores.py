"""Where complete checkpoints are kept beside output_dir, for the same command on an empty disk: the Hub, or a
bucket; and how they come back.

What `steps` tells is complete, whatever dies when: on the Hub a checkpoint is one commit; elsewhere its files
come first and manifest.json last, which also goes first.
"""

import json
import logging
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

import fsspec
from huggingface_hub import HfApi, HfFileSystem, snapshot_download

from utils.publishing.hub_client import BESIDE, BRANCH, PUSH_SECONDS, ask, bound_waiting, check_hub, commit
from utils.publishing.secrets import without_secrets
from utils.state.checkpoint import list_checkpoints, step_of
from utils.state.files import find_problem

logger = logging.getLogger(__name__)


def open_store(url: str, private: bool = False, limit: int = 0) -> "HubBranch | Bucket":
    """ValueError where nothing could be written. private: a Hub repository made now; limit: see Bucket."""
    hub = url.startswith("hf://") and not url.startswith("hf://buckets/")
    return HubBranch(url.removeprefix("hf://"), private) if hub else Bucket(url, limit)


class HubBranch:
    """hf://user/name: a branch with the newest checkpoint; its history keeps the others."""

    def __init__(self, repo_id: str, private: bool = False):
        self.repo_id, self.revision = check_hub(repo_id, private, "checkpoint_url"), BRANCH
        self.name = f"hf://{self.repo_id}"
        self.ask = partial(ask, f"checkpoints of {self.repo_id}")
        self.ask(HfApi().create_branch, self.repo_id, branch=BRANCH, exist_ok=True)

    def steps(self) -> list[int]:
        self.revision = self.ask(HfApi().repo_info, self.repo_id, revision=BRANCH, timeout=10).sha
        return _complete(self.ask(HfApi().list_repo_files, self.repo_id, revision=self.revision))

    def read(self, step: int, name: str) -> bytes:
        """One of BESIDE. FileNotFoundError."""
        return HfFileSystem().cat_file(f"{self.repo_id}@{self.revision}/{name}")

    def download(self, step: int, folder: Path) -> None:
        """Its checkpoints/step-N and BESIDE, into `folder`, not verified. ValueError where that fails."""
        wanted = {"local_dir": folder, "allow_patterns": [f"checkpoints/step-{step:08d}/*", *BESIDE]}
        self.ask(snapshot_download, self.repo_id, revision=self.revision, **wanted)

    def upload(self, snapshot) -> str:
        """Make it the only checkpoint there: the hash of the commit."""
        return commit(self.repo_id, snapshot, replaces="checkpoints/.*")


class Bucket:
    """A folder at any URL of fsspec, with a folder for each checkpoint, in which BESIDE are, too.

    limit: newest checkpoints kept there, 0 for all. Each call connects anew: what has lost its connection
    (ftp) never gets another."""

    repo_id = None

    def __init__(self, url: str, limit: int = 0):
        bound_waiting(PUSH_SECONDS)  # of hf://buckets
        self.url, self.name, self.limit = url, without_secrets(url), limit
        unreached = "check the address, your credentials and the network"
        self.ask = partial(ask, f"checkpoint_url {self.name}", unreached=unreached)
        self.ask(self._try_writing)

    def steps(self) -> list[int]:
        return _complete(self.ask(lambda: self._list(*self._open())))

    def read(self, step: int, name: str) -> bytes:
        fs, root = self._open()
        return fs.cat_file(f"{root}/step-{step:08d}/{name}")

    def download(self, step: int, folder: Path) -> None:
        self.ask(self._download, f"step-{step:08d}", folder)

    def upload(self, snapshot) -> str:
        try:
            return self._upload(snapshot.step, snapshot.folder / "checkpoints", snapshot.names)
        except PermissionError:
            raise
        except Exception as error:  # each client has exceptions of its own: it may pass
            raise ConnectionError(str(error)) from error

    def _upload(self, step: int, folder: Path, names: list[str]) -> str:
        (fs, root), place = self._open(), f"step-{step:08d}"
        there, sealed = self._list(fs, root), f"{place}/manifest.json"
        older = [old for old in _complete(there) if old < step]  # what is newer is damaged, or set aside here
        kept = {f"step-{old:08d}" for old in [*older, step][-self.limit :]}
        if sealed not in there or fs.cat_file(there[sealed]) != (folder / sealed).read_bytes():
            self._remove(fs, root, there, place)
            for name in sorted(names, key=lambda name: name.endswith("/manifest.json")):
                _put(fs, folder.parent / name, f"{root}/{place}/{name.removeprefix(f'checkpoints/{place}/')}")
        for old in {name.split("/")[0] for name in there} - kept:
            self._remove(fs, root, there, old)
        return place

    def _remove(self, fs, root: str, there: dict[str, str], place: str) -> None:
        if manifest := there.get(f"{place}/manifest.json"):
            fs.rm_file(manifest)
        if any(name.startswith(f"{place}/") for name in there):
            fs.rm(f"{root}/{place}", recursive=True)

    def _open(self) -> tuple[fsspec.AbstractFileSystem, str]:
        fs, root = fsspec.core.url_to_fs(self.url, skip_instance_cache=True)
        if "***@" in without_secrets(f"://{root}"):
            raise ValueError("credentials are no part of such a URL, set them as its file system wants them")
        return fs, f"{root.rstrip('/')}/checkpoints"

    def _try_writing(self) -> None:
        fs, root = self._open()
        _put(fs, Path(__file__), f"{root}/.writable")
        fs.rm_file(f"{root}/.writable")

    def _list(self, fs, root: str) -> dict[str, str]:
        """{step-N/file: its path}; nothing else there is ours, and no name leads out of its folder."""
        with suppress(FileNotFoundError):
            named = ((path.rpartition("/checkpoints/")[2], path) for path in fs.find(root))
            return {name: path for name, path in named if re.fullmatch(r"step-\d{8}(/\w[\w.-]*)+", name)}
        return {}

    def _download(self, place: str, folder: Path) -> None:
        fs, root = self._open()
        for name, path in self._list(fs, root).items():
            if name.startswith(f"{place}/"):
                to = folder / Path(name).name if Path(name).name in BESIDE else folder / "checkpoints" / name
                to.parent.mkdir(parents=True, exist_ok=True)
                fs.get_file(path, str(to))


def _complete(names: Iterable[str]) -> list[int]:
    """Steps of the checkpoints with a manifest, in order."""
    found = (re.search(r"(?:^|/)step-(\d{8})/manifest\.json$", name) for name in names)
    return sorted(int(match[1]) for match in found if match)


def _put(fs, file: Path, target: str) -> None:
    """An object is there as a whole or not at all; a file becomes so when it is renamed. Object stores have
    no folders, and would make a bucket of a mistyped name."""
    if fs.async_impl:
        return fs.put_file(str(file), target)
    fs.makedirs(target.rpartition("/")[0], exist_ok=True)
    fs.put_file(str(file), f"{target}.part")
    fs.mv(f"{target}.part", target)


def fetch_checkpoint(store, output_dir: str | os.PathLike) -> Path | None:
    """The newest valid checkpoint of `store`, and BESIDE, unless output_dir has one as new, or another run.

    Its folder, or None. It appears whole and verified, or not at all. ValueError when the store cannot be
    read, or has damaged ones only."""
    output_dir = Path(output_dir)
    for left in output_dir.glob(".fetch-*"):  # by a kill
        shutil.rmtree(left, ignore_errors=True)
    made = list_checkpoints(output_dir / "checkpoints")
    have = max((step_of(path) for path in made if (path / "manifest.json").exists()), default=-1)
    steps = store.steps()
    if have >= 0 and _another_run(store, steps, output_dir):
        return None
    for step in reversed([step for step in steps if step > have]):
        name = f"checkpoints/step-{step:08d}"
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=output_dir) as folder:
            store.download(step, Path(folder))
            if problem := find_problem(Path(folder, name)):
                logger.warning("%s: the checkpoint of step %s is damaged (%s)", store.name, step, problem)
                continue
            for beside in BESIDE:
                if Path(folder, beside).exists():
                    os.replace(Path(folder, beside), output_dir / beside)
            (output_dir / "checkpoints").mkdir(exist_ok=True)
            shutil.rmtree(output_dir / name, ignore_errors=True)  # without a manifest: it did not finish
            os.replace(Path(folder, name), output_dir / name)
        return output_dir / name
    if steps and have < 0:
        raise ValueError(f"{store.name} holds no valid checkpoint: name another checkpoint_url, or empty it")
    return None


def refuse_another(store, output_dir: str | os.PathLike, step: float = math.inf) -> None:
    """ValueError where a bucket has what is not of the run in output_dir, or newer than `step`, where that is
    told to start. (On the Hub the next commit replaces it, and the history keeps it.)"""
    steps = [] if store.repo_id else store.steps()
    if steps and (steps[-1] > step or _another_run(store, steps, Path(output_dir))):
        raise ValueError(
            f"checkpoint_url {store.name} holds step {steps[-1]}, of another run or not where this one "
            "starts: name another URL. (An empty output_dir goes on from there.)"
        )


def _another_run(store, steps: list[int], output_dir: Path) -> bool:
    """Whether both have an id in their run.json, and not the same."""
    with suppress(OSError, ValueError, KeyError, IndexError):  # none, as older versions left it
        ours = json.loads((output_dir / "run.json").read_bytes())["id"]
        return ours != json.loads(store.read(steps[-1], "run.json"))["id"]
    return False
