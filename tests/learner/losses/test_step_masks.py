"""Rules over a whole optimizer step: which tokens they leave out, and that no cut into micro-batches changes that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_rl.config.loss import LossConfig
from async_rl.learner.interface import PolicyScores
from async_rl.learner.losses.rules import Verdict
from async_rl.learner.losses.step_masks import JudgedStep, judge_step, left_out
from async_rl.learner.sequences import TrainSequence
from tests.examples import examples
from tests.learner.loop.scripted_run import make_run
from tests.learner.losses.cases import of_ratios, run

M2 = {"name": "m2", "level": "step", "statistic": "k2", "above": 0.02, "when": "outward", "action": "clip"}
LOG_RATIOS = [[0.05, 0.3, -0.4, 0.1], [-0.5, -0.15, 0.2, -0.02]]
ADVANTAGES = [1.0, -1.0]
"""Outward: 0.05, 0.3, 0.1 | -0.5, -0.15, -0.02. Squares 0.0025, 0.09, 0.01, 0.25, 0.0225, 0.0004: mean 0.0626."""


def sequences_of(log_ratios: Sequence[Sequence[float]], advantages: Sequence[float]) -> list[TrainSequence]:
    """mu = e^-1 throughout; two prompt tokens each."""
    made = []
    for index, (values, advantage) in enumerate(zip(log_ratios, advantages, strict=True)):
        mask = np.arange(len(values) + 2) >= 2
        made.append(
            TrainSequence(
                sequence_id=index, token_ids=np.arange(len(mask), dtype=np.int32), loss_mask=mask, temperature=1.0,
                behavior_logprobs=-mask.astype(np.float32), versions=mask.astype(np.int32) - 1,
                advantages=advantage * mask.astype(np.float32),
            )
        )  # fmt: skip
    return made


def judged(rules: Sequence[dict[str, Any]], log_ratios: Sequence[Sequence[float]] = LOG_RATIOS) -> JudgedStep:
    loss = LossConfig.model_validate({"rules": rules})
    scores = {
        i: PolicyScores(np.array(values, np.float32) - 1, np.zeros(len(values), np.float32))
        for i, values in enumerate(log_ratios)
    }
    return judge_step(sequences_of(log_ratios, ADVANTAGES[: len(log_ratios)]), scores, loss)


def verdicts(step: JudgedStep) -> list[list[int]]:
    return [s.verdicts[s.loss_mask].tolist() for s in step.sequences]


def test_m2po_cuts_the_outward_tokens_as_its_authors_code_does():
    # Without -0.5, which counts as the highest that is left: (0.1254 + 0.09) / 6 = 0.0359 <= 0.04.
    step = judged([M2])
    assert verdicts(step) == [[0, 0, 0, 0], [Verdict.CLIP, 0, 0, 0]]
    assert step.counts == {"m2": 1}
    # A tighter limit of 0.035 cuts at 0.15: (0.0004 + 0.0025 + 0.01 + 3 * 0.0225) / 6 = 0.0134.
    assert verdicts(judged([{**M2, "above": 0.0175}])) == [[0, 2, 0, 0], [2, 0, 0, 0]]
    assert LossConfig(preset="m2po").rules == LossConfig.model_validate({"rules": [M2]}).rules


def test_the_stricter_of_two_rules_counts_and_each_has_its_own_number():
    mask = {**M2, "name": "strict", "action": "mask", "when": "always"}
    for rules in ([M2, mask], [mask, M2]):
        step = judged(rules)
        assert verdicts(step) == [[0, 0, 3, 0], [3, 0, 0, 0]]
        assert step.counts == {"m2": 1, "strict": 2}


def test_a_token_that_is_not_finite_is_not_judged():
    # A NaN of mu leaves with its sequence; one of pi must reach the loss, so that the step fails visibly.
    sequences = sequences_of([[0.0, 0.1, 0.9]], [1.0])
    sequences[0].behavior_logprobs[2] = np.nan
    scores = {0: PolicyScores(np.array([0.0, np.nan, -0.1], np.float32), np.zeros(3, np.float32))}
    step = judge_step(sequences, scores, LossConfig.model_validate({"rules": [M2]}))
    assert verdicts(step) == [[0, 0, 2]]


def test_an_infinite_statistic_goes_first_and_spoils_no_other():
    values = torch.tensor([math.inf, 0.1, 0.5], dtype=torch.float64)
    for is_clip in (False, True):
        assert left_out(values, limit=0.2, is_clip=is_clip).tolist() == [True, False, is_clip or True]
        assert left_out(values, limit=0.5, is_clip=is_clip).tolist() == [True, False, False]


def with_entropies(quantile: float, *entropies: list[float], **keys: Any) -> JudgedStep:
    log_ratios = [[0.0] * len(values) for values in entropies]
    scores = {
        i: PolicyScores(np.full(len(values), -1, np.float32), np.array(values, np.float32))
        for i, values in enumerate(entropies)
    }
    loss = LossConfig(entropy_quantile=quantile, **keys)
    return judge_step(sequences_of(log_ratios, [1.0] * len(entropies)), scores, loss)


def test_tokens_below_the_quantile_of_the_step_s_entropies_leave_the_objective():
    # Sorted 0.1, 0.3, 0.4, 1.2, 2.0: the quantile 0.8 is at 3.2, so 1.2 + 0.2 * 0.8 = 1.36; 0.5 is 0.4.
    step = with_entropies(0.8, [0.1, 1.2, 0.4], [2.0, 0.3])
    assert verdicts(step) == [[Verdict.SILENT] * 3, [0, Verdict.SILENT]]
    assert step.counts == {"entropy_quantile": 4}
    assert verdicts(with_entropies(0.5, [0.1, 1.2, 0.4], [2.0, 0.3])) == [[1, 0, 0], [0, 1]]


def test_equal_entropies_all_stay_and_nan_is_left_for_the_step_to_fail():
    assert verdicts(with_entropies(0.8, [0.7, 0.7], [0.7])) == [[0, 0], [0]]
    assert verdicts(with_entropies(0.8, [math.nan, 0.7], [0.1])) == [[0, 0], [0]]


@given(st.lists(st.floats(0, 3), min_size=1, max_size=12), st.floats(0.01, 1.0), st.booleans())
@examples(100)
def test_left_out_is_the_shortest_run_from_the_top_that_reaches_the_limit(
    values: list[float], limit: float, is_clip: bool
):
    def mean(num_out: int) -> float:
        rest = sorted(values)[: len(values) - num_out]
        if not rest:
            return 0.0
        return (sum(rest) + num_out * rest[-1]) / len(values) if is_clip else sum(rest) / len(rest)

    hit = left_out(torch.tensor(values, dtype=torch.float64), limit=limit, is_clip=is_clip).tolist()
    gone = [value for value, is_out in zip(values, hit, strict=True) if is_out]
    assert sorted(gone) == sorted(values)[len(values) - len(gone) :]
    assert mean(len(gone)) <= limit + 1e-9
    assert not gone or mean(len(gone) - 1) > limit - 1e-9


def test_verdicts_mask_clip_and_silence_tokens_in_the_loss():
    # REINFORCE: the gradient is -A = -1. Only a mask leaves the denominator, only a clip counts as clipped.
    inputs = of_ratios([1.0, 1.0, 2.0, 1.0], [1.0] * 4)
    codes = torch.tensor([Verdict.KEEP, Verdict.SILENT, Verdict.CLIP, Verdict.MASK], dtype=torch.uint8)
    got = run(replace(inputs, verdicts=codes), LossConfig(surrogate="plain", skip_threshold=0))
    assert got.gradient == [-1.0, 0.0, 0.0, 0.0]
    assert int(got.out.denominator) == 3
    assert got.out.capped_high.tolist() == [False, False, True, False]


def test_the_share_of_judged_tokens_is_a_metric(tmp_path: Path):
    # Every token of the policy is at -2, far from what sampled it: all are left out.
    run_ = make_run(tmp_path, learner={"steps": 1}, loss={"rules": [{**M2, "when": "always"}]})
    run_.start()
    assert [row["rule/m2"] for row in run_.rows] == [1.0]
