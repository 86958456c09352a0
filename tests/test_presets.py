"""The presets against their sources, setting by setting; and one flag more than none is enough."""

import pytest
import torch
from transformers import AutoConfig

import train_clm
import train_mlm
from utils.learning.model import MODEL_CLASSES, _parse_overrides
from utils.settings import parse_args

# What each source says, in our names; sizes are those of the models that they make.
COURSE = {  # Hugging Face course, chapter 7.6, its loop with Accelerate
    "dataset_name": "huggingface-course/codeparrot-ds-train", "keywords": [],
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
    "dataset_name": "Salesforce/wikitext", "dataset_config_name": "wikitext-103-raw-v1", "vocab_size": 25_000,
    "tokenizer_name": None, "model_type": "roberta", "block_size": 512, "mlm_probability": 0.15,
    "per_device_train_batch_size": 16, "per_device_eval_batch_size": 16, "gradient_accumulation_steps": 1,
    "learning_rate": 1e-4, "weight_decay": 1e-3, "adam_beta2": 0.999, "lr_scheduler_type": "linear",
    "num_warmup_steps": 0.05, "num_train_epochs": 10, "max_train_steps": 0, "max_grad_norm": 0,
    "eval_steps": 0, "save_steps": 0, "max_eval_samples": 0, "next_sentence": False,
}  # fmt: skip
AMD = {  # "Pre-training BERT using Hugging Face & PyTorch on an AMD GPU": its code, and Trainer's defaults
    "dataset_name": "Salesforce/wikitext", "dataset_config_name": "wikitext-103-raw-v1",
    "tokenizer_name": "google-bert/bert-base-cased", "model_type": "bert", "next_sentence": True,
    "mlm_probability": 0.15, "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8,
    "gradient_accumulation_steps": 1, "learning_rate": 5e-5, "weight_decay": 0, "adam_beta2": 0.999,
    "lr_scheduler_type": "linear", "num_warmup_steps": 0, "num_train_epochs": 200, "max_train_steps": 0,
    "max_grad_norm": 1.0, "eval_steps": 0, "save_steps": 0, "max_eval_samples": 0,
}  # fmt: skip
# AnswerDotAI/ModernBERT, yamls/modernbert/modernbert-base-pretrain.yaml; its decay is independent of the
# rate: 1e-5 / 8e-4 for AdamW. Left out: StableAdamW, eps 1e-6, dropout of 0.1 behind attention
MODERNBERT = {
    "model_type": "modernbert", "tokenizer_name": "answerdotai/ModernBERT-base", "block_size": 1024,
    "mlm_probability": 0.3, "eval_mlm_probability": 0.15, "per_device_train_batch_size": 96,
    "gradient_accumulation_steps": 8, "learning_rate": 8e-4, "weight_decay": 1e-5 / 8e-4, "adam_beta2": 0.98,
    "lr_scheduler_type": "warmup_stable_decay", "num_warmup_steps": int(3e9 / (768 * 1024)) + 1,
    "eval_steps": 4000, "save_steps": 4000, "max_train_steps": 1_719_000_000_000 // (4608 * 1024),
}  # fmt: skip
# JonasGeiping/cramming, config/train/bert-o4.yaml and config/arch/crammed-bert.yaml
CRAMMING = {
    "block_size": 128, "mlm_probability": 0.25, "learning_rate": 1e-3, "weight_decay": 0.01,
    "adam_beta2": 0.98, "max_grad_norm": 0.5, "next_sentence": False,
}  # fmt: skip
# preset -> script, source, what differs (its reason stands at the preset), vocabulary, kind, parameters
TABLE = {
    "codeparrot": (train_clm, COURSE, set(), 50_000, "causal", 124.2),
    "wikitext-roberta": (train_mlm, KERAS, set(), 25_000, "masked", 105.3),
    "wikitext-bert-nsp": (
        train_mlm, AMD, {"num_train_epochs", "eval_steps", "save_steps"}, 28_996, "pretraining", 108.9,
    ),
    "modernbert-base": (
        train_mlm, MODERNBERT, {"eval_steps", "save_steps", "max_train_steps"}, 50_368, "masked", 149.7,
    ),
    "bert-24h": (train_mlm, CRAMMING, set(), 30_522, "masked", 118.5),
}  # fmt: skip


@pytest.mark.parametrize("preset", TABLE)
def test_a_preset_says_what_its_source_says(preset):
    script, source, differs, *_ = TABLE[preset]
    args = vars(parse_args(script.TrainArgs, script.PRESETS, ["--preset", preset]))
    assert {name for name, value in source.items() if args[name] != value} == differs


@pytest.mark.parametrize("preset", TABLE)
def test_its_model_has_the_sources_size(preset):
    """Built without memory: positions and vocabulary as in the source; codeparrot is 124.2 M."""
    script, source, _, vocab_size, kind, millions = TABLE[preset]
    args = parse_args(script.TrainArgs, script.PRESETS, ["--preset", preset])
    config = AutoConfig.for_model(args.model_type)
    chosen, problems = _parse_overrides(config, args.config_overrides)
    positions = config.attribute_map.get("max_position_embeddings", "max_position_embeddings")
    chosen.setdefault(positions, args.block_size + 2)  # RoBERTa's, counted from its pad id
    with torch.device("meta"):
        given = {"vocab_size": vocab_size, "pad_token_id": 0, **chosen}
        config = AutoConfig.for_model(args.model_type, **given)
        model = MODEL_CLASSES[kind].from_config(config)
    assert not problems and config.max_position_embeddings >= (512 if source is not CRAMMING else 128)
    assert round(model.num_parameters() / 1e6, 1) == millions


@pytest.mark.parametrize("script", [train_clm, train_mlm], ids=["clm", "mlm"])
@pytest.mark.parametrize("line", ["--max_train_steps 12", "--eval_steps 0 --save_steps 0"])
def test_one_setting_may_be_given_alone(script, line, tmp_path):
    """The first things that are tried. tests/test_saved_models.py trains with the first line."""
    args = parse_args(script.TrainArgs, script.PRESETS, [*line.split(), "--output_dir", str(tmp_path)])
    assert script.check_args(args) == []


def test_the_default_warmup_is_a_share_of_all_steps():
    for script, steps in ((train_clm, 144), (train_mlm, 200)):
        args = script.TrainArgs()
        assert int(args.num_warmup_steps * args.max_train_steps) == steps
