"""The learner's side of ``tcp``: who may pull what from the stream server, and which deltas there are.

Every pull is a session of the server with a token of its own (and a key, where it is sealed). When a version is
published, the server computes the deltas from the one before; a member that holds the beginning of the chain of
deltas is let wait for that. The chain never grows larger than a full copy, which would then be the better choice.

In the clear and without deltas a member *stands* when it has a version: its next request is at the server already, and
its acknowledgement came along with it. The next version then goes out as soon as it is published, without a word over
the control channel. Whatever goes wrong with that is ``Lost``, and offered again the ordinary way.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Container
from dataclasses import dataclass

from async_rl.errors import WireError
from async_rl.weights import control
from async_rl.weights.delta import element_runs
from async_rl.weights.manifest import manifest_fields
from async_rl.weights.rounds import Member
from async_rl.weights.server_link import Encode, Encoded, OpenSession, Said, Unanswered
from async_rl.weights.staging import StagedVersion
from async_rl.weights.stream_host import StreamHost
from async_rl.weights.stream_wire import KEY_BYTES, TOKEN_BYTES
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
    """An attempt under way; ``is_pushed`` to a member that stands."""

    token: bytes
    staged: StagedVersion
    member_id: bytes
    is_pushed: bool


@dataclass(slots=True, eq=False)
class _Place:
    """Where a member may stand, with which token, and whether it does."""

    token: bytes
    is_taken: bool = False


@dataclass(frozen=True, slots=True)
class Heard:
    """A member said this by the stream."""

    member_id: bytes
    ack: control.Ack


@dataclass(frozen=True, slots=True)
class Lost:
    """What was pushed in this attempt did not reach the member, or nobody knows."""

    member_id: bytes
    attempt: int


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
        may_stand: members may stand: what is theirs on the control channel may go over the stream as well.
    """

    def __init__(self, bind_host: str, *, is_sealed: bool, has_deltas: bool, may_stand: bool = False) -> None:
        self._host = StreamHost(bind_host)
        self._is_sealed = is_sealed
        self._has_deltas = has_deltas
        self._num_starts = self._host.num_starts
        self._may_stand = may_stand and not is_sealed and not has_deltas
        self._sessions: dict[int, _Session] = {}
        self._places: dict[bytes, _Place] = {}
        self.num_malformed = 0
        self._chain: deque[_Link] = deque()
        self._job: _Job | None = None
        self._last_job = 0
        self._newest: StagedVersion | None = None
        self._stats = StreamStats()

    def fileno(self) -> int:
        """Readable when ``poll`` has something to do."""
        return self._host.fileno()

    @property
    def server_pid(self) -> int:
        return self._host.pid

    def stats(self) -> StreamStats:
        return self._stats

    def poll(self) -> list[Heard | Lost]:
        """Hear what the server said. Call when readable.

        Raises:
            WeightsError: the server died, and can't be started again.
        """
        message = self._host.poll()
        if self._host.num_starts != self._num_starts:
            # Who asked the one before reports a failure, and is offered another pull; who stood there knows of nothing.
            self._num_starts = self._host.num_starts
            self._chain.clear()
            self._job = None
            self._places.clear()
            return [Lost(session.member_id, attempt) for attempt, session in self._pushed()]
        match message:
            case Encoded():
                self._note(message)
            case Said(token, frame):
                return self._said(token, frame)
            case Unanswered(token):
                return [Lost(s.member_id, attempt) for attempt, s in self._pushed() if s.token == token]
            case None:
                pass
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
        """Open a session for the one member."""
        (member,) = delivery.members
        staged, port = delivery.staged, self._host.port
        assert port is not None, "a pull before the server is up"
        place = self._places.pop(member.member_id, None)
        is_pushed = place is not None and place.is_taken
        token = place.token if place is not None and is_pushed else os.urandom(TOKEN_BYTES)
        if place is not None and not is_pushed:
            self._host.end_session(place.token)
        key = os.urandom(KEY_BYTES) if self._is_sealed else b""
        next_token = os.urandom(TOKEN_BYTES) if self._may_stand else b""
        if next_token:
            self._places[member.member_id] = _Place(next_token)
        links = self._links_from(member.digest, staged.manifest.digest)
        fetch = control.Fetch(
            attempt=delivery.attempt,
            manifest=manifest_fields(staged.manifest),
            port=port,
            token=token,
            key=key,
            base="" if links is None else member.digest,
            delta_sizes=[link.sizes for link in links or ()],
            deadline_s=control.seconds_until(delivery.deadline),
            next_token=next_token,
        )
        head = control.encode_message(fetch) if is_pushed else b""
        jobs = [link.job for link in links or ()]
        self._host.open_session(OpenSession(token, staged.slot, jobs, key, head, next_token))
        self._sessions[delivery.attempt] = _Session(token, staged, member.member_id, is_pushed)
        if not is_pushed:
            tell(member.member_id, fetch)

    def end(self, attempt: int, *, intact: bool) -> None:
        self._host.end_session(self._sessions.pop(attempt).token)

    def keep(self, member_ids: Container[bytes]) -> None:
        """Nobody else stands any more."""
        for member_id in [m for m in self._places if m not in member_ids]:
            self._host.end_session(self._places.pop(member_id).token)

    def close(self, timeout_s: float) -> bool:
        self._host.close()
        return True

    def _pushed(self) -> list[tuple[int, _Session]]:
        return [(attempt, session) for attempt, session in self._sessions.items() if session.is_pushed]

    def _said(self, token: bytes, frame: bytes) -> list[Heard | Lost]:
        """A member stands now, and says what became of the version before."""
        for member_id, place in self._places.items():
            if place.token == token:
                try:
                    ack = control.decode_message(frame, (control.Ack,), control.TO_PUBLISHER_LIMITS)
                except WireError:
                    self.num_malformed += 1
                    self._host.end_session(token)
                    return []
                place.is_taken = True
                return [Heard(member_id, ack)]
        return []

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
