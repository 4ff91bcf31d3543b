"""Process rewards: a reward function judges parts of a text, and each part's reward reaches the token at its end."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from async_rl.errors import RewardError
from async_rl.generator.rollouts import token_spans
from async_rl.learner.losses.advantages import with_advantages
from async_rl.net.codec import decode_group, encode_group
from async_rl.records import Group, Span
from async_rl.rewards.functions import FunctionReward
from async_rl.rewards.records import RewardInput, RewardOutput
from async_rl.rewards.registry import Extra, RewardSum
from tests.learner.losses.test_advantages import loss, prepare, rollout, token_advantages

ITEM = RewardInput("one two", {}, 2, 8, "stop")


def judged(spans: Any, parts: dict[str, float] | None = None, scale: float = 2.0) -> RewardOutput:
    def judge(item: RewardInput) -> RewardOutput:
        return RewardOutput(parts or {"right": 1.0}, 1.0, spans=spans)

    return FunctionReward("mine.py:judge", judge, scale=scale, time_limit_s=1.0)(ITEM)


def test_rewards_of_parts_are_scaled_and_their_sum_is_a_part_of_the_reward():
    output = judged([(3, 0.5), (7, -1.0)])
    assert output.spans == ((3, 1.0), (7, -2.0))
    assert output.parts == {"right": 2.0, "process": -1.0}
    assert judged(()).parts == {"right": 2.0}


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([(0, 1.0)], "from 1 to the text's 7 characters"),
        ([(3, 1.0), (3, 1.0)], "ascending"),
        ([(8, 1.0)], "from 1 to the text's 7 characters"),
        ([(1.5, 1.0)], "from 1 to the text's 7 characters"),
        ([(3, float("nan"))], "the reward of a span to be a finite number"),
        ([3], r"pairs \(end, reward\)"),
    ],
)
def test_spans_that_fit_no_text_are_refused(spans: Any, message: str):
    with pytest.raises(RewardError, match=message):
        judged(spans)


def test_a_part_that_is_called_as_the_sum_of_the_spans_is_refused():
    with pytest.raises(RewardError, match="no part 'process'"):
        judged([(3, 1.0)], {"process": 1.0})


def test_spans_of_an_extra_reward_count_with_its_weight():
    main = FunctionReward("m.py:a", lambda item: RewardOutput({}, 1.0, spans=((3, 1.0),)), scale=1.0,
                          time_limit_s=1.0)  # fmt: skip
    extra = FunctionReward("m.py:b", lambda item: RewardOutput({}, 1.0, spans=((3, 1.0), (7, 2.0))), scale=1.0,
                           time_limit_s=1.0)  # fmt: skip
    output = RewardSum(main, [Extra("b", extra, 0.5)], scale=1.0, overlong=None)(ITEM)
    assert output.spans == ((3, 1.5), (7, 1.0))
    assert output.parts == {"process": 1.0, "b": 1.5}


def test_an_extra_reward_is_added_to_a_part_of_its_name():
    main = FunctionReward("m.py:a", lambda item: RewardOutput({"judge": 3.0}, 1.0), scale=1.0,
                          time_limit_s=1.0)  # fmt: skip
    extra = FunctionReward("m.py:b", lambda item: 2.0, scale=1.0, time_limit_s=1.0)
    output = RewardSum(main, [Extra("judge", extra, 0.5), Extra("judge", extra, 2.0)], scale=1.0, overlong=None)(ITEM)
    assert output.parts == {"judge": 3.0 + 0.5 * 2.0 + 2.0 * 2.0}


def test_a_span_ends_with_the_token_that_completes_its_text():
    # Tokens of 2, 1, 4 and 0 characters: ends 2, 3, 7, 7. Rewards that end in the same token are added.
    texts = ["on", "e", " two", ""]

    def decode(token_ids: np.ndarray) -> str:
        return "".join(texts[i] for i in token_ids)

    spans = token_spans([(1, 1.0), (2, 2.0), (3, 4.0), (4, 8.0), (7, 16.0)], np.arange(4), decode)
    assert spans == (Span(1, 3.0), Span(2, 4.0), Span(3, 24.0))


def test_spans_travel_with_their_group_and_a_group_without_any_has_no_field_for_them():
    plain = rollout(1.0, 3)
    group = Group("lease", "train", 0, "g", "l", 1.0, (plain, msgspec.structs.replace(plain, spans=(Span(2, 0.5),))))
    back = decode_group(encode_group(group))
    assert [r.spans for r in back.rollouts] == [(), (Span(2, 0.5),)]
    without = encode_group(msgspec.structs.replace(group, rollouts=(plain, plain)))
    assert b"spans" not in without


def test_spans_have_advantages_of_their_own_and_the_rest_of_the_answer_too():
    # Total 1.5, of which 0.5 belong to token 1; the other answer has 0. To go: 1.5 and 0, then 1 and 0.
    one, other = (msgspec.structs.replace(rollout(r, 3), spans=(Span(2, r / 3),)) for r in (1.5, 0.0))
    got = token_advantages(with_advantages(prepare([one, other]), loss(advantage="per_turn_mean")))
    assert got == [[0.75, 0.75, 0.5], [-0.75, -0.75, -0.5]]


def test_spans_beyond_the_answer_make_a_rollout_invalid():
    bad = [msgspec.structs.replace(rollout(1.0, 3), spans=spans) for spans in ((Span(4, 1.0),), (Span(2, 1.0),) * 2)]
    assert prepare(bad).masked == {0: "invalid", 1: "invalid"}
