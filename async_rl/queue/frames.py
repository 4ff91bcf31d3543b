"""The frames of one multipart message to a zmq socket, for both of its ends. Copies only what is cheaper to copy."""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from async_rl.queue.bodies import Bytes

COPY_BELOW_BYTES = 1 << 20
"""Smaller frames are copied into the socket: telling Python that a shared one was sent takes a thread its turn."""
# As plain numbers: zmq's own are combined in Python, for every frame.
_LAST, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)


def send_frames(socket: zmq.Socket[bytes], frames: Sequence[Bytes]) -> None:
    """All frames or none.

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
