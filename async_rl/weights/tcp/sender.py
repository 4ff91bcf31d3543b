"""The learner's side of ``tcp``: sessions that permit pulls from the stream server, and the chain of deltas.

Every pull is a session of the server with a token of its own (and a key, if the stream is encrypted). When a version is
published, the server computes the deltas from the version before; a member that holds a version of the chain of deltas
waits for that. The chain never grows larger than a full copy, which would be the better choice then.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass

from async_rl.weights import control
from async_rl.weights.manifest import manifest_fields
from async_rl.weights.scheduler import Member
from async_rl.weights.staging import StagedVersion
from async_rl.weights.tcp.delta import element_runs
from async_rl.weights.tcp.protocol import KEY_BYTES, TOKEN_BYTES
from async_rl.weights.tcp.server_process import (
    DeltaEncoded,
    EncodeDelta,
    EndSession,
    ForgetDelta,
    OpenSession,
    StreamServerProcess,
)
from async_rl.weights.transport import Delivery, PullSettings, PullStats, Send

MAX_PULLED_VERSIONS = 2


@dataclass(frozen=True, slots=True)
class _DeltaLink:
    """Deltas from the weights ``base`` to ``digest``. ``sizes``: bytes of each bucket's delta, or -1."""

    base: str
    digest: str
    job: int
    sizes: list[int]
    size_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class _DeltaJob:
    """Deltas that the server computes now."""

    number: int
    base: StagedVersion
    target: StagedVersion


class StreamSender:
    """See ``transport.PullSender``."""

    def __init__(self, settings: PullSettings) -> None:
        self._server = StreamServerProcess(settings.bind_host, settings.poller)
        self._is_encrypted = settings.is_encrypted
        self._has_deltas = settings.has_deltas
        self._num_starts = self._server.num_starts
        self._sessions: dict[int, tuple[bytes, StagedVersion]] = {}
        self._chain: deque[_DeltaLink] = deque()
        self._job: _DeltaJob | None = None
        self._last_job = 0
        self._newest: StagedVersion | None = None
        self.stats = PullStats(server_starts=self._num_starts)

    @property
    def server(self) -> StreamServerProcess:
        return self._server

    def poll(self) -> None:
        """Receive a message of the server.

        Raises:
            WeightsError: the server died, and can't be started again.
        """
        encoded = self._server.poll()
        if self._server.num_starts != self._num_starts:
            # Members that were pulling report a failure, and are offered another pull.
            self._num_starts = self._server.num_starts
            self.stats = PullStats(self.stats.delta_bytes, self.stats.delta_s, self._num_starts)
            self._chain.clear()
            self._job = None
        elif encoded is not None:
            self._add_link(encoded)

    def publish(self, staged: StagedVersion, *, has_members: bool) -> None:
        """Compute the deltas from the version before to this one."""
        before, self._newest = self._newest, staged
        self._job = None
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
        """Whether the server is up, few enough versions are pulled, and no delta is computed that the member needs."""
        if self._server.port is None:
            return False
        pulled_slots = {pulled.slot for _, pulled in self._sessions.values()} | {staged.slot}
        if len(pulled_slots) > min(MAX_PULLED_VERSIONS, max(1, staged.num_buffers - 1)):
            return False
        if self._job is None:
            return True
        base = self._job.base.manifest.digest
        return member.digest != base and all(link.base != member.digest for link in self._chain)

    def deliver(self, delivery: Delivery, send: Send) -> None:
        """Open a session for the one member, and send it ``Pull``."""
        (member,) = delivery.members
        staged, port = delivery.staged, self._server.port
        assert port is not None, "a pull before the server is up"
        token = os.urandom(TOKEN_BYTES)
        key = os.urandom(KEY_BYTES) if self._is_encrypted else b""
        links = self._links_from(member.digest, staged.manifest.digest)
        self._server.map_slot(staged.slot, staged.memory)
        self._server.send(OpenSession(token, staged.slot, [link.job for link in links or ()], key))
        self._sessions[delivery.attempt] = token, staged
        pull = control.Pull(
            attempt=delivery.attempt,
            transport="tcp",
            manifest=manifest_fields(staged.manifest),
            port=port,
            token=token,
            key=key,
            base="" if links is None else member.digest,
            delta_sizes=[link.sizes for link in links or ()],
            deadline_s=control.seconds_until(delivery.deadline),
        )
        send(member.member_id, pull)

    def end(self, attempt: int, *, intact: bool) -> None:
        token, _ = self._sessions.pop(attempt)
        self._server.send(EndSession(token))

    def close(self, timeout_s: float) -> bool:
        self._server.close()
        return True

    def _links_from(self, base: str, digest: str) -> list[_DeltaLink] | None:
        """Return the chain from one to the other; None if there is none."""
        if base and base == digest:
            return []
        links = list(self._chain)
        start = next((index for index, link in enumerate(links) if link.base == base), None)
        if start is None or links[-1].digest != digest:
            return None
        return links[start:]

    def _add_link(self, encoded: DeltaEncoded) -> None:
        """Add the deltas to the chain, if they are of the newest job and nobody wrote to what the server read."""
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
        self.stats = PullStats(size, encoded.elapsed_s, self._num_starts)

    def _shorten(self, max_bytes: int) -> None:
        """Remove the oldest links until the chain has at most ``max_bytes``."""
        while self._chain and sum(link.size_bytes for link in self._chain) > max_bytes:
            self._server.send(ForgetDelta(self._chain.popleft().job))
