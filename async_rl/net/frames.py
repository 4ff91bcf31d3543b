"""Send the frames of a message on a ZeroMQ socket, without copies of large ones; and ask whether one has arrived."""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from async_rl.net.wire import Frame

COPY_BELOW_BYTES = 1 << 20
"""Frames below this size are copied when they are sent, because sending a frame without a copy costs a thread
switch."""
# As plain numbers: zmq combines its own flags in Python, which would cost time for every frame.
_LAST, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_READABLE = int(zmq.POLLIN)


def has_message(socket: zmq.Socket[bytes]) -> bool:
    """Return whether a message has arrived at ``socket``.

    This costs half as much as a poller or an exception of ``recv``.
    """
    return bool(int(socket.get(zmq.EVENTS)) & _READABLE)


def send_frames(socket: zmq.Socket[bytes], frames: Sequence[Frame]) -> None:
    """Send ``frames`` as one multipart message, all or none. Only small frames are copied.

    Raises:
        zmq.Again: the socket has no room. Only the first frame can raise it.
    """
    for left, frame in zip(reversed(range(len(frames))), frames):
        flags = _MORE if left else _LAST
        whole = frame.obj if isinstance(frame, memoryview) else None
        if isinstance(whole, zmq.Frame) and len(whole) == len(frame):
            # Forward a received frame without a copy: libzmq counts the references to it.
            socket.send(whole, flags, copy=False)
        else:
            socket.send(frame, flags, copy=len(frame) < COPY_BELOW_BYTES)
