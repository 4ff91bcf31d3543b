"""What one version of the weights consists of, and the proof of it. No torch.

A version is a list of buckets: flat byte strings of about ``bucket_bytes`` each, into which the tensors are laid one
after the other, ``ALIGNMENT``-aligned, the bytes between them zero. Staging writes manifests, receivers check what
they got against them. Digests are xxh3_128 in hex: they catch accidents, not attackers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgpack
import xxhash

from async_rl.codec import field
from async_rl.errors import WeightsError, WireError

ALIGNMENT = 64
_DIGEST_PIECE_BYTES = 4 << 20
_MAX_VERSION_BYTES = 1 << 44

ITEM_SIZES: Mapping[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "int16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "float32": 4, "int64": 8, "float64": 8,
}  # fmt: skip
"""Bytes of one element, by torch's name of the dtype."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor and its place: ``size_bytes`` bytes from ``offset`` of bucket number ``bucket``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bucket: int
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Where every tensor lies. The same for all versions of a run, since the model's tensors are."""

    tensors: tuple[TensorSpec, ...]
    bucket_sizes: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return sum(self.bucket_sizes)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A version's layout and digests. ``bucket_digests[i]`` is of all ``bucket_sizes[i]`` bytes of bucket ``i``."""

    lineage: str
    version: int
    tensors: tuple[TensorSpec, ...]
    bucket_sizes: tuple[int, ...]
    bucket_digests: tuple[str, ...]

    @property
    def size_bytes(self) -> int:
        return sum(self.bucket_sizes)

    @property
    def digest(self) -> str:
        """Digest of the weights as a whole: names, dtypes, shapes, layout and bytes.

        Lineage and version are left out, so equal weights have equal digests across a learner's restart.
        """
        content = [[_spec_row(spec) for spec in self.tensors], list(self.bucket_sizes), list(self.bucket_digests)]
        return digest_bytes(cast(bytes, msgpack.packb(content)))


class LayoutPlan:
    """Places tensors one by one, in the order in which they come."""

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._tensors: list[TensorSpec] = []
        self._closed_sizes: list[int] = []
        self._closed_bytes = 0
        self._end = 0

    def place(self, name: str, dtype: str, shape: Sequence[int]) -> TensorSpec:
        """The place of the next tensor. One that is larger than a bucket gets a larger bucket of its own.

        Raises:
            WeightsError: the dtype is not one that travels.
        """
        if dtype not in ITEM_SIZES:
            raise WeightsError(f"expected tensor {name!r} to be one of {sorted(ITEM_SIZES)}, got {dtype}")
        size = math.prod(shape) * ITEM_SIZES[dtype]
        offset = -(-self._end // ALIGNMENT) * ALIGNMENT
        if self._end and offset + size > self._bucket_bytes:
            self._closed_sizes.append(self._end)
            self._closed_bytes += self._end
            offset = 0
        spec = TensorSpec(name, dtype, tuple(shape), len(self._closed_sizes), offset, size)
        self._end = offset + size
        self._tensors.append(spec)
        return spec

    @property
    def layout_bytes(self) -> int:
        """Bytes of all tensors placed so far, the gaps between them included."""
        return self._closed_bytes + self._end

    def bucket_size(self, bucket: int) -> int:
        """Bytes of a bucket that no further tensor can enter."""
        return self._closed_sizes[bucket]

    @property
    def layout(self) -> Layout:
        """The layout of all tensors placed so far."""
        sizes = [*self._closed_sizes, self._end] if self._tensors else []
        return Layout(tuple(self._tensors), tuple(sizes))


def plan_layout(specs: Iterable[tuple[str, str, Sequence[int]]], bucket_bytes: int) -> Layout:
    """The layout of tensors given as (name, dtype, shape), in this order.

    Raises:
        WeightsError: a dtype does not travel.
    """
    plan = LayoutPlan(bucket_bytes)
    for name, dtype, shape in specs:
        plan.place(name, dtype, shape)
    return plan.layout


def digest_bytes(data: memoryview | bytes) -> str:
    """xxh3_128 of ``data`` in hex, in pieces, so that a thread decoding beside gets the interpreter in between."""
    hasher = xxhash.xxh3_128()
    view = memoryview(data)
    for start in range(0, len(view), _DIGEST_PIECE_BYTES):
        hasher.update(view[start : start + _DIGEST_PIECE_BYTES])
    return hasher.hexdigest()


def manifest_fields(manifest: Manifest) -> dict[str, Any]:
    """The manifest as plain data for the wire."""
    return {
        "lineage": manifest.lineage,
        "version": manifest.version,
        "tensors": [_spec_row(spec) for spec in manifest.tensors],
        "bucket_sizes": list(manifest.bucket_sizes),
        "bucket_digests": list(manifest.bucket_digests),
    }


def manifest_from_fields(fields: Mapping[str, Any]) -> Manifest:
    """The manifest in ``fields``, checked so far that buffers can be allocated by it.

    Raises:
        WireError: a field is missing or of another type, or tensors and buckets don't fit together.
    """
    sizes, digests = field(fields, "bucket_sizes", list), field(fields, "bucket_digests", list)
    if not all(type(size) is int and size >= 0 for size in sizes) or sum(sizes) > _MAX_VERSION_BYTES:
        raise WireError("expected 'bucket_sizes' to be byte counts")
    if len(digests) != len(sizes) or not all(isinstance(digest, str) for digest in digests):
        raise WireError(f"expected {len(sizes)} bucket digests, got {len(digests)}")
    tensors = tuple(_spec_from_row(row, sizes) for row in field(fields, "tensors", list))
    if len({spec.name for spec in tensors}) != len(tensors):
        raise WireError("expected every tensor once, got a name twice")
    return Manifest(field(fields, "lineage", str), field(fields, "version", int), tensors, tuple(sizes), tuple(digests))


def _spec_row(spec: TensorSpec) -> list[Any]:
    return [spec.name, spec.dtype, list(spec.shape), spec.bucket, spec.offset]


def _spec_from_row(row: Any, bucket_sizes: Sequence[int]) -> TensorSpec:
    match row:
        case [str(name), str(dtype), list(shape), int(bucket), int(offset)] if dtype in ITEM_SIZES:
            pass
        case _:
            raise WireError(f"expected a tensor [name, dtype, shape, bucket, offset], got {str(row)[:80]}")
    if not all(type(n) is int and n >= 0 for n in shape):
        raise WireError(f"impossible shape {str(shape)[:80]} of tensor {name!r}")
    size = math.prod(shape) * ITEM_SIZES[dtype]
    if not 0 <= bucket < len(bucket_sizes) or offset < 0 or offset % ALIGNMENT or offset + size > bucket_sizes[bucket]:
        raise WireError(f"tensor {name!r} lies outside its bucket: bucket {bucket}, offset {offset}, {size} bytes")
    return TensorSpec(name, dtype, tuple(shape), bucket, offset, size)
