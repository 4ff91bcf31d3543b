"""The generator's loop: receive weights, request leases, step, grade, return, heartbeat. No torch.

``examples/heart.py`` has the same in ten lines, without what can fail.

One thread runs this loop. The queue client and the weights receiver work in the background, and the loop polls both.
While no sequence runs, the loop waits in the poll of the queue client. The protocol ``WeightsReceiver`` has the
methods of the receiver that the loop uses: the sampler of a colocated learner has another one.
``start.worker.run_generator`` builds a ``Worker``.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from async_rl.config.config import Config
from async_rl.errors import QueueError
from async_rl.generator.backend import Backend
from async_rl.generator.group_filter import FilteredRollouts
from async_rl.generator.parity import answer_probe
from async_rl.generator.rollouts import ActiveLeases, Graded, Pending, RolloutSource, ThreadGrader
from async_rl.generator.teachers import TaughtRollouts, Teachers
from async_rl.process.fault_points import fault_point
from async_rl.queue.messages import (
    Announced,
    Announcement,
    Cancelled,
    Decoded,
    Failure,
    Finished,
    GeneratorEvent,
    GeneratorStats,
    LeasesGranted,
    Returned,
)
from async_rl.queue.parity import decode_probe
from async_rl.records import NO_VERSION, Lease

if TYPE_CHECKING:
    from async_rl.queue.client.clients import GeneratorQueue

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
WATCHDOG_S = 30.0
"""After this long without a running sequence, the loop logs what it waits for."""
LEASE_WAIT_S = 8.0
"""How long the queue may hold a lease request before it answers without a lease."""
MAX_UNANSWERED_RETURNS = 32
"""With this many unanswered groups the queue is behind: request no leases until it answers."""

_MAX_TRACEBACKS = 100
_POLL_WHILE_RUNNING_S = 0.003
"""Between looks at the queue's socket while the backend samples: decode steps need not pay for one each."""
_POLL_WHILE_BUSY_S, _LONGEST_POLL_S = 0.005, 0.1
_POLL_GROWTH = 1.1
"""How much longer each poll without an event is than the one before: what is awaited is seen late by a tenth of the
wait at most, while many generators that wait together leave their machine to those that work."""
_PAUSE_AFTER_EMPTY_ANSWER_S = 0.05


class Staged(Protocol):
    """A version of the weights that has arrived and is verified, but is not active yet."""

    @property
    def lineage(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def digest(self) -> str: ...
    @property
    def tensors(self) -> Mapping[str, Any]: ...


class WeightsReceiver(Protocol):
    """The methods of ``weights.channel.receiver.Receiver`` that the loop uses.

    ``error`` says why no version can arrive at present; None if nothing is wrong.
    """

    @property
    def error(self) -> str | None: ...
    def follow(self, announcement: Announcement) -> None: ...
    def poll(self) -> Staged | None: ...
    def activated(self, staged: Any, /) -> None: ...


class Device(Protocol):
    """The device on which the backend computes, which at times does other work, such as training."""

    def turn(self) -> AbstractContextManager[bool]:
        """Keep the device for the ``with`` block: an activation of weights and a decode step. The value is False if it
        does other work, which is awaited only briefly.
        """
        ...

    @property
    def max_wait_s(self) -> float:
        """How long at most to wait between two turns."""
        ...

    @property
    def groups_left(self) -> int | None:
        """How many groups of training may begin on it now. None: any number."""
        ...

    def group_begins(self) -> None:
        """Count a group of training that begins on it."""
        ...


class OwnDevice:
    """A device that does nothing else."""

    groups_left = None
    max_wait_s = math.inf

    def turn(self) -> AbstractContextManager[bool]:
        return nullcontext(True)

    def group_begins(self) -> None:
        """Nothing counts the groups."""


class Worker:
    """Runs one generator: it holds the active weights, the leases and the counters, and ``run`` is its loop.

    ``wait_s`` is how long the queue may be silent. ``clock`` returns the time in seconds. ``rollouts`` plays the
    rollouts, and ``grader`` is what it has them scored by. Both may wait for other processes: leases are kept
    meanwhile, and heartbeats say why. ``device`` is where the backend computes; None: on a device that does nothing
    else. ``teachers`` score what is sampled for training, and ``group_filter`` is the user's own. ``on_stats`` is
    called with the statistics of each heartbeat.

    While the device does other work, the loop goes on without decode steps: it sends heartbeats, and returns groups
    that are graded meanwhile.
    """

    def __init__(
        self,
        *,
        queue: GeneratorQueue,
        receiver: WeightsReceiver,
        backend: Backend,
        rollouts: RolloutSource,
        grader: ThreadGrader,
        config: Config,
        generator_id: str,
        wait_s: float,
        clock: Callable[[], float] = time.monotonic,
        device: Device | None = None,
        teachers: Teachers | None = None,
        group_filter: Callable[..., Any] | None = None,
        on_stats: Callable[[GeneratorStats], None] = lambda stats: None,
    ) -> None:
        self._device: Device = device or OwnDevice()
        self._queue = queue
        self._receiver = receiver
        self._backend = backend
        self._grader, self._max_call_s = grader, config.reward.max_call_s
        self._rollouts = rollouts if teachers is None else TaughtRollouts(rollouts, teachers)
        if group_filter is not None:
            name = config.queue.filter_function
            self._rollouts = FilteredRollouts(self._rollouts, group_filter, name, grader)
        self._max_groups = config.generator.max_concurrent_groups
        self._generator_id = generator_id
        self._wait_s = wait_s
        self._clock = clock
        self._leases = ActiveLeases()
        self._activity = Activity(clock, pending=rollouts.pending)
        # Eval and training groups differ in size. Expect the next lease to be like the last one.
        self._expected_group_size = config.sampling.group_size
        self._has_sampled = False
        self._announced: Announcement | None = None
        self._active: Staged | None = None
        self._probes: dict[int, bytes] = {}
        self._lineage = ""
        self._digests: dict[int, str] = {}
        self._version_to_activate = NO_VERSION
        self._request_not_before_s = 0.0
        self._finished = self._is_paused = False
        self._heartbeat_at_s = self._poll_at_s = clock()
        self._busy_poll_s = _POLL_WHILE_BUSY_S
        self._num_graded = 0
        self._waiters, self._num_waits = (grader, rollouts, *(() if teachers is None else (teachers,))), 0
        self._counters = lambda: {**grader.counters(), **rollouts.counters()}
        self._on_stats = on_stats
        self._queue_reason = ""
        self._failed_places: set[str] = set()
        self._receiver_trouble: str | None = None

    def run(self) -> None:
        """Sample groups for the queue until it reports the end of the run, or until ``stop``.

        Raises:
            QueueError: the queue was silent for longer than ``wait_s``.
            WeightsError: the receiver has failed for good; or the weights don't fit the model or give NaN.
        """
        while not self._finished:
            # Weights and step in one turn: other work on the device may change the weights between two turns.
            with self._device.turn() as is_free:
                self._is_paused = not is_free
                if is_free:
                    self._receive_weights()
                    self._answer_probe()
                    self._request_leases()
                    self._step()
            self._return_graded()
            self._heartbeat()
            self._handle_events()
            self._check_waits()

    def stop(self) -> None:
        """Let ``run`` return soon. Another thread may call this."""
        self._finished = True

    def _receive_weights(self) -> None:
        """Activate the newest version that has arrived, between two decode steps."""
        self._note_trouble(self._receiver.error)
        staged = self._receiver.poll()
        if staged is None or self._announced is None or staged.lineage != self._announced.lineage:
            return
        if staged.lineage == self._lineage and staged.version <= self._backend.version:
            return
        fault_point("generator.activating")  # new weights are verified, not active
        self._activity.add_activation(self._backend.activate(staged.version, staged.tensors))
        self._receiver.activated(staged)
        self._active = staged
        if staged.lineage != self._lineage:
            self._lineage, self._digests = staged.lineage, {}
        self._digests[staged.version] = staged.digest
        self._submit_leases()

    def _note_trouble(self, trouble: str | None) -> None:
        """Log why no version arrives, and later that one has. A connection alone ends no trouble: the next port may
        be closed.
        """
        if trouble == self._receiver_trouble or (trouble is None and self._is_transferring):
            return
        self._receiver_trouble = trouble
        logger.log(logging.WARNING if trouble else logging.INFO, "weights: %s", trouble or "versions arrive again")

    def _answer_probe(self) -> None:
        """Answer the learner's probe of the active version, if one has arrived and is not answered.

        A probe holds token sequences with the learner's log-probabilities; the answer holds the engine's.
        """
        active = self._active
        if active is None or not self._probes or not self._holds_newest_lineage:
            return
        data = self._probes.pop(active.version, None)
        # Drop the probes of versions that were skipped.
        self._probes = {version: probe for version, probe in self._probes.items() if version > active.version}
        if data is not None:
            self._queue.answer_probe(active.lineage, answer_probe(self._backend, decode_probe(data), active.tensors))

    @property
    def _is_transferring(self) -> bool:
        """Whether the learner has announced a version that is not active yet.

        The receiver may bring a version before the queue announces it.
        """
        announced = self._announced
        return announced is not None and (
            announced.lineage != self._lineage or self._backend.version < announced.version
        )

    @property
    def _holds_newest_lineage(self) -> bool:
        """Whether the active weights belong to the lineage that was announced last."""
        return self._announced is not None and self._announced.lineage == self._lineage

    def _follow(self, announcement: Announcement) -> None:
        """Have the receiver fetch the version that was announced.

        If its lineage is new, drop all leases, because the queue leases their prompts again.
        """
        if self._announced is not None and announcement.lineage != self._announced.lineage:
            for lease_id in self._leases.ids:
                self._drop(lease_id)
            self._version_to_activate = NO_VERSION
            self._probes.clear()
        self._announced = announcement
        if announcement.probe:
            self._probes[announcement.version] = announcement.probe
        self._receiver.follow(announcement)

    def _request_leases(self) -> None:
        if self._queue.lease_request_outstanding or self._clock() < self._request_not_before_s:
            return
        if not self._holds_newest_lineage:
            return
        if self._backend.version < self._version_to_activate:
            return
        wanted = self._num_wanted()
        if wanted > 0 and self._queue.num_unanswered_returns < MAX_UNANSWERED_RETURNS:
            self._queue.request_leases(self._lineage, self._backend.version, wanted, LEASE_WAIT_S)

    def _num_wanted(self) -> int:
        """Return how many leases to request now.

        They fill the free slots, plus one lease in reserve, so that no slot is empty while the next request is on its
        way.
        """
        free = self._backend.max_running - self._rollouts.num_open - self._leases.num_unsubmitted
        wanted = math.ceil((free + self._expected_group_size) / self._expected_group_size)
        if self._max_groups is not None:
            wanted = min(wanted, self._max_groups - len(self._leases))
        left = self._device.groups_left
        return wanted if left is None else min(wanted, left)

    def _accept(self, lease: Lease) -> None:
        if lease.lineage != self._lineage or not self._holds_newest_lineage or lease.lease_id in self._leases:
            # It was granted just before a newer learner took over, or the queue repeated an answer.
            logger.info(
                "ignored lease %s of lineage %s: an older learner's lease, or a repeated one",
                lease.lease_id,
                lease.lineage,
            )
            return
        self._expected_group_size = lease.group_size
        try:
            prompt_ids = self._rollouts.encode(lease)
        except Exception as error:  # boundary to templates and tokenizers: one bad prompt must not end the run
            logger.exception("prompt at position %d can't be rendered", lease.prompt.position)
            detail = f"prompt can't be rendered: {error}"
            self._queue.fail(lease.lease_id, Failure("engine_error", detail, "render"))
            return
        if len(prompt_ids) > lease.sampling.max_prompt_tokens:
            detail = f"{len(prompt_ids)} tokens, sampling.max_prompt_tokens = {lease.sampling.max_prompt_tokens}"
            self._queue.fail(lease.lease_id, Failure("prompt_too_long", detail))
            return
        if lease.kind == "train":
            self._device.group_begins()
        self._leases.add(lease, prompt_ids, self._clock())
        self._submit_leases()

    def _submit_leases(self) -> None:
        """Begin the leases that have waited for the active version."""
        for active in self._leases.take_submittable(self._backend.version):
            if not self._has_sampled:  # launch shows it until the first step, which may take long
                self._has_sampled = True
                logger.info("sampling answers of up to %d tokens", active.lease.sampling.max_new_tokens)
            self._rollouts.submit(active.lease, active.prompt_ids)

    def _drop(self, lease_id: str) -> None:
        if self._leases.remove(lease_id):
            self._rollouts.cancel(lease_id)

    def _step(self) -> None:
        """Run one decode step. Pass the samples that it finished on to be scored."""
        num_running = min(self._backend.num_running, self._backend.max_running)
        if not num_running:
            return
        started_s, num_tokens = self._clock(), self._backend.num_tokens
        sampled = self._backend.step()
        self._activity.add_step(self._clock() - started_s, num_running, self._backend.num_tokens - num_tokens)
        self._rollouts.take(sampled)

    def _return_graded(self) -> None:
        """Send to the queue each group whose last rollout has been scored. Report failed leases."""
        for graded in self._rollouts.collect():
            self._num_graded += 1
            lease_id = graded.lease.lease_id
            active = self._leases.get(lease_id)
            if active is None:
                continue
            if graded.failure is not None:
                self._log_failure(graded, graded.failure)
            if graded.rollout is not None:
                active.add(graded.index, graded.rollout, graded.failure, graded.text)
                active.kept = graded.kept
                if not active.is_complete:
                    continue
            if graded.rollout is None or active.every_rollout_failed:
                assert graded.failure is not None
                self._drop(lease_id)
                self._queue.fail(lease_id, graded.failure)
                continue
            self._leases.remove(lease_id)
            fault_point("generator.sampled")  # a group is graded, not returned
            self._queue.return_group(active.group(self._generator_id, self._digests, self._clock()), active.failed)

    def _log_failure(self, graded: Graded, failure: Failure) -> None:
        """Log a failure, with the traceback if it is the first one at its place."""
        if failure.cause == "prompt_too_long":
            return
        is_new = failure.place not in self._failed_places and len(self._failed_places) < _MAX_TRACEBACKS
        if is_new:
            self._failed_places.add(failure.place)
        lease, what = graded.lease, failure.cause.removesuffix("_error")
        line = "%s failed on %s, rollout %d of lease %s: %s"
        where = f"position {lease.prompt.position}"
        logger.error(
            line, what, where, graded.index, lease.lease_id, failure.detail, exc_info=graded.error if is_new else None
        )

    def _heartbeat(self) -> None:
        now_s = self._clock()
        if now_s < self._heartbeat_at_s:
            return
        self._heartbeat_at_s = now_s + HEARTBEAT_S
        # Leases must outlive a scorer's absence and a slow reward, so a heartbeat that waits for one counts as work.
        # A call that hangs must not take the other ones' leases away. Of ``work`` it matters only that it grows.
        is_grading = any(call_s < self._max_call_s for call_s in self._grader.calls_s)
        self._num_waits += is_grading or any(waiter.num_waiting for waiter in self._waiters)
        work = self._backend.num_tokens + self._num_graded + self._num_waits
        progress = self._leases.progress(self._rollouts.progress(), work, is_paused=self._is_paused)
        trouble = self._receiver_trouble or self._waiter_trouble or self._slow_call
        stats = self._activity.stats(self._backend, self._counters())
        self._on_stats(stats)
        self._queue.heartbeat(progress, stats, trouble)

    @property
    def _waiter_trouble(self) -> str:
        """Why rollouts wait for another process; empty if they do not, or if the cause is not known."""
        return next((waiter.trouble for waiter in self._waiters if waiter.trouble), "")

    @property
    def _slow_call(self) -> str:
        """That a call of the reward or of the group filter runs for long; empty if none does."""
        longest_s, limit_s = max(self._grader.calls_s, default=0.0), self._max_call_s
        if longest_s <= WATCHDOG_S:
            return ""
        if longest_s < limit_s:
            return f"a call of the reward or filter has run for more than {WATCHDOG_S:.0f} s (limit: reward.max_call_s)"
        return (
            f"a call of the reward or filter has run for more than reward.max_call_s = {limit_s:g} s: its leases expire"
        )

    def _handle_events(self) -> None:
        now_s = self._clock()
        if self._is_paused:
            timeout_s = 0.0  # the device's turn has waited already
        elif self._backend.num_running:
            if now_s < self._poll_at_s:
                return
            timeout_s = 0.0
        elif self._is_transferring or self._rollouts.num_pending:
            # The loop can't block on the queue's socket together with the receiver, the grader or an environment.
            timeout_s = self._busy_poll_s
        else:
            timeout_s = max(0.0, self._heartbeat_at_s - now_s)
            if self._request_not_before_s > now_s:
                timeout_s = min(timeout_s, self._request_not_before_s - now_s)
            timeout_s = min(timeout_s, self._device.max_wait_s)
        self._poll_at_s = now_s + _POLL_WHILE_RUNNING_S
        events = self._queue.poll(timeout_s)
        has_work = bool(events) or self._backend.num_running > 0
        self._busy_poll_s = _POLL_WHILE_BUSY_S if has_work else min(self._busy_poll_s * _POLL_GROWTH, _LONGEST_POLL_S)
        for event in events:
            self._handle(event)

    def _handle(self, event: GeneratorEvent) -> None:
        match event:
            case LeasesGranted(leases=leases, reason=reason, activate=activate):
                self._queue_reason = reason
                self._version_to_activate = NO_VERSION if activate is None else activate
                if not leases:
                    self._request_not_before_s = self._clock() + _PAUSE_AFTER_EMPTY_ANSWER_S
                for lease in leases:
                    self._accept(lease)
            case Cancelled(lease_ids=lease_ids):
                for lease_id in lease_ids:
                    self._drop(lease_id)
            case Announced(announcement=announcement):
                self._follow(announcement)
            case Returned(lease_id=lease_id, verdict=verdict, why=why):
                if verdict in ("refused", "unknown_lease", "old_lineage"):
                    logger.warning("the queue did not take lease %s: %s", lease_id, why or verdict)
            case Finished():
                self._finished = True

    def _check_waits(self) -> None:
        """Check how long the generator has waited. Warn once about what it waits for while nothing runs.

        Raises:
            QueueError: the queue was silent for longer than ``wait_s``.
        """
        if self._queue.silent_s > self._wait_s:
            cause = self._queue.trouble or "check that its process is alive and not suspended"
            raise QueueError(
                f"expected a message of the queue server within {self._wait_s:.0f} s (--wait), got none for "
                f"{self._queue.silent_s:.0f} s; {cause}"
            )
        is_running = self._is_paused or self._backend.num_running > 0
        self._activity.elapse(
            is_running=is_running,
            is_pending=self._rollouts.num_pending > 0,
            awaits_weights=self._announced is None or self._is_transferring,
        )
        self._activity.warn_of(self._generator_id, self._slow_call)
        self._activity.check_idle(self._generator_id, is_running=is_running, awaited=self._awaited)

    def _awaited(self) -> str:
        """Return what the generator waits for, as text."""
        if self._announced is None:
            return "the learner's first announcement"
        if self._is_transferring:
            announced = self._announced
            trouble = self._receiver_trouble or "no problem known"
            return (
                f"weights of version {announced.version} from {announced.address} (active: {self._backend.version}; "
                f"{trouble})"
            )
        if self._waiter_trouble:
            return f"another process ({self._waiter_trouble})"
        if self._rollouts.num_pending:
            what = "the environments" if self._activity.pending == "environment" else "the reward"
            return f"{what} ({self._rollouts.num_pending} answers)"
        return f"a lease ({self._queue_reason or 'the queue gave no reason'})"


class Activity:
    """Counts the work and the idle time of one generator for its heartbeats. ``clock`` returns the time in seconds."""

    def __init__(self, clock: Callable[[], float], pending: Pending = "grading") -> None:
        self.pending: Pending = pending
        self._clock = clock
        self._elapsed_to_s = clock()
        self._waited_s = {"grading": 0.0, "environment": 0.0}
        self._idle_s = {"grading": 0.0, "environment": 0.0, "weights": 0.0, "leases": 0.0}
        self._warned_of = ""
        self._started_s = self._idle_since_s = clock()
        self._pause_s, self._num_activations = 0.0, 0
        self._decoded: list[Decoded] = []
        self._has_warned = False

    def add_step(self, duration_s: float, num_running: int, num_tokens: int) -> None:
        """Count a decode step of ``duration_s`` seconds, in which ``num_running`` sequences gained ``num_tokens``."""
        index = num_running.bit_length() - 1
        self._decoded += [Decoded()] * (index + 1 - len(self._decoded))
        one = self._decoded[index]
        self._decoded[index] = Decoded(
            one.busy_s + duration_s, one.busy_sequence_s + duration_s * num_running, one.num_tokens + num_tokens
        )

    def add_activation(self, pause_s: float) -> None:
        """Count an activation of new weights, and the ``pause_s`` seconds for which no decode step could run."""
        self._pause_s += pause_s
        self._num_activations += 1

    def elapse(self, *, is_running: bool, is_pending: bool, awaits_weights: bool) -> None:
        """Count the time since the last call by what the generator did in it.

        Args:
            is_running: whether sequences are running.
            is_pending: whether rollouts wait for ``pending``.
            awaits_weights: whether the generator can't sample because it waits for a version of the weights.
        """
        now_s = self._clock()
        passed_s, self._elapsed_to_s = now_s - self._elapsed_to_s, now_s
        if is_pending:
            self._waited_s[self.pending] += passed_s
        if not is_running:
            awaited = self.pending if is_pending else "weights" if awaits_weights else "leases"
            self._idle_s[awaited] += passed_s

    def warn_of(self, generator_id: str, problem: str) -> None:
        """Log a problem when it begins."""
        if problem and problem != self._warned_of:
            logger.warning("generator %s: %s", generator_id, problem)
        self._warned_of = problem

    def stats(self, backend: Backend, counters: Mapping[str, int]) -> GeneratorStats:
        """Return what has been counted since this object was created, as the record for a heartbeat."""
        return GeneratorStats(
            max_running=backend.max_running,
            wall_s=self._clock() - self._started_s,
            busy_s=sum(one.busy_s for one in self._decoded),
            busy_sequence_s=sum(one.busy_sequence_s for one in self._decoded),
            pause_s=self._pause_s,
            grading_s=self._waited_s["grading"],
            environment_s=self._waited_s["environment"],
            idle_grading_s=self._idle_s["grading"],
            idle_environment_s=self._idle_s["environment"],
            idle_weights_s=self._idle_s["weights"],
            idle_leases_s=self._idle_s["leases"],
            num_activations=self._num_activations,
            num_tokens=backend.num_tokens,
            decoded=tuple(self._decoded),
            counters=dict(counters),
        )

    def check_idle(self, generator_id: str, *, is_running: bool, awaited: Callable[[], str]) -> None:
        """Log a warning if no sequence has run for ``WATCHDOG_S`` seconds.

        The warning says what the generator waits for. It is not repeated until a sequence has run again.
        """
        now_s = self._clock()
        if is_running:
            self._idle_since_s = now_s
            self._has_warned = False
        elif now_s - self._idle_since_s > WATCHDOG_S and not self._has_warned:
            self._has_warned = True
            since = time.strftime("%H:%M:%S", time.localtime(time.time() - (now_s - self._idle_since_s)))
            logger.warning("generator %s: waiting since %s for %s", generator_id, since, awaited())
