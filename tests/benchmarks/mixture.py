"""What drawing a batch costs from a mixture of three data sets, against one of them alone.

    python -m tests.benchmarks.mixture --batches 2000

The batches of a training loop without training, through the loader of data/batches.py: of rows in the cache,
then of streamed shards. One process draws from both in turn, `--rounds` times, the same data and batch size;
medians of the CPU's microseconds per batch and their ratio, as JSON.
"""

import argparse
import contextlib
import io
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path

from accelerate import Accelerator

from data.open import Recipe, open_sources, prepare
from tests.shard_data import make_texts, run, save_tokenizer, write_jsonl


def drawn(data, batches: int) -> float:
    """Microseconds of the CPU per batch."""
    loader = iter(data.loader(0, 10**12))
    next(loader)  # opens files, starts threads
    started = time.process_time()
    assert sum(1 for _ in itertools.islice(loader, batches)) == batches
    return (time.process_time() - started) / batches * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=2000)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--block_size", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer, names, found = save_tokenizer(Path(folder, "tokenizer")), [], {}
        with contextlib.redirect_stdout(io.StringIO()):
            for seed in range(3):
                names.append(f"{folder}/{seed}")
                source = write_jsonl(Path(f"{names[-1]}.jsonl"), make_texts(2000, seed))
                assert run(source, names[-1], tokenizer, shard_mb=0.2) == 0
        common = {
            "block_size": args.block_size, "cache_dir": f"{folder}/cache", "max_eval_samples": 8,
            "per_device_train_batch_size": args.batch_size,
        }  # fmt: skip
        for kind, streaming in (("rows", False), ("stream", True)):
            recipes = {
                "single": Recipe(dataset_name=names[0], streaming=streaming, **common),
                "mixture": Recipe(dataset_name=names, mixture=(0.6, 0.3, 0.1), streaming=streaming, **common),
            }
            opened = {name: prepare(open_sources(recipe, []), Accelerator(cpu=True))
                      for name, recipe in recipes.items()}  # fmt: skip
            seconds = {name: [] for name in opened}
            for _ in range(args.rounds):
                for name, data in opened.items():
                    seconds[name].append(drawn(data, args.batches))
            found[kind] = {name: round(statistics.median(times), 1) for name, times in seconds.items()}
            found[kind]["ratio"] = round(found[kind]["mixture"] / found[kind]["single"], 2)
            for data in opened.values() if streaming else ():
                for rows in data.train.sources.values():
                    rows.close()  # or its producer would still fill the folder
        print(json.dumps(found))


if __name__ == "__main__":
    main()
