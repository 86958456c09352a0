"""Turns documents into token ids, with EOS after each document. All text is tokenized here."""

import hashlib
import itertools
import json
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from tokenizers import Tokenizer

from data.documents.names import digest

BATCH_CHARS = 1 << 20  # encoded in one call, which takes about 50 MB of memory
FIRST_BATCH_CHARS = 1 << 14  # smaller, so that a run with few max_train_samples does not read far ahead
MAX_PIECE_CHARS = 1 << 20  # split_text cuts longer documents into pieces
WORD_END = re.compile(r"(?<=[^\W\d_])(?= [^\W\d_])")
WHITE_SPACE = re.compile(r"(?<=\S)(?=\s)")

ChunkKey = tuple[str, int, int]  # split, unit of the source, number of the chunk in its unit


def id_count(tokenizer) -> int:
    """1 + the largest token id; more than len(tokenizer) if ids have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def token_dtype(tokenizer) -> np.dtype:
    """uint16 if every token id fits, else uint32."""
    return np.dtype(np.uint16 if id_count(tokenizer) <= 1 << 16 else np.uint32)


def tokenizer_fingerprint(tokenizer) -> str:
    """A hash of everything that decides which token ids a text gets."""
    ends = tokenizer.eos_token_id, tokenizer.sep_token_id
    content = json.dumps([tokenizer.backend_tokenizer.to_str(), *ends])
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


class Encoder:
    """Turns text into token ids, with EOS after each document and, if the tokenizer adds one, <s> before it.

    If it has a mask token, <s> is not added here: masking adds it to each row. A special token that is
    spelled out in a text stays text, as in nanoGPT's encode_ordinary: a document that mentions <|endoftext|>
    goes on. ValueError if the tokenizer has no token that could end documents."""

    def __init__(self, tokenizer):
        self.begin, self.dtype = [], token_dtype(tokenizer)  # begin: [<s>] for Llama's, [] for GPT-2's
        self.eos = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
        if self.eos is None:
            raise ValueError(f"tokenizer_name {tokenizer.name_or_path!r} has no eos_token to end documents "
                             "with; choose another tokenizer")
        if tokenizer.mask_token_id is None:
            text_ids, ids = (tokenizer("a", add_special_tokens=add)["input_ids"] for add in (False, True))
            starts = (i for i in range(len(ids)) if ids[i : i + len(text_ids)] == text_ids)
            self.begin = ids[: next(starts, 0)]  # what comes before the text
        self.backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self.backend.no_truncation()
        self.backend.no_padding()
        special = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
        self.backend = _rename_special_pieces(self.backend, special)
        self.backend.encode_special_tokens = True

    def __call__(self, documents: Iterable[tuple]) -> Iterator[tuple]:
        """Takes (text, label) of each document and yields (token ids, label). All cores encode a batch while
        the previous batch is converted to arrays."""
        tokens, running = array("I", self.begin), None
        with ThreadPoolExecutor(1) as pool:
            for batch in itertools.chain(_make_batches(documents), [[]]):
                texts = [text for text, *_ in batch]
                encode = partial(self.backend.encode_batch_fast, texts, add_special_tokens=False)
                previous, running = running, (batch, pool.submit(encode))
                pieces, encodings = (previous[0], previous[1].result()) if previous else ((), ())
                for (_, last, label), encoding in zip(pieces, encodings, strict=True):
                    tokens.extend(encoding.ids)
                    if last:
                        tokens.append(self.eos)
                        yield np.array(tokens, self.dtype), label
                        tokens = array("I", self.begin)


def _rename_special_pieces(backend: Tokenizer, special: list[int]) -> Tokenizer:
    """In a Unigram vocabulary special tokens are ordinary pieces and would match a literal "<s>" in a text.
    They are renamed to Unicode noncharacters, which no text contains."""
    content = json.loads(backend.to_str())
    if content["model"]["type"] != "Unigram":
        return backend
    names = {token["id"]: token["content"] for token in content["added_tokens"]}
    for i in special:
        if i < len(content["model"]["vocab"]):
            content["model"]["vocab"][i][0] = f"\U0010fffe{i}\U0010fffe"
            names.pop(i, None)
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] in names]
    return Tokenizer.from_str(json.dumps(content))


def _make_batches(documents: Iterable[tuple]) -> Iterator[list[tuple]]:
    """Yields batches of about BATCH_CHARS. A batch is a list of (piece of a document, is it the document's
    last piece, label of the document)."""
    batch, size, done = [], 0, 0
    for text, label in documents:
        *pieces, end = split_text(text)
        for piece, last in [*((piece, False) for piece in pieces), (end, True)]:
            if size >= min(BATCH_CHARS, max(FIRST_BATCH_CHARS, done // 8)):
                yield batch
                batch, size, done = [], 0, done + size
            batch.append((piece, last, label))
            size += len(piece)
    if batch:
        yield batch


def split_text(text: str, longest=MAX_PIECE_CHARS) -> Iterator[str]:
    """Cuts a long document into pieces, to bound the memory.

    It cuts before a space between two letters, where every common pre-tokenizer cuts, too, so the tokens stay
    the same. If 64 Ki characters have no such space, it cuts at other white space, or anywhere. There, and
    with tokenizers that put a space before every text, the tokens can differ."""
    start = 0
    while len(text) - start > longest:
        low, high = start + longest, start + longest + (1 << 16)
        space = WORD_END.search(text, low, high) or WHITE_SPACE.search(text, low, high)
        cut = space.start() if space else low
        yield text[start:cut]
        start = cut
    yield text[start:]


class TokenMaker:
    """Turns documents into the token ids of a shard. PairMaker makes sentence pairs of them instead."""

    kind = "rows"  # in the manifest, and the beginning of the folder's name in the cache
    width = 1  # the number of tokens in a shard is a multiple of this
    no_row = ""  # the end of the message if a text gives no row; "": the general message

    def __init__(self, tokenizer):
        self.tokenizer, self.encoder = tokenizer, Encoder(tokenizer)
        self.dtype = self.encoder.dtype
        # These change no token id, but are saved with each model.
        saved = digest(str(tokenizer.chat_template), str(tokenizer.special_tokens_map))
        self.settings = {"tokenizer": tokenizer_fingerprint(tokenizer), "begin": self.encoder.begin,
                         "kept": saved}

    def __call__(self, documents: Iterable[tuple[str, str]], key: ChunkKey) -> Iterator[tuple]:
        """Takes (text, split) of a chunk's documents and yields (split, token ids), many times per split."""
        for ids, split in self.encoder(documents):
            yield split, ids

    def count_tokens(self, tokens: dict[str, np.ndarray], counts: dict) -> None:
        """Notes the number of tokens of a chunk in the counts of each split."""
        for split, ids in tokens.items():
            counts[split].tokens = len(ids)

    def lost_share(self, texts: list[str]) -> float:
        """The share of the characters of these texts that are missing after encoding and decoding, as they
        became the unknown token or nothing. White space and upper or lower case are ignored."""
        characters, lost, skipped = 0, 0, len(self.encoder.begin)
        for ids, text in self.encoder((text, text) for text in texts):
            known = [i for i in ids[skipped:-1].tolist() if i != self.tokenizer.unk_token_id]
            before = Counter("".join(text.casefold().split()))
            characters += before.total()
            lost += (before - Counter(self.tokenizer.decode(known).casefold())).total()
        return lost / max(characters, 1)
