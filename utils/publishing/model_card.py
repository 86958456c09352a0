"""The model card: README.md of the model's folder, from the template model_card.md beside this file."""

import json
import logging
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from utils.display.metrics import by_set
from utils.display.progress import duration, readable
from utils.io.files import replacing

logger = logging.getLogger(__name__)

TEMPLATE = Path(__file__).with_suffix(".md")
END = b"<!-- The run writes this card anew at every save, down to here. What you write below stays. -->\n"


def write_model_card(output_dir: str | os.PathLike, *, pipeline_tag: str, model_type: str, model_name: str,
                     datasets: list[str], seconds: float, settings: Mapping[str, Any],
                     results: Mapping[str, float], example: str, repo_id: str | None = None,
                     base_model: str | None = None, **facts):
    """Writes output_dir/README.md whole. What follows END in it is the user's and stays. So does a README.md
    without END: then the card is MODEL_CARD.md.

    results: metric, or metric/evaluation set, -> value, as in metrics.jsonl; values that are not finite are
    left out. example: the text given to the pipeline. base_model: Hub id or folder of the weights that
    training started from. facts, for the template: launch, parameters, step, max_steps, ended (early),
    tokens, branch."""
    output_dir = Path(output_dir)
    base_on_hub = bool(base_model) and not os.path.exists(base_model)
    on_hub = [n for n in datasets if re.fullmatch(r"[\w.-]+/[\w.-]+", n) and not os.path.exists(n)]
    sets = list(by_set(results, "loss/eval")) or [""]  # a single set has no name
    table: dict[str, dict[str, str]] = {}  # metric -> evaluation set -> number
    for key, value in results.items():
        if value is not None and math.isfinite(value):
            name = next((name for name in sets if name and key.endswith(f"/{name}")), "")
            table.setdefault(key.removesuffix(f"/{name}"), {})[name] = readable(value)

    def link(name: str, on_hub: bool, kind: str = "") -> str:
        return f"[{name}](https://huggingface.co/{kind}{name})" if on_hub else f"`{name}`"

    # The Hub refuses metadata that names a folder as data set or base model.
    metadata = dict(license="unknown", library_name="transformers", pipeline_tag=pipeline_tag)
    metadata |= dict(datasets=on_hub or None, base_model=base_model if base_on_hub else None)
    data = ModelCardData(tags=["pretraining", "accelerate", model_type], **metadata)
    facts |= dict(title=model_name, model_type=model_type, address=repo_id or str(output_dir))
    facts |= dict(sets=sets, results=table, duration=duration(seconds), example=_json(example))
    facts["origin"] = f"further from {link(base_model, base_on_hub)}" if base_model else "from scratch"
    facts["dataset_link"] = ", ".join(link(name, name in on_hub, "datasets/") for name in datasets)
    facts["settings"] = {name: _json(value) for name, value in settings.items()}
    facts["curves"] = (output_dir / "curves.png").exists()
    card = ModelCard.from_template(data, str(TEMPLATE), **facts)
    readme, beside = output_dir / "README.md", output_dir / "MODEL_CARD.md"
    for path in (readme, beside):
        old = path.read_bytes() if path.exists() else END
        if END in old:
            with replacing(path) as temporary:
                temporary.write_bytes(f"{card}\n".encode() + END + old.partition(END)[2])
            return
        if not beside.exists():
            logger.warning("%s is yours and stays as it is: the model card is %s", readme, beside)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
