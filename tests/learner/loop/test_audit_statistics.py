"""The tests that find forging generators: by hand, and with simulated engines, honest and not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from async_rl.learner.loop.audit_statistics import (
    Auditor,
    Finding,
    Observation,
    log_ratio,
    observe,
)

LIMIT = 0.05


def given(
    who: str, *, lag: int = 0, bias: float = 0.0, error: float = 0.001, size: float = 0.01, outliers: int = 0,
    follows_others: bool = False,
) -> Observation:  # fmt: skip
    square = 1024 * error**2  # of each of 1024 tokens, more than are needed before the test of bias
    return Observation(who, lag, bias, square, size, num_tokens=1024, num_rollouts=4, num_outliers=outliers,
                       follows_others=follows_others)  # fmt: skip


def test_an_observation_by_hand():
    # pi/mu is 1, 2 and 4, and 1/e^4. The third is capped at e, so pi/mu - 1 is 0, 1, 1.7183 and -0.9817: mean 0.4342.
    # |delta| is 0, 0.6931, 1 (of 1.3863) and 1 (of 4): mean 0.6733. The second rollout has a token below -3.
    found = observe("g", 2, [np.log([1.0, 2.0]), np.array([math.log(4.0), -4.0])])
    assert (found.num_tokens, found.num_rollouts, found.num_outliers) == (4, 2, 1)
    assert found.bias == pytest.approx(0.4342, abs=1e-4)
    assert found.size == pytest.approx(0.6733, abs=1e-4)
    # Their squares are 0, 1, 2.9525 and 0.9637: mean 1.2290.
    assert found.square == pytest.approx(1.2290, abs=1e-4)


def test_a_number_that_is_not_finite_is_an_outlier_in_no_case_an_error():
    found = observe("g", 0, [np.array([np.nan, 0.0]), np.array([-np.inf, 0.0])])
    assert (found.size, found.num_outliers) == (0.5, 2)


def test_a_log_likelihood_ratio_by_hand():
    # One event at 1/2 against 1/5, three non-events at 1/2 against 4/5: ln(2.5) + 3 ln(0.625) = 0.9163 - 1.4100.
    assert log_ratio(1, 4, 0.2, 0.5) == pytest.approx(-0.4937, abs=1e-4)


def test_a_large_bias_is_found_at_the_fourth_group():
    # (0.01 - 0.003) / 0.001 is 7 standard errors, clipped to 4. Less the slack, each group adds 3.5: 14 after four.
    auditor = Auditor(LIMIT)
    found = [finding for _ in range(6) for finding in auditor.add([given("g", bias=-0.01)])]
    assert [(one.generator_id, one.test, one.num_groups) for one in found] == [("g", "bias", 4)]
    assert "is -0.0100, expected 0 within 0.0030" in found[0].why


def test_a_bias_within_the_tolerance_never_adds_up():
    auditor = Auditor(LIMIT)
    assert not any(auditor.add([given("g", bias=0.003)]) for _ in range(1000))


def test_a_bias_that_all_share_is_nobodys():
    # What the queue keeps for its rewards is a selection: it shifts the mean of every generator.
    auditor = Auditor(LIMIT)
    steps = [[given(who, lag=1, bias=0.0115, error=0.01) for who in "abc"]] * 100
    assert not any(auditor.add(step) for step in steps)
    # Where all must be 0 it counts: (0.0115 - 0.003) / 0.01 - 0.5 = 0.35 for each group, 12.25 after 35.
    alone = Auditor(LIMIT)
    assert [one.num_groups for _ in range(300) for one in alone.add([given("a", bias=0.0115, error=0.01)])] == [35]


def test_groups_of_a_policy_that_is_far_away_show_no_bias():
    # Eight tokens of pi/mu = 1/8 and one of 8: the mean is 1, as of an honest engine. Capped at e it is 0.413.
    ratios = np.array([1 / 8] * 8 + [8.0])
    one = observe("g", 5, [np.log(ratios)])
    assert ratios.mean() - 1 == pytest.approx(0.0, abs=1e-9)
    assert one.bias == pytest.approx((8 / 8 + math.e) / 9 - 1)
    auditor = Auditor(LIMIT)
    assert not any(auditor.add([one]) for _ in range(100))


def test_a_liar_does_not_make_the_honest_one_beside_it_look_like_one():
    auditor = Auditor(LIMIT)
    steps = [[given("liar", bias=0.01), given("honest")] for _ in range(200)]
    assert [one.generator_id for step in steps for one in auditor.add(step)] == ["liar"]


def test_tokens_of_another_version_differ_more_than_those_of_the_others():
    # The others' mean is 0.1, the limit 0.15; 0.35 is 0.2 above: over a deviation of at least 0.015, clipped to 4.
    auditor = Auditor(LIMIT)
    steps = [[given("a", lag=1, size=0.1), given("b", lag=1, size=0.1), given("liar", lag=1, size=0.35)]] * 20
    found = [one for step in steps for one in auditor.add(step)]
    # The others count from their eighth group on, so the liar is found at its eleventh.
    assert [(one.generator_id, one.test, one.num_groups) for one in found] == [("liar", "size", 11)]


def test_without_others_the_size_is_judged_only_where_it_must_be_0():
    stale, fresh, after_an_update = Auditor(LIMIT), Auditor(LIMIT), Auditor(LIMIT)
    assert not any(stale.add([given("g", lag=1, size=0.9)]) for _ in range(100))
    assert not any(after_an_update.add([given("g", follows_others=True, size=0.9)]) for _ in range(100))
    assert [one.test for _ in range(100) for one in fresh.add([given("g", size=0.9)])] == ["size"]


def test_an_outlier_in_every_rollout_is_found():
    # Alone: ln(0.5 / 0.2) = 0.916 each, 3.67 for a group of four: 14.7 after four groups.
    auditor = Auditor(LIMIT)
    found = [one for _ in range(9) for one in auditor.add([given("g", outliers=4)])]
    assert [(one.test, one.num_groups) for one in found] == [("outliers", 4)]


def test_outliers_that_are_common_among_all_show_nothing():
    auditor = Auditor(LIMIT)
    steps = [[given(who, lag=3, outliers=1) for who in "abc"]] * 200
    assert not any(auditor.add(step) for step in steps)


def test_a_short_answer_without_the_rare_token_is_no_bias():
    # Of 20 tokens 19 have pi/mu = 1.02 and one has 0.62: the mean is 1. Most groups of five have only common ones.
    random, auditor = np.random.default_rng(0), Auditor(size_limit=1.0)
    for _ in range(3000):
        ratios = np.where(random.random(5) < 0.05, 0.62, 1.02)
        assert not auditor.add([observe("g", 0, [np.log(ratios)])])


# Simulated engines: the learner's logits over 16 tokens, a version's move times sqrt(staleness) on each, and the
# engine's own error, heavy-tailed. Tokens are drawn from what the engine computes, and that is what it claims, unless
# it forges. With these logits an error of 0.01 moves a log-probability by about 0.01 nat.
MOVE = 0.05


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def sampled(
    random: np.random.Generator, who: str, lag: int, *, error: float, move: float, bias: float = 0.0,
    changed: float = 0, late: float = 0,
) -> Observation:  # fmt: skip
    """Return the observation of a group of four rollouts of 64 tokens.

    Its claims are ``bias`` nats too high, ``changed`` tokens of each rollout are replaced by random ones, and it was
    sampled ``late`` versions before the one that it names.
    """
    deltas = []
    for _ in range(4):
        logits = 2 * random.normal(size=(64, 16))
        moved = logits + move * math.sqrt(lag + late) * random.normal(size=logits.shape)
        behavior = log_softmax(moved + error * random.standard_t(3, size=logits.shape) / math.sqrt(3))
        token_ids = (behavior + random.gumbel(size=logits.shape)).argmax(-1)
        claimed = behavior[np.arange(64), token_ids] + bias
        token_ids[random.integers(64, size=int(changed))] = random.integers(16, size=int(changed))
        deltas.append(log_softmax(logits)[np.arange(64), token_ids] - claimed)
    return observe(who, lag, deltas)


HONEST = {"bfloat16": 0.01, "bfloat16 too": 0.01, "other kernels": 0.02, "quantised": 0.1}


def audited(
    num_steps: int, lag: int, forger: Mapping[str, float] | None = None, *, move: float = MOVE, seed: int = 0
) -> Iterator[Finding]:
    """Yield what is found in a fleet of ``HONEST`` and of the forger, with a group of each in a step."""
    random, auditor = np.random.default_rng(seed), Auditor(LIMIT)
    fleet = {who: {"error": error, "move": move} for who, error in HONEST.items()}
    if forger is not None:
        fleet["forger"] = {"error": 0.01, "move": move, **forger}
    for _ in range(num_steps):
        yield from auditor.add([sampled(random, who, lag, **how) for who, how in fleet.items()])


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_honest_engines_of_several_kinds_are_not_found(lag: int):
    assert list(audited(60, lag)) == []


@pytest.mark.parametrize(
    ("forger", "move", "lag", "test", "most_groups"),
    [
        ({"bias": 0.01}, MOVE, 0, "bias", 6),
        ({"bias": -0.01}, MOVE, 0, "bias", 6),
        ({"bias": 0.01}, MOVE, 1, "bias", 50),
        ({"bias": -0.01}, MOVE, 1, "bias", 50),
        ({"bias": 0.01}, MOVE, 3, "bias", 60),
        ({"changed": 1}, MOVE, 0, "outliers", 20),
        ({"changed": 1}, MOVE, 1, "outliers", 20),
        ({"late": 1}, 0.25, 0, "size", 12),
        ({"late": 1}, 0.4, 1, "size", 30),
    ],
)
def test_a_forger_is_found_within_the_stated_number_of_groups(
    forger: Mapping[str, float], move: float, lag: int, test: str, most_groups: int
):
    found = list(audited(most_groups, lag, forger, move=move))
    assert [(one.generator_id, one.test) for one in found] == [("forger", test)]
