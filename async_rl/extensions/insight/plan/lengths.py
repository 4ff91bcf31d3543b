"""The lengths of answers, in sampled tokens: log-normal, or those that were observed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

Groups = tuple[tuple[int, ...], ...]
"""The lengths of the rollouts of each of several groups."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of the lengths of answers."""

    mean_tokens: float  # before the limit
    sigma: float = 0.0  # standard deviation of the logarithm of a log-normal length
    limit: int | None = None  # sampling.max_new_tokens, where longer answers are cut
    observed: Groups = ()  # if empty, lengths are log-normal

    @classmethod
    def of_groups(cls, groups: Groups) -> Lengths:
        """Return the distribution of observed lengths. There must be at least one."""
        return cls(float(np.mean([length for group in groups for length in group])), observed=groups)

    def draw(self, num_groups: int, group_size: int, seed: int) -> np.ndarray:
        """Return the lengths of the rollouts of groups, int64 [num_groups, group_size], each at least 1.

        If all observed groups have ``group_size`` rollouts, whole groups are drawn. So rollouts of one prompt stay as
        alike as they were. Otherwise the lengths of a group are independent.
        """
        random = np.random.default_rng(seed)
        if self.observed and all(len(group) == group_size for group in self.observed):
            tokens = np.array(self.observed)[random.integers(0, len(self.observed), num_groups)]
        elif self.observed:
            tokens = random.choice(np.concatenate(self.observed), (num_groups, group_size))
        else:
            normal = random.standard_normal((num_groups, group_size))
            tokens = self.mean_tokens * np.exp(self.sigma * normal - self.sigma**2 / 2)
        return np.clip(np.rint(tokens), 1, self.limit).astype(np.int64)

    def with_mean(self, mean_tokens: float) -> Lengths:
        """Return lengths of the same form with another mean: each is multiplied by the same factor."""
        factor = mean_tokens / self.mean_tokens
        observed = tuple(tuple(max(1, round(n * factor)) for n in group) for group in self.observed)
        return replace(self, mean_tokens=mean_tokens, observed=observed)
