"""The learner's side of ``tcp``: starts the stream server process, and tells it who may fetch which version.

Every pull (a generator fetches a version) is a session of the server with its own token, and a key if the stream is
encrypted. When a version is published, the server computes its delta: the difference from the version before. The
newest deltas form a chain, which leads from an older version to the newest one. A member that holds a version of this
chain waits until the newest delta is ready. The oldest deltas are removed when the chain is larger than a full copy.

With peers, ``PeerTree`` chooses for every member from which generator it pulls first. Deltas come from the server, if
they are small enough for all members.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import zmq
from msgspec.structs import asdict

from async_rl.net.streams import listening_socket
from async_rl.weights import control
from async_rl.weights.peer_messages import PeerFailed, PeerOffer
from async_rl.weights.scheduler import Member
from async_rl.weights.server_process import ServerProcess
from async_rl.weights.staging import StagedVersion
from async_rl.weights.tcp.delta import element_runs
from async_rl.weights.tcp.peers import EXCLUDED_VERSIONS, PEER_PULLS, PeerPull, PeerTree
from async_rl.weights.tcp.protocol import (
    KEY_BYTES,
    TO_LEARNER,
    TOKEN_BYTES,
    Delivered,
    DeltaEncoded,
    EncodeDelta,
    EndSession,
    ForgetDelta,
    Listen,
    Listening,
    OpenSession,
    ServerMessage,
)
from async_rl.weights.transport import Delivery, PullSettings, PullStats, Send

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Session:
    """A pull in progress.

    Attributes:
        token: the token of the server's session.
        staged: the version.
        member: who pulls it.
        peer_pull: from whom, with peers.
        last_count: the newest count of its bytes. None if it is not known with which number that begins.
        pulled_bytes: bytes that count as progress.
    """

    token: bytes
    staged: StagedVersion
    member: Member
    peer_pull: PeerPull | None
    last_count: int | None
    pulled_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _DeltaLink:
    """One step of a chain of deltas. It turns the weights with digest ``base`` into those with digest ``digest``.

    The stream server keeps the deltas themselves.

    Attributes:
        base: digest of the weights before.
        digest: digest of the weights after.
        job: the number by which the stream server knows these deltas.
        sizes: bytes of each bucket's delta. -1 for a bucket that has none and is sent whole.
        size_bytes: total bytes to transfer: all deltas, and every bucket that is sent whole.
    """

    base: str
    digest: str
    job: int
    sizes: list[int]
    size_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class _DeltaJob:
    """Deltas from ``base`` to ``target`` that the server computes at present. ``number`` identifies them."""

    number: int
    base: StagedVersion
    target: StagedVersion


class StreamSender:
    """Implements ``transport.PullSender`` for ``tcp``: the learner's side, which instructs the stream server."""

    def __init__(self, settings: PullSettings) -> None:
        self._server = StreamServerProcess(settings.host, settings.poller, settings.ports)
        self.port = self._server.port
        self._is_encrypted = settings.is_encrypted
        self._has_deltas, self._on_pulled = settings.has_deltas, settings.on_pulled
        self._sessions: dict[int, _Session] = {}
        self._tree = None if settings.members is None else PeerTree(settings.members)
        self._members = {} if settings.members is None else settings.members
        self._assigned: dict[bytes, PeerPull] = {}
        self._secret = os.urandom(KEY_BYTES)
        self._chain: deque[_DeltaLink] = deque()
        self._job: _DeltaJob | None = None
        self._last_job = 0
        self._newest: StagedVersion | None = None
        self.stats = PullStats(server_starts=self._server.num_starts)

    def poll(self, ready: Mapping[Any, int]) -> None:
        """Receive one message of the stream server, if there is one, and act on it.

        Raises:
            WeightsError: the server died and can't be started again.
        """
        if not self._server.is_readable(ready):
            return
        message = self._server.receive()
        if self._server.num_starts != self.stats.server_starts:
            # Members that were pulling report a failure, and are offered another pull.
            self.stats = replace(self.stats, server_starts=self._server.num_starts)
            self._chain.clear()
            self._job = None
        elif isinstance(message, DeltaEncoded):
            self._add_link(message)
        elif isinstance(message, Delivered) and self._tree is None:
            for attempt, session in self._sessions.items():
                self._note_count(attempt, session, message.num_bytes.get(session.token, 0))

    def publish(self, staged: StagedVersion, *, has_members: bool) -> None:
        """Let the server compute the delta from the previous version to ``staged``, if deltas are in use."""
        before, self._newest = self._newest, staged
        self._job = None
        if self._tree is not None:
            self._tree.publish(staged.manifest.digest)
        if not self._has_deltas or before is None or not has_members:
            return
        self._last_job += 1
        self._job = _DeltaJob(self._last_job, before, staged)
        runs = element_runs(staged.manifest.tensors, staged.manifest.bucket_sizes)
        flat = [[number for run in bucket for number in run] for bucket in runs]
        for version in (before, staged):
            self._server.map_slot(version.slot, version.memory)
        self._server.send(EncodeDelta(self._last_job, before.slot, staged.slot, flat))

    def can_offer(self, staged: StagedVersion, member: Member) -> bool:
        """Return whether ``member`` can be offered the newest version ``staged`` now.

        It can if the server is up, the delta that is being computed would not help this member, and, with peers,
        somebody has a place for it.
        """
        if not self._server.is_up:
            return False
        if self._job is not None:
            base = self._job.base.manifest.digest
            if member.digest == base or any(link.base == member.digest for link in self._chain):
                return False
        if self._tree is None:
            return True
        digest = staged.manifest.digest
        links = self._links_from(member.digest, digest)
        if links is not None and self._are_small(links, staged):
            pull = PeerPull(member, digest, None, 0)  # it takes no place at the learner
        else:
            pull = self._tree.assign(member, digest)
        if pull is not None:
            self._assigned[member.member_id] = pull
        return pull is not None

    def deliver(self, delivery: Delivery, send: Send) -> None:
        """Open a session of the server for the one member of ``delivery``, and send ``Pull`` to that member."""
        (member,) = delivery.members
        staged = delivery.staged
        assert self._server.is_up, "a pull before the server is up"
        token = os.urandom(TOKEN_BYTES)
        key = os.urandom(KEY_BYTES) if self._is_encrypted else b""
        peer_pull = self._assigned.pop(member.member_id, None)
        is_whole = peer_pull is not None and peer_pull.depth > 0
        links = None if is_whole else self._links_from(member.digest, staged.manifest.digest)
        self._server.map_slot(staged.slot, staged.memory)
        self._server.send(OpenSession(token, staged.slot, [link.job for link in links or ()], key))
        digest = staged.manifest.digest
        peers = [] if peer_pull is None or peer_pull.source is None else [self._offer(peer_pull, peer_pull.source)]
        self._sessions[delivery.attempt] = _Session(token, staged, member, peer_pull, 0 if self._tree is None else None)
        serve_token, serve_key = (b"", b"") if self._tree is None else self._serve_secrets(member, digest)
        pull = control.Pull(
            attempt=delivery.attempt,
            transport="tcp",
            manifest=asdict(staged.manifest),
            port=self.port,
            token=token,
            key=key,
            base="" if links is None else member.digest,
            delta_sizes=[link.sizes for link in links or ()],
            deadline_s=control.seconds_until(delivery.deadline),
            peers=peers,
            serve_token=serve_token,
            serve_key=serve_key,
        )
        send(member.member_id, pull)

    def end(self, attempt: int, *, intact: bool) -> None:
        session = self._sessions.pop(attempt)
        self._server.send(EndSession(session.token))
        if self._tree is not None and (pull := session.peer_pull) is not None:
            self._tree.end(pull, is_complete=pull.member.digest == pull.digest)

    def mark_claimed(self, member: Member, pulled_bytes: int) -> None:
        for attempt, session in self._sessions.items():
            if session.member is member and self._tree is not None:
                self._note_count(attempt, session, pulled_bytes)

    def mark_peer_failed(self, member: Member, failure: PeerFailed) -> None:
        session = self._sessions.get(failure.attempt)
        pull = None if session is None else session.peer_pull
        if self._tree is None or pull is None or pull.member is not member:
            return
        source = self._tree.leave_source(pull, is_faulty=failure.is_faulty)
        if source is not None and failure.is_faulty:
            self.stats = replace(self.stats, peer_faults=self.stats.peer_faults + 1)
            logger.warning(
                "generator %s sends its weights to no other for %d versions, because generator %s reports: %s",
                source.generator[1], EXCLUDED_VERSIONS, member.generator[1], failure.reason,
            )  # fmt: skip

    def close(self, timeout_s: float) -> None:
        self._server.close()

    def _note_count(self, attempt: int, session: _Session, count: int) -> None:
        """Record a new count of the bytes that were sent. They count as progress up to twice the size of the version,
        whatever is asked for again, or said by a member.
        """
        grown = 0 if session.last_count is None else max(0, count - session.last_count)
        session.pulled_bytes = min(session.pulled_bytes + grown, 2 * session.staged.manifest.size_bytes)
        session.last_count = count
        self._on_pulled(session.member.member_id, attempt, session.pulled_bytes)

    def _are_small(self, links: Sequence[_DeltaLink], staged: StagedVersion) -> bool:
        """Return whether the learner can send these deltas to all members in about the time in which peers spread the
        whole version.
        """
        num_bytes = len(self._members) * sum(link.size_bytes for link in links)
        return num_bytes <= PEER_PULLS * staged.manifest.size_bytes

    def _offer(self, pull: PeerPull, source: Member) -> PeerOffer:
        token, key = self._serve_secrets(source, pull.digest)
        return PeerOffer(source.generator[1], source.host, source.peer_port, token, key, pull.depth)

    def _serve_secrets(self, member: Member, digest: str) -> tuple[bytes, bytes]:
        """Return the token and the key with which this member serves this version. Unencrypted: the key is empty."""
        name = member.member_id + digest.encode()
        secret = hashlib.blake2b(name, key=self._secret, digest_size=TOKEN_BYTES + KEY_BYTES).digest()
        return secret[:TOKEN_BYTES], secret[TOKEN_BYTES:] if self._is_encrypted else b""

    def _links_from(self, base: str, digest: str) -> list[_DeltaLink] | None:
        """Return the deltas that lead from the weights with digest ``base`` to those with ``digest``. None if no
        chain does.
        """
        if base and base == digest:
            return []
        links = list(self._chain)
        start = next((index for index, link in enumerate(links) if link.base == base), None)
        if start is None or links[-1].digest != digest:
            return None
        return links[start:]

    def _add_link(self, encoded: DeltaEncoded) -> None:
        """Add the computed deltas to the chain. Discard them if a newer job replaced theirs, or the memory has
        changed since.
        """
        job = self._job
        if job is None or encoded.job != job.number:
            self._server.send(ForgetDelta(encoded.job))
            return
        self._job = None
        if not encoded.sizes or not job.base.is_intact or not job.target.is_intact:
            self._server.send(ForgetDelta(encoded.job))
            return
        manifest = job.target.manifest
        base = job.base.manifest.digest
        if self._chain and self._chain[-1].digest != base:
            self._shorten(-1)
        size = sum(
            whole if delta < 0 else delta for delta, whole in zip(encoded.sizes, manifest.bucket_sizes, strict=True)
        )
        self._chain.append(_DeltaLink(base, manifest.digest, encoded.job, encoded.sizes, size))
        self._shorten(manifest.size_bytes)
        self.stats = replace(self.stats, delta_bytes=size, delta_s=encoded.elapsed_s)

    def _shorten(self, max_bytes: int) -> None:
        """Remove the oldest deltas until all deltas of the chain have at most ``max_bytes``."""
        while self._chain and sum(link.size_bytes for link in self._chain) > max_bytes:
            self._server.send(ForgetDelta(self._chain.popleft().job))


class StreamServerProcess(ServerProcess[ServerMessage]):
    """The stream server process, seen from the learner.

    Args:
        host: the address at which the server listens.
        poller: see ``ServerProcess``.
        ports: the server listens at the first of these that is free. None: any free port.

    Attributes:
        port: the port at which the server listens, the same after a restart.
    """

    def __init__(self, host: str, poller: zmq.Poller, ports: Sequence[int] | None = None) -> None:
        self._listener = listening_socket(host, ports)
        self.port: int = self._listener.getsockname()[1]
        name = f"the stream server of the weights (tcp, at {host})"
        super().__init__("async_rl.weights.tcp.server", name, TO_LEARNER, poller, self._listen)
        self.start()

    def _listen(self) -> None:
        self.send(Listen(), self._listener.fileno())

    def receive(self) -> ServerMessage | None:
        """Receive one message of the server, see ``poll``, and note if it is up."""
        message = self.poll()
        self.is_up |= isinstance(message, Listening)
        return message

    def close(self) -> None:
        super().close()
        self._listener.close()
