"""The manifest of one version of the weights: its tensors, their layout in memory, and digests. No torch.

A version is a list of buckets. A bucket is a flat byte string of about ``bucket_bytes``. It holds tensors one after
the other. Each tensor begins at a multiple of ``ALIGNMENT`` bytes, and zeros fill the gaps. The learner's staging
writes manifests. Receivers verify the bytes that they received against the manifest. Digests are xxh3_128 in hex:
they detect accidents, not attackers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import xxhash

from async_rl.errors import WeightsError, WireError
from async_rl.net.codec import read_as
from async_rl.net.wire import SAME_VERSION, pack_plain
from async_rl.records import Count

ALIGNMENT = 64
_DIGEST_PIECE_BYTES = 4 << 20
_MAX_VERSION_BYTES = 1 << 44

ITEM_SIZES: Mapping[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "int16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "float32": 4, "int64": 8, "float64": 8,
}  # fmt: skip
"""Bytes of one element, keyed by the torch name of the dtype."""


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """The name, dtype and shape of a tensor, and its place: it begins at byte ``offset`` of bucket ``bucket``."""

    name: str
    dtype: str
    shape: tuple[Count, ...]
    bucket: Count
    offset: Count

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class Layout:
    """The places of all tensors, and the size of each bucket in bytes. All versions of a run have the same layout."""

    tensors: tuple[TensorSpec, ...]
    bucket_sizes: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return sum(self.bucket_sizes)


class Manifest(msgspec.Struct, frozen=True, dict=True):
    """The layout and the digests of one version of the weights.

    Attributes:
        lineage: identifies the series of versions that one start of a run publishes.
        version: number of the version.
        tensors: the name, dtype, shape and place of each tensor.
        bucket_sizes: bytes of each bucket.
        bucket_digests: ``bucket_digests[i]`` is the digest of all bytes of bucket ``i``.
    """

    lineage: str
    version: int
    tensors: tuple[TensorSpec, ...]
    bucket_sizes: tuple[Count, ...]
    bucket_digests: tuple[str, ...]

    @cached_property
    def digest(self) -> str:
        """Digest of the weights as a whole: names, dtypes, shapes, layout and bytes.

        It does not cover ``lineage`` and ``version``, so equal weights have equal digests after a restart of the
        learner.
        """
        return digest_bytes(pack_plain([self.tensors, self.bucket_sizes, self.bucket_digests]))

    @property
    def size_bytes(self) -> int:
        return sum(self.bucket_sizes)


class LayoutPlan:
    """Builds a ``Layout``: gives each tensor a place in a bucket, in the order of the calls of ``place``."""

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._tensors: list[TensorSpec] = []
        self._closed_sizes: list[int] = []
        self._closed_bytes = 0
        self._end = 0

    def place(self, name: str, dtype: str, shape: Sequence[int]) -> TensorSpec:
        """Add a tensor to the layout and return its place. A tensor larger than ``bucket_bytes`` gets a bucket for
        itself.

        Raises:
            WeightsError: the dtype is not in ``ITEM_SIZES``.
        """
        if dtype not in ITEM_SIZES:
            raise WeightsError(
                f"tensor {name!r} of the model: expected a dtype in {sorted(ITEM_SIZES)}, got {dtype}; use a model "
                f"with other dtypes"
            )
        size = math.prod(shape) * ITEM_SIZES[dtype]
        offset = -(-self._end // ALIGNMENT) * ALIGNMENT
        if self._end and offset + size > self._bucket_bytes:
            self._closed_sizes.append(self._end)
            self._closed_bytes += self._end
            offset = 0
        spec = TensorSpec(name, dtype, tuple(shape), len(self._closed_sizes), offset)
        self._end = offset + size
        self._tensors.append(spec)
        return spec

    @property
    def layout_bytes(self) -> int:
        """Bytes of all tensors placed so far, including the gaps between them."""
        return self._closed_bytes + self._end

    def bucket_size(self, bucket: int) -> int:
        """Return the size in bytes of a bucket that gets no further tensors."""
        return self._closed_sizes[bucket]

    @property
    def layout(self) -> Layout:
        """The layout of all tensors placed so far."""
        sizes = [*self._closed_sizes, self._end] if self._tensors else []
        return Layout(tuple(self._tensors), tuple(sizes))


def digest_bytes(data: memoryview | bytes) -> str:
    """Return the xxh3_128 of ``data`` in hex. It is computed in pieces, so that other threads run in between."""
    hasher = xxhash.xxh3_128()
    view = memoryview(data)
    for start in range(0, len(view), _DIGEST_PIECE_BYTES):
        hasher.update(view[start : start + _DIGEST_PIECE_BYTES])
    return hasher.hexdigest()


def manifest_from_fields(fields: Mapping[str, Any]) -> Manifest:
    """Return the manifest whose fields a message has. All values are checked, because they come over the network.

    Raises:
        WireError: a field is missing or has another type, or the tensors do not fit into the buckets.
    """
    found = read_as(fields, Manifest)
    sizes, digests, tensors = found.bucket_sizes, found.bucket_digests, found.tensors
    if sum(sizes) > _MAX_VERSION_BYTES:
        raise WireError(
            f"manifest: expected buckets of at most {_MAX_VERSION_BYTES} bytes in all, got {sum(sizes)}; {SAME_VERSION}"
        )
    if len(digests) != len(sizes):
        raise WireError(
            f"manifest: expected a digest for each of {len(sizes)} buckets, got {len(digests)} digests; {SAME_VERSION}"
        )
    for spec in tensors:
        _check_place(spec, sizes)
    if len({spec.name for spec in tensors}) != len(tensors):
        raise WireError(f"manifest: expected every tensor name once, got a name twice; {SAME_VERSION}")
    return found


def _check_place(spec: TensorSpec, bucket_sizes: Sequence[int]) -> None:
    if spec.dtype not in ITEM_SIZES:
        raise WireError(
            f"manifest: tensor {spec.name!r}: expected a dtype in {sorted(ITEM_SIZES)}, got {spec.dtype[:80]!r}; "
            f"{SAME_VERSION}"
        )
    size = spec.size_bytes
    is_inside = spec.bucket < len(bucket_sizes) and spec.offset + size <= bucket_sizes[spec.bucket]
    if not is_inside or spec.offset % ALIGNMENT:
        raise WireError(
            f"manifest: tensor {spec.name!r}: expected a place inside a bucket, at a multiple of {ALIGNMENT} bytes, "
            f"got offset {spec.offset} of bucket {spec.bucket} for {size} bytes; {SAME_VERSION}"
        )
