"""Tell failures that may pass by themselves from mistakes: a service that is away, slow or overloaded comes back.

The queue asks this of failed rewards and environments (``queue.core.failures``). Client libraries have exceptions of
their own for the same events, so besides Python's classes this goes by the names of classes and by HTTP status codes.
"""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Iterator
from typing import Any

_NAMES = re.compile(
    r"Connect|Disconnect|Time(d)?_?[oO]ut|Transport|Unavailable|RateLimit|NetworkError|ProtocolError|DNSError"
)
"""In names of exception classes of requests, httpx, aiohttp, urllib3, openai, redis, grpc and others."""
_STATUS_NAMES = ("status_code", "status", "code")
_ERRNOS = {errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.EAGAIN, errno.ETIMEDOUT}


def is_transient(error: BaseException) -> bool:
    """Return whether ``error``, or an exception that led to it, says that a service is away, too slow or overloaded.

    These are Python's ``ConnectionError`` and ``TimeoutError`` and failed lookups of host names, exceptions of other
    packages with such names, and replies with the HTTP status 408, 425, 429 or 5xx.
    """
    return any(map(_is_of_service, _chain(error)))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and those that led to it, as a traceback shows them."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        # urllib hides the cause in the reason.
        reason = _read(found, "reason")
        if isinstance(reason, BaseException) and id(reason) not in seen:
            yield reason
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)


def _is_of_service(error: BaseException) -> bool:
    if isinstance(error, ConnectionError | TimeoutError | socket.gaierror):
        return True
    if isinstance(error, OSError) and error.errno in _ERRNOS:
        return True
    own = [kind for kind in type(error).__mro__ if kind.__module__ != "builtins"]
    return any(_NAMES.search(kind.__name__) for kind in own) or _has_status(error)


def _has_status(error: BaseException) -> bool:
    """Return whether an exception has the status of an HTTP reply that says to try again later."""
    for place in (error, _read(error, "response")):
        for name in _STATUS_NAMES:
            status = _read(place, name)
            if isinstance(status, int) and isinstance(error, Exception):
                return status in (408, 425, 429) or 500 <= status <= 599
    return False


def _read(place: object, name: str) -> Any:
    """Return an attribute of an object of another package; None if it has none, or if reading it raises."""
    try:
        return getattr(place, name, None)
    except Exception:  # a property of foreign code; what it can't say is not known
        return None
