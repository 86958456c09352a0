"""Documents to token ids, EOS after each: the only place where text is tokenized."""

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

BATCH_CHARACTERS = 1 << 20  # encoded in one call; the encodings of one batch take about 50 MB
LEAST_CHARACTERS = 1 << 14  # of the first batches, so that a sample of a corpus reads little ahead
LONGEST_PIECE = 1 << 20  # characters: longer documents are cut, see split_text
BETWEEN_WORDS = re.compile(r"(?<=[^\W\d_])(?= [^\W\d_])")
SPACE = re.compile(r"(?<=\S)(?=\s)")
NO_LEAD = {"add_prefix_space": False, "prepend_scheme": "never", "prepend": ""}  # of tokenizer.json


def id_count(tokenizer) -> int:
    """1 + the largest token id: more than len(tokenizer) where ids have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def token_dtype(tokenizer) -> np.dtype:
    """uint16 where every token id fits, else uint32."""
    return np.dtype(np.uint16 if id_count(tokenizer) <= 1 << 16 else np.uint32)


def tokenizer_fingerprint(tokenizer) -> str:
    """Changes with anything that shapes token ids."""
    ends = tokenizer.eos_token_id, tokenizer.sep_token_id
    content = json.dumps([tokenizer.backend_tokenizer.to_str(), *ends])
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Encoder:
    """What makes token ids of text, of a tokenizer: it pickles, and needs no transformers."""

    content: str  # of tokenizer.json
    eos: int  # ends a document
    dtype: str

    @classmethod
    def of(cls, tokenizer) -> "Encoder":
        """ValueError where the tokenizer has no token to end documents with."""
        eos = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
        if eos is None:
            raise ValueError(f"tokenizer_name {tokenizer.name_or_path!r} has no eos_token to end documents "
                             "with; choose another tokenizer")
        return cls(tokenizer.backend_tokenizer.to_str(), eos, token_dtype(tokenizer).str)


def tokenize_documents(documents: Iterable[tuple], encoder: Encoder, fim=None) -> Iterator[tuple]:
    """(text, note) of each document -> (its token ids, with EOS, note). A text may be the pieces that `fim`
    (FillInMiddle) has made of it. One batch is encoded, on all cores, while the one before is converted.

    Special tokens written out in a text are text, as with nanoGPT's encode_ordinary: a document that
    mentions <|endoftext|> does not end there."""
    backends, tokens, running = _backends(encoder, fim), array("I"), None
    with ThreadPoolExecutor(1) as pool:
        for batch in itertools.chain(_batches(documents), [[]]):
            before, running = running, pool.submit(_encode, batch, backends)
            for (_, _, ids, last, note), encoding in before.result() if before else ():
                tokens.extend(ids)
                tokens.extend(encoding.ids)
                if last:
                    tokens.append(encoder.eos)
                    yield np.array(tokens, encoder.dtype), note
                    del tokens[:]


def _encode(batch: list[list], backends: list[Tokenizer]) -> list[tuple]:
    """(piece, its encoding by the backend for its place) of each piece."""
    chosen = [[text for text, inside, *_ in batch if inside == place] for place in (False, True)]
    encoded = [iter(backend.encode_batch_fast(texts, add_special_tokens=False))
               for backend, texts in zip(backends, chosen, strict=True)]  # fmt: skip
    return [(piece, next(encoded[piece[1]])) for piece in batch]


def _backends(encoder: Encoder, fim) -> list[Tokenizer]:
    """For pieces that begin a document, and for pieces from inside one, which no space comes before."""
    backend = Tokenizer.from_str(encoder.content)
    backend.no_truncation()
    backend.no_padding()
    if fim:  # in some tokenizers they are not special: a document that mentions them holds text
        backend.add_special_tokens(list(fim.tokens))
    content = json.loads(backend.to_str())
    for part in ("normalizer", "pre_tokenizer"):
        content[part] = json.loads(json.dumps(content[part]), object_hook=lambda entries: {
            name: NO_LEAD.get(name, value) for name, value in entries.items()})
    backends = [backend, Tokenizer.from_str(json.dumps(content))]
    for backend in backends:
        backend.encode_special_tokens = True
    return backends


def _batches(documents: Iterable[tuple]) -> Iterator[list[list]]:
    """About BATCH_CHARACTERS at a time: [text, whether it begins inside its document, the ids before it,
    whether it ends its document, the document's note] of each piece."""
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
    """A long document in pieces, which bound the memory. Every common pre-tokenizer cuts before a space
    between two letters, too, so the tokens stay the same. A text without one in 64 Ki characters is cut at
    other white space or anywhere: tokens there can differ."""
    start = 0
    while len(text) - start > longest:
        low, high = start + longest, start + longest + (1 << 16)
        found = BETWEEN_WORDS.search(text, low, high) or SPACE.search(text, low, high)
        cut = found.start() if found else low
        yield text[start:cut]
        start = cut
    yield text[start:]
