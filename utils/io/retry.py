"""What an exception of a network client means, and retries of what may pass."""

import errno
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from huggingface_hub import get_token, set_client_factory
from huggingface_hub.utils._http import default_client_factory

from utils.io.secrets import HIDDEN, without_secrets

DELAYS = (1, 2, 4, 8, 16, 32, 64)  # seconds between tries: a source may be away for two minutes
FIRST_CONTACT = 2  # retries at the first use of a URL: a mistyped one must fail within seconds
SILENCE = 60  # seconds without an answer of the Hub after which a try fails
NETWORK_MODULES = {"aiobotocore", "aiohttp", "botocore", "fsspec", "gcsfs", "httpcore", "httpcore2", "httpx",
                   "httpx2", "huggingface_hub", "requests", "s3fs", "urllib3"}
PERMANENT = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
# None: libraries raise an OSError without a number for a damaged file.
PERMANENT_ERRNO = {None, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EINVAL, errno.ENAMETOOLONG}
WORTH_A_RETRY = (408, 409, 412, 423, 425, 429)  # HTTP statuses below 500


class Trouble(NamedTuple):
    """What an exception means."""

    transient: bool  # the same request may succeed later
    retry_after: float  # seconds that the server asks to wait, or 0
    status: int | None  # of HTTP
    text: str  # a line without secrets


def of_network(error: BaseException) -> bool:
    """Whether a network client's library raised it."""
    return type(error).__module__.split(".")[0] in NETWORK_MODULES


def diagnose(error: BaseException) -> Trouble:
    """Reads the whole chain of causes: LFS errors are wrapped, Xet's have their status only in the text."""
    chain = [error]
    while len(chain) < 8 and (cause := chain[-1].__cause__ or chain[-1].__context__):
        chain.append(cause)
    statuses = [*map(_status, chain), *map(int, re.findall(r"HTTP status \w+ error \((\d{3})", str(error)))]
    status = next(filter(None, statuses), None)
    if status and status >= 400:
        transient = status >= 500 or status in WORTH_A_RETRY
    else:
        transient = any(map(_transient, chain))
    responses = (getattr(link, "response", None) for link in chain)
    response = next((one for one in responses if hasattr(one, "headers")), None)
    asked = getattr(response, "headers", {}).get("retry-after", "")
    # A date or nonsense counts as 0: our own backoff is used.
    retry_after = min(float(asked), 3600.0) if re.fullmatch(r"\d+", asked) else 0.0
    telling = chain[-1] if response is None else error
    text = " ".join(f"{type(telling).__name__}: {telling}".split()).replace(get_token() or HIDDEN, HIDDEN)
    return Trouble(transient, retry_after, status, without_secrets(text)[:400])


def _status(error: BaseException) -> int | None:
    """The HTTP status that an error of httpx, aiohttp or botocore has."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore's
        return response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    status = getattr(response, "status_code", getattr(error, "status", None))
    return status if isinstance(status, int) else None


def _transient(error: BaseException) -> bool:
    """Whether an error without HTTP status is or may be a timeout or a broken connection."""
    if isinstance(error, PERMANENT) or "Credentials" in type(error).__name__:
        return False
    if of_network(error) or isinstance(error, ConnectionError | TimeoutError):
        return not isinstance(error, ValueError)
    return isinstance(error, OSError) and error.errno not in PERMANENT_ERRNO


def with_retries(action: Callable[[], Any], what: str, retries: int | None = None) -> Any:
    """action(), repeated with exponential backoff while it fails for a reason that may pass.

    ConnectionError that names `what` if it never succeeds; with `retries` the error itself, after so many."""
    return next(retried(lambda _: iter([action()]), what, retries=retries))


def retried(start_at: Callable[[int], Iterator], what: str, position=0, retries=None) -> Iterator:
    """The items of start_at(position). After a failure that may pass it continues with start_at(items seen so
    far); the backoff of `with_retries` starts over with every item."""
    failures, delays = 0, DELAYS[:retries]
    while True:
        try:
            for item in start_at(position):
                position, failures = position + 1, 0
                yield item
            return
        except Exception as error:
            last, trouble = failures == len(delays), diagnose(error)
            if not trouble.transient or last and retries is not None:
                raise
            reason = f"{type(error).__name__}: {error}".strip(": ")
            failed = f"{what}, item {position:,}, failed" if position else f"{what} failed"
            if last:
                cause = f"{failures + 1} times in {sum(delays)} s, the last time with {reason}."
                raise ConnectionError(f"{failed} {cause}") from error
            wait = max(delays[failures], 0 if retries else trouble.retry_after)
            text = f"warning: {failed} ({reason}); next try in {wait:.0f} s"
            print(without_secrets(text), file=sys.stderr, flush=True)
            time.sleep(wait)
            failures += 1


def bound_waiting(seconds: float = SILENCE) -> None:
    """Sets a timeout for each connect, read and write of the Hub's client, which has none."""

    def factory():
        client = default_client_factory()
        client.timeout = seconds
        return client

    set_client_factory(factory)
