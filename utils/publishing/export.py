"""The saved model in output_dir, as transformers loads it: from_pretrained(output_dir), pipeline(...)."""

import contextlib
import logging
import os
import shutil
from pathlib import Path

from utils.io.files import save_tokenizer
from utils.io.mistakes import RunFailed, on_main_process
from utils.io.text import without_secrets
from utils.publishing.model_card import write_model_card
from utils.state.stateful import clean_name, named_tensors

logger = logging.getLogger(__name__)

ASIDE = ".export"  # in output_dir, where the model is written first; left behind by an export that failed


def save_model(args, accelerator, model, tokenizer, facts: dict) -> None:
    """Replaces config, tokenizer, then weights in output_dir, each file whole, and writes the model card. All
    processes call it.

    model: the prepared loss module, whose `.lm` is the transformers model. facts: as write_model_card takes
    them; only the main process needs them. If it fails, as on a full disk, the model before stays and a
    warning names the cause; at step 0 and after the last step RunFailed does, on all processes."""
    lm = accelerator.unwrap_model(model, keep_torch_compile=False).lm
    weights = collect_weights(accelerator, model, lm)
    on_main_process(accelerator, _replace_model, args, lm, weights, tokenizer, facts)


def _replace_model(args, lm, weights, tokenizer, facts) -> None:
    folder = Path(args.output_dir)
    try:
        shutil.rmtree(folder / ASIDE, ignore_errors=True)
        write_model(lm, weights, tokenizer, folder / ASIDE)
        for file in sorted((folder / ASIDE).iterdir(), key=lambda file: file.suffix == ".safetensors"):
            os.replace(file, folder / file.name)
        write_model_card(args, facts, tokenizer.mask_token)
        shutil.rmtree(folder / ASIDE)
    except Exception as error:  # of safetensors or tokenizers, too: training goes on
        failure = str(error) or repr(error)
        logger.warning("the model was not saved in %s: %s", folder, failure)
        shutil.rmtree(folder / ASIDE, ignore_errors=True)  # a full disk needs the room
        with contextlib.suppress(OSError):
            (folder / ASIDE).mkdir(exist_ok=True)
        if facts["step"] == 0 or facts["step"] >= facts["last"]:
            which = "first" if facts["step"] == 0 else "last"
            raise RunFailed(f"the {which} model was not saved: {failure}; make room and run the same command "
                            "again") from None


def write_model(lm, weights: dict, tokenizer, folder: Path) -> None:
    """Writes what from_pretrained(folder) loads. On the main process only. weights: of collect_weights."""
    lm.save_pretrained(folder, state_dict=weights)
    save_tokenizer(tokenizer, folder)
    config = folder / "config.json"
    config.write_text(without_secrets(config.read_text()))  # config_overrides may set any text
    for file in folder.iterdir():  # safetensors writes files that only their owner may read
        file.chmod(config.stat().st_mode)


def collect_weights(accelerator, model, lm) -> dict:
    """{name: tensor} of `lm`, the transformers model in the prepared `model`, not sharded and on the CPU, as
    save_pretrained reads no XLA tensors. All processes call it; all but the main process get {}."""
    state = accelerator.get_state_dict(model, unwrap=False)  # gathers FSDP's shards
    if not accelerator.is_main_process:
        return {}
    state = {clean_name(name): tensor for name, tensor in state.items()}
    # Of tied weights only the first: copies would be written twice.
    return {name: state[f"lm.{name}"].detach().cpu() for name in named_tensors(lm)}
