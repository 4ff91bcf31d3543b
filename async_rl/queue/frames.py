"""Sockets of zmq at both ends: what is there to be read, and the frames of one multipart message."""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from async_rl.queue.storage.payloads import Bytes

COPY_BELOW_BYTES = 1 << 20
"""Smaller frames are copied into the socket: telling Python that a shared one was sent takes a thread its turn."""
# As plain numbers: zmq's own are combined in Python, for every frame.
_LAST, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_READABLE = int(zmq.POLLIN)


def is_readable(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message is there. To find out by an exception costs twice as much, by a poller nearly."""
    return bool(int(socket.get(zmq.EVENTS)) & _READABLE)


def send_frames(socket: zmq.Socket[bytes], frames: Sequence[Bytes]) -> None:
    """All frames or none; copies only what is cheaper to copy.

    Raises:
        zmq.Again: the socket has no room; only the first frame can meet this.
    """
    for left, frame in zip(reversed(range(len(frames))), frames):
        flags = _MORE if left else _LAST
        whole = frame.obj if isinstance(frame, memoryview) else None
        if isinstance(whole, zmq.Frame) and len(whole) == len(frame):
            # It goes out as it came in: libzmq counts who uses it, and nothing is copied.
            socket.send(whole, flags, copy=False)
        else:
            socket.send(frame, flags, copy=len(frame) < COPY_BELOW_BYTES)
