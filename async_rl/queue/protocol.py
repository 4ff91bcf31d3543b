"""What the server and its clients agree on, beside the records that pass between them (``messages``). No sockets.

Every request carries ``request_id``; its reply carries the same. Any reply to a generator may carry ``announcement``,
``cancelled`` and ``finished`` (a ``notice``); a message of type ``notice`` without ``request_id`` carries only those.
The server hands what it has to say to one peer to the socket in one go, as the frames of one multipart message; its
reader takes them one by one, and each is a message of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from async_rl.errors import WireError
from async_rl.net.codec import field

RECEIVE_HIGH_WATER_MARK = 64
"""Messages of one peer that may wait in memory."""
EXTRA_MESSAGE_BYTES = 256 << 20
"""What a message may be larger than the queue: tokenizer files and headers."""
MAX_NAME_LENGTH = 256
MAX_PROBE_BYTES = 32 << 10
"""Of a probe, which goes out with every notice while its version is the newest; and of an answer to one."""


def as_array(data: bytes | bytearray | memoryview) -> np.ndarray:
    """Bytes as uint8 [N], a view."""
    return np.frombuffer(data, np.uint8)


def name(fields: Mapping[str, Any], key: str) -> str:
    """A name that the server keeps, and so a short one."""
    value = field(fields, key, str)
    if len(value) > MAX_NAME_LENGTH:
        raise WireError(f"expected {key!r} to be at most {MAX_NAME_LENGTH} characters, got {len(value)}")
    return value
