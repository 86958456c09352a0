"""Sentence pairs of a data set with token ids: a save_to_disk folder, parquet or json files, or a Hub id.

Columns: input_ids, token_type_ids, next_sentence_label (or another of LABELS), attention_mask where it is
given. Padding may stand on either side. A pair must be `[CLS] A [SEP] B [SEP]` by its token_type_ids.
"""

from collections.abc import Iterator

import numpy as np

from data.documents.names import is_saved, suffix
from data.tokens.importers import Imported
from utils.io.urls import explained

LABELS = ("next_sentence_label", "next_sentence_labels", "labels", "label")
AT_ONCE = 10_000  # rows


def read(name: str, dtype: str | None, tokenizer) -> Imported:
    import datasets  # not at the top: 85 MB and half a second

    with explained(f"{name}: no token files; as a data set of sentence pairs it", "read"):
        if is_saved(name):
            found = datasets.load_from_disk(name)
            found = found if isinstance(found, datasets.DatasetDict) else {"train": found}
        elif suffix(name) in (".parquet", ".jsonl", ".json"):
            kind = "parquet" if suffix(name) == ".parquet" else "json"
            found = datasets.load_dataset(kind, data_files=name)
        else:
            found = datasets.load_dataset(name)
    found = {str(split): rows for split, rows in found.items() if len(rows)}
    if not found:
        raise ValueError(f"{name} holds no row")
    columns = next(iter(found.values())).column_names
    label = next((column for column in LABELS if column in columns), None)
    if missing := {"input_ids", "token_type_ids"} - {*columns} or ({LABELS[0]} if label is None else set()):
        raise ValueError(f"{name} holds no sentence pairs: no column {' or '.join(sorted(missing))}, but "
                         f"{', '.join(columns)}")
    T = max(len(ids) for rows in found.values() for ids in rows[:1000]["input_ids"])
    blank = np.full(T + 3, tokenizer.pad_token_id or 0)
    splits = {split: read_pairs(name, split, rows, label, blank) for split, rows in found.items()}
    return Imported(splits, T + 3, pairs=True)


def read_pairs(name: str, split: str, dataset, label: str, blank: np.ndarray) -> Iterator[np.ndarray]:
    """Arrays int64 [n, T + 3]: ids, then the span."""
    for start in range(0, len(dataset), AT_ONCE):
        part = dataset[start : start + AT_ONCE]
        masks = part.get("attention_mask") or [None] * len(part["input_ids"])
        columns = part["input_ids"], part["token_type_ids"], masks, part[label]
        rows = np.tile(blank, (len(part["input_ids"]), 1))
        for row, (number, values) in zip(rows, enumerate(zip(*columns, strict=True), start), strict=True):
            try:
                pair, span = _pair(*values, len(blank) - 3)
                row[: len(pair)], row[-3:] = pair, span
            except ValueError as error:
                raise ValueError(f"{name}, {split}, row {number:,}: {error}.") from error
        yield rows


def _pair(ids: list, types: list, mask: list | None, label, T: int) -> tuple[np.ndarray, tuple]:
    """The ids of a pair without padding, and (where A ends, where B ends, label)."""
    ids, types = np.asarray(ids, np.int64), np.asarray(types, np.int64)
    if len(ids) > T:
        raise ValueError(f"{len(ids)} tokens, but the rows before it have at most {T}")
    if mask is None:  # B ends at the last token of type 1; what follows is padding
        ends = np.flatnonzero(types == 1)
        mask = np.arange(len(ids)) <= (ends[-1] if len(ends) else -1)
    real = np.asarray(mask) == 1
    if len(types) != len(ids) or len(real) != len(ids):
        raise ValueError("its columns differ in length")
    places = np.flatnonzero(real)
    if not len(places) or places[-1] - places[0] + 1 != len(places):
        raise ValueError("attention_mask is no single run of ones")
    kept, kinds = ids[real], types[real]
    end_of_a = int((kinds == 0).sum())
    if not 0 < end_of_a < len(kept) or (np.diff(kinds) < 0).any() or kinds.max() > 1:
        raise ValueError("token_type_ids are not zeros, then ones")
    label = np.asarray(label).reshape(-1)
    if len(label) != 1 or label[0] not in (0, 1):
        raise ValueError(f"its label is {label.tolist()}, must be 0 (B follows A) or 1")
    return kept, (end_of_a, len(kept), int(label[0]))
