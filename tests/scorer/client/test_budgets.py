"""What a client costs a scorer: bytes that nobody reads, many questions, answers that are too large, in chunks."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from async_rl.errors import RewardError, WireError
from async_rl.net.keys import ClientKeys, ServerKeys, make_keys
from async_rl.scorer import questions, sockets
from async_rl.scorer.client import messages
from async_rl.scorer.client import scorer_client as client_module
from async_rl.scorer.client.scorer_client import ScorerClient
from tests.end_to_end.harness import wait_until
from tests.ports import free_address
from tests.scorer.client.scripted import RunningScorer, ScriptedModel, score_of, scoring

LIMIT_S = 60.0
KIB, MIB = 1 << 10, 1 << 20


def taught(received: messages.Received) -> tuple[np.ndarray, ...]:
    """The answer of a teacher whose log-probabilities are all the first token id."""
    if not isinstance(received.message, messages.TokensQuestion):
        return (np.ones(1, np.float32),)
    size, top_k = int(received.arrays[1].sum()), received.message.top_k
    value = float(received.arrays[0][0])
    return np.full((size, 1 + top_k), value, np.float32), np.zeros((size, top_k), np.int32)


def tokens(length: int, value: int = 0) -> tuple[np.ndarray, np.ndarray]:
    mask = np.ones(length, "|b1")
    mask[0] = False
    return np.full(length, value, "<i4"), mask


def asked(number: int, length: int, top_k: int) -> bytes:
    return messages.encode_question(messages.TokensQuestion(number, 1.0, top_k), tokens(length))


@contextmanager
def a_bare_client(scorer: RunningScorer) -> Iterator[zmq.Socket[bytes]]:
    """A client that reads only when the test does, and little in advance."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 1)
        socket.setsockopt(zmq.RCVBUF, 16 * KIB)
        socket.connect(scorer.address)
        yield socket


def held_bytes(scorer: RunningScorer) -> int:
    return scorer.server._questions.held_bytes


def shrink(monkeypatch: pytest.MonkeyPatch, **limits: int) -> None:
    for name, value in limits.items():
        for module in (questions, messages, client_module, sockets):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)


def test_who_reads_no_answers_costs_only_itself(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    # An answer has 1,000 x (4 + 8 x 1,000) bytes: 8 MB. Two have room in 20 MiB, and 48 would be 384 MB.
    shrink(monkeypatch, MAX_PEER_BYTES=20 * MIB, STALL_S=1)
    most, process = 0, psutil.Process()
    before = process.memory_info().rss
    with scoring(taught) as (scorer, client, _), a_bare_client(scorer) as greedy:
        for number in range(48):
            greedy.send(asked(number, 1001, 1000))
        while "has read nothing of" not in caplog.text:
            start = time.monotonic()
            assert score_of(client.score([], "four")) == 1.0
            assert time.monotonic() - start < 2.0
            most = max(most, held_bytes(scorer))
            assert process.memory_info().rss - before < 200 * MIB
        # The dropped answers hold nothing any more, and the others go on.
        wait_until("the bytes to be given back", lambda: held_bytes(scorer) == 0)
        assert score_of(client.score([], "four")) == 1.0
    assert 8 * MIB < most < 21 * MIB


def test_who_is_refused_learns_why_and_when_to_ask_again(monkeypatch: pytest.MonkeyPatch):
    shrink(monkeypatch, MAX_PEER_QUESTIONS=2)
    computes = threading.Event()

    def score(received: messages.Received) -> tuple[np.ndarray, ...]:
        computes.wait(LIMIT_S)
        return taught(received)

    with scoring(score) as (scorer, *_), a_bare_client(scorer) as greedy:
        for number in range(3):
            greedy.send(asked(number, 2, 0))
        reader = messages.AnswerReader()

        def received() -> Iterator[Any]:
            assert greedy.poll(int(LIMIT_S * 1000))
            return (messages.decode_answer(frame).message for frame in reader.feed(greedy.recv_multipart()))

        (refusal,) = received()  # it comes while the model still computes
        assert (refusal.request_id, refusal.retry_s) == (2, sockets.RETRY_S)
        assert "expected at most 2 questions of one connection" in refusal.error
        computes.set()
        answers: list[int] = []
        while len(answers) < 2:
            answers += [answer.request_id for answer in received() if not answer.error]
        assert sorted(answers) == [0, 1]


def test_who_reads_no_refusals_loses_its_connection(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    shrink(monkeypatch, MAX_PEER_QUESTIONS=1, MAX_REFUSALS=50)
    with scoring(taught) as (scorer, *_), a_bare_client(scorer) as greedy:
        numbers = itertools.count()

        def is_shut_out() -> bool:
            for number in itertools.islice(numbers, 100):
                # A blocking send may never return: libzmq sees the end of a connection once its answers are read.
                if not greedy.poll(0, zmq.POLLOUT):
                    break
                greedy.send(asked(number, 1001, 1000), zmq.NOBLOCK)
            return "does not read 50 refusals" in caplog.text

        wait_until("the end of its connection", is_shut_out)


def test_an_honest_client_over_every_budget_gets_all_answers(monkeypatch: pytest.MonkeyPatch):
    """It keeps within its own budget; that of all clients is smaller still, so it is refused and asks again."""
    shrink(monkeypatch, MAX_PEER_BYTES=40 * KIB, MAX_KEY_BYTES=30 * KIB, CHUNK_BYTES=KIB)
    monkeypatch.setattr(sockets, "RETRY_S", 0.02)
    refused: list[object] = []
    refuse = sockets.ScorerSocket._refuse
    monkeypatch.setattr(sockets.ScorerSocket, "_refuse", lambda *given, **more: refused.append(refuse(*given, **more)))
    with scoring(taught, "big") as (scorer, client, model):
        # Each holds about 4 KiB, and one 80 KiB, above the budget of a client: it is sent alone, its answer in chunks.
        futures = [client.logprobs(*tokens(2, number), temperature=1.0, top_k=0) for number in range(200)]
        large = client.logprobs(*tokens(201, 7), temperature=1.0, top_k=2)
        futures.insert(100, large)
        assert sorted(map(score_of, futures)) == sorted([*map(float, range(200)), 7.0])
        logprobs, ids = large.result()
        assert (logprobs.shape, ids.shape, (logprobs == 7.0).all()) == ((200, 3), (200, 2), True)
        wait_until("the bytes to be given back", lambda: held_bytes(scorer) == 0)
        assert client.num_waiting == 0
    assert refused
    assert max(model.batches) > 1


def test_both_sides_refuse_an_answer_above_the_limit(monkeypatch: pytest.MonkeyPatch):
    shrink(monkeypatch, MAX_ANSWER_BYTES=MIB)
    too_much = (np.zeros(300 * KIB, np.float32),)
    with scoring(lambda _: too_much, "big") as (scorer, client, _), a_bare_client(scorer) as bare:
        # The client knows before it asks, and the scorer before it computes: 1,000 x (4 + 8 x 1,000) bytes.
        with pytest.raises(RewardError, match="the scorer big: expected a question whose answer has at most 1048576"):
            score_of(client.logprobs(*tokens(1001), temperature=1.0, top_k=1000))
        with pytest.raises(RewardError, match="expected a question of at most 8388608 bytes"):
            score_of(client.score([], "x" * (9 * MIB)))
        bare.send(asked(5, 1001, 1000))
        assert bare.poll(int(LIMIT_S * 1000))
        (frame,) = messages.AnswerReader().feed(bare.recv_multipart())
        refusal = messages.decode_answer(frame).message
        assert (refusal.request_id, refusal.retry_s) == (5, 0.0)
        assert "lower distill.top_k" in refusal.error


@given(num_sampled=st.integers(1, 300), top_k=st.integers(0, 20))
def test_an_answer_is_never_larger_than_was_expected_of_its_question(num_sampled: int, top_k: int):
    ids, mask = tokens(num_sampled + 1)
    expected = messages.answer_bytes(messages.TokensQuestion(1, 1.0, top_k), (ids, mask))
    arrays = (np.zeros((num_sampled, 1 + top_k), "<f4"), np.zeros((num_sampled, top_k), "<i4"))
    answer = messages.Answer(1 << 60, "d" * 64, "v" * 64)
    assert len(messages.encode_answer(answer, arrays)) <= expected
    assert messages.answer_bytes(messages.TextQuestion(1, [], ""), ()) >= len(
        messages.encode_answer(answer, (ids[:1],))
    )


def chunked(*frames: bytes, size: int = 2) -> list[list[list[bytes]]]:
    """The pairs of messages of each answer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages, "CHUNK_BYTES", size)
        return [[[bytes(place), bytes(part)] for place, part in messages.chunks(frame)] for frame in frames]


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=5), st.integers(1, 6), st.data())
def test_answers_arrive_whole_whatever_chunks_share_a_message(frames: list[bytes], size: int, data: st.DataObject):
    pairs = [pair for one in chunked(*frames, size=size) for pair in one]
    reader, got = messages.AnswerReader(), []
    while pairs:
        count = data.draw(st.integers(1, len(pairs)))
        got += reader.feed([frame for pair in pairs[:count] for frame in pair])
        del pairs[:count]
    assert got == frames


def test_what_a_broken_connection_left_is_discarded_and_no_answer_above_the_limit_is_taken():
    reader = messages.AnswerReader()
    old, new = chunked(b"oldold", b"newnew")
    assert list(reader.feed(old[0])) == []
    # A begin without an end, then an end without a begin.
    assert list(reader.feed([*new[0], *new[1], *new[2]])) == [b"newnew"]
    assert list(reader.feed(old[1] + old[2])) == []
    assert list(reader.feed([*new[0], *new[1], *new[2]])) == [b"newnew"]
    for frames in ([messages._CHUNK.pack((128 << 20) + 1, 0), b"x"], [b"x"], [b"short", b"x"]):
        with pytest.raises(WireError, match="expected"):
            list(messages.AnswerReader().feed(frames))


@pytest.mark.slow
def test_a_removed_client_is_sent_away_while_the_model_computes(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    make_keys(tmp_path, ["node7"])
    path = tmp_path / "allowed.txt"
    computes, goes_on = threading.Event(), threading.Event()

    def score(received: messages.Received) -> tuple[np.ndarray, ...]:
        if received.message.text == "slow":
            computes.set()
            assert goes_on.wait(LIMIT_S)
        return (np.ones(1, np.float32),)

    keys = [ClientKeys.load(tmp_path / f"{name}.key") for name in ("node7", "client")]
    address = free_address()
    with RunningScorer(address, ScriptedModel(score), ServerKeys.load(tmp_path)) as scorer, ExitStack() as stack:
        removed, other = (stack.enter_context(closing(ScorerClient("judge", address, key))) for key in keys)
        assert [score_of(client.score([], "quick")) for client in (removed, other)] == [1.0, 1.0]
        slow = other.score([], "slow")
        assert computes.wait(LIMIT_S)
        mine, before = removed.score([], "quick"), path.read_text()
        path.write_text(before.replace(keys[0].public.decode(), "#"))
        wait_until("the refusal", lambda: "refuses the key" in removed.trouble, deadline_s=5.0)
        assert "the key of client 'node7'" in caplog.text
        wait_until("its question to be dropped", lambda: held_bytes(scorer) < 5000)
        goes_on.set()
        assert score_of(slow) == 1.0
        assert not mine.done()
        path.write_text(before)
        assert score_of(mine) == 1.0
