"""What generators' fronts, proxies and the relay say to each other.

A message is two frames: a number, and msgpack. The number names a connection to the relay: the receiver on the way to
the relay, and the sender on the way from it, so nobody can speak for another one. ``RELAY`` is the relay itself. It
numbers connections from a random number on, so that nobody reaches a connection of an earlier relay by mistake.
"""

from __future__ import annotations

import struct
from typing import Annotated, Literal, TypeVar

import msgspec

from async_rl.errors import WireError
from async_rl.net.wire import SAME_VERSION, Frame

RELAY = 0
MAX_BYTES = 96 << 20
"""Largest message. The fronts have a smaller limit of their own for each request."""
MAX_BODY_BYTES = 64 << 20
MAX_WAIT_S = 60.0
_NUMBER = struct.Struct(">Q")
_Key = Annotated[str, msgspec.Meta(max_length=256)]
_Text = Annotated[str, msgspec.Meta(max_length=8192)]


# To the relay.


class Hello(msgspec.Struct, tag=True, frozen=True):
    """The first message of a connection. ``role`` says who it is: the front of a generator, or a proxy."""

    role: Literal["front", "proxy"]


class Offer(msgspec.Struct, tag=True, frozen=True):
    """A front has a session that waits for a program. ``task`` is what the program needs, as JSON."""

    key: _Key
    task: bytes


class Withdraw(msgspec.Struct, tag=True, frozen=True):
    """The session is no longer offered."""

    key: _Key


class Want(msgspec.Struct, tag=True, frozen=True):
    """A proxy asks for one session, and waits up to ``wait_s`` seconds. It chooses ``number``."""

    number: int
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT_S)]


# From the relay.


class Taken(msgspec.Struct, tag=True, frozen=True):
    """To a front, in the name of the proxy that has the session now."""

    key: _Key


class Proxies(msgspec.Struct, tag=True, frozen=True):
    """To a front: how many proxies are connected."""

    count: int


class Session(msgspec.Struct, tag=True, frozen=True):
    """To a proxy, in the name of the session's front: the answer to ``Want``."""

    number: int
    key: _Key
    task: bytes


class NoSession(msgspec.Struct, tag=True, frozen=True):
    """To a proxy: there was none in time."""

    number: int


class Gone(msgspec.Struct, tag=True, frozen=True):
    """The connection in whose name this comes has ended, or is not known."""


class Finished(msgspec.Struct, tag=True, frozen=True):
    """To the proxies: the run is finished."""


# From a proxy to a front.


class Request(msgspec.Struct, tag=True, frozen=True):
    """An HTTP request of the session's program. ``authorization`` is that header, or empty."""

    number: int
    key: _Key
    method: Annotated[str, msgspec.Meta(max_length=16)]
    path: _Text
    authorization: _Text
    body: bytes


class Received(msgspec.Struct, tag=True, frozen=True):
    """The answer was handed to the connection of a client that was there."""

    number: int


class Abandoned(msgspec.Struct, tag=True, frozen=True):
    """The client has gone before it had the answer."""

    number: int


class GiveBack(msgspec.Struct, tag=True, frozen=True):
    """Nobody took the session after all."""

    key: _Key


class End(msgspec.Struct, tag=True, frozen=True):
    """The session's program has ended. ``error`` says why it failed; empty if it did not. The rest is about that."""

    key: _Key
    error: _Text = ""
    detail: _Text = ""
    place: _Text = ""
    is_transient: bool = False


# From a front to a proxy.


class Answer(msgspec.Struct, tag=True, frozen=True):
    """The answer to a ``Request``."""

    number: int
    status: int
    headers: dict[str, str]
    body: bytes


class Closed(msgspec.Struct, tag=True, frozen=True):
    """The generator has ended the session."""

    key: _Key


ToRelay = Hello | Offer | Withdraw | Want
ToFront = Taken | Proxies | Gone | Request | Received | Abandoned | GiveBack | End
FromFront = Hello | Offer | Withdraw | Answer | Closed
ToProxy = Session | NoSession | Gone | Finished | Answer | Closed

_Message = TypeVar("_Message")
_encoder = msgspec.msgpack.Encoder()
FOR_RELAY = msgspec.msgpack.Decoder(ToRelay)
FOR_FRONT = msgspec.msgpack.Decoder(ToFront)
FOR_PROXY = msgspec.msgpack.Decoder(ToProxy)


def encode(message: ToRelay | ToFront | ToProxy) -> bytes:
    return _encoder.encode(message)


def decode(body: Frame, decoder: msgspec.msgpack.Decoder[_Message]) -> _Message:
    """Decode the second frame of a message.

    Raises:
        WireError: the bytes are no message for this receiver.
    """
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise WireError(f"expected a message of agents on other machines: {error}; {SAME_VERSION}") from error


def pack_number(number: int) -> bytes:
    """Return the first frame of a message."""
    return _NUMBER.pack(number)


def unpack_number(frame: Frame) -> int:
    """Return the connection's number in the first frame of a message.

    Raises:
        WireError: the frame has another size.
    """
    if len(frame) != _NUMBER.size:
        raise WireError(f"expected a number of {_NUMBER.size} bytes before a message, got {len(frame)}; {SAME_VERSION}")
    return int(_NUMBER.unpack(frame)[0])
