"""HTTP on this machine alone, for a front and for ``async-rl agent``.

A web page in a browser here can send requests to it, too. Its requests name their origin, or, by a name of its own that
leads here, another host: they are refused.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Generator
from importlib.util import find_spec
from typing import TYPE_CHECKING

from async_rl.errors import ConfigError

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.types import ASGIApp, Receive, Scope, Send

BACKLOG = 1024
_HOSTS = ("127.0.0.1", "localhost")


def require_packages(what: str) -> None:
    """Check that the packages are installed that serve HTTP. ``what`` needs them.

    Raises:
        ConfigError: one is missing.
    """
    if missing := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
        raise ConfigError(
            f"{what}: expected the packages of the extra 'agents', got no {' and no '.join(missing)}; install them: "
            f"pip install 'async-rl[agents]'"
        )


def error_body(message: str, code: str, param: str | None = None, *, kind: str = "invalid_request_error") -> bytes:
    """Return the body of a refusal, in the shape of OpenAI's API, with what Anthropic's has in addition."""
    error: dict[str, object] = {"message": message, "type": kind, "param": param, "code": code}
    if param == "thread":  # Anthropic's clients send whole conversations then
        error["details"] = {"error_code": "thread_unsupported_request"}
    return json.dumps({"type": "error", "error": error}).encode()


def for_programs(app: ASGIApp) -> ASGIApp:
    """Return ``app`` without the requests of web pages."""
    from starlette.datastructures import Headers
    from starlette.responses import Response

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host", "").partition(":")[0], headers.get("origin")
        if origin is None and host in _HOSTS:
            await app(scope, receive, send)
            return
        text = f"expected a program that calls {' or '.join(_HOSTS)}, got host {host!r:.80} and origin {origin!r:.80}"
        await Response(error_body(text, "not_a_program"), 403, media_type="application/json")(scope, receive, send)

    return answer


async def serve_http(app: Starlette, listener: socket.socket) -> None:
    """Serve ``app`` to programs until the task is cancelled. Signals are left alone."""
    import uvicorn

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Generator[None, None, None]:
            yield

    config = uvicorn.Config(for_programs(app), log_level="warning", access_log=False, lifespan="off", ws="none")
    await Server(config).serve(sockets=[listener])
