"""The cache: one process of a machine fills it, damage and what a kill leaves are mended."""

import os
import subprocess
import threading
import time
from collections import Counter
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from data.cache import build_once
from data.shards import open_shards, read_manifest
from tests import forked
from tests.shard_data import all_ids, make_texts, run, save_tokenizer, write_jsonl

COPY = """
import sys
from data.shards import open_shards
url, cache = sys.argv[1:]
print("here", flush=True)
print(open_shards(url, cache).tokenizer_name)
print(open_shards(url, cache).rows("train", 32).fingerprint)
"""


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    source = write_jsonl(folder / "texts.jsonl", make_texts(200))
    assert run(source, folder / "shards", save_tokenizer(folder / "tokenizer")) == 0
    return folder / "shards"


@pytest.fixture
def server(shards):
    """HTTP on loopback. asked: how often each file was; stall: a name whose answer waits for `go_on`."""

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self):
            name = self.path.rsplit("/", 1)[-1]
            server.asked[name] += 1
            if name == server.stall:
                server.go_on.wait(60)
            super().do_GET()

        def log_message(self, *words):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(shards.parent)))
    server.asked, server.stall, server.go_on = Counter(), None, threading.Event()
    server.url = f"http://127.0.0.1:{server.server_port}/shards"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.go_on.set()
    server.shutdown()


def test_of_two_processes_one_copies_remote_shards_and_their_tokenizer(server, shards, tmp_path):
    server.stall = "tokenizer.json"
    both = [forked.start_code(COPY, [server.url, tmp_path / "cache"], tmp_path) for _ in range(2)]
    for process, log in both:
        forked.wait_for(process, log, "here\n")
    time.sleep(1)  # both ask, or one does and the other waits for it
    server.go_on.set()
    for process, log in both:
        forked.finish([process], log)
    outputs = [log.read_text() for _, log in both]
    assert outputs[0] == outputs[1]
    names = [file["file"] for file in read_manifest(str(shards))["splits"]["train"]["files"]]
    assert {name: server.asked[name] for name in [*names, "tokenizer.json"]} == dict.fromkeys(
        [*names, "tokenizer.json"], 1)
    own = open_shards(str(shards), tmp_path / "own").rows("train", 32)
    assert outputs[0].split()[-1] == own.fingerprint
    for name in names:
        (copy,) = (tmp_path / "cache").glob(f"shards-*/{name}")
        assert copy.read_bytes() == (shards / name).read_bytes()


def test_what_a_kill_while_copying_leaves_goes_with_the_next_build_of_anything(server, tmp_path):
    server.stall = "train-00000-00003.npy"
    killed, _ = forked.start_code(COPY, [server.url, tmp_path / "cache"], tmp_path)
    until = time.monotonic() + 60
    while not server.asked[server.stall] and time.monotonic() < until:
        time.sleep(0.02)
    killed.kill()
    killed.join()
    tmp_path /= "cache"
    left = {path for path in tmp_path.rglob("*") if path.suffix != ".lock" and path.is_dir()}
    assert any(path.name.startswith("shards-") for path in left)
    other = build_once(tmp_path, "other", 1, lambda folder: (folder / "x").touch())
    found = {path.name.split("-")[0] for path in tmp_path.iterdir() if path.is_dir()}
    assert found == {"other", "tokenizer"} and (other / "x").exists(), found


def test_a_truncated_copy_of_shards_is_made_again(server, shards, tmp_path):
    whole = all_ids(open_shards(server.url, tmp_path).rows("train", 32))
    copy = sorted(tmp_path.glob("shards-*/train-*.npy"))[1]
    os.truncate(copy, os.path.getsize(copy) - 100)
    assert np.array_equal(all_ids(open_shards(server.url, tmp_path).rows("train", 32)), whole)


KILLED_IN_THE_BUILD = """
import os, sys, time
from data.cache import build_once
def build(folder):
    (folder / "x").touch()
    print("building", flush=True)
    time.sleep(float(sys.argv[2]))
print(build_once(sys.argv[1], "rows", 1, build), flush=True)
"""


def test_a_process_that_waits_for_a_build_makes_it_where_the_other_is_killed(tmp_path):
    first, log = forked.start_code(KILLED_IN_THE_BUILD, [tmp_path / "cache", 60], tmp_path)
    forked.wait_for(first, log, "building")
    second, other = forked.start_code(KILLED_IN_THE_BUILD, [tmp_path / "cache", 0], tmp_path)
    time.sleep(2)  # it waits
    first.kill()
    first.join()
    forked.finish([second], other)
    assert other.read_text().split()[0] == "building" and len([*tmp_path.glob("cache/rows-*/x")]) == 1


def test_a_cache_that_cannot_be_written_is_the_users_mistake(shards, tmp_path):
    (tmp_path / "file").touch()
    for cache in (tmp_path / "file" / "cache", tmp_path / "file", tmp_path / ("x" * 300), "/proc/cache"):
        with pytest.raises(ValueError, match=r"cache_dir: .* cannot be written .*name another"):
            open_shards(str(shards), cache).rows("train", 32)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", tmp_path]).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        def build(folder):
            (folder / "big").write_bytes(bytes(1 << 20))

        with pytest.raises(ValueError, match=r"cache_dir: .*No space left.*make room"):
            build_once(tmp_path, "rows", 1, build)
        assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    finally:
        subprocess.run(["umount", tmp_path], check=True)
