"""HTTP on this machine alone, for a front and for ``async-rl agent``."""

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

BACKLOG = 1024


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
    """Return the body of a refusal, in the shape of OpenAI's API."""
    return json.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}}).encode()


async def serve_http(app: Starlette, listener: socket.socket) -> None:
    """Serve ``app`` until the task is cancelled. Signals are left alone."""
    import uvicorn

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Generator[None, None, None]:
            yield

    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", ws="none")
    await Server(config).serve(sockets=[listener])
