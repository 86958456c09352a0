"""Reads and writes files at any fsspec URL: a local path, s3://, gs://, hf://."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import fsspec

from utils.io.files import flush
from utils.io.mistakes import is_network_error
from utils.io.text import HIDDEN, without_secrets


@contextlib.contextmanager
def explained(url: str, verb: str, kinds=(OSError, ImportError, ValueError)) -> Iterator[None]:
    """Raises a ValueError with a remedy for a wrong URL, a missing package or right, or a network error.
    verb: what `url` was to be, such as "read". kinds: the exceptions that count."""
    try:
        yield
    except Exception as error:
        network = is_network_error(error)
        if not network and not isinstance(error, kinds):
            raise
        remedy = f"Check its spelling{' and the room there' if verb == 'written' else ''}."
        if isinstance(error, ImportError):
            remedy = "Then try again."
        elif network or isinstance(error, PermissionError):
            remedy = "Check your credentials (the Hub's: `hf auth login`), its spelling and the network."
        reason = str(error).strip().rstrip(".") or type(error).__name__
        raise ValueError(f"{url} cannot be {verb}: {reason}. {remedy}") from error


def open_url(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of `url` and the path in it. ValueError if the path contains credentials, as every
    message would show them."""
    files, path = fsspec.core.url_to_fs(url)
    if "://" in url and "://" not in path and f"{HIDDEN}@" in without_secrets(f"://{path}"):
        raise ValueError("credentials cannot be part of such a URL: set them as its file system expects")
    return files, path


class Folder:
    """A folder at a URL. Names of files are relative to it."""

    def __init__(self, url: str):
        """ValueError if no file system can open `url`. Makes no request."""
        url = str(url).rstrip("/") or "/"
        self.url = without_secrets(url)
        with explained(self.url, "opened"):
            self.fs, root = open_url(url)
        self.root = root.rstrip("/")
        self.local = isinstance(self.fs, fsspec.get_filesystem_class("file"))

    def path(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root

    def read(self, name: str) -> bytes:
        return self.fs.cat_file(self.path(name))

    def write(self, name: str, content: bytes) -> None:
        """Writes a file completely or not at all, as object stores do: a local file is renamed at the end."""
        path = self.path(name)
        if not self.local:  # makedirs could create a bucket
            return self.fs.pipe_file(path, content)
        self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        self.fs.pipe_file(f"{path}.tmp", content)
        flush(Path(f"{path}.tmp"))
        self.fs.mv(f"{path}.tmp", path)

    def names(self, name: str = "") -> list[str]:
        """The sorted names of the files and subfolders in a folder; [] if it does not exist."""
        self.fs.invalidate_cache()
        try:
            paths = self.fs.ls(self.path(name), detail=False)
        except FileNotFoundError:
            return []
        return sorted(path.rstrip("/").rsplit("/", 1)[-1] for path in paths)

    def remove(self, name: str) -> None:
        """Deletes a file, or a folder with its content. It may be missing."""
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm(self.path(name), recursive=True)
