"""Figures of evaluations: worked by hand, and against every choice of samples counted one by one."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.config.config import Config
from async_rl.records import NO_VERSION, FinishReason, Group, Prompt, Rollout, TokenSequence, Turn
from async_rl.rewards.answers import majority, vote_key_of
from async_rl.run.records.eval_records import eval_figures, eval_metrics, pass_at_k
from async_rl.run.records.metric_table import EVAL_FIGURES, METRIC_KEYS
from latex_answers import canonical_form


def rollout(
    accuracy: float, answer: str | None = "2", *, num_tokens: int = 2, version: int = 4,
    finish_reason: FinishReason = "stop", reward: float | None = None, turns: tuple[Turn, ...] = (),
) -> Rollout:  # fmt: skip
    """One prompt token, then ``num_tokens`` sampled ones, ids 10, 11, ..."""
    sequence = TokenSequence(
        token_ids=np.arange(9, 10 + num_tokens, dtype=np.int32),
        loss_mask=np.array([False] + [True] * num_tokens),
        behavior_logprobs=np.zeros(1 + num_tokens, np.float32),
        versions=np.array([NO_VERSION] + [version] * num_tokens, np.int32),
    )
    parts = {"correct": accuracy if reward is None else reward}
    return Rollout((sequence,), parts, accuracy, finish_reason, answer, turns)


@st.composite
def samples_and_k(draw: st.DrawFn) -> tuple[list[bool], int]:
    samples = draw(st.lists(st.booleans(), min_size=1, max_size=9))
    return samples, draw(st.integers(1, len(samples)))


@given(samples_and_k())
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_that_hold_a_right_one(chosen: tuple[list[bool], int]):
    samples, k = chosen
    choices = [any(choice) for choice in combinations(samples, k)]
    assert pass_at_k(len(samples), sum(samples), k) == pytest.approx(float(Fraction(sum(choices), len(choices))))


@pytest.mark.parametrize(
    ("answers", "winner"),
    [
        (["2", "3", "3"], 1),
        (["3", "2", "2", "3"], 0),  # a tie: the answer that was given first
        (["1/2", "x", "0.50"], 0),  # equal numbers vote together, and are told by the first
        ([r"\frac{1}{2}", "7", r"\dfrac12", "7"], 0),
        (["Paris", "paris", "Rome"], 0),
        (["x+1", "1+x", "y", "y"], 2),  # equal, but not by sight: no verifier is asked
        ([None, None, "4"], 2),  # no answer, no vote
        ([None, None], None),
    ],
)
def test_a_majority_is_the_answer_with_most_votes_and_a_tie_goes_to_the_first(answers: list[Any], winner: int | None):
    assert majority(answers, canonical_form) == winner


def test_figures_are_means_over_answers_and_over_rows():
    # Right: 1 of 2, 0 of 2 -> accuracy 1/4, rows 1/2 and 0: standard error sqrt(((1/4)**2 * 2) / 1 / 2) = 1/4.
    # pass@1 = 1/4, pass@2 = 1/2. Majorities: "2" (a tie, given first, right) and "5" (wrong) -> 1/2. Best: 1, 0.
    # Rewards 1, -1, 0, 0.5 -> mean 1/8, best 1 and 0.5 -> 3/4. Lengths 2, 4, 6, 8 -> 5. One of four was cut.
    cut = rollout(0.0, None, num_tokens=8, finish_reason="length", reward=0.5)
    rows = [
        [rollout(1.0, "2", num_tokens=2), rollout(0.0, "3", num_tokens=4, reward=-1.0)],
        [rollout(0.0, "5", num_tokens=6, version=7), cut],
    ]
    assert eval_figures(rows, vote_key=canonical_form) == {
        "accuracy": 0.25, "accuracy_se": 0.25, "pass_at_1": 0.25, "pass_at_2": 0.5, "pass_at_k": 0.5, "best_of_n": 0.5,
        "reward_best_of_n": 0.75, "majority_at_n": 0.5, "rows": 2, "unanswered": 0, "samples": 2, "reward": 0.125,
        "length_mean": 5.0, "truncated": 0.25, "version_min": 4, "version_max": 7,
    }  # fmt: skip


def test_a_row_without_an_answer_is_wrong_in_every_share_and_counted():
    # Of three rows one is solved by both answers, one by one of two, one has none.
    rows = [[rollout(1.0, "1"), rollout(1.0, "1")], [rollout(0.0, "7"), rollout(1.0, "1")], []]
    found = eval_figures(rows, vote_key=str.strip)
    assert found["accuracy"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert found["pass_at_1"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert (found["pass_at_2"], found["best_of_n"]) == (pytest.approx(2 / 3), pytest.approx(2 / 3))
    assert found["majority_at_n"] == pytest.approx(1 / 3)
    assert (found["rows"], found["unanswered"]) == (3, 1)
    assert found["reward"] == 0.75
    assert eval_figures([[], []]) == {
        "accuracy": 0.0, "accuracy_se": 0.0, "pass_at_k": 0.0, "rows": 2, "unanswered": 2,
    }  # fmt: skip
    assert eval_figures([]) == {"rows": 0}
    # Half a point is accuracy, but does not solve a row.
    found = eval_figures([[rollout(0.5), rollout(0.25)]])
    assert (found["accuracy"], found["pass_at_k"], found["best_of_n"]) == (0.375, 0.0, 0.5)
    # pass@k is told for powers of two and for all answers. 6, of which 2 are right: 1 - C(4,4)/C(6,4) = 14/15.
    found = eval_figures([[rollout(float(i < 2)) for i in range(6)]])
    assert found["pass_at_4"] == pytest.approx(14 / 15)
    assert [key for key in found if key.startswith("pass_")] == ["pass_at_1", "pass_at_2", "pass_at_4", "pass_at_k"]


def test_one_answer_a_row_has_no_best_and_what_was_not_extracted_no_majority():
    found = eval_figures([[rollout(1.0, "1")]], vote_key=str.strip)
    assert not {"best_of_n", "majority_at_n", "reward_best_of_n", "accuracy_se"} & found.keys()
    assert "majority_at_n" not in eval_figures([[rollout(1.0, None), rollout(0.0, None)]], vote_key=str.strip)


def test_rollouts_of_several_turns_have_scores_and_failed_ones_are_counted():
    # Scores 1 (in two turns) and 0; the failed one has no turns. Mean of three answers 1/3, best of the rows 1 and 0.
    two = (Turn(1, 0.0, 0.0), Turn(1, 1.0, 1.0))
    failed = rollout(0.0, finish_reason="error")
    found = eval_figures([[rollout(1.0, turns=two), failed], [rollout(0.0, turns=(Turn(2, 0.0, 0.0),)), failed]])
    assert (found["score"], found["score_best_of_n"], found["turns"]) == (0.25, 0.5, 0.75)
    assert (found["failed"], found["accuracy"]) == (2, 0.25)


def test_metrics_are_named_by_their_set_and_every_figure_is_explained():
    prompt = Prompt(0, 0, 0, (), {})
    rows = [[rollout(1.0, "1", turns=(Turn(2, 1.0, 1.0),)), rollout(0.0, "1", finish_reason="error")], []]
    groups = [(prompt, Group("l", "eval", 0, "g", "line", 0.0, tuple(row))) for row in rows]
    found = eval_metrics("math500", groups, vote_key=str.strip)
    assert found["eval/math500/accuracy"] == 0.25
    explained = {*EVAL_FIGURES, "pass_at_1", "pass_at_2"}
    assert {key.removeprefix("eval/math500/") for key in found} <= explained
    assert {f"eval/<dataset>/{key}" for key in EVAL_FIGURES} <= METRIC_KEYS.keys()


@pytest.mark.parametrize(
    ("reward", "key"),
    [
        ({"type": "boxed"}, canonical_form),
        ({"type": "boxed", "equality": "exact"}, str.strip),
        ({"type": "exact"}, str.strip),
        ({"type": "code"}, None),
        ({"type": "mine:f"}, str.strip),
    ],
)
def test_programs_do_not_vote_and_other_answers_vote_as_they_are_compared(reward: dict[str, Any], key: object):
    config = Config.model_validate({"run": {"dir": "r"}, "model": {"path": "m"}, "reward": reward})
    assert vote_key_of(config) is key
