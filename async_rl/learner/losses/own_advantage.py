"""Advantages of the user's own: what the function gets (``AdvantageInputs``), how it is called, and its trial.

``loss.advantage_function = "file.py:function"`` replaces the estimator that ``loss.advantage`` names. ``advantages.py``
calls it on rank 0 once for each step, between the changes of the reward (length bonus, KL) and what follows the
estimator (``loss.best_k``, a KL in the advantages). It returns one advantage for each rollout, or for each trained
token::

    def group_mean(inputs: AdvantageInputs) -> np.ndarray:
        advantages = np.zeros(len(inputs.rewards))
        for group in inputs.groups():
            advantages[group] = inputs.rewards[group] - inputs.rewards[group].mean()
        return advantages

Shape letter: R = rollouts of the step. Rollouts are numbered in the step's order, group after group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from async_rl.config.config import Config
from async_rl.config.loss import LossConfig
from async_rl.errors import ConfigError, OwnCodeError
from async_rl.process.user_code import describe_error, load_named_code

KEY = "loss.advantage_function"


@dataclass(frozen=True, slots=True, eq=False)
class AdvantageInputs:
    """The rollouts of one step, as read-only arrays.

    Attributes:
        rewards: float64 [R], after ``loss.length_bonus`` and a KL in the reward; finite.
        accuracies: float64 [R], from 0 to 1.
        group_sizes: number of rollouts of each group.
        num_sampled: int64 [R], tokens that the policy sampled.
        num_trained: int64 [R], those of them that are trained on: 0 for masked rollouts, and less than ``num_sampled``
            for rollouts with stale tokens (``queue.on_stale = "mask"``).
        lag: int64 [R], versions between the sampling of the oldest token and now; 0 without tokens.
        masked: why a rollout is not trained on, as in the metric ``masked/<cause>``; empty if it is. Its advantage is
            not used.
        in_baseline: bool [R], whether the built-in estimators count it in its group's baseline. They leave out
            rollouts that are no samples of the policy, and answers that were cut (``loss.mask_truncated``).
        generator_ids: the generator that sampled each rollout.
        rows: int64 [R], the index of the prompt's row in the training data.
        settings: the section ``[loss]``, read-only.
    """

    rewards: np.ndarray
    accuracies: np.ndarray
    group_sizes: tuple[int, ...]
    num_sampled: np.ndarray
    num_trained: np.ndarray
    lag: np.ndarray
    masked: tuple[str, ...]
    in_baseline: np.ndarray
    generator_ids: tuple[str, ...]
    rows: np.ndarray
    settings: LossConfig

    def __post_init__(self) -> None:
        """Copy the arrays: a function that writes to them raises ValueError."""
        for name in self.__slots__:
            if isinstance(values := getattr(self, name), np.ndarray):
                copy = values.copy()
                copy.setflags(write=False)
                object.__setattr__(self, name, copy)

    def groups(self, *, baseline_only: bool = True) -> list[np.ndarray]:
        """Return the indices of each group's rollouts, int64, without those that are not ``in_baseline``, by
        default.
        """
        bounds = pairwise(accumulate(self.group_sizes, initial=0))
        groups = [np.arange(start, end) for start, end in bounds]
        return [group[self.in_baseline[group]] for group in groups] if baseline_only else groups


@dataclass(frozen=True, slots=True)
class OwnAdvantage:
    """The user's function for advantages. ``name`` is the value of ``loss.advantage_function``."""

    name: str
    function: Callable[[AdvantageInputs], Any]

    def __call__(self, inputs: AdvantageInputs) -> np.ndarray | list[np.ndarray]:
        """Return float64 [R], or for each rollout float64 [its trained tokens].

        Raises:
            OwnCodeError: the function raises an exception, or returns something other than it must.
        """
        try:
            found = self.function(inputs)
        except Exception as error:  # the user's code raises what it likes
            raise OwnCodeError(f"{KEY}: {self.name} failed: {describe_error(error)[0]}; correct that file") from error
        try:
            return _checked(found, inputs)
        except ValueError as error:
            raise OwnCodeError(f"{KEY}: {self.name}: {error}; correct what the function returns") from None


def load_own_advantage(config: Config) -> OwnAdvantage | None:
    """Import the function of ``loss.advantage_function`` and try it on made-up rollouts. None if the key is unset.

    Raises:
        ConfigError: it can't be imported, raises an exception, or returns something other than it must.
    """
    name = config.loss.advantage_function
    if name is None:
        return None
    own = OwnAdvantage(name, load_named_code(name))
    try:
        own(made_up_rollouts(config))
    except OwnCodeError as error:
        raise ConfigError(str(error)) from error
    return own


def made_up_rollouts(config: Config) -> AdvantageInputs:
    """Return three groups of ``sampling.group_size``: right and wrong answers, only right ones, and one with a rollout
    that was cut and one that failed.
    """
    size = config.sampling.group_size
    num = 3 * size
    rewards = np.where((np.arange(num) % 2 == 0) | (np.arange(num) // size == 1), 1.0, 0.0)
    masked = ["" for _ in range(num)]
    masked[-1] = "truncated"
    masked[-min(2, size)] = "failed" if size > 1 else "truncated"
    sampled = 1 + np.arange(num) % min(7, config.sampling.max_new_tokens)
    return AdvantageInputs(
        rewards=rewards,
        accuracies=rewards,
        group_sizes=(size,) * 3,
        num_sampled=sampled,
        num_trained=np.where([not cause for cause in masked], sampled, 0),
        lag=np.arange(num) % (config.queue.max_staleness + 1),
        masked=tuple(masked),
        in_baseline=np.array([not cause for cause in masked]),
        generator_ids=("generator-0",) * num,
        rows=np.repeat(np.arange(3), size),
        settings=config.loss,
    )


def _checked(found: Any, inputs: AdvantageInputs) -> np.ndarray | list[np.ndarray]:
    num = len(inputs.rewards)
    per_token = isinstance(found, list | tuple) and any(np.ndim(values) == 1 for values in found)
    if not per_token:
        advantages = _array(found, "the advantages", (num,))
        used = np.array([not cause for cause in inputs.masked])
        _check_finite(advantages[used], np.flatnonzero(used))
        return np.where(used, advantages, 0.0)
    if len(found) != num:
        raise ValueError(f"expected an array for each of {num} rollouts, got {len(found)}")
    if inputs.settings.best_k is not None:
        raise ValueError(
            f"expected one advantage for each rollout, because loss.best_k = {inputs.settings.best_k} compares them, "
            f"got arrays for tokens"
        )
    arrays = [_array(v, f"rollout {i}", (int(inputs.num_trained[i]),)) for i, v in enumerate(found)]
    for index, values in enumerate(arrays):
        _check_finite(values, np.full(len(values), index))
    return arrays


def _array(values: Any, what: str, shape: tuple[int, ...]) -> np.ndarray:
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{what}: expected numbers of shape {list(shape)}, got {type(values).__name__}") from None
    if array.shape != shape:
        raise ValueError(f"{what}: expected numbers of shape {list(shape)}, got shape {list(array.shape)}")
    return array


def _check_finite(values: np.ndarray, rollouts: np.ndarray) -> None:
    bad = ~np.isfinite(values)
    if bad.any():
        raise ValueError(f"expected finite advantages, got {values[bad][0]} for rollout {rollouts[bad][0]}")
