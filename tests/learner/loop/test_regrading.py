"""Answers that are graded again: from which tokens, in which thread, and how the grades are compared."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from async_rl.learner.loop.regrading import MAX_WAITING, Grade, Regraded, Regrader, judge_grades
from async_rl.queue.messages import TakenGroup
from async_rl.records import Group, Prompt
from async_rl.rewards.functions import FunctionReward
from async_rl.rewards.records import RewardInput, RewardOutput
from async_rl.rewards.registry import RewardSum
from tests.learner.loop.test_parity import make_group


def graded(accuracies: list[float]) -> list[Grade]:
    return [(float(accuracy), float(accuracy)) for accuracy in accuracies]


def counts(one: Regraded) -> tuple[int, int, int, int, int]:
    return one.num_answers, one.num_refuted, one.num_withdrawn, one.num_unsteady, one.num_failed


FILTER = (0.01, 0.99)
JUDGED: dict[str, tuple[list[float], list[float], list[float], tuple[float, float] | None, tuple[int, ...]]] = {
    "the same": ([1, 0, 1, 0], [1, 0, 1, 0], [1, 0, 1, 0], None, (4, 0, 0, 0, 0)),
    "twice another one": ([1, 0, 1, 0], [1, 0, 0, 0], [1, 0, 0, 0], None, (4, 1, 0, 0, 0)),
    "another one, then the claimed one": ([1, 0, 1, 0], [1, 0, 0, 0], [1, 0, 1, 0], None, (4, 0, 1, 1, 0)),
    "three different ones": ([1, 0, 1, 0], [1, 0, 0.2, 0], [1, 0, 0.3, 0], None, (4, 0, 0, 1, 0)),
    "rounding": ([1, 0, 1, 0], [1 - 5e-5, 0, 1, 0], [1, 0, 1, 0], None, (4, 0, 0, 0, 0)),
    # Without the one right answer the filter would have dropped the group: chance alone selects such groups.
    "decided that the group is trained": ([1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], FILTER, (4, 0, 0, 0, 0)),
    "would have without the filter": ([1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], None, (4, 1, 0, 0, 0)),
    # Without either of the two there is still the other.
    "decided nothing": ([1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], FILTER, (4, 2, 0, 0, 0)),
    # Rewards beyond 0..1 have no accuracy: the filter keeps groups whose rewards differ.
    "the one that differs": ([3, 2, 2, 2], [2, 2, 2, 2], [2, 2, 2, 2], FILTER, (4, 0, 0, 0, 0)),
    "two that differ": ([3, 2, 4, 2], [2, 2, 2, 2], [2, 2, 2, 2], FILTER, (4, 2, 0, 0, 0)),
}
"""Name -> the claimed accuracies, those of the first and the second grading, the filter, and ``counts``."""


@pytest.mark.parametrize(("claimed", "first", "second", "filter_range", "wanted"), JUDGED.values(), ids=JUDGED)
def test_only_two_equal_grades_refute_a_claim_and_none_that_decided_whether_the_group_is_trained(
    claimed: list[float], first: list[float], second: list[float], filter_range: Any, wanted: tuple[int, ...]
):
    judged = judge_grades("g", graded(claimed), graded(first), graded(second), filter_range=filter_range)
    assert counts(judged) == wanted


class Given:
    """A reward that gives what ``grade`` returns, once it is allowed to."""

    def __init__(self, grade: Callable[[RewardInput], float]) -> None:
        self.grade, self.allowed, self.inputs = grade, threading.Event(), list[RewardInput]()

    def __call__(self, item: RewardInput) -> RewardOutput:
        assert self.allowed.wait(20)
        self.inputs.append(item)
        value = self.grade(item)
        return RewardOutput({"given": value}, value)

    def close(self) -> None: ...


def text_of(token_ids: np.ndarray) -> str:
    return " ".join("<think>" if token == 1 else str(token) for token in token_ids)


def regrader_of(reward: Given | FunctionReward) -> Regrader:
    whole = RewardSum(reward, scale=1.0, overlong=None)
    return Regrader(whole, text_of, max_new_tokens=6, filter_range=None)


def taken(group: Group) -> TakenGroup:
    return TakenGroup(group, Prompt(0, 5, 0, (), {"gt_answer": "7"}), 0.0, 3)


def all_of(regrader: Regrader) -> Iterable[Regraded]:
    """What is left to grade, to its end."""
    regrader._pool.shutdown()
    return regrader.collect()


@pytest.mark.parametrize(("reward", "refuted"), [(0.0, 0), (1.0, 2)])
def test_answers_are_graded_again_in_the_background_from_their_tokens(reward: float, refuted: int):
    given = Given(lambda item: reward)
    regrader = regrader_of(given)
    regrader.submit([taken(make_group("g", 3))])  # two rollouts of reward 0 and accuracy 0
    assert regrader.collect() == []
    given.allowed.set()
    (found,) = all_of(regrader)
    assert (found.generator_id, found.num_answers, found.num_refuted) == ("g", 2, refuted)
    assert ("row 5: reward 0 and accuracy 0 claimed" in found.example) == (refuted > 0)
    assert len(given.inputs) == (4 if refuted else 2)  # twice where they differ
    first = given.inputs[0]
    assert (first.text, first.reward_data, first.num_tokens) == ("2 3 4 5 6 7", {"gt_answer": "7"}, 6)
    assert first.prompt_opened == "<think>"  # the last token of the prompt


def test_an_answer_of_several_sequences_is_graded_and_one_on_which_the_reward_fails_is_not_judged():
    def grade(item: RewardInput) -> float:
        if item.text == "2 3 4 5 6 7":
            raise ZeroDivisionError("no such answer")
        return 1.0

    given = Given(grade)
    given.allowed.set()
    group = make_group("g", 3)
    failing, other = group.rollouts
    rollouts = (failing, replace(other, sequences=other.sequences * 2))
    regrader = regrader_of(given)
    regrader.submit([taken(replace(group, rollouts=rollouts))])
    (found,) = all_of(regrader)
    assert counts(found) == (1, 1, 0, 0, 1)
    assert found.error == "ZeroDivisionError: no such answer"
    assert given.inputs[-1].text == "3 4 5 6 7 8 3 4 5 6 7 8"


def test_a_reward_that_compares_a_group_is_not_asked_about_a_part_of_it():
    calls: list[int] = []

    def grade(items: list[RewardInput]) -> list[float]:
        calls.append(len(items))
        return [1.0] * len(items)

    regrader = regrader_of(FunctionReward("mine.py:grade", grade, scale=1.0, time_limit_s=1.0))
    group = make_group("g", 3)
    part = replace(group, rollouts=(group.rollouts[0], replace(group.rollouts[1], finish_reason="error")))
    regrader.submit([taken(part), taken(group)])
    assert [counts(one)[::4] for one in all_of(regrader)] == [(0, 1), (2, 0)]
    assert calls == [2, 2]


def test_groups_that_would_wait_too_long_are_left_out_and_counted():
    given = Given(lambda item: 0.0)
    regrader = regrader_of(given)
    regrader.submit([taken(make_group("g", 3))] * (MAX_WAITING - 1))
    regrader.submit([taken(make_group("g", 3))] * 3)
    assert regrader.num_left_out == 2
    given.allowed.set()
    assert len(list(all_of(regrader))) == MAX_WAITING
