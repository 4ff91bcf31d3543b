"""Frames: one message is one contiguous byte string, read without copying its arrays.

Layout (little-endian)::

    magic "ARL1" | uint32 header length | msgpack header | padding | array 0 | padding | array 1 ...

The header is ``[schema, type, fields, [[dtype, shape, offset], ...]]``; offsets count from the end of the padded
header and are multiples of ``ALIGNMENT``. Everything read from a frame is checked against ``Limits`` before
anything is allocated, and arrays are read-only views into the frame.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from async_rl.errors import WireError

SCHEMA_VERSION = 1
ALIGNMENT = 16
_MAGIC = b"ARL1"
_PREFIX = struct.Struct("<4sI")
_DTYPES = {name: np.dtype(name) for name in ("|u1", "|b1", "<i4", "<i8", "<f4", "<f8")}


@dataclass(frozen=True, slots=True)
class Limits:
    """What a frame may claim. ``max_items`` bounds every list, map and string-key count of the header."""

    max_bytes: int = 1 << 30
    max_header_bytes: int = 64 << 20
    max_arrays: int = 65_536
    max_items: int = 1_000_000
    max_depth: int = 12


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Message:
    """A decoded frame; ``arrays`` are read-only views into it."""

    type: str
    fields: Mapping[str, Any]
    arrays: tuple[np.ndarray, ...] = ()


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def encode(type_: str, fields: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()) -> bytes:
    """One frame. Arrays are written C-contiguous and little-endian.

    Raises:
        WireError: an array's dtype is not one of uint8, bool, int32, int64, float32, float64.
    """
    table: list[list[Any]] = []
    bodies: list[np.ndarray] = []
    offset = 0
    for array in arrays:
        body = np.ascontiguousarray(array)
        if body.dtype.str not in _DTYPES:
            raise WireError(f"expected a dtype of {sorted(_DTYPES)}, got {body.dtype.str} in a {type_!r} message")
        table.append([body.dtype.str, list(array.shape), offset])
        bodies.append(body)
        offset += _padded(body.nbytes)
    try:
        header: bytes = msgpack.Packer(use_bin_type=True).pack([SCHEMA_VERSION, type_, dict(fields), table])
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"fields of a {type_!r} message are not plain data: {error}") from error
    start = _padded(_PREFIX.size + len(header))
    frame = bytearray(start + offset)
    _PREFIX.pack_into(frame, 0, _MAGIC, len(header))
    frame[_PREFIX.size : _PREFIX.size + len(header)] = header
    for (_, _, at), body in zip(table, bodies, strict=True):
        frame[start + at : start + at + body.nbytes] = body.reshape(-1).view(np.uint8).data
    return bytes(frame)


def decode(frame: bytes | memoryview, limits: Limits = DEFAULT_LIMITS) -> Message:
    """The message in ``frame``.

    Raises:
        WireError: the frame is malformed, oversized, nested too deeply, of another schema, or lies about a length.
    """
    view = memoryview(frame)
    type_, fields, table, start = _header(view, limits)
    arrays = tuple(_array(view, start, entry) for entry in table)
    return Message(type_, fields, arrays)


def _header(view: memoryview, limits: Limits) -> tuple[str, dict[str, Any], list[Any], int]:
    if len(view) > limits.max_bytes:
        raise WireError(f"expected at most {limits.max_bytes} bytes, got {len(view)}")
    if len(view) < _PREFIX.size:
        raise WireError(f"expected at least {_PREFIX.size} bytes, got {len(view)}")
    magic, length = _PREFIX.unpack_from(view)
    if magic != _MAGIC:
        raise WireError(f"expected a frame that begins with {_MAGIC!r}, got {bytes(magic)!r}")
    if length > limits.max_header_bytes or _PREFIX.size + length > len(view):
        raise WireError(f"header claims {length} bytes, frame has {len(view)}")
    raw = view[_PREFIX.size : _PREFIX.size + length]
    try:
        header = msgpack.unpackb(
            raw,
            raw=False,
            strict_map_key=False,
            max_array_len=limits.max_items,
            max_map_len=limits.max_items,
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise WireError(f"header is not msgpack: {type(error).__name__}: {error}") from error
    if not isinstance(header, list) or len(header) != 4:
        raise WireError("header is not [schema, type, fields, arrays]")
    schema, type_, fields, table = header
    if schema != SCHEMA_VERSION:
        raise WireError(f"expected schema {SCHEMA_VERSION}, got {schema!r}; run one async-rl version everywhere")
    if not isinstance(type_, str) or not isinstance(fields, dict) or not isinstance(table, list):
        raise WireError("header is not [schema, type, fields, arrays]")
    if len(table) > limits.max_arrays:
        raise WireError(f"expected at most {limits.max_arrays} arrays, got {len(table)}")
    _check_depth(fields, limits.max_depth)
    return type_, fields, table, _padded(_PREFIX.size + length)


def _check_depth(value: Any, depth: int) -> None:
    if depth == 0:
        raise WireError("fields are nested too deeply")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str | int):
                raise WireError(f"expected text or integer keys, got {type(key).__name__}")
            _check_depth(item, depth - 1)
    elif isinstance(value, list):
        for item in value:
            if isinstance(item, dict | list):
                _check_depth(item, depth - 1)


def _array(view: memoryview, start: int, entry: Any) -> np.ndarray:
    match entry:
        case [str(dtype_name), list(shape), int(offset)] if dtype_name in _DTYPES and len(shape) <= 4:
            pass
        case _:
            raise WireError(f"expected an array entry [dtype, shape, offset], got {str(entry)[:80]}")
    if not all(isinstance(n, int) and 0 <= n < 2**40 for n in shape) or offset < 0 or offset % ALIGNMENT:
        raise WireError(f"impossible shape {str(shape)[:80]} or offset {offset}")
    dtype = _DTYPES[dtype_name]
    count = math.prod(shape)
    end = start + offset + count * dtype.itemsize
    if end > len(view):
        raise WireError(f"array claims bytes up to {end}, frame has {len(view)}")
    array = np.frombuffer(view, dtype=dtype, count=count, offset=start + offset).reshape(shape)
    array.flags.writeable = False
    return array
