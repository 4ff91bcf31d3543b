"""A judge that tests serve themselves: OpenAI's chat completions with replies that a test decides."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, Any]
Answer = Callable[[dict[str, Any]], Reply]


def completion(text: str | None, tokens: tuple[int, int] = (100, 10), *, finish_reason: str | None = None) -> Reply:
    usage = {"prompt_tokens": tokens[0], "completion_tokens": tokens[1]}
    choice: dict[str, Any] = {"message": {"content": text}}
    if finish_reason is not None:
        choice["finish_reason"] = finish_reason
    return 200, {"choices": [choice], "usage": usage}


class Judge(ThreadingHTTPServer):
    """A service whose replies are ``answer`` of each request. ``requests`` has those, with their headers."""

    daemon_threads = True

    def __init__(self, answer: Answer) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.requests, self.closing = (
            answer,
            list[tuple[dict[str, Any], dict[str, str]]](),
            threading.Event(),
        )
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Judge)
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((request, {**dict(self.headers), "path": self.path}))
        status, body = self.server.answer(request)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        except OSError:
            pass  # the client has given up

    def log_message(self, format: str, *args: Any) -> None: ...


@contextmanager
def judge(answer: Answer | list[Reply]) -> Iterator[Judge]:
    """A judge that gives these replies, the last one again and again."""
    if isinstance(answer, list):
        left = list(answer)
        answer = lambda request: left.pop(0) if len(left) > 1 else left[0]  # noqa: E731
    with Judge(answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.closing.set()
            server.shutdown()
