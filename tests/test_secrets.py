"""A run or preparation that uses credentials never writes, prints or pushes them."""

import base64
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests import forked
from tests.data_runs import save_tokenizer
from tests.hub_server import TOKEN, HubServer
from tests.runs import TINY, metrics, write_corpus
from utils.io.text import without_secrets

S3_ID, S3_KEY = "AKIALOOPBACKADA4242Q", "s3-Secret/of+ada"
PROXY, QUERY, OVERRIDE = "proxy-pass-4242", "query-token-4242", "hf_inAConfigOverride424242"


class Guarded(BaseHTTPRequestHandler):
    """Serves one file, with the password or with a signature in the URL."""

    def do_GET(self):
        asked = base64.b64encode(f"ada:{self.server.password}".encode()).decode()
        path, _, signature = self.path.partition("?")
        known = signature or self.headers.get("Authorization") == f"Basic {asked}"
        status = 401 if not known else 200 if path == "/corpus.jsonl" else 404
        body = self.server.body if status == 200 else b""
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(tmp_path, hub_port, hub_home):
    with HubServer(tmp_path / "server", hub_port, True, hub_home) as hub:
        yield hub


@pytest.fixture
def server(tmp_path):
    http = ThreadingHTTPServer(("127.0.0.1", 0), Guarded)
    http.body = write_corpus(tmp_path / "corpus.jsonl", 30).read_bytes()
    (tmp_path / "corpus.jsonl").unlink()
    threading.Thread(target=http.serve_forever, args=(0.05,), daemon=True).start()
    yield http
    http.shutdown()


def run(server, hub, folder, program, words, status):
    """Run a command that knows all secrets. Neither its output nor `folder` nor its home may contain one."""
    proxy = f"http://ada:{PROXY}@127.0.0.1:9"
    env = hub.env() | {
        "OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1", "https_proxy": proxy, "http_proxy": proxy,
        "AWS_ACCESS_KEY_ID": S3_ID, "AWS_SECRET_ACCESS_KEY": S3_KEY,
    }  # fmt: skip
    done = forked.run(program, words, env=env, picture=True)
    output = done.stdout + done.stderr
    assert done.returncode == status, output
    for secret in (TOKEN, server.password, QUERY, S3_KEY, PROXY, OVERRIDE):
        assert secret not in output, (secret, output)
        files = [path for place in (folder, hub.home) for path in place.rglob("*") if path.is_file()]
        left = [path for path in files if secret.encode() in path.read_bytes()]
        assert not left, (secret, left)
    return output


def test_secrets_are_not_written_printed_or_pushed(server, hub, tmp_path):
    """The same command resumes the run, also after a change of the password."""
    overrides = f"n_layer=2,n_embd=32,n_head=2,_name_or_path=s3://{S3_ID}:{S3_KEY}@bucket/model"
    overrides += f",summary_type=https://host/model?sig={QUERY},summary_activation={OVERRIDE}"
    flags = TINY | {
        "model_type": "gpt2", "config_overrides": overrides, "cache_dir": tmp_path / "cache",
        "output_dir": tmp_path / "tiny",
        "push_to_hub": True,
    }  # fmt: skip

    def train(password, status=0, **changes):
        server.password = password
        url = f"http://ada:{password}@127.0.0.1:{server.server_port}"
        changed = flags | {"dataset_name": f"{url}/corpus.jsonl"} | changes
        return run(server, hub, tmp_path, "train_clm.py", changed, status)

    train("url-pass-4242")
    before = metrics(tmp_path / "tiny")
    assert "http://***@127.0.0.1" in (tmp_path / "tiny/README.md").read_text()
    assert hub.commits("ada/tiny")
    shutil.rmtree(tmp_path / "tiny/checkpoints/step-00000006")
    assert "continues at step 3" in train("another-pass-4242")
    assert metrics(tmp_path / "tiny") == before
    query = f"http://127.0.0.1:{server.server_port}/corpus.jsonl?sig={QUERY}"
    output = train("third-pass-4242", 2, dataset_name=query)
    assert "dataset_name: http://***@127.0.0.1" in output and "corpus.jsonl?*** now" in output


def test_shards_do_not_contain_the_password_of_their_source(server, hub, tmp_path):
    server.password = "url-pass-4242"
    save_tokenizer(tmp_path / "words")
    url = f"http://ada:{server.password}@127.0.0.1:{server.server_port}/"

    def prepare(name, status):
        words = ["--tokenizer_name", tmp_path / "words", "--dataset_name", url + name]
        words += ["--output_dir", tmp_path / "shards"]
        return run(server, hub, tmp_path, "data.prepare", words, status)

    assert "http://***@127.0.0.1" in prepare("no.jsonl", 2)
    prepare("corpus.jsonl", 0)
    assert "http://***@127.0.0.1" in (tmp_path / "shards/manifest.json").read_text()


@pytest.mark.parametrize(
    "text, clean",
    [
        ("http://ada:s@e:c@host/x.jsonl", "http://***@host/x.jsonl"),
        ("s3://AKIALOOPBACKADA4242Q:a/b+c@bucket/it", "s3://***@bucket/it"),
        ("'filecache::https://ada@host/x?sig=1&b=2' fails", "'filecache::https://***@host/x?***' fails"),
        ("https://host/x?sastoken", "https://host/x?***"),
        ("gs://bucket/x?token=1", "gs://bucket/x?***"),
        ("ftp://user:12/34secret@host", "ftp://***@host"),
        ("s3://KEY:1/secret@bucket", "s3://***@bucket"),
        ("AccountName=ada;AccountKey=c2Vj+cmV0/==;x=1", "AccountName=ada;AccountKey=***;x=1"),
        *((f"it is {token} here", "it is *** here") for token in (
            "github_pat_11ABC_defGHI22345678", "gho_16C7e42F292c6912E7710c83", "glpat-aB3-cD4_eF5gH6iJ7kL8",
            "sk-proj-aB3_cD4-eF5gH6iJ7kL8mN9", "npm_aB3cD4eF5gH6iJ7kL8mN9oP0qR1sT2uV3wX4",
            "dckr_pat_aB3-cD4eF5gH6iJ7kL8mN9oP0qR", "AIzaSyA1b2C3d4E5f6G7h8I9j0K1l2M3n4O5p6Q",
            "ya29.a0AfH6SMBx-aB3cD4eF5gH6iJ7kL8", "xoxb-123456789012-1234567890123-aBcDeFgHiJkL",
        )),
        ("Authorization: Bearer eyJhbGciOi.JIUzI1NiJ9.x-y_z", "Authorization: Bearer ***"),
        *((same, same) for same in (
            "the bearer of the token", "npm_install and dckr_x",
            "s3://bucket/part-?.jsonl", "hf://datasets/ada/rows@main/x", "http://host:80/x@2", "a@b c=d",
        )),
    ],
)  # fmt: skip
def test_secrets_are_removed_from_text(text, clean):
    assert without_secrets(text) == without_secrets(clean) == clean


def test_secrets_in_environment_variables_are_removed(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "abc-def-ghi")
    for i, name in enumerate(("DB_PASS", "MYSQL_PWD", "SSHPASS")):
        monkeypatch.setenv(name, f"no{i}-prefix-tells")
    assert without_secrets("no0-prefix-tells, no1-prefix-tells, no2-prefix-tells") == "***, ***, ***"
    settings = {"a": ["x abc-def-ghi", "hf_" + "q" * 30], "b": "n=2,auth_token=abc,pad_token_id=3", "c": 1}
    clean = {"a": ["x ***", "***"], "b": "n=2,auth_token=***,pad_token_id=3", "c": 1}
    assert without_secrets(settings) == clean
