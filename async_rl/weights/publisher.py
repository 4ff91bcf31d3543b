"""The learner's side of the weights channel: who listens, and what is sent to whom.

``Publisher`` lives in learner rank 0. ``publish`` only notes the newest staged version; one background thread serves
the control socket and drives ``Rounds``, another runs the collectives. A dead or frozen generator costs the others at
most ``deadline_s``, and the training step nothing.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from async_rl.address import refuse_open_collectives
from async_rl.errors import AddressError, WeightsError, WireError
from async_rl.keys import Guard, ServerKeys
from async_rl.weights import control
from async_rl.weights.background import Wake
from async_rl.weights.manifest import manifest_fields
from async_rl.weights.rounds import DropAction, EnterAction, FinishAction, GoAction, Rounds
from async_rl.weights.sender import Sender
from async_rl.weights.staging import StagedVersion

_WILDCARDS = ("*", "0.0.0.0", "::")
_POLL_MS = 100
_MAX_STALL_S = 10.0
_MAX_READY_S = 5.0
_MAX_SILENT_S = 10.0
_RETRY_S = 2.0
_PROBE_S = 0.25
_JOIN_THREAD_S = 5.0


@dataclass(frozen=True, slots=True)
class PublisherStats:
    """Cumulative, except ``members``, ``lacking`` and ``last_transfer_s``.

    ``transfer_s`` is the time spent in collectives, ``sent_bytes`` counts a broadcast once, whatever its audience.
    ``superseded`` versions were replaced by a newer one before every member had them.
    """

    members: int = 0
    lacking: int = 0
    wanted: int | None = None
    transfer_s: float = 0.0
    last_transfer_s: float = 0.0
    sent_bytes: int = 0
    attempts: int = 0
    failures: int = 0
    corrupt: int = 0
    joined: int = 0
    dropped: int = 0
    superseded: int = 0
    malformed: int = 0
    last_drop: str = ""


class Publisher:
    """Sends the newest staged version to every receiver that joined, and to those that join later.

    Args:
        bind_host: where the control socket, the store and the collectives listen.
        advertise_host: the name under which generators reach ``bind_host``; needed where that is a wildcard.
        deadline_s: a generator that has no version so long after it was told of one is dropped (it may join again).
        insecure: allow to listen beyond loopback (collectives authenticate nobody, with keys or without).
        keys: of the control channel, which then lets in listed clients only; none: it is not encrypted.
        transport: ``gloo``, or ``nccl`` where learner and generators have CUDA devices of their own.
        device: rank 0's CUDA device, for ``nccl``.
        chunk_bytes: bytes of one collective; also the device buffer of ``nccl``.

    Raises:
        AddressError: the address is open to a network, busy, or can't be advertised.
    """

    def __init__(
        self,
        bind_host: str,
        *,
        deadline_s: float,
        insecure: bool,
        keys: ServerKeys | None = None,
        advertise_host: str | None = None,
        transport: str = "gloo",
        device: str | None = None,
        chunk_bytes: int = 64 << 20,
    ) -> None:
        self._bind_host = bind_host
        self._host = advertise_host or bind_host
        if self._host in _WILDCARDS:
            raise AddressError(f"{bind_host!r} is no address that generators could connect to; pass one to advertise")
        refuse_open_collectives(bind_host, is_trusted=insecure)
        self._deadline_s = deadline_s
        self._stall_s = min(_MAX_STALL_S, deadline_s / 3)
        self._transport = transport
        self._chunk_bytes = chunk_bytes
        self._rounds = Rounds(
            deadline_s=deadline_s,
            ready_s=min(_MAX_READY_S, deadline_s / 4),
            silent_s=min(_MAX_SILENT_S, deadline_s / 2),
        )
        self._published: deque[StagedVersion] = deque()
        self._results: deque[Callable[[], None]] = deque()
        self._newest: StagedVersion | None = None
        self._pinned: StagedVersion | None = None
        self._counts: Counter[str] = Counter()
        self._transfer_s = 0.0
        self._last_transfer_s = 0.0
        self._last_drop = ""
        self._next_probe = 0.0
        self._changed = threading.Condition()
        self._stats = PublisherStats()
        self._holders = 0
        self._error: BaseException | None = None
        self._closing = False
        self._wake = Wake()
        self._context = zmq.Context()
        self._guard: Guard | None = None
        self._socket = self._bind(keys)
        self._sender = Sender(
            transport,
            bind_host="0.0.0.0" if bind_host == "*" else bind_host,
            local_host=self._host if bind_host in _WILDCARDS else bind_host,
            stall_s=self._stall_s,
            chunk_bytes=chunk_bytes,
            device=device,
        )
        self._thread = threading.Thread(target=self._run, name="weights-publish", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """What goes into ``Announcement.channel``."""
        return self._address

    def publish(self, staged: StagedVersion) -> None:
        """Make this the version that everyone shall have. Returns at once; the version before is retired.

        Raises:
            WeightsError: the publisher's thread has failed.
        """
        self._check()
        self._published.append(staged)
        self._wake.set()

    def wait(self, version: int, timeout_s: float, *, num_members: int = 0) -> bool:
        """Whether, within ``timeout_s``, every member held ``version`` or a newer one, and at least ``num_members``.

        Raises:
            WeightsError: the publisher's thread has failed.
        """

        def arrived() -> bool:
            wanted = self._stats.wanted
            held = wanted is not None and wanted >= version and not self._stats.lacking
            return self._error is not None or (held and self._holders >= num_members)

        with self._changed:
            done = self._changed.wait_for(arrived, timeout_s)
        self._check()
        return done

    def stats(self) -> PublisherStats:
        """Counters as of a moment ago."""
        return self._stats

    def close(self) -> None:
        """Stop serving. A transfer under way is given up."""
        self._closing = True
        self._wake.set()
        self._thread.join(_JOIN_THREAD_S)

    def _check(self) -> None:
        if self._error is not None:
            raise WeightsError(f"the weights publisher has failed: {self._error!r}") from self._error

    def _bind(self, keys: ServerKeys | None) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        if keys is not None:
            self._guard = keys.guard(socket, self._context)
        socket.linger = 0
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, control.TO_PUBLISHER_LIMITS.max_bytes)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        socket.setsockopt(zmq.IPV6, int(":" in self._bind_host))
        try:
            port = socket.bind_to_random_port(f"tcp://{_url_host(self._bind_host)}")
        except zmq.ZMQError as error:
            raise AddressError(f"can't listen for weights at {self._bind_host}: {error}") from error
        self._address = control.channel(f"tcp://{_url_host(self._host)}:{port}", keys.public if keys else None)
        return socket

    # Everything below runs in the publisher's thread.

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        try:
            while not self._closing:
                poller.poll(_POLL_MS)
                self._wake.clear()
                self._take_published()
                while self._results:
                    self._results.popleft()()
                self._receive()
                self._probe()
                self._act()
                self._note()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            if self._pinned is not None and not self._rounds.sending:
                self._pinned.unpin()
            self._sender.close(_JOIN_THREAD_S)
            self._socket.close()
            if self._guard is not None:
                self._guard.stop()
            self._context.term()

    def _take_published(self) -> None:
        while self._published:
            staged = self._published.popleft()
            if self._newest is not None:
                self._counts["superseded"] += bool(self._rounds.lacking())
                self._newest.retire()
            self._newest = staged
            self._rounds.publish(staged.manifest.version)

    def _receive(self) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(frames) != 2:
                    raise WireError(f"expected 2 frames, got {len(frames)}")
                message = control.decode_message(frames[1], control.TO_PUBLISHER, control.TO_PUBLISHER_LIMITS)
            except WireError:
                self._counts["malformed"] += 1
                continue
            self._handle(frames[0], message)

    def _handle(self, member_id: bytes, message: control.MemberMessage) -> None:
        now = time.monotonic()
        if isinstance(message, control.Join):
            self._rounds.join(member_id, message.generator_id, now)
            self._counts["joined"] += 1
            self._tell(member_id, control.Check())
            return
        if not self._rounds.heard(member_id, now):
            if not isinstance(message, control.Leave):
                self._tell(member_id, control.Unknown())
            return
        match message:
            case control.Alive():
                self._tell(member_id, control.Check())
            case control.Leave():
                self._rounds.leave(member_id)
            case control.Ready(attempt):
                self._rounds.ready(member_id, attempt)
            case control.Ack(attempt, version, digest):
                self._ack(member_id, attempt, version, digest)
            case control.Failed(attempt, reason, corrupt):
                self._counts["corrupt"] += corrupt
                self._fail(member_id, attempt, reason)

    def _ack(self, member_id: bytes, attempt: int, version: int, digest: str) -> None:
        newest = self._newest.manifest if self._newest is not None else None
        if newest is not None and newest.version == version and newest.digest != digest:
            self._counts["corrupt"] += 1
            self._fail(member_id, attempt, f"expected digest {newest.digest} of version {version}, got {digest}")
            return
        self._rounds.ack(member_id, attempt, version)

    def _fail(self, member_id: bytes, attempt: int, reason: str) -> None:
        self._counts["failures"] += 1
        self._rounds.failed(member_id, attempt, reason)

    def _act(self) -> None:
        while actions := self._rounds.advance(time.monotonic()):
            for action in actions:
                match action:
                    case EnterAction():
                        self._enter(action)
                    case GoAction():
                        self._go(action)
                    case FinishAction():
                        self._finish(action)
                    case DropAction(member_id, reason):
                        self._counts["dropped"] += 1
                        self._last_drop = reason
                        self._tell(member_id, control.Dropped(reason, _RETRY_S))

    def _enter(self, action: EnterAction) -> None:
        staged = self._newest
        assert staged is not None
        if action.first:
            if not staged.pin():
                # Its buffer went to a newer version, which is published in a moment.
                self._rounds.publish(None)
                return
            self._pinned = staged
        message = control.Enter(action.attempt, self._transport, manifest_fields(staged.manifest))
        for member_id in action.member_ids:
            self._tell(member_id, message)

    def _go(self, action: GoAction) -> None:
        staged = self._pinned
        assert staged is not None
        port = self._sender.listen() if action.build else 0
        size = len(action.participants) + 1
        remaining_s = max(0.0, action.deadline - time.monotonic())
        for rank, member_id in enumerate(action.participants, start=1):
            go = control.Go(
                action.attempt, action.epoch, rank, size, port, self._stall_s, remaining_s, self._chunk_bytes
            )
            self._tell(member_id, go)
        self._counts["attempts"] += 1

        def done(elapsed_s: float, error: Exception | None) -> None:
            self._results.append(lambda: self._sent(action, staged, elapsed_s, error))
            self._wake.set()

        self._sender.send(staged.buckets, size=size, deadline=action.deadline, done=done)

    def _sent(self, action: GoAction, staged: StagedVersion, elapsed_s: float, error: Exception | None) -> None:
        self._transfer_s += elapsed_s
        self._last_transfer_s = elapsed_s
        if error is None:
            self._counts["sent_bytes"] += staged.manifest.size_bytes
        else:
            self._counts["failures"] += 1
            self._next_probe = 0.0
        self._rounds.sent(action.attempt, ok=error is None)

    def _finish(self, action: FinishAction) -> None:
        if not action.intact:
            self._sender.disconnect()
        if self._pinned is not None:
            self._pinned.unpin()
            self._pinned = None

    def _probe(self) -> None:
        """Say something to those whose answer is awaited: a send to one whose connection is gone fails at once."""
        now = time.monotonic()
        if now >= self._next_probe:
            self._next_probe = now + _PROBE_S
            for member_id in self._rounds.awaited:
                self._tell(member_id, control.Check())

    def _tell(self, member_id: bytes, message: control.PublisherMessage) -> None:
        try:
            self._socket.send_multipart([member_id, control.encode_message(message)], zmq.NOBLOCK)
        except zmq.Again:
            self._counts["unsent"] += 1  # It does not read; its silence will drop it.
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            if member_id in self._rounds.members:
                self._counts["dropped"] += 1
                self._last_drop = "its connection is gone"
                self._rounds.leave(member_id)

    def _note(self) -> None:
        lacking = len(self._rounds.lacking())
        if self._newest is not None:
            self._newest.mark_delivered(lacking == 0)
        counts = {name: self._counts[name] for name in _COUNTED}
        stats = PublisherStats(
            members=len(self._rounds.members),
            lacking=lacking,
            wanted=self._rounds.wanted,
            transfer_s=self._transfer_s,
            last_transfer_s=self._last_transfer_s,
            last_drop=self._last_drop,
            **counts,
        )
        with self._changed:
            if stats != self._stats:
                self._stats = stats
                self._holders = stats.members - lacking
                self._changed.notify_all()


_COUNTED = ("sent_bytes", "attempts", "failures", "corrupt", "joined", "dropped", "superseded", "malformed")


def _url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
