"""The script in docs/data.md, on real Ray: a worker is killed, the bytes are those of the parts in turn."""

import re
import subprocess
import sys
import time

import psutil
import pytest

from tests.runs import PROJECT, environment
from tests.shard_data import command, save_tokenizer
from tests.test_parts import files_of, in_parts, write_source

pytest.importorskip("ray", reason="in an environment with tests/clusters/requirements.txt")
SCRIPT = re.search(r"```py\n(.*?)```", (PROJECT / "docs/data.md").read_text(), re.S)[1]
PARTS = 4


def test_tasks_of_ray_of_which_one_is_killed(tmp_path):
    source, tokenizer = write_source(tmp_path / "source", n=2000), save_tokenizer(tmp_path / "tokenizer")
    whole = files_of(in_parts(source, tmp_path / "whole", tokenizer, range(PARTS), PARTS))
    folder, log = tmp_path / "rows", tmp_path / "log"
    script = SCRIPT.replace("64", str(PARTS)).replace("num_cpus=16", "num_cpus=1")
    script = re.sub("(?m)^words = .*", f"words = {command(source, folder, tokenizer)}", script)
    assert script.count(str(PARTS)) >= 2
    with open(log, "w") as out:
        driver = subprocess.Popen([sys.executable, "-c", script], cwd=PROJECT, env=environment(), stdout=out,
                                  stderr=out)  # fmt: skip
        killed = []
        while driver.poll() is None and not killed:
            time.sleep(0.01)
            if len([*folder.glob("progress/*-*-*.npz")]) > 20:
                children = psutil.Process(driver.pid).children(recursive=True)
                killed = [child for child in children if "ray::prepare_part" in " ".join(child.cmdline())][:1]
                killed[0].kill()
        assert driver.wait(300) == 0, log.read_text()[-5000:]
    assert killed and not (folder / "progress").exists()
    assert files_of(folder) == whole
