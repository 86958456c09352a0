"""Speed and memory of preparing rows from text, compared with `tokenizers` alone and transformers' run_clm.

    python -m tests.benchmarks.preparation --tokenizer_name openai-community/gpt2 --megabytes 60

Same documents (installed Python source), same tokenizer, same cores, each in a separate process, in turn:
    tokenizers   encode_batch_fast on texts in memory, and nothing else
    ours         as_shards: filter, duplicates, split, tokenize, EOS, rows on disk, from text in memory
    run_clm      datasets.map(tokenize), datasets.map(group_texts), as transformers' example does by default
Prints medians over the rounds and the peak memory of each process. On a busy machine CPU seconds are more
reliable than the clock's.
"""

import argparse
import contextlib
import io
import itertools
import json
import shutil
import sys
import tempfile
import time
from dataclasses import replace

from data.documents.filters import Accounting, HoldOut, clean_documents
from data.documents.source import Corpus, Source, open_corpus
from data.prepare import as_shards
from data.tokens.encode import TokenMaker
from data.tokens.tokenizer import load_tokenizer
from tests.benchmarks.measure import interleaved, print_table

BLOCK_SIZE = 1024
METHODS = ("run_clm", "tokenizers", "ours")


def read_texts(megabytes: float) -> list[str]:
    """Every third document of the installed source that the filters accept, up to a size."""
    texts, size = [], 0
    corpus = open_corpus(Source("installed-python"))
    every_third = replace(corpus, units=[lambda: itertools.islice(corpus, 0, None, 3)])
    for text, _, _ in clean_documents(every_third, Accounting()):
        texts.append(text)
        size += len(text)
        if size >= megabytes * 1e6:
            break
    return texts


def tokenizers_alone(texts, tokenizer, folder) -> int:
    encode = tokenizer.backend_tokenizer.encode_batch_fast
    return sum(sum(map(len, encode(texts[i : i + 200], add_special_tokens=False)))
               for i in range(0, len(texts), 200))


def ours(texts, tokenizer, folder) -> int:
    corpus = Corpus(Source("memory"), "text", "memory", [lambda: ({"text": text} for text in texts)])
    maker = TokenMaker(tokenizer)
    shards = as_shards(corpus, "train", HoldOut(0.05), maker=maker, size=BLOCK_SIZE, cache_dir=folder)
    return sum(account["tokens"] for account in shards.manifest["accounting"].values())


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
    """Print one measurement as a line of JSON. Reading texts and imports are not timed."""
    texts, tokenizer = read_texts(megabytes), load_tokenizer(tokenizer_name)
    tokenizer.backend_tokenizer.encode_batch_fast(texts[:20], add_special_tokens=False)
    work = {"tokenizers": tokenizers_alone, "ours": ours, "run_clm": run_clm}[method]
    folder = tempfile.mkdtemp()
    started, cpu = time.perf_counter(), time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        tokens = work(texts, tokenizer, folder)
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    shutil.rmtree(folder)
    print(json.dumps({"tokens_per_second": tokens / seconds, "tokens_per_cpu_second": tokens / cpu}))


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
    command = [sys.executable, "-m", "tests.benchmarks.preparation", "--tokenizer_name", args.tokenizer_name,
               "--megabytes", str(args.megabytes), "--only"]
    lines = interleaved({method: [*command, method] for method in METHODS}, args.rounds)
    for numbers in lines.values():
        numbers["share"] = numbers["tokens_per_second"] / lines["tokenizers"]["tokens_per_second"]
    print_table(
        f"{args.megabytes:g} MB of text to rows, medians of {args.rounds} runs in turn",
        lines,
        {"tokens_per_second": "tokens/s", "tokens_per_cpu_second": "tokens per CPU s", "mib": "peak MiB",
         "share": "tokens/s over tokenizers'"},
        {"tokens_per_second": "tokens/s over run_clm's", "mib": "memory ratio"},
    )  # fmt: skip


if __name__ == "__main__":
    main()
