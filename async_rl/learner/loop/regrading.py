"""Grades answers again, at the learner, and compares with what their generators say.

One thread calls the run's reward, so that a step waits for no grade: what is graded is judged in a later step. Where a
grade differs from the claimed one, the group is graded once more, because a reward may say something else each time.
Only rewards that are functions of the answer are graded again, no judge and no reward model (``config/exclusions.py``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from async_rl.data.answer_text import prompt_opened
from async_rl.queue.core.groups import fits_filter
from async_rl.queue.messages import TakenGroup
from async_rl.records import Rollout, row_fields
from async_rl.rewards.records import RewardInput
from async_rl.rewards.registry import RewardSum
from async_rl.run.records.eval_records import Decode

MAX_WAITING = 64
"""Most groups that wait to be graded again. If the thread falls behind, further ones are left out."""
_CLOSE = 1e-4

Grade = tuple[float, float]
"""The reward of an answer and its accuracy."""


@dataclass(frozen=True, slots=True)
class Regraded:
    """How the learner's grades of a group's answers agree with the claimed ones.

    Attributes:
        generator_id: the generator that claims them.
        num_answers: the number of answers that were graded again.
        num_refuted: those whose two grades are equal and not the claimed one, where the filter keeps the group with
            either grade.
        num_withdrawn: those whose second grade is the claimed one, and the first is not.
        num_unsteady: those whose two grades differ.
        num_failed: the number of answers that the reward could not grade. They are not among ``num_answers``.
        example: the first refuted grade, as text; empty if there is none.
        error: why the last of ``num_failed`` could not be graded, as text; empty if there is none.
    """

    generator_id: str
    num_answers: int
    num_refuted: int = 0
    num_withdrawn: int = 0
    num_unsteady: int = 0
    num_failed: int = 0
    example: str = ""
    error: str = ""


class Regrader:
    """Grades groups again in the background. ``close`` ends the thread and the reward's processes.

    ``num_left_out`` is the number of groups that were not graded, because too many waited.
    """

    def __init__(
        self, reward: RewardSum, decode: Decode, *, max_new_tokens: int, filter_range: tuple[float, float] | None
    ) -> None:
        """``decode`` turns sampled tokens into the text that generators grade (``data.answer_text``).
        ``filter_range`` is ``queue.filter_range``.
        """
        self._reward, self._decode, self._max_new_tokens = reward, decode, max_new_tokens
        self._filter_range = filter_range
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="audit-rewards")
        self._waiting: list[Future[Regraded]] = []
        self.num_left_out = 0

    def submit(self, groups: Sequence[TakenGroup]) -> None:
        """Grade ``groups`` again soon, as many as there is room for."""
        room = MAX_WAITING - len(self._waiting)
        self._waiting += [self._pool.submit(self._regrade, item) for item in groups[:room]]
        self.num_left_out += len(groups[room:])

    def collect(self) -> list[Regraded]:
        """Return the groups that have been graded since the last call, without waiting."""
        done = [one for one in self._waiting if one.done()]
        self._waiting = [one for one in self._waiting if one not in done]
        return [one.result() for one in done]

    def close(self) -> None:
        self._reward.interrupt()
        self._pool.shutdown(cancel_futures=True)
        self._reward.close()

    def _regrade(self, item: TakenGroup) -> Regraded:
        rollouts = [rollout for rollout in item.group.rollouts if rollout.finish_reason != "error"]
        inputs = [self._input(item, rollout) for rollout in rollouts]
        claimed = [(rollout.reward, rollout.accuracy) for rollout in rollouts]
        is_complete = len(rollouts) == len(item.group.rollouts)
        first, error = self._grades(inputs, is_complete=is_complete)
        second = first
        if any(one is not None and not _agree(claim, one) for claim, one in zip(claimed, first, strict=True)):
            second, error = self._grades(inputs, is_complete=is_complete)
        judged = judge_grades(item.group.generator_id, claimed, first, second, filter_range=self._filter_range)
        return replace(judged, example=judged.example and f"row {item.prompt.row}: {judged.example}", error=error)

    def _grades(self, inputs: Sequence[RewardInput], *, is_complete: bool) -> tuple[list[Grade | None], str]:
        """Return the grades of a group's answers, None for those that can't be graded, and why the last of them can't.

        ``is_complete`` says whether these are all answers of the group, as a reward that compares them needs.
        """
        compares = self._reward.needs_whole_group
        if compares and not is_complete:
            return [None] * len(inputs), "the reward compares the answers of a group, and one of them has failed"
        grades: list[Grade | None] = []
        error = ""
        for items in [inputs] if compares else [[item] for item in inputs]:
            try:
                grades += [(sum(output.parts.values()), output.accuracy) for output in self._reward.score_group(items)]
            except (Exception, SystemExit) as failure:  # the boundary to reward code
                grades += [None] * len(items)
                error = f"{type(failure).__name__}: {failure}"
        return grades, error

    def _input(self, item: TakenGroup, rollout: Rollout) -> RewardInput:
        # Of all its sequences: an honest answer has one here, and whoever sends more is graded, too.
        token_ids = np.concatenate([sequence.token_ids[sequence.loss_mask] for sequence in rollout.sequences])
        begun = rollout.sequences[0]
        return RewardInput(
            text=self._decode(token_ids),
            reward_data=row_fields(item.prompt.reward_data),
            num_tokens=len(token_ids),
            max_new_tokens=self._max_new_tokens,
            finish_reason=rollout.finish_reason,
            messages=item.prompt.messages,
            token_ids=token_ids.tolist(),
            prompt_opened=prompt_opened(begun.token_ids[: int(begun.loss_mask.argmax())], self._decode),
        )


def judge_grades(
    generator_id: str, claimed: Sequence[Grade], first: Sequence[Grade | None], second: Sequence[Grade | None], *,
    filter_range: tuple[float, float] | None,
) -> Regraded:  # fmt: skip
    """Compare the ``claimed`` grades of a group's answers with the learner's ``first`` and ``second`` ones.

    Args:
        generator_id: the generator that claims them.
        claimed, first, second: a grade of each answer. None: the answer could not be graded.
        filter_range: ``queue.filter_range``.
    """
    refuted: list[str] = []
    num_withdrawn = num_unsteady = num_failed = 0
    for index, (claim, one, other) in enumerate(zip(claimed, first, second, strict=True)):
        if one is None or other is None:
            num_failed += 1
            continue
        num_unsteady += not _agree(one, other)
        if _agree(claim, one):
            continue
        if _agree(claim, other):
            num_withdrawn += 1
        elif _agree(one, other) and _is_kept([*claimed[:index], one, *claimed[index + 1 :]], filter_range):
            refuted.append(f"{_shown(claim)} claimed, {_shown(one)} found")
    num_answers, example = len(claimed) - num_failed, refuted[0] if refuted else ""
    return Regraded(generator_id, num_answers, len(refuted), num_withdrawn, num_unsteady, num_failed, example)


def _is_kept(grades: Sequence[Grade], filter_range: tuple[float, float] | None) -> bool:
    """Return whether the queue's filter keeps a group with these grades."""
    rewards, accuracies = zip(*grades, strict=True)
    has_accuracy = 0 <= min(accuracies) <= max(accuracies) <= 1
    differ = None if has_accuracy else len(set(rewards)) > 1
    return fits_filter(filter_range, sum(accuracies) / len(accuracies), differ)


def _agree(one: Grade, other: Grade) -> bool:
    return all(math.isclose(*pair, rel_tol=_CLOSE, abs_tol=_CLOSE) for pair in zip(one, other, strict=True))


def _shown(grade: Grade) -> str:
    return f"reward {grade[0]:.4g} and accuracy {grade[1]:.4g}"
