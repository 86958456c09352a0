"""Presets have the settings and model sizes of their sources, and train on a Hub."""

import io
import json
import re

import pyarrow.parquet
import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import train_clm
import train_mlm
from data.tokens.tokenizer import train_tokenizer
from tests import forked
from tests.hub_data import publish, put_data
from tests.hub_server import HubServer
from tests.runs import PROJECT, metrics
from utils.flags import parse_args
from utils.learning.configuration import MODEL_CLASSES, configure, parse_overrides

# The settings of each source by our names.
COURSE = {  # Hugging Face course, chapter 7.6, its loop with Accelerate
    "dataset_name": ["huggingface-course/codeparrot-ds-train"], "keywords": [],
    "eval_dataset_name": ["huggingface-course/codeparrot-ds-valid"],
    "tokenizer_name": "huggingface-course/code-search-net-tokenizer", "block_size": 128,
    "model_type": "gpt2", "per_device_train_batch_size": 32, "per_device_eval_batch_size": 32,
    "gradient_accumulation_steps": 8, "learning_rate": 5e-4, "weight_decay": 0.1, "adam_beta2": 0.999,
    "lr_scheduler_type": "linear", "num_warmup_steps": 1000, "num_train_epochs": 1, "max_train_steps": 0,
    "max_grad_norm": 1.0, "keytokens": ["plt", "pd", "sk", "fit", "predict"], "keytoken_alpha": 1.0,
    "eval_steps": 5000, "save_steps": 5000, "max_eval_samples": 0, "streaming": False,
}  # fmt: skip
# keras.io's mlm_training_tpus, and transformers' examples/tensorflow/language-modeling-tpu for its tokenizer
KERAS = {
    "dataset_name": ["Salesforce/wikitext"], "dataset_config_name": "wikitext-103-raw-v1",
    "vocab_size": 25_000, "tokenizer_name": None, "model_type": "roberta", "block_size": 512,
    "mlm_probability": 0.15,
    "per_device_train_batch_size": 16, "per_device_eval_batch_size": 16, "gradient_accumulation_steps": 1,
    "learning_rate": 1e-4, "weight_decay": 1e-3, "adam_beta2": 0.999, "lr_scheduler_type": "linear",
    "num_warmup_steps": 0.05, "num_train_epochs": 10, "max_train_steps": 0, "max_grad_norm": 0,
    "eval_steps": 0, "save_steps": 0, "max_eval_samples": 0, "next_sentence": False,
}  # fmt: skip
AMD = {  # "Pre-training BERT using Hugging Face & PyTorch on an AMD GPU": its code, and Trainer's defaults
    "dataset_name": ["Salesforce/wikitext"], "dataset_config_name": "wikitext-103-raw-v1",
    "tokenizer_name": "google-bert/bert-base-cased", "model_type": "bert", "next_sentence": True,
    "mlm_probability": 0.15, "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8,
    "gradient_accumulation_steps": 1, "learning_rate": 5e-5, "weight_decay": 0, "adam_beta2": 0.999,
    "lr_scheduler_type": "linear", "num_warmup_steps": 0, "num_train_epochs": 200, "max_train_steps": 0,
    "max_grad_norm": 1.0, "eval_steps": 0, "save_steps": 0, "max_eval_samples": 0,
}  # fmt: skip
# preset: script, source, settings that differ (the preset says why), vocabulary, kind, millions of parameters
TABLE = {
    "codeparrot": (train_clm, COURSE, set(), 50_000, "causal", 124.2),
    "wikitext-roberta": (train_mlm, KERAS, set(), 25_000, "masked", 105.3),
    "wikitext-bert-nsp": (
        train_mlm, AMD, {"num_train_epochs", "eval_steps", "save_steps"}, 28_996, "pretraining", 108.9,
    ),
}  # fmt: skip


@pytest.mark.parametrize("preset", TABLE)
def test_a_preset_has_the_settings_and_the_model_size_of_its_source(preset):
    """The model is built without memory, with positions and vocabulary as in the source."""
    script, source, differs, vocab_size, kind, millions = TABLE[preset]
    args = parse_args(script.TrainArgs, script.PRESETS, argv=["--preset", preset])
    assert {name for name, value in source.items() if getattr(args, name) != value} == differs
    config = AutoConfig.for_model(args.model_type)
    chosen = parse_overrides(config, args.config_overrides)
    positions = config.attribute_map.get("max_position_embeddings", "max_position_embeddings")
    chosen.setdefault(positions, args.block_size + 2)  # RoBERTa's start after its pad id
    with torch.device("meta"):
        sizes = {"vocab_size": vocab_size, "pad_token_id": 0, **chosen}
        config = AutoConfig.for_model(args.model_type, **sizes)
        model = MODEL_CLASSES[kind].from_config(config)
    assert config.max_position_embeddings >= 512
    assert round(model.num_parameters() / 1e6, 1) == millions


def test_the_roberta_preset_is_roberta_base_with_another_vocabulary():
    """The reference is config.json of FacebookAI/roberta-base on the Hub."""
    hub = dict(
        attention_probs_dropout_prob=0.1, hidden_act="gelu", hidden_dropout_prob=0.1, hidden_size=768,
        initializer_range=0.02, intermediate_size=3072, layer_norm_eps=1e-5, max_position_embeddings=514,
        num_attention_heads=12, num_hidden_layers=12, type_vocab_size=1, bos_token_id=0, pad_token_id=1,
        eos_token_id=2, model_type="roberta",
    )  # fmt: skip
    args = parse_args(train_mlm.TrainArgs, train_mlm.PRESETS, argv=["--preset", "wikitext-roberta"])
    tokenizer = train_tokenizer(["Some words, and some more words."], "unigram", 25, "roberta")
    config, _, problems = configure(args, "masked", tokenizer)
    assert problems == []
    assert hub.items() <= config.to_dict().items()


def test_hour_and_gpt2_differ_from_the_default_in_shape_only():
    default, hour, gpt2 = (vars(parse_args(train_clm.TrainArgs, train_clm.PRESETS, argv=line))
                           for line in ([], ["--preset", "hour"], ["--preset", "gpt2"]))  # fmt: skip
    shape = {"preset", "output_dir", "config_overrides"}
    other = {"model_type", "learning_rate"}
    longer = {"block_size", "max_train_steps", "eval_steps", "save_steps"}
    assert {name for name in default if default[name] != hour[name]} == shape | longer
    assert {name for name in default if default[name] != gpt2[name]} == shape | other
    tokenizer, sizes = train_tokenizer(["import os"], "bpe", 4096, "gpt2"), []
    for settings in (default, hour, gpt2):
        _, model, problems = configure(train_clm.TrainArgs(**settings), "causal", tokenizer)
        assert problems == []
        sizes.append(model.num_parameters())
    assert abs(sizes[0] - sizes[2]) < 5e4


SIZE = "num_hidden_layers=1,hidden_size=32,num_attention_heads=2"
TINY = {
    "config_overrides": SIZE, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2,
    "gradient_accumulation_steps": 1, "max_train_steps": 3, "num_warmup_steps": 1, "logging_steps": 1,
    "max_eval_samples": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def hub(tmp_path_factory, hub_port, _home):
    with HubServer(tmp_path_factory.mktemp("hub"), hub_port, home=_home) as hub:
        publish(hub)
        yield hub


def train_preset(hub, script, folder, **flags) -> tuple[dict, set]:
    """Trains three steps and evaluates. Returns ({split: documents that were read}, parquet files that were
    requested)."""
    flags |= {"output_dir": folder / "run", "cache_dir": folder / "cache", "vocab_size": 600}
    hub.log.clear()
    done = forked.run(f"{script.__name__}.py", TINY | flags, env=hub.env() | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    lines = metrics(folder / "run")
    assert lines[-1]["step"] == 3 and "loss/eval" in lines[-1]
    manifests = [json.loads(path.read_text()) for path in folder.glob("cache/*-*/manifest.json")]
    read = {split: counts["read"] for manifest in manifests
            for split, counts in manifest["accounting"].items()}  # fmt: skip
    return read, {*re.findall(r"/resolve/[^/]+/(\S+\.parquet)", " ".join(entry["line"] for entry in hub.log))}


SCRIPTS = {name: script for script in (train_clm, train_mlm) for name in script.PRESETS}
ON_THE_HUB = {  # documents of each split, or the folder of requested files
    "codeparrot": {"train": 90, "validation": 30}, "gpt2-124m": "sample/10BT/",
    "wikitext-roberta": {"train": 50, "validation": 10}, "wikitext-bert-nsp": {"train": 50, "validation": 10},
}  # fmt: skip


@pytest.mark.parametrize("preset", ON_THE_HUB)
def test_a_preset_trains_and_evaluates_on_the_data_sets_that_it_names(preset, hub, tmp_path):
    expected = ON_THE_HUB[preset]
    read, asked = train_preset(hub, SCRIPTS[preset], tmp_path, preset=preset)
    assert read == expected or asked and all(file.startswith(expected) for file in asked)


def test_offline_a_preset_uses_the_hub_cache(hub, tmp_path):
    """HF_HUB_OFFLINE=1, after a run with HF_ENDPOINT, as docs/data.md describes both."""
    train_preset(hub, train_clm, tmp_path / "first", preset="codeparrot")
    hub.log.clear()
    flags = {"preset": "codeparrot", "output_dir": tmp_path / "run", "cache_dir": tmp_path / "cache"}
    env = hub.env() | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = forked.run("train_clm.py", TINY | flags, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not hub.log and "90 documents" in done.stdout
    done = forked.run("train_clm.py", TINY | flags | {"dataset_name": "ada/not-there"}, env=env)
    assert done.returncode == 2 and "ada/not-there" in done.stderr and "Traceback" not in done.stderr


def test_no_preset_is_left_out():
    assert {"laptop", "hour", "gpt2", *ON_THE_HUB} == {*train_clm.PRESETS, *train_mlm.PRESETS}


WIKITEXT, CONFIG, RECORDS = "Salesforce/wikitext", "wikitext-103-raw-v1", PROJECT / "tests/tfrecords"


@pytest.mark.parametrize("preset, split, rows", [
    ("wikitext-roberta", "test", 15), ("wikitext-bert-nsp", "validation", 10)])  # fmt: skip
def test_a_split_of_the_same_data_set_keeps_its_configuration(preset, split, rows, hub, tmp_path):
    names = {"dataset_name": WIKITEXT, "eval_dataset_name": f"{WIKITEXT}:{split}"}
    read, _ = train_preset(hub, train_mlm, tmp_path, preset=preset, **names)
    assert read == {"train": 50, "validation": rows}


def test_hub_weights_are_evaluated_on_a_hub_data_set(hub, tmp_path):
    """The command of docs/numbers.md, on one and two processes. The reference is transformers: the mean loss
    of rows of T tokens of all articles, each ended by EOS."""
    env, T = hub.env() | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}, 32
    for name, entry in hub.commits("openai-community/gpt2")[-1]["files"].items():
        (tmp_path / name).write_bytes(hub.read(entry))
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=900, n_positions=64, n_embd=32, n_layer=1, n_head=2)).eval()
    model.save_pretrained(tmp_path)
    hub.put("ada/small", {path.name: path.read_bytes() for path in tmp_path.iterdir()})
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    file = hub.commits(WIKITEXT, kind="datasets")[-1]["files"][f"{CONFIG}/test-00000-of-00001.parquet"]
    lines = pyarrow.parquet.read_table(io.BytesIO(hub.read(file))).column("text").to_pylist()
    empty, *articles = re.split(r"(?m)^(?= = Article)", "".join(line or "\n" for line in lines))
    articles[0] = empty + articles[0]
    tokens = [t for text in articles for t in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    rows = torch.tensor(tokens[: len(tokens) // T * T]).view(-1, T)
    with torch.no_grad():
        expected = model(rows, labels=rows).loss.item()
    line = re.search(r"^python train_clm.py (.*gpt2 .*)$", (PROJECT / "docs/numbers.md").read_text(), re.M)[1]
    assert line.startswith("--model_name_or_path gpt2 --eval_only true --eval_dataset_name")
    words = [*line.split()[2:], "--block_size", T, "--cache_dir", tmp_path / "cache"]
    for processes in (1, 2):
        done = forked.run("train_clm.py", ["--model_name_or_path", "ada/small", *words], processes, env=env)
        assert done.returncode == 0, done.stderr
        record = json.loads(done.stdout.splitlines()[-1])
        assert record["eval_tokens"] == len(rows) * (T - 1)
        assert record["loss/eval"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", ["pairs", "records"])
def test_a_hub_data_set_of_token_ids_is_read_by_data_convert(kind, hub, tmp_path):
    if kind == "pairs":
        rows = [{"input_ids": [2, i + 5, 3, i + 6, 3], "token_type_ids": [0, 0, 0, 1, 1],
                 "next_sentence_label": i % 2} for i in range(40)]  # fmt: skip
        put_data(hub, "ada/pairs", {"default": {"train": "a.parquet"}}, {"a.parquet": rows})
    else:
        records = {f"train/{path.name}": path.read_bytes() for path in RECORDS.glob("train/*")}
        hub.put("ada/records", records, "datasets")
    env, name = hub.env() | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}, f"ada/{kind}"
    words = ["--preset", "wikitext-bert-nsp", "--dataset_name", name, "--output_dir", tmp_path / "run"]
    done = forked.run("train_mlm.py", words, env=env)
    assert done.returncode == 2
    assert f"run `python -m data.convert {name} tokens/ --tokenizer_name" in done.stderr
    words = [name, tmp_path / "tokens", "--tokenizer_name", "google-bert/bert-base-cased"]
    done = forked.run("data.convert", words, env=env)
    assert done.returncode == 0 and "40 rows" in done.stdout, done.stderr


@pytest.mark.parametrize("split", ["validation", "test"])
def test_an_evaluation_set_without_a_train_split_uses_validation_or_test(split, hub, tmp_path):
    name, file = f"ada/only-{split}", f"data/{split}-00000-of-00001.parquet"
    rows = [{"content": f"{i} " * 200} for i in range(7)]
    put_data(hub, name, {"default": {split: file}}, {file: rows})
    asked = {"preset": "codeparrot", "eval_dataset_name": name}
    assert train_preset(hub, train_clm, tmp_path / "named", **asked)[0] == {"train": 90, "validation": 7}
    command = ["--preset", "codeparrot", "--dataset_name", name]
    done = forked.run("train_clm.py", command, env=hub.env())
    assert done.returncode == 2 and f"dataset_name '{name}' has no split 'train'" in done.stderr
