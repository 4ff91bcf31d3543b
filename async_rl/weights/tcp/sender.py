"""The learner's side of ``tcp``: who may pull what from the stream server, and which deltas there are.

Every pull is a session of the server with a token of its own (and a key, where it is sealed). When a version is
published, the server computes the deltas from the one before; a member that holds the beginning of the chain of
deltas is let wait for that. The chain never grows larger than a full copy, which would then be the better choice.

In the clear and without deltas a member *stands* when it has a version (``push_lines.py``): its acknowledgement came
over a connection of its own, by which the next version goes out as soon as it is published, without a word over the
control channel, or to the server. Where the next one comes by a collective, the word to take part goes there. Whatever
goes wrong with that is ``Lost``, and offered or said again the ordinary way.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from async_rl.weights import control
from async_rl.weights.manifest import manifest_fields
from async_rl.weights.push_lines import Heard, Lost, PushLines
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
    """An attempt under way. Without a ``token`` it is none of the server's: it was pushed to a member that stands."""

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
        may_stand: members may stand: what is theirs on the control channel may go over open connections as well.
    """

    def __init__(self, bind_host: str, *, is_sealed: bool, has_deltas: bool, may_stand: bool = False) -> None:
        self._host = StreamHost(bind_host)
        self._is_sealed = is_sealed
        self._has_deltas = has_deltas
        self._num_starts = self._host.num_starts
        self._lines = PushLines(bind_host) if may_stand and not is_sealed and not has_deltas else None
        self._sessions: dict[int, _Session] = {}
        self._chain: deque[_Link] = deque()
        self._job: _Job | None = None
        self._last_job = 0
        self._newest: StagedVersion | None = None
        self._stats = StreamStats()

    def filenos(self) -> list[int]:
        """Readable, one or the other, when ``poll`` has something to do."""
        return [self._host.fileno()] if self._lines is None else [self._host.fileno(), self._lines.fileno()]

    @property
    def num_malformed(self) -> int:
        """Requests of those who stand, or pretend to, that could not be read."""
        return 0 if self._lines is None else self._lines.num_malformed

    @property
    def server_pid(self) -> int:
        return self._host.pid

    def stats(self) -> StreamStats:
        return self._stats

    def poll(self, readable: Container[int]) -> list[Heard | Lost]:
        """Hear what the server said, and members; ``readable`` are those of ``filenos`` that are.

        Raises:
            WeightsError: the server died, and can't be started again.
        """
        if self._host.fileno() in readable:
            encoded = self._host.poll()
            if self._host.num_starts != self._num_starts:
                # Who asked the one before reports a failure, and is offered another pull.
                self._num_starts = self._host.num_starts
                self._chain.clear()
                self._job = None
            elif encoded is not None:
                self._note(encoded)
        if self._lines is not None and self._lines.fileno() in readable:
            return self._lines.poll()
        return []

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
        """To the one member: by its line where it stands, else by a session of its own."""
        (member,) = delivery.members
        if self._lines is not None and self._lines.stands(member.member_id) and self._push(delivery, self._lines):
            return
        staged, port = delivery.staged, self._host.port
        assert port is not None, "a pull before the server is up"
        token = os.urandom(TOKEN_BYTES)
        key = os.urandom(KEY_BYTES) if self._is_sealed else b""
        links = self._links_from(member.digest, staged.manifest.digest)
        sizes = [link.sizes for link in links or ()]
        self._host.open_session(OpenSession(token, staged.slot, [link.job for link in links or ()], key))
        self._sessions[delivery.attempt] = _Session(token, staged)
        base = "" if links is None else member.digest
        tell(member.member_id, self._fetch(delivery, port, token, key=key, base=base, delta_sizes=sizes))

    def _push(self, delivery: Delivery, lines: PushLines) -> bool:
        """Whether it is on its way to a member that stands."""
        (member,) = delivery.members
        token = os.urandom(TOKEN_BYTES)
        head = control.encode_message(self._fetch(delivery, lines.port, token))
        buckets = [bucket.numpy().data for bucket in delivery.staged.buckets]
        if not lines.push(member.member_id, delivery.attempt, token, head, buckets):
            return False
        self._sessions[delivery.attempt] = _Session(b"", delivery.staged)
        return True

    def _fetch(
        self, delivery: Delivery, port: int, token: bytes, *, key: bytes = b"", base: str = "",
        delta_sizes: list[list[int]] | None = None,
    ) -> control.Fetch:  # fmt: skip
        (member,) = delivery.members
        return control.Fetch(
            attempt=delivery.attempt,
            manifest=manifest_fields(delivery.staged.manifest),
            port=port,
            token=token,
            key=key,
            base=base,
            delta_sizes=delta_sizes or [],
            deadline_s=control.seconds_until(delivery.deadline),
            **self.place(member.member_id),
        )

    def place(self, member_id: bytes) -> dict[str, Any]:
        """Where this member may stand from now on: ``line_port`` and ``line_token``, if anywhere."""
        if self._lines is None:
            return {}
        return {"line_port": self._lines.port, "line_token": self._lines.expect(member_id)}

    def say(self, member_id: bytes, attempt: int, message: control.PublisherMessage) -> bool:
        """Tell a member that stands; False if it does not. It answers as to a version, or is ``Lost``."""
        return self._lines is not None and self._lines.push(
            member_id, attempt, b"", control.encode_message(message), ()
        )

    def end_saying(self, attempt: int) -> None:
        """Nobody waits any more for an answer to what was said of this attempt."""
        if self._lines is not None:
            self._lines.end(attempt)

    def end(self, attempt: int, *, intact: bool) -> None:
        token = self._sessions.pop(attempt).token
        if token:
            self._host.end_session(token)
        elif self._lines is not None:
            self._lines.end(attempt)

    def keep(self, member_ids: Container[bytes]) -> None:
        """Nobody else stands any more."""
        if self._lines is not None:
            self._lines.keep(member_ids)

    def close(self, timeout_s: float) -> bool:
        if self._lines is not None:
            self._lines.close()
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
