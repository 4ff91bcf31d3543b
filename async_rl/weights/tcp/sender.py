"""The learner's side of ``tcp``: who may pull what from the stream server, and which deltas there are.

Every pull is a session of the server with a token of its own (and a key, where it is sealed). When a version is
published, the server computes the deltas from the one before; a member that holds the beginning of the chain of
deltas is let wait for that. The chain never grows larger than a full copy, which would then be the better choice.
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
from async_rl.weights.tcp.server_link import Encode, Encoded, OpenSession
from async_rl.weights.tcp.server_process import StreamHost
from async_rl.weights.transport import Delivery, Tell

MAX_PULLED_VERSIONS = 2


@dataclass(frozen=True, slots=True)
class _Link:
    """From the weights ``base`` to ``digest``. ``sizes``: bytes of each bucket's delta, or -1."""

    base: str
    digest: str
    job: int
    sizes: list[int]
    size_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    number: int
    base: StagedVersion
    target: StagedVersion


@dataclass(frozen=True, slots=True, eq=False)
class _Session:
    """A pull under way."""

    token: bytes
    staged: StagedVersion


@dataclass(frozen=True, slots=True)
class StreamStats:
    """``delta_bytes`` and ``delta_s``: size of the newest link and the server's time for it; 0 without one."""

    delta_bytes: int = 0
    delta_s: float = 0.0
    server_starts: int = 0


class StreamSender:
    """See ``transport.Outlet``.

    Args:
        bind_host: where the stream server listens.
        is_sealed: encrypt and authenticate what it sends, by keys that go over the control channel.
        has_deltas: compute the difference to the version before.
    """

    def __init__(self, bind_host: str, *, is_sealed: bool, has_deltas: bool) -> None:
        self._host = StreamHost(bind_host)
        self._is_sealed = is_sealed
        self._has_deltas = has_deltas
        self._num_starts = self._host.num_starts
        self._sessions: dict[int, _Session] = {}
        self._chain: deque[_Link] = deque()
        self._job: _Job | None = None
        self._last_job = 0
        self._newest: StagedVersion | None = None
        self._stats = StreamStats()

    def fileno(self) -> int:
        """Readable when ``poll`` has something to do. Another one after the server was started again."""
        return self._host.fileno()

    @property
    def server_pid(self) -> int:
        return self._host.pid

    def stats(self) -> StreamStats:
        return self._stats

    def poll(self) -> None:
        """Receive what the server sent. Call when readable.

        Raises:
            WeightsError: the server died, and can't be started again.
        """
        encoded = self._host.poll()
        if self._host.num_starts != self._num_starts:
            # Who asked the one before reports a failure, and is offered another pull.
            self._num_starts = self._host.num_starts
            self._chain.clear()
            self._job = None
        elif encoded is not None:
            self._note(encoded)

    def publish(self, staged: StagedVersion, *, has_members: bool) -> None:
        """This is the newest version now, to be offered."""
        before, self._newest = self._newest, staged
        self._host.map_slot(staged.slot, staged.memory)
        self._job = None
        if not self._has_deltas or before is None or not has_members:
            return
        self._last_job += 1
        self._job = _Job(self._last_job, before, staged)
        runs = element_runs(staged.manifest.tensors, staged.manifest.bucket_sizes)
        flat = [[number for run in bucket for number in run] for bucket in runs]
        self._host.encode(Encode(self._last_job, before.slot, staged.slot, flat))

    def may_pull(self, member: Member) -> bool:
        """Whether the newest version can be offered to ``member`` now: soon, if not."""
        newest, job = self._newest, self._job
        if newest is None or self._host.port is None:
            return False
        pulled = {session.staged.slot for session in self._sessions.values()} | {newest.slot}
        if len(pulled) > min(MAX_PULLED_VERSIONS, max(1, newest.num_buffers - 1)):
            return False
        if job is None:
            return True
        return member.digest != job.base.manifest.digest and all(link.base != member.digest for link in self._chain)

    def deliver(self, delivery: Delivery, tell: Tell) -> None:
        """To the one member, by a session of its own."""
        (member,) = delivery.members
        staged, port = delivery.staged, self._host.port
        assert port is not None, "a pull before the server is up"
        token = os.urandom(TOKEN_BYTES)
        key = os.urandom(KEY_BYTES) if self._is_sealed else b""
        links = self._links_from(member.digest, staged.manifest.digest)
        self._host.open_session(OpenSession(token, staged.slot, [link.job for link in links or ()], key))
        self._sessions[delivery.attempt] = _Session(token, staged)
        fetch = control.Fetch(
            attempt=delivery.attempt,
            manifest=manifest_fields(staged.manifest),
            port=port,
            token=token,
            key=key,
            base="" if links is None else member.digest,
            delta_sizes=[link.sizes for link in links or ()],
            deadline_s=control.seconds_until(delivery.deadline),
        )
        tell(member.member_id, fetch)

    def end(self, attempt: int, *, intact: bool) -> None:
        self._host.end_session(self._sessions.pop(attempt).token)

    def close(self, timeout_s: float) -> bool:
        self._host.close()
        return True

    def _links_from(self, base: str, digest: str) -> list[_Link] | None:
        """The chain from one to the other; None without one, and where it leads to nothing smaller."""
        if base and base == digest:
            return []
        links = list(self._chain)
        start = next((index for index, link in enumerate(links) if link.base == base), None)
        if start is None or links[-1].digest != digest:
            return None
        return links[start:]

    def _note(self, encoded: Encoded) -> None:
        job = self._job
        if job is None or encoded.job != job.number:
            self._host.forget(encoded.job)
            return
        self._job = None
        # Only now is it known that nobody wrote to what was read.
        if not encoded.sizes or not job.base.is_intact or not job.target.is_intact:
            self._host.forget(encoded.job)
            return
        manifest = job.target.manifest
        base = job.base.manifest.digest
        if self._chain and self._chain[-1].digest != base:
            self._shorten(-1)
        size = sum(
            whole if delta < 0 else delta for delta, whole in zip(encoded.sizes, manifest.bucket_sizes, strict=True)
        )
        self._chain.append(_Link(base, manifest.digest, encoded.job, encoded.sizes, size))
        self._shorten(manifest.size_bytes)
        self._stats = StreamStats(size, encoded.elapsed_s, self._num_starts)

    def _shorten(self, most_bytes: int) -> None:
        """Drop the oldest links of a chain that is larger than ``most_bytes``."""
        while self._chain and sum(link.size_bytes for link in self._chain) > most_bytes:
            self._host.forget(self._chain.popleft().job)
