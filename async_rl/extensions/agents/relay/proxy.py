"""``async-rl agent``: takes sessions of a run's generators for programs on this machine, and carries their HTTP calls.

It serves HTTP on loopback. With a command, it runs the command once for each session that it takes, in the processes of
an ``EnvironmentPool``, as a generator runs ``environment.command``. Without one, programs take sessions themselves:

- ``POST /sessions`` waits up to 20 seconds for a session and returns ``base_url``, ``api_key``, ``finish_url``,
  ``finish_key``, ``messages``, ``prompt`` and ``extra_info``; 204 if there is none.
- ``POST /s/KEY/finish``, with the second key as API key, ends a session: with ``reward`` (and ``score``), with
  ``error`` if the program failed, or with neither, so that the run's reward functions judge the last answer.

All other requests go to the front of the session's generator. Their key is in the path or is the API key.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from async_rl.config.generator import EnvironmentConfig
from async_rl.environments.pool import EnvironmentPool, Event
from async_rl.errors import AddressError, WireError
from async_rl.extensions.agents.programs.isolation import warning
from async_rl.extensions.agents.programs.pool import program_pool
from async_rl.extensions.agents.relay import messages
from async_rl.extensions.agents.relay.client import RelayClient
from async_rl.extensions.agents.relay.messages import FOR_PROXY, MAX_BODY_BYTES, RELAY, decode
from async_rl.extensions.agents.relay.responses import HandedResponse, bearer, first_of, is_equal, read_body, refusal
from async_rl.net.keys import ClientKeys

logger = logging.getLogger(__name__)

WAIT_S = 20.0
_POLL_S, _LONGEST_POLL_S, _LOOK_S = 0.01, 0.1, 0.5
_MAX_TEXT = 2000
_FOR_EVER_S = 1e9
"""The generator limits the time of a session."""


@dataclass(frozen=True, slots=True)
class Held:
    """A session that this proxy has. ``front`` is the connection of its generator, ``task`` is from ``Session``."""

    key: str
    front: int
    task: dict[str, Any]

    @property
    def finish_key(self) -> str:
        return str(self.task["endpoint"]["finish_key"])


class Proxy:
    """The sessions of this machine. It implements ``relay.client.Listener``. Create it in the loop.

    Args:
        address, keys: as for ``RelayClient``.
        url: this proxy's own address, without a path.
        sessions_key: the API key that ``POST /sessions`` asks for; empty for any.
        command: the program that plays sessions; empty if programs take them by ``POST /sessions``.
        num_parallel: the number of sessions for which the command runs at once.
    """

    def __init__(
        self, address: str, keys: ClientKeys | None, url: str, *, sessions_key: str = "", command: Sequence[str] = (),
        num_parallel: int = 1,
    ) -> None:  # fmt: skip
        self._address, self._url, self._sessions_key = address, url, sessions_key
        self._command, self._num_parallel = tuple(command), num_parallel
        self._numbers = itertools.count(1)
        self._held: dict[str, Held] = {}
        self._wants: dict[int, asyncio.Future[Held | None]] = {}
        self._requests: dict[int, tuple[Held, asyncio.Future[messages.Answer | None]]] = {}
        self._is_connected, self._lost_s = False, time.monotonic()
        self._is_finished = False
        self._pool: EnvironmentPool | None = None
        if command:
            if warned := warning("loopback"):
                logger.warning("%s", warned)
            self._pool = program_pool(EnvironmentConfig(command=self._command, session_timeout_s=_FOR_EVER_S))
        self._client = RelayClient(address, keys, asyncio.get_running_loop(), self)

    # The relay.

    def connected(self) -> None:
        self._is_connected = True
        self._client.send(RELAY, messages.Hello("proxy"))
        logger.info("connected to the relay at %s", self._address)

    def disconnected(self) -> None:
        logger.warning(
            "the connection to the relay at %s is lost, and with it %d sessions", self._address, len(self._held)
        )
        self._is_connected, self._lost_s = False, time.monotonic()
        for future in self._wants.values():
            _resolve(future, None)
        for held in list(self._held.values()):
            self._drop(held)

    def received(self, sender: int, body: bytes) -> None:
        try:
            message = decode(body, FOR_PROXY)
        except WireError as error:
            logger.warning("a message of the relay is ignored: %s", error)
            return
        if isinstance(message, messages.Session):
            self._receive_session(sender, message)
        elif isinstance(message, messages.NoSession):
            _resolve(self._wants.get(message.number), None)
        elif isinstance(message, messages.Answer):
            held, future = self._requests.get(message.number, (None, None))
            if held is not None and held.front == sender:
                _resolve(future, message)
        elif isinstance(message, messages.Finished):
            self._is_finished = True
        elif isinstance(message, messages.Gone):
            for held in [one for one in self._held.values() if one.front == sender]:
                self._drop(held)
        elif (held := self._held.get(message.key)) is not None and held.front == sender:
            self._drop(held)

    def _receive_session(self, front: int, message: messages.Session) -> None:
        held, want = Held(message.key, front, json.loads(message.task)), self._wants.get(message.number)
        if want is None or want.done():
            self._client.send(front, messages.GiveBack(message.key))
            return
        self._held[message.key] = held
        want.set_result(held)

    def _drop(self, held: Held) -> None:
        """Forget a session. Its requests are refused, and its command is ended."""
        if self._held.pop(held.key, None) is None:
            return
        for one, future in self._requests.values():
            if one is held:
                _resolve(future, None)
        if self._pool is not None:
            self._pool.cancel(held.key)

    async def _take_when_connected(self) -> Held | None:
        until_s = time.monotonic() + WAIT_S
        while not self._is_connected and time.monotonic() < until_s:
            await asyncio.sleep(_POLL_S)
        return await self._take() if self._is_connected else None

    async def _take(self) -> Held | None:
        """Wait for a session; None if there was none in time."""
        number, future = next(self._numbers), asyncio.get_running_loop().create_future()
        self._wants[number] = future
        self._client.send(RELAY, messages.Want(number, WAIT_S))
        try:
            return await asyncio.wait_for(future, 2 * WAIT_S)
        except TimeoutError:
            return None
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and (held := future.result()) is not None:
                self._give_back(held)
            raise
        finally:
            del self._wants[number]

    def _end(self, held: Held, end: messages.End) -> None:
        if self._held.pop(held.key, None) is not None:
            self._client.send(held.front, end)

    # Commands.

    async def run(self, wait_s: float) -> None:
        """Serve until the run is finished.

        Raises:
            AddressError: there was no connection to the relay for ``wait_s`` seconds.
        """
        wanting: set[asyncio.Task[None]] = set()
        poll_s, logged = _POLL_S, ""
        while not self._is_finished:
            lost_s = 0.0 if self._is_connected else time.monotonic() - self._lost_s
            trouble = self._client.trouble or "there is no connection to the relay"
            if lost_s > wait_s:
                raise AddressError(f"no relay answered at {self._address} for {wait_s:g} s: {trouble}")
            if lost_s and trouble != logged and self._client.trouble:
                logger.warning("%s. This agent goes on trying", trouble)
                logged = trouble
            if self._pool is None:
                await asyncio.sleep(_LOOK_S)
                continue
            while self._is_connected and len(self._held) + len(wanting) < self._num_parallel:
                task = asyncio.create_task(self._begin(self._pool))
                wanting.add(task)
                task.add_done_callback(wanting.discard)
            events = self._pool.poll()
            for event in events:
                self._follow(event)
            poll_s = _POLL_S if events else min(2 * poll_s, _LONGEST_POLL_S)
            await asyncio.sleep(poll_s)

    async def _begin(self, pool: EnvironmentPool) -> None:
        """Wait for a session, and start the command for it."""
        if (held := await self._take()) is not None and held.key in self._held:
            endpoint = held.task["endpoint"]
            own = {**endpoint, "base_url": f"{self._url}/s/{held.key}/v1", "command": list(self._command)}
            pool.start(held.key, {**held.task, "endpoint": own})

    def _follow(self, event: Event) -> None:
        if (held := self._held.get(event.key)) is None:
            return
        if event.type == "ended":
            self._end(held, messages.End(held.key))
            return
        texts = {name: str(event.message.get(name, ""))[-_MAX_TEXT:] for name in ("error", "detail", "place")}
        logger.warning("the command failed: %s", texts["detail"] or texts["error"])
        self._end(held, messages.End(held.key, **texts, is_transient=bool(event.message.get("is_transient"))))

    def close(self) -> None:
        """End the commands and the connection."""
        if self._pool is not None:
            self._pool.close()
        self._client.close()

    # HTTP.

    def application(self) -> Starlette:
        """Return the ASGI application."""
        methods = ["GET", "POST"]
        return Starlette(
            routes=[
                *([] if self._command else [Route("/sessions", self._sessions, methods=["POST"])]),
                Route("/s/{key}/finish", self._finish, methods=["POST"]),
                Route("/s/{key}/{path:path}", self._forward, methods=methods),
                Route("/{path:path}", self._forward, methods=methods),
            ]
        )

    async def _sessions(self, request: Request) -> Response:
        """``POST /sessions``."""
        if self._sessions_key and not is_equal(bearer(request), self._sessions_key):
            return refusal(401, "expected the value of ASYNC_RL_AGENT_KEY as the API key, got another one", "wrong_key")
        taking = asyncio.create_task(self._take_when_connected())
        await first_of(taking, request)
        if not taking.done():
            taking.cancel()
            return Response(status_code=499)
        held = taking.result()
        if held is None:
            return Response(status_code=204)
        task, base = held.task, f"{self._url}/s/{held.key}"
        state = task["state"]
        content = {
            "base_url": f"{base}/v1", "api_key": held.key, "finish_url": f"{base}/finish",
            "finish_key": held.finish_key, "messages": state if isinstance(state, list) else [],
            "prompt": task["prompt"], "extra_info": task["extra_info"],
        }  # fmt: skip
        return HandedResponse(json.dumps(content).encode(), 200, {}, lost=lambda: self._give_back(held))

    def _give_back(self, held: Held) -> None:
        if self._held.pop(held.key, None) is not None:
            self._client.send(held.front, messages.GiveBack(held.key))

    async def _finish(self, request: Request) -> Response:
        """``POST /s/KEY/finish``: a reward is for the generator. Without a command the session ends, too."""
        held = self._held.get(request.path_params["key"])
        body = await read_body(request)
        if held is None or body is None or self._command:
            return await self._forwarded(request, held, body)
        try:
            given: Any = json.loads(body or b"{}")
        except ValueError:
            given = None
        if not isinstance(given, dict) or given.keys() - {"reward", "score", "error"}:
            text = f"expected a JSON object with reward, score or error, got {given!r:.100}"
            return refusal(400, text, "invalid_request")
        if "reward" in given:
            response = await self._forwarded(request, held, body)
            if response.status_code == 200:
                self._end(held, messages.End(held.key))
            return response
        if not is_equal(bearer(request), held.finish_key):
            text = "expected the session's second key as the API key, which its agent does not hold, got another one"
            return refusal(401, text, "wrong_finish_key")
        error = str(given.get("error") or "")[:_MAX_TEXT]
        self._end(held, messages.End(held.key, error, error))
        return Response(b"{}", media_type="application/json")

    async def _forward(self, request: Request) -> Response:
        """Any other request."""
        key = request.path_params.get("key", bearer(request))
        return await self._forwarded(request, self._held.get(key), await read_body(request))

    async def _forwarded(self, request: Request, held: Held | None, body: bytes | None) -> Response:
        """Pass a request on to the session's generator, and return the answer."""
        if held is None or held.key not in self._held:
            return refusal(
                410, "no session that is open here has this key: it has ended, or it is wrong", "session_closed"
            )
        if body is None:
            return refusal(413, f"the request has more than {MAX_BODY_BYTES} bytes", "too_large")
        path = request.url.path.removeprefix(f"/s/{held.key}")
        number, future = next(self._numbers), asyncio.get_running_loop().create_future()
        self._requests[number] = held, future
        try:
            authorization = request.headers.get("authorization", "")
            self._client.send(held.front, messages.Request(number, held.key, request.method, path, authorization, body))
            await first_of(future, request)
            if not future.done():
                self._client.send(held.front, messages.Abandoned(number))
                return Response(status_code=499)
            answer: messages.Answer | None = future.result()
        finally:
            del self._requests[number]
        if answer is None:
            return refusal(410, "the session has ended, or its generator is gone or out of reach", "session_closed")
        send = self._client.send
        return HandedResponse(
            answer.body, answer.status, answer.headers, lost=lambda: send(held.front, messages.Abandoned(number)),
            handed=lambda: send(held.front, messages.Received(number)),
        )  # fmt: skip


def _resolve(future: asyncio.Future[Any] | None, result: Any) -> None:
    if future is not None and not future.done():
        future.set_result(result)
