"""Messages between a generator and its environments' processes: a uint32 length and JSON, on a stream socket.

From the generator: ``start`` (prompt, extra_info, seed, max_turns), ``sampled`` (text, finish_reason, num_tokens),
``over`` (no further turn), ``cancel``. To it: ``sample`` (state, max_tokens, stop), ``ended`` (turns: reward and score
of every action), ``failed`` (error), ``cancelled``. JSON, so that what an environment sends can be wrong, and no more.
"""

from __future__ import annotations

import json
import struct
from typing import Any

LENGTH = struct.Struct("<I")
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
    return LENGTH.pack(len(body)) + body


def unpack(buffer: bytearray) -> dict[str, Any] | None:
    """The first message in ``buffer``, taken out of it; None while it is not whole.

    Raises:
        FrameError: it is too long, or no JSON object.
    """
    if len(buffer) < LENGTH.size:
        return None
    size = LENGTH.unpack_from(buffer)[0]
    if size > MAX_BYTES:
        raise FrameError(f"expected at most {MAX_BYTES} bytes, got {size}")
    end = LENGTH.size + size
    if len(buffer) < end:
        return None
    try:
        message = json.loads(buffer[LENGTH.size : end])
    except (ValueError, RecursionError) as error:
        raise FrameError(f"expected JSON: {error}") from error
    del buffer[:end]
    if not isinstance(message, dict):
        raise FrameError(f"expected a JSON object, got {type(message).__name__}")
    return message
