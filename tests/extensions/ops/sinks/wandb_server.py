"""A stand-in for the server of Weights & Biases: what ``wandb`` 0.31 needs of its HTTP interface, on this machine."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.ports import free_port

_RUN = {
    "id": "1", "description": "", "config": "{}", "sweepName": None,
    "historyLineCount": 0, "project": {"id": "2", "name": "project", "entity": {"id": "3", "name": "me"}},
}  # fmt: skip


class WandbServer(ThreadingHTTPServer):
    """Answers wandb until ``silence`` is called: then it takes connections and says nothing.

    Attributes:
        status: the HTTP status of every answer.
        rows: the rows of metrics that arrived.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status, self.is_silent, self.is_over = 200, threading.Event(), threading.Event()
        self.rows: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that hang up, as killed ones do."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WandbServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.server.is_silent.is_set():
            self.server.is_over.wait()
            return
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        answer: dict[str, Any] = {}
        if self.server.status != 200:
            answer = {"errors": [{"message": "refused by the test"}]}
        elif self.path.endswith("/file_stream"):
            self._take_rows(json.loads(body))
        elif self.path == "/graphql":
            answer = {"data": self._answer(json.loads(body))}
        text = json.dumps(answer).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_PUT(self) -> None:  # of files
        self.do_POST()

    def _take_rows(self, message: dict[str, Any]) -> None:
        lines = message.get("files", {}).get("wandb-history.jsonl", {}).get("content", ())
        self.server.rows += [json.loads(line) for line in lines]

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if "upsertBucket" in request["query"]:
            name, shown = (request["variables"].get(key) for key in ("name", "displayName"))
            return {"upsertBucket": {"bucket": {**_RUN, "name": name, "displayName": shown}, "inserted": True}}
        if "createRunFiles" in request["query"]:
            files = [{"name": name, "uploadUrl": "/uploads"} for name in request["variables"]["files"]]
            return {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": files}}
        return {"model": None, "viewer": None, "serverInfo": None}


@contextmanager
def wandb_server() -> Iterator[WandbServer]:
    """Run a server. It ends with the block."""
    with WandbServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.is_over.set()
            server.shutdown()
            thread.join()


def closed_url() -> str:
    """Return the URL of a port at which nobody listens."""
    return f"http://127.0.0.1:{free_port()}"
