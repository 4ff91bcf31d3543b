"""The HTTP front as a process: keys, requests, refusals, clients that go, and its own death."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from async_rl.extensions.agents.front.messages import Call, Delivered, Gone, Refuse, Reply, ToGenerator
from async_rl.extensions.agents.front.process import Front, FrontLost
from async_rl.extensions.agents.front.server import Pace
from tests.extensions.agents.http import Request, generate

DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def shared() -> Iterator[Front]:
    front = Front("tiny", 128)
    try:
        yield front
    finally:
        front.close()


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


@pytest.mark.parametrize("where", ["path", "header"])
def test_a_call_carries_token_ids_there_and_back(front: Front, where: str):
    given: dict[str, str] = {"path": "/s/k"} if where == "path" else {"key": "k"}
    request = generate(
        front.url, [1, 2], **given, max_tokens=5, logprobs=1, stop=["x"], stop_token_ids=[4], skip_special_tokens=False,
        temperature=1.0, top_k=-1, seed=11, routed_experts_prompt_start=0,
    )  # fmt: skip
    call = one_call(front)
    assert np.frombuffer(call.token_ids, np.int32).tolist() == [1, 2]
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


def test_the_model_is_listed_with_the_longest_sequence(front: Front):
    _, body, _ = Request(front.url, "/s/k/v1/models", method="GET").answer()
    assert [(one["id"], one["max_model_len"]) for one in body["data"]] == [("tiny", 128)]


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"token_ids": []}, "token_ids", "at least one token"),
        ({"token_ids": [2**31]}, "token_ids", "integers below 2^31"),
        ({"token_ids": "text"}, None, "Expected `array`, got `str`"),
        ({"sampling_params": {}}, None, "missing required field `token_ids`"),
        ({"token_ids": [1], "stream": True}, "stream", "can't be had"),
        ({"token_ids": [1], "sampling_params": {"max_tokens": 0}}, "max_tokens", "from 1 on, got 0"),
        ({"token_ids": [1], "sampling_params": {"stop": [""]}}, "stop", "not empty"),
        ({"token_ids": [1], "sampling_params": {"stop_token_ids": [-1]}}, "stop_token_ids", "a list of token ids"),
        ({"token_ids": [1], "sampling_params": {"seed": "x"}}, "seed", "an integer"),
        ({"token_ids": [1], "sampling_params": {"temperature": "hot"}}, "temperature", "a number, got 'hot'"),
        ({"token_ids": [1], "sampling_params": {"repetition_penalty": 1.1}}, "repetition_penalty", "got 1.1"),
        ({"token_ids": [1], "sampling_params": {"logit_bias": {"5": 2}}}, "logit_bias", "can't be trained on"),
        ({"token_ids": [1], "sampling_params": {"n": 2}}, "n", "expected 1"),
    ],
)
def test_a_request_that_is_malformed_or_would_change_the_distribution_is_refused(
    front: Front, body: dict[str, Any], param: str | None, said: str
):
    status, answer, headers = Request(front.url, "/s/k/inference/v1/generate", body).answer()
    assert (status, answer["error"]["param"], headers["x-should-retry"]) == (400, param, "false")
    assert said in answer["error"]["message"]
    assert front.poll() == []


@pytest.mark.parametrize(
    "body",
    [
        {"temperature": 0},  # it belongs into sampling_params
        {"max_tokens": 3},
        {"messages": [{"role": "user", "content": "a"}]},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"guided_json": {"type": "object"}},
        {"sampling_params": {"tools": [{}]}},
        {"sampling_params": {"logprobs": 5}},
    ],
)
def test_a_field_that_would_be_left_aside_is_refused_at_the_token_endpoint(front: Front, body: dict[str, Any]):
    status, answer, _ = Request(front.url, "/s/k/inference/v1/generate", {"token_ids": [1], **body}).answer()
    name, *inner = body.get("sampling_params", ()) or body
    assert (status, answer["error"]["param"], inner) == (400, name, [])
    assert answer["error"]["message"].endswith("leave it out")
    assert front.poll() == []


def test_settings_that_change_nothing_are_taken(front: Front):
    same = {"presence_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {}, "n": 1, "ignore_eos": False}
    same |= {"logprobs": 1, "skip_special_tokens": False, "guided_json": None, "stream": False}
    request = generate(front.url, [1], key="k", **same)
    call = one_call(front)
    front.reply(Refuse(call.call, 400, "no room", "context_length_exceeded", "token_ids"))
    assert refused(request) == (400, "context_length_exceeded", "no room")


def test_an_unknown_key_is_refused_and_one_that_ended_says_why(front: Front):
    assert refused(generate(front.url, [1], key="another"))[:2] == (401, "unknown_key")
    assert refused(generate(front.url, [1]))[:2] == (401, "unknown_key")
    front.open(["gone"])
    request = generate(front.url, [1], key="gone")
    assert one_call(front).key == "gone"
    front.close_session("gone", "stopped")
    status, code, said = refused(request)
    assert (status, code, "too old to train on" in said) == (410, "session_closed", True)
    status, _, headers = generate(front.url, [1], path="/s/gone").answer()
    assert (status, headers["x-should-retry"]) == (410, "false")


def test_a_client_that_goes_is_reported(front: Front):
    request = generate(front.url, [1], key="k")
    call = one_call(front)
    request.hang_up()
    assert messages(front) == [Gone(call.call)]
    front.reply(reply(call.call))  # nobody waits for it
    assert front.poll() == []


def test_a_body_that_is_too_large_is_refused_and_others_are_served(front: Front):
    request = Request(front.url, "/s/k/inference/v1/generate", raw=b"[" * (33 << 20))
    assert request.answer()[0] == 413
    assert Request(front.url, "/v1/models", method="GET").answer()[0] == 200


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


def test_a_front_that_dies_is_replaced_at_the_same_address_and_knows_the_sessions():
    front = Front("tiny", 128)
    try:
        front.open(["k"])
        request = generate(front.url, [1], key="k")
        before = one_call(front)
        os.kill(front.pid, signal.SIGKILL)
        with pytest.raises((OSError, ValueError)):
            request.answer()
        assert messages(front) == [FrontLost()]
        again = generate(front.url, [1], key="k")
        after = one_call(front)
        assert after.call != before.call
        front.reply(reply(after.call))
        assert again.answer()[0] == 200
    finally:
        front.close()


def test_a_prompt_of_100_000_tokens_arrives_whole(front: Front):
    token_ids = list(range(100_000))
    request = generate(front.url, token_ids, key="k")
    call = one_call(front)
    assert np.frombuffer(call.token_ids, np.int32).tolist() == token_ids
    front.reply(reply(call.call))
    assert request.answer()[0] == 200
    assert messages(front) == [Delivered(call.call)]


def test_a_flood_is_answered_in_the_end_and_another_agent_meanwhile(front: Front):
    front.open(["flood", "calm"])
    body = {"token_ids": []}
    path = "/s/{}/inference/v1/generate"
    keys = ["flood"] * 400 + ["wrong"] * 400
    requests = [Request(front.url, path.format(key), body) for key in keys]
    assert Request(front.url, path.format("calm"), body).answer()[0] == 400
    assert [request.answer()[0] for request in requests] == [400] * 400 + [401] * 400


def test_a_key_pays_for_its_calls_and_bytes():
    # 256 calls or 16.384 MB are free; then calls are 10 ms apart, and 64 kB cost as much as a call.
    pace = Pace(lambda: 0.0)
    assert pace.wait_s("a", 256, 0) == pytest.approx(0.0)
    assert pace.wait_s("a", 1, 0) == pytest.approx(0.01)
    assert pace.wait_s("a", 0, 64_000) == pytest.approx(0.02)
    assert pace.wait_s("b", 0, 16_384_000) == pytest.approx(0.0)
    assert pace.wait_s("b", 1, 0) == pytest.approx(0.01)


def test_a_client_that_goes_in_mid_request_leaves_no_traceback(capfd: pytest.CaptureFixture[str]):
    with closing(Front("tiny", 128)) as front:
        front.open(["k"])
        with socket.create_connection(("127.0.0.1", int(front.url.rpartition(":")[2]))) as half:
            half.sendall(b"POST /s/k/inference/v1/generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            half.shutdown(socket.SHUT_RDWR)
        for _ in range(2):  # the front is past the broken request
            assert Request(front.url, "/v1/models", method="GET").answer()[0] == 200
        assert "Traceback" not in capfd.readouterr().err


def test_a_hundred_megabytes_are_refused_before_they_are_read(front: Front):
    size = 100 << 20
    head = f"POST /s/k/inference/v1/generate HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(front.url.rpartition(":")[2])), timeout=DEADLINE_S) as client:
        client.sendall(head.encode() + b"[")
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 413")
    assert front.poll() == []
