"""Reads text with the datasets library: Hub datasets, streamed or not, and save_to_disk folders."""

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import datasets
from datasets.exceptions import DatasetsError

from data.documents.files import UNIT_BYTES, table_to_rows
from data.documents.names import digest, is_saved


def splits(source) -> list[str]:
    name = source.dataset_name
    with _hub_errors(source):
        if not is_saved(name):
            return datasets.get_dataset_split_names(name, source.dataset_config_name)
        saved = Path(name, "dataset_dict.json")
        return json.loads(saved.read_text())["splits"] if saved.exists() else ["train"]


def configurations(source) -> list[str]:
    """The names of its configurations; [] if the Hub does not answer, which open_units will report."""
    with suppress(ValueError), _hub_errors(source):
        return datasets.get_dataset_config_names(source.dataset_name)
    return []


def open_units(source) -> tuple[str, list[partial]]:
    """(fingerprint, units) of a split. Slices and sums of splits are downloaded, also with streaming. The
    fingerprint of a streamed dataset is that of its list of files."""
    name, config, split = source.dataset_name, source.dataset_config_name, source.split
    streaming = source.streaming and not {*split} & {*"[+"}
    with _hub_errors(source):
        if is_saved(name):
            dataset = datasets.load_from_disk(name)
            dataset = dataset[split] if isinstance(dataset, datasets.DatasetDict) else dataset
        else:
            dataset = datasets.load_dataset(name, config, split=split, streaming=streaming)
        if isinstance(dataset, datasets.Dataset):
            n_units = min(len(dataset), dataset.data.nbytes // UNIT_BYTES + 1)
            fingerprint = dataset._fingerprint
        else:
            builder, n_units = datasets.load_dataset_builder(name, config), dataset.num_shards
            fingerprint = digest(split, builder.hash, builder.config.data_files)
    return fingerprint, [partial(_read_unit, dataset, unit, n_units) for unit in range(n_units)]


def _read_unit(dataset, unit: int, n_units: int) -> Iterator[dict]:
    """The rows of one of n_units contiguous parts."""
    dataset = dataset.shard(n_units, unit, contiguous=True)
    if isinstance(dataset, datasets.Dataset):
        tables = dataset.with_format("arrow").iter(batch_size=256)
        dataset = itertools.chain.from_iterable(map(table_to_rows, tables))
    yield from dataset


@contextmanager
def _hub_errors(source):
    """Turns errors of the datasets library into a ValueError with the remedies."""
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, RuntimeError, DatasetsError) as error:
        name, config = source.name, source.dataset_config_name
        config = f", dataset_config_name {config!r}," if config else ""
        raise ValueError(f"dataset_name {name!r}{config} cannot be loaded: {str(error).strip()}\n  Remedies: "
                         "check spelling and network; `hf auth login` if private; installed-python needs "
                         "neither. If it holds token ids or sentence pairs, run `python -m data.convert "
                         f"{name} tokens/ --tokenizer_name ...` once, and name tokens/ here.") from error
