"""Sampling masks for tests of the head."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from async_rl.sampling_mask import SamplingMask, pack_ids


def masks_around(targets: np.ndarray, counts: Sequence[int], vocab_size: int) -> SamplingMask:
    """For each target a set of ids that holds it, of the sizes ``counts`` in turn: few ids, many as bits, or all."""
    sizes = np.array([counts[i % len(counts)] for i in range(len(targets))])
    ids = [np.sort((target + np.arange(size)) % vocab_size) for target, size in zip(targets, sizes, strict=True)]
    return pack_ids(sizes, np.concatenate(ids), vocab_size=vocab_size)
