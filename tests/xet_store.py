"""The storage side of Xet uploads for tests/hub_server.py. It assembles the files from what hf_xet sends, so
that tests can read what a default install of huggingface_hub pushes.

Protocol: https://huggingface.co/docs/xet. A xorb is a sequence of chunks, each after a header of 8 bytes. A
shard lists the chunks of each file and its sha256. This store accepts xorbs and shards by POST and answers
all other requests with 404, so the client knows that no chunk is stored yet. Chunks must be uncompressed.
Downloads use plain HTTP, as the server does not offer Xet for them.
"""

import hashlib
import re
import struct
from pathlib import Path


def _hex(raw):
    """32 bytes as Xet prints them: four little-endian numbers in hexadecimal."""
    return struct.pack(">4Q", *struct.unpack("<4Q", raw)).hex()


class XetStore:
    def __init__(self, root):
        self.root = Path(root)
        self.root.mkdir(parents=True, exist_ok=True)
        self.files: dict[str, list[tuple[str, int, int]]] = {}  # sha256 -> (xorb, first chunk, stop chunk)

    def call(self, method, path, data):
        """(HTTP status, answer) of a request to the storage."""
        if method == "POST" and (match := re.fullmatch(r"/v1/xorbs/default/(\w{64})", path)):
            (self.root / match[1]).write_bytes(data)
            return 200, {"was_inserted": True}
        if method == "POST" and path == "/v1/shards":
            self.files.update(read_shard(data))
            return 200, {"result": 1}
        return 404, {"error": "unknown"}

    def has(self, sha256):
        return sha256 in self.files

    def read(self, sha256):
        content = b"".join(
            b"".join(read_chunks((self.root / xorb).read_bytes(), start, stop))
            for xorb, start, stop in self.files[sha256]
        )
        assert hashlib.sha256(content).hexdigest() == sha256, "the chunks of this file do not have its hash"
        return content


def read_shard(data):
    """{sha256 of a file: [(xorb, first chunk, stop chunk), ...]}. Each entry of a shard has 48 bytes."""
    files, at = {}, 48  # after the header
    while (name := data[at:at + 32]) != b"\xff" * 32:
        flags, count = struct.unpack_from("<2I", data, at + 32)
        entries = []
        for i in range(1, count + 1):
            xorb, _, _, start, stop = struct.unpack_from("<32s4I", data, at + 48 * i)
            entries.append((_hex(xorb), start, stop))
        at += 48 * (1 + count * (2 if flags >> 31 else 1))  # with verification entries?
        assert flags >> 30 & 1, f"file {_hex(name)} comes without its sha256"
        files[_hex(data[at:at + 32])] = entries
        at += 48
    return files


def read_chunks(xorb, start, stop):
    at = 0
    for i in range(stop):
        stored, scheme = int.from_bytes(xorb[at + 1:at + 4], "little"), xorb[at + 4]
        if i >= start:
            assert scheme == 0, "compressed: run the client with HF_XET_XORB_COMPRESSION_POLICY=none"
            yield xorb[at + 8:at + 8 + stored]
        at += 8 + stored
