"""Saves the model in output_dir, so that transformers' from_pretrained(output_dir) and pipeline load it."""

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

TEMPORARY = ".export"  # folder in output_dir where the model is written first; it stays if a save has failed


def save_model(args, accelerator, model, tokenizer, facts: dict) -> None:
    """Replaces the files of config and tokenizer, then the weights in output_dir, and writes the model card.
    All processes call this.

    model: the prepared loss module, whose `.lm` is the transformers model. facts: as for write_model_card,
    on the main process. If saving fails, as on a full disk, the older model stays and a warning says why; at
    step 0 and after the last step all processes raise RunFailed."""
    lm = accelerator.unwrap_model(model, keep_torch_compile=False).lm
    weights = collect_weights(accelerator, model, lm)
    on_main_process(accelerator, _replace_model, args, lm, weights, tokenizer, facts)


def _replace_model(args, lm, weights, tokenizer, facts) -> None:
    folder, temporary = Path(args.output_dir), Path(args.output_dir, TEMPORARY)
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        write_model(lm, weights, tokenizer, temporary)
        for file in sorted(temporary.iterdir(), key=lambda file: file.suffix == ".safetensors"):
            os.replace(file, folder / file.name)
        write_model_card(args, facts, tokenizer.mask_token)
        shutil.rmtree(temporary)
    except Exception as error:  # also those of safetensors and tokenizers: training goes on
        failure = str(error) or repr(error)
        logger.warning("the model was not saved in %s: %s", folder, failure)
        shutil.rmtree(temporary, ignore_errors=True)  # the disk may be full
        with contextlib.suppress(OSError):
            temporary.mkdir(exist_ok=True)
        if facts["step"] == 0 or facts["step"] >= facts["last"]:
            which = "first" if facts["step"] == 0 else "last"
            raise RunFailed(f"the {which} model was not saved: {failure}; make room and run the same command "
                            "again") from None


def write_model(lm, weights: dict, tokenizer, folder: Path) -> None:
    """Writes the files that from_pretrained(folder) reads. weights: {name: tensor}. Main process only."""
    lm.save_pretrained(folder, state_dict=weights)
    save_tokenizer(tokenizer, folder)
    config = folder / "config.json"
    config.write_text(without_secrets(config.read_text()))  # config_overrides may set any value
    for file in folder.iterdir():  # safetensors makes files that only their owner may read
        file.chmod(config.stat().st_mode)


def collect_weights(accelerator, model, lm) -> dict:
    """{name: full tensor on the CPU} of `lm`, the transformers model in the prepared `model`; save_pretrained
    cannot read XLA tensors. All processes call this; only the main process does not get {}."""
    state = accelerator.get_state_dict(model, unwrap=False)  # gathers FSDP's shards
    if not accelerator.is_main_process:
        return {}
    state = {clean_name(name): tensor for name, tensor in state.items()}
    # named_tensors has tied weights once: save_pretrained would write each copy.
    return {name: state[f"lm.{name}"].detach().cpu() for name in named_tensors(lm)}
