"""The learner's side of the weights channel: who listens, and what is sent to whom.

``Publisher`` lives in learner rank 0. ``publish`` only notes the newest staged version; a background thread serves the
control socket, drives ``Rounds`` and does what it says over the run's transports: the collective (if it has one), and
the stream, which every run has. A dead or frozen generator costs the others at most ``deadline_s``, and the training
step nothing.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from async_rl.errors import AddressError, WeightsError
from async_rl.net.address import is_loopback, refuse_open_collectives, refuse_open_stream
from async_rl.net.keys import ServerKeys
from async_rl.weights import control
from async_rl.weights.background import Wake
from async_rl.weights.collective.sender import CollectiveSender
from async_rl.weights.deliveries import Deliveries
from async_rl.weights.member_socket import WILDCARDS, MemberSocket
from async_rl.weights.scheduler import Rounds
from async_rl.weights.staging import StagedVersion
from async_rl.weights.tcp.sender import StreamSender
from async_rl.weights.transport import Delivery, TransportName

_POLL_MS = 100
_MAX_STALL_S = 10.0
_MAX_READY_S = 5.0
_MAX_SILENT_S = 10.0
_GLOO_CHUNK_BYTES = 8 << 20
"""Each is digested while the next one travels; smaller ones cost more to agree upon than that spares."""
_FRESH_S = 1.5 * control.HEARTBEAT_S
_PROBE_S = 0.25
_JOIN_THREAD_S = 5.0


@dataclass(frozen=True, slots=True)
class PublisherStats:
    """Cumulative, except ``members``, ``lacking`` and ``last_transfer_s``.

    ``transfer_s`` is the time spent in collectives, ``sent_bytes`` counts a broadcast once, whatever its audience.
    ``pulled_bytes`` went through the stream where full copies would have been ``pulled_full_bytes``; ``delta_bytes``
    and ``delta_s`` are of the newest delta. ``last_transfer_s`` is of the last collective, or of the last pull from
    its offer to its end. ``superseded`` versions were replaced by a newer one before every member had them.
    """

    members: int = 0
    lacking: int = 0
    wanted: int | None = None
    transfer_s: float = 0.0
    last_transfer_s: float = 0.0
    sent_bytes: int = 0
    attempts: int = 0
    pulls: int = 0
    pulled_bytes: int = 0
    pulled_full_bytes: int = 0
    delta_bytes: int = 0
    delta_s: float = 0.0
    server_starts: int = 0
    failures: int = 0
    corrupt: int = 0
    joined: int = 0
    dropped: int = 0
    superseded: int = 0
    malformed: int = 0
    last_drop: str = ""


_COUNTED = (
    "sent_bytes", "attempts", "pulls", "pulled_bytes", "pulled_full_bytes", "failures", "corrupt", "joined", "dropped",
    "superseded",
)  # fmt: skip


class Publisher:
    """Sends the newest staged version to every receiver that joined, and to those that join later.

    Args:
        bind_host: where the control socket, the stream, the store and the collectives listen.
        advertise_host: the name under which generators reach ``bind_host``; needed where that is a wildcard.
        deadline_s: a generator that has no version so long after it was told of one is dropped (it may join again).
        insecure: the network is trusted: allow collectives beyond loopback, and the stream in the clear.
        keys: of the control channel, which then lets in listed clients only; none: it is not encrypted.
        transport: ``tcp``, ``gloo``, or ``nccl`` where learner and generators have CUDA devices of their own.
        device: rank 0's CUDA device, for ``nccl``.
        chunk_bytes: bytes of one collective, at most (gloo's are smaller); also the device buffer of ``nccl``.
        has_deltas: with ``tcp``, send differences to who holds the version before; None: beyond loopback.
        is_sealed: encrypt the stream (needs ``keys``); None: beyond loopback with keys, unless ``insecure``.

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
        transport: TransportName = "gloo",
        device: str | None = None,
        chunk_bytes: int = 64 << 20,
        has_deltas: bool | None = None,
        is_sealed: bool | None = None,
    ) -> None:
        host = advertise_host or bind_host
        if host in WILDCARDS:
            raise AddressError(f"{bind_host!r} is no address that generators could connect to; pass one to advertise")
        is_local = is_loopback(bind_host)
        if transport == "tcp":
            refuse_open_stream(bind_host, has_keys=keys is not None, is_trusted=insecure)
        else:
            refuse_open_collectives(bind_host, is_trusted=insecure)
        self._transport: TransportName = transport
        self._rounds = Rounds(
            deadline_s=deadline_s,
            ready_s=min(_MAX_READY_S, deadline_s / 4),
            silent_s=min(_MAX_SILENT_S, deadline_s / 2),
            fresh_s=_FRESH_S,
        )
        self._published: deque[StagedVersion] = deque()
        self._results: deque[Callable[[], None]] = deque()
        self._counts: Counter[str] = Counter()
        self._transfer_s = 0.0
        self._last_transfer_s = 0.0
        self._next_probe = 0.0
        self._changed = threading.Condition()
        self._stats = PublisherStats()
        self._error: BaseException | None = None
        self._closing = False
        self._wake = Wake()
        self._context = zmq.Context()
        self._socket = MemberSocket(self._context, bind_host, host, keys)
        listen_host = "0.0.0.0" if bind_host == "*" else bind_host
        self._stream = StreamSender(
            listen_host,
            is_sealed=keys is not None and not insecure and not is_local if is_sealed is None else is_sealed,
            has_deltas=transport == "tcp" and (not is_local if has_deltas is None else has_deltas),
        )
        collective = None
        if transport != "tcp":
            local_host = host if bind_host in WILDCARDS else bind_host
            collective = self._collective_sender(transport, listen_host, local_host, deadline_s, chunk_bytes, device)
        self._deliveries = Deliveries(
            self._rounds,
            collective=collective,
            stream=self._stream,
            tell=self._tell,
            counts=self._counts,
        )
        self._thread = threading.Thread(target=self._run, name="weights-publish", daemon=True)
        self._thread.start()

    def _collective_sender(
        self, transport: str, listen_host: str, local_host: str, deadline_s: float, chunk_bytes: int,
        device: str | None,
    ) -> CollectiveSender:  # fmt: skip
        return CollectiveSender(
            transport,
            bind_host=listen_host,
            local_host=local_host,
            stall_s=min(_MAX_STALL_S, deadline_s / 3),
            chunk_bytes=chunk_bytes if transport == "nccl" else min(chunk_bytes, _GLOO_CHUNK_BYTES),
            device=device,
            done=self._collective_done,
        )

    @property
    def transport(self) -> TransportName:
        """By which versions travel, but for what the stream has to make up for."""
        return self._transport

    @property
    def address(self) -> str:
        """What goes into ``Announcement.channel``."""
        return self._socket.address

    def publish(self, staged: StagedVersion) -> None:
        """Make this the version that everyone shall have. Returns at once; the version before is retired.

        Raises:
            WeightsError: the publisher has failed.
        """
        self._check()
        self._published.append(staged)
        self._wake.set()

    def wait(self, version: int, timeout_s: float, *, num_members: int = 0) -> bool:
        """Whether, within ``timeout_s``, every member held ``version`` or a newer one, and at least ``num_members``.

        Raises:
            WeightsError: the publisher has failed.
        """

        def arrived() -> bool:
            wanted = self._stats.wanted
            held = wanted is not None and wanted >= version and not self._stats.lacking
            return self._error is not None or (held and self._stats.members >= num_members)

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

    # Everything below runs in the publisher's thread.

    def _run(self) -> None:
        poller = zmq.Poller()
        self._socket.register(poller)
        poller.register(self._wake, zmq.POLLIN)
        try:
            while not self._closing:
                # Anew in every turn: a server that was started again has another descriptor.
                server = self._stream.fileno()
                poller.register(server, zmq.POLLIN)
                ready = dict(poller.poll(_POLL_MS))
                poller.unregister(server)
                self._wake.clear()
                if server in ready:
                    self._stream.poll()
                while self._published:
                    self._deliveries.publish(self._published.popleft())
                while self._results:
                    self._results.popleft()()
                if self._socket.is_among(ready):
                    for member_id, message in self._socket.receive():
                        self._handle(member_id, message)
                # Who waits for a version shall not wait for what there is to do next.
                self._note()
                self._probe()
                self._deliveries.act()
                self._note()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            self._deliveries.close(_JOIN_THREAD_S)
            self._socket.close()
            self._context.term()

    def _handle(self, member_id: bytes, message: control.MemberMessage) -> None:
        now = time.monotonic()
        if isinstance(message, control.Join):
            collects = self._transport in message.collectives
            self._rounds.join(member_id, message.generator_id, now, collects=collects, digest=message.digest)
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
            case control.Ack():
                self._ack(member_id, message)
            case control.Failed(attempt, reason, corrupt):
                self._counts["corrupt"] += corrupt
                self._fail(member_id, attempt, reason)

    def _ack(self, member_id: bytes, ack: control.Ack) -> None:
        staged = self._deliveries.version_of(ack.attempt)
        manifest = None if staged is None else staged.manifest
        if manifest is not None and manifest.version == ack.version and manifest.digest != ack.digest:
            self._counts["corrupt"] += 1
            reason = f"expected digest {manifest.digest} of version {ack.version}, got {ack.digest}"
            self._fail(member_id, ack.attempt, reason)
            return
        self._counts["corrupt"] += ack.num_corrupt
        pulled_s = self._deliveries.pulled_for(ack.attempt)
        if pulled_s is not None and manifest is not None:
            self._last_transfer_s = pulled_s
            self._counts["pulled_bytes"] += ack.wire_bytes
            self._counts["pulled_full_bytes"] += manifest.size_bytes
        self._rounds.ack(member_id, ack.attempt, ack.version, ack.digest)

    def _fail(self, member_id: bytes, attempt: int, reason: str) -> None:
        self._counts["failures"] += 1
        self._rounds.failed(member_id, attempt, reason)

    def _collective_done(self, delivery: Delivery, elapsed_s: float, error: Exception | None) -> None:
        """In the sender's thread."""
        self._results.append(lambda: self._sent(delivery, elapsed_s, error))
        self._wake.set()

    def _sent(self, delivery: Delivery, elapsed_s: float, error: Exception | None) -> None:
        self._transfer_s += elapsed_s
        self._last_transfer_s = elapsed_s
        if error is None:
            self._counts["sent_bytes"] += delivery.staged.manifest.size_bytes
        else:
            self._counts["failures"] += 1
            self._next_probe = 0.0
        self._rounds.sent(delivery.attempt, ok=error is None)

    def _probe(self) -> None:
        """Say something to those whose answer is awaited: a send to one whose connection is gone fails at once."""
        now = time.monotonic()
        if now >= self._next_probe:
            self._next_probe = now + _PROBE_S
            for member_id in self._rounds.awaited:
                self._tell(member_id, control.Check())

    def _tell(self, member_id: bytes, message: control.PublisherMessage) -> None:
        if not self._socket.tell(member_id, message) and member_id in self._rounds.members:
            self._counts["dropped"] += 1
            self._deliveries.last_drop = "its connection is gone"
            self._rounds.leave(member_id)

    def _note(self) -> None:
        """For other threads."""
        stream = self._stream.stats()
        stats = PublisherStats(
            members=len(self._rounds.members),
            lacking=len(self._rounds.lacking()),
            wanted=self._rounds.wanted,
            transfer_s=self._transfer_s,
            last_transfer_s=self._last_transfer_s,
            last_drop=self._deliveries.last_drop,
            malformed=self._socket.num_malformed,
            delta_bytes=stream.delta_bytes,
            delta_s=stream.delta_s,
            server_starts=stream.server_starts,
            **{name: self._counts[name] for name in _COUNTED},
        )
        if stats != self._stats:
            with self._changed:
                self._stats = stats
                self._changed.notify_all()
