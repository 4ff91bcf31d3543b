"""One function for each request: it calls the queue's core with the fields of the message, and returns the reply.

A handler gets the request as its record. It returns a ``Reply``, or a ``Deferred`` if the client may wait for the
reply. The server tries a ``Deferred`` again after every change of the queue, until the request's time is over. For a
malformed or refused message the handler raises ``WireError`` or ``QueueError``, which the server sends as the reply.

This module uses no sockets.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from async_rl.config.config import Config
from async_rl.data.chat import stated_vocabulary_size
from async_rl.errors import QueueError, StorageFullError, WireError
from async_rl.net.codec import read_as
from async_rl.net.wire import SAME_VERSION, Frame, Message
from async_rl.process.package_versions import package_versions
from async_rl.process.user_code import DIGESTS_FILE
from async_rl.queue import messages
from async_rl.queue.core import generator_requests, learner_requests, persistence
from async_rl.queue.core.admission import eval_sampling
from async_rl.queue.core.generators import GrantedRecord, Owner
from async_rl.queue.core.groups import read_summary
from async_rl.queue.core.prompts import Row
from async_rl.queue.core.state import QueueState
from async_rl.queue.messages import (
    GENERATOR_REQUESTS,
    LEARNER_REQUESTS,
    REQUESTS,
    Acked,
    Announcement,
    BatchPart,
    Evaluated,
    FailedRollouts,
    LeasesGranted,
    NotReady,
    Ok,
    Taken,
    Verdict,
)
from async_rl.queue.parity import decode_answer
from async_rl.queue.storage.payloads import Payload
from async_rl.run.reuse import shared_values

logger = logging.getLogger(__name__)

MAX_WAIT_S = 60.0
"""Maximum number of seconds that a request waits for its reply. After that the client repeats it."""
_MESSAGE_BYTES = 1 << 20
_MAX_MESSAGES = 64
"""Maximum number of messages in which a batch is sent. It is well below the number that a socket queues for a peer
before it drops messages."""


MAX_ANSWER_BYTES = 32 << 10


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply: its record and its parts. The server adds ``request_id`` and the notice.

    ``further`` are more messages of the same reply. All messages but the last have ``more`` set.
    """

    record: msgspec.Struct
    parts: Sequence[Frame] = ()
    further: Sequence[Reply] = ()


@dataclass(frozen=True, slots=True)
class Deferred:
    """A reply that may come later. ``attempt(now, last)`` returns the reply, or None to wait longer.

    If ``last`` is True, ``attempt`` must return a reply. ``wait_s`` is how long the request may wait. ``is_in_vain()``
    says quickly that ``attempt`` would return None now, because an equal request got nothing.
    """

    wait_s: float
    attempt: Callable[[float, bool], Reply | None]
    is_in_vain: Callable[[], bool] = lambda: False


class WelcomePack(msgspec.Struct, frozen=True):
    """The data for generators that the learner sent when it attached: the config, and files with their names."""

    config_toml: str
    names: tuple[str, ...]
    files: tuple[bytes, ...]


class Handlers:
    """Handles all requests to the queue server.

    ``run_id`` is the run that it serves; if empty, the first learner sets it.
    """

    def __init__(self, state: QueueState, config: Config, eval_rows: Mapping[str, Sequence[Row]], run_id: str) -> None:
        self.state, self.run_id = state, run_id
        self._config, self.eval_rows = config, eval_rows
        self.welcome: WelcomePack | None = None
        self.learner_gone, self.learner_trouble = False, ""
        self._has_heard_learner = False
        """Whether the attached learner has sent a request to this process. Until then ``welcome`` may be that of a
        learner that has ended, which the journal has kept."""
        self._no_lease_at, self._no_lease_for = -1, set[tuple[str, int]]()
        """A revision of the state, and the pairs (lineage, version) for which no lease was left then, whoever asks."""

    def handle(self, message: Message, now: float) -> Reply | Deferred | None:
        """Handle a request and return the reply: ``Ok`` if its handler returns none; none to the sign of life.

        Raises:
            WireError: the message is malformed.
            QueueError: the request is refused.
        """
        record = REQUESTS.get(message.type)
        if record is None:
            raise WireError(f"expected a known type of message, got type {message.type[:40]!r}; {SAME_VERSION}")
        request = read_as(message.fields, record)
        reply = getattr(self, f"_on_{message.type}")(request, message, now)
        if reply is None and message.type != "alive":
            reply = Reply(Ok())
        if message.type in LEARNER_REQUESTS:
            self._note_learner(request.lineage)
        return reply

    def _note_learner(self, lineage: str) -> None:
        learner = self.state.learner
        if not self._has_heard_learner and learner is not None and lineage == learner.lineage:
            self._has_heard_learner = True
            self.state.revision += 1  # generators that wait for a welcome get it now

    def generator_of(self, message: Message, peer: bytes, key: str, now: float) -> str | None:
        """Return the id of the generator that sent a message; None if no generator sent it.

        Register its connection ``peer``. ``key`` is the sender's public key; empty on a server without keys.

        Raises:
            WireError: the id is malformed, or the connection belongs to another generator.
            QueueError: there are too many generators, or the id belongs to another owner.
        """
        if message.type not in GENERATOR_REQUESTS:
            return None
        generator_id = read_as(message.fields, messages.OfGenerator).generator_id
        secret = read_as(message.fields, messages.Envelope).secret
        self.state.generators.check_peer(peer, generator_id)
        try:
            entry = generator_requests.claim(self.state, generator_id, owner_of(key, secret), now)
        except QueueError as error:
            if (entry := self.state.generators.get(generator_id)) is not None and entry.num_foreign == 1:
                logger.warning("refused a %r request: %s", message.type, error)
            raise
        self.state.generators.bind(entry, peer)
        return generator_id

    # Any client.

    def _on_ping(self, request: messages.Ping, message: Message, now: float) -> Reply:
        return Reply(messages.Pong(self.run_id, self.state.learner is not None, package_versions(), time.time()))

    def _on_status(self, request: messages.GetStatus, message: Message, now: float) -> Reply:
        return Reply(messages.Status({"run_id": self.run_id, **persistence.status(self.state, now)}))

    # The learner.

    def _on_attach(self, request: messages.Attach, message: Message, now: float) -> Reply:
        num_files, parts = len(request.files), message.parts
        if self.run_id and request.run_id != self.run_id:
            raise QueueError(
                f"expected a learner of run {self.run_id}, which this queue server serves, got a learner of run "
                f"{request.run_id}; start another queue server for that run, and name it in queue.address"
            )
        if len(parts) != num_files + request.has_snapshot:
            raise WireError(
                f"malformed 'attach': expected {num_files + request.has_snapshot} parts ({num_files} files, "
                f"{int(request.has_snapshot)} snapshots), got {len(parts)}; {SAME_VERSION}"
            )
        pack = WelcomePack(request.config_toml, request.files, tuple(map(bytes, parts[:num_files])))
        vocab_size = self._vocab_size(pack)
        before = self.state.learner
        if before is not None and before.step < request.step:
            logger.warning(
                "the journal's last record is of step %d, but the learner's checkpoint of step %d: the end of the "
                "journal is lost; what it held since the checkpoint is sampled again", before.step, request.step
            )  # fmt: skip
        learner_requests.attach(
            self.state,
            lineage=request.lineage,
            parent=request.parent_lineage,
            fork_version=request.fork_version,
            step=request.step,
            num_steps=request.num_steps,
            snapshot=bytes(parts[-1]) if request.has_snapshot else None,
            now=now,
        )
        if self.state.learner is not before:
            self.state.generators.forget_granted()
        self.run_id, self.learner_gone = request.run_id, False
        self.welcome = pack
        self.state.vocab_size = vocab_size
        code = b"".join(part for name, part in zip(pack.names, pack.files, strict=True) if name == DIGESTS_FILE)
        self.state.code = hashlib.sha256(code).hexdigest()
        return Reply(messages.Attached(shared_values(self._config)))

    def _vocab_size(self, pack: WelcomePack) -> int | None:
        """Return the vocabulary's size, from the learner's ``config.json`` or the backend; None if unknown."""
        files = dict(zip(pack.names, pack.files, strict=True))
        try:
            stated = stated_vocabulary_size(files["config.json"]) if "config.json" in files else None
        except ValueError as error:
            raise WireError(
                f"model.path: the learner sent a config.json that is not valid JSON: {error}; correct config.json in "
                f"the model's folder"
            ) from error
        return stated or self._config.own_vocab_size

    def _on_alive(self, request: messages.Alive, message: Message, now: float) -> None:
        if self.state.learner is not None and self.state.learner.lineage == request.lineage:
            self.learner_trouble = request.trouble

    def _on_confirm(self, request: messages.ConfirmLineage, message: Message, now: float) -> None:
        learner_requests.confirm(self.state, request.lineage, request.announced, request.evaluations)

    def _on_bye_learner(self, request: messages.LearnerGoodbye, message: Message, now: float) -> None:
        learner = self.state.learner
        if learner is not None and learner.lineage == request.lineage:
            self.learner_gone = True

    def _on_announce(self, request: Announcement, message: Message, now: float) -> None:
        learner_requests.announce(self.state, request)

    def _on_evaluate(self, request: messages.Evaluate, message: Message, now: float) -> None:
        self.state.attached(request.lineage)
        dataset = request.dataset
        rows = self.eval_rows.get(dataset)
        if rows is None:
            raise QueueError(
                f"expected a dataset of data.eval = {sorted(self.eval_rows)}, got {dataset!r}; start queue server and "
                f"learner with the same config"
            )
        num_samples, sampling = self._config.eval.of(dataset).num_samples, eval_sampling(self._config, dataset)
        learner_requests.evaluate(
            self.state, dataset, request.step, rows, num_samples, sampling, request.min_version, request.exclusive
        )

    def _on_eval_results(self, request: messages.GetEvalResults, message: Message, now: float) -> Reply:
        results: list[Evaluated[bool]] = []
        parts: list[Payload] = []
        for result in learner_requests.eval_results(self.state, request.lineage, request.received):
            rows = tuple((prompt, payload is not None) for prompt, payload in result.groups)
            results.append(Evaluated(result.dataset, result.step, rows))
            parts += [payload for _, payload in result.groups if payload is not None]
        return Reply(messages.EvalResults(tuple(results)), parts)

    def _on_await_eval(self, request: messages.AwaitEval, message: Message, now: float) -> Deferred:
        def attempt(now: float, last: bool) -> Reply | None:
            wait = learner_requests.eval_wait(self.state, request.lineage)
            return Reply(wait) if last or wait.stop or not wait.reason else None

        return Deferred(_wait_s(message), attempt)

    def _on_take(self, request: messages.Take, message: Message, now: float) -> Deferred:
        lineage, step = request.lineage, request.step

        def attempt(now: float, last: bool) -> Reply | None:
            if not last and learner_requests.lacks_groups(self.state, lineage, step):
                return None
            answer = learner_requests.take(self.state, lineage, step, request.version, now)
            if isinstance(answer, NotReady):
                return Reply(answer) if last or answer.stop or answer.exhausted else None
            return batch_reply(answer)

        return Deferred(_wait_s(message), attempt)

    def _on_ack(self, request: messages.StepAck, message: Message, now: float) -> Reply:
        return _acked(learner_requests.ack(self.state, request, now))

    def _on_snapshot(self, request: messages.TakeSnapshot, message: Message, now: float) -> Reply:
        snapshot = learner_requests.snapshot(self.state, request.lineage, now)
        return _acked(Acked(self.state.stats(), snapshot))

    def _on_checkpoint_committed(self, request: messages.CheckpointCommitted, message: Message, now: float) -> None:
        learner_requests.checkpoint_committed(self.state, request.lineage, request.step)

    def _on_finish(self, request: messages.Finish, message: Message, now: float) -> None:
        learner_requests.finish(self.state, request.lineage, now)

    def _on_quarantine(self, request: messages.Quarantine, message: Message, now: float) -> None:
        self.state.attached(request.lineage)
        if request.reason:
            generator_requests.quarantine(self.state, request.generator_id, request.reason)
        else:
            generator_requests.lift_quarantine(self.state, request.generator_id)

    def _on_parity_answers(self, request: messages.GetProbeAnswers, message: Message, now: float) -> Reply:
        self.state.attached(request.lineage)
        answers = self.state.generators.probe_answers(request.lineage, request.since)
        return Reply(messages.ProbeAnswers(tuple(answers)), list(answers.values()))

    # Generators.

    def _on_hello(self, request: messages.Hello, message: Message, now: float) -> Deferred:
        generator_requests.hello(
            self.state, request.generator_id, request.host, request.backend, now, replaces=request.replaces
        )

        def attempt(now: float, last: bool) -> Reply | None:
            pack = self.welcome
            if pack is None or not self._has_heard_learner:
                return Reply(messages.NotYet("waits for a learner to attach")) if last else None
            return Reply(messages.WelcomeReply(self.run_id, pack.config_toml, pack.names), pack.files)

        return Deferred(_wait_s(message), attempt)

    def _on_lease(self, request: messages.LeaseRequest, message: Message, now: float) -> Reply | Deferred:
        generator_id, request_id = request.generator_id, str(message.fields.get("request_id"))
        active = (request.lineage, request.version)
        entry = generator_requests.note_seen(self.state, generator_id, now)
        # A repeated request, whose reply was lost: its leases are granted already.
        if entry.granted is not None and entry.granted[0] == request_id:
            return Reply(entry.granted[1])
        entry.active = active  # also if it is not tried now, because nothing is left

        def attempt(now: float, last: bool) -> Reply | None:
            granted = generator_requests.lease(self.state, generator_id, active, request.max_leases, now)
            generator = generator_requests.note_seen(self.state, generator_id, now)
            sent = (active, granted.activate)
            # A generator that has not yet activated the requested version must wait; else it would ask in a loop.
            is_news = granted.activate is not None and generator.sent != sent
            if not (granted.leases or is_news or last or self.state.finished):
                is_any = request.max_leases > 0 and generator_requests.may_have_leases(self.state, generator_id)
                if is_any and granted.activate is None:
                    self._note_no_lease(active)
                return None
            generator.sent = sent
            self.state.generators.grant(generator, request_id, granted)
            return Reply(granted)

        # A thousand generators may wait. After each change only the first of them looks whether a lease is left.
        return Deferred(
            _wait_s(message), attempt,
            lambda: active in self._no_lease_for and self._no_lease_at == self.state.revision,
        )  # fmt: skip

    def _note_no_lease(self, active: tuple[str, int]) -> None:
        if self._no_lease_at != self.state.revision:
            self._no_lease_at, self._no_lease_for = self.state.revision, set()
        self._no_lease_for.add(active)

    def _on_heartbeat(self, request: messages.Heartbeat, message: Message, now: float) -> Reply:
        cancelled = generator_requests.heartbeat(
            self.state, request.generator_id, request.progress, request.stats, now, request.trouble
        )
        generator = self.state.generators.get(request.generator_id)
        if generator is not None and generator.must_log_trouble(now):
            solved = "its problem with weights is solved"
            level = logging.WARNING if generator.trouble else logging.INFO
            logger.log(level, "generator %r: %s", request.generator_id, generator.trouble or solved)
        return Reply(messages.HeartbeatReply(cancelled))

    def _on_return(self, request: messages.ReturnGroups, message: Message, now: float) -> Reply:
        lease_ids, parts = request.lease_ids, message.parts
        if len(parts) != len(lease_ids):
            raise WireError(
                f"malformed 'return': expected {len(lease_ids)} parts, one encoded group for each lease, got "
                f"{len(parts)}; {SAME_VERSION}"
            )
        verdicts: dict[str, Verdict] = {}
        why: dict[str, str] = {}
        failed: dict[str, list[FailedRollouts]] = {}
        for one in request.failed:
            failed.setdefault(one.lease_id, []).append(one)
        for lease_id, payload in zip(lease_ids, parts, strict=True):
            try:
                verdicts[lease_id], reason = self._receive_group(
                    request.generator_id, lease_id, payload, now, failed.get(lease_id, ())
                )
            except StorageFullError:
                # Send no reply, so that the generator repeats the message. Groups that were stored are duplicates then.
                generator_requests.renew(self.state, request.generator_id, lease_ids, now)
                raise
            if reason:
                why[lease_id] = reason
        return Reply(messages.ReturnReply(verdicts, why))

    def _receive_group(
        self, generator_id: str, lease_id: str, payload: Frame, now: float, failed: Sequence[FailedRollouts]
    ) -> tuple[Verdict, str]:
        try:
            group = read_summary(payload)
            if group.lease_id != lease_id:
                raise WireError(
                    f"a generator returned a group for lease {lease_id!r}, but the group itself names lease "
                    f"{group.lease_id!r}; this is a bug in the generator"
                )
        except WireError as error:
            return generator_requests.refuse(self.state, generator_id, lease_id, now), str(error)
        return generator_requests.receive(self.state, generator_id, group, payload, now, failed)

    def _on_fail(self, request: messages.FailLease, message: Message, now: float) -> Reply:
        lease_id = request.lease_id
        verdict = generator_requests.fail(self.state, request.generator_id, lease_id, request.failure, now)
        return Reply(messages.ReturnReply({lease_id: verdict}, {lease_id: request.failure.detail}))

    def _on_parity(self, request: messages.AnswerProbe, message: Message, now: float) -> None:
        data = request.answer
        if len(data) > MAX_ANSWER_BYTES:
            raise WireError(
                f"expected an answer of at most {MAX_ANSWER_BYTES} bytes to the learner's probe, got {len(data)} bytes "
                f"from generator {request.generator_id!r}; {SAME_VERSION}"
            )
        # The learner must be able to read it.
        decode_answer(data)
        generator_requests.note_seen(self.state, request.generator_id, now).probe_answer = request

    def _on_bye(self, request: messages.Goodbye, message: Message, now: float) -> None:
        generator_requests.goodbye(self.state, request.generator_id, now)

    # The part that outlives the server, so that a restarted one can answer repeated requests.

    def save(self) -> dict[str, Any]:
        """Return the handlers' state as plain data for the journal.

        ``welcome``, and the replies with leases, have records of their own.
        """
        return {"run_id": self.run_id, "learner_gone": self.learner_gone}

    def load(
        self, plain: Mapping[str, Any], granted: Mapping[str, Mapping[str, Any]], welcome: Mapping[str, Any] | None
    ) -> None:
        """Restore the result of ``save``, the replies ``granted``, by generator id, and ``welcome``.

        Call it after the queue's state is loaded.
        """
        self.run_id, self.learner_gone = plain["run_id"] or self.run_id, plain["learner_gone"]
        for generator_id, fields in granted.items():
            reply = msgspec.convert(fields, GrantedRecord)
            held = (self.state.leases.get(lease_id) for lease_id in reply.lease_ids)
            leases = tuple(active.lease for active in held if active is not None)
            entry = self.state.generators.get(generator_id)
            if leases and entry is not None:
                self.state.generators.grant(entry, reply.request_id, LeasesGranted(leases))
        if welcome is not None:
            self.welcome = msgspec.convert(welcome, WelcomePack)
            self.state.vocab_size = self._vocab_size(self.welcome)

    # Notices.

    @property
    def news(self) -> tuple[Announcement | None, bool]:
        """The notice for all generators: the announced version (None before the first), and whether the run is over."""
        learner = self.state.learner
        return None if learner is None else learner.announcement, self.state.finished

    def notice(self, generator_id: str) -> dict[str, Any]:
        """Return the fields of a generator's notice: the announced version, the end of the run, its cancelled leases.

        Each cancelled lease is in one notice only.
        """
        announcement, finished = self.news
        notice: dict[str, Any] = {}
        if announcement is not None:
            notice["announcement"] = announcement
        if finished:
            notice["finished"] = True
        if cancelled := self.state.generators.pop_cancelled(generator_id):
            notice["cancelled"] = list(cancelled)
        return notice


def owner_of(key: str, secret: str) -> Owner:
    """Return the owner that a message proves by its public key or, if ``key`` is empty, by its secret."""
    if key:
        return Owner(key, has_key=True)
    # The journal must not have the secret itself.
    return Owner(hashlib.sha256(secret.encode()).hexdigest()[:32])


def _wait_s(message: Message) -> float:
    return min(max(read_as(message.fields, messages.Envelope).wait_s, 0.0), MAX_WAIT_S)


def _acked(acked: Acked) -> Reply:
    return Reply(Acked(acked.stats), [] if acked.snapshot is None else [acked.snapshot])


def batch_reply(groups: Sequence[Taken[Payload]]) -> Reply:
    """Return the reply with the groups of one step.

    It has several messages, so that the learner can decode the first early.
    """
    enough = max(_MESSAGE_BYTES, sum(len(taken.group) for taken in groups) // _MAX_MESSAGES)
    replies: list[Reply] = []
    first = num_bytes = 0
    for end, taken in enumerate(groups, start=1):
        num_bytes += len(taken.group)
        if num_bytes >= enough or end == len(groups):
            replies.append(_batch_part(groups[first:end], first, len(groups)))
            first, num_bytes = end, 0
    return replace(replies[0], further=replies[1:])


def _batch_part(groups: Sequence[Taken[Payload]], first: int, num_groups: int) -> Reply:
    more = first + len(groups) < num_groups
    headers = tuple(taken.with_group(None) for taken in groups)
    return Reply(BatchPart(headers, first, num_groups, more), [taken.group for taken in groups])
