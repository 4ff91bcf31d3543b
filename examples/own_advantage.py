"""Two kinds of advantages of your own. To run one:

    async-rl launch CONFIG --set loss.advantage_function=examples/own_advantage.py:by_age

`async_rl/learner/losses/own_advantage.py` says what such a function gets and must return. R = rollouts of the step.
"""

import numpy as np

from async_rl.learner.losses.advantages import group_normalised
from async_rl.learner.losses.own_advantage import AdvantageInputs

DISCOUNT = 0.99


def by_age(inputs: AdvantageInputs) -> np.ndarray:
    """The advantage of `group_norm`, divided by the square root of 1 + age in versions: old rollouts teach less.

    Returns one number for each rollout, [R]. From no paper.
    """
    advantages = np.zeros(len(inputs.rewards))
    for group in inputs.groups():
        advantages[group] = group_normalised(inputs.rewards[group])
    return advantages / np.sqrt(1 + inputs.lag)


def discounted(inputs: AdvantageInputs) -> list[np.ndarray]:
    """The advantage of `group_norm` at the last token of a rollout, and a hundredth less at each token before it.

    Returns one array for each rollout, with a number for each of its trained tokens. This is the return of a reward at
    the end with gamma = 0.99, less the group's mean.
    """
    advantages = np.zeros(len(inputs.rewards))
    for group in inputs.groups():
        advantages[group] = group_normalised(inputs.rewards[group])
    return [
        advantage * DISCOUNT ** np.arange(num_tokens - 1, -1, -1)
        for advantage, num_tokens in zip(advantages, inputs.num_trained, strict=True)
    ]
