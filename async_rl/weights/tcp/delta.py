"""Computes and applies the exact difference between two versions of a bucket. Pure: byte arrays in, bytes out.

An optimizer step at a learning rate of 1e-6 changes few bfloat16 weights, so most elements keep their bits. The format:

- A bucket is cut into runs of elements of the same width, and these into pieces of at most ``PIECE_ELEMENTS``.
- A piece is *same* (no element changed, nothing follows), *sparse* (the gaps between changed elements, then the
  differences of these), or *dense* (the differences of all elements, for float32 weights, which all change a little).
- A difference is that of the bit patterns as integers modulo 2 ** bits. It is small if the weight changed by few units
  in the last place. It is exact for every bit pattern, including NaN.
- Differences are stored as byte planes: plane n holds the n-th byte of every difference. The upper bytes of small
  differences are equal, so each plane is compressed with zstandard if that makes it smaller.

Shape letters: E = elements of a piece, C = changed elements.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import numpy as np
import zstandard

from async_rl.errors import WeightsError
from async_rl.weights.manifest import ITEM_SIZES, TensorSpec

PIECE_ELEMENTS = 1 << 20
Runs = Sequence[tuple[int, int]]
"""Runs of one bucket, in order: (end in bytes, element width). A run begins where the one before it ends."""

_SAME, _SPARSE, _DENSE = range(3)
_PIECE = struct.Struct("<BI")
_PLANE = struct.Struct("<BI")
_ESCAPE = 255
"""A gap byte with this value means: skip as many elements, and none of them changed."""
_LEVEL = 1


def element_runs(tensors: Sequence[TensorSpec], bucket_sizes: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return the runs of every bucket of a layout. The zeros between two tensors belong to the first of the two.

    A run is a pair (end in bytes, width of an element in bytes). It begins where the run before it ends.
    """
    runs: list[list[tuple[int, int]]] = [[] for _ in bucket_sizes]
    widths: list[int] = [1] * len(bucket_sizes)
    for spec in sorted(tensors, key=lambda spec: (spec.bucket, spec.offset)):
        width = ITEM_SIZES[spec.dtype]
        if spec.size_bytes == 0:
            continue
        if spec.offset and width != widths[spec.bucket]:
            runs[spec.bucket].append((spec.offset, widths[spec.bucket]))
        widths[spec.bucket] = width
    for bucket, size in enumerate(bucket_sizes):
        if size:
            runs[bucket].append((size, widths[bucket]))
    return runs


def encode_delta(base: np.ndarray, target: np.ndarray, runs: Runs) -> bytes | None:
    """Return the delta that turns ``base`` into ``target``, both uint8 [N]. None if it is no smaller than
    ``target``.
    """
    compressor = zstandard.ZstdCompressor(level=_LEVEL)
    parts: list[bytes] = []
    size, limit = 0, len(target)
    for old_E, new_E in zip(_pieces(base, runs), _pieces(target, runs), strict=True):
        piece = _encode_piece(old_E, new_E, compressor)
        size += len(piece)
        if size >= limit:
            return None
        parts.append(piece)
    return b"".join(parts)


def apply_delta(bucket: np.ndarray, delta: bytes | memoryview, runs: Runs) -> None:
    """Turn ``bucket``, uint8 [N], from the base into the target of ``delta``, in place.

    Raises:
        WeightsError: the delta is malformed, or made for another layout. The bucket's contents are then undefined.
    """
    reader = _Reader(delta)
    for values_E in _pieces(bucket, runs):
        kind, num_changed = reader.header(_PIECE)
        if kind == _SAME and num_changed == 0:
            continue
        if kind == _DENSE and num_changed == len(values_E):
            values_E += reader.planes(num_changed, values_E.dtype)
        elif kind == _SPARSE and 0 < num_changed <= len(values_E):
            index_C = _positions(reader.plane(max_size=num_changed + len(values_E) // _ESCAPE), num_changed)
            if index_C[-1] >= len(values_E):
                raise WeightsError(
                    f"malformed delta of weights: expected indices below {len(values_E)}, got {index_C[-1]}"
                )
            values_E[index_C] += reader.planes(num_changed, values_E.dtype)
        else:
            raise WeightsError(
                f"malformed delta of weights: expected a piece of kind 0, 1 or 2 with at most {len(values_E)} changed "
                f"elements, got kind {kind} with {num_changed}"
            )
    reader.expect_end()


def _pieces(bucket: np.ndarray, runs: Runs) -> Iterator[np.ndarray]:
    """Yield the pieces of a bucket as unsigned integers [E] that are views into its memory.

    Bytes at the end of a run that form no whole element are yielded as uint8.
    """
    start = 0
    for end, width in runs:
        whole = start + (end - start) // width * width
        elements = bucket[start:whole].view(f"<u{width}")
        for first in range(0, len(elements), PIECE_ELEMENTS):
            yield elements[first : first + PIECE_ELEMENTS]
        if whole < end:
            yield bucket[whole:end]
        start = end


def _encode_piece(old_E: np.ndarray, new_E: np.ndarray, compressor: zstandard.ZstdCompressor) -> bytes:
    changed_E = old_E != new_E
    num_changed = int(np.count_nonzero(changed_E))
    if num_changed == 0:
        return _PIECE.pack(_SAME, 0)
    width = old_E.dtype.itemsize
    if num_changed * (1 + width) >= len(old_E) * width:
        return _PIECE.pack(_DENSE, len(old_E)) + _encode_planes(new_E - old_E, compressor)
    index_C = np.flatnonzero(changed_E)
    gaps = _encode_plane(_gaps(index_C), compressor)
    return _PIECE.pack(_SPARSE, num_changed) + gaps + _encode_planes(new_E[index_C] - old_E[index_C], compressor)


def _gaps(index_C: np.ndarray) -> np.ndarray:
    """Encode the ascending positions ``index_C`` as uint8: the number of unchanged elements before each changed one.

    A larger number than 254 is written as a 255 for every 255 elements, then a byte below 255.
    """
    gap_C = np.diff(index_C, prepend=-1) - 1
    escapes_C = gap_C // _ESCAPE
    at_C = np.arange(len(gap_C)) + np.cumsum(escapes_C)
    out = np.full(at_C[-1] + 1, _ESCAPE, np.uint8)
    out[at_C] = gap_C % _ESCAPE
    return out


def _positions(gaps: np.ndarray, num_changed: int) -> np.ndarray:
    """Return the ascending positions, int64 [C], that ``_gaps`` encoded."""
    is_element = gaps != _ESCAPE
    num_found = int(np.count_nonzero(is_element))
    if num_found != num_changed or not is_element[-1:].all():
        raise WeightsError(
            f"malformed delta of weights: expected {num_changed} changed elements, as in its header, got {num_found}"
            + ("" if num_found != num_changed else ", then a gap without an element")
        )
    return np.cumsum(gaps, dtype=np.int64)[is_element] + np.arange(num_changed)


def _encode_planes(values: np.ndarray, compressor: zstandard.ZstdCompressor) -> bytes:
    by_byte = values.view(np.uint8).reshape(len(values), values.dtype.itemsize)
    return b"".join(_encode_plane(np.ascontiguousarray(plane), compressor) for plane in by_byte.T)


def _encode_plane(plane: np.ndarray, compressor: zstandard.ZstdCompressor) -> bytes:
    packed = compressor.compress(plane.data)
    if len(packed) < plane.nbytes:
        return _PLANE.pack(1, len(packed)) + packed
    return _PLANE.pack(0, plane.nbytes) + plane.tobytes()


class _Reader:
    """Reads the parts of a delta in their order. Allocates no more memory than the bucket's size allows."""

    def __init__(self, delta: bytes | memoryview) -> None:
        self._rest = memoryview(delta)
        self._decompressor = zstandard.ZstdDecompressor()

    def header(self, layout: struct.Struct) -> tuple[int, int]:
        first, second = layout.unpack(self._take(layout.size))
        return first, second

    def plane(self, *, max_size: int) -> np.ndarray:
        """Read and decompress the next byte plane. Return it as uint8 [N], where N is at most ``max_size``."""
        is_packed, size = self.header(_PLANE)
        data = self._take(size)
        if is_packed:
            try:
                plain = zstandard.get_frame_parameters(data).content_size
                if plain > max_size:
                    raise WeightsError(
                        f"malformed delta of weights: expected at most {max_size} bytes in one part of the delta, got "
                        f"{plain}"
                    )
                data = self._decompressor.decompress(data)
            except zstandard.ZstdError as error:
                raise WeightsError(f"malformed delta of weights: it can't be decompressed: {error}") from error
        if len(data) > max_size:
            raise WeightsError(
                f"malformed delta of weights: expected at most {max_size} bytes in one part of the delta, got "
                f"{len(data)}"
            )
        return np.frombuffer(data, np.uint8)

    def planes(self, count: int, dtype: np.dtype) -> np.ndarray:
        """Read the byte planes of ``count`` differences. Return the differences, [count], with the given dtype."""
        by_byte = np.empty((count, dtype.itemsize), np.uint8)
        for byte in range(dtype.itemsize):
            plane = self.plane(max_size=count)
            if len(plane) != count:
                raise WeightsError(f"malformed delta of weights: expected {count} differences, got {len(plane)}")
            by_byte[:, byte] = plane
        return by_byte.reshape(-1).view(dtype)

    def expect_end(self) -> None:
        if len(self._rest):
            raise WeightsError(f"malformed delta of weights: expected its end, got {len(self._rest)} more bytes")

    def _take(self, size: int) -> memoryview:
        if size > len(self._rest):
            raise WeightsError(f"malformed delta of weights: expected {size} more bytes, got {len(self._rest)}")
        part, self._rest = self._rest[:size], self._rest[size:]
        return part
