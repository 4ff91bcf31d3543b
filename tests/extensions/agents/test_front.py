"""The HTTP front as a process: keys, requests, refusals, clients that go, and its own death."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import Any, NoReturn

import httpx
import numpy as np
import pytest

from async_rl.extensions.agents.front.chat import ChatRequest, read_chat
from async_rl.extensions.agents.front.messages import Call, Delivered, Gone, Open, Reply, ToGenerator, pack
from async_rl.extensions.agents.front.process import Front, FrontLost
from async_rl.extensions.agents.front.requests import RefusedError, RequestRules
from async_rl.extensions.agents.front.server import Calls, Pace, application
from tests.extensions.agents.programs import Request, generate

DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def shared() -> Iterator[Front]:
    with closing(Front(RequestRules("tiny"), 128)) as front:
        yield front


@pytest.fixture
def front(shared: Front) -> Front:
    shared.open(["k"])
    return shared


def messages(front: Front, count: int = 1) -> list[ToGenerator | FrontLost]:
    found: list[ToGenerator | FrontLost] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(found) < count:
        found += front.poll()
        assert time.monotonic() < deadline, found
        time.sleep(0.002)
    return found


def one_call(front: Front) -> Call:
    (call,) = messages(front)
    assert isinstance(call, Call)
    return call


def reply(call: int, token_ids: list[int] | None = None) -> Reply:
    found = np.array(token_ids or [7, 8], "<i4")
    logprobs, versions = np.full(len(found), -0.5, "<f4"), np.full(len(found), 3, "<i4")
    return Reply(call, found.tobytes(), logprobs.tobytes(), versions.tobytes(), "stop", 2, "text")


def refused(request: Request) -> tuple[int, str, str]:
    """The status, the code and the message of a refusal."""
    status, body, _ = request.answer()
    return status, body["error"]["code"], body["error"]["message"]


@pytest.mark.parametrize(
    ("given", "token_ids"), [({"path": "/s/k"}, [1, 2]), ({"key": "k"}, list(range(100_000)))], ids=["path", "header"]
)
def test_a_call_carries_token_ids_there_and_back(front: Front, given: dict[str, str], token_ids: list[int]):
    request = generate(
        front.url, token_ids, **given, max_tokens=5, logprobs=1, stop=["x"], stop_token_ids=[4], seed=11, top_k=-1,
        skip_special_tokens=False, temperature=1.0, routed_experts_prompt_start=0,
    )  # fmt: skip
    call = one_call(front)
    assert np.frombuffer(call.token_ids, np.int32).tolist() == token_ids
    assert (call.key, call.max_tokens, call.stop, call.stop_token_ids, call.seed) == ("k", 5, ("x",), (4,), 11)
    assert call.settings == {"temperature": 1.0, "top_k": -1.0}
    front.reply(reply(call.call))
    status, body, _ = request.answer()
    (choice,) = body["choices"]
    assert (status, choice["token_ids"], choice["finish_reason"]) == (200, [7, 8], "stop")
    assert choice["weight_versions"] == [3, 3]
    content = choice["logprobs"]["content"]
    assert [(one["token"], one["token_id"], one["logprob"]) for one in content] == [
        ("token_id:7", 7, -0.5), ("token_id:8", 8, -0.5),
    ]  # fmt: skip
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
    assert messages(front) == [Delivered(call.call)]


@pytest.mark.parametrize(
    ("params", "param", "said"),
    [
        ({"token_ids": []}, "token_ids", "at least one token"),
        ({"token_ids": [2**31]}, "token_ids", "integers below 2^31"),
        ({"token_ids": "text"}, None, "Expected `array`, got `str`"),
        ({"token_ids": [1], "stream": True}, "stream", "can't be had"),
        ({"max_tokens": 0}, "max_tokens", "from 1 on, got 0"),
        ({"stop": [""]}, "stop", "not empty"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "a list of token ids"),
        ({"seed": "x"}, "seed", "an integer"),
        ({"temperature": "hot"}, "temperature", "a number, got 'hot'"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "got {'5': 1}"),
        ({"n": 2}, "n", "expected 1"),
        ({"token_ids": [1], "untrained": 1}, "untrained", "true or false"),
        # What would be left aside.
        ({"tools": [{}]}, "tools", "leave it out"),
        ({"token_ids": [1], "temperature": 0}, "temperature", "leave it out"),  # it belongs into sampling_params
        ({"token_ids": [1], "messages": [{"role": "user", "content": "a"}]}, "messages", "leave it out"),
        ({"token_ids": [1], "guided_json": {"type": "object"}}, "guided_json", "leave it out"),
    ],
)
def test_a_malformed_request_is_refused(front: Front, params: dict[str, Any], param: str | None, said: str):
    body = params if "token_ids" in params else {"token_ids": [1], "sampling_params": params}
    status, answer, headers = Request(front.url, "/s/k/inference/v1/generate", body).answer()
    assert (status, answer["error"]["param"], headers["x-should-retry"]) == (400, param, "false")
    assert said in answer["error"]["message"]
    assert front.poll() == []


def test_an_unknown_key_is_refused_and_one_that_ended_says_why(front: Front):
    assert refused(generate(front.url, [1], key="another"))[:2] == (401, "unknown_key")
    assert refused(generate(front.url, [1]))[:2] == (401, "unknown_key")
    front.open(["gone"])
    request = generate(front.url, [1], key="gone")
    assert one_call(front).key == "gone"
    front.close_session("gone", "stopped")
    assert refused(request)[:2] == (410, "session_closed")
    status, _, headers = generate(front.url, [1], path="/s/gone").answer()
    assert (status, headers["x-should-retry"]) == (410, "false")


@pytest.mark.parametrize("headers", [{"Origin": "https://example.org"}, {"Host": "rebound.example.org:80"}])
def test_a_web_page_may_not_call(front: Front, headers: dict[str, str]):
    request = Request(front.url, "/s/k/inference/v1/generate", {"token_ids": [1]}, headers=headers)
    assert refused(request)[:2] == (403, "not_a_program")
    assert front.poll() == []


@pytest.mark.parametrize(("path", "method"), [("/v1/completions", "POST"), ("/v1/chat/completions", "GET")])
def test_an_unknown_path_is_told_those_that_there_are(front: Front, path: str, method: str):
    status, body, _ = Request(front.url, path, {}, key="k", method=method).answer()
    assert (status, body["error"]["code"]) == (404, "unknown_path")
    assert "/v1/chat/completions" in body["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/inference/v1/generate"])
def test_json_that_is_too_deep_is_refused(front: Front, path: str):
    raw = b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert refused(Request(front.url, path, raw=raw, key="k"))[:2] == (400, "invalid_request")


def test_a_client_that_goes_is_reported(front: Front):
    request = generate(front.url, [1], key="k")
    call = one_call(front)
    request.hang_up()
    assert messages(front) == [Gone(call.call)]
    front.reply(reply(call.call))  # nobody waits for it
    assert front.poll() == []


def test_a_session_with_too_many_calls_is_told_to_wait(front: Front):
    front.open(["many"])
    requests = [generate(front.url, [1], key="many") for _ in range(256)]
    calls = messages(front, 256)
    assert refused(generate(front.url, [1], key="many"))[:2] == (429, "too_many_calls")
    for call in calls:
        assert isinstance(call, Call)
        front.reply(reply(call.call))
    assert {request.answer()[0] for request in requests} == {200}
    assert len(messages(front, 256)) == 256


def test_a_key_pays_for_its_calls_and_bytes():
    # 256 calls or 16.384 MB are free; then calls are 10 ms apart, and 64 kB cost as much as a call.
    pace = Pace(lambda: 0.0)
    assert pace.wait_s("a", 256, 0) == pytest.approx(0.0)
    assert pace.wait_s("a", 1, 0) == pytest.approx(0.01)
    assert pace.wait_s("a", 0, 64_000) == pytest.approx(0.02)
    assert pace.wait_s("b", 0, 16_384_000) == pytest.approx(0.0)
    assert pace.wait_s("b", 1, 0) == pytest.approx(0.01)


def test_a_hundred_megabytes_are_refused_before_they_are_read(front: Front):
    size = 100 << 20
    head = f"POST /s/k/inference/v1/generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {size}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(front.url.rpartition(":")[2])), timeout=DEADLINE_S) as client:
        client.sendall(head.encode() + b"[")
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 413")
    assert front.poll() == []
    _, body, _ = Request(front.url, "/s/k/v1/models", method="GET").answer()  # others are served
    assert [(one["id"], one["max_model_len"]) for one in body["data"]] == [("tiny", 128), ("policy", 128)]


def test_the_long_texts_of_a_session_keep_no_other_one_waiting(monkeypatch: pytest.MonkeyPatch):
    tokenised, received = threading.Event(), Counter[str]()

    def receive(body: dict[str, Any], rules: RequestRules, note: Any) -> ChatRequest:
        found = read_chat(body, rules, note)
        received[found.messages[0]["content"]] += 1
        return found

    def prompt_of(known: object, wanted: ChatRequest, renderer: object, note: object) -> NoReturn:
        if wanted.messages[0]["content"] == "long":
            assert tokenised.wait(DEADLINE_S)
        raise RefusedError(400, "it was its turn", "done")

    async def ask() -> None:
        ours, its = socket.socketpair()
        calls = Calls(*await asyncio.open_connection(sock=its), 0)
        listening = asyncio.create_task(calls.listen())
        ours.sendall(pack(Open(["busy", "other"])))
        loaded: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        loaded.set_result(None)
        app = httpx.ASGITransport(application(calls, RequestRules("tiny"), 64, loaded))
        async with httpx.AsyncClient(transport=app, base_url="http://front", timeout=DEADLINE_S) as client:

            async def post(key: str, text: str) -> str:
                body = {"messages": [{"role": "user", "content": text}]}
                return (await client.post(f"/s/{key}/v1/chat/completions", json=body)).json()["error"]["message"]

            while not calls.is_open("other"):
                await asyncio.sleep(0)
            long = [asyncio.create_task(post("busy", "long")) for _ in range(40)]  # more than there are threads
            while received["long"] < len(long):
                await asyncio.sleep(0)
            assert await post("other", "short") == "it was its turn"
            tokenised.set()
            assert set(await asyncio.gather(*long)) == {"it was its turn"}
        ours.close()
        await listening

    monkeypatch.setattr("async_rl.extensions.agents.front.server.read_chat", receive)
    monkeypatch.setattr("async_rl.extensions.agents.front.server.prompt_of", prompt_of)
    asyncio.run(ask())
