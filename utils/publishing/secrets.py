"""What is written, printed and published carries no credentials: all of it goes through without_secrets."""

import os
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
NAMES = r"(?:token|secret|passw(?:or)?d|api_?key|access_?key|signature)"
PATTERNS = (
    # Of a URL user and password, then its query; in other URLs than http a ? may be a glob's.
    (re.compile(r"(://)(?:[^\s/]+|[^\s/@:]*:(?!\d+/)[^\s'\"]*)@"), rf"\1{HIDDEN}@"),
    (re.compile(r"(https?://[^\s?'\"]*\?|://[^\s?'\"]*\?(?=[^\s'\"]*=))[^\s'\"]+"), rf"\1{HIDDEN}"),
    (re.compile(rf"(?i)\b(\w*{NAMES}=)[^\s,;&'\"]+"), rf"\1{HIDDEN}"),  # name=value, as in config_overrides
    (re.compile(r"\b(?:hf_|AKIA|ASIA|ghp_|sk-)\w{16,}"), HIDDEN),
)
ENVIRONMENT = re.compile(rf"(?i){NAMES}$|_key$")


def without_secrets(value: Any) -> Any:
    """The same with *** for passwords in URLs, their queries, tokens, and secrets of the environment; texts
    inside lists and dictionaries, too. Done twice it changes nothing more."""
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
