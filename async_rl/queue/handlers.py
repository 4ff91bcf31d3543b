"""One request in, one reply out: wire messages to calls of the buffer. Called by the server; owns no socket.

A handler returns its reply, or a ``Waiting`` that the server tries again after every change until the request's time
is over. Whatever is wrong with a message raises ``WireError`` or ``QueueError``, which the server answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from async_rl.codec import decode_group, field, prompt_fields
from async_rl.config import Config
from async_rl.errors import QueueError, WireError
from async_rl.queue.admission import eval_sampling
from async_rl.queue.buffer import Buffer
from async_rl.queue.evals import Row
from async_rl.queue.messages import Acked, FailureCause, NotReady
from async_rl.queue.protocol import (
    announcement_fields,
    announcement_from_fields,
    as_array,
    counts,
    eval_keys,
    facts_from_fields,
    generator_stats_from_fields,
    granted_fields,
    not_ready_fields,
    stats_fields,
    strings,
)
from async_rl.wire import Message

MAX_WAIT_S = 60.0
"""A request is parked no longer; its client asks again."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply's type, fields and arrays; the server adds ``request_id`` and the notice."""

    type: str
    fields: Mapping[str, Any]
    arrays: Sequence[np.ndarray] = ()


@dataclass(frozen=True, slots=True)
class Waiting:
    """Not answerable yet. ``attempt(now, True)`` must answer, if only with a reason."""

    wait_s: float
    attempt: Callable[[float, bool], Reply | None]


@dataclass(slots=True)
class WelcomePack:
    """What the learner brought for generators."""

    config_toml: str
    names: tuple[str, ...]
    files: tuple[np.ndarray, ...]


class Handlers:
    """Requests by type. ``run_id`` is adopted from the first learner unless it was given."""

    def __init__(self, buffer: Buffer, config: Config, eval_rows: Mapping[str, Sequence[Row]], run_id: str) -> None:
        self.buffer, self.run_id = buffer, run_id
        self._config, self._eval_rows = config, eval_rows
        self._welcome: WelcomePack | None = None
        self._activate_told: dict[str, tuple[Any, ...]] = {}
        self._granted: dict[str, tuple[str, Reply]] = {}
        self.learner_gone = False
        self.left: set[str] = set()

    def handle(self, message: Message, now: float) -> Reply | Waiting | None:
        """The reply; None when none is wanted.

        Raises:
            WireError: the message is malformed. QueueError: it is refused.
        """
        handler = getattr(self, f"_on_{message.type}", None)
        if handler is None:
            raise WireError(f"unknown message type {message.type[:40]!r}")
        return handler(message, now)

    # Anyone.

    def _on_ping(self, message: Message, now: float) -> Reply:
        return Reply("pong", {"run_id": self.run_id, "attached": self.buffer.learner is not None})

    def _on_status(self, message: Message, now: float) -> Reply:
        return Reply("status", {"status": {"run_id": self.run_id, **self.buffer.status(now)}})

    # The learner.

    def _on_attach(self, message: Message, now: float) -> Reply:
        fields = message.fields
        run_id, names = field(fields, "run_id", str), strings(field(fields, "files", list))
        if self.run_id and run_id != self.run_id:
            raise QueueError(f"expected a learner of run {self.run_id}, got one of run {run_id}; use another queue")
        has_snapshot = field(fields, "has_snapshot", bool)
        if len(message.arrays) != len(names) + has_snapshot or any(a.dtype != np.uint8 for a in message.arrays):
            raise WireError(f"expected {len(names)} files and {int(has_snapshot)} snapshot, got {len(message.arrays)}")
        before = self.buffer.learner
        # Copies: the views would keep the whole message alive, snapshot included.
        files = tuple(array.copy() for array in message.arrays[: len(names)])
        self.buffer.attach(
            lineage=field(fields, "lineage", str),
            parent=field(fields, "parent_lineage", str),
            fork_version=field(fields, "fork_version", int),
            step=field(fields, "step", int),
            num_steps=field(fields, "num_steps", int),
            snapshot=message.arrays[-1].tobytes() if has_snapshot else None,
            now=now,
        )
        if self.buffer.learner is not before:
            # Repeated now, answers of another learner's time would name versions that this one may not have.
            self._granted.clear()
            self._activate_told.clear()
        self.run_id, self.learner_gone = run_id, False
        self._welcome = WelcomePack(field(fields, "config_toml", str), names, files)
        return Reply("attached", {"run_id": run_id})

    def _on_alive(self, message: Message, now: float) -> None:
        return None

    def _on_bye_learner(self, message: Message, now: float) -> Reply:
        learner = self.buffer.learner
        if learner is not None and learner.lineage == field(message.fields, "lineage", str):
            self.learner_gone = True
        return Reply("ok", {})

    def _on_announce(self, message: Message, now: float) -> Reply:
        self.buffer.announce(announcement_from_fields(field(message.fields, "announcement", dict)))
        return Reply("ok", {})

    def _on_evaluate(self, message: Message, now: float) -> Reply:
        fields = message.fields
        self.buffer.require(field(fields, "lineage", str))
        dataset = field(fields, "dataset", str)
        rows = self._eval_rows.get(dataset)
        if rows is None:
            raise QueueError(f"expected a dataset of data.eval = {sorted(self._eval_rows)}, got {dataset!r}")
        self.buffer.evaluate(
            dataset,
            field(fields, "step", int),
            rows,
            self._config.eval.num_samples,
            eval_sampling(self._config),
            field(fields, "min_version", int),
            field(fields, "exclusive", bool),
        )
        return Reply("ok", {})

    def _on_eval_results(self, message: Message, now: float) -> Reply:
        lineage = field(message.fields, "lineage", str)
        results = self.buffer.eval_results(lineage, eval_keys(field(message.fields, "received", list)))
        plain: list[dict[str, Any]] = []
        arrays: list[np.ndarray] = []
        for result in results:
            prompts = [{**prompt_fields(p), "answered": body is not None} for p, body in result.answers]
            plain.append({"dataset": result.dataset, "step": result.step, "prompts": prompts})
            arrays += [as_array(body) for _, body in result.answers if body is not None]
        return Reply("eval_results", {"results": plain}, arrays)

    def _on_await_eval(self, message: Message, now: float) -> Waiting:
        lineage = field(message.fields, "lineage", str)

        def attempt(now: float, last: bool) -> Reply | None:
            reason = self.buffer.eval_wait(lineage)
            return Reply("await_eval", {"reason": reason}) if last or not reason else None

        return Waiting(_wait_s(message), attempt)

    def _on_take(self, message: Message, now: float) -> Waiting:
        fields = message.fields
        lineage, step, version = (
            field(fields, "lineage", str),
            field(fields, "step", int),
            field(fields, "version", int),
        )
        num_groups = self.buffer.settings.groups_per_step

        def attempt(now: float, last: bool) -> Reply | None:
            answer = self.buffer.take(lineage, step, version, num_groups, now)
            if isinstance(answer, NotReady):
                is_final = last or answer.stop or answer.exhausted
                return Reply("not_ready", not_ready_fields(answer)) if is_final else None
            groups = [
                {
                    "prompt": prompt_fields(g.prompt),
                    "queued_s": g.queued_s,
                    "arrival_version": g.arrival_version,
                    "masked": g.masked,
                }
                for g in answer
            ]
            batch = {"groups": groups, "stats": stats_fields(self.buffer.stats())}
            return Reply("batch", batch, [as_array(g.body) for g in answer])

        return Waiting(_wait_s(message), attempt)

    def _on_ack(self, message: Message, now: float) -> Reply:
        fields = message.fields
        acked = self.buffer.ack(
            field(fields, "lineage", str),
            field(fields, "step", int),
            field(fields, "version", int),
            facts_from_fields(field(fields, "facts", dict)),
            snapshot=field(fields, "snapshot", bool),
            now=now,
        )
        return _acked(acked)

    def _on_snapshot(self, message: Message, now: float) -> Reply:
        body = self.buffer.snapshot(field(message.fields, "lineage", str), now)
        return _acked(Acked(self.buffer.stats(), body))

    def _on_finish(self, message: Message, now: float) -> Reply:
        self.buffer.finish(field(message.fields, "lineage", str), now)
        return Reply("ok", {})

    # Generators.

    def _on_hello(self, message: Message, now: float) -> Waiting:
        fields = message.fields
        generator_id, host = field(fields, "generator_id", str), field(fields, "host", str)
        self.buffer.hello(generator_id, host, field(fields, "backend", str), now)
        self.left.discard(generator_id)

        def attempt(now: float, last: bool) -> Reply | None:
            pack = self._welcome
            if pack is None:
                return Reply("not_yet", {"reason": "waits for a learner to attach"}) if last else None
            welcome = {"run_id": self.run_id, "config_toml": pack.config_toml, "files": list(pack.names)}
            return Reply("welcome", welcome, pack.files)

        return Waiting(_wait_s(message), attempt)

    def _on_lease(self, message: Message, now: float) -> Reply | Waiting:
        fields = message.fields
        generator_id, request_id = field(fields, "generator_id", str), str(fields.get("request_id"))
        active = (field(fields, "lineage", str), field(fields, "version", int))
        max_leases = field(fields, "max_leases", int)
        known = self._granted.get(generator_id)
        # The reply to this very request was lost: its leases are this generator's already.
        if known is not None and known[0] == request_id:
            return known[1]

        def attempt(now: float, last: bool) -> Reply | None:
            granted = self.buffer.lease(generator_id, active, max_leases, now)
            told = (active, granted.activate)
            # A generator that was told a version and has not got there yet waits, or it would ask in circles.
            is_news = granted.activate is not None and self._activate_told.get(generator_id) != told
            if not (granted.leases or is_news or last or self.buffer.finished):
                return None
            self._activate_told[generator_id] = told
            reply = Reply("leases", granted_fields(granted))
            self._granted[generator_id] = (request_id, reply)
            return reply

        return Waiting(_wait_s(message), attempt)

    def _on_heartbeat(self, message: Message, now: float) -> Reply:
        fields = message.fields
        stats = generator_stats_from_fields(field(fields, "stats", dict))
        progress = counts(field(fields, "progress", dict))
        cancelled = self.buffer.heartbeat(field(fields, "generator_id", str), progress, stats, now)
        return Reply("heartbeat", {"cancelled": list(cancelled)})

    def _on_return(self, message: Message, now: float) -> Reply:
        fields = message.fields
        generator_id, lease_id = field(fields, "generator_id", str), field(fields, "lease_id", str)
        if len(message.arrays) != 1 or message.arrays[0].dtype != np.uint8 or message.arrays[0].ndim != 1:
            raise WireError("expected one uint8 array, the encoded group")
        body = message.arrays[0].tobytes()
        try:
            group = decode_group(body)
            if group.lease_id != lease_id:
                raise WireError(f"expected the group of lease {lease_id}, got {group.lease_id}")
        except WireError as error:
            verdict, why = self.buffer.refuse(generator_id, lease_id, now), str(error)
        else:
            verdict, why = self.buffer.put_explained(generator_id, group, body, now)
        return Reply("returned", {"lease_id": lease_id, "verdict": verdict, "why": why})

    def _on_fail(self, message: Message, now: float) -> Reply:
        fields = message.fields
        lease_id, cause = field(fields, "lease_id", str), field(fields, "cause", str)
        known: tuple[FailureCause, ...] = ("prompt_too_long", "engine_error", "reward_error")
        if cause not in known:
            raise WireError(f"expected a cause of {known}, got {cause!r}")
        verdict = self.buffer.fail(field(fields, "generator_id", str), lease_id, cause, now)
        return Reply("returned", {"lease_id": lease_id, "verdict": verdict, "why": field(fields, "detail", str)})

    def _on_bye(self, message: Message, now: float) -> Reply:
        generator_id = field(message.fields, "generator_id", str)
        self.buffer.goodbye(generator_id, now)
        self.left.add(generator_id)
        self._granted.pop(generator_id, None)
        self._activate_told.pop(generator_id, None)
        return Reply("ok", {})

    def notice(self, generator_id: str | None) -> dict[str, Any]:
        """What any message to a client may carry: the newest version, void leases, the end of the run."""
        learner = self.buffer.learner
        notice: dict[str, Any] = {}
        if learner is not None and learner.announcement is not None:
            notice["announcement"] = announcement_fields(learner.announcement)
        if self.buffer.finished:
            notice["finished"] = True
        if generator_id is not None and (cancelled := self.buffer.pop_cancelled(generator_id)):
            notice["cancelled"] = list(cancelled)
        return notice


def _wait_s(message: Message) -> float:
    return min(max(field(message.fields, "wait_s", float), 0.0), MAX_WAIT_S)


def _acked(acked: Acked) -> Reply:
    arrays = [as_array(acked.snapshot)] if acked.snapshot is not None else []
    return Reply("acked", {"stats": stats_fields(acked.stats)}, arrays)
