"""What the datasets library reads: data sets of the Hub, also as they download, and save_to_disk folders."""

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import datasets
from datasets.exceptions import DatasetsError

from data.sources.files import digest, is_saved
from data.sources.tables import table_documents


def has_split(source, split: str) -> bool:
    name, config = source.dataset_name, source.dataset_config_name
    with _hub_errors(source):
        if is_saved(name):
            saved = Path(name, "dataset_dict.json")
            return split in (json.loads(saved.read_text())["splits"] if saved.exists() else ["train"])
        return split in datasets.get_dataset_split_names(name, config)


def open_rows(source):
    """(fingerprint, rows()) of one split. Where it streams, the fingerprint is that of the files listed."""
    name, config, split = source.dataset_name, source.dataset_config_name, source.split
    with _hub_errors(source):
        if is_saved(name):
            dataset = datasets.load_from_disk(name)
            dataset = dataset[split] if isinstance(dataset, datasets.DatasetDict) else dataset
            return dataset._fingerprint, partial(_rows, dataset)
        dataset = datasets.load_dataset(name, config, split=split, streaming=source.streaming)
        if not source.streaming:
            return dataset._fingerprint, partial(_rows, dataset)
        builder = datasets.load_dataset_builder(name, config)
        return digest(split, builder.hash, builder.config.data_files), partial(_rows, dataset)


def _rows(dataset, part: int = 0, parts: int = 1) -> Iterator[dict]:
    """Of a part rows that lie together, of files of its own; where there are too few files, rows in turn."""
    saved = isinstance(dataset, datasets.Dataset)
    if whole := (len(dataset) if saved else dataset.num_shards) >= parts:
        dataset = dataset.shard(parts, part)
    if saved:
        tables = dataset.with_format("arrow").iter(batch_size=256)
        dataset = itertools.chain.from_iterable(map(table_documents, tables))
    yield from dataset if whole else itertools.islice(dataset, part, None, parts)


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
