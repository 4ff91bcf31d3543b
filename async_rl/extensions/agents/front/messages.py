"""What a generator and its HTTP front say to each other, as frames of ``net.streams`` with msgpack inside.

The front never reads a token: it passes them on as bytes, little-endian, int32 or float32. ``call`` numbers a request
that agents have made; the front gives the numbers out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal, TypeVar

import msgspec

from async_rl.errors import WireError
from async_rl.net.streams import pack_frame, take_frame
from async_rl.records import FinishReason

MAX_BYTES = 64 << 20
ClosedFor = Literal["ended", "expired", "stopped"]
"""Why a session takes no more calls: its agent has ended, it made no call for too long, or its lease has ended."""

# To the front.


class Open(msgspec.Struct, tag=True, frozen=True):
    """Sessions that take calls from now on, by their keys."""

    keys: list[str]


class Close(msgspec.Struct, tag=True, frozen=True):
    """A session that takes no more calls. Those that run are answered with this, too."""

    key: str
    reason: ClosedFor


class Reply(msgspec.Struct, tag=True, frozen=True):
    """The answer to a call: N sampled tokens with log-probabilities (nats) and versions of the weights."""

    call: int
    token_ids: bytes
    logprobs: bytes
    versions: bytes
    finish_reason: FinishReason
    num_prompt: int
    text: str


class Piece(msgspec.Struct, tag=True, frozen=True):
    """N further tokens of the answer to a streamed call. The ``Reply`` has all of them again."""

    call: int
    token_ids: bytes


class Refuse(msgspec.Struct, tag=True, frozen=True):
    """A call is refused with an HTTP status. ``param`` is the request's field that is wrong, if one is."""

    call: int
    status: int
    message: str
    code: str
    param: str = ""


class Accept(msgspec.Struct, tag=True, frozen=True):
    """A session's reward is taken."""

    call: int


class Join(msgspec.Struct, tag=True, frozen=True):
    """Connect to the relay with these keys, as z85 text; empty without keys. It is sent over a private socket."""

    address: str
    public: bytes
    secret: bytes
    server: bytes


class Offered(msgspec.Struct, tag=True, frozen=True):
    """A session that a program on another machine may take. ``task`` is what the program needs, as JSON."""

    key: str
    task: bytes


# To the generator.


class Line(msgspec.Struct, frozen=True):
    """What tells a session's conversations apart: digests of the system's messages at the beginning and of the user's
    first one, and whether there are tools.
    """

    system: bytes = b""
    asked: bytes = b""
    has_tools: bool = False

    def is_of(self, other: Line) -> bool:
        """Whether both are one conversation, which may have been compacted or handed to another system prompt."""
        return self.system == other.system or self.asked == other.asked


NO_LINE = Line()


class Said(msgspec.Struct, frozen=True):
    """The messages of a chat, as JSON: those that follow the answer to the call ``after``, or all if it is None."""

    messages: bytes
    after: int | None
    line: Line = NO_LINE


class Call(msgspec.Struct, tag=True, frozen=True):
    """A request for an answer to a prompt of P tokens.

    ``max_tokens``, ``stop`` and ``stop_token_ids`` may only shorten the answer. ``settings`` are the sampling settings
    that the request names. ``seed`` is mixed into the rollout's own. ``said`` is None if the agent sent token ids. The
    run trains on the answer if ``is_trained``, and judges it in the place of the last one if ``is_answer``.
    ``is_streamed``: its tokens are told as they come. ``without_effect`` are the fields of the request that have none.
    """

    call: int
    key: str
    token_ids: bytes
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    settings: Mapping[str, float] = {}
    said: Said | None = None
    is_trained: bool = True
    is_answer: bool = False
    is_streamed: bool = False
    without_effect: Collection[str] = ()


class Finish(msgspec.Struct, tag=True, frozen=True):
    """A session's reward and score, from whoever holds its second key."""

    call: int
    key: str
    finish_key: str
    reward: float
    score: float | None


class Answered(msgspec.Struct, tag=True, frozen=True):
    """The answer to a chat's call as a message, as JSON: the client gets it, if it is still there."""

    call: int
    message: bytes


class Delivered(msgspec.Struct, tag=True, frozen=True):
    """The whole answer to a call was handed to the connection of a client that was there."""

    call: int


class Gone(msgspec.Struct, tag=True, frozen=True):
    """The client of a call has gone before it had the answer."""

    call: int


class Claimed(msgspec.Struct, tag=True, frozen=True):
    """A program elsewhere has taken a session; or has given it back, if not ``is_taken``."""

    key: str
    is_taken: bool


class Ended(msgspec.Struct, tag=True, frozen=True):
    """A program elsewhere has ended. If it failed, ``error`` says why, and the rest is as in ``Failure``."""

    key: str
    error: str
    detail: str
    place: str
    is_transient: bool


class Outside(msgspec.Struct, tag=True, frozen=True):
    """Why no program elsewhere takes sessions; empty if nothing is wrong."""

    problem: str


ToFront = Open | Close | Reply | Piece | Refuse | Accept | Join | Offered
OfPrograms = Claimed | Ended | Outside
ToGenerator = Call | Finish | Answered | Delivered | Gone | OfPrograms

_Message = TypeVar("_Message")
_encoder = msgspec.msgpack.Encoder()
_to_front = msgspec.msgpack.Decoder(ToFront)
_to_generator = msgspec.msgpack.Decoder(ToGenerator)


def pack(message: ToFront | ToGenerator) -> bytes:
    return pack_frame(_encoder.encode(message))


def take_for_front(buffer: bytearray) -> ToFront | None:
    """Remove the first message to the front from ``buffer`` and return it. None if it is incomplete.

    Raises:
        WireError: the bytes are no such message.
    """
    return _taken(buffer, _to_front)


def take_for_generator(buffer: bytearray) -> ToGenerator | None:
    """The same for a message to the generator."""
    return _taken(buffer, _to_generator)


def _taken(buffer: bytearray, decoder: msgspec.msgpack.Decoder[_Message]) -> _Message | None:
    body = take_frame(buffer, max_bytes=MAX_BYTES)
    if body is None:
        return None
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise WireError(
            f"expected a message between a generator and its HTTP front, got other bytes: {error}"
        ) from error
