"""What may be printed, whatever it is made of and wherever it goes."""

import os
import sys


def visible(text: str) -> str:
    r"""The text with control characters written out, as \x1b: from data they could change the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def in_one_line(text: str) -> str:
    r"""The text with line ends and tabs written out, as \n and \t."""
    return text.replace("\n", "\\n").replace("\t", "\\t")


def tolerate_any_reader() -> None:
    """A terminal or a log that is not UTF-8 gets ? for the characters that it lacks. If the reader of a pipe
    ends (`| head`, a killed `tee`), what is printed later is lost. Neither ends the program."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure") and stream.errors != "replace":  # a notebook's has no reconfigure
            stream.reconfigure(errors="replace")
            stream.write, stream.flush = _without_reader(stream, "write"), _without_reader(stream, "flush")


def _without_reader(stream, name: str):
    call = getattr(stream, name)

    def tolerant(*args):
        try:
            return call(*args)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            if stream is sys.stdout:
                print("the reader of stdout has ended: the program goes on without it", file=sys.stderr)

    return tolerant
