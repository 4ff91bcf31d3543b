"""What is sampled for training gets its teacher's scores before its group is returned."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any, cast

import numpy as np
import pytest
from msgspec import structs

from async_rl.config.distill import DistillConfig
from async_rl.errors import RewardError
from async_rl.generator.rollouts import Graded
from async_rl.generator.teachers import TaughtRollouts, Teachers
from async_rl.queue.messages import Failure
from async_rl.records import Lease, Rollout, TokenSequence
from async_rl.scorer.client.scorer_client import ScorerClient
from tests.generator.leases import make_lease


class FakeClient:
    """Keeps what it was asked; the test answers."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], dict[str, Any]]] = []
        self.futures: list[Future[tuple[np.ndarray, ...]]] = []
        self.trouble = ""

    @property
    def num_waiting(self) -> int:
        return sum(not future.done() for future in self.futures)

    def logprobs(self, token_ids: np.ndarray, loss_mask: np.ndarray, **settings: Any) -> Future[tuple[np.ndarray, ...]]:
        self.asked.append((token_ids.tolist(), settings))
        self.futures.append(Future())
        return self.futures[-1]


class FakeRollouts:
    """Returns at the next ``collect`` what ``graded`` has; remembers cancelled leases."""

    num_open, num_pending = 3, 2

    def __init__(self) -> None:
        self.graded: list[Graded] = []
        self.cancelled: list[str] = []

    def collect(self) -> list[Graded]:
        found, self.graded = self.graded, []
        return found

    def cancel(self, lease_id: str) -> None:
        self.cancelled.append(lease_id)

    def take(self, sampled: Iterable[Any]) -> None: ...


def graded(lease: Lease, *lengths: int) -> Graded:
    sequences = tuple(
        TokenSequence(np.arange(n, dtype=np.int32), np.arange(n) >= 1, np.zeros(n, np.float32), np.zeros(n, np.int32))
        for n in lengths
    )
    return Graded(lease, 0, Rollout(sequences, {"correct": 1.0}, 1.0, "stop"))


def scene(**distill: Any) -> tuple[TaughtRollouts, FakeRollouts, dict[str, FakeClient], Teachers]:
    clients = {"big": FakeClient(), "small": FakeClient()}
    teachers = Teachers(cast("dict[str, ScorerClient]", clients), DistillConfig(teacher="big", **distill))
    inner = FakeRollouts()
    return TaughtRollouts(cast(Any, inner), teachers), inner, clients, teachers


def answer(num_sampled: int, top_k: int = 0) -> tuple[np.ndarray, ...]:
    return np.full((num_sampled, 1 + top_k), -0.5, np.float32), np.full((num_sampled, top_k), 7, np.int32)


def test_a_rollout_waits_for_the_scores_of_all_its_sequences():
    taught, inner, clients, teachers = scene(top_k=2, form="loss")
    inner.graded = [graded(make_lease("a"), 3, 4)]
    assert taught.collect() == []
    assert (taught.num_pending, teachers.num_waiting, taught.num_open) == (3, 2, 3)
    client = clients["big"]
    assert client.asked[0] == ([0, 1, 2], {"temperature": make_lease("a").sampling.temperature, "top_k": 2})
    client.futures[1].set_result(answer(3, 2))
    assert taught.collect() == []
    client.futures[0].set_result(answer(2, 2))
    (done,) = taught.collect()
    assert done.rollout is not None
    scores = [sequence.teacher for sequence in done.rollout.sequences]
    assert [s.logprobs.shape for s in scores if s is not None] == [(2, 3), (3, 3)]
    assert (done.rollout.reward, taught.num_pending) == (1.0, 2)


def test_each_source_has_its_teacher_and_evaluations_have_none():
    taught, inner, clients, _ = scene(teachers={"maths": "small"})
    lease = make_lease("a")
    maths = structs.replace(lease, prompt=structs.replace(lease.prompt, source="maths"))
    evaluated = graded(structs.replace(lease, kind="eval"), 3)
    inner.graded = [graded(lease, 3), graded(maths, 4), evaluated]
    assert taught.collect() == [evaluated]
    assert [len(clients[name].asked) for name in ("big", "small")] == [1, 1]
    assert clients["small"].asked[0][0] == [0, 1, 2, 3]


def test_a_cancelled_lease_leaves_nothing_waiting():
    taught, inner, _, _ = scene()
    inner.graded = [graded(make_lease("a"), 3)]
    taught.collect()
    taught.cancel("a")
    assert inner.cancelled == ["a"]
    assert taught.num_pending == inner.num_pending


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (RewardError("the scorer big: too long"), "too long"),
        ((np.full((2, 3), np.nan, np.float32), np.zeros((2, 2), np.int32)), "finite"),
        (answer(1, 2), "expected teacher.logprobs of 2 sampled tokens"),
        ((np.full((2, 3), 0.5, np.float32), np.zeros((2, 2), np.int32)), "at most 0"),
        (answer(2, 1), "2 likeliest tokens from the teacher, got arrays of the shapes [[2, 2], [2, 1]]"),
        ((), "got arrays of the shapes []"),
    ],
)
def test_what_no_teacher_would_answer_fails_the_lease_with_the_reason(given: Any, told: str):
    taught, inner, clients, _ = scene(top_k=2, form="loss")
    failed = Graded(make_lease("b"), 0, None, Failure("environment_error", "gone"))
    inner.graded = [graded(make_lease("a"), 3), failed]
    assert taught.collect() == [failed]  # it has no rollout to score
    (future,) = clients["big"].futures
    if isinstance(given, Exception):
        future.set_exception(given)
    else:
        future.set_result(given)
    (done,) = taught.collect()
    assert done.failure is not None
    assert told in done.failure.detail
