"""Fill-in-the-middle (arXiv 2207.14255): reorders documents so that a causal model learns to write the text
between two others. A document is cut at two random characters and written in one of two orders:

    PSM   <PRE> prefix <SUF> suffix <MID> middle EOS
    SPM   <PRE> <SUF> suffix <MID> prefix middle EOS     (the paper's variant 2, StarCoder's and Code Llama's)
"""

import hashlib
import struct
from dataclasses import dataclass

# <PRE>, <SUF> and <MID> in the tokenizers of code models.
NAMES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma, and tokenizers trained here
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
)


@dataclass(frozen=True)
class FillInMiddle:
    """Which documents are cut, where and in which order: a function of (seed, text) alone."""

    rate: float  # probability that a document is cut
    seed: int
    tokens: tuple[str, str, str]  # <PRE>, <SUF>, <MID>
    ids: tuple[int, int, int]

    def __call__(self, text: str) -> str | list[tuple[list[int], str, bool]]:
        """The text itself, or its pieces: (ids before it, text, whether it begins inside the document). Each
        piece is tokenized by itself, as the text before and after the cursor is when a model fills in."""
        key = f"fim {self.seed}".encode()
        digest = hashlib.blake2b(text.encode(), digest_size=32, key=key).digest()
        chosen, order, *places = struct.unpack("<4Q", digest)  # four uniform numbers below 2**64
        if chosen >= self.rate * 2**64:
            return text
        start, end = sorted(place * (len(text) + 1) >> 64 for place in places)
        prefix, middle, suffix = text[:start], text[start:end], text[end:]
        pre, suf, mid = self.ids
        if order % 2:
            return [([pre], prefix, False), ([suf], suffix, True), ([mid], middle, True)]
        return [([pre, suf], suffix, True), ([mid], prefix, False), ([], middle, True)]


def fill_in_middle(rate: float, seed: int, tokenizer) -> FillInMiddle | None:
    """None where the rate is 0. ValueError where the tokenizer lacks the three tokens."""
    known = tokenizer.get_vocab() if rate else {}
    for names in NAMES:
        if {*names} <= known.keys():
            return FillInMiddle(rate, seed, names, tuple(known[name] for name in names))
    if rate:
        raise ValueError(f"fim_rate: the tokenizer {tokenizer.name_or_path!r} has no tokens for it. Call "
                         f"tokenizer.add_tokens({list(NAMES[0])}, special_tokens=True), save it and name its "
                         "folder; or leave tokenizer_name empty to train one.")
