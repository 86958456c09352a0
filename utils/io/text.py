"""Makes text safe to print, write or publish: without credentials and control characters, for any terminal or
pipe. All text that leaves the program goes through without_secrets."""

import os
import re
import sys
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"  # replaces each secret
NAMES = r"(?:token|secret|passw(?:or)?d|api_?key|access_?key|account_?key|signature)"
PATTERNS = (
    # User and password of a URL, up to its last @, as a password may have :/@. http://host:80/x@2 has none.
    (re.compile(r"(?i)(://)(?:[^\s/@:]*:(?!\d{1,5}/)[^\s'\"]*"
                r"|(?<!http://)(?<!https://)[^\s/@:]*:[^\s'\"]*|[^\s/]+)@"), rf"\1{HIDDEN}@"),
    # The query of a URL. Without http, a ? may be part of a glob.
    (re.compile(r"(https?://[^\s?'\"]*\?|://[^\s?'\"]*\?(?=[^\s'\"]*=))[^\s'\"]+"), rf"\1{HIDDEN}"),
    (re.compile(rf"(?i)\b(\w*{NAMES}=)[^\s,;&'\"]+"), rf"\1{HIDDEN}"),  # name=value, as in config_overrides
    (re.compile(r"(?i)\b(bearer )[\w.~+/=-]{16,}"), rf"\1{HIDDEN}"),  # an Authorization header
    # Tokens with the prefixes of Hugging Face, AWS, GitHub, GitLab, OpenAI, Google, Slack, npm and Docker.
    (re.compile(r"\b(?:hf_|AKIA|ASIA|gh[pousr]_|github_pat_|glpat-|sk-|AIza|ya29\.|xox[a-z]-|xapp-|npm_"
                r"|dckr_[a-z]+_)[\w-]{16,}"), HIDDEN),
)
SECRET_VARIABLES = re.compile(rf"(?i){NAMES}$|_key$|_pass$|_pwd$|^sshpass$")


def without_secrets(value: Any) -> Any:
    """Returns `value` with *** instead of passwords and queries in URLs, access tokens, and secrets from
    environment variables, also inside lists and dictionaries. A second call changes nothing more."""
    if isinstance(value, Mapping):
        return {name: without_secrets(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(without_secrets, value))
    if not isinstance(value, str):
        return value
    for name, secret in os.environ.items():
        if SECRET_VARIABLES.search(name) and len(secret) >= 8:
            value = value.replace(secret, HIDDEN)
    for pattern, replacement in PATTERNS:
        value = pattern.sub(replacement, value)
    return value


def visible(text: str) -> str:
    r"""Writes control characters as \x1b and the like, as some of them change the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def in_one_line(text: str) -> str:
    r"""Writes line ends and tabs as \n and \t."""
    return text.replace("\n", "\\n").replace("\t", "\\t")


def tolerate_any_reader() -> None:
    """Lets the program print to any terminal or pipe: characters that it cannot show become ?, and if the
    reader of a pipe ends (`| head`, a killed `tee`), later output is dropped."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure") and stream.errors != "replace":  # a notebook's stream lacks it
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
                print("the reader of stdout has ended: the program goes on without output", file=sys.stderr)

    return tolerant
