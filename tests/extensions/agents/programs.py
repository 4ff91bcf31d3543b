"""A relay in a thread, and ``async-rl agent`` in another one, for tests of agents on other machines."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from async_rl.extensions.agents.relay.loopback import serve_http
from async_rl.extensions.agents.relay.proxy import Proxy
from async_rl.extensions.agents.relay.server import Relay
from async_rl.net.keys import ClientKeys, ServerKeys


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


class RunningRelay:
    """A relay that may be ended as if it had died, and begun again at its address."""

    def __init__(self, address: str, keys: ServerKeys | None = None) -> None:
        self._relay, self._is_over = Relay(address, keys), threading.Event()
        self._thread = threading.Thread(target=self._relay.serve, args=(self._is_over.is_set,), daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """End it as at the end of a run."""
        self._is_over.set()
        self._thread.join(30)
        self._relay.finish()
        self._relay.close()

    def close(self) -> None:
        if not self._is_over.is_set():
            self._is_over.set()
            self._thread.join(30)
            self._relay.close()


class RunningProxy:
    """``async-rl agent`` without the part that asks the queue server. ``error`` is what ended it."""

    def __init__(
        self, address: str, keys: ClientKeys | None, command: Sequence[str], num_parallel: int, sessions_key: str,
        wait_s: float,
    ) -> None:  # fmt: skip
        self.error: BaseException | None = None
        self.is_ready = threading.Event()
        self._arguments = address, keys, tuple(command), num_parallel, sessions_key, wait_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self.is_ready.wait(60)

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self.error = error
        finally:
            self.is_ready.set()

    async def _serve(self) -> None:
        address, keys, command, num_parallel, sessions_key, wait_s = self._arguments
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        proxy = Proxy(
            address, keys, self.url, sessions_key=sessions_key, command=command, num_parallel=num_parallel
        )  # fmt: skip
        serving = asyncio.create_task(serve_http(proxy.application(), self._listener))
        self.is_ready.set()
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


@contextmanager
def a_relay(address: str, keys: ServerKeys | None = None) -> Iterator[RunningRelay]:
    relay = RunningRelay(address, keys)
    try:
        yield relay
    finally:
        relay.close()


@contextmanager
def a_proxy(
    address: str, keys: ClientKeys | None = None, *, command: Sequence[str] = (), num_parallel: int = 1,
    sessions_key: str = "", wait_s: float = 60.0,
) -> Iterator[RunningProxy]:  # fmt: skip
    proxy = RunningProxy(address, keys, command, num_parallel, sessions_key, wait_s)
    try:
        yield proxy
    finally:
        proxy.close()
