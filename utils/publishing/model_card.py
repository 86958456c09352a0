"""The model card: README.md of the model's folder, from the template model_card.md beside this file."""

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

TEMPLATE = Path(__file__).with_suffix(".md")
# What the Hub shows beside the model; the other results stay in the card's table.
METRICS = ("loss/eval", "perplexity", "bits_per_byte", "accuracy")


def write_model_card(
    output_dir: str | os.PathLike,
    *,
    pipeline_tag: str,
    model_name: str,
    model_type: str,
    parameters: int,
    dataset: str,
    step: int,
    max_steps: int,
    tokens: int,
    seconds: float,
    hardware: str,
    settings: Mapping[str, Any],
    results: Mapping[str, float],
    example: str,
    split: str = "train",
    eval_split: str = "validation",
    repo_id: str | None = None,
    base_model: str | None = None,
    license: str = "unknown",
) -> None:
    """Write output_dir/README.md, replacing it in one piece.

    pipeline_tag: "text-generation" or "fill-mask". results: metric -> value as in metrics.jsonl; values that
    are not finite are left out. example: the text given to the pipeline in "How to use it". base_model: Hub
    id or folder of the weights that training started from. license: an identifier of the Hub (apache-2.0,
    mit, other).
    """
    output_dir = Path(output_dir)
    # The Hub refuses metadata that names a folder as data set or base model.
    dataset_on_hub = bool(re.fullmatch(r"[\w.-]+/[\w.-]+", dataset)) and not os.path.exists(dataset)
    base_on_hub = base_model and not os.path.exists(base_model)
    results = {name: value for name, value in results.items() if value is not None and math.isfinite(value)}
    evaluated = {
        "task_type": pipeline_tag,
        "dataset_type": dataset if dataset_on_hub else re.sub(r"[^\w.-]+", "-", Path(dataset).name) or "text",
        "dataset_name": dataset,
        "dataset_split": eval_split,
    }
    data = ModelCardData(
        license=license,
        library_name="transformers",
        pipeline_tag=pipeline_tag,
        base_model=base_model if base_on_hub else None,
        datasets=[dataset] if dataset_on_hub else None,
        tags=["pretraining", "accelerate", model_type],
        model_name=model_name,
        eval_results=[
            EvalResult(
                metric_type=name.split("/")[0], metric_name=name, metric_value=round(value, 6), **evaluated
            )
            for name, value in results.items()
            if name in METRICS
        ]
        or None,
    )

    def link(name: str, kind: str, on_hub: bool) -> str:
        return f"[{name}](https://huggingface.co/{kind}{name})" if on_hub else f"`{name}`"

    weights = link(base_model, "", base_on_hub) if base_model else None
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        title=model_name,
        origin=f"trained further from {weights}" if weights else "trained from scratch",
        model_type=model_type,
        parameters=parameters,
        dataset_link=link(dataset, "datasets/", dataset_on_hub),
        split=split,
        step=step,
        max_steps=max_steps,
        tokens=tokens,
        duration=f"{seconds / 3600:.1f} hours" if seconds >= 7200 else f"{seconds / 60:.1f} minutes",
        hardware=hardware,
        settings={name: json.dumps(value, ensure_ascii=False) for name, value in settings.items()},
        results=results,
        example=json.dumps(example, ensure_ascii=False),
        address=repo_id or str(output_dir),
        curves=(output_dir / "curves.png").exists(),
    )
    temporary = output_dir / ".README.md"
    temporary.write_text(str(card), encoding="utf-8")
    os.replace(temporary, output_dir / "README.md")
