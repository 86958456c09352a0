"""The documents of text that a run is evaluated on, a line of JSON each.

    python -m docs.harness.documents runs/clm validation.jsonl

In the environment of the run: the documents of installed-python are those of the packages there.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

from data.filters import Accounting, clean_documents, in_validation
from data.open import Recipe, open_sources
from utils.settings import stop_at


def main(run: str, out: str) -> None:
    args = SimpleNamespace(**json.loads(Path(run, "args.json").read_text())["settings"])
    sources = open_sources(Recipe.of(args), problems := [])
    stop_at(problems)
    kinds = (sources.evals or sources.train).values()
    texts = [kind for kind in kinds if kind.corpus]
    if not texts:
        raise SystemExit(f"{run} is evaluated on rows that were made elsewhere, not on text")
    counts = Accounting()
    with open(out, "w", encoding="utf-8") as file:
        for kind in texts:
            for document in clean_documents(kind.corpus, Accounting()):
                text = document[kind.corpus.text_column]
                if sources.evals or in_validation(text, args.seed, kind.fraction):
                    counts.kept, counts.bytes = counts.kept + 1, counts.bytes + len(text.encode())
                    print(json.dumps({"text": text}), file=file)
    print(f"{out}: {counts.kept:,} documents, {counts.bytes:,} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
