"""How a script begins and ends: stop signals, mistakes in one message, an exit status that says why."""

import contextlib
import errno
import functools
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from utils.display.doctor import lost_peer
from utils.publishing.secrets import without_secrets
from utils.state.preemption import handle_stop_signals

PROJECT = Path(__file__).resolve().parent.parent
ALIVE = []  # what one of several processes does not take apart before it has left: see entry_point


@contextlib.contextmanager
def user_mistakes() -> Iterator[None]:
    """A ValueError raised by a line of this project is the user's mistake: its text on stderr, exit status 2.

    A library's keeps its traceback. Processes but the first wait a moment, in which the launcher ends them.
    """
    try:
        yield
    except ValueError as error:
        raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
        if "site-packages" in raised_in.parts or not raised_in.is_relative_to(PROJECT):
            raise
        if int(os.environ.get("RANK", "0")) > 0:
            time.sleep(5)
        print(f"error: {without_secrets(str(error))}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(f"error: {error.filename or 'a disk'}: no space is left; make room and run the same command "
              "again: it goes on from the newest checkpoint", file=sys.stderr, flush=True)  # fmt: skip
        raise SystemExit(1) from None
    except RuntimeError as error:
        if not (message := lost_peer(error)):
            raise
        print(f"error: {message}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def entry_point(main: Callable) -> Callable:
    """Decorates a script's main: stop signals end it in order, `user_mistakes`, and an end that cannot hang.

    One of several processes leaves by os._exit, when everything is written: while the interpreter takes the
    model apart, DDP's destructor holds the GIL and joins gloo's thread, which may wait for it (torch 2.13).
    A child of multiprocessing does so by itself, after it has told notebook_launcher that main is done."""

    main = user_mistakes()(main)

    @functools.wraps(main)
    def run(*args):
        handle_stop_signals()
        sys.excepthook = _print_error
        several = int(os.environ.get("WORLD_SIZE", 1)) > 1
        if not several or multiprocessing.parent_process() is not None:
            return main(*args)
        status = 1
        try:
            main(*args)
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
        except BaseException:
            _print_error(*sys.exc_info())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    return run


def _print_error(*error) -> None:
    print(without_secrets("".join(traceback.format_exception(*error))), end="", file=sys.stderr, flush=True)
