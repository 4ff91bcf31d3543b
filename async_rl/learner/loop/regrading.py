"""Grades audited answers again, at the learner, and compares with what their generators say.

One thread calls the run's reward, so that a step waits for no grade: what is graded is judged in a later step. If the
thread falls behind, groups are left out. Only rewards that are functions of the answer are graded again: a judge or a
reward model may say something else the second time (``config/exclusions.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from async_rl.errors import RewardError
from async_rl.learner.loop.audit_statistics import Regraded
from async_rl.queue.messages import TakenGroup
from async_rl.records import Rollout, row_fields
from async_rl.rewards.records import RewardInput, score_group
from async_rl.rewards.registry import RewardSum
from async_rl.run.eval_records import Decode

logger = logging.getLogger(__name__)

MAX_WAITING = 64
"""Most groups that wait to be graded again."""
_CLOSE = 1e-4


class Regrader:
    """Grades groups again in the background. ``close`` ends the thread and the reward's processes."""

    def __init__(self, reward: RewardSum, decode: Decode, *, max_new_tokens: int) -> None:
        """``decode`` turns sampled tokens into the text that generators grade: without special tokens."""
        self._reward, self._decode, self._max_new_tokens = reward, decode, max_new_tokens
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="audit-rewards")
        self._waiting: list[Future[Regraded]] = []

    def submit(self, groups: Sequence[TakenGroup]) -> None:
        """Grade ``groups`` again soon, as many as there is room for."""
        for item in groups[: MAX_WAITING - len(self._waiting)]:
            self._waiting.append(self._pool.submit(self._regrade, item))

    def collect(self) -> list[Regraded]:
        """Return the groups that have been graded since the last call, without waiting. Skip those that failed."""
        done = [one for one in self._waiting if one.done()]
        self._waiting = [one for one in self._waiting if one not in done]
        graded: list[Regraded] = []
        for one in done:
            try:
                graded.append(one.result())
            except RewardError as error:
                logger.warning("a group can't be graded again, its rewards are believed: %s", error)
        return [one for one in graded if one.num_rollouts]

    def close(self) -> None:
        self._reward.interrupt()
        self._pool.shutdown(cancel_futures=True)
        self._reward.close()

    def _regrade(self, item: TakenGroup) -> Regraded:
        rollouts = [r for r in item.group.rollouts if r.finish_reason != "error" and len(r.sequences) == 1]
        inputs = [self._input(item, rollout) for rollout in rollouts]
        outputs = score_group(self._reward, inputs) if inputs else []
        different = sum(
            not np.allclose((sum(o.parts.values()), o.accuracy), (r.reward, r.accuracy), atol=_CLOSE, rtol=_CLOSE)
            for r, o in zip(rollouts, outputs, strict=True)
        )
        return Regraded(item.group.generator_id, len(rollouts), different)

    def _input(self, item: TakenGroup, rollout: Rollout) -> RewardInput:
        (sequence,) = rollout.sequences
        token_ids = sequence.token_ids[sequence.loss_mask]
        return RewardInput(
            text=self._decode(token_ids),
            reward_data=row_fields(item.prompt.reward_data),
            num_tokens=len(token_ids),
            max_new_tokens=self._max_new_tokens,
            finish_reason=rollout.finish_reason,
            messages=item.prompt.messages,
            token_ids=token_ids.tolist(),
        )
