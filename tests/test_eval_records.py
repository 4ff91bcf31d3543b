"""Figures of an evaluation, worked by hand, and the file of its answers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from async_rl.eval_records import answer_record, eval_metrics, pass_at_k, write_json_lines
from async_rl.records import NO_VERSION, FinishReason, Group, Prompt, Rollout, TokenSequence

PROMPT = Prompt(3, 5, 0, ({"role": "user", "content": "1+1"},), {"gt_answer": "2"})


def rollout(accuracy: float, *, num_tokens: int = 2, version: int = 4, finish_reason: FinishReason = "stop") -> Rollout:
    """One prompt token, then ``num_tokens`` sampled ones, ids 10, 11, ..."""
    sequence = TokenSequence(
        token_ids=np.arange(9, 10 + num_tokens, dtype=np.int32),
        loss_mask=np.array([False] + [True] * num_tokens),
        behavior_logprobs=np.zeros(1 + num_tokens, np.float32),
        versions=np.array([NO_VERSION] + [version] * num_tokens, np.int32),
    )
    return Rollout((sequence,), {"accuracy": accuracy}, accuracy, finish_reason, "2")


def group(*rollouts: Rollout) -> tuple[Prompt, Group]:
    return PROMPT, Group("lease", "eval", 3, "g", "line", 0.0, rollouts)


@pytest.mark.parametrize(
    ("num_samples", "num_correct", "k", "expected"),
    [
        (1, 0, 1, 0.0),
        (1, 1, 1, 1.0),
        (4, 1, 1, 1 / 4),  # k = 1 is plain accuracy
        (4, 1, 2, 1 / 2),  # the right one is in 3 of the 6 pairs
        (4, 2, 2, 5 / 6),  # 1 - the one wrong pair of 6
        (5, 2, 3, 9 / 10),  # 1 - C(3,3)/C(5,3)
        (4, 3, 2, 1.0),  # there is no pair of wrong ones
        (4, 0, 4, 0.0),
    ],
)
def test_pass_at_k_is_the_unbiased_estimate(num_samples: int, num_correct: int, k: int, expected: float):
    assert pass_at_k(num_samples, num_correct, k) == pytest.approx(expected)


@pytest.mark.parametrize("k", [0, 3])
def test_pass_at_k_refuses_a_k_beyond_the_samples(k: int):
    with pytest.raises(ValueError, match="expected k between 1 and 2"):
        pass_at_k(2, 1, k)


def test_figures_are_means_over_answers_and_over_rows():
    # Answers right: 1, 0, 0, 0 -> 1/4. Rows with a right answer: first only -> 1/2. Lengths 2, 4, 6, 8 -> 5.
    # One of four was cut. Versions 4 and 7 sampled.
    groups = [
        group(rollout(1.0, num_tokens=2), rollout(0.0, num_tokens=4)),
        group(rollout(0.0, num_tokens=6, version=7), rollout(0.0, num_tokens=8, finish_reason="length")),
    ]
    assert eval_metrics("d", groups) == {
        "eval/d/accuracy": 0.25,
        "eval/d/pass_at_k": 0.5,
        "eval/d/length_mean": 5.0,
        "eval/d/truncated": 0.25,
        "eval/d/rows": 2,
        "eval/d/version_min": 4,
        "eval/d/version_max": 7,
    }


def test_half_a_point_is_accuracy_but_does_not_solve_a_row():
    figures = eval_metrics("d", [group(rollout(0.5), rollout(0.5))])
    assert (figures["eval/d/accuracy"], figures["eval/d/pass_at_k"]) == (0.5, 0.0)


def test_a_row_without_answers_counts_as_a_row_and_nothing_else():
    figures = eval_metrics("d", [group(rollout(1.0)), group()])
    assert (figures["eval/d/rows"], figures["eval/d/accuracy"], figures["eval/d/pass_at_k"]) == (2, 1.0, 1.0)
    assert eval_metrics("d", []) == {"eval/d/rows": 0}


def test_an_answer_record_holds_the_sampled_text_only():
    record = answer_record(PROMPT, rollout(1.0), lambda ids: " ".join(map(str, ids.tolist())))
    assert record == {
        "row": 5,
        "messages": [{"role": "user", "content": "1+1"}],
        "response": "10 11",
        "extracted": "2",
        "expected": "2",
        "accuracy": 1.0,
        "reward": 1.0,
        "reward_parts": {"accuracy": 1.0},
        "finish_reason": "stop",
        "num_tokens": 2,
        "versions": [4, 4],
    }


def test_lines_appear_whole_or_not_at_all(tmp_path: Path):
    path = tmp_path / "deep" / "answers.jsonl"
    write_json_lines(path, [{"a": "ä"}, {"a": 2}])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"a": "ä"}, {"a": 2}]

    def torn():
        yield {"a": 3}
        raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError):
        write_json_lines(path, torn())
    assert '{"a": 2}' in path.read_text()
