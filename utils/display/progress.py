"""What the user sees of a run: lines of losses, on a terminal a bar below them, few messages of libraries."""

import logging
import math
import os
import sys
import warnings
from collections.abc import Mapping

from tqdm.auto import tqdm

from utils.display.metrics import by_set
from utils.io.terminal import visible

SHOWN = {  # name in the line -> metric, format
    "eval loss": ("loss/eval", ".4f"),
    "perplexity": ("perplexity", ",.2f"),
    "accuracy": ("accuracy", ".1%"),
    "tok/s": ("tokens_per_second", ",.0f"),
}
BAR_FORMAT = "{n_fmt}/{total_fmt} {percentage:3.0f}% |{bar:24}| {elapsed}, left {remaining}, {rate_fmt}"


def on_terminal() -> bool:
    """Whether stderr, where bars go, is a terminal that can move its cursor."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


class Progress:
    """On the main process: a line per log interval and evaluation; on a terminal a bar below them."""

    def __init__(self, total_steps: int, step: int = 0, is_main_process: bool = True):
        self.total_steps, self.is_main_process = total_steps, is_main_process
        options = dict(dynamic_ncols=True, bar_format=BAR_FORMAT, smoothing=0)
        hidden = not (is_main_process and on_terminal())
        self.bar = tqdm(total=total_steps, initial=step, disable=hidden, **options)

    def update(self, step: int, record: dict | None = None, eta: float | None = None, hub: str = "") -> None:
        """Move the bar; show a record of training or evaluation, seconds left, the status of pushes."""
        if not self.is_main_process:
            return
        self.bar.update(step - self.bar.n)
        if record is None:
            return
        train = "loss/train_plain" if "loss/train_plain" in record else "loss/train"
        shown = {"loss": (train, ".4f"), **SHOWN}
        texts = {name: format_metric(record, *how) for name, how in shown.items()}
        if math.isfinite(record.get("loss/eval_stderr") or math.nan):  # with a single set of several rows
            texts["eval loss"] += f" ± {record['loss/eval_stderr']:.4f}"
        texts |= {"left": "" if eta is None else duration(eta), "hub": hub}  # these fit a narrow terminal
        texts["skipped"] = str(record.get("skipped_updates") or "")
        texts["mfu"] = format_metric(record, "mfu", ".1%").strip("-")
        line = "  ".join(f"{name} {text}" for name, text in texts.items() if text)
        self.write(f"step {step:>{len(str(self.total_steps))}}/{self.total_steps}  {line}")

    def write(self, text: str) -> None:
        """Print above the bar."""
        if self.is_main_process:
            text = visible(text)
            tqdm.write(text, file=sys.stdout) if not self.bar.disable else print(text, flush=True)

    def close(self) -> None:
        self.bar.close()


def quiet_libraries(level: int = logging.ERROR) -> None:
    """Show libraries' messages from `level` on, and no progress bars of theirs; TRANSFORMERS_VERBOSITY and
    the like override that. Warnings of our own modules are for the user."""
    import huggingface_hub.utils
    import transformers

    # datasets reads these when it is imported, which takes 60 MB and half a second: only if it is needed.
    os.environ.setdefault("DATASETS_VERBOSITY", logging.getLevelName(level).lower())
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    for name in ("transformers", "huggingface_hub", "accelerate", "torch", "fsspec", "httpx"):
        if f"{name.upper()}_VERBOSITY" not in os.environ:
            logging.getLogger(name).setLevel(level)
    if os.environ.get("RANK", "0") == "0":  # waiting for the Hub is no silence
        logging.getLogger("huggingface_hub.utils._http").setLevel(logging.WARNING)
        for name in ("transformers.models", "transformers.integrations"):  # a model without its kernels
            logging.getLogger(name).setLevel(min(level, logging.WARNING))
        logging.getLogger("transformers.integrations.hub_kernels").addFilter(_is_worth_a_line)
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("default", category=UserWarning, module=r"(__main__|train_|utils\.|data\.)")
    warnings.filterwarnings("ignore", message=r"std\(\)")  # of one row there is no standard error
    transformers.utils.logging.disable_progress_bar()
    huggingface_hub.utils.disable_progress_bars()


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Short convolutions, which the default has, are fast without a kernel of their own."""
    return "causal_conv1d" not in record.getMessage()


def duration(seconds: float) -> str:
    """42 s, 3 min 20 s, 5 h 12 min, 3 d 4 h"""
    seconds = round(seconds)
    for big, small, size, part in (("d", "h", 86400, 3600), ("h", "min", 3600, 60), ("min", "s", 60, 1)):
        if seconds >= size:
            return f"{seconds // size} {big} {seconds % size // part} {small}"
    return f"{seconds} s"


def format_metric(record: Mapping, metric: str, spec: str) -> str:
    """1.65; with several evaluation sets: books 1.65, news 2.10; "" without the metric"""
    texts = {name: "-" if v is None else format(v, spec) for name, v in by_set(record, metric).items()}
    return ", ".join(f"{name} {text}".lstrip() for name, text in texts.items())


def readable(value) -> str:
    """0.3333, 12.18, 65,024"""
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
