"""zmq sockets: ask whether a message has arrived, and send the frames of one multipart message."""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from async_rl.net.wire import Frame

COPY_BELOW_BYTES = 1 << 20
"""Smaller frames are copied into the socket: a frame that is shared with it costs a thread switch once it is sent."""
# As plain numbers: zmq combines its own flags in Python, which would cost time for every frame.
_LAST, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_READABLE = int(zmq.POLLIN)


def is_readable(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message has arrived. An exception of ``recv`` or a poller would cost about twice as much."""
    return bool(int(socket.get(zmq.EVENTS)) & _READABLE)


def send_frames(socket: zmq.Socket[bytes], frames: Sequence[Frame]) -> None:
    """Send all frames or none; copy only those that are cheaper to copy.

    Raises:
        zmq.Again: the socket has no room. Only the first frame can meet this.
    """
    for left, frame in zip(reversed(range(len(frames))), frames):
        flags = _MORE if left else _LAST
        whole = frame.obj if isinstance(frame, memoryview) else None
        if isinstance(whole, zmq.Frame) and len(whole) == len(frame):
            # A received frame is sent on without a copy: libzmq counts its users.
            socket.send(whole, flags, copy=False)
        else:
            socket.send(frame, flags, copy=len(frame) < COPY_BELOW_BYTES)
