"""Reads and checks ``.metadata``, in which torch.distributed.checkpoint says where each part of each tensor is stored.

The file may come from anybody, so it is read without running any of it (``plain_pickle.py``). Only what torch writes
for plain tensors is admitted, and it must agree with the files: each tensor is covered exactly once by its parts
(chunks), and each chunk lies within a file of the checkpoint that is as long as the metadata says. So whoever loads the
tensors allocates no more memory than the checkpoint has bytes on disk, and reads no file outside of the checkpoint.

Called by ``stored_tensors.py``.
"""

from __future__ import annotations

import math
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from async_rl.errors import RunError
from async_rl.learner.checkpoints.files import USE_ANOTHER
from async_rl.learner.checkpoints.plain_pickle import Name, Record, UnreadablePickleError, read_pickle

METADATA = ".metadata"
MAX_BYTES = 1 << 30
"""Longest ``.metadata`` that is read. 100 bytes describe a chunk, so this is enough for ten million."""
_MIN_CHUNK_BYTES = 16
"""Fewest bytes of ``.metadata`` for a chunk. More chunks would be the same ones many times."""
_MAX_DIMENSIONS = 16
_DATA_FILE = re.compile(r"__\d+_\d+\.distcp")

DTYPES: Mapping[str, torch.dtype] = {
    f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}
"""All dtypes, by the names under which pickles have them."""

_DCP = "torch.distributed.checkpoint"
_METADATA = f"{_DCP}.metadata.Metadata"
_TENSOR = f"{_DCP}.metadata.TensorStorageMetadata"
_PROPERTIES = f"{_DCP}.metadata.TensorProperties"
_CHUNK = f"{_DCP}.metadata.ChunkStorageMetadata"
_INDEX = f"{_DCP}.metadata.MetadataIndex"
_PLACE = f"{_DCP}.filesystem._StorageInfo"
_SIZE = "torch.Size"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chunk is stored: ``length`` bytes of a file of the checkpoint, from the byte ``offset`` on."""

    file: str
    offset: int
    length: int


class _MalformedError(ValueError):
    """The metadata is not what torch writes for tensors, or does not agree with the files."""


def read_metadata(directory: Path) -> Metadata:
    """Return the metadata of the checkpoint ``directory``. It has only tensors. ``storage_data`` has a ``Place`` for
    every chunk.

    Raises:
        RunError: the file is missing or damaged, or does not agree with the files of the checkpoint.
    """
    path = directory / METADATA
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise _MalformedError(f"{size} bytes, more than {MAX_BYTES}")
        data = path.read_bytes()
    except OSError as error:
        raise RunError(f"expected a checkpoint in {directory}, but can't read it: {error}; {USE_ANOTHER}") from error
    except _MalformedError as error:
        raise _refusal(path, error) from None
    try:
        plain = _fields(read_pickle(data), _METADATA)
        tensors = _tensors(plain.get("state_dict_metadata"), max_chunks=len(data) // _MIN_CHUNK_BYTES)
        places = _places(plain.get("storage_data"))
        _check_files(directory, places.values())
        _check_places(tensors, places)
    except (UnreadablePickleError, _MalformedError) as error:
        raise _refusal(path, error) from error
    return Metadata(state_dict_metadata=dict(tensors), storage_data=places)


def _refusal(path: Path, error: Exception) -> RunError:
    return RunError(f"{path}: expected what torch writes for a checkpoint's tensors, got: {error}; {USE_ANOTHER}")


def _fields(value: Any, kind: str) -> dict[Any, Any]:
    """Return the attributes of the object ``value``, which must be one of the class ``kind``."""
    if type(value) is not Record or value.kind != kind or type(value.content) is not dict:
        got = value.kind if type(value) is Record else type(value).__name__
        raise _MalformedError(f"{got[:100]} where {kind} is expected")
    return value.content


def _tensors(found: Any, *, max_chunks: int) -> dict[str, TensorStorageMetadata]:
    """Return the tensors, of which each is covered exactly once by its chunks."""
    tensors: dict[str, TensorStorageMetadata] = {}
    num_chunks = 0
    for name, value in _dict(found).items():
        if type(name) is not str:
            raise _MalformedError("a tensor without a name")
        fields = _fields(value, _TENSOR)
        size, dtype = _size(fields.get("size")), _dtype(fields.get("properties"))
        listed: Any = fields.get("chunks")
        num_chunks += len(listed) if type(listed) is list else 0
        if type(listed) is not list or num_chunks > max_chunks:
            raise _MalformedError(f"no list of chunks for {name}, or too many")
        chunks = [_chunk(chunk) for chunk in listed]
        if not _is_covered(size, chunks):
            raise _MalformedError(f"chunks that don't cover {name}, of shape {list(size)}, exactly once")
        tensors[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)
    return tensors


def _places(found: Any) -> dict[MetadataIndex, Place]:
    places: dict[MetadataIndex, Place] = {}
    for key, value in _dict(found).items():
        index, place = _fields(key, _INDEX), _fields(value, _PLACE)
        name: Any = index.get("fqn")
        file, offset, length = (cast(Any, place.get(key)) for key in ("relative_path", "offset", "length"))
        if type(name) is not str or type(file) is not str or not _is_count(offset) or not _is_count(length):
            raise _MalformedError("a place that is no file, offset and length")
        if place.get("transform_descriptors"):
            raise _MalformedError(f"a transformation of {name}, which async-rl does not use")
        if not _DATA_FILE.fullmatch(file):
            raise _MalformedError(f"the file {file[:100]!r} for {name}, instead of a name such as __0_0.distcp")
        places[MetadataIndex(name, _size(index.get("offset")))] = Place(file, offset, length)
    return places


def _check_files(directory: Path, places: Iterable[Place]) -> None:
    """Check that the places lie within files of the checkpoint."""
    ends: dict[str, int] = {}
    for place in places:
        ends[place.file] = max(ends.get(place.file, 0), place.offset + place.length)
    inside = directory.resolve()
    for file, end in ends.items():
        path = inside / file
        try:
            real, found = path.resolve(strict=True), path.stat()
        except (OSError, RuntimeError) as error:
            raise _MalformedError(f"{file}, which can't be read ({error})") from error
        if not real.is_relative_to(inside) or not stat.S_ISREG(found.st_mode):
            raise _MalformedError(f"{file}, which leads to {real}; a file in {directory} is expected")
        if end > found.st_size:
            raise _MalformedError(f"{end} bytes in {file}, which has {found.st_size}")


def _check_places(tensors: Mapping[str, TensorStorageMetadata], places: Mapping[MetadataIndex, Place]) -> None:
    """Check that each chunk has a place, which is long enough for it."""
    for name, tensor in tensors.items():
        for chunk in tensor.chunks:
            place = places.get(MetadataIndex(name, chunk.offsets))
            needed = math.prod(chunk.sizes) * tensor.properties.dtype.itemsize
            if place is None or place.length < needed:
                got = "no place" if place is None else f"{place.length} bytes"
                raise _MalformedError(f"{got} for a part of {name} that has {needed} bytes")


def _is_covered(size: torch.Size, chunks: Sequence[ChunkStorageMetadata]) -> bool:
    """Return whether the chunks lie within the tensor, don't overlap, and have as many elements as the tensor."""
    if any(
        len(chunk.offsets) != len(size)
        or len(chunk.sizes) != len(size)
        or any(o + n > m for o, n, m in zip(chunk.offsets, chunk.sizes, size, strict=True))
        for chunk in chunks
    ):
        return False
    filled = sorted((c for c in chunks if math.prod(c.sizes)), key=lambda c: tuple(c.offsets))
    if sum(math.prod(chunk.sizes) for chunk in filled) != math.prod(size):
        return False
    if not size:
        return len(filled) == 1
    # By their first dimension: `open_ones` may still reach the next chunk.
    open_ones: list[ChunkStorageMetadata] = []
    for chunk in filled:
        open_ones = [one for one in open_ones if one.offsets[0] + one.sizes[0] > chunk.offsets[0]]
        if any(_overlap(one, chunk) for one in open_ones):
            return False
        open_ones.append(chunk)
    return True


def _overlap(one: ChunkStorageMetadata, other: ChunkStorageMetadata) -> bool:
    return all(
        a < b + m and b < a + n for a, n, b, m in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )


def _chunk(value: Any) -> ChunkStorageMetadata:
    fields = _fields(value, _CHUNK)
    return ChunkStorageMetadata(_size(fields.get("offsets")), _size(fields.get("sizes")))


def _dtype(value: Any) -> torch.dtype:
    """Return the dtype of a tensor's properties. The others (layout, ...) say nothing about what is stored."""
    content: Any = value.content if type(value) is Record and value.kind == _PROPERTIES else None
    name: Any = content[0] if type(content) is tuple and content else None
    if type(name) is not Name or name.path not in DTYPES:
        raise _MalformedError("a tensor without a dtype")
    return DTYPES[name.path]


def _size(value: Any) -> torch.Size:
    arguments: Any = value.content if type(value) is Record and value.kind == _SIZE else None
    numbers: Any = arguments[0] if type(arguments) is tuple and len(arguments) == 1 else None
    if type(numbers) is not tuple or len(numbers) > _MAX_DIMENSIONS or not all(map(_is_count, numbers)):
        raise _MalformedError("a shape or a place in a tensor that is no torch.Size of numbers from 0 on")
    return torch.Size(numbers)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _dict(value: Any) -> dict[Any, Any]:
    if type(value) is not dict:
        raise _MalformedError(f"{type(value).__name__} where a dict is expected")
    return value
