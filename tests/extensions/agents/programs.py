"""A relay and ``async-rl agent``, each in a thread, for agents on other machines; requests of a client, in threads."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from async_rl.extensions.agents.relay.loopback import serve_http
from async_rl.extensions.agents.relay.proxy import Proxy
from async_rl.extensions.agents.relay.server import Relay
from async_rl.net.keys import ClientKeys, ServerKeys


@contextmanager
def a_relay(address: str, keys: ServerKeys | None = None) -> Iterator[threading.Event]:
    """A relay that ends with the block as if it had died, or, if the event is set, at once as at the end of a run."""
    relay, is_over, has_finished = Relay(address, keys), threading.Event(), threading.Event()

    def serve() -> None:
        relay.serve(lambda: is_over.is_set() or has_finished.is_set())
        if has_finished.is_set():
            relay.finish()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield has_finished
    finally:
        is_over.set()
        thread.join(30)
        relay.close()


class RunningProxy:
    """``async-rl agent`` without the part that asks the queue server. ``error`` is what ended it."""

    def __init__(self, address: str, keys: ClientKeys | None, wait_s: float, **options: Any) -> None:
        self.error: BaseException | None = None
        self._is_ready = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, args=(address, keys, wait_s, options), daemon=True)
        self._thread.start()
        assert self._is_ready.wait(60)

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def _run(self, *arguments: Any) -> None:
        try:
            asyncio.run(self._serve(*arguments))
        except BaseException as error:
            self.error = error
        finally:
            self._is_ready.set()

    async def _serve(self, address: str, keys: ClientKeys | None, wait_s: float, options: dict[str, Any]) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        proxy = Proxy(address, keys, self.url, **options)
        serving = asyncio.create_task(serve_http(proxy.application(), self._listener))
        self._is_ready.set()
        try:
            await proxy.run(wait_s)
        finally:
            proxy.close()
            serving.cancel()
            await asyncio.wait([serving])

    def close(self) -> None:
        if not self.is_over and self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(60)
        assert self.is_over


def a_proxy(
    address: str, keys: ClientKeys | None = None, *, wait_s: float = 60.0, command: Sequence[str] = (),
    num_parallel: int = 1, sessions_key: str = "",
) -> closing[RunningProxy]:  # fmt: skip
    return closing(
        RunningProxy(
            address, keys, wait_s, command=tuple(command), num_parallel=num_parallel, sessions_key=sessions_key
        )
    )


class Request:
    """One request, which begins at once. ``answer`` waits for it."""

    def __init__(
        self,
        url: str,
        path: str,
        body: Any = None,
        *,
        method: str = "POST",
        key: str = "",
        raw: bytes | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._connection = HTTPConnection(urlsplit(url).netloc, timeout=60)
        headers = {**headers, **({"Authorization": f"Bearer {key}"} if key else {})}
        data = raw if raw is not None else json.dumps(body).encode() if body is not None else None
        self._connection.request(method, path, data, headers)
        self._found: Future[tuple[int, dict[str, Any], dict[str, str]]] = Future()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            response = self._connection.getresponse()
            content = response.read()
            self._found.set_result((response.status, json.loads(content or b"{}"), dict(response.getheaders())))
        except (OSError, ValueError) as error:
            self._found.set_exception(error)

    def hang_up(self) -> None:
        """Close the connection before the answer is there."""
        assert self._connection.sock is not None
        self._connection.sock.shutdown(2)

    @property
    def is_done(self) -> bool:
        return self._found.done()

    def answer(self) -> tuple[int, dict[str, Any], dict[str, str]]:
        """The status, the body and the headers."""
        return self._found.result(60)


def generate(url: str, token_ids: list[int], *, key: str = "", path: str = "", **params: Any) -> Request:
    body = {"model": "policy", "token_ids": token_ids, "sampling_params": params}
    return Request(url, f"{path}/inference/v1/generate", body, key=key)
