"""The model as transformers loads it: from_pretrained(output_dir) and pipeline(model=output_dir)."""

import os
import shutil
from pathlib import Path

from utils.publishing.secrets import without_secrets
from utils.state.training_state import clean_name, named_tensors


def export_model(accelerator, model, tokenizer, output_dir: str | Path) -> None:
    """Writes config.json, model.safetensors and the tokenizer; each file is replaced whole, weights last.

    model: the prepared loss module, whose `.lm` is the transformers model. Called on all processes. Weights
    go through the CPU because save_pretrained cannot read XLA tensors."""
    unwrapped = accelerator.unwrap_model(model, keep_torch_compile=False)
    weights = accelerator.get_state_dict(model, unwrap=False)  # FSDP: a collective; full ones on the first
    if accelerator.is_main_process:
        weights = {clean_name(name): value for name, value in weights.items()}
        # A tied weight once: its copies do not tell save_pretrained that they are one.
        weights = {name: weights[f"lm.{name}"].detach().cpu() for name in named_tensors(unwrapped.lm)}
        output_dir = Path(output_dir)
        temporary = output_dir / ".export"
        shutil.rmtree(temporary, ignore_errors=True)
        unwrapped.lm.save_pretrained(temporary, state_dict=weights)
        tokenizer.save_pretrained(temporary)
        config = temporary / "config.json"
        config.write_text(without_secrets(config.read_text()))  # config_overrides may set any text
        mode = config.stat().st_mode
        for file in sorted(temporary.iterdir(), key=lambda file: file.suffix == ".safetensors"):
            if file.stat().st_mode != mode:  # safetensors writes files that only their owner may read
                file.chmod(mode)
            os.replace(file, output_dir / file.name)
        temporary.rmdir()
    accelerator.wait_for_everyone()
