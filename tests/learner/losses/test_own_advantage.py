"""Advantages of the user's own: what the function gets, where its result goes, and how its mistakes are named."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import own_advantage
import pytest

from async_rl.config.config import Config
from async_rl.config.loading import parse_config
from async_rl.errors import ConfigError, OwnCodeError
from async_rl.launch.checks.user_code_trial import _error_of_loss
from async_rl.learner.data.batch import PreparedBatch
from async_rl.learner.losses.advantages import with_advantages
from async_rl.learner.losses.own_advantage import AdvantageInputs, OwnAdvantage, load_own_advantage
from tests.learner.losses.test_advantages import advantages, loss, prepare, rollout, token_advantages

EXAMPLE = Path(own_advantage.__file__)


def with_own(
    step: PreparedBatch, function: Callable[[AdvantageInputs], Any], *, version: int = 5, **settings: Any
) -> PreparedBatch:
    return with_advantages(step, loss(**settings), own=OwnAdvantage("mine.py:f", function), version=version)


def a_config(tmp_path: Path, name: str, **sections: Any) -> Config:
    loss = {"advantage_function": name} | sections.pop("loss", {})
    return parse_config({"run": {"dir": str(tmp_path)}, "model": {"path": "m"}, "loss": loss, **sections}, "test")


def test_the_function_gets_the_rollouts_of_the_step_and_its_numbers_reach_the_tokens():
    seen: list[AdvantageInputs] = []

    def rewards(inputs: AdvantageInputs) -> list[float]:
        seen.append(inputs)
        return (2 * inputs.rewards).tolist()

    # Tokens are of version 5. The third is cut and the fourth failed: they are masked and in no baseline.
    step = prepare([rollout(1, 2), rollout(0, [1, 2])], [rollout(3, 4, "length"), rollout(4, 1, "error")])
    assert advantages(with_own(step, rewards, version=7)) == {0: 2.0, 1: 0.0}
    (inputs,) = seen
    assert inputs.rewards.tolist() == [1, 0, 3, 4]
    assert (inputs.accuracies.tolist(), inputs.group_sizes) == ([1, 0, 1, 1], (2, 2))
    assert (inputs.num_sampled.tolist(), inputs.num_trained.tolist()) == ([2, 3, 4, 1], [2, 3, 0, 0])
    assert (inputs.lag.tolist(), inputs.masked) == ([2, 2, 2, 2], ("", "", "truncated", "failed"))
    assert (inputs.in_baseline.tolist(), inputs.generator_ids) == ([True, True, False, False], ("g",) * 4)
    assert inputs.rows.tolist() == [0, 0, 0, 0]
    assert [group.tolist() for group in inputs.groups()] == [[0, 1], []]
    assert [group.tolist() for group in inputs.groups(baseline_only=False)] == [[0, 1], [2, 3]]


def test_what_changes_rewards_comes_before_and_what_chooses_rollouts_after():
    # Right answers of 1 and 3 tokens: the shorter gets a bonus of 0.5. The function keeps rewards as they are.
    step = prepare([rollout(1, 1), rollout(1, 3), rollout(0, 2)])
    trained = with_own(step, lambda i: i.rewards, length_bonus=0.5, best_k=1)
    assert advantages(trained) == {0: 1.5}
    assert trained.masked == {1: "best_k", 2: "best_k"}


@pytest.mark.parametrize(
    ("result", "settings", "expected"),
    [
        (lambda i: i.rewards[:1], {}, r"shape \[2\], got shape \[1\]"),
        (lambda i: None, {}, r"shape \[2\], got (shape \[\]|NoneType)"),
        (lambda i: ["a", "b"], {}, r"shape \[2\], got list"),
        (lambda i: [1.0, math.nan], {}, "got nan for rollout 1"),
        (lambda i: [np.ones(2), np.ones(2)], {}, r"rollout 1: .* shape \[3\], got shape \[2\]"),
        (lambda i: [np.ones(2)], {}, "an array for each of 2 rollouts, got 1"),
        (lambda i: [np.ones(2), np.array([1, 1, math.inf])], {}, "got inf for rollout 1"),
        (lambda i: [np.ones(2), np.ones(3)], {"best_k": 1}, r"because loss\.best_k = 1"),
    ],
)
def test_a_wrong_result_is_refused_with_what_it_is(result: Any, settings: dict[str, Any], expected: str):
    step = prepare([rollout(1, 2), rollout(0, 3)])
    with pytest.raises(OwnCodeError, match=rf"loss\.advantage_function: mine\.py:f: .*{expected}"):
        with_own(step, result, **settings)


def test_numbers_for_tokens_reach_their_tokens_in_the_order_of_the_sequences_and_masked_rollouts_need_none():
    step = prepare([rollout(1, 2), rollout(0, [1, 2])], [rollout(0, 1, "length"), rollout(1, 1)])
    trained = with_own(step, lambda i: [np.arange(n) + 10 * r for r, n in enumerate(i.num_trained)])
    assert token_advantages(trained) == [[0, 1], [10], [11, 12], [30]]
    assert all(s.advantages.dtype == np.float32 for s in trained.sequences)
    assert advantages(with_own(step, lambda i: [1.0, -1.0, math.nan, 2.0])) == {0: 1.0, 1: -1.0, 3: 2.0}


def test_a_function_that_writes_to_its_inputs_is_named_with_the_line():
    def halved(inputs: AdvantageInputs) -> np.ndarray:
        inputs.rewards[:] /= 2
        return inputs.rewards

    with pytest.raises(OwnCodeError, match=r"ValueError: .*read-only.*, in halved: inputs\.rewards"):
        with_own(prepare([rollout(1), rollout(0)]), halved)


def test_the_trial_refuses_what_a_run_would_refuse(tmp_path: Path):
    source = tmp_path / "own_advantages.py"
    source.write_text("def short(inputs):\n    return inputs.rewards[1:]\ndef wrong(inputs):\n    return inputs.ages\n")
    with pytest.raises(ConfigError, match=r"short: the advantages: expected numbers of shape \[24\], got shape \[23\]"):
        load_own_advantage(a_config(tmp_path, f"{source}:short"))
    said = _error_of_loss(a_config(tmp_path, f"{source}:wrong"))
    assert f"has no attribute 'ages' ({source}, line 4, in wrong: return inputs.ages)" in said


def test_a_group_of_one_is_allowed_if_the_function_takes_it(tmp_path: Path):
    of_one: dict[str, Any] = {"sampling": {"group_size": 1}, "queue": {"filter_range": []}}
    assert load_own_advantage(a_config(tmp_path, f"{EXAMPLE}:by_age", **of_one)) is not None
    assert load_own_advantage(parse_config({"run": {"dir": "r"}, "model": {"path": "m"}}, "test")) is None


def test_the_example_by_age_divides_by_the_root_of_the_age():
    # Group of 1 and 0: mean 0.5, std sqrt(0.5); at lag 3 halved.
    step = prepare([rollout(1), rollout(0)])
    expected = 0.5 / (math.sqrt(0.5) + 1e-4) / 2
    got = advantages(with_own(step, own_advantage.by_age, version=8))
    assert got == pytest.approx({0: expected, 1: -expected})


def test_the_example_discounted_is_less_by_a_hundredth_for_each_token_before_the_last(tmp_path: Path):
    whole = 0.5 / (math.sqrt(0.5) + 1e-4)
    first, second = token_advantages(with_own(prepare([rollout(1, 3), rollout(0, 1)]), own_advantage.discounted))
    assert (first, second) == (pytest.approx([0.9801 * whole, 0.99 * whole, whole]), pytest.approx([-whole]))
    assert load_own_advantage(a_config(tmp_path, f"{EXAMPLE}:discounted")) is not None
