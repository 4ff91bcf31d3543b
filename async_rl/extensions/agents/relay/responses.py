"""Parts of the HTTP servers of ``async-rl agent`` and of fronts: what they read of requests, and their responses."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from async_rl.extensions.agents.relay.loopback import error_body
from async_rl.extensions.agents.relay.messages import MAX_BODY_BYTES

SILENT_S = 60.0
"""Time in which nothing of a request's body comes, after which it is given up."""
_KINDS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}


class HandedResponse(Response):
    """A response that calls ``handed`` when the client's connection has it, or ``lost`` if that fails."""

    def __init__(
        self, body: bytes, status: int, headers: dict[str, str], *, lost: Callable[[], None],
        handed: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        super().__init__(body, status, headers or {"content-type": "application/json"})
        self._lost, self._handed = lost, handed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except BaseException:
            self._lost()
            raise
        self._handed()


async def disconnected(request: Request) -> None:
    """Wait until the client has gone. The request's body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def first_of(awaited: asyncio.Future[Any], request: Request) -> None:
    """Wait for ``awaited``, or until the client has gone."""
    gone = asyncio.create_task(disconnected(request))
    try:
        await asyncio.wait({awaited, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()


async def read_body(request: Request, max_bytes: int = MAX_BODY_BYTES) -> bytes | None:
    """Return the request's body; None if it is too large.

    Raises:
        ClientDisconnect: its client has gone, or sends nothing of it any more.
    """
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > max_bytes:
        return None
    body, chunks = bytearray(), request.stream()
    while True:
        try:
            body += await asyncio.wait_for(anext(chunks), SILENT_S)
        except StopAsyncIteration:
            return bytes(body)
        except TimeoutError:
            raise ClientDisconnect from None
        if len(body) > max_bytes:
            return None


def bearer(request: Request) -> str:
    """Return the request's API key, where OpenAI's or Anthropic's clients send it; empty if it has none."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


def is_equal(key: str, other: str) -> bool:
    """Compare two secrets, in a time that does not tell where they differ."""
    return secrets.compare_digest(key.encode(), other.encode())


def refusal(status: int, message: str, code: str, param: str | None = None) -> Response:
    """Return a refusal for OpenAI's and Anthropic's clients, which repeat the request only if it came too soon."""
    kind = _KINDS.get(status, "invalid_request_error")
    headers = {"x-should-retry": "true" if status == 429 else "false"}
    return Response(error_body(message, code, param, kind=kind), status, headers, media_type="application/json")
