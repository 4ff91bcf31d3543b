"""The learner's side of the weights channel: sends every version of the weights to the generators that joined.

``Publisher`` lives in learner rank 0. ``publish`` records the newest staged version and returns. A background thread
serves the control socket, asks ``SyncScheduler`` what to do next, and lets ``TransferManager`` do it. Two transports
can be in use: the collective, if the run has one, and the pull transport, which every run has. A dead or frozen
generator delays other generators by at most ``deadline_s``. It never delays the training step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from async_rl.errors import AddressError, WeightsError
from async_rl.net.address import is_loopback, refuse_open_collectives, refuse_open_stream
from async_rl.net.keys import ServerKeys
from async_rl.net.wake import Wake
from async_rl.output import size_text
from async_rl.weights import control
from async_rl.weights.channel.transfer_manager import LastTransfer, TransferManager
from async_rl.weights.channel.transports import PULL, collective_sender, obstacle, pull_sender
from async_rl.weights.collective.libraries import COLLECTIVES, TransportName
from async_rl.weights.control import MemberSocket
from async_rl.weights.peer_messages import PeerFailed
from async_rl.weights.scheduler import MAX_FAILURES, PULLED_VERSIONS, Member, SyncScheduler
from async_rl.weights.staging import StagedVersion
from async_rl.weights.transport import (
    BroadcastSender,
    CollectiveSettings,
    Delivery,
    PullSender,
    PullSettings,
    TransportSender,
)

logger = logging.getLogger(__name__)

_POLL_MS = 100
_MAX_STALL_S = 10.0
_MAX_READY_S = 5.0
_MAX_SILENT_S = 10.0
_PING_S = 0.25
_JOIN_THREAD_S = 5.0
_MAX_NAMED, _MAX_ID = 4, 100
"""Most slow members that are named, and most characters of their names."""


@dataclass(frozen=True, slots=True)
class PublisherStats:
    """Counters of the publisher: sums since its start, but for ``members``, ``outdated``, ``wanted``, ``last_*``,
    ``delta_bytes``, ``delta_s`` and ``can_collect``.

    Attributes:
        members: generators that are members of the weights channel now.
        outdated: members that do not hold the wanted version yet.
        wanted: number of the newest published version. None before the first one.
        last_transfer_s: seconds of the last transfer. A pull is measured from its offer to its end.
        last_transfer_bytes: size of the version of that transfer. With deltas fewer bytes travelled.
        last_verify_s: seconds of it that the slowest generator took to compute digests.
        attempts: number of collectives.
        pulls: number of pulls that were offered.
        pulled_bytes: bytes that pulls transferred.
        pulled_full_bytes: bytes that the same pulls would have transferred without deltas.
        peer_bytes: those of ``pulled_bytes`` that other generators sent. The learner sent the rest.
        peer_faults: how often a generator that sent weights to another one failed.
        delta_bytes: size of the newest delta.
        delta_s: seconds that the newest delta took to compute.
        failures: failed sends and failed receptions.
        corrupt: receptions whose bytes did not match their digests.
        joined: how often a generator joined.
        dropped: how often a generator lost its membership because of an error or a timeout.
        superseded: versions that a newer version replaced before every member had them.
        malformed: messages of members that could not be read.
        can_collect: the collective can send a version now.
        last_drop: why the last dropped member was dropped. Empty if there was none.
        slow: which members pull more slowly than versions come, at what rate, and what to do. Empty if none does.
    """

    members: int = 0
    outdated: int = 0
    wanted: int | None = None
    last_transfer_s: float = 0.0
    last_transfer_bytes: int = 0
    last_verify_s: float = 0.0
    attempts: int = 0
    pulls: int = 0
    pulled_bytes: int = 0
    pulled_full_bytes: int = 0
    peer_bytes: int = 0
    peer_faults: int = 0
    delta_bytes: int = 0
    delta_s: float = 0.0
    failures: int = 0
    corrupt: int = 0
    joined: int = 0
    dropped: int = 0
    superseded: int = 0
    malformed: int = 0
    can_collect: bool = False
    last_drop: str = ""
    slow: str = ""


class Publisher:
    """Sends the newest staged version to every generator that is a member of the weights channel, or becomes one.

    Args:
        host: the address at which the control socket, the stream server and the collectives listen, and at which
            generators reach them.
        deadline_s: drop a generator that has not got a version this long after its offer or its pull's progress. It may
            join again.
        insecure: the user trusts the network: allow collectives beyond loopback, and an unencrypted stream.
        keys: the learner's keys and the admitted clients of the control channel. None: no encryption, all are admitted.
        transport: sends versions to the members that can use this transport. The other members pull.
        device: rank 0's CUDA device. None if there is no CUDA device.
        chunk_bytes: largest number of bytes in one collective (gloo may use fewer), and the size of NCCL's device
            buffer.
        has_deltas: with ``tcp``, send only the difference to members that hold the previous version. None: do so
            beyond loopback.
        is_encrypted: encrypt the stream (needs ``keys``). None: do so beyond loopback if there are keys and not
            ``insecure``.
        has_peers: with ``tcp``, let generators pull from each other.
        ports: the control socket and the stream server take the first two of these that are free. None: any free ports.

    Raises:
        AddressError: the address is open to an untrusted network, or is in use.
    """

    def __init__(
        self,
        host: str,
        *,
        deadline_s: float,
        insecure: bool,
        keys: ServerKeys | None = None,
        transport: TransportName = "gloo",
        device: str | None = None,
        chunk_bytes: int = 64 << 20,
        has_deltas: bool | None = None,
        is_encrypted: bool | None = None,
        has_peers: bool = False,
        ports: Sequence[int] | None = None,
    ) -> None:
        self._collective = None if transport == PULL else COLLECTIVES[transport]
        if self._collective is not None:
            refuse_open_collectives(host, is_trusted=insecure)
        else:
            refuse_open_stream(host, has_keys=keys is not None, is_trusted=insecure)
        row = self._collective
        self._scheduler = _scheduler(deadline_s, None if row is None else row.max_ranks)
        self._published: deque[StagedVersion] = deque()
        self._own_offer = None if row is None else row.offer(device)
        self._counts: Counter[str] = Counter()
        self._last = LastTransfer()
        self._next_ping = 0.0
        self._num_removed_keys = 0
        self._changed = threading.Condition()
        self._stats = PublisherStats()
        self._error: BaseException | None = None
        self._closing = False
        self._wake = Wake()
        self._socket = MemberSocket(host, keys, ports)
        self._poller = zmq.Poller()
        self._poller.register(self._wake, zmq.POLLIN)
        self._socket.register(self._poller)
        is_local = is_loopback(host)
        collective = self._collective_sender(host, deadline_s, chunk_bytes, device)
        if is_encrypted is None:
            is_encrypted = keys is not None and not insecure and not is_local
        has_deltas = collective is None and (not is_local if has_deltas is None else has_deltas)
        members = self._scheduler.members if has_peers and collective is None else None
        self._pull = self._pull_sender(
            PullSettings(host, ports, is_encrypted, has_deltas, self._poller, self._handle_pulled, members)
        )
        self._senders: Sequence[TransportSender] = [self._pull] if collective is None else [collective, self._pull]
        self._manager = TransferManager(
            self._scheduler, collective=collective, pull=self._pull, send=self._send, counts=self._counts
        )
        self._thread = threading.Thread(target=self._run, name="weights-publish", daemon=True)
        self._thread.start()

    def _pull_sender(self, settings: PullSettings) -> PullSender:
        try:
            return pull_sender(settings)
        except AddressError:  # of the two ports, only that of the control socket is free
            self._socket.close()
            raise

    def _collective_sender(
        self, host: str, deadline_s: float, chunk_bytes: int, device: str | None
    ) -> BroadcastSender | None:
        row = self._collective
        if row is None:
            return None
        settings = CollectiveSettings(
            transport=row.name,
            host=host,
            stall_s=min(_MAX_STALL_S, deadline_s / 3),
            chunk_bytes=min(chunk_bytes, row.max_chunk_bytes or chunk_bytes),
            device=device,
            poller=self._poller,
            on_sent=self._handle_sent,
        )
        return collective_sender(settings)

    @property
    def are_all_pulled(self) -> bool:
        """Whether members pull every version (transport ``tcp``), so that each receives it at its own pace."""
        return self._collective is None

    @property
    def address(self) -> str:
        """The control socket's address and public key, as announced to generators in ``Announcement.channel``."""
        return self._socket.address

    @property
    def ports(self) -> tuple[int, int]:
        """The ports to which generators connect: of the control socket and of the stream server."""
        return self._socket.port, self._pull.port

    def publish(self, staged: StagedVersion) -> None:
        """Make ``staged`` the version that every member gets from now on. Return at once.

        The memory of the previous version may be reused when no transfer reads it any more.

        Raises:
            WeightsError: the publisher's thread has failed.
        """
        self._check()
        self._published.append(staged)
        self._wake.set()

    def wait(self, version: int, timeout_s: float, *, num_members: int = 0) -> bool:
        """Wait until every member holds ``version`` or a newer one, and at least ``num_members`` generators are
        members.

        Return whether that happened within ``timeout_s``.

        Raises:
            WeightsError: the publisher's thread has failed.
        """

        def is_held() -> bool:
            stats = self._stats
            held = stats.wanted is not None and stats.wanted >= version and not stats.outdated
            return self._error is not None or (held and stats.members >= num_members)

        with self._changed:
            done = self._changed.wait_for(is_held, timeout_s)
        self._check()
        return done

    def wait_for_collective(self, timeout_s: float) -> bool:
        """Wait until versions can be sent by the collective. Return whether that is so within ``timeout_s``.

        Until then all members pull. A run need not wait; a program that measures does.
        """
        with self._changed:
            # Not the statistics, which lag: a broadcaster that was just ended would still count.
            return self._changed.wait_for(lambda: self._manager.can_collect, timeout_s)

    def stats(self) -> PublisherStats:
        """Return the counters. The publisher's thread updates them in every turn of its loop."""
        return self._stats

    def close(self) -> None:
        """Stop the publisher's thread and close its sockets. Transfers in progress are abandoned."""
        self._closing = True
        self._wake.set()
        self._thread.join(_JOIN_THREAD_S)

    def _check(self) -> None:
        if self._error is not None:
            raise WeightsError(
                f"the thread that sends weights to generators has failed: {self._error!r}; if "
                f"this error does not name a cause outside async-rl, please report it"
            ) from self._error

    # Everything below runs in the publisher's thread.

    def _run(self) -> None:
        try:
            while not self._closing:
                self._take_turn(dict(self._poller.poll(_POLL_MS)))
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            self._manager.close(_JOIN_THREAD_S)
            self._socket.close()

    def _take_turn(self, ready: Mapping[Any, int]) -> None:
        self._wake.clear()
        while self._published:
            self._manager.publish(self._published.popleft())
        for member_id, key, message in self._socket.receive():
            self._handle(member_id, key, message)
        self._drop_removed()
        for sender in self._senders:
            sender.poll(ready)
        # Do this before further actions, to wake first a thread that waits for a version.
        self._update_stats()
        self._ping_awaited()
        self._manager.act()
        self._update_stats()

    def _drop_removed(self) -> None:
        """Drop the members whose key was removed, which also ends their pulls."""
        if self._socket.num_removed_keys == self._num_removed_keys:
            return
        self._num_removed_keys = self._socket.num_removed_keys
        for member_id, member in list(self._scheduler.members.items()):
            key, generator_id = member.generator
            if not self._socket.admits(key):
                logger.warning("generator %s gets no more weights, because its key was removed", generator_id)
                self._scheduler.drop(member_id, "its key was removed from the list of admitted clients")

    def _handle(self, member_id: bytes, key: str, message: control.MemberMessage) -> None:
        now = time.monotonic()
        if isinstance(message, control.Join):
            self._join(member_id, (key, message.generator_id), message, now)
            return
        if not self._scheduler.mark_seen(member_id, now):
            if not isinstance(message, control.Leave):
                self._send(member_id, control.NotMember())
            return
        match message:
            case control.Heartbeat(pulled_bytes):
                self._pull.mark_claimed(self._scheduler.members[member_id], pulled_bytes)
                self._send(member_id, control.Ping())
            case control.Leave():
                self._scheduler.leave(member_id)
            case control.Ready(attempt):
                self._scheduler.mark_ready(member_id, attempt)
            case control.Ack():
                self._handle_ack(member_id, message)
            case control.Failed(attempt, reason, corrupt):
                self._counts["corrupt"] += corrupt
                self._mark_failed(member_id, attempt, reason)
            case PeerFailed():
                self._pull.mark_peer_failed(self._scheduler.members[member_id], message)

    def _join(self, member_id: bytes, generator: tuple[str, str], join: control.Join, now: float) -> None:
        """Add the generator to the members. If it can't take part in the run's collective, log why."""
        own, why, devices = self._own_offer, "", []
        if own is not None:
            others = [member for member in self._scheduler.members.values() if member.generator != generator]
            why = obstacle(own, join.collectives, {device for member in others for device in member.devices})
            devices = [device for offer in join.collectives if offer.name == own.name for device in offer.devices]
        if why:
            logger.info("generator %s gets weights by %s: %s", join.generator_id, PULL, why)
        can_collect = own is not None and not why
        self._scheduler.join(
            member_id,
            generator,
            now,
            can_collect=can_collect,
            num_ranks=max(1, join.num_ranks),
            devices=devices if can_collect else (),
            digest=join.digest,
            host=join.host,
            peer_port=join.peer_port,
        )
        self._counts["joined"] += 1
        self._send(member_id, control.Ping())

    def _handle_ack(self, member_id: bytes, ack: control.Ack) -> None:
        staged = self._manager.version_of(ack.attempt)
        manifest = None if staged is None else staged.manifest
        if manifest is not None and manifest.version == ack.version and manifest.digest != ack.digest:
            self._counts["corrupt"] += 1
            reason = f"expected digest {manifest.digest} of version {ack.version}, got {ack.digest}"
            self._mark_failed(member_id, ack.attempt, reason)
            return
        self._counts["corrupt"] += ack.num_corrupt
        self._last.verified(ack)
        pulled_s = self._manager.pulled_for(ack.attempt)
        if pulled_s is not None and manifest is not None:
            self._last.end(manifest, pulled_s)
            self._counts["pulled_bytes"] += ack.wire_bytes
            self._counts["pulled_full_bytes"] += manifest.size_bytes
            self._counts["peer_bytes"] += ack.peer_bytes
        self._scheduler.ack(member_id, ack.attempt, ack.version, ack.digest)

    def _mark_failed(self, member_id: bytes, attempt: int, reason: str) -> None:
        self._counts["failures"] += 1
        self._miss(member_id, attempt, reason)

    def _miss(self, member_id: bytes, attempt: int, reason: str) -> None:
        """Record that the member has not got the attempt's version. Warn if it takes part in no broadcast for long."""
        if self._scheduler.mark_failed(member_id, attempt, reason):
            logger.warning(
                "generator %s missed %d broadcasts of weights in a row, the last one because: %s. It gets the next %d "
                'versions by tcp; if this repeats, set weights.transport = "tcp"',
                self._scheduler.members[member_id].generator[1], MAX_FAILURES, reason, PULLED_VERSIONS,
            )  # fmt: skip

    def _handle_pulled(self, member_id: bytes, attempt: int, num_bytes: int) -> None:
        self._scheduler.mark_pulled(member_id, attempt, num_bytes, time.monotonic())

    def _handle_sent(self, delivery: Delivery, elapsed_s: float, error: str, are_told: bool) -> None:
        if error:
            self._counts["failures"] += 1
            self._next_ping = 0.0
            logger.info("version %d was not broadcast: %s", delivery.staged.manifest.version, error)
        else:
            self._last.end(delivery.staged.manifest, elapsed_s)
        self._scheduler.mark_sent(delivery.attempt, ok=not error)
        if not are_told:
            # They don't know of this attempt and will never answer, so they pull.
            for member in delivery.members:
                self._miss(member.member_id, delivery.attempt, error)

    def _ping_awaited(self) -> None:
        """Send ``Ping`` to every member that must still answer. If a member's connection is gone, this send fails at
        once.
        """
        now = time.monotonic()
        if now >= self._next_ping:
            self._next_ping = now + _PING_S
            for member_id in self._scheduler.awaited:
                self._send(member_id, control.Ping())

    def _send(self, member_id: bytes, message: control.PublisherMessage) -> None:
        if not self._socket.send(member_id, message) and member_id in self._scheduler.members:
            self._counts["dropped"] += 1
            self._manager.last_drop = "its connection is gone"
            self._scheduler.leave(member_id)

    def _update_stats(self) -> None:
        """Copy the counters into ``_stats``, which other threads read."""
        pull = self._pull.stats
        stats = PublisherStats(
            members=len(self._scheduler.members),
            outdated=len(self._scheduler.outdated()),
            wanted=self._scheduler.wanted,
            last_transfer_s=self._last.transfer_s,
            last_transfer_bytes=self._last.size_bytes,
            last_verify_s=self._last.verify_s,
            last_drop=self._manager.last_drop,
            malformed=self._socket.num_malformed,
            delta_bytes=pull.delta_bytes,
            delta_s=pull.delta_s,
            peer_faults=pull.peer_faults,
            can_collect=self._manager.can_collect,
            slow=_slow_text(self._scheduler.slow(time.monotonic())),
            **self._counts,
        )
        if stats != self._stats:
            with self._changed:
                self._stats = stats
                self._changed.notify_all()


def _slow_text(members: Sequence[tuple[Member, float]]) -> str:
    """Return for people which members got no whole version for how many seconds, and at what rate. Empty: none."""
    texts = [
        f"generator {m.generator[1][:_MAX_ID]} got {size_text((m.lost_bytes + m.pulled_bytes) / seconds)}/s for "
        f"{seconds:.0f} s and no whole version"
        for m, seconds in members[:_MAX_NAMED]
    ]
    texts += [f"{len(members) - _MAX_NAMED} others, too"] if len(members) > _MAX_NAMED else []
    remedy = "check their network, or raise weights.sync_every, or weights.staging_bytes by a version for each pace"
    return f"pulls of weights are slower than versions come: {'; '.join(texts)}; {remedy}" if texts else ""


def _scheduler(deadline_s: float, max_ranks: int | None) -> SyncScheduler:
    return SyncScheduler(
        deadline_s=deadline_s,
        ready_s=min(_MAX_READY_S, deadline_s / 4),
        silent_s=min(_MAX_SILENT_S, deadline_s / 2),
        max_ranks=max_ranks,
    )
