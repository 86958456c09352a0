"""One file of token shards: token ids, as numpy's .npy, with size and checksum in the manifest."""

import hashlib
import io
from typing import Any

import numpy as np

from utils.io.urls import Folder


def write_tokens(folder: Folder, name: str, ids: np.ndarray) -> dict:
    """Writes token ids [n]. Returns their entry in the manifest."""
    data = io.BytesIO()
    np.save(data, ids)
    content = data.getvalue()
    folder.write(name, content)
    digest = hashlib.sha256(content).hexdigest()
    return {"file": name, "tokens": len(ids), "size": len(content), "sha256": digest}


def read_tokens(folder: Folder, entry: dict[str, Any]) -> np.ndarray:
    """Token ids [n] of a file of the manifest. ValueError where it is not the one that is meant."""
    return np.load(io.BytesIO(read_file(folder, entry)))


def read_file(folder: Folder, entry: dict[str, Any]) -> bytes:
    """What it holds, checked."""
    name = f"{folder.url}/{entry['file']}"
    try:
        data = folder.read(entry["file"])
    except FileNotFoundError as error:
        raise ValueError(f"{name} is missing. Copy it again, or run the same command of data.prepare again: "
                         "it makes what is missing.") from error
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise ValueError(f"{name} is damaged (by its checksum). Copy it again, or run the same command of "
                         "data.prepare again: it makes what is damaged.")
    return data
