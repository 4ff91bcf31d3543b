"""Rewards of one group to advantages. Numpy only; ``prepare_batch`` calls it once a group on rank 0."""

from __future__ import annotations

import numpy as np

STD_FLOOR = 1e-4
"""Added to the standard deviation, in reward units, so that nearly equal rewards don't blow up."""


def group_normalised(rewards: np.ndarray) -> np.ndarray:
    """GRPO's advantage: ``(r - mean) / (std + 1e-4)`` within the group, std unbiased (n - 1).

    A group of one, and a group of equal rewards, carry no signal: exactly 0, never NaN (arXiv:2402.03300 leaves both
    undefined).

    Args:
        rewards: float [n], reward units, one a rollout.

    Returns:
        float64 [n], in standard deviations.

    Raises:
        ValueError: ``rewards`` is not one-dimensional, or holds NaN or infinity.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"expected the rewards of one group, [n], got shape {list(values.shape)}")
    if not np.isfinite(values).all():
        raise ValueError(f"expected finite rewards, got {values.tolist()}; mend the reward function")
    # By comparison, not by std: the mean of equal floats need not equal them.
    if len(values) < 2 or values.min() == values.max():
        return np.zeros_like(values)
    return (values - values.mean()) / (values.std(ddof=1) + STD_FLOOR)
