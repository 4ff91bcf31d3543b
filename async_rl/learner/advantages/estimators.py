"""Advantage estimators, and what is added to rewards before them. Pure, numpy only; called by ``step_advantages.py``.

Shape letters: n = rollouts of one group (or of a whole step), N = tokens. float64 throughout. Without a signal (a group
of one, equal rewards) an advantage is exactly 0, never NaN. Values that are not finite are refused. A new estimator is
a function here with a row in ``FUNCTIONS``, and a row in ``config.loss.ADVANTAGES``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from async_rl.config.section import look_up

STD_FLOOR = 1e-4
"""Added to a standard deviation, in its units, so that nearly equal rewards give no huge advantages."""
LOG_RATIO_LIMIT = 60.0
"""|log mu/ref| is clamped here, in nats, where k3 takes its exponential."""


def group_normalised(rewards: np.ndarray) -> np.ndarray:
    """GRPO's advantage (arXiv:2402.03300): ``(r - mean) / (std + 1e-4)``, std unbiased (n - 1).

    Over one group; ``global_norm`` takes the same over all rollouts of a step. The paper leaves a group of one and a
    group of equal rewards undefined; here they get 0.

    Args:
        rewards: float [n], reward units, one a rollout.

    Returns:
        float64 [n], in standard deviations.

    Raises:
        ValueError: ``rewards`` is not one-dimensional, or holds NaN or infinity.
    """
    centred = group_centred(rewards)
    if not centred.any():
        return centred
    return centred / (np.sqrt(np.dot(centred, centred) / (len(centred) - 1)) + STD_FLOOR)


def group_centred(rewards: np.ndarray) -> np.ndarray:
    """Dr. GRPO's advantage (arXiv:2503.20783): ``r - mean``; float64 [n], reward units. Raises as above."""
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"expected the rewards of one group, [n], got shape {list(values.shape)}")
    if not np.isfinite(values).all():
        raise ValueError(f"expected finite rewards, got {values.tolist()}; fix the reward function")
    return _centred(values)


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """RLOO's advantage (arXiv:2402.14740): ``r`` less the mean of the *other* rewards of its group.

    Computed as ``(r - mean) n / (n - 1)``, which is the same; float64 [n], reward units. Raises as above.
    """
    centred = group_centred(rewards)
    return centred * (len(centred) / max(1, len(centred) - 1))


def whitened(values: np.ndarray) -> np.ndarray:
    """``(v - mean) / (std + 1e-4)`` over tokens, std with 1 / N: REINFORCE++'s normalisation (arXiv:2501.03262).

    float64 [N] to float64 [N]; zeros where all are equal.
    """
    centred = _centred(values)
    if not centred.any():
        return centred
    return centred / (np.sqrt(np.dot(centred, centred) / len(centred)) + STD_FLOOR)


def _centred(values: np.ndarray) -> np.ndarray:
    # By comparison, not by difference: the mean of equal floats need not equal them.
    if len(values) < 2 or values.min() == values.max():
        return np.zeros_like(values)
    return values - values.sum() / len(values)


def length_bonuses(accuracies: np.ndarray, num_tokens: np.ndarray, bonus: float) -> np.ndarray:
    """AGPO's reward for short right answers (arXiv:2503.15952v1): ``bonus (1 - (l - min) / (max - min))``.

    Within one group. Only right answers (accuracy 1) get a bonus, and min and max are over them. There is no bonus in
    a group that is all right or all wrong, where only length would be rewarded, and none if all right answers have one
    length (the formula's 0 / 0).

    Args:
        accuracies: float [n].
        num_tokens: int [n], sampled tokens.
        bonus: of the shortest right answer, reward units.

    Returns:
        float64 [n], reward units.
    """
    bonuses = np.zeros(len(accuracies))
    right = accuracies >= 1.0
    if right.all() or not right.any():
        return bonuses
    lengths = num_tokens[right].astype(np.float64)
    span = lengths.max() - lengths.min()
    if span:
        bonuses[right] = bonus * (1.0 - (lengths - lengths.min()) / span)
    return bonuses


def best(values: np.ndarray, k: int) -> np.ndarray:
    """bool [n]: the ``k`` highest values, the earlier of equal ones; all if there are at most ``k``."""
    chosen = np.zeros(len(values), dtype=np.bool_)
    chosen[np.argsort(-values, kind="stable")[:k]] = True
    return chosen


def kl_estimates(log_ratio: np.ndarray, estimator: str) -> np.ndarray:
    """Schulman's estimates (joschu.net/blog/kl-approx.html) of KL(mu || ref) from samples of mu.

    With ``d = log mu - log ref``: k1 is ``d``, k2 ``d^2 / 2``, k3 ``d + e^-d - 1``.

    Args:
        log_ratio: d, nats, float [N].
        estimator: a name in ``KL_FUNCTIONS``.

    Returns:
        float64 [N], nats. A number: nothing is differentiated here.
    """
    return look_up(KL_FUNCTIONS, estimator, "loss.kl_estimator")(log_ratio.astype(np.float64))


def _k3(d: np.ndarray) -> np.ndarray:
    # expm1: for small d, e^-d - 1 + d would be rounding noise.
    return d + np.expm1(-np.clip(d, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


FUNCTIONS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "group_norm": group_normalised,
    "group_mean": group_centred,
    "leave_one_out": leave_one_out,
    "global_norm": group_normalised,
    "reinforce_pp": group_centred,
}
"""``loss.advantage`` -> rewards [n] -> advantages, float64 [n].

The row of the same name in ``config.loss.ADVANTAGES`` says whether n is a group or the whole step.
"""

KL_FUNCTIONS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": _k3,
}
"""``loss.kl_estimator`` -> its function of d, float64 [N]."""
