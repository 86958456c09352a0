"""The start and end of a script: stop signals, one message for the user's mistakes, the exit status."""

import functools
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from utils.io.mistakes import user_mistakes
from utils.io.text import without_secrets
from utils.state.stop_signals import handle_stop_signals, restore_handlers

PROJECT = Path(__file__).resolve().parent.parent


def entry_point(main: Callable) -> Callable:
    """Decorates main: handles stop signals, prints a user's mistakes as one message, and cannot hang at exit.

    With several processes each exits by os._exit: when the interpreter destroys the model, DDP's destructor
    holds the GIL and joins gloo's thread, which may wait for the GIL (torch 2.13). A multiprocessing child
    returns instead: it calls os._exit by itself, after its report to notebook_launcher."""

    @user_mistakes()
    def run_main(*args, **settings):
        from accelerate.utils import patch_environment  # imports torch, which takes seconds

        from utils.launch import claim_threads, launcher_environment

        with patch_environment(**launcher_environment()):
            claim_threads()
            return main(*args, **settings)

    @functools.wraps(main)
    def run(*args, **settings):
        handle_stop_signals()
        sys.excepthook = _print_error
        several = int(os.environ.get("WORLD_SIZE", 1)) > 1
        if not several or multiprocessing.parent_process() is not None:
            try:
                return run_main(*args, **settings)
            finally:
                restore_handlers()
        status = 1
        try:
            run_main(*args, **settings)
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


# A script imports this file first: stop signals and --help do not wait for the imports of torch and
# transformers, which take seconds. The TPU launcher imports the script, and must pass a stop signal on.
_main = Path(getattr(sys.modules["__main__"], "__file__", None) or "/").resolve()
handle_stop_signals(importing=_main.parent != PROJECT)
if _main.parent == PROJECT and {"-h", "--help"} & {*sys.argv[1:]}:
    from utils.flags import answer_help

    answer_help(_main)
