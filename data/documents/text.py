"""Plain text as documents: a file is one; a long one, or one that is alone, is cut at blank lines.

A file above LONG_FILE is cut into documents of about CUT_AFTER, at blank lines, or after LONGEST where there
are none. A shorter file that is all there is becomes about DOCUMENTS, so that some can be held out. Of
WikiText each article is a document.
"""

import re
from collections.abc import Callable, Iterable, Iterator

LONG_FILE, CUT_AFTER, LONGEST = 1 << 18, 1 << 16, 1 << 20  # bytes
DOCUMENTS = 30
TITLE = re.compile(r" ?= [^=\n]+ = ?\r?\n?\Z")  # " = Title = "; headings inside an article have more "="
TITLES = 2  # so many in the first LONG_FILE bytes, each after a blank line, make a file WikiText


def decode(data: bytes) -> str | None:
    """The text, None where it is not UTF-8."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None


def text_rows(file, divide: bool = False) -> Iterator[dict]:
    """The documents of a UTF-8 file, {"text": None} where one is not. divide: it is alone."""
    start, cut_after, longest = file.read(LONG_FILE + 1), CUT_AFTER, LONGEST - 4
    if is_wikitext(start.splitlines(keepends=True)[:-1]):
        yield from articles(lambda: ({"text": decode(line)} for line in _bounded_lines(start, file)))
        return
    if short := len(start) <= LONG_FILE:
        cut_after = longest = len(start) // DOCUMENTS
    document, size = [], 0
    for line in [start] if short and not divide else _bounded_lines(start, file):
        document.append(line)
        size += len(line)
        if size >= cut_after and not line.strip() or size > longest:
            yield {"text": decode(b"".join(document))}
            document, size = [], 0
    if document:
        yield {"text": decode(b"".join(document))}


def is_wikitext(lines: list[bytes]) -> bool:
    """Whether the first line with text is a title, and another one follows."""
    titles, blank = 0, True
    for line in lines:
        if blank and line.strip():
            title = bool(TITLE.match(line.decode("utf-8", "replace")))
            if not title and not titles:
                return False
            titles += title
            if titles >= TITLES:
                return True
        blank = not line.strip()
    return False


def _bounded_lines(start: bytes, file) -> Iterator[bytes]:
    """The lines of `start` and of the rest of the file. Lines above LONGEST are cut between characters."""
    *lines, line = start.splitlines(keepends=True) or [b""]
    yield from lines
    while more := file.readline(max(1, LONGEST - len(line))):
        line, end = line + more, None
        if not line.endswith(b"\n"):  # cut before a character that begins in the last three bytes
            end = next((-i for i in (1, 2, 3) if line[-i:][:1] >= b"\xc0"), None)
        yield line[:end]
        line = line[end:] if end else b""
    if line:
        yield line


def articles(lines: Callable[[], Iterable[dict]]) -> Iterator[dict]:
    """The articles of WikiText, whose lines are the "text" of rows. A title after a blank line begins an
    article. Each unreadable line is a document of its own."""
    article, blank = [], True
    for line in (row.get("text") for row in lines()):
        if not isinstance(line, str):
            yield {"text": None}
            continue
        if blank and TITLE.match(line) and "".join(article).strip():
            yield {"text": "".join(article)}
            article = []
        blank = not line.strip()
        article.append(line if line.endswith("\n") else line + "\n")
    if article:
        yield {"text": "".join(article)}
