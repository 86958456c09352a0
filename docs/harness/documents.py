"""The documents of text that a run is evaluated on, a line of JSON each.

    python -m docs.harness.documents runs/clm validation.jsonl

In the environment of the run: the documents of installed-python are those of the packages there.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

from data.documents.filters import Accounting, clean_documents
from data.open import RunData


def main(run: str, out: str) -> None:
    args = SimpleNamespace(**json.loads(Path(run, "args.json").read_text())["settings"])
    if not (corpora := RunData(args, [], n_special=0).evaluated()):
        raise SystemExit(f"{run} is evaluated on rows that were made elsewhere, not on text")
    counts = Accounting()
    with open(out, "w", encoding="utf-8") as file:
        for corpus in corpora:
            for text, _, _ in clean_documents(corpus, counts):
                print(json.dumps({"text": text}), file=file)
    print(f"{out}: {counts.kept:,} documents, {counts.bytes:,} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
