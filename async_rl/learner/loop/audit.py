"""The audit of generators (``learner.audit``) as a part of the step: a share of their groups is checked.

Of each audited group the learner computes the log-probabilities with its present weights, unless the loss needs these
anyway, and compares them with the claimed ones. ``audit_statistics.py`` decides. A generator that is found is
quarantined: the queue gives it no more leases and drops its groups, and its rollouts in the present step are masked.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence

import numpy as np

from async_rl.config.config import Config
from async_rl.learner.checkpoints.files import TrainerState
from async_rl.learner.data.batch import PreparedBatch, leave_out
from async_rl.learner.interface import Engine
from async_rl.learner.loop.audit_statistics import Auditor, Finding, Observation, observe
from async_rl.learner.loop.parts import StepPart
from async_rl.learner.loop.step_result import StepResult
from async_rl.learner.sequences import TrainSequence
from async_rl.queue.client.clients import LearnerQueue
from async_rl.queue.parity import parity_limit

logger = logging.getLogger(__name__)


class AuditPart(StepPart):
    """Audits the groups of each step before they are trained on."""

    def __init__(self, config: Config, state: TrainerState, engine: Engine, queue: LearnerQueue) -> None:
        self._share, self._state, self._engine, self._queue = config.learner.audit, state, engine, queue
        # What the run may mix, whatever its own dtype is: an engine that rounds to bfloat16, or a quantised one.
        self._auditor = Auditor(parity_limit(config.experimental.parity_limit, ()))
        # No seed: which groups are audited must not be known in advance.
        self._random = random.SystemRandom()
        self._num_found = 0
        self._row: dict[str, float] = {}

    def score(self, prepared: PreparedBatch) -> PreparedBatch:
        if not self._share:
            return prepared
        audited = {number for number in range(len(prepared.groups)) if self._random.random() < self._share}
        self._row = {"audit/groups": len(audited)}
        found = self._audit_logprobs(prepared, audited)
        for finding in found:
            self._quarantine(finding)
        self._num_found += len(found)
        self._row["audit/quarantined"] = self._num_found
        gone = {finding.generator_id for finding in found}
        owners = [item.group.generator_id for item in prepared.groups for _ in item.group.rollouts]
        rollouts = {n for n, owner in enumerate(owners) if owner in gone and n not in prepared.masked}
        return leave_out(prepared, rollouts, "quarantined")

    def record(self, result: StepResult) -> Mapping[str, float]:
        return self._row

    def _audit_logprobs(self, prepared: PreparedBatch, audited: set[int]) -> list[Finding]:
        group_of = np.repeat(np.arange(len(prepared.group_sizes)), prepared.group_sizes)
        chosen = [s for s in prepared.sequences if int(group_of[prepared.rollout_of[s.sequence_id]]) in audited]
        if not chosen:
            return []
        scores = prepared.policy_scores
        logprobs = (
            {s.sequence_id: scores[s.sequence_id].logprobs for s in chosen}
            if scores
            else self._engine.score(chosen, of="policy")
        )
        by_group: dict[int, list[tuple[int, TrainSequence]]] = {}
        for sequence in chosen:
            rollout = prepared.rollout_of[sequence.sequence_id]
            by_group.setdefault(int(group_of[rollout]), []).append((rollout, sequence))
        observations: list[Observation] = []
        for number, sequences in by_group.items():
            owner = prepared.groups[number].group.generator_id
            observations += observe_group(owner, sequences, logprobs, version=self._state.version)
        if observations:
            self._row["audit/bias"] = float(np.mean([one.bias for one in observations]))
            self._row["audit/difference"] = float(np.mean([one.size for one in observations]))
        return self._auditor.add(observations)

    def _quarantine(self, finding: Finding) -> None:
        text = f"audit ({finding.test}), after {finding.num_groups} audited groups: {finding.why}"
        logger.warning("generator %s is quarantined: %s", finding.generator_id, text)
        self._queue.quarantine(self._state.lineage, finding.generator_id, text)


def observe_group(
    owner: str, sequences: Sequence[tuple[int, TrainSequence]], logprobs: Mapping[int, np.ndarray], *, version: int
) -> list[Observation]:
    """Return what the tokens of a group show: an observation for each staleness, apart for tokens that follow others of
    another version.

    Args:
        owner: the group's generator.
        sequences: its sequences, each with the number of its rollout.
        logprobs: the learner's log-probabilities of their trained tokens, by sequence id: float32 [N], nats.
        version: the learner's version.
    """
    deltas: dict[tuple[int, bool], dict[int, list[np.ndarray]]] = {}
    for rollout, sequence in sequences:
        mask = sequence.loss_mask
        delta = logprobs[sequence.sequence_id] - sequence.behavior_logprobs[mask]
        versions = sequence.versions[mask]
        follow = np.maximum.accumulate(versions != versions[:1])
        for lag, follows in {*zip((version - versions).tolist(), follow.tolist(), strict=True)}:
            chosen = (version - versions == lag) & (follow == follows)
            deltas.setdefault((lag, follows), {}).setdefault(rollout, []).append(delta[chosen])
    return [
        observe(owner, lag, [np.concatenate(parts) for parts in of_rollouts.values()], follows_others=follows)
        for (lag, follows), of_rollouts in sorted(deltas.items())
    ]
