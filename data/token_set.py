"""Token ids that are in files already: token shards, token files of other projects, saved sentence pairs.

    tokens = open_shards("s3://bucket/tokens", "cache")    # or open_token_files, open_saved_pairs
    tokens.problems(tokenizer, "train", 128)               # what does not fit, one line each
    rows = tokens.rows("train", 128)                       # rows of 128 tokens; remote files are copied now
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from data.encode import id_count, tokenizer_fingerprint
from data.rows import PackedRows


class Split(NamedTuple):
    """The ids of a split, whose files are not open yet."""

    tokens: int
    content: str  # changes with the ids
    open: Callable[[int], tuple[list, str]]  # opens the first so many tokens, 0: all -> arrays, their content
    bytes_per_token: float = 0.0  # UTF-8 bytes of the text / its tokens; 0: unknown
    largest: int = 0  # id that was seen
    shards: Sequence[dict] = ()  # the manifest's entries, for a stream


@dataclass
class TokenSet:
    name: str
    splits: dict[str, Split]
    kind: Callable = PackedRows  # class of the rows
    row_tokens: int | None = None  # fixed row length, with special tokens; None: any
    tokenizer_name: str | None = None  # of the tokenizer that comes with the ids
    tokenizer: str = ""  # its fingerprint; "": unknown
    untyped: bool = False  # the files do not say whether an id has 2 or 4 bytes

    def with_rows(self, T: int) -> list[str]:
        """The splits with at least one row of T tokens."""
        return [name for name, split in self.splits.items() if split.tokens >= (self.row_tokens or T)]

    def rows(self, split: str, T: int, max_rows: int = 0, used: bool = True) -> PackedRows:
        """Rows of T tokens, or the first max_rows. Not used: no rows, under the fingerprint of all."""
        found = self.splits[split]
        arrays, content = found.open(max_rows * T) if used else ([], found.content)
        return self.kind(arrays, self.row_tokens or T, max_rows, content, found.bytes_per_token)

    def problems(self, tokenizer, split: str, T: int) -> list[str]:
        """What does not fit rows of T tokens of a split, or the tokenizer: one line each."""
        lines, have = [], self.with_rows(T)
        if split not in have:
            remedy = "lower block_size or name other data" if split == "train" else "set eval_dataset_name"
            lines.append(f"{self.name} has no row of {self.row_tokens or T} tokens for {split}, only for "
                         f"{', '.join(have) or 'none'}: {remedy}.")
        if tokenizer is None:
            return lines
        known, largest = id_count(tokenizer), self.splits[split].largest if split in have else 0
        if self.tokenizer and self.tokenizer != tokenizer_fingerprint(tokenizer):
            lines.append(f"tokenizer_name: not the tokenizer that made {self.name}: use "
                         f"{self.name}/tokenizer.")
        if largest >= known:
            lines.append(f"tokenizer_name: {self.name}, {split}, has the id {largest}, but the tokenizer has "
                         f"only {known} ids: name the one that made it.")
        if self.untyped and known > 1 << 16:
            lines.append(f"dataset_name: {self.name} does not say whether its ids have 2 or 4 bytes, and the "
                         "tokenizer has over 65,536: add ?dtype=uint16 or ?dtype=uint32 to the name.")
        return lines
