"""Load a tokenizer, or train one: byte-level BPE, Unigram or WordPiece.

    python -m data.tokenizer --output_dir my-tokenizer                               # BPE on the installed
    Python python -m data.tokenizer --algorithm unigram --model_type roberta --vocab_size 32000 \\
        --dataset_name Salesforce/wikitext --dataset_config_name wikitext-103-raw-v1 --output_dir my-tokenizer
"""

import argparse
import hashlib
import heapq
import itertools
import os
import re
import sys
from collections.abc import Iterable, Iterator

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from data.corpus import load_corpus
from data.filters import Accounting, clean_documents, show_progress

TRAINING_BYTES = 100_000_000  # of text a tokenizer is trained on
LONGEST_PIECE = 1 << 20  # characters: a longer document is encoded in pieces, see split_text
BETWEEN_WORDS = re.compile(r"(?<=[^\W\d_])(?= [^\W\d_])")
SPACE = re.compile(r"(?<=\S)(?=\s)")

# Special tokens by model family, in the order of their ids: the ids that the families' model configurations
# expect.
ROBERTA = {
    "bos_token": "<s>",
    "pad_token": "<pad>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "cls_token": "<s>",
    "sep_token": "</s>",
    "mask_token": AddedToken("<mask>", lstrip=True, special=True),
}
BERT = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
CAUSAL = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
FAMILIES = {
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert"), ROBERTA),
    **dict.fromkeys(("bert", "distilbert", "electra", "mobilebert"), BERT),
}


def load_tokenizer(name_or_path) -> PreTrainedTokenizerFast:
    """A tokenizer of the Hub or of a folder. ValueError where there is none, or none of the tokenizers
    library."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(name_or_path))
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"tokenizer_name {str(name_or_path)!r} cannot be loaded: {str(error).strip()}\n  Remedies: check the"
            " name, the network and your login, or leave it empty to train a tokenizer on the corpus."
        ) from error
    if not tokenizer.is_fast:
        raise ValueError(
            f"tokenizer_name {str(name_or_path)!r} has no tokenizer.json: choose one with a fast version"
        )
    return tokenizer


def train_tokenizer(
    texts: Iterable[str], algorithm: str, vocab_size: int, model_type: str, progress=False
) -> PreTrainedTokenizerFast:
    """Train on texts, with the special tokens of the model's family: RoBERTa's (pad id 1, as its
    configuration and its position ids expect), BERT's (pad id 0), or <|endoftext|> for causal models.

    bpe: byte-level, GPT-2's; round-trips any text. unigram: as in transformers' Keras TPU example.
    wordpiece: BERT's, cased. Says so when the texts do not give vocab_size tokens. Raises ValueError."""
    if algorithm not in ("bpe", "unigram", "wordpiece"):
        raise ValueError(f"algorithm {algorithm!r} is unknown: choose bpe, unigram or wordpiece")
    special = dict(FAMILIES.get(model_type, CAUSAL))
    if special["unk_token"] == "<|endoftext|>" and algorithm != "bpe":
        special["unk_token"] = (
            "<unk>"  # byte-level BPE knows every byte, the others need a token for the unknown
        )
    names = {str(token): token for token in special.values()}
    smallest = len(names) + (256 if algorithm == "bpe" else 1)
    if vocab_size < smallest:
        raise ValueError(f"vocab_size {vocab_size} is too small: {algorithm} needs at least {smallest}")
    backend, trainer = _untrained(
        algorithm, vocab_size, list(names.values()), str(special["unk_token"]), progress
    )
    pieces = (piece for text in texts for piece in split_text(text))
    try:
        backend.train_from_iterator(pieces, trainer=trainer)
    except (
        Exception
    ) as error:  # the library raises bare Exception, for example when Unigram finds too few pieces
        raise ValueError(
            f"vocab_size {vocab_size}: the {algorithm} tokenizer could not be trained ({error}). Lower it or"
            " read more text."
        ) from error
    _add_template(backend, special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **special
    )
    if len(tokenizer) != vocab_size:
        print(
            f"warning: vocab_size {vocab_size:,} was asked for, the text gave {len(tokenizer):,}: "
            + (
                "the model is built for that number"
                if len(tokenizer) < vocab_size
                else "its alphabet is that large"
            ),
            file=sys.stderr,
        )
    return tokenizer


def _untrained(algorithm, vocab_size, special_tokens, unknown, progress):
    common = {"vocab_size": vocab_size, "special_tokens": special_tokens, "show_progress": progress}
    if algorithm == "bpe":
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        return backend, trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **common)
    if algorithm == "unigram":
        backend = Tokenizer(models.Unigram())
        backend.normalizer = normalizers.Sequence(
            [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
        )
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.decoder = decoders.Metaspace()
        return backend, trainers.UnigramTrainer(unk_token=unknown, **common)
    backend = Tokenizer(models.WordPiece(unk_token=unknown))
    backend.normalizer = normalizers.BertNormalizer(lowercase=False)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend, trainers.WordPieceTrainer(**common)


def _add_template(backend, special):
    if "cls_token" not in special:
        return
    cls, sep = special["cls_token"], special["sep_token"]
    pair = f"{cls} $A {sep} $B:1 {sep}:1" if cls == "[CLS]" else f"{cls} $A {sep} {sep} $B {sep}"
    backend.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}",
        pair=pair,
        special_tokens=[(token, backend.token_to_id(token)) for token in (cls, sep)],
    )


def split_text(text: str, longest=LONGEST_PIECE) -> Iterator[str]:
    """A long document in pieces, so that encoding one of 50 MB takes no more memory than any other batch.

    The cut is made before a space between two letters, where every common pre-tokenizer (byte-level,
    Metaspace, BERT) cuts too, so the tokens stay the same; only a text with 64 Ki characters without such a
    place is cut before other white space or, failing that, anywhere, and then a token or two around the cut
    can differ."""
    start = 0
    while len(text) - start > longest:
        low, high = start + longest, min(start + longest + (1 << 16), len(text))
        found = BETWEEN_WORDS.search(text, low, high) or SPACE.search(text, low, high)
        cut = found.start() if found else low
        yield text[start:cut]
        start = cut
    yield text[start:]


def sample_texts(texts: Iterable[str], max_bytes: int, max_documents: int = 0, seed: int = 0) -> list[str]:
    """A fair sample of a stream of any length, in memory of max_bytes: every document has the same chance,
    wherever it stands. Documents draw a number from their content and the seed; those with the smallest are
    kept. The order is that of the numbers, so the same documents give the same sample. max_documents 0: no
    such bound."""
    heap, size = [], 0  # largest number first
    for text in texts:
        data = text.encode("utf-8", "replace")
        number = hashlib.blake2b(data, digest_size=8, key=str(seed).encode()).digest()
        rank = -int.from_bytes(number, "big")
        if heap and size >= max_bytes and rank < heap[0][0]:
            continue
        heapq.heappush(heap, (rank, len(data), text))
        size += len(data)
        while len(heap) > 1 and (size > max_bytes or 0 < max_documents < len(heap)):
            size -= heapq.heappop(heap)[1]
    return [text for _, _, text in sorted(heap, reverse=True)]


def keytoken_ids(tokenizer, keywords: Iterable[str]) -> tuple[list[int], list[str]]:
    """Token ids of keywords, with and without a leading space, and the spellings of them that are not one
    token."""
    ids, missing = {}, []
    for keyword in keywords:
        for spelling in (keyword.strip(), " " + keyword.strip()):
            found = tokenizer(spelling, add_special_tokens=False)["input_ids"]
            if len(found) == 1 and found[0] != tokenizer.unk_token_id:
                ids[found[0]] = spelling
            else:
                missing.append(spelling)
    return list(ids), missing


def main(arguments=None):
    parser = argparse.ArgumentParser(
        prog="python -m data.tokenizer",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--output_dir", required=True, help="where the tokenizer is saved; AutoTokenizer loads it from there")
    add("--algorithm", default="bpe", choices=("bpe", "unigram", "wordpiece"))
    add(
        "--model_type",
        default="",
        help="decides the special tokens; default: gpt2, roberta or bert by algorithm",
    )
    add("--vocab_size", type=int, default=32_000, help="tokens, special ones included")
    add("--dataset_name", default="installed-python", help="any source that data/corpus.py knows")
    add("--dataset_config_name")
    add("--split", default="train")
    add("--text_column", help="default: content or text")
    add("--streaming", action="store_true", help="read a Hub data set while it downloads")
    add("--keywords", nargs="*", default=[], help="only documents with any of these")
    add(
        "--max_bytes",
        type=int,
        default=TRAINING_BYTES,
        help="of text to train on, a fair sample of what is read",
    )
    add("--max_documents", type=int, default=0, help="to train on, 0 = no bound")
    add(
        "--read_documents",
        type=int,
        default=0,
        help="stop reading the source after so many, 0 = read all of it",
    )
    add("--seed", type=int, default=0, help="of the sample")
    add("--push_to_hub", action="store_true")
    add("--hub_model_id", help="user/name; default: the name of output_dir")
    add("--hub_private_repo", action="store_true")
    args = parser.parse_args(arguments)
    corpus = load_corpus(
        args.dataset_name,
        dataset_config_name=args.dataset_config_name,
        split=args.split,
        text_column=args.text_column,
        streaming=args.streaming,
    )
    counts = Accounting()
    documents = show_progress(
        clean_documents(corpus, args.keywords, counts), counts, f"reading {corpus.name}"
    )
    documents = itertools.takewhile(lambda _: not 0 < args.read_documents < counts.read, documents)
    texts = sample_texts(
        (d[corpus.text_column] for d in documents), args.max_bytes, args.max_documents, args.seed
    )
    print(counts.table(corpus.name), f"training on {len(texts):,} documents", sep="\n", flush=True)
    if not texts:
        raise ValueError(
            f"dataset_name {corpus.name}: no text is left to train on; check keywords {args.keywords}"
        )
    usual = {"bpe": "gpt2", "unigram": "roberta", "wordpiece": "bert"}[args.algorithm]
    tokenizer = train_tokenizer(
        texts, args.algorithm, args.vocab_size, args.model_type or usual, progress=True
    )
    tokenizer.save_pretrained(args.output_dir)
    print(f"{len(tokenizer):,} tokens, saved in {args.output_dir}")
    if args.push_to_hub:
        name = args.hub_model_id or os.path.basename(os.path.abspath(args.output_dir))
        tokenizer.push_to_hub(name, private=args.hub_private_repo or None)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
