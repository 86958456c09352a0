"""The exit status and message of an exception: 2 for the user's mistakes, 1 for anything else."""

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
    """Raised on all processes: the run cannot go on. Its text is one line on stderr, the exit status is 1."""


def on_main_process(accelerator, function, *args):
    """What function(*args) returns on the main process, on all. All call it, and its ValueError or RunFailed
    is raised on all."""
    if accelerator.num_processes == 1:
        return function(*args)
    from accelerate.utils import broadcast_object_list  # it imports torch, which not all tools need

    answer = [None, None, ""]
    if accelerator.is_main_process:
        try:
            answer[0] = function(*args)
        except (ValueError, RunFailed) as error:
            answer[1:] = RunFailed if isinstance(error, RunFailed) else ValueError, str(error)
    value, kind, message = broadcast_object_list(answer)
    if kind:
        raise kind(message)
    return value


@contextlib.contextmanager
def user_mistakes() -> Iterator[None]:
    """A ValueError raised by this project's code is the user's mistake: its text on stderr, exit status 2.

    A library's keeps its traceback. A full disk, a source that does not answer and a lost process are a line
    and exit status 1; so is RunFailed. All processes but the first wait a moment, so that the launcher ends
    them first."""
    tolerate_any_reader()
    try:
        yield
    except ValueError as error:
        raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
        if "site-packages" in raised_in.parts or not raised_in.is_relative_to(PROJECT):
            raise
        if int(os.environ.get("RANK", "0")) > 0:
            time.sleep(5)
        _end(str(error), 2)
    except RunFailed as error:
        if int(os.environ.get("RANK", "0")) > 0:
            time.sleep(5)
            raise SystemExit(1) from None
        _end(str(error), 1)
    except Exception as error:
        message = lost_peer(error) or out_of_memory(error) if isinstance(error, RuntimeError) else None
        if of_network(error):
            message = f"{type(error).__name__}: {error}\nRun the same command again to resume."
        elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            message = (f"{error.filename or 'a disk'}: no space is left; make room and run the same command "
                       "again: it resumes")  # fmt: skip
        if not message:
            raise
        _end(message, 1)


def _end(message: str, status: int) -> None:
    print(f"error: {visible(without_secrets(message))}", file=sys.stderr, flush=True)
    raise SystemExit(status) from None


def out_of_memory(error: RuntimeError) -> str | None:
    """The message for a device or a machine without enough memory; None for other errors."""
    if not re.search(r"out of memory|can't allocate memory", str(error)):
        return None
    frames = (frame.f_locals.get("args") for frame, _ in traceback.walk_tb(error.__traceback__))
    args = next((args for args in frames if hasattr(args, "per_device_train_batch_size")), None)
    if args is None:
        return None
    rows, parts = args.per_device_train_batch_size, args.gradient_accumulation_steps
    half = f"--per_device_train_batch_size {rows // 2} --gradient_accumulation_steps {2 * parts}"
    remedy = f"{half} takes the same rows per step" if rows > 1 else "try --gradient_checkpointing true"
    sizes = f"{rows} rows of {args.block_size} tokens"
    return f"out of memory with {sizes}: {remedy}, also to resume; or choose a smaller model"


def of_network(error: BaseException) -> bool:
    """Whether a network client raised it."""
    broken = isinstance(error, ConnectionError | TimeoutError) and not isinstance(error, BrokenPipeError)
    return broken or type(error).__module__.split(".")[0] in NETWORK_MODULES


def lost_peer(error: RuntimeError) -> str | None:
    """The message for an error that is caused by another process's end or silence; None for other errors.
    NCCL, and gloo if a machine is silent, raise it after the process group's timeout."""
    text = str(error)
    if not re.search(r"(closed|reset) by peer|[Tt]imed out|NCCL .*(abort|timeout|remote)", text):
        return None
    cause = re.sub(r"^\[\S+\] |\. This is typically.*", "", text.splitlines()[0])
    return (f"another process is gone: {cause}. Its own output says why. Run the same command again, on all "
            "machines, to resume from the newest complete checkpoint.")
