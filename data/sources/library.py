"""What the datasets library reads: data sets of the Hub, also as they download, and save_to_disk folders."""

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import datasets
from datasets.exceptions import DatasetsError

from data.sources.files import UNIT_BYTES, digest, is_saved
from data.sources.tables import table_documents


def has_split(source, split: str) -> bool:
    name, config = source.dataset_name, source.dataset_config_name
    with _hub_errors(source):
        if is_saved(name):
            saved = Path(name, "dataset_dict.json")
            return split in (json.loads(saved.read_text())["splits"] if saved.exists() else ["train"])
        return split in datasets.get_dataset_split_names(name, config)


def open_units(source):
    """(fingerprint, units) of one split. Where it streams, the fingerprint is that of the files listed."""
    name, config, split = source.dataset_name, source.dataset_config_name, source.split
    with _hub_errors(source):
        if is_saved(name):
            dataset = datasets.load_from_disk(name)
            dataset = dataset[split] if isinstance(dataset, datasets.DatasetDict) else dataset
        else:
            dataset = datasets.load_dataset(name, config, split=split, streaming=source.streaming)
        if isinstance(dataset, datasets.Dataset):
            units = min(len(dataset), dataset.data.nbytes // UNIT_BYTES + 1)
            return dataset._fingerprint, [partial(_rows, dataset, unit, units) for unit in range(units)]
        builder = datasets.load_dataset_builder(name, config)
        units = [partial(_rows, dataset, unit, dataset.num_shards) for unit in range(dataset.num_shards)]
        return digest(split, builder.hash, builder.config.data_files), units


def _rows(dataset, unit: int, units: int) -> Iterator[dict]:
    """Of so many units, rows that lie together."""
    dataset = dataset.shard(units, unit, contiguous=True)
    if isinstance(dataset, datasets.Dataset):
        tables = dataset.with_format("arrow").iter(batch_size=256)
        dataset = itertools.chain.from_iterable(map(table_documents, tables))
    yield from dataset


@contextmanager
def _hub_errors(source):
    """What the Hub's client raises, said once, with the remedies."""
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, RuntimeError, DatasetsError) as error:
        name, config = source.dataset_name, source.dataset_config_name
        config = f", dataset_config_name {config!r}," if config else ""
        remedies = "check spelling and network; `hf auth login` if private; installed-python needs neither."
        told = f"cannot be loaded: {str(error).strip()}\n  Remedies: {remedies}"
        raise ValueError(f"dataset_name {name!r}{config} {told}") from error
