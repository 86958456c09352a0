"""Damaged or unsuitable model folders are refused in one message."""

import json
import random
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from data.tokens.tokenizer import train_tokenizer
from tests import forked
from tests.runs import PROJECT, SIZES, TINY, environment, metrics, write_corpus
from tests.test_model import GPT2, build, settings, tokenizer
from utils.learning.model import check_model

T = 16


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A model and its tokenizer as a run saves them."""
    folder = tmp_path_factory.mktemp("whole")
    torch.manual_seed(0)
    build("causal", "gpt2", GPT2, T).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def copy_with_weights(model_folder, folder, change):
    """Copies the folder with its weights changed by `change`."""
    shutil.copytree(model_folder, folder)
    weights = load_file(folder / "model.safetensors")
    save_file(change(weights), folder / "model.safetensors", {"format": "pt"})
    return folder


def check_folder(folder, kind="causal"):
    return check_model(settings(None, "", T, model_name_or_path=str(folder)), kind)


def load_model(folder):
    return build("causal", None, "", T, model_name_or_path=str(folder))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: {f"foo.{name}": value for name, value in w.items()},
         "29 of its weights do not fit the model: lm_head.weight is missing, transformer.h.0.attn.c_at"),
        (lambda w: {name: value for name, value in w.items() if "h.1." not in name},
         "12 of its weights do not fit the model: transformer.h.1.attn.c_attn.bias is missing"),
        (lambda w: w | {"transformer.ln_f.bias": torch.zeros(3)}, "transformer.ln_f.bias is [3], not [32]"),
    ],
    ids=["other names", "a block is missing", "another shape"],
)  # fmt: skip
def test_weights_that_do_not_fit_the_model_are_refused_by_name(model_folder, tmp_path, change, message):
    folder = copy_with_weights(model_folder, tmp_path / "other", change)
    (problem,) = check_folder(folder)
    assert problem.startswith(f"model_name_or_path, '{folder}': ") and message in problem
    with pytest.raises(ValueError, match="weights do not fit"):
        load_model(folder)


def test_weights_that_are_not_finite_are_refused(model_folder, tmp_path):
    nan = torch.full((32,), float("nan"))
    folder = copy_with_weights(model_folder, tmp_path / "nan", lambda w: w | {"transformer.ln_f.bias": nan})
    with pytest.raises(ValueError, match="transformer.ln_f.bias is not finite"):
        load_model(folder)


def test_unneeded_weights_are_left_out_and_named(model_folder, tmp_path, capsys):
    unneeded = {"cls.seq_relationship.bias": torch.zeros(2)}
    folder = copy_with_weights(model_folder, tmp_path / "more", lambda w: w | unneeded)
    assert check_folder(folder) == []
    load_model(folder)
    assert "1 are not part of the model and ignored: cls.seq_relationship.bias" in capsys.readouterr().out


def test_a_script_evaluates_weights_or_refuses_those_that_do_not_fit(tmp_path):
    corpus, run = write_corpus(tmp_path / "corpus.jsonl", 20), tmp_path / "run"
    flags = {**TINY, "dataset_name": corpus, "cache_dir": tmp_path / "cache", "output_dir": run,
             "max_train_steps": 3, "save_steps": 3}  # fmt: skip
    done = forked.run("train_clm.py", flags)
    assert done.returncode == 0, done.stderr
    results = []
    only = {**flags, "eval_only": True, "config_overrides": "", "tokenizer_name": run}
    for prefix in ("", "foo."):
        folder = copy_with_weights(
            run, tmp_path / f"as{prefix}", lambda w, p=prefix: {p + name: w[name] for name in w}
        )
        done = forked.run("train_clm.py", {**only, "model_name_or_path": folder})
        results.append((done.returncode, done.stdout.splitlines()[-1:]))
        assert "Traceback" not in done.stderr
    assert results[0][0] == 0 and "loss/eval" in results[0][1][0]
    assert results[1][0] == 2 and "loss" not in done.stdout and "do not fit the model" in done.stderr
    (tmp_path / "runs/a").mkdir(parents=True)
    (tmp_path / "runs/a/args.json").touch()
    for setting in ("model_name_or_path", "tokenizer_name"):  # a path: neither the Hub nor its cache is asked
        wrong = {"output_dir": "new", "dataset_name": corpus, setting: "runs/b"}
        online = environment(HF_HUB_OFFLINE="0")
        done = forked.run(str(PROJECT / "train_clm.py"), wrong, folder=tmp_path, env=online)
        assert done.returncode == 2 and "there is no such folder" in done.stderr and "http" not in done.stderr


def test_a_head_tied_by_the_configuration_alone_is_trained_as_transformers_loads_it(tmp_path):
    """An odd generation_config.json stops neither samples nor saves."""
    model, run = tmp_path / "model", tmp_path / "run"
    torch.manual_seed(0)
    data = write_corpus(tmp_path / "c.jsonl", 9)
    tokenizer = train_tokenizer([data.read_text()], "bpe", 300, "gpt2")
    build("causal", "llama", SIZES, T, words=tokenizer).save_pretrained(model)
    tokenizer.save_pretrained(model)
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"] = torch.randn_like(weights["model.embed_tokens.weight"])
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    config = json.loads((model / "generation_config.json").read_text())
    config |= {"stop_strings": ["x"], "num_beam_groups": 2, "dola_layers": "high", "pad_token_id": -1}
    (model / "generation_config.json").write_text(json.dumps(config))
    flags = {"dataset_name": data, "cache_dir": tmp_path / "cache",
             "max_eval_samples": 0, "model_name_or_path": model, "block_size": T, "prompts": ["import os"],
             "max_train_steps": 2, "num_warmup_steps": 0, "eval_steps": 2, "output_dir": run}  # fmt: skip
    done = forked.run("train_clm.py", flags)
    assert done.returncode == 0 and "> import os" in done.stdout, done.stderr[-3000:]
    rows = np.concatenate([np.load(file) for file in sorted(tmp_path.glob("cache/rows-*/validation-*.npy"))])
    rows = torch.from_numpy(rows[: len(rows) // T * T].astype("int64")).view(-1, T)
    records = [line for line in metrics(run) if "loss/eval" in line]
    for folder, record in zip((model, run), records, strict=True):
        lm = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            loss = lm(input_ids=rows, labels=rows).loss.item()
        assert lm.config.tie_word_embeddings and record["loss/eval"] == pytest.approx(loss, rel=1e-4)


SCRIPT = str(PROJECT / "train_clm.py")
CODE = "open({!r}, 'w').write('ran')\nfrom transformers import GPT2Config as Own\n"


@pytest.mark.parametrize("what", ["model", "tokenizer"])
def test_code_in_a_model_folder_is_never_run(model_folder, tmp_path, what):
    """The user is not asked whether to trust it either."""
    folder, mark = tmp_path / "model", tmp_path / "mark"
    shutil.copytree(model_folder, folder)
    (folder / "own.py").write_text(CODE.format(str(mark)))
    if what == "tokenizer":
        settings = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        (folder / "config.json").write_text('{"model_type": "own"}')
        flags = ["--dataset_name", write_corpus(tmp_path / "c.jsonl", 9), "--tokenizer_name", folder]
    else:
        settings = {"model_type": "own", "architectures": ["GPT2LMHeadModel"]}
        settings |= {"auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
        (folder / "config.json").write_text(json.dumps(settings))
        flags = ["--model_name_or_path", folder, "--tokenizer_name", folder, "--config_overrides", ""]
    yes = tmp_path / "yes"
    yes.write_text("y\n" * 9)
    log = tmp_path / "log"
    env = environment(HF_HOME=str(tmp_path / "home"))
    process = forked.start(PROJECT, SCRIPT, flags, log, stdin=yes, cwd=tmp_path, env=env)
    process.join(120)
    assert process.exitcode == 2 and "[y/N]" not in log.read_text(), log.read_text()
    assert not mark.exists() and "Traceback" not in log.read_text()


def damage(folder, random) -> str:
    """Changes one file of the folder; returns a description of the change."""
    file = random.choice(sorted([*folder.glob("*.json"), *folder.glob("*.safetensors")]))
    content = file.read_bytes()
    kind = random.choice(["byte", "cut", "empty", "missing", "swapped", "type", "type", "type"])
    place = random.randrange(len(content))
    if kind == "missing":
        file.unlink()
    elif kind in ("byte", "cut", "empty"):
        byte = content[:place] + bytes([random.randrange(256)]) + content[place + 1 :]
        file.write_bytes({"byte": byte, "cut": content[:place], "empty": b""}[kind])
    elif file.suffix == ".safetensors":
        weights = load_file(file)
        first, second = random.sample(sorted(weights), 2)
        swapped = {first: weights[second], second: weights[first]}
        weights |= swapped if kind == "swapped" else {first: weights[first].int()}
        save_file(weights, file, {"format": "pt"})
    elif kind == "swapped":
        file.write_text(json.dumps(random.choice([[json.loads(content)], "text", 3, None])))
    else:
        value = json.loads(content)
        part = random.choice([part for part in [value, *value.values()] if isinstance(part, dict) and part])
        name = random.choice(sorted(part))
        part[name] = random.choice([[], {}, "two", None, 1.5, -1, 10**12, True, [{}], {"a": 1}])
        kind += f" {name}: {part[name]}"
        file.write_text(json.dumps(value))
    return f"{file.name}: {kind}"


def test_a_hundred_damaged_model_folders_load_or_end_in_one_message(model_folder, tmp_path):
    """The message is a ValueError of this project, not an exception of a library."""
    refused = 0
    for seed in range(100):
        folder = tmp_path / str(seed)
        shutil.copytree(model_folder, folder)
        what = damage(folder, random.Random(seed))
        try:
            problems = check_folder(folder)
            if not problems:
                model = load_model(folder)
                assert all(weight.isfinite().all() for weight in model.parameters())
            refused += bool(problems)
            assert all("\n" not in problem for problem in problems), problems
        except ValueError as error:
            where = error.__traceback__
            while where.tb_next:
                where = where.tb_next
            assert "site-packages" not in where.tb_frame.f_code.co_filename, (seed, what, error)
            refused += 1
        except Exception as error:
            raise AssertionError((seed, what)) from error
        shutil.rmtree(folder)
    assert 25 <= refused < 95
