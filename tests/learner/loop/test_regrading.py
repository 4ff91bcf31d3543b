"""Answers that are graded again: from which tokens, in which thread, and how the grades are compared."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

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


def graded(*accuracies: float) -> list[Grade]:
    return [(accuracy, accuracy) for accuracy in accuracies]


def counts(one: Regraded) -> tuple[int, int, int, int, int]:
    return one.num_answers, one.num_refuted, one.num_withdrawn, one.num_unsteady, one.num_failed


RIGHT_OF_FOUR = [1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("first", "second", "wanted"),
    [
        ([1.0, 0.0, 1.0, 0.0], [1.0, 0.0, 1.0, 0.0], (4, 0, 0, 0, 0)),
        ([1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], (4, 1, 0, 0, 0)),
        ([1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 1.0, 0.0], (4, 0, 1, 1, 0)),
        ([1.0, 0.0, 0.2, 0.0], [1.0, 0.0, 0.3, 0.0], (4, 0, 0, 1, 0)),
        ([1.0 - 5e-5, 0.0, 1.0, 0.0], [1.0, 0.0, 1.0, 0.0], (4, 0, 0, 0, 0)),
    ],
    ids=["the same", "twice another one", "another one, then the claimed one", "three different ones", "rounding"],
)
def test_only_two_equal_grades_refute_a_claim(first: list[float], second: list[float], wanted: tuple[int, ...]):
    judged = judge_grades("g", graded(*RIGHT_OF_FOUR), graded(*first), graded(*second), filter_range=None)
    assert counts(judged) == wanted


@pytest.mark.parametrize(
    ("claimed", "found", "filter_range", "refuted"),
    [
        # Without the one right answer the filter would have dropped the group: chance alone selects such groups.
        ([1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], (0.01, 0.99), 0),
        ([1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], None, 1),
        # Without either of the two there is still the other.
        ([1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], (0.01, 0.99), 2),
        ([1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0], (0.01, 0.99), 2),
        # Rewards beyond 0..1 have no accuracy: the filter keeps groups whose rewards differ.
        ([3.0, 2.0, 2.0, 2.0], [2.0, 2.0, 2.0, 2.0], (0.01, 0.99), 0),
        ([3.0, 2.0, 4.0, 2.0], [2.0, 2.0, 2.0, 2.0], (0.01, 0.99), 2),
    ],
)
def test_a_claim_that_decided_whether_the_group_is_trained_is_not_judged(
    claimed: list[float], found: list[float], filter_range: tuple[float, float] | None, refuted: int
):
    second = graded(*found)
    assert judge_grades("g", graded(*claimed), second, second, filter_range=filter_range).num_refuted == refuted


class Given:
    """A reward that gives what ``grade`` returns, once it is allowed to."""

    def __init__(self, grade: Callable[[RewardInput], float]) -> None:
        self.grade, self.allowed, self.inputs = grade, threading.Event(), list[RewardInput]()

    def __call__(self, item: RewardInput) -> RewardOutput:
        assert self.allowed.wait(20)
        self.inputs.append(item)
        value = self.grade(item)
        return RewardOutput({"given": value}, value)

    def counters(self) -> dict[str, int]:
        return {}

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
    wanted = "row 5: reward 0 and accuracy 0 claimed, reward 1 and accuracy 1 found"
    assert found.example == (wanted if refuted else "")
    assert len(given.inputs) == (4 if refuted else 2)  # twice where they differ
    first = given.inputs[0]
    assert (first.text, first.reward_data, first.num_tokens) == ("2 3 4 5 6 7", {"gt_answer": "7"}, 6)
    assert first.prompt_opened == "<think>"  # the last token of the prompt


def test_an_answer_that_is_sent_as_several_sequences_is_graded_too():
    given = Given(lambda item: 1.0)
    given.allowed.set()
    group = make_group("g", 3)
    twice = tuple(replace(rollout, sequences=rollout.sequences * 2) for rollout in group.rollouts)
    regrader = regrader_of(given)
    regrader.submit([taken(replace(group, rollouts=twice))])
    assert [one.num_refuted for one in all_of(regrader)] == [2]
    assert given.inputs[0].text == "2 3 4 5 6 7 2 3 4 5 6 7"


def test_an_answer_on_which_the_reward_fails_is_not_judged_and_the_others_are():
    def grade(item: RewardInput) -> float:
        if item.text.startswith("2 "):
            raise ZeroDivisionError("no such answer")
        return 1.0

    given = Given(grade)
    given.allowed.set()
    regrader = regrader_of(given)
    regrader.submit([taken(make_group("g", 3))])
    (found,) = all_of(regrader)
    assert counts(found) == (1, 1, 0, 0, 1)
    assert found.error == "ZeroDivisionError: no such answer"


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
