"""Handles stop signals, so that all processes stop at the same step.

At the first SIGTERM, SIGINT (Ctrl-C), SIGUSR1 or SIGHUP the run saves and ends. A second signal ends it at
once, unless it comes within a second: the scheduler and the launcher may both send the same one to a process.

What launchers do with a signal that only they receive:
* accelerate launch, one process: the launcher dies and the script goes on. A thread of this module notices
  that, and sends its own process SIGTERM.
* torchrun, accelerate launch with several processes: forward SIGTERM, SIGINT and SIGHUP, wait 30 s, then send
  SIGKILL (TORCH_ELASTIC_SHUTDOWN_TIMEOUT changes that in newer torch). SIGUSR1 kills the launcher.
* accelerate launch on TPU: the launcher dies and its child goes on. So this module runs in the launcher too.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
LAUNCHERS = ("accelerate", "accelerate-launch")  # their file names; or: python -m accelerate.commands.launch
XLA_CALLS = 10  # several XLA processes agree only at every tenth call, as they wait for the device then

# Handlers belong to the process, and so does this state. signum: the first stop signal, or 0; since: when it
# came; training: whether the run can save; prints: whether this process prints; accelerators: see keep_alive.
_state = SimpleNamespace(signum=0, since=0.0, training=False, prints=True, accelerators=[])
_replaced_handlers = {}  # {signal: the handler before ours}


def handle_stop_signals(importing: bool = False) -> None:
    """Handles stop signals from now on. Before training they end the process, as there is nothing to save.

    importing: the script is being imported, by a TPU launcher or its child. Those run main() in a thread
    later, but only the main thread may set handlers."""
    if importing and multiprocessing.current_process().daemon:  # a spawned data loading worker
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return
    child, main = multiprocessing.parent_process(), Path(getattr(sys.modules["__main__"], "__file__", ""))
    in_launcher = importing and not child
    if in_launcher and main.name not in LAUNCHERS and main.parts[-3:-1] != ("accelerate", "commands"):
        return  # imported by a test, a notebook or another program
    _state.prints = int(os.environ.get("RANK", 0)) == 0
    if threading.current_thread() is not threading.main_thread() or _replaced_handlers:
        return
    for number in STOP_SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it
            handler = _signal_children if in_launcher else _on_signal
            _replaced_handlers[number] = signal.signal(number, handler)
    launched = "ACCELERATE_DYNAMO_BACKEND" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ
    if not in_launcher and (launched or child):  # a process that a shell started may outlive the shell
        threading.Thread(target=_watch_launcher, args=(os.getppid(),), daemon=True).start()


def restore_handlers() -> None:
    """Undoes `handle_stop_signals`, so that a notebook handles signals as before the run."""
    if threading.current_thread() is threading.main_thread():
        for number, handler in _replaced_handlers.items():
            signal.signal(number, handler)
        _replaced_handlers.clear()
    _state.signum, _state.training = 0, False


def _on_signal(number, frame):
    first = _state.signum == 0
    if first:
        _state.signum, _state.since = number, time.monotonic()
    if not _state.training:
        text = "stopped before the first step: there is nothing to save"
        _signal_children(signal.SIGTERM)
    elif first:
        text = "the run saves after this step, then stops; a second signal stops at once"
    elif time.monotonic() - _state.since > 1:
        text = "second signal, stopping at once; the newest complete checkpoint stays"
    else:
        return  # the same signal twice
    if _state.prints:  # by os.write, as a handler may interrupt a print
        os.write(2, f"\n{signal.Signals(number).name}: {text}\n".encode())
    if not (first and _state.training):
        os._exit(128 + number)


def _signal_children(number, frame=None):
    for child in multiprocessing.active_children():
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, number)


def _reset_in_worker():
    """Runs in a forked data loading worker. It ignores Ctrl-C, which it gets too: its parent will end it."""
    for number in _replaced_handlers:
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)


os.register_at_fork(after_in_child=_reset_in_worker)


def _watch_launcher(parent):
    # If the launcher died before this thread started, the parent is already init, which is not Python.
    died = parent == 1 and sys.platform == "linux" and b"python" not in Path("/proc/1/cmdline").read_bytes()
    while os.getppid() == parent and not died:
        time.sleep(0.2)
    if _replaced_handlers and not _state.signum:
        os.kill(os.getpid(), signal.SIGTERM)


def received_signal() -> int:
    """The stop signal that this process has received, or 0."""
    return _state.signum


def keep_alive(accelerator) -> None:
    """Keeps the models of several processes until they end: DDP's destructor holds the GIL and joins gloo's
    thread, which may wait for the GIL (torch 2.13)."""
    if accelerator.num_processes > 1:
        _state.accelerators.append(accelerator)


class StopSignals:
    """Agrees with the other processes on a stop signal. From its creation on the first signal lets the run
    save."""

    def __init__(self, accelerator):
        import torch.distributed as dist  # not above: a script imports this file before it imports torch

        self.accelerator, self.answer, self.calls, self.pending = accelerator, 0, 0, None
        self.group = None  # of gloo, which all-reduces on the CPU and so never waits for the accelerator
        if accelerator.num_processes > 1 and dist.is_available() and dist.is_initialized():
            self.group = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        _state.prints, _state.training = accelerator.is_main_process, True

    def stop_requested(self) -> int:
        """The stop signal or 0, the same on all processes. They must make the same calls. Several processes
        get the state of the previous call: the all-reduce runs between two calls, so that none waits."""
        import torch
        import torch.distributed as dist

        if self.answer:
            return self.answer
        if self.accelerator.num_processes == 1:
            self.answer = received_signal()
        elif self.group is None:
            self.calls += 1
            if self.calls % XLA_CALLS == 0:
                number = torch.tensor([received_signal()], device=self.accelerator.device)
                self.answer = int(self.accelerator.gather(number).max())
        else:
            if self.pending:
                work, number = self.pending
                work.wait()
                self.pending, self.answer = None, int(number)
            if not self.answer:
                number = torch.tensor([received_signal()], dtype=torch.int32)
                work = dist.all_reduce(number, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
                self.pending = work, number
        return self.answer

    def exit_if_stopped(self, finished: bool) -> None:
        """SystemExit if a signal stopped the run before it was finished: with status 130 after Ctrl-C, else
        with 143, as schedulers send the other signals instead of SIGTERM."""
        if self.answer and not finished:
            raise SystemExit(130 if self.answer == signal.SIGINT else 143)
