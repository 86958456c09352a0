"""What may be printed, whatever it is made of and wherever it goes."""

import sys


def visible(text: str) -> str:
    r"""The text with control characters written out, as \x1b: from data they could change the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def in_one_line(text: str) -> str:
    r"""The text with line ends and tabs written out, as \n and \t."""
    return text.replace("\n", "\\n").replace("\t", "\\t")


def tolerate_any_text() -> None:
    """A terminal or a log that is not UTF-8 gets ? for the characters that it lacks, and ends no run."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a notebook's has not
            stream.reconfigure(errors="replace")
