"""Messages between a generator and its environments' processes: JSON objects in frames of ``net.streams``.

From the generator: ``start`` (prompt, extra_info, seed, max_turns), ``sampled`` (text, finish_reason, num_tokens),
``over`` (no further turn), ``cancel``. To it: ``sample`` (state, max_tokens, stop), ``ended`` (turns: reward and score
of every action), ``failed`` (error), ``cancelled``. They are JSON, so a malformed message from an environment can do no
harm.
"""

from __future__ import annotations

import json
from typing import Any

from async_rl.errors import WireError
from async_rl.net.streams import pack_frame, take_frame

MAX_BYTES = 64 << 20


class FrameError(Exception):
    """A frame is too long, or no JSON object."""


def pack(message: dict[str, Any]) -> bytes:
    """``message`` as a frame.

    Raises:
        FrameError: it is no JSON, or too long.
    """
    try:
        body = json.dumps(message).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise FrameError(f"can't be sent: {error}") from error
    if len(body) > MAX_BYTES:
        raise FrameError(f"can't be sent: expected at most {MAX_BYTES} bytes, got {len(body)}")
    return pack_frame(body)


def unpack(buffer: bytearray) -> dict[str, Any] | None:
    """The first message in ``buffer``, taken out of it; None while it is not whole.

    Raises:
        FrameError: it is too long, or no JSON object.
    """
    try:
        body = take_frame(buffer, max_bytes=MAX_BYTES)
    except WireError as error:
        raise FrameError(str(error)) from error
    if body is None:
        return None
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"expected JSON: {error}") from error
    if not isinstance(message, dict):
        raise FrameError(f"expected a JSON object, got {type(message).__name__}")
    return message
