"""Serve the report of runs on loopback: the page as it is now, and the rollouts as they are asked for.

The page asks every few seconds whether a run has changed (``data/stamp``), and then for itself. Only this machine can
connect, and a request that names another host is refused, so that no other site's page can read a run.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from async_rl.errors import RunError
from async_rl.extensions.insight.report.figures import run_state
from async_rl.extensions.insight.report.page import render
from async_rl.extensions.insight.report.report import read_all
from async_rl.extensions.insight.report.rollouts import Chunk, chunk_bytes, index_data, read_index
from async_rl.run.directory import RunDir, step_files

_MAX_DIGITS = 10
"""Digits of a number in an address. Python refuses to read numbers of thousands."""


class ServedRuns:
    """The runs that are served. Threads may call every method at the same time."""

    def __init__(self, runs: Sequence[Path]) -> None:
        self._runs = [RunDir(path) for path in runs]
        self._lock = threading.Lock()
        self._indices: dict[int, tuple[str, bytes, list[Chunk]]] = {}

    def answer(self, path: str) -> tuple[str, bytes]:
        """Return the content type and the content of ``path``.

        Raises:
            KeyError: there is no such path.
            RunError: a file of a run is damaged, or there is no run any more.
        """
        if path == "/":
            figures = read_all([run.path for run in self._runs])
            counts = [int(any(run.rollouts.glob("s*")) or any(step_files(run.eval))) for run in self._runs]
            return "text/html; charset=utf-8", render(figures, counts, is_served=True).encode()
        kind, *numbers = path.removeprefix("/data/").split("-")
        if kind == "stamp" and not numbers:
            return "text/plain", "".join(map(_stamp, self._runs)).encode()
        places = [int(number) for number in numbers if number.isdecimal() and len(number) <= _MAX_DIGITS]
        if not len(places) == len(numbers) == {"index": 1, "chunk": 2}.get(kind) or places[0] >= len(self._runs):
            raise KeyError(path)
        data, chunks = self._index(places[0], is_new=kind == "index")
        if kind == "index":
            return "application/json", data
        if places[1] >= len(chunks):
            raise KeyError(path)
        return "application/octet-stream", chunk_bytes(chunks[places[1]])

    def _index(self, number: int, *, is_new: bool) -> tuple[bytes, list[Chunk]]:
        """Return a run's index, and the places of its chunks. It is read again if it ``is_new`` and has changed."""
        with self._lock:
            known = self._indices.get(number)
            stamp = _stamp(self._runs[number])
            if known is None or (is_new and known[0] != stamp):
                index, chunks = read_index(self._runs[number])
                known = self._indices[number] = stamp, index_data(index, None), chunks
            return known[1:]


def _stamp(run: RunDir) -> str:
    """Return a text that changes when the run's files do."""
    sizes = [(p.stat().st_size, p.stat().st_mtime_ns) for p in (run.metrics, run.notes, run.ledger) if p.exists()]
    return hashlib.sha256(repr((sizes, run_state(run))).encode()).hexdigest()[:16]


def start_server(runs: Sequence[Path], port: int = 0) -> ThreadingHTTPServer:
    """Return a server on loopback that is bound to ``port``; 0: a free one. Call ``serve_forever``.

    Raises:
        RunError: the port can't be used.
    """
    answer = ServedRuns(runs).answer

    class Handler(_Handler):
        content: Callable[[str], tuple[str, bytes]] = staticmethod(answer)

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except (OSError, OverflowError) as error:
        raise RunError(f"--port {port}: can't serve on it: {error}; choose another port") from error


class _Handler(BaseHTTPRequestHandler):
    content: Callable[[str], tuple[str, bytes]]
    timeout = 30

    def do_GET(self) -> None:
        port = self.connection.getsockname()[1]
        if self.headers.get("Host") not in (f"127.0.0.1:{port}", f"localhost:{port}"):
            self._send(HTTPStatus.FORBIDDEN, "text/plain", b"expected the host 127.0.0.1")
            return
        try:
            kind, data = self.content(self.path)
        except KeyError:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"no such page")
        except (RunError, OSError) as error:
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain; charset=utf-8", str(error).encode())
        else:
            self._send(HTTPStatus.OK, kind, data)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a page asks every few seconds."""

    def _send(self, status: HTTPStatus, kind: str, data: bytes) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind, "Content-Length": str(len(data)), "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY",
            "Cross-Origin-Resource-Policy": "same-origin",
        }  # fmt: skip
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)
