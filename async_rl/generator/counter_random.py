"""Counter-based random numbers: a pure function of (lease seed, rollout index, token index). Numpy only.

Who samples a rollout, beside which others, and in which order, can't change its numbers. The mixer is splitmix64
(Steele et al., 2014), one stream per rollout.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt64Array = npt.NDArray[np.uint64]
Float64Array = npt.NDArray[np.float64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_LOW_64_BITS = (1 << 64) - 1


def _mixed(value: UInt64Array) -> UInt64Array:
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    return value ^ (value >> np.uint64(31))


def rollout_keys(seed: int, indices: npt.NDArray[np.int64]) -> UInt64Array:
    """One stream key, uint64 [N], for each rollout index of a lease with this seed."""
    start = _mixed(np.asarray([seed & _LOW_64_BITS], dtype=np.uint64))
    # Mixed twice, so that (seed, index + 1) is not the same stream one token further.
    return _mixed(_mixed(start + (indices.astype(np.uint64) + np.uint64(1)) * _GOLDEN))


def uniforms(keys: UInt64Array, counters: npt.NDArray[np.int64]) -> Float64Array:
    """float64 [N] in [0, 1 - 2**-52], one for each (key, counter)."""
    bits = _mixed(keys + (counters.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    # 52 bits, not 53: then u * total < total even after rounding, so an inverse CDF always finds an index.
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52
