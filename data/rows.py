"""From the settings to batches on the device: what is opened, the rows that are made of it, their order.

    sources = open_sources(Recipe.of(args, algorithm="bpe"), problems)
    data = prepare(sources, accelerator)
    for micro_batches in data.batches(steps, start): ...    # those of step start, start + 1, ...
    for batch in data.evaluation(name): ...

B rows of a batch, T tokens of a row. Every batch says which rows it holds, at which positions of the stream,
and in a mixture of several data sets of which of them each row is.
"""

import functools
import itertools
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import torch.distributed as dist
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader, default_collate

from data.cache import is_whole
from data.fim import fill_in_middle
from data.foreign import is_foreign
from data.mixture import MixedOrder, MixedRows, Mixture, share_problems
from data.order import SampleOrder, evaluation_order, evaluation_rows, keep_batch
from data.packing import PackedRows, PreparedRows, prepare_rows, tokenizer_fingerprint, trained_tokenizer
from data.pairs import PairRows, prepare_pairs
from data.shards import check_shards, fetch_tokenizer, is_shards, open_shards
from data.sources.corpus import Corpus, Source, has_split, load_corpus, with_split
from data.sources.storage import printable
from data.streams import MappedSource, ShardSource, StreamingRows, TextSource, first_rows
from data.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Recipe:
    """Everything between the settings and the rows. The names are those of the settings."""

    dataset_name: tuple[str, ...]
    mixture: tuple[float, ...] = ()
    dataset_config_name: tuple[str, ...] = ()  # one for all, or one for each
    eval_dataset_name: tuple[str, ...] = ()
    text_column: tuple[str, ...] = ()  # likewise
    keywords: tuple[str, ...] = ()
    keep_duplicates: bool = False
    validation_fraction: float = 0.03
    tokenizer_name: str | None = None
    vocab_size: int = 4096
    algorithm: str = "bpe"
    model_type: str = "gpt2"
    block_size: int = 128
    fim_rate: float = 0.0  # fill-in-the-middle: share of the documents
    special: int = 0  # tokens that collate adds to a row: rows hold so many fewer than block_size
    next_sentence: bool = False  # rows are sentence pairs
    pack_pairs: bool = False  # as many to a row as fit
    streaming: bool = False
    cache_dir: str = "cache"
    output_dir: str = ""
    saved: dict | None = field(default=None, hash=False)  # name and fingerprints of a run's data, to continue
    seed: int = 42
    max_train_samples: int = 0
    max_eval_samples: int = 0
    per_device_train_batch_size: int = 8
    per_device_eval_batch_size: int = 32

    def __post_init__(self):
        """Lists become tuples, what may be several becomes one of those; without pairs none are packed."""
        for name in ("dataset_name", "mixture", "dataset_config_name", "eval_dataset_name", "text_column",
                     "keywords"):  # fmt: skip
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value or ()))
        object.__setattr__(self, "pack_pairs", self.pack_pairs and self.next_sentence)

    @classmethod
    def of(cls, args, **more) -> "Recipe":
        """From the settings of the same names, and `more`."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in vars(args).items() if name in names} | more)

    @property
    def row_size(self) -> int:
        return self.block_size - self.special


@dataclass
class Sources:
    """What a recipe names, opened: nothing is prepared yet."""

    recipe: Recipe
    train: dict[str, Corpus | str] = field(default_factory=dict)  # or URLs of token shards
    evals: dict[str, Corpus | str] = field(default_factory=dict)  # without: a part of what is trained on
    tokenizer: object = None  # None: to be trained
    prepared: tuple | None = None  # training rows and evals of a run to continue, from the cache


def open_sources(recipe: Recipe, problems: list[str]) -> Sources:
    """Opens data and tokenizer. Each mistake is appended to `problems` as a line.

    A run that continues asks for none of them where the cache has the rows that it was trained on."""
    problems += (wrong := share_problems(recipe.mixture, recipe.dataset_name))
    if not wrong and (kept := _rows_of_run(recipe)):
        return kept
    sources, most = Sources(recipe), recipe.max_train_samples

    def attempt(function: Callable, *args):
        """function(*args); its ValueError becomes a line of `problems`, and the result None."""
        try:
            return function(*args)
        except ValueError as error:
            problems.append(str(error))

    def opened(source: Source) -> Corpus | str | None:
        """None where it cannot be. What names a part of something is no shards."""
        made = with_split(source) == source and attempt(is_shards, source.dataset_name)
        if made is not None:
            return source.dataset_name if made else attempt(load_corpus, source)

    named, other = _named_sources(recipe, problems)
    for short, source in named.items():
        if found := opened(replace(source, streaming=recipe.streaming or most > 0)):
            sources.train[short] = found
    names = recipe.eval_dataset_name
    for name, short in zip(names, short_names(names), strict=True):
        if found := opened(replace(other, dataset_name=name)):
            sources.evals[short] = found
    for short, found in () if names else sources.train.items():
        if isinstance(found, str):
            sources.evals[short] = found
        elif found.source.split.startswith("train") and attempt(has_split, named[short], "validation"):
            sources.evals[short] = attempt(load_corpus, replace(named[short], split="validation"))
    made = [found for found in sources.train.values() if isinstance(found, str)]
    brought = (attempt(fetch_tokenizer, url, recipe.cache_dir) for url in made)
    tokenizer_name = recipe.tokenizer_name or next(filter(None, brought), None)
    if recipe.streaming and not tokenizer_name and not made:
        problems.append("streaming: set tokenizer_name; `python -m data.tokenizer` trains one on a stream.")
    if tokenizer_name:
        sources.tokenizer = attempt(load_tokenizer, tokenizer_name)
    if recipe.fim_rate and made:
        problems.append("fim_rate: rows of shards are as they were made; leave it out, and give it to "
                        "`python -m data.prepare`.")
    elif recipe.fim_rate and sources.tokenizer:
        attempt(fill_in_middle, recipe.fim_rate, recipe.seed, sources.tokenizer)
    if most and (recipe.next_sentence or len(named) > 1):
        problems.append("max_train_samples: not for sentence pairs or a mixture; name a part, "
                        f"{recipe.dataset_name[0]}:train[:{most}].")
    shards = dict.fromkeys(url for url in [*made, *sources.evals.values()] if isinstance(url, str))
    if recipe.next_sentence:
        if shards:
            problems.append("next_sentence: shards hold rows without sentences, name text.")
        return sources
    fits = recipe.row_size, sources.tokenizer, recipe.special, recipe.cache_dir
    manifests = {url: attempt(check_shards, url, *fits) for url in shards}
    whole = {isinstance(found, str) and bool((manifests[found] or {}).get("whole"))
             for found in sources.train.values()}
    if recipe.special and len(whole) > 1:
        problems.append("mixture: records have special tokens inside, other rows are shorter and get them "
                        "added: mix records, or shards made of them, with their like.")
    return sources


def _named_sources(recipe: Recipe, problems: list[str]) -> tuple[dict[str, Source], Source]:
    """What is trained on, by its name in the log, and what its evaluation sets have in common. Of several
    data sets each may have a configuration and a column of text of its own, and keywords, NAME=keyword."""
    shorts, each = short_names(recipe.dataset_name), {}
    for setting in ("dataset_config_name", "text_column"):
        given = [None if value == "none" else value for value in getattr(recipe, setting)] or [None]
        if len(given) not in (1, len(shorts)):
            problems.append(f"{setting}: {len(given)} for {len(shorts)} data sets, give one, or as many.")
        each[setting] = given * len(shorts)
    words = {name: [] for name in ["", *shorts]}
    for word in recipe.keywords:
        name, _, own = word.partition("=")
        words[name if name in words else ""].append(own if name and name in words else word)
    named = {}
    for short, name, config, column in zip(shorts, recipe.dataset_name, *each.values(), strict=False):
        keywords = tuple(filter(None, words[short] or words[""]))
        named[short] = Source(name, config, "train", column, keywords, keep_duplicates=recipe.keep_duplicates)
    column = each["text_column"][0] if len(recipe.text_column) == 1 else None
    return named, replace(named[shorts[0]], dataset_name="", dataset_config_name=None, text_column=column,
                          keywords=tuple(words[""]))


def _rows_of_run(recipe: Recipe) -> Sources | None:
    """The rows and the tokenizer of the run to continue; None where the cache has not all of it."""
    of_the_run = recipe.saved and recipe.saved["dataset_name"] == [*recipe.dataset_name]  # not another corpus
    if not of_the_run or recipe.streaming:
        return None
    kinds, rows = "[rs][oh]*-*", PackedRows
    if recipe.next_sentence:
        kinds, rows = "pairs-*", functools.partial(PairRows, pack=recipe.pack_pairs)
    cached = {}
    for folder in filter(is_whole, Path(recipe.cache_dir).glob(kinds)):
        for kept in PreparedRows(folder, rows).splits.values():
            cached[kept.fingerprint] = kept
    shorts, saved = short_names(recipe.dataset_name), recipe.saved["train"]
    try:
        train = {short: cached[saved[short][1] if len(shorts) > 1 else saved] for short in shorts}
        evals = {name: cached[fingerprint] for name, fingerprint in recipe.saved["eval"].items()}
        tokenizer = load_tokenizer(recipe.output_dir)
    except (KeyError, TypeError, ValueError):  # TypeError: of another number of data sets
        return None
    if tokenizer_fingerprint(tokenizer) != recipe.saved["tokenizer"]:
        return None
    return Sources(recipe, tokenizer=tokenizer, prepared=(_together(recipe, train), evals))


def _together(recipe: Recipe, train: dict):
    """The rows of one source as they are, or of several in their shares."""
    if recipe.pack_pairs and len(train) > 1:
        PairRows.align(train.values())
    return MixedRows(Mixture(recipe.mixture, recipe.seed), train) if len(train) > 1 else train.popitem()[1]


def short_names(names: tuple[str, ...]) -> list[str]:
    """How the log tells evaluation sets apart: one is "", several are called by the ends of their names."""
    if len(names) == 1:
        return [""]
    short = []
    for name in names:
        name = printable(with_split(Source(name)).dataset_name).removesuffix("?***")
        parts = [part for part in re.split(r"[/\\]", name) if part and not set(part) & set("*?[:")]
        ending = r"(\.(jsonl|json|csv|txt|parquet|bin|tfrecord))?(\.(gz|bz2|xz|zst))?$"
        stem = re.sub(ending, "", (parts or [name])[-1])
        numbered = (f"{stem}-{number}" for number in itertools.count(2))
        short.append(next(found for found in itertools.chain([stem], numbered) if found not in short))
    return short


def prepare(sources: Sources, accelerator) -> "Data":
    """The tokenizer trained if none is named, rows prepared once per machine, or opened as a stream. The
    first evaluation set is prepared together with the training rows, each further one by itself; of a mixture
    each data set as if it were alone. Raises ValueError where there is no row, or shards do not fit."""
    recipe, tokenizer, named = sources.recipe, sources.tokenizer, bool(sources.recipe.eval_dataset_name)
    cache_dir, row_size, most = recipe.cache_dir, recipe.row_size, recipe.max_train_samples
    train, evals = {}, {}
    told = ", ".join(map(printable, recipe.dataset_name))
    if sources.prepared:
        accelerator.print(f"data       the rows of this run from {cache_dir}, {told} is not read")
        return Data(recipe, accelerator, tokenizer, *sources.prepared)
    if tokenizer is None:
        tokenizer = trained_tokenizer(*sources.train.values(), shares=recipe.mixture or (1.0,),
                                      vocab_size=recipe.vocab_size, cache_dir=cache_dir,
                                      algorithm=recipe.algorithm, model_type=recipe.model_type,
                                      fim=recipe.fim_rate > 0,
                                      read_bytes=most and max(1_000_000, 4 * most * row_size))
    fim = fill_in_middle(recipe.fim_rate, recipe.seed, tokenizer)
    shape = {"tokenizer": tokenizer, "block_size": row_size}
    stream = functools.partial(TextSource, **shape, validation_seed=recipe.seed)
    shape |= {"seed": recipe.seed, "cache_dir": cache_dir}
    if recipe.next_sentence:
        make, in_training = functools.partial(prepare_pairs, **shape, pack=recipe.pack_pairs), {}
    else:
        make, in_training = functools.partial(prepare_rows, **shape), {"fim": fim, "max_rows": most}
    set_aside = functools.partial(first_rows, most=recipe.max_eval_samples, cache_dir=cache_dir)
    opened_shards = functools.partial(open_shards, cache_dir=cache_dir, block_size=row_size)
    texts = {name: found for name, found in sources.evals.items() if isinstance(found, Corpus)}
    for name, found in sources.train.items():
        if isinstance(found, str):
            mapped = not recipe.streaming or is_foreign(found)  # those are read where they lie anyway
            train[name] = opened_shards(found, "train", max_rows=most) if mapped else ShardSource(found)
            if mapped and recipe.streaming and len(sources.train) > 1:
                train[name] = MappedSource(train[name])
            continue
        hold_out = not named and name not in sources.evals
        fraction = recipe.validation_fraction if hold_out else None
        own = (short for short, text in texts.items()
               if (named or short == name) and text.keywords == found.keywords)
        first = next(own, None)  # prepared together with it
        held_out = name if first is None else first
        split_names = {"validation": held_out, "fim": f"{held_out}-fim".removeprefix("-")}  # all of it cut
        if not recipe.streaming:
            others = tuple(text for short, text in texts.items() if short != first)
            made = make(found, eval_corpus=texts.get(first), also_evaluated=others,
                        validation_fraction=fraction, **in_training)
            train[name] = made.train
            evals |= {split_names[split]: rows for split, rows in made.splits.items() if split != "train"}
            continue
        part = {"validation_fraction": fraction or 0.0}
        train[name] = stream(found, fim=fim, **part)
        part |= {"split": "validation" if hold_out else "train", "shuffle_rows": 0}
        if hold_out:
            evals[name] = set_aside(stream(found, **part))
        if fim and (text := found if hold_out else texts.get(first)):
            evals[split_names["fim"]] = set_aside(stream(text, fim=replace(fim, rate=1.0), **part))
    if named and (recipe.streaming or any(isinstance(found, str) for found in sources.train.values())):
        accelerator.print(f"data       {told} is trained on as it is, with what of "
                          "it is evaluated on, too; rows prepared from text leave such documents out")
    for name, found in sources.evals.items():
        if isinstance(found, str):  # of shards the validation split; of others, if they have none, all
            manifest = check_shards(found, row_size, tokenizer, recipe.special, cache_dir)
            held_out = manifest["splits"].get("validation", {}).get("rows")
            split = "validation" if held_out or found in sources.train.values() else "train"
            evals[name] = opened_shards(found, split)
        elif recipe.streaming:
            evals[name] = set_aside(stream(found, shuffle_rows=0))
        elif name not in evals:
            evals[name] = make(found, validation_fraction=None).train
    for rows in train.values() if recipe.pack_pairs else ():
        accelerator.print(f"data       {len(rows.rows):,} sentence pairs in {len(rows):,} rows, "
                          f"{rows.padding:.1%} of them padding")
    _await_all(accelerator)
    evals = {name: evals[name] for name in [*(sources.evals if named else sources.train), *evals]}
    return Data(recipe, accelerator, tokenizer, _together(recipe, train), evals)


def _await_all(accelerator) -> None:
    """Until every machine has its rows. No collective: one that waits for 10 minutes (NCCL) ends the run."""
    if accelerator.num_processes > 1 and dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
        arrived = store.add("prepared", 1)  # a multiple of the processes when all have
        while store.add("prepared", 0) < arrived + -arrived % accelerator.num_processes:
            time.sleep(0.1)
        accelerator.wait_for_everyone()  # the first one may leave at once, and the store with it


class Data:
    """The rows of a run and the batches of its steps.

    train: PackedRows or PairRows, or read while training: a ShardSource or TextSource; or MixedRows of such.
    length: training rows, of a mixture until the first of its data sets begins to repeat; None where only the
    end of the stream would tell. evals: name -> rows, the name of a single one is "".
    collate: batch -> batch, as masking; set it before the first batch. evaluation_collate: None: the same."""

    def __init__(self, recipe: Recipe, accelerator, tokenizer, train, evals: dict[str, PackedRows]):
        self.recipe, self.accelerator, self.tokenizer = recipe, accelerator, tokenizer
        self.train, self.evals, self.collate, self.evaluation_collate = train, evals, keep_batch, None
        self.length: int | None = train.n_rows
        self.stream = None
        if recipe.streaming and not isinstance(train, PackedRows):
            self.stream = StreamingRows(
                train, batch_size=recipe.per_device_train_batch_size, seed=recipe.seed,
                process_index=accelerator.process_index, num_processes=accelerator.num_processes)
        self.evaluations = {}
        # Asked now: encoding with padding or truncation changes a tokenizer's state.
        self.tokenizer_fingerprint = tokenizer and tokenizer_fingerprint(tokenizer)

    @functools.cached_property
    def fingerprints(self) -> dict:
        """{"tokenizer", "train", "eval": {name: ...}}: each changes with the content of what it names. train
        of a mixture: {name: [share in millionths, ...]}."""
        return {
            "tokenizer": self.tokenizer_fingerprint,
            "train": self.train.fingerprint,
            "eval": {name: rows.fingerprint for name, rows in self.evals.items()},
        }

    def batches(self, steps, start: int) -> Iterator[list[dict]]:
        """The micro-batches of each step from `start` to steps.last - 1, on the device.

        steps: micro_batches(step), on each process; rows_before(step), over all processes; last. A batch is
        {"input_ids": int64 [B, T], "position", "epoch", "row": int64 [B], ...}, of a mixture with "source",
        the number of the data set that epoch and row are of. Ends where the data does, before a step that
        would not be complete: count the steps."""
        loader = iter(self.loader(steps.rows_before(start), steps.rows_before(steps.last)))
        for step in range(start, steps.last):
            micro_batches = list(itertools.islice(loader, steps.micro_batches(step)))
            if len(micro_batches) < steps.micro_batches(step):
                return
            yield micro_batches

    def loader(self, start: int, stop: int):
        """Batches of positions start to stop - 1; batch i goes to process i % processes."""
        batch_size = self.recipe.per_device_train_batch_size
        if self.stream is None:
            order = (MixedOrder(self.train.sizes, self.train.mixture, start, stop)
                     if isinstance(self.train, MixedRows)
                     else SampleOrder(len(self.train), self.recipe.seed, start, stop))
            return self._loader(self.train, batch_size, self.collate, sampler=order)
        self.stream.start, self.stream.stop = start, stop
        return self._loader(self.stream, batch_size, lambda rows: self.collate(default_collate(rows)),
                            drop_last=True)

    def epochs(self, position: int) -> dict[str, float]:
        """Passes over each data set of a mixture before a position, of streamed text whole ones; else {}."""
        if not isinstance(self.train, MixedRows):
            return {}
        told, uses = {}, self.train.mixture.before(position).tolist()
        streams = self.stream and self.stream.state_dict(position)
        for number, (name, source) in enumerate(self.train.sources.items()):
            if source.n_rows is None:  # the window of the last row before this position knows its epoch
                told[name] = (streams[number]["mark"] or [0, 0])[1]
            else:
                told[name] = uses[number] / source.n_rows
        return told

    def evaluation(self, name: str = ""):
        """The rows of an evaluation set that `evaluation_rows` chooses, then -1 up to whole batches."""
        if name not in self.evaluations:
            rows, batch_size = self.evals[name], self.recipe.per_device_eval_batch_size
            drawn = evaluation_rows(len(rows), self.recipe.max_eval_samples, self.recipe.seed)
            order = evaluation_order(drawn, batch_size * self.accelerator.num_processes)
            collate = self.evaluation_collate or self.collate
            self.evaluations[name] = self._loader(rows, batch_size, collate, sampler=order)
        return self.evaluations[name]

    def state_dict(self, position: int) -> dict | None:
        """The state_dict of a stream; else None."""
        return self.stream and self.stream.state_dict(position)

    def load_state_dict(self, state: dict | None) -> None:
        if self.stream and state:
            self.stream.load_state_dict(state)

    def _loader(self, rows, batch_size: int, collate, **order):
        # To a GPU batches are copied from pinned memory, while it computes. From other memory each copy would
        # make the host wait for all that the GPU has been given to do.
        pinned = self.accelerator.device.type not in ("cpu", "mps", "xla")
        loader = DataLoader(rows, batch_size, collate_fn=collate, pin_memory=pinned, **order)
        if rows is not self.stream:
            self.accelerator.dataloader_config.non_blocking = pinned
            return self.accelerator.prepare(loader)
        # The stream gives this process its own rows: accelerate must neither divide them again nor hand out
        # those of the first process to all, as it does by default.
        return prepare_data_loader(
            loader, self.accelerator.device, num_processes=1, process_index=0, put_on_device=True,
            dispatch_batches=False, non_blocking=pinned)
