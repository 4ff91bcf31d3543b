"""Scripted answers on their way from the generator's grader to the learner's advantages."""

from __future__ import annotations

from contextlib import closing

import numpy as np

from async_rl.generator.backend import Sampled
from async_rl.generator.rollouts import Graded, ThreadGrader
from async_rl.records import Group, Lease, Prompt, Rollout, Sampling
from async_rl.rewards.records import Reward


def sampled_group(reward: Reward, prompt: Prompt, texts: list[str]) -> Group:
    """The texts graded by the generator's own grader, two at a time, and put in their order."""
    lease = Lease("lease", "train", prompt, len(texts), Sampling(1.0, 1.0, 0, 64, 64, ()), "lineage", 0, 4, 0, 1)
    samples = [
        Sampled("lease", index, np.arange(2, dtype=np.int32), np.arange(3, dtype=np.int32),
                np.full(3, -1, dtype=np.float32), np.full(3, 5, dtype=np.int32), "stop", text)
        for index, text in enumerate(texts)
    ]  # fmt: skip
    graded: list[Graded] = []
    with closing(ThreadGrader(reward, num_threads=2)) as grader:
        for sample in samples:
            grader.submit(lease, sample)
        while len(graded) < len(samples):
            graded += grader.collect()
    rollouts: dict[int, Rollout] = {}
    for one in graded:
        assert one.rollout is not None, one.error
        rollouts[one.index] = one.rollout
    ordered = tuple(rollouts[index] for index in range(len(texts)))
    return Group("lease", "train", prompt.position, "generator", "lineage", 1.0, ordered)
