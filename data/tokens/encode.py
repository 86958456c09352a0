"""Documents to token ids, as the tokenizer makes them, with EOS after each. All text is tokenized here."""

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

BATCH_CHARACTERS = 1 << 20  # encoded in one call, which takes about 50 MB
LEAST_CHARACTERS = 1 << 14  # in the first batches, so that a sample of a corpus reads little too much
LONGEST_PIECE = 1 << 20  # characters; longer documents are cut, see split_text
BETWEEN_WORDS = re.compile(r"(?<=[^\W\d_])(?= [^\W\d_])")
SPACE = re.compile(r"(?<=\S)(?=\s)")

ChunkKey = tuple[str, int, int]  # of a chunk of documents: split, unit, number


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


class Encoder:
    """Turns text into token ids as a tokenizer does, with EOS after each document. ValueError: it has no
    token that could end documents.

    Tokenizers with a mask token begin no document: rows of masked LM get <s> when they are masked. Special
    tokens that are spelled out in a text stay text, as with nanoGPT's encode_ordinary: a document does not
    end where it mentions <|endoftext|>."""

    def __init__(self, tokenizer):
        self.begin, self.dtype = [], token_dtype(tokenizer)  # begin: <s> for Llama's, nothing for GPT-2's
        self.eos = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
        if self.eos is None:
            raise ValueError(f"tokenizer_name {tokenizer.name_or_path!r} has no eos_token to end documents "
                             "with; choose another tokenizer")
        if tokenizer.mask_token_id is None:
            bare, whole = (tokenizer("a", add_special_tokens=add)["input_ids"] for add in (False, True))
            starts = (i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)  # it may also end it
            self.begin = whole[: next(starts, 0)]
        self.backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self.backend.no_truncation()
        self.backend.no_padding()
        special = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
        self.backend = _without_special_pieces(self.backend, special)
        self.backend.encode_special_tokens = True

    def __call__(self, documents: Iterable[tuple]) -> Iterator[tuple]:
        """(text, note) of each document -> (its token ids, note). One batch is encoded, on all cores, while
        the one before is converted."""
        tokens, running = array("I", self.begin), None
        with ThreadPoolExecutor(1) as pool:
            for batch in itertools.chain(_batches(documents), [[]]):
                texts = [text for text, *_ in batch]
                encode = partial(self.backend.encode_batch_fast, texts, add_special_tokens=False)
                previous, running = running, (batch, pool.submit(encode))
                pieces, encodings = (previous[0], previous[1].result()) if previous else ((), ())
                for (_, last, note), encoding in zip(pieces, encodings, strict=True):
                    tokens.extend(encoding.ids)
                    if last:
                        tokens.append(self.eos)
                        yield np.array(tokens, self.dtype), note
                        tokens = array("I", self.begin)


def _without_special_pieces(backend: Tokenizer, special: list[int]) -> Tokenizer:
    """A Unigram model holds special tokens as pieces, which it finds in text. There they get names that no
    text has, of noncharacters of Unicode."""
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


def _batches(documents: Iterable[tuple]) -> Iterator[list[tuple]]:
    """Batches of about BATCH_CHARACTERS: (text, whether it ends its document, the document's note) of each
    piece of a document."""
    batch, size, done = [], 0, 0
    for text, note in documents:
        *pieces, end = split_text(text)
        for piece, last in [*((piece, False) for piece in pieces), (end, True)]:
            if size >= min(BATCH_CHARACTERS, max(LEAST_CHARACTERS, done // 8)):
                yield batch
                batch, size, done = [], 0, done + size
            batch.append((piece, last, note))
            size += len(piece)
    if batch:
        yield batch


def split_text(text: str, longest=LONGEST_PIECE) -> Iterator[str]:
    """Cuts a long document into pieces, to bound the memory. It cuts before a space between two letters,
    where every common pre-tokenizer cuts, too, so the tokens stay the same. Where 64 Ki characters have no
    such space, it cuts at other white space, or anywhere; there, and with tokenizers that put a space before
    every text, the tokens can differ."""
    start = 0
    while len(text) - start > longest:
        low, high = start + longest, start + longest + (1 << 16)
        space = BETWEEN_WORDS.search(text, low, high) or SPACE.search(text, low, high)
        cut = space.start() if space else low
        yield text[start:cut]
        start = cut
    yield text[start:]


class TokenMaker:
    """Turns documents into tokens."""

    cache = kind = "rows"  # prefix of the folder in the cache; of the manifest
    width, no_row = 1, ""  # files hold multiples of so many tokens; what to tell where text gives no row

    def __init__(self, tokenizer):
        self.tokenizer, self.encoder = tokenizer, Encoder(tokenizer)
        self.dtype = self.encoder.dtype
        kept = str(tokenizer.chat_template), str(tokenizer.special_tokens_map)  # saved with each model
        self.settings = {"tokenizer": tokenizer_fingerprint(tokenizer), "begin": self.encoder.begin,
                         "kept": digest(*kept)}

    def __call__(self, documents: Iterable[tuple[str, str]], key: ChunkKey) -> Iterator[tuple]:
        """(text, split) of the documents of a chunk -> (split, token ids), several times per split."""
        for ids, split in self.encoder(documents):
            yield split, ids

    def account(self, tokens: dict[str, np.ndarray], counts: dict) -> None:
        """Adds the tokens of a chunk to the counts of their splits."""
        for split, ids in tokens.items():
            counts[split].tokens = len(ids)

    def lost_share(self, texts: list[str]) -> float:
        """The share of the characters of these texts that do not come back when the tokens are decoded,
        without those for unknown text. White space is not counted; another case counts as the same."""
        characters, lost, skipped = 0, 0, len(self.encoder.begin)
        for ids, text in self.encoder((text, text) for text in texts):
            known = [i for i in ids[skipped:-1].tolist() if i != self.tokenizer.unk_token_id]
            before = Counter("".join(text.casefold().split()))
            characters += before.total()
            lost += (before - Counter(self.tokenizer.decode(known).casefold())).total()
        return lost / max(characters, 1)
