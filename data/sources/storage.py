"""Files at any fsspec URL (local path, s3://, gs://, hf://): whole writes, and patience with what fails."""

import contextlib
import errno
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import fsspec
from huggingface_hub import HfApi, set_client_factory
from huggingface_hub.utils._http import default_client_factory

DELAYS = (1, 2, 4, 8, 16, 32, 64)  # seconds between tries: a source may be away for two minutes
SILENCE = 60  # seconds without an answer of the Hub that end a try
FIRST_CONTACT = 2  # tries again when a URL is used for the first time: a mistyped one is told in seconds
NETWORK_MODULES = {"aiobotocore", "aiohttp", "botocore", "fsspec", "gcsfs", "httpcore", "httpcore2", "httpx",
                   "httpx2", "huggingface_hub", "requests", "s3fs", "urllib3"}
PERMANENT = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
PERMANENT_ERRNO = {None, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EINVAL, errno.ENAMETOOLONG}


def printable(text: str) -> str:
    """`text` with *** for passwords and queries of URLs: for all that is written, printed, compared."""
    text = re.sub(r"(://)(?:[^\s/]+|[^\s/@:]*:(?!\d+/)[^\s'\"]*)@", r"\1***@", text)
    query = r"(https?://[^\s?'\"]*\?|://[^\s?'\"]*\?(?=[^\s'\"]*=))[^\s'\"]+"
    return re.sub(query, r"\1***", text)


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed later: time-outs, broken connections, 429, 5xx."""
    # Explained to the user, or an upload that the Hub's client wraps: what counts is why.
    if isinstance(error, ValueError | RuntimeError) and error.__cause__:
        return is_transient(error.__cause__)
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", getattr(error, "status", None))
    if isinstance(response, dict):  # botocore
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    if isinstance(status, int) and 400 <= status < 500 and status not in (408, 409, 412, 425, 429):
        return False
    if isinstance(error, PERMANENT) or "Credentials" in type(error).__name__:
        return False
    network = type(error).__module__.split(".")[0] in NETWORK_MODULES
    if network or isinstance(error, ConnectionError | TimeoutError):
        return not isinstance(error, ValueError)
    return isinstance(error, OSError) and error.errno not in PERMANENT_ERRNO  # None: a damaged file


def with_retries(action: Callable, what: str, tries: int | None = None):
    """action(), again with exponential backoff while it fails for a reason that may pass (`is_transient`).
    ConnectionError naming `what` when it did not in time, or after `tries` more tries the error itself."""
    return next(retried(lambda _: iter([action()]), what, tries=tries))


def retried(start_at: Callable[[int], Iterator], what: str, position=0, tries: int | None = None) -> Iterator:
    """The items of start_at(position); after a failure that may pass, of start_at(items seen so far), with
    the backoff of `with_retries`, which starts over with every item that arrives."""
    failures, delays = 0, DELAYS[:tries]
    while True:
        try:
            for item in start_at(position):
                position, failures = position + 1, 0
                yield item
            return
        except Exception as error:
            if not is_transient(error) or failures == len(delays) and tries is not None:
                raise
            reason = f"{type(error).__name__}: {error}".strip(": ")
            named = f"{what}, item {position:,}," if position else what
            if failures == len(delays):
                raise ConnectionError(f"{named} failed {failures + 1} times in {sum(delays)} s, the last "
                                      f"time with {reason}.") from error
            told = f"warning: {named} failed ({reason}); next try in {delays[failures]} s"
            print(printable(told), file=sys.stderr, flush=True)
            time.sleep(delays[failures])
            failures += 1


def bound_waiting() -> None:
    """Limits each connect, read and write of the Hub's client to SILENCE; by itself it waits for ever."""

    def client():
        made = default_client_factory()
        made.timeout = SILENCE
        return made

    set_client_factory(client)


@contextlib.contextmanager
def explained(url: str, verb: str, kinds=(OSError, ImportError, ValueError)) -> Iterator[None]:
    """What a wrong URL, a missing package or missing rights raise, as a ValueError that names the remedy."""
    try:
        yield
    except Exception as error:
        network = type(error).__module__.split(".")[0] in NETWORK_MODULES
        if not network and not isinstance(error, kinds):
            raise
        remedy = f"Check its spelling{' and the room there' if verb == 'written' else ''}."
        if isinstance(error, ImportError):
            remedy = "Then try again."
        elif network or isinstance(error, PermissionError | ConnectionError):
            remedy = "Check your credentials (the Hub's: `hf auth login`), its spelling and the network."
        reason = str(error).strip().rstrip(".") or type(error).__name__
        raise ValueError(f"{url} cannot be {verb}: {reason}. {remedy}") from error


def open_url(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system that answers to `url` and the path in it. Where credentials would be taken for a part
    of that path they would be in every message, so ValueError."""
    files, path = fsspec.core.url_to_fs(url)
    if "://" in url and "://" not in path and "***@" in printable(f"://{path}"):
        raise ValueError("credentials are no part of such a URL, set them as its file system wants them")
    return files, path


class Folder:
    """A folder at a URL. Paths are relative to it; requests are repeated after passing failures."""

    def __init__(self, url: str):
        """Raises ValueError when no file system answers to `url`; makes no request."""
        url = str(url).rstrip("/") or "/"
        self.url = printable(url)
        with explained(self.url, "opened"):
            self.fs, self.root = open_url(url)
        self.root = self.root.rstrip("/")
        self.local = isinstance(self.fs, fsspec.get_filesystem_class("file"))

    def make(self, tries: int | None = None) -> None:
        """The repository, private, that a hf:// URL names, where there is none; nothing for other stores."""
        kind, *name = self.root.split("@")[0].split("/")[:3]
        if self.fs.protocol == "hf" and kind == "datasets":
            create = partial(HfApi().create_repo, "/".join(name), repo_type="dataset", private=True)
            with_retries(partial(create, exist_ok=True), f"making {self.url}", tries)
            self.fs.invalidate_cache()  # it remembers that there was none

    def path(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root

    def read(self, name: str) -> bytes:
        return with_retries(lambda: self.fs.cat_file(self.path(name)), f"reading {self.url}/{name}")

    def write(self, name: str, data: bytes, tries: int | None = None) -> None:
        """The whole file or none of it: object stores do so, local files are renamed into place."""
        path = self.path(name)

        def store() -> None:
            if not self.local:
                self.fs.pipe_file(path, data)
                return
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path + ".tmp", "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(path + ".tmp", path)

        with_retries(store, f"writing {self.url}/{name}", tries)

    def names(self, name: str = "", tries: int | None = None) -> list[str]:
        """Names (without folders) of what lies in the folder, sorted; [] where there is none."""
        self.fs.invalidate_cache()
        entries = partial(self.fs.ls, self.path(name), detail=False)
        try:
            paths = with_retries(entries, f"listing {self.url}/{name}".rstrip("/"), tries)
        except FileNotFoundError:
            return []
        return sorted(path.rstrip("/").rsplit("/", 1)[-1] for path in paths)

    def remove(self, name: str) -> None:
        """Deletes a file or a folder with what it holds; nothing happens where there is none."""
        with contextlib.suppress(FileNotFoundError):
            with_retries(lambda: self.fs.rm(self.path(name), recursive=True), f"deleting {self.url}/{name}")
