"""A process beside the learner that reads the staging memory and sends weights, and the pipe to it. No torch.

The stream server (``tcp/``) and the broadcaster (``collective/``) are such processes. ``ServerProcess`` is the
learner's handle: it starts the process, starts it again when it dies, and lets it map the staging memory. Learner and
server exchange messages over a Unix socket pair without a name, so no other process can connect. Messages are frames.
Some come with a file descriptor.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from async_rl.errors import WeightsError
from async_rl.net.codec import decode_as
from async_rl.net.streams import LENGTH_BYTES, pack_frame, read_body
from async_rl.net.wire import Limits, encode
from async_rl.process.child import package_environment
from async_rl.process.helper import Helper
from async_rl.weights.memory import SharedBuckets

logger = logging.getLogger(__name__)

MAX_FAILURES = 4
"""How often a server is started again, unless it has done its work in between (``mark_working``)."""
_SEND_S = 5.0
_END_S = 5.0
_LIMITS = Limits(max_bytes=256 << 20, max_header_bytes=256 << 20, max_arrays=0, max_depth=None)


class MapSlot(msgspec.Struct, frozen=True):
    """The learner tells the server to map a slot, which is memory for one version of the weights.

    A file descriptor of the memory comes with this message. ``slot`` is the slot's number. ``offsets`` and ``sizes``
    are those of the buckets in the memory, in bytes.
    """

    slot: int
    sizes: list[int]
    offsets: list[int]


MessageT = TypeVar("MessageT")


def send_message(pipe: socket.socket, message: msgspec.Struct, fd: int | None = None) -> None:
    """Send one message over the socket pair between learner and server, with the file descriptor ``fd`` if given.

    Raises:
        OSError: the other side is gone.
    """
    data = pack_frame(encode(type(message).__name__, message))
    sent = socket.send_fds(pipe, [data], [] if fd is None else [fd])
    if sent < len(data):
        pipe.sendall(data[sent:])


def receive_message(pipe: socket.socket, expected: Sequence[type[MessageT]]) -> tuple[MessageT, int | None] | None:
    """Receive the next message and its file descriptor. None if the other side is gone.

    The type of the message must be one of ``expected``. The descriptor is None if none came with it.

    Raises:
        WireError: the message is malformed, or of another type.
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
    return decode_as(frame, expected, _LIMITS), descriptors[0] if descriptors else None


class ServerProcess(Generic[MessageT]):
    """A server process, seen from the learner. It is started again when it dies. One thread uses this at a time.

    Args:
        module: the module that the process runs. Its argument is the file descriptor of its end of the pipe.
        name: what the process is, for messages.
        answers: the types of the messages that it sends.
        poller: the publisher's poller, with which the pipe is registered. Call ``poll`` when the pipe is readable.
        on_start: called after every start, to send the first message.

    Attributes:
        is_up: whether the server works. The owner sets it; it becomes False with every start.
        num_starts: how often the server was started. What an earlier start had been told is gone, except the memory.
    """

    def __init__(
        self,
        module: str,
        name: str,
        answers: Sequence[type[MessageT]],
        poller: zmq.Poller,
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        self._module, self._name, self._answers = module, name, answers
        self._poller = poller
        self._on_start = on_start
        self._mapped: dict[int, SharedBuckets] = {}
        self._num_failures = 0
        self.num_starts = 0
        self.is_up = False

    @property
    def pid(self) -> int:
        return self._helper.pid

    def start(self) -> None:
        """Start the process. Call this once; ``poll`` and ``restart`` start it again."""
        self.num_starts += 1
        self.is_up = False
        self._helper = Helper(self._module, environment={**package_environment(), "OMP_NUM_THREADS": "1"})
        self._helper.socket.settimeout(_SEND_S)
        self._poller.register(self._helper.socket.fileno(), zmq.POLLIN)
        self._on_start()

    def is_readable(self, ready: Mapping[Any, int]) -> bool:
        """Return whether ``poll`` has something to receive. ``ready`` is what the poller returned."""
        return self._helper.socket.fileno() in ready

    def poll(self) -> MessageT | None:
        """Receive one message of the server. If the server has died, start it again and return None.

        Call this only when the pipe is readable.

        Raises:
            WeightsError: the server died and can't be started again.
        """
        received = receive_message(self._helper.socket, self._answers)
        if received is None:
            self.restart("died")
            return None
        return received[0]

    def map_slot(self, number: int, memory: SharedBuckets) -> None:
        """Tell the server to map this staging memory under ``number``, unless it has mapped the memory already."""
        if self._mapped.get(number) is not memory:
            self._mapped[number] = memory
            self.send(MapSlot(number, memory.sizes, memory.offsets), memory.fd)

    def send(self, message: msgspec.Struct, fd: int | None = None) -> None:
        """Send ``message`` to the server. If the server is dead, the message is lost, and ``poll`` starts the
        server again.
        """
        with contextlib.suppress(OSError):
            send_message(self._helper.socket, message, fd)

    def mark_working(self) -> None:
        """Record that the server has done its work, so that its earlier ends do not count any more."""
        self._num_failures = 0

    def restart(self, why: str) -> None:
        """Kill the process if it is alive, and start it again. ``why`` says in the log what happened to it.

        Raises:
            WeightsError: it was started too often.
        """
        code = self._stop()
        self._num_failures += 1
        self.is_up = False
        if self._num_failures > MAX_FAILURES:
            raise WeightsError(
                f"{self._name} ended {self._num_failures} times, the last time with exit code {code}; remove the "
                f"cause, which the lines above show, and start the learner again"
            )
        logger.warning("%s %s with exit code %d; restarting it", self._name, why, code)
        self.start()
        mapped, self._mapped = self._mapped, {}
        for number, memory in mapped.items():
            self.map_slot(number, memory)

    def close(self) -> None:
        """End the process: it ends by itself when the pipe is closed, or is killed."""
        self._stop(_END_S)

    def _stop(self, grace_s: float = 0.0) -> int:
        self._poller.unregister(self._helper.socket.fileno())
        return self._helper.stop(grace_s)
