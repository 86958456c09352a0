"""Removes credentials: everything that is written, printed or published goes through without_secrets."""

import os
import re
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
