"""Writes the model card, README.md in output_dir, from the template model_card.md in this folder."""

import json
import math
import os
import re
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from utils.display.metrics import by_set, duration, readable
from utils.flags import as_list
from utils.io.files import replacing
from utils.learning.model import example_prompt

TEMPLATE = Path(__file__).with_suffix(".md")


def write_model_card(args, facts: dict, mask_token: str | None) -> None:
    """Writes output_dir/README.md.

    facts: step, last (steps), tokens, seconds, parameters, model_type, pipeline_tag; settings, without
    secrets; results: {metric or metric/evaluation set: value}; launch: device, processes, precision,
    attention, compiler; repo_id: user/name if it is pushed to the Hub; tried, sample: the first prompt and
    the model's text for it, or ""."""
    folder, settings, results = Path(args.output_dir), facts["settings"], facts["results"]
    repo_id = facts.get("repo_id") or args.push_to_hub and args.hub_model_id
    names, base = as_list(settings["dataset_name"]), settings.get("model_name_or_path")
    # The Hub refuses metadata in which a dataset or the base model is a folder.
    on_hub = [name for name in names if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not os.path.exists(name)]
    base_on_hub = base if base and not os.path.exists(base) else None
    data = ModelCardData(license="unknown", library_name="transformers", pipeline_tag=facts["pipeline_tag"],
                         tags=["pretraining", "accelerate", facts["model_type"]], datasets=on_hub or None,
                         base_model=base_on_hub)  # fmt: skip
    prompt = example_prompt(facts).replace("[MASK]", mask_token or "[MASK]")
    sets = list(by_set(results, "loss/eval")) or [""]  # a single evaluation set has no name
    facts = facts | {
        "title": repo_name(args).split("/")[-1], "address": repo_id or args.output_dir, "sets": sets,
        "results": _table(results, sets), "duration": duration(facts["seconds"]),
        "example": json.dumps(prompt, ensure_ascii=False),
        "origin": f"further from {_link(base, bool(base_on_hub))}" if base else "from scratch",
        "dataset_link": ", ".join(_link(name, name in on_hub, "datasets/") for name in names),
        "settings": {name: json.dumps(value, ensure_ascii=False) for name, value in settings.items()},
        "curves": (folder / "curves.png").exists(),
    }  # fmt: skip
    card = ModelCard.from_template(data, str(TEMPLATE), **facts)
    with replacing(folder / "README.md") as temporary:
        temporary.write_text(f"{card}\n", encoding="utf-8")


def repo_name(args) -> str:
    """The name of a run's repository: hub_model_id, or output_dir's name without what the Hub forbids."""
    name = re.sub(r"\W{2,}|[^\w.-]", "-", Path(args.output_dir).resolve().name, flags=re.ASCII)[:96]
    return args.hub_model_id or re.sub(r"^[-.]+|(\.git|[-.])+$", "", name) or "model"


def _table(results: dict, sets: list[str]) -> dict[str, dict[str, str]]:
    """{metric: {evaluation set: number as text}}, without missing and non-finite values."""
    table: dict[str, dict[str, str]] = {}
    for key, value in results.items():
        if value is not None and math.isfinite(value):
            name = next((name for name in sets if name and key.endswith(f"/{name}")), "")
            table.setdefault(key.removesuffix(f"/{name}"), {})[name] = readable(value)
    return table


def _link(name: str, on_hub: bool, kind: str = "") -> str:
    return f"[{name}](https://huggingface.co/{kind}{name})" if on_hub else f"`{name}`"
