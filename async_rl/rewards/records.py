"""The types of a reward: its input (``RewardInput``), its output (``RewardOutput``) and its methods (``Reward``).

A generator calls a reward once for each rollout. A ``GroupReward`` may score all rollouts of a group in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from async_rl.records import FinishReason


@dataclass(frozen=True, slots=True)
class RewardInput:
    """One finished rollout, as a reward gets it.

    Attributes:
        text: the text that the model sampled, without the prompt, and without special tokens that end a turn or pad.
        reward_data: the row's fields for the reward, such as ``gt_answer``.
        num_tokens: number of sampled tokens, the end-of-sequence token included.
        max_new_tokens: the limit on ``num_tokens`` for this rollout.
        finish_reason: ``length`` if the text was cut at a limit.
        messages: the messages of the prompt, as in ``records.Prompt``.
        token_ids: the sampled tokens, the end-of-sequence token included.
        transcript: of an agent's rollout, the messages of the conversation in which it got its newest answer, in
            OpenAI's form: as the agent sent them, that answer last. Empty without an agent, and if it sent token ids.
        prompt_opened: the tags that the prompt has opened for the text, such as ``<think>\\n``: most templates of
            reasoning models end their prompts with it. Empty if there are none.
    """

    text: str
    reward_data: Mapping[str, Any]
    num_tokens: int
    max_new_tokens: int
    finish_reason: FinishReason
    messages: Sequence[Mapping[str, str]] = ()
    token_ids: Sequence[int] = ()
    transcript: Sequence[Mapping[str, Any]] = ()
    prompt_opened: str = ""


@dataclass(frozen=True, slots=True)
class RewardOutput:
    """The score of one rollout.

    Attributes:
        parts: name -> value of each part of the reward. The reward is the sum of the parts.
        accuracy: how right the answer is, from 0.0 to 1.0. Scales and penalties do not change it. A number outside says
            that the reward has no accuracy: it is the unscaled reward, which evaluations report.
        extracted: the answer that was found in the text, for logs. None if the text has no answer.
        has_answer: whether the text has an answer, for the penalty on over-long answers. If None, the text has an
            answer if ``extracted`` is not None.
        spans: rewards of single parts of the text (a process reward), each as ``(end, reward)``: a part goes from the
            end of the one before to ``end``, a number of characters of ``RewardInput.text``, in ascending order. A
            part's reward belongs to the token at its end. They are parts of the reward: their sum is the part
            ``process``, which ``parts`` must not have.
        is_judged: whether the reward says anything of this answer. If not, the other fields do not count, and an answer
            that no reward of the run judges gets no advantage and has no part in its group's baseline.
    """

    parts: dict[str, float]
    accuracy: float
    extracted: str | None = None
    has_answer: bool | None = None
    spans: tuple[tuple[int, float], ...] = ()
    is_judged: bool = True


UNJUDGED = RewardOutput({}, 0.0, is_judged=False)
"""The score of a rollout of which a reward says nothing."""


class Reward(Protocol):
    """A reward function and the processes that it needs. Any thread may call it. ``close`` is called once."""

    def __call__(self, item: RewardInput) -> RewardOutput:
        """Return the score of one rollout.

        Raises:
            RewardError: the rollout can't be scored. A wrong answer does not cause this error.
        """
        ...

    def close(self) -> None:
        """End the reward's processes."""
        ...


@runtime_checkable
class GroupReward(Protocol):
    """A reward that can score several rollouts of one prompt in one call."""

    @property
    def is_async(self) -> bool:
        """Whether the reward mostly waits for async calls. If so, generators score with many threads at a time."""
        ...

    @property
    def needs_whole_group(self) -> bool:
        """Whether the reward must get all rollouts of a group in one call. If not, each is scored when it finishes."""
        ...

    def score_group(self, items: Sequence[RewardInput]) -> list[RewardOutput]:
        """Return the scores of several rollouts of one prompt, in the order of ``items``.

        Raises:
            RewardError: a rollout can't be scored.
        """
        ...


@runtime_checkable
class CountingReward(Protocol):
    """A reward that counts events."""

    def counters(self) -> dict[str, int]:
        """Return their numbers since the start, for metrics, with names such as ``verifier_timed_out``."""
        ...


@runtime_checkable
class WaitingReward(Protocol):
    """A reward that asks another process and waits while that is away."""

    @property
    def trouble(self) -> str:
        """Why answers are not coming; empty if nothing is known to be wrong."""
        ...

    @property
    def num_waiting(self) -> int:
        """The number of rollouts that wait for an answer of the other process."""
        ...

    def interrupt(self) -> None:
        """Let the calls that wait raise RewardError, and later ones too."""
        ...


def score_group(reward: Callable[[RewardInput], RewardOutput], items: Sequence[RewardInput]) -> list[RewardOutput]:
    """Return the scores of ``items``, in order. A ``GroupReward`` scores all in one call, other rewards one by one."""
    return reward.score_group(items) if isinstance(reward, GroupReward) else [reward(item) for item in items]
