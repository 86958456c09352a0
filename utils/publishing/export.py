"""The model as transformers loads it, in output_dir and in milestones: from_pretrained, pipeline(model=...).

Milestones are kept for good: output_dir/milestones/step-N, complete or absent, with a manifest.json of the
files' sizes and SHA-256 sums. A run that resumes from an earlier step renames later ones to replaced-step-N,
and back when it makes the same again; none is ever deleted.
"""

import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import transformers
from transformers import AutoConfig

from utils.io.files import checksum_file, flush, seal, set_aside, verify_checksums
from utils.io.secrets import without_secrets
from utils.state.folders import step_of
from utils.state.training_state import clean_name, gather_json, named_tensors

logger = logging.getLogger(__name__)

LOG = 512  # "log" means the powers of two up to here, then every save


def write_model(accelerator, model, tokenizer, folder: Path, done: Callable[[], None]) -> str:
    """Writes the model into `folder`, calls done(), and deletes what is left there. All processes call it and
    get the same answer: "", or why it failed, which is also logged.

    model: the prepared loss module, whose `.lm` is the transformers model. Weights are copied to the CPU, as
    save_pretrained cannot read XLA tensors."""
    unwrapped, failure = accelerator.unwrap_model(model, keep_torch_compile=False), ""
    weights = accelerator.get_state_dict(model, unwrap=False)  # FSDP: a collective; only the first gets them
    if accelerator.is_main_process:
        weights = {clean_name(name): value for name, value in weights.items()}
        # Tied weights once: save_pretrained does not recognize their copies as tied.
        weights = {name: weights[f"lm.{name}"].detach().cpu() for name in named_tensors(unwrapped.lm)}
        shutil.rmtree(folder, ignore_errors=True)  # left by a killed run
        try:
            unwrapped.lm.save_pretrained(folder, state_dict=weights)
            tokenizer.save_pretrained(folder)
            config = folder / "config.json"
            config.write_text(without_secrets(config.read_text()))  # config_overrides may set any text
            for file in folder.iterdir():  # safetensors writes files that only their owner may read
                file.chmod(config.stat().st_mode)
            done()
        except Exception as error:  # of safetensors or tokenizers, such as a full disk: training goes on
            failure = str(error) or repr(error)
            logger.warning("the model was not saved in %s: %s", folder.parent, failure)
        shutil.rmtree(folder, ignore_errors=True)
    return gather_json(accelerator, failure)[0]


def export_model(accelerator, model, tokenizer, output_dir: str | Path, write_card=lambda: None) -> str:
    """Replaces config.json, the tokenizer, then model.safetensors in output_dir, each file whole, and calls
    write_card(). Returns the same as write_model."""
    written = Path(output_dir, ".export")

    def replace() -> None:
        for file in sorted(written.iterdir(), key=lambda file: file.suffix == ".safetensors"):
            os.replace(file, Path(output_dir, file.name))
        write_card()

    return write_model(accelerator, model, tokenizer, written, replace)


def not_loaded(folder: Path) -> list[str]:
    """The names of weights that transformers misses in a saved model, or does not expect there."""
    config = AutoConfig.from_pretrained(folder)
    made = getattr(transformers, (config.architectures or [""])[0], None)
    if made is None:  # a class of the user's own
        return []
    options = dict(config=config, device_map="meta", ignore_mismatched_sizes=True, output_loading_info=True)
    info = made.from_pretrained(folder, **options)[1]
    others = {key for key, *_ in info["mismatched_keys"]}
    return sorted(others | {*info["missing_keys"], *info["unexpected_keys"]})


def milestone_steps(named: list, last: int = 0, saves: Iterable[int] = ()) -> set[int]:
    """The steps that the setting `milestones` names. last: of the run, 0 while unknown. ValueError."""
    if named == ["log"]:
        steps = {2**n for n in range(LOG.bit_length())} | {step for step in saves if step > LOG}
        return {step for step in steps if step <= last}
    steps = {int(step) if str(step).isdecimal() else 0 for step in named}
    if not all(1 <= step <= (last or step) for step in steps):
        given = " ".join(map(str, named))
        raise ValueError(f"milestones: {given}: give log, or steps from 1 to {last or 'the last'}, or none.")
    return steps


def list_milestones(output_dir) -> list[Path]:
    """The complete milestones by their names, in order; nothing is verified."""
    named = Path(output_dir, "milestones").glob("step-*")
    return sorted((path for path in named if path.name[5:].isdecimal()), key=step_of)


def keep_milestone(accelerator, model, tokenizer, output_dir, step: int) -> str:
    """Makes the milestone of this step, or renames an equal one back. Returns the same as write_model."""
    milestone = Path(output_dir, "milestones", f"step-{step}")
    written = milestone.with_name(f".tmp-{milestone.name}")

    def complete() -> None:
        files = {path.name: checksum_file(path, hashlib.sha256) for path in sorted(written.iterdir())}
        for name in files:
            flush(written / name)
        seal(written, files, step=step)
        manifest = (written / "manifest.json").read_bytes()
        if milestone.exists():  # the run resumes at this very step
            set_aside(milestone)
        older = milestone.parent.glob("replaced-*/manifest.json")
        same = (path.parent for path in older if path.read_bytes() == manifest)
        next((path for path in same if not verify_checksums(path)), written).rename(milestone)
        flush(milestone.parent)

    return write_model(accelerator, model, tokenizer, written, complete)
