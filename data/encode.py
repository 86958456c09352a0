"""Documents to token ids, with EOS after each. All text is tokenized here."""

import hashlib
import itertools
import json
import re
from array import array
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

BATCH_CHARACTERS = 1 << 20  # encoded in one call, which takes about 50 MB
LEAST_CHARACTERS = 1 << 14  # in the first batches, so that a sample of a corpus reads little too much
LONGEST_PIECE = 1 << 20  # characters; longer documents are cut, see split_text
BETWEEN_WORDS = re.compile(r"(?<=[^\W\d_])(?= [^\W\d_])")
SPACE = re.compile(r"(?<=\S)(?=\s)")
NO_LEAD = {"add_prefix_space": False, "prepend_scheme": "never", "prepend": ""}  # of tokenizer.json


def id_count(tokenizer) -> int:
    """1 + the largest token id, which is more than len(tokenizer) where ids have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def token_dtype(tokenizer) -> np.dtype:
    """uint16 where every token id fits, else uint32."""
    return np.dtype(np.uint16 if id_count(tokenizer) <= 1 << 16 else np.uint32)


def tokenizer_fingerprint(tokenizer) -> str:
    """A hash that changes with anything that shapes token ids."""
    ends = tokenizer.eos_token_id, tokenizer.sep_token_id
    content = json.dumps([tokenizer.backend_tokenizer.to_str(), *ends])
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Encoder:
    """The part of a tokenizer that turns text into ids. It pickles and does not need transformers."""

    content: str  # of tokenizer.json
    eos: int  # id that ends a document
    dtype: str

    @classmethod
    def of(cls, tokenizer) -> "Encoder":
        """ValueError where the tokenizer has no token that could end documents."""
        eos = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
        if eos is None:
            raise ValueError(f"tokenizer_name {tokenizer.name_or_path!r} has no eos_token to end documents "
                             "with; choose another tokenizer")
        return cls(tokenizer.backend_tokenizer.to_str(), eos, token_dtype(tokenizer).str)


def tokenize_documents(documents: Iterable[tuple], encoder: Encoder, fim=None) -> Iterator[tuple]:
    """(text, note) of each document -> (its token ids with EOS, note). A text may be the list of pieces that
    `fim` (FillInMiddle) returns. One batch is encoded, on all cores, while the one before is converted.

    Special tokens that are spelled out in a text stay text, as with nanoGPT's encode_ordinary: a document
    does not end where it mentions <|endoftext|>."""
    backends, tokens, running = _backends(encoder, fim), array("I"), None
    with ThreadPoolExecutor(1) as pool:
        for batch in itertools.chain(_batches(documents), [[]]):
            previous, running = running, pool.submit(_encode, batch, backends)
            for (_, _, ids, last, note), encoding in previous.result() if previous else ():
                tokens.extend(ids)
                tokens.extend(encoding.ids)
                if last:
                    tokens.append(encoder.eos)
                    yield np.array(tokens, encoder.dtype), note
                    del tokens[:]


def _encode(batch: list[list], backends: list[Tokenizer]) -> list[tuple]:
    """(piece, its encoding) of each piece, by the backend for its place in the document."""
    encodings = []
    for backend, place in zip(backends, (False, True), strict=True):
        texts = [text for text, inside, *_ in batch if inside == place]
        encodings.append(iter(backend.encode_batch_fast(texts, add_special_tokens=False)))
    return [(piece, next(encodings[piece[1]])) for piece in batch]


def _backends(encoder: Encoder, fim) -> list[Tokenizer]:
    """One backend for pieces that begin a document, one for pieces inside it, which adds no leading space."""
    backend = Tokenizer.from_str(encoder.content)
    backend.no_truncation()
    backend.no_padding()
    if fim:  # some tokenizers do not mark them as special, and would encode them where a text mentions them
        backend.add_special_tokens(list(fim.tokens))
    content = json.loads(backend.to_str())
    for part in ("normalizer", "pre_tokenizer"):
        content[part] = json.loads(json.dumps(content[part]), object_hook=_without_lead)
    backends = [backend, Tokenizer.from_str(json.dumps(content))]
    for backend in backends:
        backend.encode_special_tokens = True
    return backends


def _without_lead(entries: dict) -> dict:
    return {name: NO_LEAD.get(name, value) for name, value in entries.items()}


def _batches(documents: Iterable[tuple]) -> Iterator[list[list]]:
    """Batches of about BATCH_CHARACTERS. Each piece is [text, whether it begins inside its document, ids to
    put before it, whether it ends its document, the document's note]."""
    batch, size, done = [], 0, 0
    for text, note in documents:
        for before, part, inside in [([], text, False)] if isinstance(text, str) else text:
            for piece in split_text(part):
                if size >= min(BATCH_CHARACTERS, max(LEAST_CHARACTERS, done // 8)):
                    yield batch
                    batch, size, done = [], 0, done + size
                batch.append([piece, inside, before, False, note])
                before, inside, size = [], True, size + len(piece)
        batch[-1][3] = True
    if batch:
        yield batch


def split_text(text: str, longest=LONGEST_PIECE) -> Iterator[str]:
    """Cuts a long document into pieces, to bound the memory. It cuts before a space between two letters,
    where every common pre-tokenizer cuts, too, so the tokens stay the same. Where 64 Ki characters have no
    such space, it cuts at other white space, or anywhere; there the tokens can differ."""
    start = 0
    while len(text) - start > longest:
        low, high = start + longest, start + longest + (1 << 16)
        space = BETWEEN_WORDS.search(text, low, high) or SPACE.search(text, low, high)
        cut = space.start() if space else low
        yield text[start:cut]
        start = cut
    yield text[start:]
