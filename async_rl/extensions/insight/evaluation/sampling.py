"""Answer a list of leases: the generator's loop without a queue, and without weights that change. No torch.

Offline evaluation calls ``sample_offline``. Its ``rollouts`` sample single answers or play an environment.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from async_rl.generator.backend import Backend
from async_rl.generator.rollouts import Graded, Rollouts
from async_rl.queue.messages import FailureCause
from async_rl.records import Group, Lease, Prompt, Rollout

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with the number of leases that are answered or failed, and of all."""

_POLL_S = 0.002
"""While the backend has nothing to do, graders and environments are polled this often: they can't be waited for."""


@dataclass(slots=True)
class OfflineSamples:
    """The groups of all leases, in the order of the leases. A lease that failed has a group without rollouts.

    ``causes`` counts the failed leases by cause. ``first_failure`` describes the first failed lease; it is empty if no
    lease failed.
    """

    groups: list[tuple[Prompt, Group]] = field(default_factory=list)
    causes: Counter[FailureCause] = field(default_factory=Counter)
    first_failure: str = ""


def sample_offline(
    backend: Backend, rollouts: Rollouts, leases: Sequence[Lease], *, progress: Progress | None = None
) -> OfflineSamples:
    """Sample and score all ``leases``, and return their groups. A lease begins when the backend has a free slot.

    Raises:
        ModelError: the backend can't sample with a lease's settings.
        Exception: the backend raised it.
    """
    return _OfflineSampling(backend, rollouts, leases).run(progress)


class _OfflineSampling:
    def __init__(self, backend: Backend, rollouts: Rollouts, leases: Sequence[Lease]) -> None:
        self._backend, self._rollouts, self._leases = backend, rollouts, leases
        self._todo = deque(leases)
        self._open: dict[str, dict[int, Rollout]] = {}
        self._done: dict[str, tuple[Rollout, ...]] = {}
        self._causes: Counter[FailureCause] = Counter()
        self._first_failure = ""

    def run(self, progress: Progress | None) -> OfflineSamples:
        num_done = 0
        while self._todo or self._open:
            self._turn()
            if progress is not None and len(self._done) != num_done:
                num_done = len(self._done)
                progress(num_done, len(self._leases))
        groups = [(lease.prompt, _group(lease, self._done[lease.lease_id])) for lease in self._leases]
        return OfflineSamples(groups, self._causes, self._first_failure)

    def _turn(self) -> None:
        """Begin leases for the free slots, run one decode step, and collect the rollouts that have been scored."""
        while self._todo and self._rollouts.num_open < self._backend.max_running:
            self._begin(self._todo.popleft())
        if self._backend.num_running:
            self._rollouts.take(self._backend.step())
        elif self._open:
            assert self._rollouts.num_pending, "leases are open, but nothing works on them"
            time.sleep(_POLL_S)
        for graded in self._rollouts.collect():
            self._take(graded)

    def _begin(self, lease: Lease) -> None:
        limit = lease.sampling.max_prompt_tokens
        try:
            prompt_ids = self._rollouts.encode(lease)
        except Exception as error:  # boundary to templates and tokenizers: one bad prompt must not end the run
            self._fail(lease, "engine_error", f"prompt can't be rendered: {type(error).__name__}: {error}")
            return
        if len(prompt_ids) > limit:
            self._fail(lease, "prompt_too_long", f"{len(prompt_ids)} tokens, sampling.max_prompt_tokens = {limit}")
            return
        self._open[lease.lease_id] = {}
        self._rollouts.submit(lease, prompt_ids)

    def _take(self, graded: Graded) -> None:
        lease = graded.lease
        found = self._open.get(lease.lease_id)
        if found is None:
            return
        if graded.rollout is not None:
            found[graded.index] = graded.rollout
            if len(found) < lease.group_size:
                return
        if graded.rollout is None or all(rollout.finish_reason == "error" for rollout in found.values()):
            assert graded.failure is not None
            self._fail(lease, graded.failure.cause, graded.failure.detail)
            return
        del self._open[lease.lease_id]
        self._done[lease.lease_id] = tuple(found[index] for index in range(lease.group_size))

    def _fail(self, lease: Lease, cause: FailureCause, detail: str) -> None:
        row = lease.prompt.row
        if cause != "prompt_too_long":
            logger.warning("row %d has no answer: %s: %s", row, cause.replace("_", " "), detail)
        self._first_failure = self._first_failure or f"row {row}: {cause.replace('_', ' ')}: {detail}"
        self._causes[cause] += 1
        if self._open.pop(lease.lease_id, None) is not None:
            self._rollouts.cancel(lease.lease_id)
        self._done[lease.lease_id] = ()


def _group(lease: Lease, rollouts: tuple[Rollout, ...]) -> Group:
    return Group(
        lease_id=lease.lease_id,
        kind=lease.kind,
        position=lease.prompt.position,
        generator_id="",
        lineage=lease.lineage,
        temperature=lease.sampling.temperature,
        rollouts=rollouts,
    )
