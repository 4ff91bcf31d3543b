"""What a client costs a scorer: bytes that nobody reads, many questions, answers that are too large. Real sockets."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from async_rl.errors import RewardError
from async_rl.net.keys import ClientKeys, ServerKeys, make_keys
from async_rl.scorer import questions, sockets
from async_rl.scorer.client import messages
from async_rl.scorer.client import scorer_client as client_module
from async_rl.scorer.client.messages import AnswerReader, Received, TokensQuestion, decode_answer, encode_question
from async_rl.scorer.client.scorer_client import ScorerClient
from tests.scorer.client.scripted import RunningScorer, ScriptedModel, free_address

LIMIT_S = 60.0
KIB, MIB = 1 << 10, 1 << 20


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.005)


def score_of(future: Future[tuple[np.ndarray, ...]]) -> float:
    return float(future.result(timeout=LIMIT_S)[0].reshape(-1)[0])


def taught(received: Received) -> tuple[np.ndarray, ...]:
    """The answer of a teacher whose log-probabilities are all the first token id."""
    if not isinstance(received.message, TokensQuestion):
        return (np.ones(1, np.float32),)
    size, top_k = int(received.arrays[1].sum()), received.message.top_k
    value = float(received.arrays[0][0])
    return np.full((size, 1 + top_k), value, np.float32), np.zeros((size, top_k), np.int32)


def tokens(length: int, value: int = 0) -> tuple[np.ndarray, np.ndarray]:
    mask = np.ones(length, "|b1")
    mask[0] = False
    return np.full(length, value, "<i4"), mask


def asked(number: int, length: int, top_k: int) -> bytes:
    return encode_question(TokensQuestion(number, 1.0, top_k), tokens(length))


@contextmanager
def a_bare_client(address: str) -> Iterator[zmq.Socket[bytes]]:
    """A client that reads only when the test does, and little in advance."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 1)
        socket.setsockopt(zmq.RCVBUF, 16 * KIB)
        socket.connect(address)
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
    address, most = free_address(), 0
    with RunningScorer(address, ScriptedModel(taught)) as scorer, a_bare_client(address) as greedy:
        for number in range(48):
            greedy.send(asked(number, 1001, 1000))
        with closing(ScorerClient("judge", address)) as client:
            while "has read nothing of" not in caplog.text:
                start = time.monotonic()
                assert score_of(client.score([], "four")) == 1.0
                assert time.monotonic() - start < 2.0
                most = max(most, held_bytes(scorer))
            # The dropped answers hold nothing any more, and the others go on.
            wait_until(lambda: held_bytes(scorer) == 0, "the bytes to be given back")
            assert score_of(client.score([], "four")) == 1.0
    assert 8 * MIB < most < 21 * MIB
    assert "which are dropped; see whether it is suspended" in caplog.text


def test_who_is_refused_learns_why_and_when_to_ask_again(monkeypatch: pytest.MonkeyPatch):
    shrink(monkeypatch, MAX_PEER_QUESTIONS=2)
    computes = threading.Event()

    def score(received: Received) -> tuple[np.ndarray, ...]:
        computes.wait(LIMIT_S)
        return taught(received)

    address = free_address()
    with RunningScorer(address, ScriptedModel(score)), a_bare_client(address) as greedy:
        for number in range(3):
            greedy.send(asked(number, 2, 0))
        reader = AnswerReader()

        def received() -> Iterator[Any]:
            assert greedy.poll(int(LIMIT_S * 1000))
            return (decode_answer(frame).message for frame in reader.feed(greedy.recv_multipart()))

        (refusal,) = received()  # it comes while the model still computes
        assert (refusal.request_id, refusal.retry_s) == (2, sockets.RETRY_S)
        assert "expected at most 2 questions of one connection" in refusal.error
        computes.set()
        answers: list[int] = []
        while len(answers) < 2:
            answers += [answer.request_id for answer in received() if not answer.error]
        assert sorted(answers) == [0, 1]


def test_who_asks_on_and_on_without_reading_refusals_loses_its_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    shrink(monkeypatch, MAX_PEER_QUESTIONS=1, MAX_REFUSALS=50)
    address = free_address()
    with RunningScorer(address, ScriptedModel(taught)), a_bare_client(address) as greedy:
        numbers = itertools.count()

        def is_shut_out() -> bool:
            for number in itertools.islice(numbers, 100):
                # A blocking send may never return: libzmq sees the end of a connection once its answers are read.
                if not greedy.poll(0, zmq.POLLOUT):
                    break
                greedy.send(asked(number, 1001, 1000), zmq.NOBLOCK)
            return "does not read 50 refusals" in caplog.text

        wait_until(is_shut_out, "the end of its connection")


def test_many_questions_of_one_client_delay_the_single_one_of_another_by_a_batch(monkeypatch: pytest.MonkeyPatch):
    shrink(monkeypatch, MIN_BATCH_BYTES=2 * KIB, MAX_BATCH_BYTES=2 * KIB)  # a dozen questions
    turn, seen = threading.Semaphore(0), []

    class Model(ScriptedModel):
        def answer(self, questions):
            seen.append([question.message.text for question in questions])
            turn.acquire(timeout=LIMIT_S)
            return super().answer(questions)

    address = free_address()
    with (
        RunningScorer(address, Model()) as scorer,
        closing(ScorerClient("judge", address)) as greedy,
        closing(ScorerClient("judge", address)) as single,
    ):
        many = [greedy.score([], "many") for _ in range(500)]
        wait_until(lambda: len(seen) == 1, "the first batch")
        one = single.score([], "single")
        turns = scorer.server._questions._turns
        wait_until(lambda: len(turns.by_key.get("", ())) == 2, "both clients to wait")
        turn.release(2)
        assert score_of(one) == 6.0
        assert "single" in seen[1]
        turn.release(500)
        assert [score_of(future) for future in many] == [4.0] * 500
    assert max(map(len, seen)) < 50


def test_an_honest_client_over_every_budget_gets_all_answers(monkeypatch: pytest.MonkeyPatch):
    """It keeps within its own budget; that of all clients is smaller still, so it is refused and asks again."""
    shrink(monkeypatch, MAX_PEER_BYTES=40 * KIB, MAX_KEY_BYTES=30 * KIB)
    monkeypatch.setattr(sockets, "RETRY_S", 0.02)
    refused = 0
    refuse = sockets.ScorerSocket._refuse

    def counted(*arguments: Any, **options: Any) -> None:
        nonlocal refused
        refused += 1
        refuse(*arguments, **options)

    monkeypatch.setattr(sockets.ScorerSocket, "_refuse", counted)
    address = free_address()
    with RunningScorer(address, ScriptedModel(taught)) as scorer, closing(ScorerClient("big", address)) as client:
        # Each holds about 4 KiB, and one 80 KiB, above the budget of a client: it is sent alone.
        futures = [client.logprobs(*tokens(2, number), temperature=1.0, top_k=0) for number in range(200)]
        futures.insert(100, client.logprobs(*tokens(201, 7), temperature=1.0, top_k=2))
        assert sorted(map(score_of, futures)) == sorted([*map(float, range(200)), 7.0])
        wait_until(lambda: held_bytes(scorer) == 0, "the bytes to be given back")
        assert client.num_waiting == 0
    assert refused > 0


def test_an_answer_of_many_chunks_arrives_whole_and_the_small_ones_with_it():
    address = free_address()
    with RunningScorer(address, ScriptedModel(taught)), closing(ScorerClient("big", address)) as client:
        # 2,000 x (4 + 8 x 500) bytes are 8 MB: 31 chunks.
        large = [client.logprobs(*tokens(2001, value), temperature=1.0, top_k=500) for value in (1, 2)]
        small = [client.logprobs(*tokens(2, value), temperature=1.0, top_k=0) for value in range(50)]
        for value, future in enumerate(large, start=1):
            logprobs, ids = future.result(timeout=LIMIT_S)
            assert (logprobs.shape, ids.shape) == ((2000, 501), (2000, 500))
            assert (logprobs == value).all()
        assert [score_of(future) for future in small] == [float(value) for value in range(50)]


def test_both_sides_refuse_an_answer_above_the_limit(monkeypatch: pytest.MonkeyPatch):
    address = free_address()

    def too_much(_: Received) -> tuple[np.ndarray, ...]:
        return (np.zeros(300 * KIB, np.float32),)

    shrink(monkeypatch, MAX_ANSWER_BYTES=MIB)
    with (
        RunningScorer(address, ScriptedModel(too_much)),
        closing(ScorerClient("big", address)) as client,
        a_bare_client(address) as bare,
    ):
        # The client knows before it asks, and the scorer before it computes: 1,000 x (4 + 8 x 1,000) bytes.
        with pytest.raises(RewardError, match="the scorer big: expected a question whose answer has at most 1048576"):
            score_of(client.logprobs(*tokens(1001), temperature=1.0, top_k=1000))
        with pytest.raises(RewardError, match="expected a question of at most 8388608 bytes"):
            score_of(client.score([], "x" * (9 * MIB)))
        bare.send(asked(5, 1001, 1000))
        assert bare.poll(int(LIMIT_S * 1000))
        (frame,) = AnswerReader().feed(bare.recv_multipart())
        refusal = decode_answer(frame).message
        assert (refusal.request_id, refusal.retry_s) == (5, 0.0)
        assert "lower distill.top_k" in refusal.error
        # A model that answers more than it was asked for fails this question alone.
        with pytest.raises(RewardError, match="expected an answer of at most 1048576 bytes, got one of"):
            score_of(client.score([], "four"))


@pytest.mark.slow
def test_48_questions_whose_answers_nobody_reads_take_little_memory_and_time():
    """3.2 GB of answers, with the budgets as they are."""
    address, most = free_address(), 0
    with (
        RunningScorer(address, ScriptedModel(taught)) as scorer,
        a_bare_client(address) as greedy,
        closing(ScorerClient("judge", address)) as client,
    ):
        assert score_of(client.score([], "four")) == 1.0
        before, delays = resident_bytes(), []
        for number in range(48):
            greedy.send(asked(number, 8192, 1024))
        end = time.monotonic() + sockets.STALL_S + 3
        while time.monotonic() < end:
            start = time.monotonic()
            assert score_of(client.score([], "four")) == 1.0
            delays.append(time.monotonic() - start)
            most = max(most, resident_bytes() - before)
        # The last answer's bytes are given back after it is sent, so it may be read before.
        wait_until(lambda: held_bytes(scorer) == 0, "the bytes to be given back")
    print(f"resident {most >> 20} MiB more, at most {max(delays):.2f} s for another's question")
    assert most < 512 * MIB
    assert max(delays) < 5.0


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.slow
def test_a_removed_client_is_sent_away_while_the_model_computes(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    make_keys(tmp_path, ["node7"])
    path = tmp_path / "allowed.txt"
    computes, goes_on = threading.Event(), threading.Event()

    def score(received: Received) -> tuple[np.ndarray, ...]:
        if received.message.text == "slow":
            computes.set()
            assert goes_on.wait(LIMIT_S)
        return (np.ones(1, np.float32),)

    keys = {name: ClientKeys.load(tmp_path / f"{name}.key") for name in ("node7", "client")}
    address = free_address()
    with (
        RunningScorer(address, ScriptedModel(score), ServerKeys.load(tmp_path)) as scorer,
        closing(ScorerClient("judge", address, keys["node7"])) as removed,
        closing(ScorerClient("judge", address, keys["client"])) as other,
    ):
        for client in (removed, other):
            assert score_of(client.score([], "quick")) == 1.0
        slow = other.score([], "slow")
        assert computes.wait(LIMIT_S)
        mine = removed.score([], "quick")
        before = path.read_text()
        path.write_text(before.replace(keys["node7"].public.decode(), "#"))
        start = time.monotonic()
        wait_until(lambda: "refuses the key" in removed.trouble, "the refusal")
        assert time.monotonic() - start < 5.0
        assert "the key of client 'node7'" in caplog.text
        wait_until(lambda: held_bytes(scorer) < 5000, "its question to be dropped")
        goes_on.set()
        assert score_of(slow) == 1.0
        assert not mine.done()
        path.write_text(before)
        assert score_of(mine) == 1.0
