"""The documents of text that a run is evaluated on, a line of JSON each.

    python -m docs.harness.documents runs/clm validation.jsonl

In the environment of the run: the documents of installed-python are those of the packages there.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

from data.documents.filters import Accounting, clean_documents
from data.documents.source import Corpus
from data.load import open_all
from data.prepare import plan_hold_out


def main(run: str, out: str) -> None:
    args = SimpleNamespace(**json.loads(Path(run, "args.json").read_text())["settings"])
    train, evals, _ = open_all(args)
    divided = [train[name] for name, data in evals.items() if data is None]
    hold_out = plan_hold_out(args, divided, args.block_size)
    corpora = [data for data in evals.values() if isinstance(data, Corpus)] + [*map(hold_out.select, divided)]
    if not corpora:
        raise SystemExit(f"{run} is evaluated on rows that were made elsewhere, not on text")
    counts = Accounting()
    with open(out, "w", encoding="utf-8") as file:
        for corpus in corpora:
            for text, _, _ in clean_documents(corpus, counts):
                print(json.dumps({"text": text}), file=file)
    print(f"{out}: {counts.used:,} documents, {counts.bytes:,} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
