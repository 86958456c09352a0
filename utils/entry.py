"""How a script begins and ends: stop signals, one message for the user's mistakes, the exit status."""

import functools
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Callable

from utils.io.mistakes import user_mistakes
from utils.io.secrets import without_secrets
from utils.state.checkpoint import WRITER
from utils.state.preemption import handle_stop_signals, restore_handlers

WRITE_SECONDS = 600  # for the last checkpoint, which needs the other processes if it is sharded
KEEP_ALIVE = []  # objects that one of several processes must not destroy before it exits: see entry_point
IN_LOOP = []  # runs that have begun and have not reached their `finish`


def entry_point(main: Callable) -> Callable:
    """Decorates main: stop signals end it in order, mistakes are one message, and its end cannot hang.

    One of several processes exits by os._exit when everything is written: when the interpreter destroys the
    model, DDP's destructor holds the GIL and joins gloo's thread, which may wait for the GIL (torch 2.13).
    A multiprocessing child calls os._exit anyway, after it has told notebook_launcher."""

    @user_mistakes()
    def whole(*args, **settings):
        IN_LOOP.clear()
        main(*args, **settings)
        if IN_LOOP:
            raise RuntimeError("main returned from its loop, so nothing waited for saves and pushes: leave "
                               "the loop with break, and call run.finish")

    @functools.wraps(main)
    def run(*args, **settings):
        handle_stop_signals()
        sys.excepthook = _print_error
        several = int(os.environ.get("WORLD_SIZE", 1)) > 1
        if not several or multiprocessing.parent_process() is not None:
            try:
                return whole(*args, **settings)
            finally:
                restore_handlers()
        status = 1
        try:
            whole(*args, **settings)
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
        except BaseException:
            _print_error(*sys.exc_info())
        for thread in threading.enumerate():
            if thread.name == WRITER:
                thread.join(WRITE_SECONDS)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    return run


def _print_error(*error) -> None:
    print(without_secrets("".join(traceback.format_exception(*error))), end="", file=sys.stderr, flush=True)
