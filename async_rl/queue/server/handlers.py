"""One request in, one reply out: wire messages to calls of the buffer. Called by the server; owns no socket.

A handler returns its reply, or a ``Deferred`` that the server tries again after every change until the request's time
is over. Whatever is wrong with a message raises ``WireError`` or ``QueueError``, which the server answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np

from async_rl.config.config import Config
from async_rl.errors import QueueError, WireError
from async_rl.net.codec import Count, field, read_as
from async_rl.net.wire import Message
from async_rl.process.package_versions import package_versions
from async_rl.queue.core.admission import eval_sampling
from async_rl.queue.core.batches import TakenPayload
from async_rl.queue.core.buffer import Buffer
from async_rl.queue.core.evals import Row
from async_rl.queue.core.ingest import read_summary
from async_rl.queue.messages import (
    Acked,
    Announcement,
    FailureCause,
    GeneratorStats,
    LeasesGranted,
    NotReady,
    StepAck,
    TakenEntry,
    Verdict,
    as_array,
    name,
)
from async_rl.queue.server.registry import MAX_ANSWER_BYTES, GeneratorRegistry, ProbeAnswer
from async_rl.queue.server.requests import Deferred, Reply
from async_rl.queue.storage.payloads import Payload

MAX_WAIT_S = 60.0
"""A request is parked no longer; its client asks again."""
_OF_GENERATORS = frozenset({"hello", "lease", "heartbeat", "return", "fail", "parity", "bye"})
_MESSAGE_BYTES = 1 << 20
_MAX_MESSAGES = 64
"""Of one batch: well below the number that a socket queues for a peer before it drops some."""
OF_LEARNERS = frozenset({
    "attach", "alive", "bye_learner", "announce", "evaluate", "eval_results", "await_eval", "take", "ack", "snapshot",
    "checkpoint_committed", "finish", "parity_answers",
})  # fmt: skip


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
        self._config, self.eval_rows = config, eval_rows
        self.welcome: WelcomePack | None = None
        self.registry = GeneratorRegistry()
        self.learner_gone = False

    def handle(self, message: Message, now: float) -> Reply | Deferred | None:
        """The reply; None when none is wanted.

        Raises:
            WireError: the message is malformed. QueueError: it is refused.
        """
        handler = getattr(self, f"_on_{message.type}", None)
        if handler is None:
            raise WireError(f"unknown message type {message.type[:40]!r}")
        return handler(message, now)

    def generator_of(self, message: Message, peer: bytes, now: float) -> str | None:
        """The generator that speaks, from here on answered at ``peer``; None for messages of others.

        Raises:
            WireError: its id is malformed. QueueError: there is no room for another generator.
        """
        if message.type not in _OF_GENERATORS:
            return None
        generator_id = name(message.fields, "generator_id")
        self.registry.seen(generator_id, now, peer)
        return generator_id

    # Anyone.

    def _on_ping(self, message: Message, now: float) -> Reply:
        attached = self.buffer.learner is not None
        return Reply("pong", {"run_id": self.run_id, "attached": attached, "versions": package_versions()})

    def _on_status(self, message: Message, now: float) -> Reply:
        return Reply("status", {"status": {"run_id": self.run_id, **self.buffer.status(now)}})

    # The learner.

    def _on_attach(self, message: Message, now: float) -> Reply:
        fields = message.fields
        run_id, names = field(fields, "run_id", str), read_as(fields.get("files"), tuple[str, ...])
        if self.run_id and run_id != self.run_id:
            raise QueueError(f"expected a learner of run {self.run_id}, got one of run {run_id}; use another queue")
        has_snapshot = field(fields, "has_snapshot", bool)
        if len(message.arrays) != len(names) + has_snapshot or any(a.dtype != np.uint8 for a in message.arrays):
            raise WireError(f"expected {len(names)} files and {int(has_snapshot)} snapshot, got {len(message.arrays)}")
        before = self.buffer.learner
        # Copies: the views would keep the whole message alive, snapshot included.
        files = tuple(array.copy() for array in message.arrays[: len(names)])
        self.buffer.attach(
            lineage=name(fields, "lineage"),
            parent=name(fields, "parent_lineage"),
            fork_version=field(fields, "fork_version", int),
            step=field(fields, "step", int),
            num_steps=field(fields, "num_steps", int),
            snapshot=message.arrays[-1].tobytes() if has_snapshot else None,
            now=now,
        )
        if self.buffer.learner is not before:
            # Repeated now, answers of another learner's time would name versions that this one may not have.
            self.registry.forget_answers()
        self.run_id, self.learner_gone = run_id, False
        self.welcome = WelcomePack(field(fields, "config_toml", str), names, files)
        return Reply("attached", {"run_id": run_id})

    def _on_alive(self, message: Message, now: float) -> None:
        return None

    def _on_bye_learner(self, message: Message, now: float) -> Reply:
        learner = self.buffer.learner
        if learner is not None and learner.lineage == field(message.fields, "lineage", str):
            self.learner_gone = True
        return Reply("ok", {})

    def _on_announce(self, message: Message, now: float) -> Reply:
        self.buffer.announce(read_as(message.fields.get("announcement"), Announcement))
        return Reply("ok", {})

    def _on_evaluate(self, message: Message, now: float) -> Reply:
        fields = message.fields
        self.buffer.require(field(fields, "lineage", str))
        dataset = field(fields, "dataset", str)
        rows = self.eval_rows.get(dataset)
        if rows is None:
            raise QueueError(f"expected a dataset of data.eval = {sorted(self.eval_rows)}, got {dataset!r}")
        self.buffer.evaluate(
            dataset,
            field(fields, "step", int),
            rows,
            self._config.eval.of(dataset).num_samples,
            eval_sampling(self._config, dataset),
            field(fields, "min_version", int),
            field(fields, "exclusive", bool),
        )
        return Reply("ok", {})

    def _on_eval_results(self, message: Message, now: float) -> Reply:
        lineage = field(message.fields, "lineage", str)
        received = read_as(message.fields.get("received"), list[tuple[str, int]])
        results = self.buffer.eval_results(lineage, received)
        plain: list[dict[str, Any]] = []
        parts: list[Payload] = []
        for result in results:
            prompts = [{"prompt": prompt, "answered": payload is not None} for prompt, payload in result.answers]
            plain.append({"dataset": result.dataset, "step": result.step, "prompts": prompts})
            parts += [payload for _, payload in result.answers if payload is not None]
        return Reply("eval_results", {"results": plain}, parts=parts)

    def _on_await_eval(self, message: Message, now: float) -> Deferred:
        lineage = field(message.fields, "lineage", str)

        def attempt(now: float, last: bool) -> Reply | None:
            reason = self.buffer.eval_wait(lineage)
            return Reply("await_eval", {"reason": reason}) if last or not reason else None

        return Deferred(_wait_s(message), attempt)

    def _on_take(self, message: Message, now: float) -> Deferred:
        fields = message.fields
        lineage, step, version = (
            field(fields, "lineage", str),
            field(fields, "step", int),
            field(fields, "version", int),
        )
        num_groups = self.buffer.settings.groups_per_step

        def attempt(now: float, last: bool) -> Reply | None:
            if not last and self.buffer.lacks_groups(lineage, step, num_groups):
                return None
            answer = self.buffer.take(lineage, step, version, num_groups, now)
            if isinstance(answer, NotReady):
                is_final = last or answer.stop or answer.exhausted
                return Reply("not_ready", {"answer": answer}) if is_final else None
            return batch_reply(answer)

        return Deferred(_wait_s(message), attempt)

    def _on_ack(self, message: Message, now: float) -> Reply:
        return _acked(self.buffer.ack(read_as(message.fields, StepAck), now))

    def _on_snapshot(self, message: Message, now: float) -> Reply:
        payload = self.buffer.snapshot(field(message.fields, "lineage", str), now)
        return _acked(Acked(self.buffer.stats(), payload))

    def _on_checkpoint_committed(self, message: Message, now: float) -> Reply:
        self.buffer.checkpoint_committed(field(message.fields, "lineage", str), field(message.fields, "step", int))
        return Reply("ok", {})

    def _on_finish(self, message: Message, now: float) -> Reply:
        self.buffer.finish(field(message.fields, "lineage", str), now)
        return Reply("ok", {})

    def _on_parity_answers(self, message: Message, now: float) -> Reply:
        lineage, since = field(message.fields, "lineage", str), field(message.fields, "since", int)
        self.buffer.require(lineage)
        found = self.registry.answers_since(lineage, since)
        return Reply("parity_answers", {"generators": list(found)}, [as_array(data) for data in found.values()])

    # Generators.

    def _on_hello(self, message: Message, now: float) -> Deferred:
        fields = message.fields
        generator_id = name(fields, "generator_id")
        replaces = None if fields.get("replaces") is None else name(fields, "replaces")
        self.buffer.hello(generator_id, name(fields, "host"), name(fields, "backend"), now, replaces=replaces)
        if replaces is not None:
            self.registry.leave(replaces)
        self.registry.seen(generator_id, now).has_left = False

        def attempt(now: float, last: bool) -> Reply | None:
            pack = self.welcome
            if pack is None:
                return Reply("not_yet", {"reason": "waits for a learner to attach"}) if last else None
            welcome = {"run_id": self.run_id, "config_toml": pack.config_toml, "files": list(pack.names)}
            return Reply("welcome", welcome, pack.files)

        return Deferred(_wait_s(message), attempt)

    def _on_lease(self, message: Message, now: float) -> Reply | Deferred:
        fields = message.fields
        generator_id, request_id = field(fields, "generator_id", str), str(fields.get("request_id"))
        active = (name(fields, "lineage"), field(fields, "version", int))
        max_leases = field(fields, "max_leases", int)
        generator = self.registry.seen(generator_id, now)
        known = generator.granted
        # The reply to this very request was lost: its leases are this generator's already.
        if known is not None and known[0] == request_id:
            return Reply("leases", {"granted": known[1]})

        def attempt(now: float, last: bool) -> Reply | None:
            granted = self.buffer.lease(generator_id, active, max_leases, now)
            told = (active, granted.activate)
            # A generator that was told a version and has not got there yet waits, or it would ask in circles.
            is_news = granted.activate is not None and generator.told != told
            if not (granted.leases or is_news or last or self.buffer.finished):
                return None
            generator.told = told
            self.registry.grant(generator, request_id, granted)
            return Reply("leases", {"granted": granted})

        return Deferred(_wait_s(message), attempt)

    def _on_heartbeat(self, message: Message, now: float) -> Reply:
        fields = message.fields
        stats = read_as(fields.get("stats"), GeneratorStats)
        progress = read_as(fields.get("progress"), dict[str, Count])
        cancelled = self.buffer.heartbeat(field(fields, "generator_id", str), progress, stats, now)
        return Reply("heartbeat", {"cancelled": list(cancelled)})

    def _on_return(self, message: Message, now: float) -> Reply:
        generator_id = field(message.fields, "generator_id", str)
        lease_ids = read_as(message.fields.get("lease_ids"), list[str])
        if len(message.parts) != len(lease_ids):
            raise WireError(f"expected {len(lease_ids)} parts, the encoded groups, got {len(message.parts)}")
        verdicts: dict[str, Verdict] = {}
        why: dict[str, str] = {}
        for lease_id, payload in zip(lease_ids, message.parts, strict=True):
            verdicts[lease_id], reason = self._receive_group(generator_id, lease_id, payload, now)
            if reason:
                why[lease_id] = reason
        return Reply("returned", {"verdicts": verdicts, "why": why})

    def _receive_group(self, generator_id: str, lease_id: str, payload: Payload, now: float) -> tuple[Verdict, str]:
        try:
            group = read_summary(payload)
            if group.lease_id != lease_id:
                raise WireError(f"expected the group of lease {lease_id}, got {group.lease_id}")
        except WireError as error:
            return self.buffer.refuse(generator_id, lease_id, now), str(error)
        return self.buffer.put_explained(generator_id, group, payload, now)

    def _on_fail(self, message: Message, now: float) -> Reply:
        fields = message.fields
        lease_id, cause = field(fields, "lease_id", str), field(fields, "cause", str)
        known: tuple[FailureCause, ...] = get_args(FailureCause)
        if cause not in known:
            raise WireError(f"expected a cause of {known}, got {cause!r}")
        verdict = self.buffer.fail(field(fields, "generator_id", str), lease_id, cause, now)
        return Reply("returned", {"verdicts": {lease_id: verdict}, "why": {lease_id: field(fields, "detail", str)}})

    def _on_parity(self, message: Message, now: float) -> Reply:
        generator_id, version = field(message.fields, "generator_id", str), field(message.fields, "version", int)
        data, lineage = field(message.fields, "answer", bytes), name(message.fields, "lineage")
        if len(data) > MAX_ANSWER_BYTES:
            raise WireError(f"expected an answer of at most {MAX_ANSWER_BYTES} bytes, got {len(data)}")
        self.registry.seen(generator_id, now).answer = ProbeAnswer(lineage, version, data)
        return Reply("ok", {})

    def _on_bye(self, message: Message, now: float) -> Reply:
        generator_id = field(message.fields, "generator_id", str)
        self.buffer.goodbye(generator_id, now)
        self.registry.leave(generator_id)
        return Reply("ok", {})

    @property
    def saved_key(self) -> tuple[Any, ...]:
        """Changes when what ``save`` gives does."""
        return self.run_id, self.learner_gone, self.registry.num_changes

    def save(self) -> dict[str, Any]:
        """What a restarted server must know to answer repeated requests, as plain data."""
        granted = {
            generator_id: (request_id, [lease.lease_id for lease in answer.leases])
            for generator_id, (request_id, answer) in self.registry.granted().items()
        }
        return {"run_id": self.run_id, "granted": granted, "learner_gone": self.learner_gone}

    def load(self, plain: Mapping[str, Any], welcome: Mapping[str, Any] | None, now: float) -> None:
        """The inverse of ``save`` and ``save_welcome``, once the buffer is loaded."""
        self.run_id, self.learner_gone = plain["run_id"] or self.run_id, plain["learner_gone"]
        for generator_id, (request_id, lease_ids) in plain["granted"].items():
            leases = tuple(lease for lease_id in lease_ids if (lease := self.buffer.lease_of(lease_id)) is not None)
            if leases:
                self.registry.grant(self.registry.seen(generator_id, now), request_id, LeasesGranted(leases))
        if welcome is not None:
            files = tuple(as_array(data) for data in welcome["files"])
            self.welcome = WelcomePack(welcome["config_toml"], tuple(welcome["names"]), files)

    def save_welcome(self) -> dict[str, Any]:
        """What the learner brought for generators, as plain data."""
        pack = self.welcome
        assert pack is not None
        files = [array.tobytes() for array in pack.files]
        return {"config_toml": pack.config_toml, "names": list(pack.names), "files": files}

    @property
    def news(self) -> tuple[Announcement | None, bool]:
        """What every generator is to know: the newest version, and whether the run is over."""
        learner = self.buffer.learner
        return None if learner is None else learner.announcement, self.buffer.finished

    def notice(self, generator_id: str) -> dict[str, Any]:
        """What any message to a generator may carry: the news, and its void leases."""
        announcement, finished = self.news
        notice: dict[str, Any] = {}
        if announcement is not None:
            notice["announcement"] = announcement
        if finished:
            notice["finished"] = True
        if cancelled := self.buffer.pop_cancelled(generator_id):
            notice["cancelled"] = list(cancelled)
        return notice


def _wait_s(message: Message) -> float:
    return min(max(field(message.fields, "wait_s", float), 0.0), MAX_WAIT_S)


def _acked(acked: Acked) -> Reply:
    arrays = [as_array(acked.snapshot)] if acked.snapshot is not None else []
    return Reply("acked", {"stats": acked.stats}, arrays)


def batch_reply(groups: Sequence[TakenPayload]) -> Reply:
    """One step's groups in several messages: the learner decodes the first while the next are on their way."""
    enough = max(_MESSAGE_BYTES, sum(len(g.payload) for g in groups) // _MAX_MESSAGES)
    messages: list[Reply] = []
    first = num_bytes = 0
    for end, group in enumerate(groups, start=1):
        num_bytes += len(group.payload)
        if num_bytes >= enough or end == len(groups):
            messages.append(_batch_part(groups[first:end], first, len(groups)))
            first, num_bytes = end, 0
    return replace(messages[0], further=messages[1:])


def _batch_part(groups: Sequence[TakenPayload], first: int, num_groups: int) -> Reply:
    entries = [TakenEntry(g.prompt, g.queued_s, g.arrival_version, g.masked) for g in groups]
    more = first + len(groups) < num_groups
    fields = {"groups": entries, "first": first, "num_groups": num_groups, "more": more}
    return Reply("batch", fields, parts=[g.payload for g in groups])
