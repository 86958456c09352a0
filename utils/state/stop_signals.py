"""Stop signals that all processes obey at the same step.

At the first SIGTERM, SIGINT (Ctrl-C), SIGUSR1 or SIGHUP the run saves and ends. A second one ends it at once,
unless it comes within a second: a launcher may forward a signal that the scheduler also sent to the workers.

What launchers do with a signal that only they receive:
* accelerate launch, one process: it dies without telling the script. A thread here watches the parent's id
  and sends this process SIGTERM, unless it has got a stop signal itself.
* torchrun, accelerate launch with several processes: forward SIGTERM, SIGINT and SIGHUP, wait 30 s, then send
  SIGKILL (TORCH_ELASTIC_SHUTDOWN_TIMEOUT changes that in newer torch). SIGUSR1 kills the launcher.
* accelerate launch on TPU: it dies, and its child goes on. So this module runs in the launcher too.
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
LAUNCHERS = ("accelerate", "accelerate-launch")  # names of their files; or python -m accelerate.commands.X
XLA_CALLS = 10  # several XLA processes agree at every tenth call only, as each agreement waits for the device

# Handlers belong to the process, and so does this state. signum: the first stop signal, or 0. alive: see
# keep_alive.
_state = SimpleNamespace(signum=0, since=0.0, training=False, speaks=True, alive=[])
_before = {}  # the handlers that ours replaced


def handle_stop_signals(importing: bool = False) -> None:
    """Handle stop signals from now on. Before training they end the process, as there is nothing to save.

    importing: a TPU launcher or its child imports the script. There main() runs in a thread, but only the
    main thread may set handlers."""
    if importing and multiprocessing.current_process().daemon:  # a spawned data loading worker
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return
    child, main = multiprocessing.parent_process(), Path(getattr(sys.modules["__main__"], "__file__", ""))
    in_launcher = importing and not child
    if in_launcher and main.name not in LAUNCHERS and main.parts[-3:-1] != ("accelerate", "commands"):
        return  # imported by a test or a notebook, or run itself
    _state.speaks = int(os.environ.get("RANK", 0)) == 0
    if threading.current_thread() is not threading.main_thread() or _before:
        return
    for number in STOP_SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it
            _before[number] = signal.signal(number, _signal_children if in_launcher else _on_signal)
    launched = "ACCELERATE_DYNAMO_BACKEND" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ
    if not in_launcher and (launched or child):  # started from a shell it may outlive its parent
        threading.Thread(target=_watch_launcher, args=(os.getppid(),), daemon=True).start()


def restore_handlers() -> None:
    """Undo `handle_stop_signals`, so that a notebook goes on as before the run."""
    if threading.current_thread() is threading.main_thread():
        for number, handler in _before.items():
            signal.signal(number, handler)
        _before.clear()
    _state.signum, _state.training = 0, False


def _on_signal(number, frame):
    first = _state.signum == 0
    if first:
        _state.signum, _state.since = number, time.monotonic()
    if not _state.training:
        text = "stopped before the first step, nothing to save"
        _signal_children(signal.SIGTERM)
    elif first:
        text = "saving at the next step, then stopping; a second signal stops at once"
    elif time.monotonic() - _state.since > 1:
        text = "second signal, stopping at once; the newest complete checkpoint stays"
    else:
        return  # the first signal again
    if _state.speaks:  # os.write, as a handler may interrupt a print
        os.write(2, f"\n{signal.Signals(number).name}: {text}\n".encode())
    if not (first and _state.training):
        os._exit(128 + number)


def _signal_children(number, frame=None):
    for child in multiprocessing.active_children():
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, number)


def _leave_to_parent():
    """In a forked data loading worker: it ignores Ctrl-C, which reaches it too, as its parent will end it."""
    for number in _before:
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)


os.register_at_fork(after_in_child=_leave_to_parent)


def _watch_launcher(parent):
    # If the launcher died while we imported torch, our parent is init, which is not Python.
    lost = parent == 1 and sys.platform == "linux" and b"python" not in Path("/proc/1/cmdline").read_bytes()
    while os.getppid() == parent and not lost:
        time.sleep(0.2)
    if _before and not _state.signum:
        os.kill(os.getpid(), signal.SIGTERM)


def requested() -> int:
    """The stop signal that this process has received, or 0."""
    return _state.signum


def keep_alive(accelerator) -> None:
    """Keep one of several processes from destroying its models before it ends: DDP's destructor holds the GIL
    and joins gloo's thread, which may wait for the GIL (torch 2.13)."""
    if accelerator.num_processes > 1:
        _state.alive.append(accelerator)


class StopSignals:
    """Made when training begins: from now on the first signal lets the run save."""

    def __init__(self, accelerator):
        import torch.distributed as dist  # not above: a script imports this file before it imports torch

        self.accelerator, self.answer, self.calls, self.pending = accelerator, 0, 0, None
        # gloo all-reduces on the CPU during training, and never waits for the accelerator.
        self.group = None
        if accelerator.num_processes > 1 and dist.is_available() and dist.is_initialized():
            self.group = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        _state.speaks, _state.training = accelerator.is_main_process, True
        keep_alive(accelerator)

    def agreed(self) -> int:
        """The signal or 0, the same on all processes, which make the same calls. With several processes it is
        that of the previous call: one integer is all-reduced between two calls, so nobody waits."""
        import torch
        import torch.distributed as dist

        if self.answer:
            return self.answer
        if self.accelerator.num_processes == 1:
            self.answer = requested()
        elif self.group is None:
            self.calls += 1
            if self.calls % XLA_CALLS == 0:
                mine = torch.tensor([requested()], device=self.accelerator.device)
                self.answer = int(self.accelerator.gather(mine).max())
        else:
            if self.pending:
                work, number = self.pending
                work.wait()
                self.pending, self.answer = None, int(number)
            if not self.answer:
                number = torch.tensor([requested()], dtype=torch.int32)
                work = dist.all_reduce(number, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
                self.pending = work, number
        return self.answer

    def exit_if_stopped(self, finished: bool) -> None:
        """SystemExit with status 130 after Ctrl-C, 143 after any other signal (schedulers send them in the
        place of SIGTERM), if one stopped the run before it was finished."""
        if self.answer and not finished:
            raise SystemExit(130 if self.answer == signal.SIGINT else 143)
