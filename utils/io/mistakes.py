"""Turns exceptions into a message and an exit status: 2 for mistakes of the user, 1 for all others."""

import contextlib
import errno
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from utils.io.text import tolerate_any_reader, visible, without_secrets

NETWORK_MODULES = {"aiobotocore", "aiohttp", "botocore", "fsspec", "gcsfs", "httpcore", "httpcore2", "httpx",
                   "httpx2", "huggingface_hub", "requests", "s3fs", "urllib3"}
PROJECT = Path(__file__).resolve().parent.parent.parent


class RunFailed(RuntimeError):
    """The run cannot go on: exit status 1, with the text as one line on stderr. All processes raise it."""


def on_main_process(accelerator, function, *args):
    """Runs function(*args) on the main process. All processes call this, and all get the value that it
    returns, or its ValueError or RunFailed."""
    if accelerator.num_processes == 1:
        return function(*args)
    from accelerate.utils import broadcast_object_list  # it imports torch, which not all tools need

    result = [None, None, ""]
    if accelerator.is_main_process:
        try:
            result[0] = function(*args)
        except (ValueError, RunFailed) as error:
            result[1:] = RunFailed if isinstance(error, RunFailed) else ValueError, str(error)
    value, error_class, message = broadcast_object_list(result)
    if error_class:
        raise error_class(message)
    return value


@contextlib.contextmanager
def user_mistakes() -> Iterator[None]:
    """Ends the program with a message instead of a traceback.

    A ValueError that this project's code raises is a mistake of the user: exit status 2. Status 1: RunFailed,
    a full disk, a network that does not answer, too little memory, or another process that has ended. Other
    exceptions keep their traceback."""
    tolerate_any_reader()
    try:
        yield
    except (ValueError, RunFailed) as error:
        raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
        if "site-packages" in raised_in.parts or not raised_in.is_relative_to(PROJECT):
            raise
        status = 1 if isinstance(error, RunFailed) else 2
        if int(os.environ.get("RANK", "0")) > 0:
            time.sleep(5)  # in this time the launcher ends this process, so that only rank 0 prints
            if status == 1:
                raise SystemExit(1) from None
        _end(str(error), status)
    except Exception as error:
        message = lost_peer(error) or out_of_memory(error) if isinstance(error, RuntimeError) else None
        if is_network_error(error):
            message = f"{type(error).__name__}: {error}\nRun the same command again to resume."
        elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            message = (f"{error.filename or 'a disk'}: no space is left; make room and run the same command "
                       "again to resume")  # fmt: skip
        if not message:
            raise
        _end(message, 1)


def _end(message: str, status: int) -> None:
    print(f"error: {visible(without_secrets(message))}", file=sys.stderr, flush=True)
    raise SystemExit(status) from None


def out_of_memory(error: RuntimeError) -> str | None:
    """The message if a device or the machine has too little memory; None for other errors."""
    if not re.search(r"out of memory|can't allocate memory", str(error)):
        return None
    frames = (frame.f_locals.get("args") for frame, _ in traceback.walk_tb(error.__traceback__))
    args = next((args for args in frames if hasattr(args, "per_device_train_batch_size")), None)
    if args is None:
        return None
    rows, micro_batches = args.per_device_train_batch_size, args.gradient_accumulation_steps
    half = f"--per_device_train_batch_size {rows // 2} --gradient_accumulation_steps {2 * micro_batches}"
    remedy = f"{half} takes the same rows per step" if rows % 2 == 0 else "try --gradient_checkpointing true"
    batch = f"{rows} rows of {args.block_size} tokens"
    return f"out of memory with {batch}: {remedy}, also to resume; or choose a smaller model"


def is_network_error(error: BaseException) -> bool:
    """Whether a network client raised the error."""
    lost = isinstance(error, ConnectionError | TimeoutError) and not isinstance(error, BrokenPipeError)
    return lost or type(error).__module__.split(".")[0] in NETWORK_MODULES


def lost_peer(error: RuntimeError) -> str | None:
    """The message if another process has ended or does not answer; None for other errors. NCCL, and gloo if
    a machine does not answer, raise such an error after the process group's timeout."""
    text = str(error)
    if not re.search(r"(closed|reset) by peer|[Tt]imed out|NCCL .*(abort|timeout|remote)", text):
        return None
    cause = re.sub(r"^\[\S+\] |\. This is typically.*", "", text.splitlines()[0])
    return (f"another process is gone: {cause}. Its own output says why. Run the same command again, on all "
            "machines, to resume from the newest complete checkpoint.")
