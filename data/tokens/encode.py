"""Documents to token ids, as the tokenizer makes them, with EOS after each. All text is tokenized here."""

import hashlib
import itertools
import json
import re
from array import array
from collections import Counter
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
    """The part of a tokenizer that turns text into ids."""

    content: str  # of tokenizer.json
    begin: tuple[int, ...]  # ids that begin a document: <s> for Llama's tokenizer, none for GPT-2's
    eos: int  # id that ends it
    dtype: str
    special: tuple[int, ...]  # ids that no text gets

    @classmethod
    def of(cls, tokenizer) -> "Encoder":
        """ValueError where the tokenizer has no token that could end documents.

        Tokenizers with a mask token begin no document: rows of masked LM get <s> when they are masked."""
        eos = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
        if eos is None:
            raise ValueError(f"tokenizer_name {tokenizer.name_or_path!r} has no eos_token to end documents "
                             "with; choose another tokenizer")
        begin, special = (), {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        if tokenizer.mask_token_id is None:
            bare, whole = (tokenizer("a", add_special_tokens=add)["input_ids"] for add in (False, True))
            begin = tuple(whole[: len(whole) - len(bare)]) if whole[len(whole) - len(bare) :] == bare else ()
        content = tokenizer.backend_tokenizer.to_str()
        return cls(content, begin, eos, token_dtype(tokenizer).str, tuple(sorted(special)))


def tokenize_documents(documents: Iterable[tuple], encoder: Encoder) -> Iterator[tuple]:
    """(text, note) of each document -> (its token ids with EOS, note). One batch is encoded, on all cores,
    while the one before is converted.

    Special tokens that are spelled out in a text stay text, as with nanoGPT's encode_ordinary: a document
    does not end where it mentions <|endoftext|>."""
    backends, tokens, running = _backends(encoder), array("I", encoder.begin), None
    with ThreadPoolExecutor(1) as pool:
        for batch in itertools.chain(_batches(documents), [[]]):
            previous, running = running, pool.submit(_encode, batch, backends)
            for (_, _, last, note), encoding in previous.result() if previous else ():
                tokens.extend(encoding.ids)
                if last:
                    tokens.append(encoder.eos)
                    yield np.array(tokens, encoder.dtype), note
                    tokens = array("I", encoder.begin)


def _encode(batch: list[list], backends: list[Tokenizer]) -> list[tuple]:
    """(piece, its encoding) of each piece, by the backend for its place in the document."""
    encodings = []
    for backend, place in zip(backends, (False, True), strict=True):
        texts = [text for text, inside, *_ in batch if inside == place]
        encodings.append(iter(backend.encode_batch_fast(texts, add_special_tokens=False)))
    return [(piece, next(encodings[piece[1]])) for piece in batch]


def _backends(encoder: Encoder) -> list[Tokenizer]:
    """One backend for pieces that begin a document, one for pieces inside it, which adds no leading space."""
    backend = Tokenizer.from_str(encoder.content)
    backend.no_truncation()
    backend.no_padding()
    content = _without_special_pieces(json.loads(backend.to_str()), encoder.special)
    first = Tokenizer.from_str(json.dumps(content))
    for part in ("normalizer", "pre_tokenizer"):
        content[part] = json.loads(json.dumps(content[part]), object_hook=_without_lead)
    backends = [first, Tokenizer.from_str(json.dumps(content))]
    for backend in backends:
        backend.encode_special_tokens = True
    return backends


def _without_special_pieces(content: dict, special: tuple[int, ...]) -> dict:
    """A Unigram model holds special tokens as pieces, which it finds in text. There they get names that no
    text has, of noncharacters of Unicode."""
    model = content["model"]
    if model["type"] == "Unigram":
        names = {token["id"]: token["content"] for token in content["added_tokens"]}
        for i in special:
            if i < len(model["vocab"]):
                model["vocab"][i][0] = f"\U0010fffe{i}\U0010fffe"
                names.pop(i, None)
        content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] in names]
    return content


def _without_lead(entries: dict) -> dict:
    return {name: NO_LEAD.get(name, value) for name, value in entries.items()}


def _batches(documents: Iterable[tuple]) -> Iterator[list[list]]:
    """Batches of about BATCH_CHARACTERS. Each piece is [text, whether it begins inside its document, whether
    it ends its document, the document's note]."""
    batch, size, done = [], 0, 0
    for text, note in documents:
        inside = False
        for piece in split_text(text):
            if size >= min(BATCH_CHARACTERS, max(LEAST_CHARACTERS, done // 8)):
                yield batch
                batch, size, done = [], 0, done + size
            batch.append([piece, inside, False, note])
            inside, size = True, size + len(piece)
        batch[-1][2] = True
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


def lost_shares(tokenizer, texts: list[str]) -> tuple[float, float]:
    """(share of the tokens of these texts that are unknown, share of the characters other than white space
    that do not come back when the tokens are decoded; another case counts as the same)."""
    encoder, tokens, unknown, characters, lost = Encoder.of(tokenizer), 0, 0, 0, 0
    for ids, text in tokenize_documents(((text, text) for text in texts), encoder):
        ids = ids[len(encoder.begin) : -1].tolist()
        known = [i for i in ids if i != tokenizer.unk_token_id]
        tokens, unknown = tokens + len(ids), unknown + len(ids) - len(known)
        before = Counter("".join(text.casefold().split()))
        characters += before.total()
        lost += (before - Counter(tokenizer.decode(known).casefold())).total()
    return unknown / max(tokens, 1), lost / max(characters, 1)
