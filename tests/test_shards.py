"""Token shards: exact, counted, verified, at local paths and in an S3 store that fails for a while."""

import json
import re
import threading

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from data.shards import check_shards, fetch_tokenizer, is_shards, open_shards
from data.sources import storage
from data.sources.tables import parquet_to_rows, rows_to_parquet
from data.streams import ShardSource, StreamingRows
from data.tokenizer import load_tokenizer
from tests.shard_data import make_texts, run, save_tokenizer, shard_bytes, write_jsonl

T = 32


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    source = write_jsonl(folder / "texts.jsonl", make_texts(200))
    tokenizer = save_tokenizer(folder / "tokenizer")
    assert run(source, folder / "shards", tokenizer) == 0
    return {"folder": folder, "source": source, "tokenizer": tokenizer, "shards": str(folder / "shards")}


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_rows_come_back_exactly_and_the_same_rows_make_the_same_bytes(dtype):
    rows = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, (3000, 4096 // 3), dtype, endpoint=True)
    data = rows_to_parquet(rows)
    assert data == rows_to_parquet(rows.copy())
    back = parquet_to_rows(data)
    assert back.dtype == dtype and np.array_equal(back, rows)


def test_counts_stand_in_the_footer_and_the_manifest(made):
    manifest = check_shards(made["shards"])
    for split, entry in manifest["splits"].items():
        for shard in entry["shards"]:
            footer = pq.read_metadata(f"{made['shards']}/{shard['file']}")
            assert footer.num_rows == shard["rows"]
            assert int(footer.metadata[b"tokens"]) == shard["tokens"] == shard["rows"] * T
            field = pq.read_schema(f"{made['shards']}/{shard['file']}").field("input_ids")
            assert str(field.type) == f"fixed_size_list<element: uint16>[{T}]"
        assert entry["rows"] == sum(shard["rows"] for shard in entry["shards"])
        assert entry["rows"] == manifest["accounting"][split]["rows"]


def test_the_copy_in_the_cache_is_made_once_and_follows_the_shards(made, tmp_path):
    first = open_shards(made["shards"], "train", cache_dir=tmp_path)
    (copy,) = tmp_path.rglob("*.npy")
    written = copy.stat().st_mtime_ns
    assert np.array_equal(open_shards(made["shards"], "train", cache_dir=tmp_path).rows, first.rows)
    assert copy.stat().st_mtime_ns == written
    assert run(made["source"], made["folder"] / "other", made["tokenizer"], seed=1) == 0
    other = open_shards(str(made["folder"] / "other"), "train", cache_dir=tmp_path)
    assert other.path != first.path and len(list(tmp_path.rglob("*.npy"))) == 2


def test_wrong_block_size_tokenizer_and_split_are_refused_with_the_remedy(made, tmp_path):
    url, cache = made["shards"], tmp_path / "cache"
    other = load_tokenizer(save_tokenizer(tmp_path / "other", seed=5))
    message = r"(?s)block_size: 64.*set --block_size 32.*tokenizer_name:.*/tokenizer"
    with pytest.raises(ValueError, match=message):
        check_shards(url, 64, other)
    own = load_tokenizer(fetch_tokenizer(url, str(cache)))
    assert check_shards(url, T, own)["block_size"] == T
    with pytest.raises(ValueError, match="has no rows for test, only for train, validation"):
        open_shards(url, "test", cache_dir=cache)
    with pytest.raises(ValueError, match="holds no token shards"):
        open_shards(str(tmp_path), "train", cache_dir=cache)
    assert not is_shards(str(tmp_path)) and not is_shards("user/name") and is_shards(url)


@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_a_damaged_shard_is_named(made, tmp_path, damage):
    url = tmp_path / "shards"
    assert run(made["source"], url, made["tokenizer"]) == 0
    path = url / "train-00002.parquet"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    if damage == "missing":
        path.unlink()
    with pytest.raises(ValueError, match=r"train-00002.parquet is (damaged|missing).*Copy it again"):
        open_shards(str(url), "train", cache_dir=tmp_path / "cache")
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} <= {".lock"}, "no half-made copy stays"
    with pytest.raises(ValueError, match=r"train-00002.parquet is (damaged|missing)"):
        list(StreamingRows(ShardSource(str(url)), batch_size=1, seed=0, stop=10**4))


def test_an_unfinished_preparation_is_not_trained_on(made, tmp_path):
    (tmp_path / "progress").mkdir()
    (tmp_path / "progress" / "settings.json").write_text("{}")
    with pytest.raises(ValueError, match="not finished; the same `python -m data.prepare` command"):
        is_shards(str(tmp_path))


def test_errors_that_may_pass_are_told_from_those_that_stay():
    class Answer(Exception):
        def __init__(self, status):
            self.response = type("Response", (), {"status_code": status})()

    Answer.__module__ = "httpx"
    assert [storage.is_transient(Answer(status)) for status in (500, 503, 429, 408, 401, 403, 404)] == [
        True, True, True, True, False, False, False]
    assert storage.is_transient(ConnectionResetError()) and storage.is_transient(TimeoutError())
    full = OSError(28, "No space left on device")
    for error in (FileNotFoundError(), PermissionError(), full, OSError("damaged file"), KeyError("bug")):
        assert not storage.is_transient(error)


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
    folder = storage.Folder("s3://bucket")
    folder.write("texts.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts).encode())

    monkeypatch.setattr(storage, "DELAYS", (0.05,) * 7)
    start = store.requests
    store.refuse = lambda n: (n - start) % 25 < 2 or 60 <= n - start < 67
    assert run(source, remote, made["tokenizer"]) == 0
    rows = open_shards(remote, "train", cache_dir=tmp_path)
    check_shards(made["shards"], T, load_tokenizer(fetch_tokenizer(remote, str(tmp_path))))
    stream = StreamingRows(ShardSource(remote), batch_size=1, seed=0, stop=len(rows))
    streamed = torch.stack([row["input_ids"] for row in sorted(stream, key=lambda row: row["row"])])
    assert store.refused > 15 and "next try in" in capfd.readouterr().err
    store.refuse = lambda n: False
    stored = {name: folder.read(f"some/shards/{name}") for name in storage.Folder(remote).names()
              if name.endswith(".parquet")}
    assert stored == shard_bytes(made["shards"])
    assert "progress" not in storage.Folder(remote).names()
    local = open_shards(made["shards"], "train", cache_dir=tmp_path / "local")
    assert np.array_equal(rows.rows, local.rows)
    assert np.array_equal(streamed.numpy(), local.rows)


@pytest.mark.parametrize("wrong, message", [
    ("bucket", "s3://nowhere/shards cannot be written"),
    ("endpoint", "s3://bucket/shards cannot be read.*(address|spelling)"),
    ("credentials", "s3://bucket/shards cannot be read.*Check your credentials"),
    ("protocol", "nowhere://bucket/shards cannot be opened.*nowhere"),
])
def test_a_url_that_cannot_be_used_is_the_users_mistake(made, store, monkeypatch, capsys, wrong, message):
    import s3fs

    monkeypatch.setattr(storage, "DELAYS", (0.1,) * 7)
    url = {"bucket": "s3://nowhere/shards", "protocol": "nowhere://bucket/shards"}.get(wrong, "s3://bucket/shards")
    if wrong == "credentials":
        store.refuse, store.status = lambda n: True, "403 Forbidden"
    if wrong == "endpoint":
        s3fs.S3FileSystem.clear_instance_cache()
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert run(made["source"], url, made["tokenizer"]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error.replace("\n", " ")), error
