"""Groups that the queue holds: their encoded body, kept unread, and the few facts that were read at arrival."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from async_rl.records import Group, Lease


@dataclass(frozen=True, slots=True)
class HeldGroup:
    """One queued or taken group.

    ``named_version`` is the version its lease was asked with: with ``position`` the order of delivery.
    ``oldest_version`` is the oldest that sampled a token of it. ``reward`` and ``accuracy`` are sums over rollouts.
    """

    lease_id: str
    position: int
    named_version: int
    oldest_version: int
    rollouts: int
    tokens: int
    reward: float
    accuracy: float
    arrived_at: float
    arrival_version: int
    masked: bool
    body: bytes

    @property
    def order(self) -> tuple[int, int]:
        return self.named_version, self.position

    def facts(self) -> dict[str, Any]:
        """Everything but the body, as plain data."""
        plain = asdict(self)
        del plain["body"]
        return plain


def why_unfit(group: Group, lease: Lease, *, newest_version: int) -> str:
    """Why a returned group can't be what its lease asked for; empty if it can.

    A group in which no rollout has a sampled token, or every rollout failed, is unfit too.
    """
    if (group.kind, group.position, group.lineage) != (lease.kind, lease.prompt.position, lease.lineage):
        return (
            f"expected {lease.kind} position {lease.prompt.position} of lineage {lease.lineage}, got {group.kind} "
            f"{group.position} of {group.lineage}"
        )
    if len(group.rollouts) != lease.group_size:
        return f"expected {lease.group_size} rollouts, got {len(group.rollouts)}"
    if all(rollout.finish_reason == "error" for rollout in group.rollouts):
        return "every rollout failed"
    for index, rollout in enumerate(group.rollouts):
        numbers = (rollout.accuracy, *rollout.reward_parts.values())
        if not all(math.isfinite(x) for x in numbers) or not 0.0 <= rollout.accuracy <= 1.0:
            return f"rollout {index} has a reward that is not finite, or an accuracy outside 0..1"
        if rollout.num_sampled == 0 and rollout.finish_reason != "error":
            return f"rollout {index} has no sampled token"
        for sequence in rollout.sequences:
            versions = sequence.versions[sequence.loss_mask]
            if versions.size and (versions.min() < 0 or versions.max() > newest_version):
                return (
                    f"rollout {index} was sampled by versions {versions.min()}..{versions.max()}, known are "
                    f"0..{newest_version}"
                )
            if not np.isfinite(sequence.behavior_logprobs[sequence.loss_mask]).all():
                return f"rollout {index} has a behavior logprob that is not finite"
    return ""
