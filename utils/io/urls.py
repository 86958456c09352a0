"""Files at any fsspec URL (local path, s3://, gs://, hf://), written whole and with retries."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
from huggingface_hub import HfApi

from utils.io.files import flush
from utils.io.retry import of_network, with_retries
from utils.io.secrets import HIDDEN, without_secrets


@contextlib.contextmanager
def explained(url: str, verb: str, kinds=(OSError, ImportError, ValueError)) -> Iterator[None]:
    """Errors of a wrong URL, a missing package or missing rights, as a ValueError that names the remedy."""
    try:
        yield
    except Exception as error:
        network = of_network(error)
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
    """The file system of `url` and the path in it. ValueError if the file system takes credentials for a part
    of the path, as they would be in every message."""
    files, path = fsspec.core.url_to_fs(url)
    if "://" in url and "://" not in path and f"{HIDDEN}@" in without_secrets(f"://{path}"):
        raise ValueError("credentials cannot be part of such a URL, set them as its file system expects")
    return files, path


class Folder:
    """A folder at a URL. Names are relative to it. Requests are retried as by with_retries."""

    def __init__(self, url: str):
        """ValueError if no file system knows `url`. Makes no request."""
        url = str(url).rstrip("/") or "/"
        self.url = without_secrets(url)
        with explained(self.url, "opened"):
            self.fs, root = open_url(url)
        self.root = root.rstrip("/")
        self.local = isinstance(self.fs, fsspec.get_filesystem_class("file"))

    def path(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root

    def _request(self, verb: str, name: str, use: Callable[[str], Any], retries: int | None) -> Any:
        return with_retries(lambda: use(self.path(name)), f"{verb} {self.url}/{name}".rstrip("/"), retries)

    def make(self, retries: int | None = None) -> None:
        """Creates the repository of a hf:// URL, private, if it is missing. Does nothing for other stores."""
        kind, *name = self.root.split("@")[0].split("/")[:3]
        if self.fs.protocol == "hf" and kind == "datasets":
            create = partial(HfApi().create_repo, "/".join(name), repo_type="dataset", private=True)
            with_retries(partial(create, exist_ok=True), f"making {self.url}", retries)
            self.fs.invalidate_cache()  # which says that there is none

    def read(self, name: str, retries: int | None = None) -> bytes:
        return self._request("reading", name, self.fs.cat_file, retries)

    def write(self, name: str, content: bytes, retries: int | None = None) -> None:
        """Whole or not at all: object stores do so; on a disk it is renamed into place."""

        def store(path: str) -> None:
            if not self.local:  # making its folder could create a bucket
                return self.fs.pipe_file(path, content)
            self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self.fs.pipe_file(f"{path}.tmp", content)
            flush(Path(f"{path}.tmp"))
            self.fs.mv(f"{path}.tmp", path)

        self._request("writing", name, store, retries)

    def names(self, name: str = "", retries: int | None = None) -> list[str]:
        """The sorted names of what is in the folder, not in its subfolders; [] if there is no folder."""
        self.fs.invalidate_cache()
        try:
            paths = self._request("listing", name, partial(self.fs.ls, detail=False), retries)
        except FileNotFoundError:
            return []
        return sorted(path.rstrip("/").rsplit("/", 1)[-1] for path in paths)

    def remove(self, name: str, retries: int | None = None) -> None:
        """Deletes a file, or a folder and its content, if there is one."""
        with contextlib.suppress(FileNotFoundError):
            self._request("deleting", name, partial(self.fs.rm, recursive=True), retries)
