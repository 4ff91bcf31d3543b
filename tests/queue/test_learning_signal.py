"""Notes about groups that train nothing, event by event. By default: 4 groups a step, 2 answers a group."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from async_rl.queue.core import diagnosis, persistence
from async_rl.queue.core.state import QueueState
from async_rl.queue.messages import NotReady
from async_rl.records import Turn
from tests.queue.builders import ack, dropped, group, leases, make_state, positions, put, take

pytestmark = pytest.mark.usefixtures("fixed_admission")

WRONG, RIGHT, BOTH = (0.0, 0.0), (1.0, 1.0), (1.0, 0.0)


def a_state(**changes: Any) -> QueueState:
    usual: dict[str, Any] = {"groups_per_step": 4, "max_staleness": 9, "num_rows": 1000}
    return make_state(**usual | changes)


def arrive(state: QueueState, count: int, accuracies: tuple[float, ...], version: int = 0, **facts: Any) -> None:
    """``count`` groups are leased, and arrive with these accuracies."""
    for _ in range(count):
        (lease,) = leases(state, 1, version)
        made = group(lease, version, accuracies=accuracies, **facts)
        put(state, structs.replace(made, example="so it\n is\x1b 42"))


def the_note(state: QueueState) -> str:
    (text,) = diagnosis.notes(state).values()
    return text


CUT: dict[str, Any] = {"tokens": 8, "finish_reason": "length"}
"""Two answers of 8 tokens; ``sampling.max_new_tokens`` is 8."""
UNJUDGED: dict[str, Any] = {"finish_reason": "unjudged"}
LONG = {"groups_per_step": 16, "max_staleness": 99, "max_filtered": 10_000}
TWELVE = {"group_size": 12}
ALL_WRONG, ONE_LUCKY = (0.0,) * 12, (1.0,) + (0.0,) * 11
WRONG_TEXT = "all 8 groups since the run began have only wrong answers"
CUT_TEXT = "were cut at sampling.max_new_tokens = 8. Raise sampling.max_new_tokens"

Arrivals = list[tuple[int, tuple[float, ...], dict[str, Any]]]

NOTED: dict[str, tuple[dict[str, Any], Arrivals, tuple[str, ...]]] = {
    "wrong answers": ({}, [(8, WRONG, {})], (WRONG_TEXT, 'One answer ends: "so it is 42"')),
    "the newest count": ({}, [(13, WRONG, {})], ("all 13 groups since the run began",)),
    "wrong answers of which some were cut": ({}, [(6, WRONG, CUT), (2, WRONG, {})], (f"{WRONG_TEXT}; 75% {CUT_TEXT}",)),
    "right answers": ({}, [(8, RIGHT, {})], ("have only right answers. They teach",)),
    "right and wrong groups": (
        {}, [(5, RIGHT, {}), (3, WRONG, {})],
        ("none of the 8 groups", "5 with only right answers, 3 with only wrong answers", "raise sampling.group_size"),
    ),
    "cut answers that the loss leaves out": (
        {"mask_truncated": True}, [(8, BOTH, CUT)],
        ("only answers that were cut; 100%", CUT_TEXT, "set loss.mask_truncated = false"),
    ),
    "equal rewards without a filter": ({"filter_range": None}, [(8, WRONG, {})], (WRONG_TEXT,)),
    "answers that nobody judges": ({}, [(8, WRONG, UNJUDGED)], ("only answers that the reward does not judge",)),
    "eight batches in a row whatever came before": (
        LONG, [(1, BOTH, {}), (128, RIGHT, {})], ("all of the last 128 groups have only right answers",)
    ),
    "nearly all wrong at the beginning": (  # one right answer of 96, in the third group
        {**TWELVE, "mask_truncated": True},
        [(2, ALL_WRONG, {}), (1, ONE_LUCKY, {}), (4, ALL_WRONG, CUT), (1, ALL_WRONG, {})],
        ("7 of the first 8 groups have only wrong answers, and 1% of all answers are right; 57% were cut",),
    ),
}  # fmt: skip
NOT_NOTED: dict[str, tuple[dict[str, Any], Arrivals]] = {
    "less than two batches": ({}, [(7, WRONG, {})]),
    "a model that learns to end": (TWELVE, [(3, ALL_WRONG, {}), (1, ONE_LUCKY, {}), (4, ALL_WRONG, CUT)]),
    "cut answers that are trained": ({}, [(8, BOTH, CUT)]),
    "what a teacher teaches": ({"filter_range": None, "teacher_bytes": 12}, [(8, WRONG, {})]),
    "less than eight batches": (LONG, [(1, BOTH, {}), (127, RIGHT, {})]),
    "a run that began well": (  # two batches of it
        TWELVE,
        [(8, ONE_LUCKY, {}), *[(4, ALL_WRONG, {}), (1, ONE_LUCKY, {})] * 3],
    ),
    "the beginning's first seven": (TWELVE, [(2, ALL_WRONG, {}), (1, ONE_LUCKY, {}), (4, ALL_WRONG, CUT)]),
}


@pytest.mark.parametrize("name", NOTED)
def test_groups_that_train_nothing_make_a_note_with_the_remedy(name: str):
    changes, arrivals, expected = NOTED[name]
    state = a_state(**changes)
    for count, accuracies, facts in arrivals:
        arrive(state, count, accuracies, **facts)
    assert [text for text in expected if text not in the_note(state)] == []
    for shown in (persistence.status(state, 0.0), persistence.ledger_file(state)):
        assert shown["group_notes"] == diagnosis.notes(state)


@pytest.mark.parametrize("name", NOT_NOTED)
def test_other_groups_make_no_note(name: str):
    changes, arrivals = NOT_NOTED[name]
    state = a_state(**changes)
    for count, accuracies, facts in arrivals:
        arrive(state, count, accuracies, **facts)
    assert diagnosis.notes(state) == {}


def test_answers_that_the_limit_of_a_turn_cut_are_not_blamed_on_the_limit_of_the_rollout():
    state = a_state(max_turn_tokens=2)
    for _ in range(8):
        (lease,) = leases(state, 1)
        made = group(lease, accuracies=WRONG, finish_reason="length")  # three tokens: turns of one and two
        turns = (Turn(1, 0.0, 0.0), Turn(2, 0.0, 0.0))
        put(state, structs.replace(made, rollouts=tuple(structs.replace(r, turns=turns) for r in made.rollouts)))
    assert "100% were cut at environment.max_turn_tokens = 2. Raise environment.max_turn_tokens" in the_note(state)


def test_a_later_streak_must_be_longer_than_chance_makes_it():
    # 64 groups can train and 64 can't. The probability of n further ones that can't is the product of (65 + i) / (130 +
    # i) for i below n: 1.4e-6 for 22, and 7.8e-7 for 23.
    state = a_state(max_staleness=999, max_filtered=10_000)
    for _ in range(64):
        arrive(state, 1, WRONG)
        arrive(state, 1, BOTH)
    arrive(state, 22, WRONG)
    assert diagnosis.notes(state) == {}
    arrive(state, 1, WRONG)
    assert the_note(state).startswith("all of the last 23 groups have only wrong answers")


def test_prompts_that_are_excluded_as_too_slow_make_a_note_with_the_setting():
    # Under "mask" a group whose newest token is too old is late; after max_attempts = 1 its prompt is excluded.
    state = make_state(on_stale="mask", max_staleness=1, max_attempts=1)
    slow, *others = leases(state, 4)
    for lease in others:
        put(state, group(lease))
    assert len(positions(take(state))) == 2
    ack(state)
    (fresh,) = leases(state, 1, version=1)
    put(state, group(fresh, 1))
    assert len(positions(take(state))) == 2
    ack(state)
    assert put(state, group(slow)) == "stale"
    assert dropped(state) == {"too_slow": 1}
    assert "1 prompt was excluded as too slow: 1 times (queue.max_attempts)" in the_note(state)
    assert 'Raise queue.max_staleness, or set queue.on_stale = "wait"' in the_note(state)


def test_data_of_which_nothing_could_be_trained_says_what_became_of_it():
    state = make_state(num_rows=4, epochs=1, max_attempts=1)
    arrive(state, 1, WRONG)
    arrive(state, 1, RIGHT)
    arrive(state, 1, WRONG)
    leases(state, 1)
    assert isinstance(answer := take(state, now=11.0), NotReady)
    assert answer.exhausted
    assert answer.reason.startswith(
        "the data has ended (data.epochs); prompts: 3 filtered (2 with only wrong answers, "
    )
    assert "1 failed queue.max_attempts times. none of the 3 groups" in answer.reason
