"""Speed and memory of text to rows, against tokenizers alone and against transformers' run_clm steps.

    python -m tests.benchmarks.preparation --tokenizer_name openai-community/gpt2 --megabytes 60

Same documents (installed Python source), same tokenizer, same cores, each in a process of its own, in turn:
    tokenizers   encode_batch_fast on texts in memory, and nothing else
    ours         prepare_rows: filter, duplicates, split, tokenize, EOS, rows on disk, from text in memory
    run_clm      datasets.map(tokenize), datasets.map(group_texts), as transformers' example does by default
Prints tokens per second (median over rounds), the two ratios and the peak memory of each process. CPU seconds
beside them: on a machine with other work they say more than the clock.
"""

import argparse
import contextlib
import io
import itertools
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace

from data.corpus import Corpus, load_corpus
from data.filters import Accounting, clean_documents
from data.packing import prepare_rows
from data.tokenizer import load_tokenizer

BLOCK_SIZE = 1024
METHODS = ("tokenizers", "ours", "run_clm")


def read_texts(megabytes: float) -> list[str]:
    """Every third document of the installed source, up to a size, without what the filters would drop."""
    texts, size = [], 0
    corpus = load_corpus("installed-python")
    some = replace(corpus, rows=lambda: itertools.islice(corpus.rows(), 0, None, 3))
    for document in clean_documents(some, [], Accounting()):
        texts.append(document["content"])
        size += len(document["content"])
        if size >= megabytes * 1e6:
            break
    return texts


def tokenizers_alone(texts, tokenizer, folder) -> int:
    encode = tokenizer.backend_tokenizer.encode_batch_fast
    return sum(sum(map(len, encode(texts[i : i + 200], add_special_tokens=False)))
               for i in range(0, len(texts), 200))


def ours(texts, tokenizer, folder) -> int:
    corpus = Corpus("memory", "text", "memory", ["text"], lambda: ({"text": text} for text in texts))
    prepared = prepare_rows(corpus, tokenizer, block_size=BLOCK_SIZE, cache_dir=folder, progress=False)
    return sum(account["tokens"] for account in prepared.accounting.values())


def run_clm(texts, tokenizer, folder) -> int:
    """transformers/examples/pytorch/language-modeling/run_clm.py, tokenize_function and group_texts."""
    import datasets

    def tokenize_function(examples):
        return tokenizer(examples["text"])

    def group_texts(examples):
        concatenated = {k: list(itertools.chain(*examples[k])) for k in examples}
        total_length = (len(concatenated["input_ids"]) // BLOCK_SIZE) * BLOCK_SIZE
        result = {k: [t[i : i + BLOCK_SIZE] for i in range(0, total_length, BLOCK_SIZE)]
                  for k, t in concatenated.items()}
        result["labels"] = result["input_ids"].copy()
        return result

    datasets.disable_progress_bars()
    source = datasets.Dataset.from_dict({"text": texts})
    tokenized = source.map(tokenize_function, batched=True, remove_columns=["text"],
                           cache_file_name=f"{folder}/tokenized.arrow")
    grouped = tokenized.map(group_texts, batched=True, cache_file_name=f"{folder}/grouped.arrow")
    return len(grouped) * BLOCK_SIZE


def measure(method, tokenizer_name, megabytes):
    """One measurement, as a line of JSON; the peak is that of the process, texts and libraries included."""
    texts, tokenizer = read_texts(megabytes), load_tokenizer(tokenizer_name)
    tokenizer.backend_tokenizer.encode_batch_fast(texts[:20], add_special_tokens=False)
    work = {"tokenizers": tokenizers_alone, "ours": ours, "run_clm": run_clm}[method]
    folder = tempfile.mkdtemp()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    started = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        tokens = work(texts, tokenizer, folder)
    seconds = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_SELF)
    shutil.rmtree(folder)
    cpu = after.ru_utime + after.ru_stime - usage.ru_utime - usage.ru_stime
    unit = 1 if sys.platform == "darwin" else 1024
    peak = after.ru_maxrss * unit / 1e9
    print(json.dumps({"tokens": tokens, "seconds": seconds, "cpu": cpu, "peak": peak}))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer_name", required=True, help="a Hub id or folder")
    parser.add_argument("--megabytes", type=float, default=60, help="of text")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=METHODS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        return measure(args.only, args.tokenizer_name, args.megabytes)
    results = {method: [] for method in METHODS}
    for _, method in itertools.product(range(args.rounds), METHODS):
        command = [sys.executable, "-m", "tests.benchmarks.preparation", "--only", method,
                   "--tokenizer_name", args.tokenizer_name, "--megabytes", str(args.megabytes)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        results[method].append(json.loads(done.stdout.splitlines()[-1]))
    print(f"{'':<12}{'tokens/s':>12}{'tokens/CPU s':>14}{'peak GB':>9}   {args.megabytes:g} MB of text")
    rates = {}
    for method, found in results.items():
        rates[method] = [statistics.median(result["tokens"] / result[clock] for result in found)
                         for clock in ("seconds", "cpu")]
        peak = max(result["peak"] for result in found)
        print(f"{method:<12}{rates[method][0]:>12,.0f}{rates[method][1]:>14,.0f}{peak:>9.2f}")
    for other in ("tokenizers", "run_clm"):
        by_clock, by_cpu = (ours / theirs for ours, theirs in zip(rates["ours"], rates[other], strict=True))
        print(f"ours / {other}: {by_clock:.2f} by the clock, {by_cpu:.2f} by CPU seconds")


if __name__ == "__main__":
    main()
