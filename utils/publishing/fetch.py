"""Continue on a fresh machine: the training state that a run has published, from the Hub."""

import os
import re
import shutil
import tempfile
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

from utils.publishing.hub_client import BESIDE, BRANCH, PUSH_SECONDS, ask, bound_waiting
from utils.state.checkpoint import list_checkpoints, step_of


def newest_checkpoint(output_dir: Path) -> tuple[int, Path | None]:
    """(step, folder) of the newest complete one; (-1, None) without any. Other names are the user's."""
    made = list_checkpoints(output_dir / "checkpoints")
    complete = ((step_of(path), path) for path in made if (path / "manifest.json").exists())
    return max(complete, default=(-1, None))


def fetch_checkpoint(repo_id: str, output_dir: str | os.PathLike) -> Path | None:
    """Download the training state that HubPusher has published, and BESIDE, if output_dir has none as new.

    Returns its folder, or None where there was nothing to fetch. It appears whole or not at all, and is
    verified when it is loaded. ValueError when the Hub cannot be reached."""
    output_dir, subject = Path(output_dir), f"checkpoints of {repo_id}"
    for left in output_dir.glob(".fetch-*"):  # by a kill
        shutil.rmtree(left, ignore_errors=True)
    bound_waiting(PUSH_SECONDS)
    api = HfApi()
    try:
        revision = ask(subject, api.repo_info, repo_id, revision=BRANCH, timeout=10).sha
    except (RepositoryNotFoundError, RevisionNotFoundError):
        return None
    files = ask(subject, api.list_repo_files, repo_id, revision=revision)
    found = [re.fullmatch(r"checkpoints/(step-(\d{8}))/manifest\.json", name) for name in files]
    step, name = max(((int(match[2]), match[1]) for match in found if match), default=(-1, ""))
    if step <= newest_checkpoint(output_dir)[0]:
        return None
    target = output_dir / "checkpoints" / name
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=output_dir) as folder:
        wanted = [f"checkpoints/{name}/*", *BESIDE]
        ask(subject, snapshot_download, repo_id, revision=revision, local_dir=folder, allow_patterns=wanted)
        for beside in BESIDE:
            if Path(folder, beside).exists():
                os.replace(Path(folder, beside), output_dir / beside)
        shutil.rmtree(target, ignore_errors=True)  # without a manifest: a save that did not finish
        os.replace(Path(folder, "checkpoints", name), target)
    return target
