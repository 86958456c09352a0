"""Source -> filter -> duplicates -> tokens -> rows -> shards, in one pass over any source, to any fsspec URL.

    python -m data.prepare --dataset_name installed-python --tokenizer_name gpt2 --output_dir shards
    python -m data.prepare --dataset_name user/name --keywords pandas sklearn --text_only --output_dir s3://bucket/it

The source is streamed: memory does not grow with it, but for 10 to 20 bytes per kept document (the hashes
that find exact duplicates). Killed at any moment, the same command goes on from the last record in
output_dir/progress, and the files come out byte for byte as if nothing had happened: they depend on the
documents alone, not on when records were made. A record is written with every shard and every five minutes;
it holds what is new since the last one, so that all of them together grow with the source only.
"""

import argparse
import contextlib
import io
import json
import sys
import tempfile
import time
import traceback
from array import array
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import pyarrow as pa
from filelock import FileLock, Timeout

from data.filters import Accounting, SeenHashes, clean_documents, in_validation, show_progress
from data.packing import token_dtype, tokenize_texts, tokenizer_fingerprint
from data.shards import MANIFEST, PROGRESS, write_shard
from data.sources.corpus import Corpus, load_corpus
from data.sources.storage import FIRST_CONTACT, Folder, PatientCorpus, explained, with_retries
from data.sources.tables import rows_to_parquet, to_parquet
from data.tokenizer import load_tokenizer

SECONDS_BETWEEN_RECORDS = 300
TEXT_ROWS_PER_GROUP = 1000
SPLITS = ("train", "validation")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m data.prepare", description=__doc__.split("\n\n")[0],
                                     allow_abbrev=False)
    add = parser.add_argument
    add("--output_dir", required=True, help="folder or fsspec URL: s3://, gs://, hf://datasets/user/x "
        "(made private if there is none), ...")
    add("--dataset_name", default="installed-python", help="Hub id, files, folder, installed-python, ...")
    add("--dataset_config_name")
    add("--split", default="train", help="split of the source (default: train)")
    add("--text_column", help="default: content or text, whichever the source has")
    add("--keywords", nargs="*", default=[], help="keep documents that contain one of these (default: all)")
    add("--tokenizer_name", help="Hub id or folder")
    add("--block_size", type=int, default=1024, help="tokens per row (default: 1024)")
    add("--validation_fraction", type=float, default=0.005,
        help="share of the documents that goes to validation shards, by content (default: 0.005; 0 = none)")
    add("--seed", type=int, default=0, help="chooses the validation documents (default: 0)")
    add("--shard_mb", type=float, default=64,
        help="MB per shard before compression (default: 64; more for hf://, where files are commits)")
    add("--text_only", action="store_true", help="stop after the filter: text shards, all columns")
    return parser.parse_args(argv)


class Records:
    """Progress of one preparation: progress/settings.json, then one numbered .npz per record, never
    rewritten.

    After __init__, as of the last record: counts of all documents; shards {split: [entry of the manifest]};
    held {split: [documents, bytes, tokens]}; pending, arrays that wait for their shard; hashes of kept
    documents.
    """

    def __init__(self, folder: Folder):
        self.folder, self.number = folder, 0
        self.counts, self.seen, self.fresh = Accounting(), SeenHashes(), array("Q")
        self.shards: dict[str, list[dict]] = {split: [] for split in SPLITS}
        self.held = {split: [0, 0, 0] for split in SPLITS}
        self.schema: pa.Schema | None = None
        self.pending: dict[str, np.ndarray] = {}
        for name in (name for name in folder.names(PROGRESS) if name.endswith(".npz")):
            try:
                with np.load(io.BytesIO(folder.read(f"{PROGRESS}/{name}"))) as record:
                    arrays = dict(record)
            except (BadZipFile, ValueError, EOFError):
                break  # a file system without whole writes: as if it were not there
            state = json.loads(str(arrays.pop("state")))
            for number in arrays.pop("hashes").tolist():
                self.seen.add(number)
            for split, shards in state["shards"].items():
                self.shards[split] += shards
            self.counts, self.held, self.pending = Accounting(**state["counts"]), state["held"], arrays
            schema = bytes.fromhex(state["schema"])
            self.schema = pa.ipc.read_schema(pa.py_buffer(schema)) if schema else None
            self.number += 1
        self.recorded = {split: len(shards) for split, shards in self.shards.items()}
        self.last = time.monotonic()

    def add(self, number: int) -> bool:
        """SeenHashes.add, and remembers what the next record must hold."""
        new = self.seen.add(number)
        if new:
            self.fresh.append(number)
        return new

    def write(self, counts: Accounting, pending: dict[str, np.ndarray]) -> None:
        """counts: as of the last document that is in a shard or in `pending`."""
        new = counts.kept - self.counts.kept  # one hash each; the others were read ahead
        state = {"counts": counts.as_dict(), "held": self.held,
                 "shards": {split: shards[self.recorded[split] :] for split, shards in self.shards.items()},
                 "schema": self.schema.serialize().to_pybytes().hex() if self.schema else ""}
        record = io.BytesIO()
        np.savez(record, state=json.dumps(state), hashes=np.array(self.fresh[:new], np.uint64), **pending)
        self.folder.write(f"{PROGRESS}/{self.number:06d}.npz", record.getvalue())
        del self.fresh[:new]
        self.counts, self.number, self.last = counts, self.number + 1, time.monotonic()
        self.recorded = {split: len(shards) for split, shards in self.shards.items()}

    def due(self) -> bool:
        return time.monotonic() - self.last > SECONDS_BETWEEN_RECORDS


def kept_documents(corpus: Corpus, args: argparse.Namespace, records: Records, counts: Accounting):
    """Yields clean documents from the one after the last record's on; `counts` goes on from the record's."""
    source = PatientCorpus(corpus, counts.read)
    if counts.read:
        print(f"going on after document {counts.read:,}", file=sys.stderr, flush=True)
    documents = clean_documents(source, args.keywords, counts, records)
    return show_progress(documents, counts, f"preparing {corpus.name}")


def write_token_shards(args: argparse.Namespace, corpus: Corpus, tokenizer, records: Records) -> Accounting:
    """All token shards of the source. Returns the counts of its documents."""
    dtype, T = token_dtype(tokenizer), args.block_size
    full = {"train": max(1, int(args.shard_mb * 1e6) // (T * dtype.itemsize)) * T}  # tokens of a shard
    # Smaller, so that the validation rows that wait for their shard stay a small part of each record.
    full["validation"] = max(1, full["train"] // T // 8) * T
    waiting = {split: [records.pending[split]] if split in records.pending else [] for split in SPLITS}
    counts, documents = Accounting(**records.counts.as_dict()), deque()
    started = time.monotonic() - counts.seconds

    def texts() -> Iterator[str]:
        for document in kept_documents(corpus, args, records, counts):
            text = document[corpus.text_column]
            validation = args.validation_fraction and in_validation(text, args.seed, args.validation_fraction)
            documents.append((SPLITS[bool(validation)], len(text.encode()), vars(counts).copy()))
            yield text

    def write(split: str, tokens: np.ndarray) -> None:
        rows, number = tokens.reshape(-1, T), len(records.shards[split])
        records.shards[split].append(write_shard(
            records.folder, split, number, rows_to_parquet(rows), rows=len(rows), tokens=rows.size))

    unfinished: list[np.ndarray] = []  # tokens of a document that goes on in the next batch
    for tokens, ends in tokenize_texts(texts(), tokenizer):
        start = 0
        for end in ends.tolist():
            split, size, so_far = documents.popleft()
            ids = np.concatenate([*unfinished, tokens[start:end]]) if unfinished else tokens[start:end]
            unfinished, start = [], end
            waiting[split].append(ids)
            held = records.held[split]
            held[:] = held[0] + 1, held[1] + size, held[2] + len(ids)
        if start < len(tokens):
            unfinished.append(tokens[start:])
        wrote = False
        for split in SPLITS:
            if sum(map(len, waiting[split])) >= full[split]:
                stream = np.concatenate(waiting[split])
                last = len(stream) - len(stream) % full[split]
                for begin in range(0, last, full[split]):
                    write(split, stream[begin : begin + full[split]])
                waiting[split], wrote = [stream[last:].copy()], True
        if wrote or records.due():
            waiting = {split: [np.concatenate([np.empty(0, dtype), *waiting[split]])] for split in SPLITS}
            at = Accounting(**so_far | {"seconds": round(time.monotonic() - started, 3)})
            records.write(at, {split: waiting[split][0] for split in SPLITS})
    for split in SPLITS:
        rest = np.concatenate([np.empty(0, dtype), *waiting[split]])
        if len(rest) >= T:
            write(split, rest[: len(rest) - len(rest) % T])
    counts.seconds = round(time.monotonic() - started, 3)
    return counts


def documents_to_table(documents: list[dict], columns: list[str], schema: pa.Schema | None) -> pa.Table:
    """The first shard (schema None) decides columns and types; values of mixed types become JSON texts.

    A later new column is left out with a warning. Raises ValueError for a later value of another type.
    """
    columns = list(dict.fromkeys([*columns, *(name for document in documents for name in document)]))
    if schema:
        if new := sorted(set(columns) - set(schema.names)):
            print(f"warning: left out, the first shard has no such column: {', '.join(new)}", file=sys.stderr)
        columns = schema.names

    def as_text(value) -> str | None:
        text = value if value is None or isinstance(value, str) else json.dumps(value, default=str)
        return text and text.encode("utf-8", "replace").decode()

    arrays = []
    for column in columns:
        values = [document.get(column) for document in documents]
        wanted = schema.field(column).type if schema else None
        try:
            array = pa.array(values, wanted)
        except (pa.ArrowException, TypeError, OverflowError, UnicodeError) as error:
            if wanted not in (None, pa.string()):
                raise ValueError(f"column {column}: a value is not {wanted}, as the ones before it were "
                                 f"({error}). Make the column of one type in the source.") from error
            array = pa.array(map(as_text, values), pa.string())
        arrays.append(array.cast(pa.string()) if pa.types.is_null(array.type) else array)
    return pa.table(arrays, names=columns)


def write_text_shards(args: argparse.Namespace, corpus: Corpus, records: Records) -> Accounting:
    """All text shards of the source: kept documents, all their columns. Returns the counts of its
    documents.
    """
    counts = Accounting(**records.counts.as_dict())
    started = time.monotonic() - counts.seconds
    documents: list[dict] = []
    if "documents" in records.pending:
        documents = pa.ipc.open_stream(records.pending["documents"].tobytes()).read_all().to_pylist()
    size = sum(len(document[corpus.text_column].encode()) for document in documents)

    def write() -> None:
        table, shards = documents_to_table(documents, corpus.columns, records.schema), records.shards["train"]
        data = to_parquet(table, TEXT_ROWS_PER_GROUP)
        shards.append(write_shard(records.folder, "train", len(shards), data, documents=len(documents)))
        records.schema = table.schema
        documents.clear()

    def pending() -> dict[str, np.ndarray]:
        if not documents:
            return {}
        sink, table = pa.BufferOutputStream(), documents_to_table(documents, corpus.columns, None)
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        return {"documents": np.frombuffer(sink.getvalue(), np.uint8)}

    for document in kept_documents(corpus, args, records, counts):
        documents.append(document)
        size += len(document[corpus.text_column].encode())
        if full := size >= args.shard_mb * 1e6:
            write()
            size = 0
        if full or records.due():
            counts.seconds = round(time.monotonic() - started, 3)
            records.write(Accounting(**counts.as_dict()), pending())
    if documents:
        write()
    records.held["train"] = [counts.kept, counts.bytes, 0]
    counts.seconds = round(time.monotonic() - started, 3)
    return counts


def split_accounts(counts: Accounting, records: Records) -> dict[str, Accounting]:
    """The account of each split: the documents of the source in train's, validation's held out of them."""
    accounts = {"train": Accounting(**counts.as_dict()), "validation": Accounting(seconds=counts.seconds)}
    documents, size, _ = records.held["validation"]
    train, held = accounts["train"], accounts["validation"]
    train.kept, train.validation, train.bytes = train.kept - documents, documents, train.bytes - size
    held.read, held.kept, held.bytes = documents, documents, size
    for split, account in accounts.items():
        account.tokens = records.held[split][2]
        shards = records.shards[split]
        account.rows = sum(shard.get("rows", 0) for shard in shards)
        account.tokens_dropped = account.tokens - sum(shard.get("tokens", 0) for shard in shards)
        assert (account.kept, account.bytes) == tuple(records.held[split][:2]), accounts
    return accounts


def finished_manifest(folder: Folder, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The manifest if this preparation is finished, None if it is to begin or to go on. Writes nothing.

    Raises ValueError when something else lies there, or a preparation with other settings.
    """
    with explained(folder.url, "read"):
        names = folder.names(tries=FIRST_CONTACT)
    if MANIFEST in names:
        manifest = json.loads(folder.read(MANIFEST))
        old, state = manifest.get("settings", {}), "finished"
    elif PROGRESS in names and "settings.json" in folder.names(PROGRESS):
        manifest, state = None, "unfinished"
        old = json.loads(folder.read(f"{PROGRESS}/settings.json"))
    elif set(names) - {PROGRESS, "README.md", ".gitattributes"}:
        raise ValueError(f"output_dir: {folder.url} is not empty and holds no shards. Name a new folder.")
    else:
        return None
    if old != settings:
        changed = {name: (old.get(name), settings.get(name)) for name in [*settings, *old]
                   if old.get(name) != settings.get(name)}
        changes = ", ".join(f"{name} {was!r}, now {now!r}" for name, (was, now) in changed.items())
        raise ValueError(f"output_dir: {folder.url} holds a {state} preparation with other settings "
                         f"({changes}). Name another folder, or delete this one.")
    return manifest


def check_args(args: argparse.Namespace) -> None:
    problems = []
    if not args.text_only and not args.tokenizer_name:
        problems.append("tokenizer_name: none given. Name one (`python -m data.tokenizer` makes one), or use "
                        "--text_only.")
    if args.block_size < 2:
        problems.append(f"block_size: must be 2 or greater, is {args.block_size}.")
    if not 0 <= args.validation_fraction < 1:
        problems.append(f"validation_fraction: must be in [0, 1), is {args.validation_fraction}.")
    if not args.shard_mb > 0:
        problems.append(f"shard_mb: must be greater than 0, is {args.shard_mb}.")
    if problems:
        raise ValueError("\n".join(problems))


def prepare(args: argparse.Namespace) -> dict[str, Any]:
    """Runs or resumes the preparation and prints its accounting. Returns the manifest.

    Raises ValueError for a user's mistake, ConnectionError when source or target stay away.
    """
    check_args(args)
    folder = Folder(args.output_dir)
    corpus = with_retries(
        lambda: load_corpus(args.dataset_name, dataset_config_name=args.dataset_config_name, split=args.split,
                            text_column=args.text_column, streaming=True),
        f"opening {args.dataset_name}", FIRST_CONTACT)
    settings = {"format": "text-1" if args.text_only else "token-rows-1", "dataset_name": args.dataset_name,
                "dataset_config_name": args.dataset_config_name, "split": args.split,
                "content": corpus.fingerprint, "text_column": corpus.text_column,
                "keywords": sorted(set(args.keywords)), "shard_mb": args.shard_mb}
    tokenizer = None if args.text_only else load_tokenizer(args.tokenizer_name)
    if tokenizer:
        settings |= {"tokenizer": tokenizer_fingerprint(tokenizer), "block_size": args.block_size,
                     "validation_fraction": args.validation_fraction, "seed": args.seed}
    manifest = finished_manifest(folder, settings)
    if manifest:
        print(f"{folder.url} is finished: nothing to do")
    else:
        with _only_run(folder):
            manifest = write_shards(args, settings, corpus, tokenizer, folder)
    folder.remove(PROGRESS)
    for split, account in manifest["accounting"].items():
        if account["read"]:
            shards = len(manifest["splits"][split]["shards"])
            print(Accounting(**account).table(f"{folder.url}, {split}: {shards} shards"))
    print(Accounting(**manifest["accounting"]["train"]).share_after_filtering())
    return manifest


def write_shards(args, settings: dict[str, Any], corpus: Corpus, tokenizer, folder: Folder) -> dict[str, Any]:
    """Begins the preparation or goes on with it, to the end. Returns the manifest."""
    with explained(folder.url, "written"):
        folder.make(FIRST_CONTACT)
        folder.write(f"{PROGRESS}/settings.json", json.dumps(settings, indent=1).encode(), FIRST_CONTACT)
    records = Records(folder)
    if tokenizer:
        save_tokenizer(tokenizer, folder)
        counts = write_token_shards(args, corpus, tokenizer, records)
        rows = {"block_size": args.block_size, "dtype": str(token_dtype(tokenizer)),
                "tokenizer": settings["tokenizer"]}
    else:
        counts, rows = write_text_shards(args, corpus, records), {}
    accounts = split_accounts(counts, records)
    if not records.shards["train"]:
        for name in (PROGRESS, "tokenizer"):
            folder.remove(name)
        raise ValueError(f"dataset_name: {args.dataset_name} gives nothing to train on. Check keywords, or "
                         f"take more text.\n{counts.table()}")
    splits = {split: {"rows": accounts[split].rows, "shards": shards}
              for split, shards in records.shards.items()}
    manifest = {"format": settings["format"], **rows, "settings": settings, "splits": splits,
                "accounting": {split: account.as_dict() for split, account in accounts.items()}}
    folder.write(MANIFEST, json.dumps(manifest, indent=1).encode())
    return manifest


def save_tokenizer(tokenizer, folder: Folder) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        tokenizer.save_pretrained(temporary)
        for file in sorted(path for path in Path(temporary).iterdir() if path.is_file()):
            folder.write(f"tokenizer/{file.name}", file.read_bytes())


@contextlib.contextmanager
def _only_run(folder: Folder) -> Iterator[None]:
    """Two runs at once would write the same files. The lock ends with the process; local disks only."""
    if not folder.local:
        yield
        return
    try:
        lock = Path(folder.path(PROGRESS))
        with explained(folder.url, "written"):
            lock.mkdir(parents=True, exist_ok=True)
            handle = FileLock(lock / "lock").acquire(timeout=0)
    except ValueError as error:
        if isinstance(error.__cause__, Timeout):
            raise ValueError(f"output_dir: another run is preparing {folder.url}. Wait for it.") from None
        raise
    with handle:
        yield


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 done, 2 the user's mistake, 1 a source or a target that failed."""
    try:
        prepare(parse_args(argv))
    except OSError as error:
        print(f"error: {error}\nThe same command goes on where this one stopped.", file=sys.stderr)
        return 1
    except ValueError as error:
        if not Path(traceback.extract_tb(error.__traceback__)[-1].filename).is_relative_to(Path(__file__).parent):
            raise  # a library's: keep its traceback
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
