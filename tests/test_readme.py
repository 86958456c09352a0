"""README and docs: the loop equals the script's, files and links exist, commands and edits run."""

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import train_clm
import train_mlm
from tests import forked
from tests.runs import PROJECT, TINY, arguments, environment, write_corpus
from utils.flags import parse_args
from utils.learning.optim import finetuning_rates

PAGES = {page: page.read_text() for page in [PROJECT / "README.md", *sorted(PROJECT.glob("docs/*.md"))]}
README, ALL = PAGES[PROJECT / "README.md"], "\n".join(PAGES.values())
LEFT_OUT = shutil.ignore_patterns(".git", "runs", "cache", "__pycache__", ".venv")
COMMAND = r"(?:[A-Z_]+=\S+ )*(?:accelerate launch|bash|git|hf|pip|pytest|python|rclone|sbatch|torchrun) "
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", ALL, re.S)


def test_quoted_loop_equals_the_script():
    script = (PROJECT / "train_clm.py").read_text()
    quoted = {page.name: re.findall(r"```python\n(.*?)```", text, re.S) for page, text in PAGES.items()}
    assert quoted["README.md"] and len(quoted["loop.md"]) == 5
    for part in itertools.chain(*quoted.values()):
        part = textwrap.dedent(part)
        assert any(textwrap.indent(part, depth * " ") in script for depth in (4, 8, 12)), part


def test_readme_is_short_and_links_every_page():
    assert len(README.splitlines()) <= 110 and len(README.split()) <= 1000
    for page, text in PAGES.items():
        links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
        assert [link for link in links if not (page.parent / link).exists()] == [], page.name
    for page in PAGES:
        assert page.name == "README.md" or f"](docs/{page.name})" in README, page.name


def test_advised_rates_equal_those_of_the_script():
    advised = f"--model_name_or_path runs/clm {finetuning_rates(train_clm.TrainArgs())} --output_dir"
    for page in "README.md", "docs/resuming.md":
        assert advised in " ".join((PROJECT / page).read_text().split())


def test_file_tree_equals_the_folders():
    """It lists every folder of data/ and utils/, and every file that it names exists."""
    tree = next(code for kind, code in BLOCKS if kind == "text" and "accelerate_configs/" in code)
    listed, top = set(), ""
    for line in tree.splitlines():
        if line[0] == " " and re.match(r" +\w+/ ", line):
            room = f"{top}{line.split()[0]}"
        else:
            top = room = line.split()[0] if line.split()[0].endswith("/") else ""
        listed.add(room)
        for name in re.findall(r"[\w/]+(?:\.py\b|/(?=\W|$))", line):
            assert any((PROJECT / place / name).exists() for place in ("", top, room)), (room, name)
    folders = {file.parent.relative_to(PROJECT) for kind in ("data", "utils")
               for file in PROJECT.glob(f"{kind}/**/*.py")}  # fmt: skip
    inner = {Path("data/tokens/importers")}  # named in the line of its folder
    assert {Path(room) for room in listed if room.startswith(("data/", "utils/"))} == folders - inner
    assert all((PROJECT / folder / "__init__.py").exists() for folder in folders)


def test_table_of_edits_is_complete():
    cells = re.findall(r"(?<=\| )`([a-z-]+)`(?= \|)", README[README.index("## Edit it") :])
    assert sorted(cells) == sorted(file.stem for file in (PROJECT / "docs/edits").glob("*.diff"))


def test_explained_messages_exist():
    table = PAGES[PROJECT / "docs/troubleshooting.md"]
    source = "".join(file.read_text() for file in PROJECT.glob("**/*.py")
                     if "tests" not in file.relative_to(PROJECT).parts)  # fmt: skip
    source = re.sub(r"\{[^{}]*\}|%s", "...", re.sub(r'"\s*\n\s*f?"', "", source))
    for message in re.findall(r"^\| `(.+?)` \|", table, re.M):
        for part in message.split("..."):
            assert part.strip(" ():,") in source, message


def commands() -> list[str]:
    """The shell commands of the pages, in blocks and in backticks. tests/test_recipes.py runs those that
    recipes.md has in backticks."""
    lines = [line for kind, code in BLOCKS if kind == "bash" for line in code.strip().splitlines()]
    text = "\n".join(text for page, text in PAGES.items() if page.name != "recipes.md")
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    return lines + [command.replace("\n", " ") for command in re.findall(rf"`({COMMAND}[^`]+)`", text)]


# Flags that make each command small. They override those of the command.
TINY_RUN = arguments({**TINY, "dataset_name": "corpus.jsonl"})
TINY_SHAPE = "--vocab_size 512 --layers 1 --width 64 --batch_size 2 --steps 2 --rounds 1".split()
GPT2 = {"config_overrides": "n_layer=1,n_embd=32,n_head=2", "dataset_name": "corpus.jsonl"}
TINY_LEARNING = [*arguments({**TINY, **GPT2}), "--max_train_steps", "4"]
PIPELINE = "python -c 'from transformers import pipeline; print"
BENCHMARK = "python -m tests.benchmarks."
SMALL = {
    PIPELINE + '(pipeline("text-generation", "runs/clm")("import': [],
    "python -m docs.harness.documents": [],
    "python train_clm.py": TINY_RUN,  # the run is finished
    "python train_clm.py --eval_only": [],
    "accelerate launch --config_file accelerate_configs/multi_cpu.yaml":
        [*TINY_RUN, "--output_dir", "runs/two"],
    BENCHMARK + "throughput --contenders": TINY_SHAPE,
    BENCHMARK + "throughput --model_type roberta": [*TINY_SHAPE, "--block_size", "64"],
    BENCHMARK + "throughput --model_type modernbert": [*TINY_SHAPE, "--block_size", "64"],
    BENCHMARK + "preparation": "--tokenizer_name runs/clm --megabytes 1 --rounds 1".split(),
    BENCHMARK + "scaling": TINY_SHAPE,
    BENCHMARK + "scaling --optimizer_type muon": [*TINY_SHAPE, "--processes", "1", "2"],
    BENCHMARK + "accelerator": [
        *"--small --scripts clm --dataset_name corpus.jsonl --parts same speed".split(),
    ],
    BENCHMARK + "model_types": ["--types", "bart"],
    BENCHMARK + "learning --unigram": [],
    BENCHMARK + "learning --seeds": [
        "--seeds", "1", "--contenders", "before", "other: --model_type gpt2",
        "--flags", shlex.join(TINY_LEARNING),
    ],
}
NOT_HERE = {
    "python3 -m venv": "an environment of its own; .ci/run",
    "pip install -r requirements.txt && python": "CI installs; the rest makes the runs below",
    "pip install -r requirements.txt -r tests": "this is how CI runs this test",
    "CRASH_KILLS=100 pytest tests/test_crash.py": "twenty minutes; CI kills a few times",
    "NODE_KILLS=10 pytest tests/test_multi_node.py": "ten minutes; CI kills once",
    "python -c \"import runpy": "a checkout of llama.cpp",
    "hf jobs run": "needs an account",
    "pytest tests -m slow": "CI runs it, too",
    "pytest tests -m sweep": "as its name says",
    "OMP_NUM_THREADS=1 python -m tests.benchmarks.learning": "two hours; without the variable it is above",
    BENCHMARK + "nanogpt": "a checkout of nanoGPT; half an hour",
    "pip install torch --index-url": "needs the network",
    "pip install -r accelerate_configs/tpu": "7 GB; CI resolves it",
    PIPELINE: "a model that fills in; tests/test_edits.py",
    "python train_clm.py --model_name_or_path gpt2": "needs the network; test_presets.py, as the next",
    "accelerate launch --config_file accelerate_configs/multi_cpu.yaml train_clm.py --model_": "the same",
    "python train_clm.py --dataset_name code.jsonl": "three datasets; tests/test_load.py",
    "git apply ": "tests/test_edits.py applies and runs every one, and merges pairs by --3way",
    "hf auth login": "needs an account; tests/test_hub.py gives a token by HF_TOKEN",
    "hf sync": "needs an account", "hf repos create": "needs an account",
    "hf download": "needs the network",
    "rclone copy": "needs a bucket and rclone",
    "accelerate launch --config_file accelerate_configs/cpu.yaml train_mlm.py": "as the other script",
    "python -m utils.check": "tests/test_edits.py",
    "TRANSFORMERS_VERBOSITY=info": "the run of other lines",
    "sbatch accelerate_configs": "needs Slurm",
    "accelerate launch --config_file accelerate_configs/cpu.yaml train_clm.py": "makes the runs below",
    "accelerate launch --config_file accelerate_configs/multi_gpu.yaml --num_processes 8 ": "8 GPUs",
    "accelerate launch --config_file accelerate_configs/multi_gpu.yaml train_clm.py": "S3; test_prepare.py",
    "accelerate launch --config_file accelerate_configs/rocm": "GPU; test_accelerate_configs.py",
    "accelerate launch --config_file accelerate_configs/fsdp": "GPUs; on CPU processes in test_fsdp.py",
    "accelerate launch --config_file accelerate_configs/tpu": "TPU; on XLA's CPU device in tests/xla",
    "torchrun --nproc_per_node 8": "8 GPUs; two CPU processes in test_preemption.py",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1": "part of a line; test_crash.py",
    "PJRT_DEVICE=CPU": "torch_xla wants an environment of its own",
    BENCHMARK + "tpu": "torch_xla wants an environment of its own; tests/xla",
    "python -m data.convert": "a file of tokens; test_convert.py",
    "python -m data.prepare": "needs the network; test_prepare.py on local text and an S3 server",
    "python -m data.tokens.tokenizer": "needs the network; test_tokenizer.py on local text",
    "lm_eval run": "an environment of its own; tests/harness",
    "python -m docs.harness.masked": "the same",
    "python -m tests.harness.difference": "after the two above; tests/harness",
    "python run_glue.py": "a script of transformers; its steps in test_saved_models.py",
    BENCHMARK + "throughput --batch_size": "the line below it, at another size",
    BENCHMARK + "throughput --vocab_size": "the line above it, at another size",
}


@pytest.fixture(scope="module")
def project_with_runs(tmp_path_factory):
    """A copy of the project with the run of README's first command, runs/clm, and its copy runs/other."""
    copy = tmp_path_factory.mktemp("readme") / "project"
    shutil.copytree(PROJECT, copy, ignore=LEFT_OUT)
    write_corpus(copy / "corpus.jsonl")
    out = shell(copy, " ".join([first_line(), *map(shlex.quote, TINY_RUN)]))
    assert re.search(r"^run +starts in runs/clm; stop it any time: the same command resumes it$", out, re.M)
    rows = re.search(r"^steps +6 steps = 1,536 tokens = \S+ passes over ([\d,]+) rows$", out, re.M)[1]
    [manifest] = copy.glob("cache/rows-*/manifest.json")
    tokens = json.loads(manifest.read_text())["splits"]["train"]["tokens"]
    assert rows == f"{tokens // TINY['block_size']:,}"
    assert re.search(r"^model +qwen3 from scratch on corpus.jsonl, [\d,]+ parameters,", out, re.M)
    publish = re.search(r"^ +publish +hf auth login && hf upload clm runs/clm \. (.*)$", out, re.M)[1]
    assert "--exclude '*/*'" in publish  # checkpoints/, for one
    shutil.copytree(copy / "runs/clm", copy / "runs/other")
    return copy


def shell(folder, line):
    env = environment(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    done = subprocess.run(line, shell=True, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def python(folder, line, more=()):
    """Run a line that begins with `python`, forked. more: flags that override those of the line."""
    _, *words = shlex.split(line)
    what, *flags = words[words[0] == "-m" :]
    line_flags, drop = [], False
    for word in flags:
        drop = word in more if word.startswith("--") else drop
        line_flags += [] if drop else [word]
    done = forked.run(what, [*line_flags, *more], folder=folder, picture=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def first_line() -> str:
    """README's first command, without the installation."""
    installs = (line for line in commands() if line.startswith("pip install -r requirements.txt && "))
    return next(installs).partition(" && ")[2]


def test_mistake_in_the_first_command_is_one_message(project_with_runs):
    words = [*shlex.split(first_line())[1:], "--learn", "3"]
    done = forked.run(words[0], words[1:], folder=project_with_runs)
    assert done.returncode and "Did you mean --learning_rate?" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_command_is_run_or_explained():
    for line in commands():
        assert any(line.startswith(start) for start in [*SMALL, *NOT_HERE]), line
    for start in [*SMALL, *NOT_HERE]:
        assert any(line.startswith(start) for line in commands()), f"on no page any more: {start}"


# Benchmarks that take long.
SWEEP = ("preparation", "model_types", "scaling", "throughput", "accelerator")


def marks(start):
    if start.rpartition(".")[2].startswith(SWEEP):
        return [pytest.mark.sweep]
    return [pytest.mark.slow] if "benchmarks" in start or "multi_cpu" in start else []


LONG = [pytest.param(start, marks=marks(start)) for start in SMALL]


@pytest.mark.parametrize("start", LONG)
def test_command_runs(start, project_with_runs):
    known = [*SMALL, *NOT_HERE]  # the longest matching beginning counts
    line = next(line for line in commands() if max(filter(line.startswith, known), key=len) == start)
    forks = line.startswith(("python -m", "python train")) and "benchmarks" not in line
    if forks:
        assert python(project_with_runs, line, SMALL[start]).strip()
    else:
        assert shell(project_with_runs, " ".join([line, *map(shlex.quote, SMALL[start])])).strip()


def test_paths_and_flags_of_commands_exist():
    for file in re.findall(r"accelerate_configs/\w+\.\w+|tests/[\w/]+\.\w+|(?<!\S)train_\w+\.py", ALL):
        assert (PROJECT / file).exists(), file
    for script, line in re.findall(r"(train_[cm]lm)\.py (--[^`|\n]+)", ALL):
        module = {"train_clm": train_clm, "train_mlm": train_mlm}[script]
        parse_args(module.TrainArgs, module.PRESETS, line.split())


EDITS = [code for kind, code in BLOCKS if kind == "diff"]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.splitlines()[0].strip("# "))
def test_edits_on_the_pages_run(edit, tmp_path):
    """A copy of the project with the edit trains for two steps."""
    first, *lines = edit.splitlines()
    copy = tmp_path / "project"
    shutil.copytree(PROJECT, copy, ignore=LEFT_OUT)
    file = copy / first.strip("# ")
    old = "".join(line[1:] + "\n" for line in lines if line[0] in " -")
    new = "".join(line[1:] + "\n" for line in lines if line[0] in " +")
    source = file.read_text()
    assert source.count(old) == 1, old
    file.write_text(source.replace(old, new))
    flags = {**TINY, "dataset_name": write_corpus(tmp_path / "corpus.jsonl"), "max_train_steps": 2,
             "cache_dir": tmp_path / "cache", "output_dir": tmp_path / "run"}  # fmt: skip
    result = forked.run("train_clm.py", flags, folder=copy)
    assert result.returncode == 0, result.stderr[-2000:]
    assert '"step": 2' in (tmp_path / "run" / "metrics.jsonl").read_text()
