"""The wire format of all messages: a message is one frame (a byte string) and may have further byte strings, its parts.

Layout of a frame (little-endian)::

    magic "ARL1" | uint32 header length | msgpack header | padding | array 0 | padding | array 1 ...

The header is ``[schema, type, fields, [[dtype, shape, offset], ...], number of parts]``. Offsets count from the end of
the padded header and are multiples of ``ALIGNMENT``. The contents of a frame are checked against ``Limits`` and against
the frame's size before memory is allocated. Decoded arrays are read-only views of the frame.

*Parts* follow the frame as separate ZeroMQ frames, so that a process can forward them without copying or decoding. This
module only counts parts. The code that sends and receives frames handles them.

Error messages quote data with ``reprlib``, because the data may be huge, or nested more deeply than ``repr`` supports.
"""

from __future__ import annotations

import math
import reprlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np

from async_rl.errors import WireError

SCHEMA_VERSION = 3
ALIGNMENT = 16
SAME_VERSION = "install the same version of async-rl on every machine"
"""The end of error messages about a message that has another form than expected. It says what the user should do."""
_MAGIC = b"ARL1"
_PREFIX = struct.Struct("<4sI")
_DTYPES = {name: np.dtype(name) for name in ("|u1", "|b1", "<u2", "<i4", "<i8", "<f4", "<f8")}
_CONTAINERS = frozenset((dict, list))
_PLAIN = _CONTAINERS | {str, int, float, bool, bytes, type(None)}
_KEYS = frozenset((str, int, bool))
_NO_HEADER = (
    "malformed message: expected a header [schema, type, fields, arrays, number of parts], got another form; "
    f"{SAME_VERSION}"
)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the contents of a frame.

    ``max_items`` limits the length of every list and map in the fields. ``max_depth`` limits their nesting, the
    header's outer list included. If ``max_depth`` is None, the sender is trusted: these two limits and the types of the
    fields are not checked.
    """

    max_bytes: int = 1 << 30
    max_header_bytes: int = 64 << 20
    max_arrays: int = 65_536
    max_items: int = 1_000_000
    max_depth: int | None = 12


DEFAULT_LIMITS = Limits()
Frame = bytes | bytearray | memoryview


class Message(msgspec.Struct, frozen=True, eq=False):
    """A decoded message.

    Attributes:
        type: the name of the message's type.
        fields: the plain data of the message.
        arrays: read-only views of the frame.
        num_parts: the number of parts that follow the frame.
        parts: these parts; empty until ``with_parts`` adds them.
    """

    type: str
    fields: Mapping[str, Any]
    arrays: tuple[np.ndarray, ...] = ()
    num_parts: int = 0
    parts: tuple[Frame, ...] = ()

    def with_parts(self, parts: Iterable[Frame]) -> Message:
        """Return a copy of this message that has ``parts``.

        Raises:
            WireError: the number of parts is not ``num_parts``.
        """
        found = tuple(parts)
        if len(found) != self.num_parts:
            raise WireError(
                f"a {self.type!r} message: expected {self.num_parts} parts after its frame, got {len(found)}; "
                f"{SAME_VERSION}"
            )
        return Message(self.type, self.fields, self.arrays, self.num_parts, found) if found else self


Piece = bytes | memoryview
"""Some bytes of a frame. A memoryview must have items of one byte, so that ``len`` is its number of bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """An array for ``encode``, given as contiguous pieces of bytes that follow each other.

    ``encode`` copies the pieces into the frame. Joining them before would cost another copy. ``dtype`` is numpy's
    ``str`` of the dtype.
    """

    dtype: str
    shape: Sequence[int]
    pieces: Sequence[Piece]

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.pieces))


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _plain_number(value: Any) -> int | float:
    if isinstance(value, np.integer | np.floating):
        return value.item()
    raise TypeError(f"expected text, bytes, a number, a list or a map, got a {type(value).__name__}")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain_number)
_DECODER = msgspec.msgpack.Decoder()


def pack_plain(data: Any) -> bytes:
    """Return maps, lists, text, bytes and numbers (also those of numpy) as msgpack bytes. Tuples become lists.

    Raises:
        TypeError: the data contains another type.
        OverflowError, ValueError, RecursionError: the data is too large, or nested too deeply.
    """
    return _ENCODER.encode(data)


def encode(
    type_: str,
    fields: Mapping[str, Any] | msgspec.Struct,
    arrays: Sequence[np.ndarray | Pieces] = (),
    *,
    num_parts: int = 0,
) -> bytes:
    """Encode a message of the type ``type_`` as one frame.

    ``num_parts`` is the number of parts that will follow the frame. Arrays are written C-contiguous and little-endian.
    Numbers of numpy are written as plain numbers.

    Raises:
        WireError: an array's dtype is not one of uint8, bool, uint16, int32, int64, float32, float64; or the fields
            are not plain data.
    """
    table: list[list[Any]] = []
    bodies: list[Piece] = []
    offset = 0
    for array in arrays:
        if isinstance(array, Pieces):
            dtype, num_bytes, shape, pieces = array.dtype, array.num_bytes, array.shape, array.pieces
        else:
            body = np.ascontiguousarray(array)
            dtype, num_bytes, shape = body.dtype.str, body.nbytes, array.shape
            pieces = (body.reshape(-1).view(np.uint8).data,)
        if dtype not in _DTYPES:
            raise WireError(f"array of a {type_!r} message: expected a dtype in {sorted(_DTYPES)}, got {dtype}")
        table.append([dtype, shape, offset])
        padded = _padded(num_bytes)
        bodies += (*pieces, bytes(padded - num_bytes))
        offset += padded
    plain = dict(fields) if isinstance(fields, Mapping) else fields
    try:
        header = pack_plain([SCHEMA_VERSION, type_, plain, table, num_parts])
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WireError(f"a {type_!r} message can't be encoded: {error}") from error
    size = _PREFIX.size + len(header)
    return b"".join((_PREFIX.pack(_MAGIC, len(header)), header, bytes(_padded(size) - size), *bodies))


def decode(frame: Frame, limits: Limits = DEFAULT_LIMITS) -> Message:
    """Decode the message in ``frame``, without its parts.

    Raises:
        WireError: the frame is malformed, oversized, nested too deeply, of another schema, or a length in it is wrong.
    """
    view = memoryview(frame).toreadonly()
    (_, type_, fields, table, num_parts), start = _header(view, limits)
    try:
        entries = msgspec.convert(table, list[_ArrayEntry])
    except msgspec.ValidationError as error:
        raise WireError(f"malformed message: array entry [dtype, shape, offset]: {error}; {SAME_VERSION}") from error
    return Message(type_, fields, tuple(_array(view, start, entry) for entry in entries), num_parts)


class _ArrayEntry(msgspec.Struct, array_like=True, gc=False):
    dtype: str
    shape: Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=2**40)]], msgspec.Meta(max_length=4)]
    offset: Annotated[int, msgspec.Meta(ge=0, multiple_of=ALIGNMENT)]


def _header(view: memoryview, limits: Limits) -> tuple[list[Any], int]:
    """Return a frame's header, and the offset of the first array in the frame."""
    if len(view) > limits.max_bytes:
        raise WireError(f"expected a message of at most {limits.max_bytes} bytes, got one of {len(view)} bytes")
    if len(view) < _PREFIX.size:
        raise WireError(
            f"expected a message of at least {_PREFIX.size} bytes, got one of {len(view)} bytes; the sender is "
            f"probably not async-rl"
        )
    magic, length = _PREFIX.unpack_from(view)
    if magic != _MAGIC:
        raise WireError(
            f"expected a message that begins with {_MAGIC!r}, got {bytes(magic)!r}; the sender is not async-rl"
        )
    if length > limits.max_header_bytes or _PREFIX.size + length > len(view):
        raise WireError(
            f"malformed message of {len(view)} bytes: expected a header that fits into it and into "
            f"{limits.max_header_bytes} bytes, got one of {length} bytes"
        )
    header = _unpacked(view[_PREFIX.size : _PREFIX.size + length])
    if not isinstance(header, list) or len(header) != 5:
        raise WireError(_NO_HEADER)
    schema, type_, fields, table, num_parts = header
    if schema != SCHEMA_VERSION:
        raise WireError(
            f"expected a message of schema {SCHEMA_VERSION}, got schema {reprlib.repr(schema)}; {SAME_VERSION}"
        )
    if [type(item) for item in (type_, fields, table, num_parts)] != [str, dict, list, int]:
        raise WireError(_NO_HEADER)
    if len(table) > limits.max_arrays or not 0 <= num_parts <= limits.max_arrays:
        raise WireError(
            f"expected at most {limits.max_arrays} arrays and 0 to {limits.max_arrays} parts in a message, got "
            f"{len(table)} arrays and {num_parts} parts"
        )
    if limits.max_depth is not None:
        _check_plain(fields, limits.max_items, limits.max_depth)
    return header, _padded(_PREFIX.size + length)


def _unpacked(raw: memoryview) -> Any:
    """Decode msgpack. msgspec limits the nesting, and allocates no memory for items that the data does not contain."""
    try:
        return _DECODER.decode(raw)
    except (ValueError, TypeError, RecursionError) as error:
        raise WireError(
            f"malformed message: its header is not msgpack: {type(error).__name__}: {error}; {SAME_VERSION}"
        ) from error


def _check_plain(fields: dict[Any, Any], max_items: int, max_depth: int) -> None:
    """Check that a message's fields are plain data within the limits on length and nesting.

    The function handles one level of nesting at a time, mostly in C, because it reads every item of every message.
    """
    level: list[Any] = [fields]
    for _ in range(max_depth - 1):
        deeper: list[Any] = []
        for container in level:
            if len(container) > max_items:
                raise WireError(
                    f"expected lists and maps of at most {max_items} items in a message, got {len(container)}"
                )
            values = container
            if type(container) is dict:
                if not _KEYS.issuperset(map(type, container)):
                    unfit = next(type(key) for key in container if type(key) not in _KEYS)
                    raise WireError(
                        f"expected maps with text or integer keys in a message, got a key of type {unfit.__name__}"
                    )
                values = container.values()
            kinds = set(map(type, values))
            if not kinds <= _PLAIN:
                # For example extension types of msgpack, such as timestamps.
                raise WireError(f"expected plain data in a message, got a {(kinds - _PLAIN).pop().__name__}")
            if not _CONTAINERS.isdisjoint(kinds):
                deeper += [value for value in values if type(value) in _CONTAINERS]
        if not deeper:
            return
        level = deeper
    raise WireError(f"expected fields nested at most {max_depth} levels deep in a message, got more levels")


def _array(view: memoryview, start: int, entry: _ArrayEntry) -> np.ndarray:
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise WireError(f"array of a message: expected a dtype in {sorted(_DTYPES)}, got {reprlib.repr(entry.dtype)}")
    end = start + entry.offset + math.prod(entry.shape) * dtype.itemsize
    if end > len(view):
        raise WireError(
            f"malformed message: expected an array that ends within its {len(view)} bytes, got one that ends at {end}"
        )
    try:
        return np.ndarray(entry.shape, dtype, view, start + entry.offset)
    except ValueError as error:  # If one axis is 0, the others may be too large for numpy.
        raise WireError(
            f"array of a message: expected a shape that numpy supports, got {reprlib.repr(entry.shape)}: {error}"
        ) from error
