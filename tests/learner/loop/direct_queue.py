"""The learner's queue without sockets: the real queue, and one generator that answers every lease at once.

Every ``take`` and ``await_eval`` lets the generator activate what is announced, ask, and return. Time stands still.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from async_rl.net.codec import decode_group
from async_rl.queue.core import generator_requests, learner_requests
from async_rl.queue.core.state import QueueState
from async_rl.queue.messages import Acked, Announcement, Batch, EvalResult, EvalWait, NotReady, StepAck
from async_rl.records import Group, Lease
from tests.queue.builders import put, rows, settings

MAX_LEASES = 64
NUM_EVAL_ROWS = 2


class DirectQueue:
    """As ``LearnerQueue``. ``answer`` makes a lease's group, sampled with the version given."""

    is_take_answered = False

    def __init__(
        self, queue_state: QueueState, *, answer: Callable[[Lease, int], Group], before: Callable[[str, int], None]
    ) -> None:
        """``before`` is told the name of a request and the learner's step; it may raise, as if the learner died."""
        self.queue_state, self._answer, self._before = queue_state, answer, before
        self._eval_rows = rows(NUM_EVAL_ROWS)
        self.announced: list[Announcement] = []
        self.asked: list[tuple[str, int, bool]] = []

    def confirm(self, lineage: str) -> None:
        self.queue_state.attached(lineage)

    def confirm_awaited(self, lineage: str, evaluations: Iterable[tuple[str, int]]) -> None:
        newest = self.announced[-1].version if self.announced else None
        learner_requests.confirm(self.queue_state, lineage, newest, list(evaluations))

    def announce(self, announcement: Announcement) -> None:
        learner_requests.announce(self.queue_state, announcement)
        self.announced.append(announcement)

    def evaluate(self, lineage: str, dataset: str, step: int, min_version: int, exclusive: bool) -> None:
        self.queue_state.attached(lineage)
        self.asked.append((dataset, step, exclusive))
        learner_requests.evaluate(
            self.queue_state, dataset, step, self._eval_rows, 1, settings().sampling, min_version, exclusive
        )

    def eval_results(self, lineage: str, received: Sequence[tuple[str, int]] = ()) -> list[EvalResult]:
        found = learner_requests.eval_results(self.queue_state, lineage, list(received))
        groups = [
            tuple((p, decode_group(bytes(payload))) for p, payload in e.groups if payload is not None) for e in found
        ]
        return [EvalResult(e.dataset, e.step, of) for e, of in zip(found, groups, strict=True)]

    def await_eval(self, lineage: str, wait_s: float) -> EvalWait:
        self._told("await_eval")
        self.generate()
        return learner_requests.eval_wait(self.queue_state, lineage)

    def begin_take(self, lineage: str, step: int, version: int, wait_s: float) -> None:
        """Nothing to begin: ``take`` answers at once."""

    def take(self, lineage: str, step: int, version: int, wait_s: float) -> Batch | NotReady:
        self._told("take")
        self.generate()
        answer = learner_requests.take(self.queue_state, lineage, step, version, 0.0)
        if isinstance(answer, NotReady):
            return answer
        return Batch(tuple(taken.with_group(decode_group(bytes(taken.group))) for taken in answer))

    def ack(self, ack: StepAck, *, next_take_s: float | None = None) -> Acked:
        self._told("ack")
        acked = learner_requests.ack(self.queue_state, ack, 0.0)
        self.queue_state.check()
        return acked

    def snapshot(self, lineage: str) -> bytes:
        return learner_requests.snapshot(self.queue_state, lineage, 0.0)

    def checkpoint_committed(self, lineage: str, step: int) -> None:
        self._told("checkpoint_committed")
        learner_requests.checkpoint_committed(self.queue_state, lineage, step)

    def finish(self, lineage: str) -> None:
        self._told("finish")
        learner_requests.finish(self.queue_state, lineage, 0.0)
        self.queue_state.check()

    def generate(self) -> None:
        """Sample until there is no lease to be had."""
        while self.announced:
            newest = self.announced[-1]
            granted = generator_requests.lease(
                self.queue_state, "g0", (newest.lineage, newest.version), MAX_LEASES, 0.0
            )
            if not granted.leases:
                return
            for lease in granted.leases:
                put(self.queue_state, self._answer(lease, newest.version))

    def _told(self, request: str) -> None:
        assert self.queue_state.learner is not None
        self._before(request, self.queue_state.learner.step)
