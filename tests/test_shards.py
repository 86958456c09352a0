"""Token shards: exact, counted, verified, at local paths and in an S3 store that fails for a while."""

import hashlib
import itertools
import json
import re
import threading
from pathlib import Path

import numpy as np
import pytest

from data.groups import StreamPosition, shard_groups
from data.shards import damaged_files, open_shards, read_manifest
from data.tokenizer import load_tokenizer
from tests.shard_data import all_ids, make_texts, run, save_tokenizer, shard_bytes, tokens_of, write_jsonl
from utils.io import retry, urls

T = 32


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    source = write_jsonl(folder / "texts.jsonl", make_texts(200))
    tokenizer = save_tokenizer(folder / "tokenizer")
    assert run(source, folder / "shards", tokenizer) == 0
    return {"folder": folder, "source": source, "tokenizer": tokenizer, "shards": str(folder / "shards")}


def streamed(url: str) -> np.ndarray:
    """The rows of one epoch of a stream, in its order."""
    groups = shard_groups(url, read_manifest(url)["splits"]["train"]["files"], T, 50)
    first = itertools.takewhile(lambda found: not found[0].epoch, groups.groups_from(StreamPosition()))
    found = [rows for mark, rows in first]
    return np.concatenate(found)


def test_counts_and_checksums_stand_in_the_manifest(made):
    manifest = read_manifest(made["shards"])
    assert manifest["dtype"] == "uint16"
    for split, entry in manifest["splits"].items():
        for file in entry["files"]:
            path = Path(made["shards"], file["file"])
            ids = np.load(path)
            assert len(ids) == file["tokens"] and ids.dtype == np.uint16 and ids.ndim == 1
            assert hashlib.sha256(path.read_bytes()).hexdigest() == file["sha256"]
            assert path.stat().st_size == file["size"]
        assert entry["tokens"] == sum(file["tokens"] for file in entry["files"])
        assert entry["tokens"] == manifest["accounting"][split]["tokens"]
    train = [line for line in manifest["chunks"] if line["chunk"][0] == "train"]
    assert len(train) > 5 and train[-1]["last"] and not any(line["last"] for line in train[:-1])
    assert sum(line["accounts"]["train"]["read"] for line in train) == 200


def test_the_same_shards_serve_rows_of_any_length(made, tmp_path):
    stream = tokens_of(made["shards"], "train")
    for block_size in (1, 7, 32, 1000):
        rows = open_shards(made["shards"], tmp_path).rows("train", block_size)
        n = len(stream) // block_size
        assert len(rows) == n and np.array_equal(all_ids(rows).ravel(), stream[: n * block_size])
    first = open_shards(made["shards"], tmp_path).rows("train", T, max_rows=9)
    assert np.array_equal(all_ids(first).ravel(), stream[: 9 * T]) and len(first.views) < 5


def test_local_shards_are_verified_once_and_read_where_they_lie(made, tmp_path, monkeypatch):
    first, read, reads = open_shards(made["shards"], tmp_path).rows("train", T), urls.Folder.read, []
    monkeypatch.setattr(urls.Folder, "read", lambda folder, name: reads.append(name) or read(folder, name))
    again = open_shards(made["shards"], tmp_path).rows("train", T)
    assert reads == ["manifest.json"] and not [*tmp_path.rglob("*.npy")]
    assert np.array_equal(all_ids(again), all_ids(first)) and again.fingerprint == first.fingerprint
    assert run(made["source"], made["folder"] / "other", made["tokenizer"], seed=1) == 0
    other = open_shards(str(made["folder"] / "other"), tmp_path).rows("train", T)
    assert other.fingerprint != first.fingerprint


def test_a_wrong_tokenizer_or_split_is_refused_with_the_remedy(made, tmp_path):
    url, cache = made["shards"], tmp_path / "cache"
    other = load_tokenizer(save_tokenizer(tmp_path / "other", seed=5))
    tokens = open_shards(url, cache)
    (line,) = tokens.problems(other, "train", T)
    assert re.match("tokenizer_name:.*/tokenizer", line)
    (line,) = tokens.problems(load_tokenizer(tokens.tokenizer_name), "test", T)
    assert "has no row of 32 tokens for test, only for train, validation" in line
    assert not tokens.problems(load_tokenizer(tokens.tokenizer_name), "validation", T)
    assert open_shards(str(tmp_path), cache) is None
    assert read_manifest(str(tmp_path)) is None is read_manifest("user/name") and read_manifest(url)
    (tmp_path / "manifest.json").write_text('{"format": "token-rows-1"}')
    with pytest.raises(ValueError, match="format 'token-rows-1', but this version reads .*Prepare it again"):
        read_manifest(str(tmp_path))


@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_a_damaged_shard_is_named(made, tmp_path, damage):
    url = tmp_path / "shards"
    assert run(made["source"], url, made["tokenizer"]) == 0
    path = url / "train-00000-00002.npy"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    if damage == "missing":
        path.unlink()
    with pytest.raises(ValueError, match=r"train-00000-00002.npy is (damaged|missing).*Copy it again"):
        open_shards(str(url), tmp_path / "cache").rows("train", T)
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} <= {".lock"}, "no half-made copy stays"
    with pytest.raises(ValueError, match=r"train-00000-00002.npy is (damaged|missing)"):
        streamed(str(url))
    assert damaged_files(urls.Folder(url), read_manifest(str(url))) == ["train-00000-00002.npy"]


def test_an_unfinished_preparation_is_not_trained_on(made, tmp_path):
    (tmp_path / "progress").mkdir()
    (tmp_path / "progress" / "settings.json").write_text("{}")
    with pytest.raises(ValueError, match="not finished; run the same .* command to resume.$"):
        read_manifest(str(tmp_path))


def test_shards_in_the_home_folder_are_found(made, monkeypatch):
    monkeypatch.setenv("HOME", str(made["folder"]))
    assert read_manifest("~/shards") == read_manifest(made["shards"])


def test_errors_that_may_pass_are_told_from_those_that_stay():
    class Answer(Exception):
        def __init__(self, status):
            self.response = type("Response", (), {"status_code": status})()

    Answer.__module__ = "httpx"
    assert [retry.diagnose(Answer(status)).transient for status in (500, 503, 429, 408, 401, 403, 404)] == [
        True, True, True, True, False, False, False]
    assert retry.diagnose(ConnectionResetError()).transient and retry.diagnose(TimeoutError()).transient
    full = OSError(28, "No space left on device")
    for error in (FileNotFoundError(), PermissionError(), full, OSError("damaged file"), KeyError("bug")):
        assert not retry.diagnose(error).transient


class Store:
    """moto's S3 on loopback, in this process; `refuse(n)` tells whether request n is answered with
    `status`.
    """

    def __init__(self):
        server = pytest.importorskip("moto.server", reason="needs moto, flask, flask-cors")
        pytest.importorskip("s3fs", reason="needs s3fs")
        from werkzeug.serving import WSGIRequestHandler, make_server

        self.requests, self.refused = 0, 0
        self.refuse, self.status = lambda n: False, "503 Service Unavailable"
        application = server.DomainDispatcherApplication(server.create_backend_app)

        def answer(environ, start_response):
            self.requests += 1
            if self.refuse(self.requests):
                self.refused += 1
                start_response(self.status, [("Content-Length", "0")])
                return [b""]
            return application(environ, start_response)

        class Quiet(WSGIRequestHandler):
            def log(self, *args, **kwargs):
                pass

        self.server = make_server("127.0.0.1", 0, answer, threaded=True, request_handler=Quiet)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def store(monkeypatch):
    store = Store()
    import s3fs

    endpoint = f"http://127.0.0.1:{store.server.server_port}"
    settings = {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
                "AWS_DEFAULT_REGION": "us-east-1", "AWS_MAX_ATTEMPTS": "1"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().makedirs("bucket", exist_ok=True)
    yield store
    s3fs.S3FileSystem.clear_instance_cache()
    store.server.shutdown()


def test_s3_holds_the_same_shards_though_requests_fail(made, store, tmp_path, monkeypatch, capfd):
    texts, remote = make_texts(200), "s3://bucket/some/shards"
    source = "s3://bucket/texts.jsonl"
    folder = urls.Folder("s3://bucket")
    folder.write("texts.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts).encode())

    monkeypatch.setattr(retry, "DELAYS", (0.05,) * 7)
    start = store.requests
    store.refuse = lambda n: (n - start) % 25 < 2 or 60 <= n - start < 67
    assert run(source, remote, made["tokenizer"]) == 0
    rows = open_shards(remote, tmp_path).rows("train", T)
    tokenizer = load_tokenizer(open_shards(remote, tmp_path).tokenizer_name)
    assert not open_shards(made["shards"], tmp_path).problems(tokenizer, "train", T)
    stream = streamed(remote)
    assert store.refused > 15 and "next try in" in capfd.readouterr().err
    store.refuse = lambda n: False
    stored = {name: folder.read(f"some/shards/{name}") for name in urls.Folder(remote).names()
              if name.endswith(".npy")}
    assert stored == shard_bytes(made["shards"])
    assert "progress" not in urls.Folder(remote).names()
    local = open_shards(made["shards"], tmp_path / "local").rows("train", T)
    assert np.array_equal(all_ids(rows), all_ids(local)) and np.array_equal(stream, all_ids(local))
    assert len([*tmp_path.glob("shards-*/*.npy")]) == len(read_manifest(remote)["splits"]["train"]["files"])


@pytest.mark.parametrize("wrong, message", [
    ("bucket", "s3://nowhere/shards cannot be written"),
    ("endpoint", "s3://bucket/shards cannot be read.*(address|spelling)"),
    ("credentials", "s3://bucket/shards cannot be read.*Check your credentials"),
    ("protocol", "nowhere://bucket/shards cannot be opened.*nowhere"),
])
def test_a_url_that_cannot_be_used_is_the_users_mistake(made, store, monkeypatch, capsys, wrong, message):
    import s3fs

    monkeypatch.setattr(retry, "DELAYS", (0.1,) * 7)
    url = {"bucket": "s3://nowhere/shards", "protocol": "nowhere://bucket/shards"}.get(wrong, "s3://bucket/shards")
    if wrong == "credentials":
        store.refuse, store.status = lambda n: True, "403 Forbidden"
    if wrong == "endpoint":
        s3fs.S3FileSystem.clear_instance_cache()
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert run(made["source"], url, made["tokenizer"]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error.replace("\n", " ")), error
