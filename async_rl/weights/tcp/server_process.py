"""The learner's stream server process: the messages to and from it, and the handle that starts and instructs it.

Learner and server communicate over a Unix socket pair without a name, so no other process can connect. Messages are
frames, some with a file descriptor. No torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec

from async_rl.errors import WeightsError, WireError
from async_rl.net.codec import read_as
from async_rl.net.framing import LENGTH_BYTES, pack_frame, read_body
from async_rl.net.wire import Limits, decode, encode
from async_rl.process.child import module_command, package_environment
from async_rl.weights.tcp.delta import Runs

if TYPE_CHECKING:
    import zmq

    from async_rl.weights.staging import SharedBuckets

logger = logging.getLogger(__name__)

MAX_STARTS = 5
_LIMITS = Limits(max_bytes=256 << 20, max_header_bytes=256 << 20, max_arrays=0, max_depth=None)
_SEND_S = 5.0
_END_S = 5.0


class Listen(msgspec.Struct, frozen=True):
    """Accept connections at any port of ``host``."""

    host: str


class MapSlot(msgspec.Struct, frozen=True):
    """Map a staging buffer, whose descriptor comes with this message."""

    slot: int
    sizes: list[int]
    offsets: list[int]


class OpenSession(msgspec.Struct, frozen=True):
    """Let a peer that sends ``token`` pull the buckets of ``slot`` and the deltas of ``jobs``.

    If ``key`` is not empty, encrypt the stream with it.
    """

    token: bytes
    slot: int
    jobs: list[int]
    key: bytes


class EndSession(msgspec.Struct, frozen=True):
    """End this session; a pull in progress is cut off."""

    token: bytes


class EncodeDelta(msgspec.Struct, frozen=True):
    """Compute the deltas from one slot's bytes to another's. ``runs``: (end, width, end, width, ...) of each bucket."""

    job: int
    base_slot: int
    target_slot: int
    runs: list[list[int]]

    def bucket_runs(self) -> list[Runs]:
        return [list(zip(flat[::2], flat[1::2], strict=True)) for flat in self.runs]


class ForgetDelta(msgspec.Struct, frozen=True):
    """Free the deltas of this job; no new session needs them."""

    job: int


class Listening(msgspec.Struct, frozen=True):
    """The server accepts connections at this port."""

    port: int


class DeltaEncoded(msgspec.Struct, frozen=True):
    """Bytes of each bucket's delta; -1 where the bucket itself is no larger. Empty: given up for a newer job."""

    job: int
    sizes: list[int]
    elapsed_s: float


LearnerMessage = Listen | MapSlot | OpenSession | EndSession | EncodeDelta | ForgetDelta
ServerMessage = Listening | DeltaEncoded
TO_SERVER: tuple[type[LearnerMessage], ...] = (Listen, MapSlot, OpenSession, EndSession, EncodeDelta, ForgetDelta)
TO_LEARNER: tuple[type[ServerMessage], ...] = (Listening, DeltaEncoded)

_T = TypeVar("_T")


def send_message(pipe: socket.socket, message: LearnerMessage | ServerMessage, fd: int | None = None) -> None:
    """Send one message, with a descriptor if there is one.

    Raises:
        OSError: the other side is gone.
    """
    data = pack_frame(encode(type(message).__name__, message))
    sent = socket.send_fds(pipe, [data], [] if fd is None else [fd])
    if sent < len(data):
        pipe.sendall(data[sent:])


def receive_message(pipe: socket.socket, expected: Sequence[type[_T]]) -> tuple[_T, int | None] | None:
    """Receive the next message, one of ``expected``, and its descriptor; None if the other side is gone.

    Raises:
        WireError: it is none of them.
    """
    try:
        header, descriptors, _, _ = socket.recv_fds(pipe, LENGTH_BYTES, 1, socket.MSG_WAITALL)
    except OSError:
        return None
    try:
        frame = read_body(pipe.recv, header, max_bytes=_LIMITS.max_bytes) if len(header) == LENGTH_BYTES else None
    except OSError:
        frame = None
    if frame is None:
        for descriptor in descriptors:
            os.close(descriptor)
        return None
    message = decode(frame, _LIMITS)
    for record in expected:
        if record.__name__ == message.type:
            return read_as(message.fields, record), descriptors[0] if descriptors else None
    raise WireError(f"expected one of {[record.__name__ for record in expected]}, got {message.type!r}")


class StreamServerProcess:
    """A stream server that listens at any port of ``bind_host``, started again when it dies.

    It takes a moment to start; nobody waits for it. ``poller`` is the publisher's: ``poll`` must be called when
    anything registered here is readable. One thread uses this at a time.
    """

    def __init__(self, bind_host: str, poller: zmq.Poller) -> None:
        self._bind_host = bind_host
        self._poller = poller
        self._mapped: dict[int, SharedBuckets] = {}
        self._num_starts = 0
        self._start()

    @property
    def port(self) -> int | None:
        """Where it listens; None while it is starting."""
        return self._port

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def num_starts(self) -> int:
        """How often it was started. Sessions and deltas of an earlier start are gone."""
        return self._num_starts

    def poll(self) -> DeltaEncoded | None:
        """Receive one message of the server. Call only when readable.

        Raises:
            WeightsError: it died, and can't be started again.
        """
        received = receive_message(self._pipe, TO_LEARNER)
        if received is None:
            self._restart()
            return None
        message, _ = received
        if isinstance(message, Listening):
            self._port = message.port
            return None
        return message

    def map_slot(self, number: int, memory: SharedBuckets) -> None:
        """Let the server map this buffer, unless it has."""
        if self._mapped.get(number) is not memory:
            self._mapped[number] = memory
            self.send(MapSlot(number, memory.sizes, memory.offsets), memory.fd)

    def send(self, message: LearnerMessage, fd: int | None = None) -> None:
        """Send. A message to a dead server is lost, with its sessions; ``poll`` sees that it died."""
        with contextlib.suppress(OSError):
            send_message(self._pipe, message, fd)

    def close(self) -> None:
        """End the server."""
        self._disconnect()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start(self) -> None:
        import zmq  # not at the top: the server imports this module, and needs no zmq

        self._num_starts += 1
        self._port: int | None = None
        self._pipe, theirs = socket.socketpair()
        self._pipe.settimeout(_SEND_S)
        with theirs:
            self._process = subprocess.Popen(
                module_command("async_rl.weights.tcp.server", str(theirs.fileno()), flags=("-P",)),
                pass_fds=(theirs.fileno(),),
                env={**package_environment(), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
            )
        self._poller.register(self._pipe.fileno(), zmq.POLLIN)
        self.send(Listen(self._bind_host))

    def _disconnect(self) -> None:
        self._poller.unregister(self._pipe.fileno())
        self._pipe.close()

    def _restart(self) -> None:
        self._disconnect()
        self._process.kill()
        code = self._process.wait()
        if self._num_starts >= MAX_STARTS:
            raise WeightsError(
                f"the stream server of the weights (tcp, at {self._bind_host}) ended {MAX_STARTS} times, the last time "
                f"with exit code {code}; see its messages in this log"
            )
        logger.warning("the stream server of the weights died with exit code %d: starting it again", code)
        self._start()
        mapped, self._mapped = self._mapped, {}
        for number, memory in mapped.items():
            self.map_slot(number, memory)
