"""The front's side of the relay: it offers sessions to programs on other machines, and answers their requests.

A request comes as a message and goes to the front's own application, like one over HTTP. An answer counts as delivered
when the proxy has handed it to the program. A session belongs to the proxy that took it: no other one may use its key.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp

from async_rl.errors import WireError
from async_rl.extensions.agents.front.messages import Claimed, Close, Ended, Join, Offered, Outside, ToGenerator
from async_rl.extensions.agents.relay import messages
from async_rl.extensions.agents.relay.client import RelayClient
from async_rl.extensions.agents.relay.loopback import error_body
from async_rl.extensions.agents.relay.messages import FOR_FRONT, MAX_BODY_BYTES, RELAY, decode
from async_rl.net.keys import ClientKeys

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
_GONE = "the machine of the session's program, or the relay (environment.relay), is gone or was out of reach"

_AnswerRequest = Callable[[int, dict[str, str], bytes], Awaitable[None]]
"""Takes an answer's status, headers and body."""


@dataclass(slots=True, eq=False)
class _Exchange:
    """A running request. ``is_over`` is set when the program has the answer, or has gone (``is_gone``)."""

    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    is_gone: bool = False


class RemotePrograms:
    """The sessions of a front that programs on other machines play. It implements ``relay.client.Listener``.

    Args:
        app: answers requests.
        tell: sends a message to the generator.
        max_calls: the number of requests of one session that may run at the same time.
    """

    def __init__(self, app: ASGIApp, tell: Callable[[ToGenerator], None], max_calls: int) -> None:
        self._app, self._tell, self._max_calls = app, tell, max_calls
        self._client: RelayClient | None = None
        self._address, self._trouble, self._num_proxies = "", "", 0
        self._is_connected = False
        self._tasks: dict[str, bytes] = {}
        self._holders: dict[str, int] = {}
        self._exchanges: dict[tuple[int, int], _Exchange] = {}
        self._num_running: Counter[str] = Counter()
        self._running: set[asyncio.Task[None]] = set()

    def take(self, message: Join | Offered | Close) -> None:
        """Take a message of the generator."""
        if isinstance(message, Join):
            keys = ClientKeys(message.public, message.secret, message.server) if message.public else None
            self._address = message.address
            self._client = RelayClient(message.address, keys, asyncio.get_running_loop(), self)
            self._spawn(self._watch())
        elif isinstance(message, Offered):
            self._tasks[message.key] = message.task
            self._send(RELAY, messages.Offer(message.key, message.task))
        elif self._tasks.pop(message.key, None) is not None:
            holder = self._holders.pop(message.key, None)
            if holder is None:
                self._send(RELAY, messages.Withdraw(message.key))
            else:
                self._send(holder, messages.Closed(message.key))

    def connected(self) -> None:
        self._is_connected = True
        self._send(RELAY, messages.Hello("front"))
        for key in self._tasks.keys() - self._holders.keys():
            self._send(RELAY, messages.Offer(key, self._tasks[key]))

    def disconnected(self) -> None:
        self._is_connected, self._num_proxies = False, 0
        for proxy in {*self._holders.values(), *(proxy for proxy, _ in self._exchanges)}:
            self._lose(proxy)

    def received(self, sender: int, body: bytes) -> None:
        try:
            message = decode(body, FOR_FRONT)
        except WireError as error:
            logger.warning("a message of the relay is ignored: %s", error)
            return
        if isinstance(message, messages.Proxies):
            self._num_proxies = message.count
        elif isinstance(message, messages.Gone):
            self._lose(sender)
        elif isinstance(message, messages.Taken):
            self._hand_over(message.key, sender)
        elif isinstance(message, messages.Received | messages.Abandoned):
            if (exchange := self._exchanges.get((sender, message.number))) is not None:
                exchange.is_gone = isinstance(message, messages.Abandoned)
                exchange.is_over.set()
        elif self._holders.get(message.key) != sender:
            if isinstance(message, messages.Request):
                refusal = error_body("no session of this program has this key", "unknown_key")
                self._send(sender, messages.Answer(message.number, 401, _HEADERS, refusal))
        elif isinstance(message, messages.Request):
            self._begin(sender, message)
        elif isinstance(message, messages.GiveBack):
            del self._holders[message.key]
            self._tell(Claimed(message.key, is_taken=False))
            self._send(RELAY, messages.Offer(message.key, self._tasks[message.key]))
        else:
            self._end(message)

    def _send(self, to: int, message: messages.FromFront) -> None:
        if self._client is not None:
            self._client.send(to, message)

    def _hand_over(self, key: str, proxy: int) -> None:
        if key not in self._tasks or key in self._holders:
            self._send(proxy, messages.Closed(key))  # it was closed meanwhile
            return
        self._holders[key] = proxy
        self._tell(Claimed(key, is_taken=True))

    def _end(self, message: messages.End) -> None:
        del self._holders[message.key], self._tasks[message.key]
        self._tell(Ended(message.key, message.error, message.detail, message.place, message.is_transient))

    def _lose(self, proxy: int) -> None:
        """End what a proxy had: it is gone."""
        for exchange in [one for (holder, _), one in self._exchanges.items() if holder == proxy]:
            exchange.is_gone = True
            exchange.is_over.set()
        for key in [key for key, holder in self._holders.items() if holder == proxy]:
            self._end(messages.End(key, _GONE, is_transient=True))

    async def _watch(self) -> None:
        """Tell the generator why no program takes its sessions, when that changes."""
        while self._client is not None:
            trouble = ""
            if not self._is_connected:
                trouble = self._client.trouble or f"there is no connection to the relay at {self._address} yet"
            elif not self._num_proxies:
                trouble = f"no `async-rl agent` is connected to the relay at {self._address}"
            if trouble != self._trouble:
                self._trouble = trouble
                self._tell(Outside(trouble))
            await asyncio.sleep(_LOOK_S)

    # Requests.

    def _begin(self, proxy: int, request: messages.Request) -> None:
        if self._num_running[request.key] >= self._max_calls:
            refusal = error_body(f"this session has {self._max_calls} calls at once", "too_many_calls")
            self._send(proxy, messages.Answer(request.number, 429, {**_HEADERS, "x-should-retry": "true"}, refusal))
            return
        self._num_running[request.key] += 1
        self._spawn(self._serve(proxy, request))

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _serve(self, proxy: int, request: messages.Request) -> None:
        place, exchange = (proxy, request.number), _Exchange()
        self._exchanges[place] = exchange
        try:
            await self._app(_scope(request), *_channel(request, exchange, self._answerer(proxy, request, exchange)))
        except ConnectionResetError:
            pass  # the program has gone, and the generator knows
        except Exception:
            logger.exception("a request of a program elsewhere failed")
            body = error_body("this is a bug in async-rl; see the generator's log", "server_error")
            self._send(proxy, messages.Answer(request.number, 500, _HEADERS, body))
        finally:
            del self._exchanges[place]
            self._num_running[request.key] -= 1
            if not self._num_running[request.key]:
                del self._num_running[request.key]

    def _answerer(self, proxy: int, request: messages.Request, exchange: _Exchange) -> _AnswerRequest:
        async def answer(status: int, headers: dict[str, str], body: bytes) -> None:
            """Send the answer, and wait until the program has it.

            Raises:
                ConnectionResetError: it has gone, or the answer is too large for a message.
            """
            if len(body) > MAX_BODY_BYTES:
                refusal = error_body(f"the answer has more than {MAX_BODY_BYTES} bytes", "too_large")
                self._send(proxy, messages.Answer(request.number, 500, _HEADERS, refusal))
                raise ConnectionResetError
            if not exchange.is_gone:
                self._send(proxy, messages.Answer(request.number, status, headers, body))
                await exchange.is_over.wait()
            if exchange.is_gone:
                raise ConnectionResetError

        return answer


_HEADERS = {"content-type": "application/json", "x-should-retry": "false"}


def _scope(request: messages.Request) -> dict[str, Any]:
    path = f"/s/{request.key}{request.path}"
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(request.body)).encode())]
    if request.authorization:
        headers.append((b"authorization", request.authorization.encode("latin-1", "replace")))
    return {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": request.method, "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers,
        "client": None, "server": None,
    }  # fmt: skip


def _channel(
    request: messages.Request, exchange: _Exchange, answer: Callable[[int, dict[str, str], bytes], Any]
) -> Any:
    """Return the functions ``receive`` and ``send`` with which an ASGI application answers one request."""
    parts: list[bytes] = []
    began: dict[str, Any] = {}
    has_read = False

    async def receive() -> dict[str, Any]:
        nonlocal has_read
        if not has_read:
            has_read = True
            return {"type": "http.request", "body": request.body, "more_body": False}
        await exchange.is_over.wait()
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            began.update(message)
            return
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            headers = {name.decode(): value.decode() for name, value in began["headers"] if name != b"content-length"}
            await answer(began["status"], headers, b"".join(parts))

    return receive, send
