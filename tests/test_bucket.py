"""checkpoint_url: a fresh, empty output folder goes on from a bucket, whatever dies when.

    BUCKET_KILLS=20 pytest tests/test_bucket.py -m slow -k kills      # the default is a few, for CI

On file://, on ftp:// (tests/ftp_server.py, a process that is killed, too) and on moto's S3.
"""

import json
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests import forked
from tests.ftp_server import PASSWORD
from tests.runs import PROJECT, TINY, environment, metrics, write_corpus
from utils.io.files import seal, verify_checksums, write_file
from utils.publishing.publisher import Publisher, Snapshot
from utils.publishing.remote import fetch_checkpoint, open_remote, refuse_another

KILLS = int(os.environ.get("BUCKET_KILLS", 4))


class Ftp:
    """The server's process, its folder, and the URL of a bucket there."""

    def __init__(self, folder):
        self.port, self.folder = forked.free_port(), folder
        folder.mkdir()
        self.url = f"ftp://ada:{PASSWORD}@127.0.0.1:{self.port}/bucket/run"
        self.start()

    def start(self, seconds=0.0):
        command = [sys.executable, "-m", "tests.ftp_server", self.folder, self.port, seconds]
        self.process = subprocess.Popen([*map(str, command)], cwd=PROJECT)
        while True:
            try:
                return socket.create_connection(("127.0.0.1", self.port)).close()
            except ConnectionRefusedError:
                time.sleep(0.01)

    def kill(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture
def ftp(tmp_path):
    ftp = Ftp(tmp_path / "ftp")
    yield ftp
    ftp.kill()


@pytest.fixture(scope="module")
def s3():
    """moto's S3 in this process: its URL, and what a process needs to reach it."""
    server = pytest.importorskip("moto.server", reason="tests/requirements.txt: moto, flask, flask-cors")
    s3fs = pytest.importorskip("s3fs", reason="tests/requirements.txt: s3fs")
    with pytest.MonkeyPatch.context() as patch:
        threaded = server.ThreadedMotoServer(port=0, verbose=False)
        threaded.start()
        endpoint = f"http://127.0.0.1:{threaded.get_host_and_port()[1]}"
        settings = {"AWS_ENDPOINT_URL": endpoint, "AWS_DEFAULT_REGION": "us-east-1", "AWS_MAX_ATTEMPTS": "1"}
        settings |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
        for name, value in settings.items():
            patch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().makedirs("bucket")
        yield "s3://bucket/run"
        threaded.stop()


@pytest.fixture(params=["file", "ftp", "s3"])
def url(request, tmp_path):
    if request.param == "file":
        return f"file://{tmp_path}/bucket/run"
    made = request.getfixturevalue(request.param)
    return f"{made}/{tmp_path.name}" if request.param == "s3" else made.url


def save(output_dir, step, size=100_000):
    """What a save leaves: a checkpoint with a sharded thing, complete, and what is beside it."""
    folder = output_dir / f"checkpoints/step-{step:08d}"
    (folder / "model").mkdir(parents=True)
    names = "optimizer.safetensors", "model/shard-00001.safetensors", "state.json"
    seal(folder, {name: write_file(folder / name, [os.urandom(size)]) for name in names}, step=step)
    (output_dir / "metrics.jsonl").write_text(f"up to step {step}")
    (output_dir / "run.json").write_text(json.dumps({"id": output_dir.name}))
    return folder


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def mirror(store, output_dir, timeout=20.0):
    pusher = Publisher(output_dir, None, store).start()
    said = []
    pusher.say = said.append
    pusher.poll()
    return pusher.finish(timeout), said


def test_what_is_there_is_complete_verified_and_bounded(url, tmp_path):
    """Byte for byte; the newest two; a damaged one is passed over."""
    store, out, new = open_remote(url, limit=2), tmp_path / "out", tmp_path / "new"
    for step in (20, 30, 40):
        newest = save(out, step)
        assert mirror(store, out) == (True, [])
    assert store.steps() == [30, 40]
    new.mkdir()
    assert fetch_checkpoint(store, new) == new / "checkpoints" / newest.name
    assert fetch_checkpoint(store, new) is None
    assert contents(new) == {name: data for name, data in contents(out).items()
                             if name.parts[0] != "checkpoints" or newest.name in name.parts}  # fmt: skip
    folder = store.folder()
    folder.write(f"checkpoints/{newest.name}/state.json", os.urandom(100_000))
    shutil.rmtree(new)
    new.mkdir()
    assert fetch_checkpoint(store, new).name == "step-00000030"
    assert not [*new.glob(".*")] and not verify_checksums(new / "checkpoints/step-00000030")


def test_the_manifest_comes_last_and_goes_first(tmp_path, monkeypatch):
    """Killed before each single change of a bucket, it shows complete checkpoints only, also when the same
    step is saved anew with other content."""
    import fsspec

    class Killed(BaseException):
        pass

    local = fsspec.get_filesystem_class("file")
    left = [0]

    def until_killed(name):
        done = getattr(local, name)

        def change(fs, path, *args, **kwargs):
            left[0] -= 1
            if left[0] >= 0:
                return done(fs, path, *args, **kwargs)
            if name == "rm":  # a folder, half deleted
                for file in Path(path).rglob("*.safetensors"):
                    file.unlink()
            raise Killed

        monkeypatch.setattr(local, name, change)

    store = open_remote(f"file://{tmp_path}/bucket", limit=1)
    for name in ("put_file", "mv", "rm_file", "rm"):
        until_killed(name)
    kills = 0
    for step, again in ((10, 0), (20, 1), (20, 2)):
        out = tmp_path / f"out-{again}"
        folder = save(out, step)
        names = [path.as_posix() for path in contents(out) if path.parts[0] != "checkpoints" or
                 folder.name in path.parts]  # fmt: skip
        for changes in range(99):
            left[0] = changes
            try:
                store.upload(Snapshot(step, "checkpoints", out, names, ""))
                break
            except Killed:
                kills += 1
            for there in store.steps():
                found = tmp_path / f"found-{kills}-{there}"
                found.mkdir()
                store.download(there, found)
                assert not verify_checksums(found / f"checkpoints/step-{there:08d}")
        assert store.steps() == [step]
    assert kills > 20


def test_a_bucket_of_another_run_is_not_mixed_with(tmp_path):
    """Other checkpoints are here; it is begun anew; one goes back behind later steps of the same run."""
    url = f"file://{tmp_path}/bucket"
    store, one, other = open_remote(url, limit=2), tmp_path / "one", tmp_path / "other"
    save(one, 10)
    assert mirror(store, one)[0]
    save(other, 5)
    assert fetch_checkpoint(store, other) is None
    with pytest.raises(ValueError, match="holds step 10 of another run"):
        refuse_another(store, other, math.inf)
    (other / "run.json").write_text(json.dumps({"id": "one"}))
    assert fetch_checkpoint(store, other).name == "step-00000010"
    refuse_another(store, other, math.inf)
    refuse_another(store, other, 10)
    for step, folder in ((0, one), (5, one), (20, tmp_path)):
        (tmp_path / "run.json").write_text(json.dumps({"id": "third"}))
        with pytest.raises(ValueError, match="or after this run's start"):
            refuse_another(store, folder, step)


def test_a_bucket_that_is_away_is_told_tried_again_and_never_waited_for(ftp, tmp_path):
    """It comes back and has the newest; silent at the end: said in time, without a password."""
    store, out = open_remote(ftp.url), tmp_path / "out"
    pusher = Publisher(out, None, store).start()
    said = []
    pusher.say = said.append
    ftp.kill()
    save(out, 10)
    events = []
    while len(said) < 1:
        events += pusher.poll()
        time.sleep(0.02)
    assert "step 10 was not published" in said[0] and "tries again" in said[0]
    save(out, 20)
    ftp.start()
    while not any(event["state"] == "done" for event in events):
        events += pusher.poll()
        time.sleep(0.02)
    assert store.steps() == [20]
    ftp.process.send_signal(signal.SIGSTOP)
    save(out, 30)
    assert not pusher.finish(1.0)
    assert "'Training state after step 30' did not reach ftp://***@127.0.0.1" in said[-1]
    assert "the same command again" in said[-1] and PASSWORD not in str(said + events)


def test_settings_are_compared_before_anything_is_written(tmp_path):
    """A mistyped URL, of another experiment, leaves an empty folder as it was; the right one works then."""
    flags = TINY | {
        "dataset_name": write_corpus(tmp_path / "corpus.jsonl", 30), "cache_dir": tmp_path / "cache",
    }  # fmt: skip
    url, out = f"file://{tmp_path}/bucket", tmp_path / "out"
    first = flags | {"output_dir": tmp_path / "first", "checkpoint_url": f"{url}/first"}
    other = flags | {"output_dir": out, "learning_rate": 3e-3}
    done = forked.run("train_clm.py", first)
    assert done.returncode == 0, done.stderr
    for change, line in (({}, "learning_rate: 0.002 in the run, 0.003 now"),
                         ({"learning_rate": 2e-3, "seed": 1}, "seed: 42 in the run, 1 now"),
                         ({"learning_rate": 2e-3, "max_train_samples": 90}, "max_train_samples: 0 in the")):
        done = forked.run("train_clm.py", other | change | {"checkpoint_url": f"{url}/first"})
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
        assert f"checkpoint_url {url}/first holds a run with other settings: repeat them" in done.stderr
        assert line in done.stderr and [path.name for path in out.iterdir()] == [".lock"]
    done = forked.run("train_clm.py", other | {"checkpoint_url": f"{url}/other"})
    assert done.returncode == 0, done.stderr
    assert "continues" not in done.stdout and open_remote(f"{url}/other").steps()[-1] == 6


def start(folder, flags, log):
    return forked.start(PROJECT, "train_clm.py", flags | {"output_dir": folder}, log)


def incomplete(ftp):
    """Whether the bucket has a checkpoint without a manifest: one that is on its way."""
    made = ftp.folder.glob("bucket/run/checkpoints/step-*")
    return any(not (path / "manifest.json").exists() for path in made)


def check_kills(ftp, tmp_path, kills):
    """Each kill is followed by a run in a fresh, empty folder; what the bucket shows is always complete."""
    flags = TINY | {
        "dataset_name": write_corpus(tmp_path / "corpus.jsonl", 30), "cache_dir": tmp_path / "cache",
        "max_train_steps": 40 + 30 * kills,
        "save_steps": 5, "eval_steps": 30, "prompts": ["none"],
    }  # fmt: skip
    moments, log, begun = random.Random(0), tmp_path / "log", []
    unbroken = start(tmp_path / "unbroken", flags, tmp_path / "log-unbroken")
    flags |= {"checkpoint_url": ftp.url}
    ftp.kill()
    ftp.start(0.005)
    for i in range(kills + 1):
        seen = log.stat().st_size if log.exists() else 0
        process = start(tmp_path / f"run-{i}", flags, log)

        def until(told, seen=seen, process=process):
            while not told(log.read_text()[seen:]) and process.is_alive():
                time.sleep(0.002)

        def steps(n):
            return lambda text: text.count("\nstep ") >= n

        if i == kills:
            forked.finish([process, unbroken], log, 1500)
        else:
            until(steps(moments.randint(5, 40)))
            if i % 4:
                until(lambda _: incomplete(ftp))
                time.sleep(moments.uniform(0, 0.05))
            if i % 4 > 1:
                ftp.kill()
            if i % 4 == 2:
                until(steps(50))
                ftp.start(0.005)
                until(steps(60))
            assert process.is_alive(), log.read_text()[-3000:]
            process.kill()
            process.join()
            if i % 4 == 3:
                ftp.start(0.005)
        begun += re.findall(r"continues  step (\d+), from ftp://\*\*\*@", log.read_text()[seen:])
        for manifest in ftp.folder.glob("bucket/run/checkpoints/*/manifest.json"):
            assert not verify_checksums(manifest.parent)
    assert PASSWORD not in log.read_text()
    one, other = tmp_path / "unbroken", tmp_path / f"run-{kills}"
    assert not [name for name, data in contents(other).items() if PASSWORD.encode() in data]
    assert metrics(one) == metrics(other)
    last = f"checkpoints/step-{flags['max_train_steps']:08d}/optimizer.safetensors"
    for file in ("model.safetensors", last):
        expected, found = load_file(one / file), load_file(other / file)
        assert expected.keys() == found.keys()
        assert all(expected[name].equal(found[name]) for name in expected), file
    return [*map(int, begun)]


def test_killed_twice(ftp, tmp_path):
    assert len(check_kills(ftp, tmp_path, 2)) > 0


@pytest.mark.slow
def test_kills_of_the_run_and_of_the_server(ftp, tmp_path):
    """Of four kills one comes at any time, one in the mirroring, two with the server's."""
    begun = check_kills(ftp, tmp_path, KILLS)
    print(f"{KILLS} kills, steps that fresh folders began with: {begun}")
    assert len(begun) >= KILLS // 2


@pytest.mark.slow
def test_a_run_on_s3(s3, tmp_path):
    """The second, on an empty folder, has nothing left to do."""
    flags = TINY | {
        "dataset_name": write_corpus(tmp_path / "corpus.jsonl", 30), "cache_dir": tmp_path / "cache",
        "checkpoint_url": f"{s3}/{tmp_path.name}", "save_total_limit": 1, "prompts": ["none"],
    }  # fmt: skip
    for name in ("one", "two"):
        done = forked.run("train_clm.py", flags | {"output_dir": tmp_path / name}, env=environment())
        assert done.returncode == 0, done.stderr
    assert f"continues  step 6, from {flags['checkpoint_url']}" in done.stdout
    assert "this run is finished" in done.stdout
    assert open_remote(flags["checkpoint_url"]).steps() == [6]
    assert metrics(tmp_path / "one") == metrics(tmp_path / "two")
