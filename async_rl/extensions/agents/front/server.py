"""The process that speaks HTTP for a generator: it takes the calls of agents, and hands them to the generator's loop.

It is a process of its own, because a thread beside a busy loop answers late. It knows the keys of the open sessions and
the numbers of the calls that run, and no token: what a call means is decided in the generator (``rollouts``). It ends
with the generator, whose socket closes.

Paths, each also below ``/s/KEY``, where KEY is the session's key; otherwise the key is the API key (``Authorization:
Bearer``):

- ``POST /inference/v1/generate``: token ids in, token ids out. The request and the answer have the shape of vLLM's
  endpoint as ``renderers.client.generate`` reads it; ``weight_versions`` is added, the version of the weights that
  sampled each token.
- ``POST /v1/chat/completions``, ``/v1/messages`` and ``/v1/responses``: messages in, messages out (``chat``,
  ``conversations``), as three APIs write them (``dialects``). ``POST /v1/messages/count_tokens``: a prompt's length.
- ``GET /v1/models``: the model's name, with ``max_model_len``.
- ``POST /finish``, only below ``/s/KEY``: the session's reward. Its API key is the session's second key, which agents
  do not hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import socket
import sys
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from async_rl.extensions.agents.front.anthropic_messages import MESSAGES
from async_rl.extensions.agents.front.chat import (
    CHATS,
    ChatRenderer,
    ChatRequest,
    Draft,
    chat_call,
    load_renderer,
    prompt_of,
    read_chat,
)
from async_rl.extensions.agents.front.conversations import ChatPrompt, Conversations
from async_rl.extensions.agents.front.demands import TRIES
from async_rl.extensions.agents.front.dialects import Body, Dialect
from async_rl.extensions.agents.front.messages import (
    Accept,
    Answered,
    Call,
    Close,
    Delivered,
    Finish,
    Gone,
    Join,
    Offered,
    Open,
    Piece,
    Refuse,
    Reply,
    ToFront,
    ToGenerator,
    pack,
    take_for_front,
)
from async_rl.extensions.agents.front.openai_responses import RESPONSES
from async_rl.extensions.agents.front.remote_programs import RemotePrograms
from async_rl.extensions.agents.front.requests import (
    POLICY,
    FinishRequest,
    Note,
    RefusedError,
    RequestRules,
    generate_answer,
    has_no_effect,
    read_generate,
    read_json,
)
from async_rl.extensions.agents.relay.loopback import error_body, serve_http
from async_rl.extensions.agents.relay.responses import HandedResponse, bearer, disconnected, read_body, refusal
from async_rl.process.fault_points import fault_point
from async_rl.process.helper import parent_socket

logger = logging.getLogger(__name__)

_BODY_BYTES, _BODY_BYTES_PER_TOKEN = 1 << 20, 64
"""A request is refused above this size, and this for each token of the longest sequence. The id of a token has up to 8
bytes in JSON, a token of text seldom more than 16."""
MAX_CALLS_OF_SESSION = 256
"""Maximum number of calls of one session that run at the same time."""
_GENERATE = "/inference/v1/generate"
_CHUNK = 1 << 16
_EVENTS = "text/event-stream; charset=utf-8"
_TELL_S = 0.1
"""Time between two looks for more of an answer that is streamed."""
PING_S = 15.0
"""A client that awaits events hears so often that the server is there."""
_CLIENT_GONE = 499
"""The status of an answer that nobody gets, as nginx has it."""
_MAX_CLOSED = 65_536
"""How many keys of closed sessions are remembered, so that their agents learn why they are refused."""
_OF_AGENT = ("invalid_request", "unsupported", "no_chat_template", "too_large")
"""The codes of refusals that the agent's author, or the run's, has to mend."""
_MAX_LOGGED = 64
_CLOSED = {
    "ended": "the session of this key has ended",
    "expired": "the session of this key has expired: it made no call for too long (environment.timeout_s)",
    "stopped": "the session of this key was stopped: its answers would be too old to train on (queue.max_staleness), "
    "or another rollout of its group can't be played",
}


_CALLS_PER_S, _BYTES_PER_S = 100.0, 6.4e6
"""What one key may send for long; more of it waits, so that one agent can't keep others out."""
_BURST_S = 2.56
"""How long a key may send faster: 256 short calls, or 16 MB, at once."""
_MAX_PACED = 4096


class Pace:
    """Says how long requests of a key must wait, so that the key keeps to its rates. ``clock``: time in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._paid_until_s: dict[str, float] = {}

    def wait_s(self, key: str, num_calls: int, num_bytes: int) -> float:
        """Count ``num_calls`` calls with ``num_bytes`` bytes. Return how many seconds they must wait."""
        now_s = self._clock()
        if len(self._paid_until_s) > _MAX_PACED:
            self._paid_until_s = {one: until for one, until in self._paid_until_s.items() if until > now_s}
        until_s = max(self._paid_until_s.get(key, now_s), now_s) + num_calls / _CALLS_PER_S + num_bytes / _BYTES_PER_S
        self._paid_until_s[key] = until_s
        return max(0.0, until_s - now_s - _BURST_S)


class ClientGoneError(Exception):
    """The client of a call has closed its connection."""


class Calls:
    """The generator as the front sees it: its open sessions, and the calls that it has not answered.

    ``programs`` are those on other machines, which hear of sessions, too.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, first_call: int) -> None:
        self._reader, self._writer = reader, writer
        self._numbers = itertools.count(first_call)
        self._open: dict[str, set[int]] = {}
        self._closed: OrderedDict[str, str] = OrderedDict()
        self._waiting: dict[int, asyncio.Future[Reply | Accept | Refuse | Close]] = {}
        self._begun: dict[int, bytes] = {}
        """Tokens of running calls that their clients were not told."""
        self.programs: RemotePrograms | None = None

    async def listen(self) -> None:
        """Take the generator's messages until it closes the connection."""
        buffer = bytearray()
        while chunk := await self._reader.read(_CHUNK):
            buffer += chunk
            while (message := take_for_front(buffer)) is not None:
                self._take(message)

    def check_key(self, key: str) -> None:
        """Refuse a key without an open session, and a session with too many calls."""
        if (calls := self._open.get(key)) is None:
            if key in self._closed:
                raise RefusedError(410, _CLOSED[self._closed[key]], "session_closed")
            text = "expected a session's key in the path (/s/KEY/...) or as the API key, got none that is known here"
            raise RefusedError(401, text, "unknown_key")
        if len(calls) >= MAX_CALLS_OF_SESSION:
            text = f"this session has {len(calls)} calls at once; send them one after the other"
            raise RefusedError(429, text, "too_many_calls")

    def is_open(self, key: str) -> bool:
        return key in self._open

    @contextlib.contextmanager
    def numbered(self, key: str, count: int) -> Iterator[list[int]]:
        """Number ``count`` calls of a session, which count as running within the ``with`` block. If that raises, those
        are stopped that are not refused.
        """
        numbers = [next(self._numbers) for _ in range(count)]
        calls = self._open[key]
        calls.update(numbers)
        self._waiting.update((number, asyncio.get_running_loop().create_future()) for number in numbers)
        try:
            yield numbers
        except BaseException:
            for number in numbers:
                future = self._waiting[number]
                if not future.done() or isinstance(future.result(), Reply):
                    self.send(Gone(number))
            raise
        finally:
            calls.difference_update(numbers)
            for number in numbers:
                del self._waiting[number]
                self._begun.pop(number, None)

    async def answers(
        self, calls: Sequence[Call | Finish], request: Request, hear: Callable[[bytes], Awaitable[None]] | None = None
    ) -> list[Any]:
        """Pass the calls of one request on, or a session's reward, and wait for all answers.

        Return a ``Reply`` for each call, and ``Accept`` for a reward. ``hear`` gets the tokens that come before, int32
        [N], every ``_TELL_S``.

        Raises:
            RefusedError: the generator refuses one of them.
            ClientGoneError: the client has gone meanwhile.
        """
        for call in calls:
            self.send(call)
        fault_point("front.called")  # a call is sent to the generator, it is not answered
        first, look_s = asyncio.FIRST_COMPLETED, None if hear is None else _TELL_S
        gone = asyncio.create_task(disconnected(request))
        try:
            for call in calls:
                future = self._waiting[call.call]
                while not (await asyncio.wait({future, gone}, timeout=look_s, return_when=first))[0] and hear:
                    await hear(self._begun.pop(call.call, b""))
                if gone.done():
                    raise ClientGoneError
                found = future.result()
                if isinstance(found, Close):
                    raise RefusedError(410, _CLOSED[found.reason], "session_closed")
                if isinstance(found, Refuse):
                    raise RefusedError(found.status, found.message, found.code, found.param)
            return [self._waiting[call.call].result() for call in calls]
        finally:
            gone.cancel()

    def send(self, message: ToGenerator) -> None:
        self._writer.write(pack(message))

    def _take(self, message: ToFront) -> None:
        if isinstance(message, Open):
            for key in message.keys:
                self._open.setdefault(key, set())
            return
        if isinstance(message, Join | Offered | Close) and self.programs is not None:
            self.programs.take(message)
        if isinstance(message, Join | Offered):
            return
        if isinstance(message, Piece):
            if message.call in self._waiting:
                self._begun[message.call] = self._begun.get(message.call, b"") + message.token_ids
            return
        if isinstance(message, Close):
            self._closed[message.key] = message.reason
            if len(self._closed) > _MAX_CLOSED:
                self._closed.popitem(last=False)
            numbers = self._open.pop(message.key, set())
        else:
            numbers = {message.call}
        for number in numbers:
            future = self._waiting.get(number)
            if future is not None and not future.done():
                future.set_result(message)


_COUNT = "/v1/messages/count_tokens"
"""The path at which no answer is asked for, but the length of the prompt."""
DIALECTS = {"/v1/chat/completions": CHATS, "/v1/messages": MESSAGES, _COUNT: MESSAGES, "/v1/responses": RESPONSES}
"""In what form chats are asked for, by the path."""


class Endpoints:
    """The HTTP endpoints of one generator."""

    def __init__(
        self, calls: Calls, rules: RequestRules, max_model_len: int, renderer: asyncio.Future[ChatRenderer]
    ) -> None:
        """``renderer`` may still be loading."""
        self._calls, self._rules, self._max_model_len, self._renderer = calls, rules, max_model_len, renderer
        self._conversations: dict[str, tuple[Conversations, asyncio.Lock]] = {}
        self._pace = Pace()
        self._noted: set[str] = set()

    def routes(self) -> list[Route]:
        """Return the routes, each also below ``/s/KEY``."""
        chats = [(path, partial(self.chat, dialect), "POST") for path, dialect in DIALECTS.items()]
        paths = [("/v1/models", self.models, "GET"), (_GENERATE, self.generate, "POST"), *chats]
        return [
            Route(prefix + path, endpoint, methods=[method])
            for path, endpoint, method in paths
            for prefix in ("", "/s/{key}")
        ] + [Route("/s/{key}/finish", self.finish, methods=["POST"])]

    async def models(self, request: Request) -> Response:
        """``GET /v1/models``: the names that requests may have."""
        await self._wait(_key(request), 0)
        common = {"object": "model", "created": 0, "owned_by": "async-rl", "max_model_len": self._max_model_len}
        names = dict.fromkeys((self._rules.model, POLICY, *sorted(self._rules.untrained)))
        return _json({"object": "list", "data": [{"id": name, **common} for name in names]})

    async def generate(self, request: Request) -> Response:
        """``POST /inference/v1/generate``."""
        key = _key(request)
        note, without_effect = self._note_of_request()
        wanted = read_generate(await self._body(request, key), self._rules, note)
        self._calls.check_key(key)  # it may have been closed while the body arrived
        with self._calls.numbered(key, 1) as (number,):
            call = msgspec.structs.replace(wanted, call=number, key=key, without_effect=without_effect)
            (reply,) = await self._calls.answers([call], request)
            return self._answer(msgspec.json.encode(generate_answer(reply)), [number])

    async def chat(self, dialect: Dialect, request: Request) -> ASGIApp:
        """``POST`` to one of the paths of ``DIALECTS``."""
        key = _key(request)
        asked = read_json(await self._body(request, key), dict[str, Any])
        note, without_effect = self._note_of_request()
        wanted = read_chat(dialect.chat(asked, note), self._rules, note)
        wanted.without_effect = without_effect
        renderer = await asyncio.shield(self._renderer)
        known, one_by_one = self._conversations_of(key, renderer)
        # A long text takes a thread for seconds. A session has one, so that its calls keep no other one waiting.
        async with one_by_one:
            prompt = await asyncio.to_thread(prompt_of, known, wanted, renderer, note)
        if request.url.path.endswith(_COUNT):
            return _json({"input_tokens": len(prompt.token_ids)})
        play = partial(self._play, key, wanted, known, prompt, renderer, request)
        if asked.get("stream"):
            return partial(self.stream, dialect, asked, play)
        numbers, chat = await play()
        return self._answer(msgspec.json.encode(dialect.answer(chat, asked)), numbers)

    async def _play(
        self, key: str, wanted: ChatRequest, known: Conversations, prompt: ChatPrompt, renderer: ChatRenderer,
        request: Request, tell: Callable[[Body | None], Awaitable[None]] | None = None,
    ) -> tuple[list[int], Body]:  # fmt: skip
        """Have a chat answered, and remember what was said. Return the numbers of its calls, and the answer.

        ``tell`` gets the answer every ``_TELL_S`` as far as it is certain; None if it has not grown.
        """
        for _ in range(TRIES if wanted.demand else 1):
            self._calls.check_key(key)
            with self._calls.numbered(key, wanted.n) as numbers:
                draft = Draft(wanted, self._rules.model, prompt, numbers[0], renderer)
                calls = [chat_call(wanted, prompt, number, key, choice) for choice, number in enumerate(numbers)]
                hear = None if tell is None else lambda ids, draft=draft: tell(draft.grown(ids))
                replies = await self._calls.answers(calls, request, hear)
                chat = draft.whole(replies)
                if wanted.demand and not all(map(wanted.demand, chat["choices"])):
                    for number in numbers:
                        self._calls.send(Gone(number))
                    continue
                for number, reply, choice in zip(numbers, replies, chat["choices"], strict=True):
                    self._calls.send(Answered(number, msgspec.json.encode(choice["message"])))
                    token_ids, is_cut = np.frombuffer(reply.token_ids, np.int32), reply.finish_reason == "length"
                    known.add(prompt, number, token_ids, choice["message"], is_cut=is_cut)
                return numbers, chat
        text = f"expected an answer in the form that the request asks for, got {TRIES} others"
        raise RefusedError(422, text, "form_not_met")

    async def stream(
        self, dialect: Dialect, asked: Body, play: Callable[..., Awaitable[tuple[list[int], Body]]],
        scope: Scope, receive: Receive, send: Send,
    ) -> None:  # fmt: skip
        """Respond to a chat with events. The response begins with the first one: what is wrong before is none."""
        told, number, written_s, is_begun = None, itertools.count(), time.monotonic(), False

        async def write(message: Message) -> None:
            nonlocal written_s, is_begun
            if message["type"] != "http.response.start" or not is_begun:
                is_begun, written_s = True, time.monotonic()
                await send(message)

        def events_to(chat: Body) -> bytes:
            nonlocal told
            before, told = told, dialect.answer(chat, asked)
            return b"".join(dialect.write(one, next(number)) for one in dialect.events(told, before, asked))

        async def tell(chat: Body | None) -> None:
            if chat is not None or time.monotonic() - written_s >= PING_S:
                headers = [(b"content-type", _EVENTS.encode())]
                await write({"type": "http.response.start", "status": 200, "headers": headers})
                events = dialect.ping if chat is None else events_to(chat)
                await write({"type": "http.response.body", "body": events, "more_body": True})

        try:
            numbers, chat = await play(tell)
        except (RefusedError, ClientGoneError) as error:
            if not is_begun:
                raise
            if isinstance(error, RefusedError):
                found = json.loads(error_body(error.message, error.code, error.param or None))
                body = dialect.write({**found["error"], **found}, next(number))
                await write({"type": "http.response.body", "body": body})
            return
        await self._answer(events_to(chat), numbers, _EVENTS)(scope, receive, write)

    def _note_of_request(self) -> tuple[Note, Collection[str]]:
        """Return what notes the fields of one request that have no effect, and their names, which it collects."""
        names = set[str]()

        def note(name: str, value: object) -> None:
            if len(names) < _MAX_LOGGED:
                names.add(name)
            self._log(name, value)

        return note, names

    def _log(self, name: str, value: object) -> None:
        """Log a field of requests that has no effect, once."""
        if name not in self._noted and len(self._noted) < _MAX_LOGGED:
            self._noted.add(name)
            what = "" if has_no_effect(name) else " and is not known: correct it if it is misspelled"
            text = "agents' calls have the field %.80r (first %.80r), which has no effect here%s"
            logger.warning(text, name, value, what)

    async def _wait(self, key: str, num_bytes: int) -> None:
        """Wait as long as a request with a key must. Keys without an open session share one rate."""
        if (wait_s := self._pace.wait_s(key if self._calls.is_open(key) else "", 1, num_bytes)) > 0:
            await asyncio.sleep(wait_s)

    async def finish(self, request: Request) -> Response:
        """``POST /s/KEY/finish``."""
        key = _key(request)
        given = read_json(await self._body(request, key), FinishRequest)
        self._calls.check_key(key)
        with self._calls.numbered(key, 1) as (number,):
            await self._calls.answers([Finish(number, key, bearer(request), given.reward, given.score)], request)
            return _json({})

    async def _body(self, request: Request, key: str) -> bytes:
        """Read the body of a call.

        Raises:
            RefusedError: the key has no open session, or the body is too large.
        """
        announced = request.headers.get("content-length", "0")
        num_announced = int(announced) if announced.isdecimal() else 0
        most = _BODY_BYTES + _BODY_BYTES_PER_TOKEN * self._max_model_len
        await self._wait(key, 0 if num_announced > most else num_announced)
        self._calls.check_key(key)
        body = await read_body(request, most)
        self._pace.wait_s(key, 0, max(0, (most if body is None else len(body)) - num_announced))
        if body is None:
            text = f"the request has more than {most} bytes, which no sequence of {self._max_model_len} tokens needs"
            raise RefusedError(413, text, "too_large")
        return body

    def _conversations_of(self, key: str, renderer: ChatRenderer) -> tuple[Conversations, asyncio.Lock]:
        for closed in [one for one in self._conversations if not self._calls.is_open(one)]:
            del self._conversations[closed]
        return self._conversations.setdefault(key, (Conversations(renderer), asyncio.Lock()))

    def _answer(self, body: bytes, numbers: Sequence[int], kind: str = "application/json") -> Response:
        """Return the response to calls, which tells the generator when the client's connection has it."""
        fault_point("front.answered")  # the generator's answer is here, nothing of it is sent to the agent

        def handed() -> None:
            fault_point("front.delivered")  # the agent's connection has the whole answer, the generator does not know
            for number in numbers:
                self._calls.send(Delivered(number))

        def lost() -> None:
            for number in numbers:
                self._calls.send(Gone(number))

        return HandedResponse(body, 200, {"content-type": kind}, lost=lost, handed=handed)


def _key(request: Request) -> str:
    key = request.path_params.get("key")
    return bearer(request) if key is None else str(key)


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


class Refusals:
    """Answers refused requests as OpenAI's and Anthropic's APIs do. Their clients repeat no request that says so.

    What is wrong with the requests of an agent is logged once, because many agents hide it and only call again.
    """

    def __init__(self) -> None:
        self._logged: set[tuple[str, str]] = set()

    async def answer(self, request: Request, error: Exception) -> Response:
        """Return the response to a request that raised a ``RefusedError``."""
        assert isinstance(error, RefusedError)
        what = error.code, error.param
        if error.code in _OF_AGENT and what not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add(what)
            logger.warning("an agent's call is refused (HTTP %d): %.500s", error.status, error.message)
        return refusal(error.status, error.message, error.code, error.param or None)


async def _unknown(request: Request, error: Exception) -> Response:
    """Answer a request for another path or with another method."""
    paths = ", POST ".join([_GENERATE, *DIALECTS])
    text = f"expected POST {paths} or GET /v1/models, got {request.method} {request.url.path:.80}"
    return refusal(404, text, "unknown_path")


async def _nobody(request: Request, error: Exception) -> Response:
    """Answer a client that has gone before it had sent its whole request, or before it was answered."""
    return Response(status_code=_CLIENT_GONE)


def application(
    calls: Calls, rules: RequestRules, max_model_len: int, renderer: asyncio.Future[ChatRenderer]
) -> Starlette:
    """Return the ASGI application."""
    endpoints = Endpoints(calls, rules, max_model_len, renderer)
    handlers = {
        RefusedError: Refusals().answer, ClientDisconnect: _nobody, ClientGoneError: _nobody,
        404: _unknown, 405: _unknown,
    }  # fmt: skip
    return Starlette(routes=endpoints.routes(), exception_handlers=handlers)


async def _serve(listener: socket.socket, link: socket.socket, settings: Mapping[str, Any]) -> None:
    reader, writer = await asyncio.open_connection(sock=link)
    calls = Calls(reader, writer, settings["first_call"])
    load = asyncio.to_thread(load_renderer, settings["tokenizer"], settings["template_arguments"])
    renderer = asyncio.ensure_future(load)
    rules = msgspec.convert(settings["rules"], RequestRules)
    app = application(calls, rules, settings["max_model_len"], renderer)
    calls.programs = RemotePrograms(app, calls.send, MAX_CALLS_OF_SESSION)
    serving = asyncio.create_task(serve_http(app, listener))
    listening = asyncio.create_task(calls.listen())
    await asyncio.wait({serving, listening}, return_when=asyncio.FIRST_COMPLETED)
    for task in (serving, listening):
        if task.done():
            task.result()
    # The generator is gone, and nobody could answer what still runs. A thread may be loading the tokenizer.
    os._exit(0)


def main() -> None:
    """Serve until the generator closes its end of the connection, the first argument.

    The second is the descriptor of the socket that listens, the third has the settings, as ``Front`` writes them.
    """
    link, listener = parent_socket(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    link.setblocking(False)
    asyncio.run(_serve(listener, link, json.loads(sys.argv[3])))


if __name__ == "__main__":
    main()
