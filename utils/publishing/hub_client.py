"""The Hub before any work, and what its client's exceptions mean.

The token is looked up by huggingface_hub at each call, so a renewed login counts, and stored nowhere.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import set_client_factory, validate_repo_id
from huggingface_hub.utils._http import default_client_factory

from utils.publishing.secrets import HIDDEN, without_secrets

BRANCH = "checkpoints"  # training states live beside the model, on a branch of their own
BESIDE = ("args.json", "metrics.jsonl", "run.json")  # what a run that continues goes on writing
CHECK_SECONDS, PUSH_SECONDS = 10, 60  # of silence of the server, before training and during

LOGIN = "run `hf auth login`, or set HF_TOKEN, with a token that may write (https://huggingface.co/settings/tokens)"
REMEDIES = {
    401: f"the token is missing, revoked or expired: {LOGIN}",
    403: f"this token may not write there: choose another hub_model_id, or {LOGIN}",
    404: "there is no such repository: create it, or choose another hub_model_id",
    413: "too large for the Hub, see https://huggingface.co/docs/hub/storage-limits",
}


def check_hub(hub_model_id: str, private: bool = False, setting: str = "push_to_hub") -> str:
    """Make sure that pushing will work: the full "owner/name" of the repository, created where missing.

    Takes seconds, also when nobody answers. ValueError with the remedy."""
    bound_waiting(CHECK_SECONDS)
    if not get_token():
        raise ValueError(f"{setting}: found no Hub token; {LOGIN}.")
    try:
        validate_repo_id(hub_model_id)
    except ValueError as error:
        raise ValueError(f"hub_model_id: {error}") from None
    api = HfApi()
    user = ask(setting, api.whoami)["name"]
    repo_id = hub_model_id if "/" in hub_model_id else f"{user}/{hub_model_id}"
    subject = f"hub_model_id {repo_id}"
    ask(subject, api.create_repo, repo_id, private=private, exist_ok=True)
    # The first question of every push. (create_repo is content with a repository that we may only read.)
    ask(subject, api.preupload_lfs_files, repo_id, [CommitOperationAdd("README.md", b"-")])
    bound_waiting(PUSH_SECONDS)
    return repo_id


def tell_milestones(repo_id: str, planned: set[int]) -> None:
    """What is there as a run begins is of another: the run's to move, not to delete. ValueError."""
    tags = ask(f"hub_model_id {repo_id}", HfApi().list_repo_refs, repo_id).tags
    steps = sorted(int(tag.name[5:]) for tag in tags if re.fullmatch(r"step-\d+", tag.name, re.ASCII))
    moved = " (until this run makes it)"
    names = ", ".join(f"step-{step}{moved if step in planned else ''}" for step in steps)
    if steps:
        print(f"hub        {repo_id} has revisions of an earlier run: {names}; "
              f"`hf repos tag delete {repo_id} NAME` deletes one", flush=True)  # fmt: skip


def commit(repo_id: str, snapshot, replaces: str) -> str:
    """One commit with everything in it; returns its hash. (upload_folder makes several of many files.)

    replaces: files of the branch that match this expression and are not added are deleted."""
    api, names, branch = HfApi(), snapshot.names, snapshot.branch
    there = api.list_repo_files(repo_id, revision=branch)
    stale = [name for name in there if re.fullmatch(replaces, name) and name not in names]
    additions = [CommitOperationAdd(name, str(snapshot.folder / name)) for name in names]
    for addition in additions:  # several at once would use threads that hold up the exit of the process
        api.preupload_lfs_files(repo_id, [addition], revision=branch, free_memory=False)
    changes = [*additions, *(CommitOperationDelete(name) for name in stale)]
    return api.create_commit(repo_id, changes, commit_message=snapshot.message, revision=branch).oid


def ask(subject: str, call: Callable, *args, unreached: str = "", **kwargs) -> Any:
    """`call(...)`, again after a passing trouble; what stays becomes a ValueError that says what to do.
    unreached: that, where it is not the Hub that is asked."""
    for left in (2, 1, 0):
        try:
            return call(*args, **kwargs)
        except (RepositoryNotFoundError, RevisionNotFoundError):
            raise
        except Exception as error:
            trouble = diagnose(error)
            if trouble.passing and left and "Timeout" not in trouble.text:  # silence has taken its seconds
                time.sleep(min(5, trouble.retry_after or 1))
                continue
            hub = f"can {constants.ENDPOINT} be reached from here? If not, train without push_to_hub"
            raise ValueError(f"{subject}: {trouble.text}; {trouble.remedy or unreached or hub}.") from None


def bound_waiting(seconds: float) -> None:
    """Limit each connect, read and write of the client, which otherwise waits for ever on a silent server."""

    def client():
        made = default_client_factory()
        made.timeout = seconds
        return made

    set_client_factory(client)


@dataclass
class Trouble:
    """What an exception of the client means."""

    passing: bool  # worth another try
    retry_after: float  # seconds, 0 where the server names none
    text: str  # one line, without the token
    remedy: str | None  # where we know one


def diagnose(error: BaseException) -> Trouble:
    """Reads the chain of causes: LFS errors come wrapped, and Xet's have their status in the text only."""
    chain = [error]
    while len(chain) < 8 and (cause := chain[-1].__cause__ or chain[-1].__context__):
        chain.append(cause)
    responses = (getattr(e, "response", None) for e in chain)
    response = next((r for r in responses if hasattr(r, "status_code")), None)
    status, retry_after = None, 0.0
    if response is not None:
        status = response.status_code
        if re.fullmatch(r"\d+", asked := response.headers.get("retry-after", "")):
            retry_after = min(float(asked), 3600.0)  # else a date, or nonsense: our own backoff has to do
    elif found := re.search(r"HTTP status \w+ error \((\d{3})", str(error)):
        status = int(found[1])
    if status is None:
        network = (ConnectionError, TimeoutError)
        passing = any(isinstance(e, network) or type(e).__module__.startswith("httpx") for e in chain)
    else:
        passing = status >= 500 or status in (408, 409, 412, 423, 425, 429)
    told = chain[-1] if response is None else chain[0]
    text = " ".join(f"{type(told).__name__}: {told}".split())
    text = without_secrets(text.replace(get_token() or HIDDEN, HIDDEN))[:400]
    return Trouble(passing, retry_after, text, REMEDIES.get(status))
