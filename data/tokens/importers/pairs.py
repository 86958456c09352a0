"""Sentence pairs of a dataset with token ids: a save_to_disk folder, parquet or json files, or a Hub id.

Columns: input_ids, token_type_ids, a label (the first of LABELS that exists), and optionally attention_mask.
Padding may be on either side. token_type_ids must be those of `[CLS] A [SEP] B [SEP]`: zeros, then ones.
"""

from collections.abc import Iterator

import numpy as np

from data.documents.names import is_saved, suffix
from data.tokens.importers import Imported
from utils.io.urls import explained

LABELS = ("next_sentence_label", "next_sentence_labels", "labels", "label")
AT_ONCE = 10_000  # rows per array


def open_pairs(name: str, pad_id: int) -> Imported:
    """T, the length of all rows, is that of the longest of the first 1,000 pairs of each split."""
    import datasets  # not at the top: 85 MB and half a second

    with explained(f"{name}: no token files; as a dataset of sentence pairs it", "read"):
        if is_saved(name):
            data_set = datasets.load_from_disk(name)
        elif suffix(name) in (".parquet", ".jsonl", ".json"):
            kind = "parquet" if suffix(name) == ".parquet" else "json"
            data_set = datasets.load_dataset(kind, data_files=name)
        else:
            data_set = datasets.load_dataset(name)
    splits = {"train": data_set} if isinstance(data_set, datasets.Dataset) else data_set
    splits = {str(split): rows for split, rows in splits.items() if len(rows)}
    if not splits:
        raise ValueError(f"{name} holds no rows")
    columns = next(iter(splits.values())).column_names
    label = next((column for column in LABELS if column in columns), None)
    if missing := {"input_ids", "token_type_ids"} - {*columns} or ({LABELS[0]} if label is None else set()):
        raise ValueError(f"{name} holds no sentence pairs: no column {' or '.join(sorted(missing))}, but "
                         f"{', '.join(columns)}")
    T = max(len(ids) for rows in splits.values() for ids in rows[:1000]["input_ids"])
    padding = np.full(T + 3, pad_id)
    arrays = {split: read_pairs(name, split, rows, label, padding) for split, rows in splits.items()}
    return Imported(arrays, T + 3, pairs=True)


def read_pairs(name: str, split: str, dataset, label: str, padding: np.ndarray) -> Iterator[np.ndarray]:
    """Arrays int64 [n, T + 3] of PairRows: T ids, then where A ends, where B ends, the label. padding: such a
    row of padding alone."""
    for start in range(0, len(dataset), AT_ONCE):
        part = dataset[start : start + AT_ONCE]
        masks = part.get("attention_mask") or [None] * len(part["input_ids"])
        columns = part["input_ids"], part["token_type_ids"], masks, part[label]
        rows = np.tile(padding, (len(masks), 1))
        for i, values in enumerate(zip(*columns, strict=True)):
            try:
                ids, span = _check_pair(*values, len(padding) - 3)
            except ValueError as error:
                raise ValueError(f"{name}, {split}, row {start + i:,}: {error}.") from error
            rows[i, : len(ids)], rows[i, -3:] = ids, span
        yield rows


def _check_pair(ids: list, types: list, mask: list | None, label, T: int) -> tuple[np.ndarray, tuple]:
    """The ids of a pair without padding, and (where A ends, where B ends, label)."""
    ids, types = np.asarray(ids, np.int64), np.asarray(types, np.int64)
    if len(ids) > T:
        raise ValueError(f"{len(ids)} tokens, but the first 1,000 rows have at most {T}")
    if mask is None:  # B ends at the last token of type 1; what follows is padding
        ends = np.flatnonzero(types == 1)
        mask = np.arange(len(ids)) <= (ends[-1] if len(ends) else -1)
    real = np.asarray(mask) == 1
    if len(types) != len(ids) or len(real) != len(ids):
        raise ValueError("its columns differ in length")
    positions = np.flatnonzero(real)
    if not len(positions) or positions[-1] - positions[0] + 1 != len(positions):
        raise ValueError("attention_mask is no single run of ones")
    ids, types = ids[real], types[real]
    end_of_a = int((types == 0).sum())
    if not 0 < end_of_a < len(ids) or (np.diff(types) < 0).any() or types.max() > 1:
        raise ValueError("token_type_ids are not zeros, then ones")
    label = np.asarray(label).reshape(-1)
    if len(label) != 1 or label[0] not in (0, 1):
        raise ValueError(f"its label is {label.tolist()}, must be 0 (B follows A) or 1")
    return ids, (end_of_a, len(ids), int(label[0]))
