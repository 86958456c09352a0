"""The model as transformers loads it: from_pretrained(output_dir) and pipeline(model=output_dir)."""

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from utils.io.secrets import without_secrets
from utils.state.training_state import clean_name, gather_bytes, named_tensors

logger = logging.getLogger(__name__)


def export_model(accelerator, model, tokenizer, output_dir: str | Path, write_card=lambda: None) -> str:
    """Replaces config.json, the tokenizer and then model.safetensors in output_dir, each whole, and calls
    write_card(). Returns as write_model does."""

    def replace(written: Path) -> None:
        for file in sorted(written.iterdir(), key=lambda file: file.suffix == ".safetensors"):
            os.replace(file, Path(output_dir, file.name))
        write_card()

    return write_model(accelerator, model, tokenizer, Path(output_dir, ".export"), replace)


def more_configurations(folder) -> list[Path]:
    """What pipeline() reads of a saved model beside weights, config.json and tokenizer.json."""
    files = Path(folder, "generation_config.json"), Path(folder, "tokenizer_config.json")
    return [file for file in files if file.exists()]


def write_model(accelerator, model, tokenizer, folder: Path, done: Callable[[Path], None]) -> str:
    """Writes the model into `folder`, calls done(folder), deletes what that leaves there. Called on all
    processes; returns the same on all: "", or why it failed, of which the log warns, too: a full disk.

    model: the prepared loss module, whose `.lm` is the transformers model. Weights go through the CPU because
    save_pretrained cannot read XLA tensors."""
    unwrapped, failure = accelerator.unwrap_model(model, keep_torch_compile=False), ""
    weights = accelerator.get_state_dict(model, unwrap=False)  # FSDP: a collective; full ones on the first
    if accelerator.is_main_process:
        weights = {clean_name(name): value for name, value in weights.items()}
        # A tied weight once: its copies do not tell save_pretrained that they are one.
        weights = {name: weights[f"lm.{name}"].detach().cpu() for name in named_tensors(unwrapped.lm)}
        shutil.rmtree(folder, ignore_errors=True)  # of a killed run
        try:
            unwrapped.lm.save_pretrained(folder, state_dict=weights)
            tokenizer.save_pretrained(folder)
            config = folder / "config.json"
            config.write_text(without_secrets(config.read_text()))  # config_overrides may set any text
            mode = config.stat().st_mode
            for file in folder.iterdir():
                if file.stat().st_mode != mode:  # safetensors writes files that only their owner may read
                    file.chmod(mode)
            done(folder)
        except Exception as error:  # safetensors and tokenizers have their own; training is worth more
            failure = str(error) or repr(error)
            logger.warning("the model was not saved in %s: %s", folder.parent, failure)
        shutil.rmtree(folder, ignore_errors=True)
    return json.loads(gather_bytes(accelerator, json.dumps(failure).encode())[0])
