"""Files at any fsspec URL (local path, s3://, gs://, hf://), written whole and with retries."""

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import fsspec
from huggingface_hub import HfApi

from utils.io.files import write_file
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


def open_url(url: str, **options) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of `url` and the path in it; options: of fsspec. ValueError if the file system takes
    credentials for a part of the path, as they would be in every message."""
    files, path = fsspec.core.url_to_fs(url, **options)
    if "://" in url and "://" not in path and f"{HIDDEN}@" in without_secrets(f"://{path}"):
        raise ValueError("credentials cannot be part of such a URL, set them as its file system expects")
    return files, path


class Folder:
    """A folder at a URL. Names are relative to it. Requests are retried, except by find, put and get."""

    def __init__(self, url: str, **options):
        """ValueError if no file system knows `url`. Makes no request. options: of fsspec."""
        url = str(url).rstrip("/") or "/"
        self.url = without_secrets(url)
        with explained(self.url, "opened"):
            self.fs, self.root = open_url(url, **options)
        self.root = self.root.rstrip("/")
        self.local = isinstance(self.fs, fsspec.get_filesystem_class("file"))

    def make(self, retries: int | None = None) -> None:
        """Creates the repository of a hf:// URL, private, if it is missing. Does nothing for other stores."""
        kind, *name = self.root.split("@")[0].split("/")[:3]
        if self.fs.protocol == "hf" and kind == "datasets":
            create = partial(HfApi().create_repo, "/".join(name), repo_type="dataset", private=True)
            with_retries(partial(create, exist_ok=True), f"making {self.url}", retries)
            self.fs.invalidate_cache()  # which says that there is none

    def path(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root

    def read(self, name: str) -> bytes:
        return with_retries(lambda: self.fs.cat_file(self.path(name)), f"reading {self.url}/{name}")

    def write(self, name: str, data: bytes, retries: int | None = None) -> None:
        """Writes the whole file or nothing: object stores do so, and a local file is renamed into place."""
        path = self.path(name)

        def store() -> None:
            if not self.local:
                self.fs.pipe_file(path, data)
                return
            temporary = Path(f"{path}.tmp")
            temporary.parent.mkdir(parents=True, exist_ok=True)
            write_file(temporary, [data])
            temporary.replace(path)

        with_retries(store, f"writing {self.url}/{name}", retries)

    def names(self, name: str = "", retries: int | None = None) -> list[str]:
        """The sorted names of what is in the folder, not in its subfolders; [] if there is no folder."""
        self.fs.invalidate_cache()
        entries = partial(self.fs.ls, self.path(name), detail=False)
        try:
            paths = with_retries(entries, f"listing {self.url}/{name}".rstrip("/"), retries)
        except FileNotFoundError:
            return []
        return sorted(path.rstrip("/").rsplit("/", 1)[-1] for path in paths)

    def remove(self, name: str) -> None:
        """Deletes a file, or a folder and its content, if there is one."""
        with contextlib.suppress(FileNotFoundError):
            with_retries(lambda: self.fs.rm(self.path(name), recursive=True), f"deleting {self.url}/{name}")

    def find(self) -> list[str]:
        """The names of all files in the folder and its subfolders; [] if there is no folder."""
        try:
            return [path.removeprefix(f"{self.root}/") for path in self.fs.find(self.root)]
        except FileNotFoundError:
            return []

    def put(self, file: Path, name: str) -> None:
        """Copies the whole file or nothing there: object stores do so, elsewhere it is renamed into place."""
        path = self.path(name)
        if self.fs.async_impl:  # an object store; makedirs could create a bucket
            return self.fs.put_file(str(file), path)
        self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        self.fs.put_file(str(file), f"{path}.part")
        self.fs.mv(f"{path}.part", path)

    def get(self, name: str, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self.fs.get_file(self.path(name), str(file))
