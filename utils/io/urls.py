"""Files at any fsspec URL (local path, s3://, gs://, hf://): whole writes, and patience with what fails."""

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
    """What a wrong URL, a missing package or missing rights raise, as a ValueError that names the remedy."""
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
    """The file system that answers to `url` and the path in it; options: of fsspec. ValueError where the file
    system takes credentials for a part of that path: they would be in every message."""
    files, path = fsspec.core.url_to_fs(url, **options)
    if "://" in url and "://" not in path and f"{HIDDEN}@" in without_secrets(f"://{path}"):
        raise ValueError("credentials are no part of such a URL, set them as its file system wants them")
    return files, path


class Folder:
    """A folder at a URL. Paths are relative to it; requests are repeated after passing failures, but for
    those of find, put and get."""

    def __init__(self, url: str, **options):
        """Raises ValueError when no file system answers to `url`; makes no request. options: of fsspec."""
        url = str(url).rstrip("/") or "/"
        self.url = without_secrets(url)
        with explained(self.url, "opened"):
            self.fs, self.root = open_url(url, **options)
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
            temporary = Path(f"{path}.tmp")
            temporary.parent.mkdir(parents=True, exist_ok=True)
            write_file(temporary, [data])
            temporary.replace(path)

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

    def find(self) -> list[str]:
        """Names of the files in it and in its folders; [] where there is none."""
        try:
            return [path.removeprefix(f"{self.root}/") for path in self.fs.find(self.root)]
        except FileNotFoundError:
            return []

    def put(self, file: Path, name: str) -> None:
        """The whole file or none of it: object stores do so, and would make a bucket of a mistyped folder's
        name; elsewhere it becomes so when it is renamed."""
        path = self.path(name)
        if self.fs.async_impl:
            return self.fs.put_file(str(file), path)
        self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        self.fs.put_file(str(file), f"{path}.part")
        self.fs.mv(f"{path}.part", path)

    def get(self, name: str, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self.fs.get_file(self.path(name), str(file))
