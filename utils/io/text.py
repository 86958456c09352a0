"""Text that leaves the program: without credentials, without control characters, to any terminal or pipe.
Everything that is written, printed or published goes through without_secrets."""

import os
import re
import sys
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
NAMES = r"(?:token|secret|passw(?:or)?d|api_?key|access_?key|account_?key|signature)"
PATTERNS = (
    # User and password of a URL, up to its last @, as a password may hold any of :/@; not http://host:80/x@2.
    (re.compile(r"(?i)(://)(?:[^\s/@:]*:(?!\d{1,5}/)[^\s'\"]*"
                r"|(?<!http://)(?<!https://)[^\s/@:]*:[^\s'\"]*|[^\s/]+)@"), rf"\1{HIDDEN}@"),
    # The query of a URL. In URLs other than http a ? may belong to a glob.
    (re.compile(r"(https?://[^\s?'\"]*\?|://[^\s?'\"]*\?(?=[^\s'\"]*=))[^\s'\"]+"), rf"\1{HIDDEN}"),
    (re.compile(rf"(?i)\b(\w*{NAMES}=)[^\s,;&'\"]+"), rf"\1{HIDDEN}"),  # name=value, as in config_overrides
    (re.compile(r"(?i)\b(bearer )[\w.~+/=-]{16,}"), rf"\1{HIDDEN}"),  # of an Authorization header
    # Tokens with the prefixes of Hugging Face, AWS, GitHub, GitLab, OpenAI, Google, Slack, npm and Docker.
    (re.compile(r"\b(?:hf_|AKIA|ASIA|gh[pousr]_|github_pat_|glpat-|sk-|AIza|ya29\.|xox[a-z]-|xapp-|npm_"
                r"|dckr_[a-z]+_)[\w-]{16,}"), HIDDEN),
)
ENVIRONMENT = re.compile(rf"(?i){NAMES}$|_key$|_pass$|_pwd$|^sshpass$")


def without_secrets(value: Any) -> Any:
    """`value` with *** for passwords and queries of URLs, tokens, and secrets of the environment, also inside
    lists and dictionaries. Applying it twice changes nothing more."""
    if isinstance(value, Mapping):
        return {name: without_secrets(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(without_secrets, value))
    if not isinstance(value, str):
        return value
    for name, secret in os.environ.items():
        if ENVIRONMENT.search(name) and len(secret) >= 8:
            value = value.replace(secret, HIDDEN)
    for pattern, replacement in PATTERNS:
        value = pattern.sub(replacement, value)
    return value


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
