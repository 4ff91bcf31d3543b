"""A client of the front, in a thread, with the standard library's HTTP."""

from __future__ import annotations

import json
import threading
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit


class Request:
    """One request, which begins at once. ``answer`` waits for it."""

    def __init__(
        self, url: str, path: str, body: Any = None, *, method: str = "POST", key: str = "", raw: bytes | None = None
    ) -> None:
        self._connection = HTTPConnection(urlsplit(url).netloc, timeout=60)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        data = raw if raw is not None else json.dumps(body).encode() if body is not None else None
        self._connection.request(method, path, data, headers)
        self._found: tuple[int, dict[str, Any], dict[str, str]] | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            response = self._connection.getresponse()
            content = response.read()
            self._found = response.status, json.loads(content or b"{}"), dict(response.getheaders())
        except (OSError, ValueError) as error:
            self._error = error

    def hang_up(self) -> None:
        """Close the connection before the answer is there."""
        assert self._connection.sock is not None
        self._connection.sock.shutdown(2)

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def answer(self) -> tuple[int, dict[str, Any], dict[str, str]]:
        """The status, the body and the headers."""
        self._thread.join(60)
        if self._error is not None:
            raise self._error
        assert self._found is not None, "no answer came"
        return self._found


def generate(url: str, token_ids: list[int], *, key: str = "", path: str = "", **params: Any) -> Request:
    body = {"model": "any", "token_ids": token_ids, "sampling_params": params}
    return Request(url, f"{path}/inference/v1/generate", body, key=key)
