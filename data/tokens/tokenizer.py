"""Load a tokenizer, or train one: byte-level BPE or Unigram.

    python -m data.tokens.tokenizer --output_dir my-tokenizer                # BPE on the installed Python
    python -m data.tokens.tokenizer --algorithm unigram --vocab_size 25000 \\
        --dataset_name Salesforce/wikitext --dataset_config_name wikitext-103-raw-v1 \\
        --output_dir my-tokenizer                                            # as in the Keras TPU example
"""

import argparse
import hashlib
import heapq
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from data.documents.filters import Accounting, clean_documents, show_progress
from data.documents.source import add_source_flags, check_numbers, open_corpus, source_of
from data.tokens.cache import cache_path, locked
from data.tokens.encode import split_text
from utils.io.files import is_missing_folder
from utils.io.mistakes import user_mistakes
from utils.io.urls import explained

TRAINING_BYTES = 100_000_000  # a tokenizer is trained on at most so many bytes of text
FORMAT = 6  # part of a trained tokenizer's key in the cache: raise it when training gives other tokenizers
MAX_WORD_CHARS = 400  # longer words are cut in training
LONG_WORD = re.compile(rf"(?<!\w)\w{{{MAX_WORD_CHARS},}}")

# Special tokens by model family, in the order of their ids in the families' configurations. RoBERTa counts
# its positions from the pad id (1): with another id it would silently take a token for padding.
ROBERTA = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>",
           "cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>"}
BERT = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]",
        "mask_token": "[MASK]"}
CAUSAL = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}  # GPT-2's
LIKE_ROBERTA = ("camembert", "data2vec-text", "esm", "longformer", "mpnet", "roberta", "roberta-prelayernorm",
                "xlm-roberta", "xlm-roberta-xl")
FAMILIES = {**dict.fromkeys(MODEL_FOR_MASKED_LM_MAPPING_NAMES, BERT), **dict.fromkeys(LIKE_ROBERTA, ROBERTA)}
DEFAULT_MODEL_TYPES = {"bpe": "gpt2", "unigram": "roberta"}


def load_tokenizer(name_or_path) -> PreTrainedTokenizerFast:
    """Loads a tokenizer from the Hub or a folder. ValueError if there is none, or it has no tokenizer.json or
    no vocabulary."""
    name = os.path.expanduser(str(name_or_path))
    if is_missing_folder(name):
        raise ValueError(f"tokenizer_name {name!r}: there is no such folder")
    if os.path.isfile(name):
        raise ValueError(f"tokenizer_name {name!r} is a file: name the folder that it is in")
    if os.path.isdir(name) and not any("token" in file or "vocab" in file or file.endswith(".model")
                                       for file in os.listdir(name)):  # transformers would invent one
        raise ValueError(f"tokenizer_name {name!r}: this folder has no tokenizer, such as a tokenizer.json. "
                         "Copy the weights' own tokenizer into it, or name one with --tokenizer_name")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # a damaged file can raise anything
        raise ValueError(f"tokenizer_name {name!r} cannot be loaded: {str(error).strip()}\n  Remedies: check "
                         "spelling, network and login.") from error
    if not tokenizer.is_fast:
        raise ValueError(f"tokenizer_name {name!r} has no tokenizer.json; choose a tokenizer with one")
    if not tokenizer.get_vocab() or not tokenizer("the 1 a", add_special_tokens=False)["input_ids"]:
        raise ValueError(f"tokenizer_name {name!r} gives text no tokens: its vocabulary is missing")
    return tokenizer


def train_tokenizer(texts: Iterable[str], algorithm: str, vocab_size: int, model_type: str,
                    progress=False) -> PreTrainedTokenizerFast:
    """Trains a tokenizer on texts, with the special tokens of the model's family.

    algorithm: bpe is byte-level, like GPT-2's, and decodes to exactly the same text; unigram is that of the
    Keras TPU example of transformers, with the mask token [MASK]. Warns if the text gives fewer tokens than
    vocab_size. ValueError if the settings are wrong or the text is too small."""
    if model_type not in CONFIG_MAPPING:
        raise ValueError(f"model_type {model_type!r}: unknown to transformers")
    special = _choose_special_tokens(algorithm, model_type)
    names = {str(token): token for token in special.values()}
    smallest = len(names) + (256 if algorithm == "bpe" else 1)
    if vocab_size < smallest:
        raise ValueError(f"vocab_size {vocab_size} is too small; {algorithm} needs {smallest} or more")
    common = {"vocab_size": vocab_size, "special_tokens": [*names.values()], "show_progress": progress}
    try:
        if algorithm == "bpe":
            backend = _train_bpe(texts, common)
        else:
            backend = _train_unigram(texts, special["unk_token"], common)
    except Exception as error:  # the library raises bare Exceptions, e.g. where Unigram finds too few pieces
        vocab_too_small = "not large enough" in str(error)  # fewer than the text's characters
        remedy = "raise vocab_size" if vocab_too_small else "lower vocab_size or take more text"
        raise ValueError(f"vocab_size {vocab_size}: {algorithm} cannot be trained on this text ({error}); "
                         f"{remedy}") from error
    if "cls_token" in special:
        first, last = special["cls_token"], special["sep_token"]
        second = "$B:1 [SEP]:1" if last == "[SEP]" else f"{last} $B {last}"
        backend.post_processor = TemplateProcessing(
            single=f"{first} $A {last}", pair=f"{first} $A {last} {second}",
            special_tokens=[(token, backend.token_to_id(token)) for token in (first, last)])
    special["clean_up_tokenization_spaces"] = False  # decode() would drop spaces that the text had
    special["model_input_names"] = _choose_input_names(special, model_type)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    if len(tokenizer) != vocab_size:
        print(f"data       this text gives {len(tokenizer):,} tokens instead of the {vocab_size:,} of "
              "vocab_size: the model is built for these", file=sys.stderr, flush=True)
    return tokenizer


def _choose_special_tokens(algorithm: str, model_type: str) -> dict:
    """The special tokens of the model's family: {role: token}."""
    special = dict(FAMILIES.get(model_type, CAUSAL))
    if algorithm == "unigram" and special["unk_token"] == special.get("eos_token"):
        special["unk_token"] = "<unk>"  # only byte-level BPE knows every byte
    if "mask_token" in special:
        # The Keras example's prompts have [MASK], though its model is a RoBERTa. The tokens of words begin
        # with a space, so a mask, which stands for a word, takes the space before it.
        mask = "[MASK]" if algorithm == "unigram" else special["mask_token"]
        special["mask_token"] = AddedToken(mask, lstrip=True, special=True)
    return special


def _choose_input_names(special: dict, model_type: str) -> list[str]:
    """What a pipeline passes to the model."""
    typed = special.get("cls_token") == "[CLS]" and hasattr(CONFIG_MAPPING[model_type](), "type_vocab_size")
    return ["input_ids", *["token_type_ids"] * typed, "attention_mask"]


def _cut_long_words(texts: Iterable[str]) -> Iterator[str]:
    """Yields the texts in pieces. The time of the trainers grows with the square of a word's length."""
    for piece in (piece for text in texts for piece in split_text(text)):
        start = 0
        for word in LONG_WORD.finditer(piece):
            for end in range(word.start(), word.end(), MAX_WORD_CHARS):
                yield piece[start:end]
                start = end
        yield piece[start:]


def _train_bpe(texts: Iterable[str], common: dict) -> Tokenizer:
    backend, alphabet = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(initial_alphabet=alphabet, **common)
    backend.train_from_iterator(_cut_long_words(texts), trainer=trainer)
    return backend


def _train_unigram(texts: Iterable[str], unknown: str, common: dict) -> Tokenizer:
    """Trains a Unigram model. Its pieces are ordered by score, then by text, the same in every process.

    The library's own order changes: pieces of equal score come in the order of a hash map, and the characters
    that it adds at the end get scores by that order (the lowest score, and 0.0001 more for each). Scores also
    differ by 1e-10 between processes."""
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Sequence([normalizers.Replace(quote, '"') for quote in ("``", "''")])
    lines, words = Regex(r"[\r\n]+"), pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(lines, "isolated"), words])
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    texts = itertools.chain(["\n\n\n"], texts)  # makes "\n\n" a piece: it occurs twice here
    trainer = trainers.UnigramTrainer(unk_token=unknown, **common)
    backend.train_from_iterator(_cut_long_words(texts), trainer=trainer)
    trained, n_special = json.loads(backend.to_str())["model"], len(common["special_tokens"])
    special, pieces = trained["vocab"][:n_special], trained["vocab"][n_special:]
    lowest, scores = min(score for _, score in pieces), {}
    for piece, score in pieces:
        steps = (score - lowest) / 1e-4
        added = len(piece) == 1 and steps < len(pieces) and abs(steps - round(steps)) < 1e-4
        scores[piece] = round(lowest if added else score, 4)
    ordered = sorted(scores.items(), key=lambda item: (-item[1], item[0]))
    vocabulary = [*map(tuple, special), *ordered]
    backend.model = models.Unigram(vocabulary, trained["unk_id"], trained["byte_fallback"])
    return backend


def sample_texts(texts: Iterable[str], max_bytes: int) -> list[str]:
    """A fair sample of at most max_bytes from a stream of any length: the texts with the smallest hashes."""
    sample, size = [], 0  # sample: a heap, the largest hash first
    for text in texts:
        data = text.encode("utf-8", "replace")
        text_hash = hashlib.blake2b(data, digest_size=8, key=b"0").digest()
        heapq.heappush(sample, (-int.from_bytes(text_hash, "big"), len(data), text))
        size += len(data)
        while len(sample) > 1 and size > max_bytes:
            size -= heapq.heappop(sample)[1]
    return [text for _, _, text in sorted(sample, reverse=True)]


def sample_corpus(corpus, max_bytes: int, read_bytes: int = 0) -> tuple[list[str], Accounting]:
    """Returns (sample of at most max_bytes, counts of what was read). read_bytes: read only the beginning of
    the corpus; 0: all. ValueError if there is no text."""
    counts = Accounting()
    documents = (text for text, _, _ in clean_documents(corpus, counts))
    if read_bytes:
        documents = itertools.takewhile(lambda _: counts.bytes <= read_bytes, documents)
    texts = sample_texts(show_progress(documents, f"reading {corpus.name} for the tokenizer"), max_bytes)
    if not texts:
        raise ValueError(explain_no_text(corpus, counts))
    return texts, counts


def explain_no_text(corpus, counts: Accounting) -> str:
    """The error message for a corpus without a document to train on."""
    message = f"dataset_name {corpus.name}: none of {counts.read:,} documents is text"
    if counts.unreadable:
        message += (f": {'; '.join(counts.unreadable_names)}. Convert files that are not UTF-8, as by `iconv "
                    "-f latin1 -t utf-8`, or choose another column by --text_column")
    if counts.filtered:
        message = (f"keywords {' '.join(corpus.keywords)}: none of the {counts.read:,} documents of "
                   f"{corpus.name} contains any; give others, or --keywords none to take all documents")
    return message


def find_or_train_tokenizer(corpora: list, shares: list[float], *, vocab_size: int, algorithm: str,
                            model_type: str, cache_dir="cache", read_bytes=0) -> PreTrainedTokenizerFast:
    """The tokenizer for these corpora from the cache, or trained now, on a sample of each corpus. shares: of
    the training bytes, by corpus. read_bytes: sample only the first so many bytes of text; 0: all."""
    used = [(corpus, share) for corpus, share in zip(corpora, shares, strict=True) if share]
    content = [[corpus.fingerprint, corpus.keywords, share] for corpus, share in used]
    special = _choose_special_tokens(algorithm, model_type)
    family = {role: str(token) for role, token in special.items()}, _choose_input_names(special, model_type)
    settings = [FORMAT, content, vocab_size, algorithm, family, TRAINING_BYTES, read_bytes]
    folder = cache_path(cache_dir, "tokenizer", settings)
    with nullcontext() if folder.exists() else locked(Path(f"{folder}.lock"), folder):
        if not folder.exists():  # no other process has trained it since
            texts = []
            for corpus, share in used:
                texts += sample_corpus(corpus, int(TRAINING_BYTES * share), int(read_bytes * share))[0]
            started, size = time.monotonic(), sum(map(len, texts)) / 1e6
            print(f"data       training a {algorithm} tokenizer on {size:,.2g} M characters", flush=True)
            tokenizer = train_tokenizer(texts, algorithm, vocab_size, model_type)
            seconds = time.monotonic() - started
            print(f"data       tokenizer: {len(tokenizer):,} tokens, trained in {seconds:.0f} s", flush=True)
            with explained(f"cache_dir: {cache_dir}", "written", Exception):  # as tokenizers raises
                tokenizer.save_pretrained(f"{folder}.tmp")
            os.rename(f"{folder}.tmp", folder)
    return load_tokenizer(folder)


def main(arguments=None):
    parser = argparse.ArgumentParser("python -m data.tokens.tokenizer", description=__doc__,
                                     allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--output_dir", required=True, help="folder for AutoTokenizer.from_pretrained")
    add("--algorithm", default="bpe", choices=list(DEFAULT_MODEL_TYPES))
    add("--vocab_size", type=int, default=32_000, help="number of tokens, special tokens included")
    add("--model_type", help="decides the special tokens (default: gpt2 or roberta, by algorithm)")
    add("--max_bytes", type=int, default=TRAINING_BYTES, help="bytes of text to train on, a fair sample")
    add_source_flags(add)
    args = parser.parse_args(arguments)
    problems = check_numbers(args, vocab_size=1, max_bytes=1)
    if "://" in args.output_dir:
        problems.append(f"output_dir: {args.output_dir} is a URL; name a folder, then upload it.")
    if problems:
        raise ValueError("\n".join(problems))
    with explained(f"output_dir {args.output_dir}", "written"), suppress(FileNotFoundError):
        os.listdir(args.output_dir)  # fails now, not after training, if it is a file
    corpus = open_corpus(source_of(args))
    texts, counts = sample_corpus(corpus, args.max_bytes)
    print(f"{corpus.name}: {counts.line()}; training on {len(texts):,} of them", flush=True)
    model_type = args.model_type or DEFAULT_MODEL_TYPES[args.algorithm]
    tokenizer = train_tokenizer(texts, args.algorithm, args.vocab_size, model_type, sys.stderr.isatty())
    with explained(f"output_dir {args.output_dir}", "written", Exception):  # as tokenizers raises
        tokenizer.save_pretrained(args.output_dir)
    print(f"{len(tokenizer):,} tokens, saved in {args.output_dir}. To publish them: "
          f"hf upload user/name {args.output_dir}")


if __name__ == "__main__":
    with user_mistakes():
        main()
