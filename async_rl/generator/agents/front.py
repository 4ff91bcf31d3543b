"""The process that speaks HTTP for a generator: it takes the calls of agents, and hands them to the generator's loop.

It is a process of its own, because a thread beside a busy loop answers late. It knows the keys of the open sessions and
the numbers of the calls that run, and no token: what a call means is decided in the generator (``rollouts``). It ends
with the generator, whose socket closes.

Paths, each also below ``/s/KEY``, where KEY is the session's key; otherwise the key is the API key (``Authorization:
Bearer``):

- ``POST /inference/v1/generate``: token ids in, token ids out. The request and the answer have the shape of vLLM's
  endpoint as ``renderers.client.generate`` reads it; ``weight_versions`` is added, the version of the weights that
  sampled each token.
- ``GET /v1/models``: the model's name, with ``max_model_len``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import math
import signal
import socket
from array import array
from collections import OrderedDict
from collections.abc import Generator as Generator_
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from async_rl.generator.agents.messages import Call, Close, Delivered, Gone, Open, Refuse, Reply, pack, take_for_front

MAX_BODY_BYTES = 32 << 20
"""A larger request is refused: a prompt of a million tokens has about 7 MB."""
MAX_CALLS_OF_SESSION = 256
"""Maximum number of calls of one session that run at the same time."""
_CHUNK = 1 << 16
_MAX_CLOSED = 65_536
"""How many keys of closed sessions are remembered, so that their agents learn why they are refused."""
_CLOSED = {
    "ended": "the session of this key has ended",
    "expired": "the session of this key has expired: it made no call for too long (environment.timeout_s)",
    "stopped": "the session of this key was stopped: its answers would be too old to train on (queue.max_staleness), "
    "or another rollout of its group can't be played",
}
_NOT_OURS: Mapping[str, Any] = {
    "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "min_tokens": 0, "ignore_eos": False,
    "logit_bias": None, "bad_words": None, "allowed_token_ids": None, "structured_outputs": None, "n": 1,
    "prompt_logprobs": None, "logits_processors": None, "extra_args": None,
}  # fmt: skip
"""Settings that would change the distribution, or the shape of the answer, with the only value that is taken."""
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
"""Settings that must be the run's, if they are given."""


class RefusedError(Exception):
    """A request is refused with an HTTP status."""

    def __init__(self, status: int, message: str, code: str, param: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param


class ClientGoneError(Exception):
    """The client of a call has closed its connection."""


class GenerateRequest(msgspec.Struct):
    """The body of ``POST /inference/v1/generate``. Fields that are not listed are ignored."""

    token_ids: list[int]
    sampling_params: dict[str, Any] = {}
    stream: bool = False
    features: Any = None
    model: str = ""


_requests = msgspec.json.Decoder(GenerateRequest)


class Calls:
    """The generator as the front sees it: its open sessions, and the calls that it has not answered."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, first_call: int) -> None:
        self._reader, self._writer = reader, writer
        self._numbers = itertools.count(first_call)
        self._open: dict[str, set[int]] = {}
        self._closed: OrderedDict[str, str] = OrderedDict()
        self._waiting: dict[int, asyncio.Future[Reply | Refuse | Close]] = {}

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

    @contextlib.contextmanager
    def call(self, key: str) -> Iterator[int]:
        """Number a call of a session, which counts as running within the ``with`` block."""
        number = next(self._numbers)
        calls = self._open[key]
        calls.add(number)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            yield number
        finally:
            calls.discard(number)
            del self._waiting[number]

    async def answer(self, call: Call, request: Request) -> Reply:
        """Pass a call on, and wait for its answer.

        Raises:
            RefusedError: the generator refuses it.
            ClientGoneError: the client has gone meanwhile.
        """
        future = self._waiting[call.call]
        self.send(call)
        gone = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait({future, gone}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                raise ClientGoneError
        finally:
            gone.cancel()
        found = future.result()
        if isinstance(found, Reply):
            return found
        if isinstance(found, Close):
            raise RefusedError(410, _CLOSED[found.reason], "session_closed")
        raise RefusedError(found.status, found.message, found.code, found.param)

    def send(self, message: Call | Delivered | Gone) -> None:
        self._writer.write(pack(message))

    def _take(self, message: Open | Close | Reply | Refuse) -> None:
        if isinstance(message, Open):
            for key in message.keys:
                self._open.setdefault(key, set())
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


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class AnswerResponse(Response):
    """An answer, which tells the generator when it has been handed to the client's connection."""

    media_type = "application/json"

    def __init__(self, content: bytes, calls: Calls, call: int) -> None:
        super().__init__(content)
        self._calls, self._call = calls, call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except BaseException:
            self._calls.send(Gone(self._call))
            raise
        self._calls.send(Delivered(self._call))


class Endpoints:
    """The HTTP endpoints of one generator."""

    def __init__(self, calls: Calls, model: str, max_model_len: int) -> None:
        self._calls, self._model, self._max_model_len = calls, model, max_model_len

    def routes(self) -> list[Route]:
        """Return the routes, each also below ``/s/KEY``."""
        paths = [("/v1/models", self.models, "GET"), ("/inference/v1/generate", self.generate, "POST")]
        return [
            Route(prefix + path, endpoint, methods=[method])
            for path, endpoint, method in paths
            for prefix in ("", "/s/{key}")
        ]

    async def models(self, request: Request) -> Response:
        """``GET /v1/models``. Any model name is taken in requests: there is only one."""
        card = {
            "id": self._model, "object": "model", "created": 0, "owned_by": "async-rl",
            "max_model_len": self._max_model_len,
        }  # fmt: skip
        return _json({"object": "list", "data": [card]})

    async def generate(self, request: Request) -> Response:
        """``POST /inference/v1/generate``."""
        key = _key(request)
        self._calls.check_key(key)
        wanted = read_generate(await _body(request))
        self._calls.check_key(key)  # it may have been closed while the body arrived
        with self._calls.call(key) as number:
            call = msgspec.structs.replace(wanted, call=number, key=key)
            try:
                reply = await self._calls.answer(call, request)
            except ClientGoneError:
                self._calls.send(Gone(number))
                return Response(status_code=499)
            return AnswerResponse(msgspec.json.encode(generate_answer(reply)), self._calls, number)


def read_generate(body: bytes) -> Call:
    """Read the body of ``POST /inference/v1/generate``. The call has no number and no key yet.

    Raises:
        RefusedError: it is malformed, or asks for what would not be the run's distribution.
    """
    try:
        wanted = _requests.decode(body)
        token_ids = array("i", wanted.token_ids)
    except msgspec.MsgspecError as error:
        raise RefusedError(400, f"the request: {error}", "invalid_request") from None
    except (OverflowError, TypeError):
        raise RefusedError(400, "token_ids: expected integers below 2^31", "invalid_request", "token_ids") from None
    if not token_ids:
        raise RefusedError(400, "token_ids: expected at least one token", "invalid_request", "token_ids")
    if wanted.stream or wanted.features is not None:
        name = "stream" if wanted.stream else "features"
        raise RefusedError(400, f"{name}: can't be had here; leave it out", "unsupported", name)
    params = wanted.sampling_params
    return Call(
        0, "", token_ids.tobytes(), max_tokens=_count(params, "max_tokens"), stop=_stop(params),
        stop_token_ids=_stop_token_ids(params), seed=_seed(params), settings=settings_of(params),
    )  # fmt: skip


def settings_of(params: Mapping[str, Any]) -> dict[str, float]:
    """Return the sampling settings that a request names, which the generator compares with the run's.

    Raises:
        RefusedError: it names another setting that would change the distribution.
    """
    for name, only in _NOT_OURS.items():
        if (got := params.get(name)) is not None and got != only and got not in ([], {}):
            text = f"{name}: expected {only!r} or none, got {got!r}: what is sampled otherwise can't be trained on"
            raise RefusedError(400, text, "unsupported", name)
    found = {name: params[name] for name in _SAMPLING if params.get(name) is not None}
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise RefusedError(400, f"{name}: expected a number, got {value!r}", "invalid_request", name)
    return {name: float(value) for name, value in found.items()}


def _count(params: Mapping[str, Any], name: str) -> int | None:
    value = params.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        raise RefusedError(
            400, f"{name}: expected a number of tokens from 1 on, got {value!r}", "invalid_request", name
        )
    return value


def _seed(params: Mapping[str, Any]) -> int:
    value = params.get("seed")
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise RefusedError(400, f"seed: expected an integer of 64 bits, got {value!r}", "invalid_request", "seed")
    return value


def _stop(params: Mapping[str, Any]) -> tuple[str, ...]:
    value = params.get("stop")
    texts = [value] if isinstance(value, str) else (value or [])
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise RefusedError(
            400, "stop: expected a text, or a list of texts that are not empty", "invalid_request", "stop"
        )
    return tuple(texts)


def _stop_token_ids(params: Mapping[str, Any]) -> tuple[int, ...]:
    value = params.get("stop_token_ids") or []
    if not isinstance(value, list) or not all(type(one) is int and 0 <= one < 2**31 for one in value):
        raise RefusedError(400, "stop_token_ids: expected a list of token ids", "invalid_request", "stop_token_ids")
    return tuple(value)


def generate_answer(reply: Reply) -> dict[str, Any]:
    """Return the body of an answer to ``POST /inference/v1/generate``: what ``renderers`` reads, and vLLM's fields."""
    token_ids, logprobs = array("i", reply.token_ids).tolist(), array("f", reply.logprobs).tolist()
    content = [
        {"token": f"token_id:{token}", "token_id": token, "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(token_ids, logprobs, strict=True)
    ]
    num_prompt, num_sampled = reply.num_prompt, len(token_ids)
    return {
        "request_id": f"call-{reply.call}",
        "choices": [
            {
                "index": 0,
                "token_ids": token_ids,
                "logprobs": {"content": content},
                "finish_reason": reply.finish_reason,
                "weight_versions": array("i", reply.versions).tolist(),
            }
        ],
        "prompt_logprobs": None,
        "usage": {
            "prompt_tokens": num_prompt, "completion_tokens": num_sampled, "total_tokens": num_prompt + num_sampled,
        },
    }  # fmt: skip


def _key(request: Request) -> str:
    if (key := request.path_params.get("key")) is not None:
        return key
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise RefusedError(413, f"the request has more than {MAX_BODY_BYTES} bytes", "too_large")
    return bytes(body)


def _json(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    body = msgspec.json.encode(content)
    return Response(body, status_code=status, headers=headers, media_type="application/json")


async def _refusal(request: Request, error: Exception) -> Response:
    """Answer a refused request as OpenAI's API does. Its clients repeat no request that says so."""
    assert isinstance(error, RefusedError)
    kind = "invalid_request_error" if error.status != 401 else "authentication_error"
    content = {"message": error.message, "type": kind, "param": error.param or None, "code": error.code}
    retry = "true" if error.status == 429 else "false"
    return _json({"error": content}, error.status, {"x-should-retry": retry})


def application(calls: Calls, model: str, max_model_len: int) -> Starlette:
    """Return the ASGI application."""
    endpoints = Endpoints(calls, model, max_model_len)
    return Starlette(routes=endpoints.routes(), exception_handlers={RefusedError: _refusal})


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator_[None, None, None]:
        """Leave signals alone: this process ends with its generator."""
        yield


async def _serve(listener: socket.socket, link: socket.socket, model: str, max_model_len: int, first_call: int) -> None:
    reader, writer = await asyncio.open_connection(sock=link)
    calls = Calls(reader, writer, first_call)
    app = application(calls, model, max_model_len)
    server = _Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", ws="none"))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    listening = asyncio.create_task(calls.listen())
    await asyncio.wait({serving, listening}, return_when=asyncio.FIRST_COMPLETED)
    server.force_exit = server.should_exit = True
    for task in (serving, listening):
        if task.done():
            task.result()
    # The generator is gone, and nobody could answer what still runs.


def main() -> NoReturn:
    """Serve until the generator closes its end of the connection."""
    parser = argparse.ArgumentParser()
    parser.add_argument("listener", type=int, help="descriptor of the socket that listens")
    parser.add_argument("link", type=int, help="descriptor of the socket to the generator")
    parser.add_argument("model")
    parser.add_argument("max_model_len", type=int)
    parser.add_argument("first_call", type=int)
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the generator ends this process
    listener, link = socket.socket(fileno=given.listener), socket.socket(fileno=given.link)
    link.setblocking(False)
    asyncio.run(_serve(listener, link, given.model, given.max_model_len, given.first_call))
    raise SystemExit(0)


if __name__ == "__main__":
    main()
