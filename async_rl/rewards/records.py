"""The input, the output and the protocol of rewards. The generator's worker calls a reward once for each rollout.

A reward may also score all rollouts of a group at once (``GroupReward``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from async_rl.records import FinishReason


@dataclass(frozen=True, slots=True)
class RewardInput:
    """One finished rollout.

    Attributes:
        text: the sampled tokens decoded, without special tokens; the prompt is not in it.
        reward_data: the row's fields for the reward, such as ``gt_answer``.
        num_tokens: sampled tokens, end-of-sequence token included.
        max_new_tokens: the lease's limit on ``num_tokens``.
        finish_reason: ``length`` if it was cut.
    """

    text: str
    reward_data: Mapping[str, Any]
    num_tokens: int
    max_new_tokens: int
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class RewardOutput:
    """``parts`` are summed to the reward; ``accuracy`` (1.0, 0.0, or a partial credit between) has no shaping in it.

    ``extracted`` is the answer that was found in the text, for the logs; None if there is none. ``has_answer`` says
    whether the text holds one that counts, for the penalty on over-long answers; if None, ``extracted`` decides.
    """

    parts: dict[str, float]
    accuracy: float
    extracted: str | None = None
    has_answer: bool | None = None


class Reward(Protocol):
    """A reward function and the processes that it needs. Any thread may call it; close it once."""

    def __call__(self, item: RewardInput) -> RewardOutput:
        """Score one rollout.

        Raises:
            RewardError: the rollout can't be scored; never raised for a wrong answer.
        """
        ...

    def counters(self) -> dict[str, int]:
        """Events since the start, by name, for metrics (``verifier_timed_out``, ...)."""
        ...

    def close(self) -> None:
        """End the reward's processes; the next call would start them again."""
        ...


@runtime_checkable
class GroupReward(Protocol):
    """A reward that can score the rollouts of one prompt together, or await several at a time."""

    @property
    def is_async(self) -> bool:
        """Whether the reward awaits calls. If so, many threads score answers at the same time."""
        ...

    @property
    def needs_whole_group(self) -> bool:
        """Whether it scores all rollouts of a lease in one call, instead of each when it is finished."""
        ...

    def score_group(self, items: Sequence[RewardInput]) -> list[RewardOutput]:
        """Score several rollouts of one prompt, in order.

        Raises:
            RewardError: they can't be scored.
        """
        ...


def score_group(reward: Callable[[RewardInput], RewardOutput], items: Sequence[RewardInput]) -> list[RewardOutput]:
    """Score each of ``items``, together where ``reward`` can."""
    return reward.score_group(items) if isinstance(reward, GroupReward) else [reward(item) for item in items]
