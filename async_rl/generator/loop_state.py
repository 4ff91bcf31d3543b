"""What the generator's loop keeps account of: the leases that it works on, and what it has done so far. No torch.

``ActiveLeases`` says what is submitted, what is scored, and how far each lease has come. The loop adds a lease when the
queue grants it and removes it when its group is returned, failed or cancelled. ``Activity`` holds the figures for
heartbeats, and warns when nothing has run for long.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from async_rl.generator.backend import Backend
from async_rl.queue.messages import GeneratorStats
from async_rl.records import Group, Lease, Rollout

logger = logging.getLogger(__name__)

WATCHDOG_S = 30.0


@dataclass(slots=True, eq=False)
class ActiveLease:
    """A lease that is not returned yet. ``is_submitted`` is False while it waits for a newer version.

    ``rollouts`` are those that are scored, by index; ``heartbeats_in_line`` counts those that it spent waiting.
    """

    lease: Lease
    prompt_ids: np.ndarray
    received_s: float
    is_submitted: bool = False
    heartbeats_in_line: int = 0
    rollouts: dict[int, Rollout] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether every rollout is scored."""
        return len(self.rollouts) == self.lease.group_size

    @property
    def has_failed(self) -> bool:
        """Whether every scored rollout ended in an error of its environment."""
        return all(rollout.finish_reason == "error" for rollout in self.rollouts.values())

    def group(self, generator_id: str, digests: Mapping[int, str], now_s: float) -> Group:
        """The complete group, as it is returned to the queue. ``digests`` are those of the weights, by version."""
        rollouts = tuple(self.rollouts[index] for index in range(self.lease.group_size))
        sampled = np.concatenate([s.versions[s.loss_mask] for r in rollouts for s in r.sequences])
        return Group(
            lease_id=self.lease.lease_id,
            kind=self.lease.kind,
            position=self.lease.prompt.position,
            generator_id=generator_id,
            lineage=self.lease.lineage,
            temperature=self.lease.sampling.temperature,
            rollouts=rollouts,
            weights_digest={version: digests[version] for version in np.unique(sampled).tolist()},
            sampling_time_s=now_s - self.received_s,
        )


class ActiveLeases:
    """All of a generator's leases, by id."""

    def __init__(self) -> None:
        self._leases: dict[str, ActiveLease] = {}
        self._work_at_heartbeat = 0

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._leases

    @property
    def ids(self) -> list[str]:
        return list(self._leases)

    @property
    def num_unsubmitted(self) -> int:
        """Rollouts of the leases that wait for a newer version."""
        return sum(active.lease.group_size for active in self._leases.values() if not active.is_submitted)

    def add(self, lease: Lease, prompt_ids: np.ndarray, now_s: float) -> None:
        self._leases[lease.lease_id] = ActiveLease(lease, prompt_ids, now_s)

    def get(self, lease_id: str) -> ActiveLease | None:
        return self._leases.get(lease_id)

    def remove(self, lease_id: str) -> bool:
        """Forget the lease; whether it was there."""
        return self._leases.pop(lease_id, None) is not None

    def take_submittable(self, version: int) -> list[ActiveLease]:
        """The leases that may be sampled with ``version`` and are not submitted yet; from now on they are."""
        ready = [a for a in self._leases.values() if not a.is_submitted and version >= a.lease.min_version]
        for active in ready:
            active.is_submitted = True
        return ready

    def progress(self, num_tokens: Mapping[str, int], work: int) -> dict[str, int]:
        """By lease, a count that grows while it makes progress, for the heartbeat.

        A lease in line, for a slot or for a grader, makes progress as long as those before it do; otherwise it would
        expire.

        Args:
            num_tokens: tokens sampled so far, by lease.
            work: a count that grows with everything that the generator does.
        """
        found: dict[str, int] = {}
        for lease_id, active in self._leases.items():
            sampled = num_tokens.get(lease_id, 0)
            if active.is_submitted and not sampled and work > self._work_at_heartbeat:
                active.heartbeats_in_line += 1
            found[lease_id] = sampled + active.heartbeats_in_line + len(active.rollouts)
        self._work_at_heartbeat = work
        return found


class Activity:
    """Cumulative figures of one generator. ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started_s = self._idle_since_s = clock()
        self._busy_s = self._busy_sequence_s = self._pause_s = 0.0
        self._num_activations = 0
        self._has_warned = False

    def add_step(self, duration_s: float, num_running: int) -> None:
        """Count a decode step over ``num_running`` sequences."""
        self._busy_s += duration_s
        self._busy_sequence_s += duration_s * num_running

    def add_activation(self, pause_s: float) -> None:
        """Count an activation of new weights."""
        self._pause_s += pause_s
        self._num_activations += 1

    def stats(self, backend: Backend) -> GeneratorStats:
        """The figures since this object was made."""
        return GeneratorStats(
            max_running=backend.max_running,
            wall_s=self._clock() - self._started_s,
            busy_s=self._busy_s,
            busy_sequence_s=self._busy_sequence_s,
            pause_s=self._pause_s,
            num_activations=self._num_activations,
            num_tokens=backend.num_tokens,
        )

    def check_idle(self, generator_id: str, *, is_running: bool, awaited: Callable[[], str]) -> None:
        """Log once, after ``WATCHDOG_S`` without a running sequence, what the generator waits for."""
        now_s = self._clock()
        if is_running:
            self._idle_since_s = now_s
            self._has_warned = False
        elif now_s - self._idle_since_s > WATCHDOG_S and not self._has_warned:
            self._has_warned = True
            since = time.strftime("%H:%M:%S", time.localtime(time.time() - (now_s - self._idle_since_s)))
            logger.warning("generator %s: waiting since %s for %s", generator_id, since, awaited())
