"""The audit of rewards (``learner.audit_rewards``) as a part of the step, and the test that finds forged ones.

A share of the trained groups is graded again (``regrading.py``), and each generator is judged by itself. A grade counts
against it if the learner's two grades agree on another one (*refuted*). It counts for it if the second grade is the
claimed one, although the first is not (*withdrawn*): then chance has a part in the reward.

The test is exact, whatever the reward and the other generators do. Suppose that a generator is honest: its grades come
from the run's reward, except those of at most ``TOLERATED`` of its answers. The claimed grade and the learner's two are
then equally likely to be the odd one. So, with probability p each, an answer is refuted or withdrawn, and it is refuted
with probability ``TOLERATED`` at most in addition. (The filter chooses groups by their claimed grades. So an answer can
be refuted only if the filter keeps its group with the learner's grade, too.) Under all such p, the mean of a factor
``REFUTED``, ``WITHDRAWN`` or ``OTHER`` is at most 1. The mean factor of a group's answers then has a mean of at most 1,
also if they depend on each other, as those of a row that is graded otherwise elsewhere.

The logarithms add up from group to group, and never fall below 0 (a CUSUM of e-values; Shin, Ramdas and Rinaldo,
arXiv:2203.03532). A generator is found at ``ALARM``. So an honest one is found at most once in exp(``ALARM``), a
million, groups of its own that are graded again, on average; and never if no grade is refuted.
"""

from __future__ import annotations

import logging
import math
import random
from collections import Counter, defaultdict
from collections.abc import Mapping

from async_rl.config.config import Config
from async_rl.learner.checkpoints.files import TrainerState
from async_rl.learner.data.batch import PreparedBatch, leave_out
from async_rl.learner.loop.parts import StepPart
from async_rl.learner.loop.regrading import Regraded, Regrader
from async_rl.learner.loop.step_result import StepResult
from async_rl.queue.client.clients import LearnerQueue
from async_rl.queue.messages import Batch
from async_rl.rewards.registry import build_reward
from async_rl.run.directory import RunDir
from async_rl.run.notes import tell
from async_rl.run.records.eval_records import Decode

logger = logging.getLogger(__name__)

TOLERATED = 0.02
"""Share of an honest generator's answers whose grade may be another one at the learner each time: another version of a
package, a time limit on a slow machine."""
ALARM = math.log(1e6)
REFUTED = 1.9
"""The stake: below 2 / (1 + ``TOLERATED``), so that a reward of chance alone is no evidence. Others follow from it."""
WITHDRAWN = (2 - (1 + TOLERATED) * REFUTED) / (1 - TOLERATED)
OTHER = (1 - TOLERATED * REFUTED) / (1 - TOLERATED)


class GradeTest:
    """The evidence against each generator since the learner started."""

    def __init__(self) -> None:
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._counts: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def add(self, one: Regraded) -> str:
        """Add a group. Return why its generator is found by it, else empty text. Then its evidence begins anew."""
        if not one.num_answers:
            return ""
        num_other = one.num_answers - one.num_refuted - one.num_withdrawn
        factor = (REFUTED * one.num_refuted + WITHDRAWN * one.num_withdrawn + OTHER * num_other) / one.num_answers
        total = self._sums[one.generator_id] = max(0.0, self._sums[one.generator_id] + math.log(factor))
        counts = self._counts[one.generator_id]
        counts.update(groups=1, answers=one.num_answers, refuted=one.num_refuted)
        if total < ALARM:
            return ""
        del self._sums[one.generator_id], self._counts[one.generator_id]
        return (
            f"audit of rewards: of {counts['answers']} answers in {counts['groups']} groups, the learner graded "
            f"{counts['refuted']} otherwise, twice with the same result ({TOLERATED:.0%} are tolerated), such as "
            f"{one.example}"
        )


def build_reward_audit(
    config: Config, state: TrainerState, queue: LearnerQueue, run_dir: RunDir, decode: Decode
) -> RewardAudit:
    """Return the audit of a run with ``learner.audit_rewards``. ``decode`` is as in ``Regrader``.

    Raises:
        ConfigError: the reward is the user's own code, which this machine does not allow.
    """
    regrader = Regrader(
        build_reward(config), decode,
        max_new_tokens=config.sampling.max_new_tokens, filter_range=config.queue.filter_range,
    )  # fmt: skip
    return RewardAudit(config.learner.audit_rewards, state, queue, run_dir, regrader)


class RewardAudit(StepPart):
    """Lets ``share`` of the groups be graded again, and quarantines the generators that ``GradeTest`` finds."""

    def __init__(
        self, share: float, state: TrainerState, queue: LearnerQueue, run_dir: RunDir, regrader: Regrader
    ) -> None:
        self._share, self._state, self._queue, self._run_dir = share, state, queue, run_dir
        self._regrader, self._test = regrader, GradeTest()
        # No seed: which groups are audited must not be known in advance.
        self._random = random.SystemRandom()
        self._said: set[str] = set()
        self._found: set[str] = set()
        self._row: dict[str, float] = {}

    def check(self, batch: Batch, prepared: PreparedBatch, *, version: int) -> PreparedBatch:
        graded = self._regrader.collect()
        found = {one.generator_id: why for one in graded if (why := self._test.add(one))}
        for generator_id, why in found.items():
            logger.warning("generator %s is quarantined: %s", generator_id, why)
            self._queue.quarantine(self._state.lineage, generator_id, why)
        self._found |= found.keys()
        self._regrader.submit([item for item in batch.groups if self._random.random() < self._share])
        self._row = {
            "audit/regraded": sum(one.num_answers for one in graded),
            "audit/refuted": sum(one.num_refuted for one in graded),
            "audit/unsteady": sum(one.num_unsteady for one in graded),
            "audit/failed": sum(one.num_failed for one in graded),
            "audit/left_out": self._regrader.num_left_out,
            "audit/quarantined": len(self._found),
        }
        for one in graded:
            if one.num_unsteady:
                self._say_once("the reward grades an answer differently each time, so such grades are not audited")
            if one.num_failed:
                self._say_once(f"an answer can't be graded again, so its reward is believed: {one.error}")
        owners = [item.group.generator_id for item in batch.groups for _ in item.group.rollouts]
        rollouts = {n for n, owner in enumerate(owners) if owner in found and n not in prepared.masked}
        return leave_out(prepared, rollouts, "quarantined")

    def record(self, result: StepResult) -> Mapping[str, float]:
        return self._row

    def _say_once(self, text: str) -> None:
        kind = text.partition(":")[0]
        if kind not in self._said:
            self._said.add(kind)
            tell(self._run_dir, f"note: {text} (learner.audit_rewards)")

    def close(self) -> None:
        self._regrader.close()
