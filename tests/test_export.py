"""The saved model's files: readable by whoever may read their neighbours, replaced whole."""

import os
import stat

import torch
from accelerate import Accelerator
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from utils.learning.losses import CausalLMLoss
from utils.publishing.export import export_model


def test_all_files_have_the_mode_that_the_umask_gives(tmp_path):
    """safetensors writes files that only their owner may read: nobody else could load the model."""
    words = Tokenizer(models.WordLevel({"<s>": 0, "a": 1}, unk_token="<s>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<s>")
    sizes = {"n_layer": 1, "n_head": 1, "n_embd": 8, "vocab_size": 2, "bos_token_id": 0, "eos_token_id": 0}
    lm = GPT2LMHeadModel(GPT2Config(**sizes))
    accelerator = Accelerator(cpu=True)
    for mask, mode in ((0o022, 0o644), (0o007, 0o660)):
        before = os.umask(mask)
        try:
            export_model(accelerator, CausalLMLoss(lm), tokenizer, tmp_path)
        finally:
            os.umask(before)
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
        assert "model.safetensors" in modes and set(modes.values()) == {mode}, modes
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in lm.state_dict().items())
