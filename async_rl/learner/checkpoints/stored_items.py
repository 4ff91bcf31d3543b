"""Reads one stored part of a tensor from a file of a checkpoint.

torch.distributed.checkpoint writes each part as ``torch.save`` does: a zip archive with ``data.pkl``, which says the
part's shape and dtype, and ``data/0``, its bytes. ``torch.load`` believes what the archive says about its sizes, so a
foreign file could make it allocate any amount of memory, or read beyond its own. Here only the bytes are taken from the
archive, and they must be those of the part that is expected.

Called by ``stored_tensors.py``.
"""

from __future__ import annotations

import io
import struct
import sys
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from async_rl.learner.checkpoints.plain_pickle import PERSISTENT, Name, Record, read_pickle
from async_rl.learner.checkpoints.stored_metadata import DTYPES, Place

_MAX_PICKLE_BYTES = 1 << 16
_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""Header of an archive's entry: 30 bytes, of which the last four are the lengths of its name and its extra field."""
_STORAGES: Mapping[str, torch.dtype] = {
    f"torch.{name}Storage": dtype
    for name, dtype in {
        "Float": torch.float32, "Double": torch.float64, "Half": torch.float16, "BFloat16": torch.bfloat16,
        "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
        "Bool": torch.bool,
    }.items()
}  # fmt: skip
_OF_STORAGE, _OF_DTYPE = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"
"""Functions that torch names for a tensor: its dtype is that of its storage's class, or an argument of its own."""


def read_item(file: io.BufferedReader, place: Place, *, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the tensor that is stored at ``place`` of ``file``, on the host.

    Raises:
        ValueError: there is no tensor of this shape and dtype there.
        OSError: the file can't be read.
    """
    expected = f"a tensor of shape {list(sizes)} and {dtype} in its {place.length} bytes from {place.offset} on"
    try:
        with zipfile.ZipFile(io.BufferedReader(_Part(file, place))) as archive:
            entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
            strides, first = _layout(_small(archive, entries["data.pkl"]), sizes, dtype)
            if (order := _small(archive, entries["byteorder"])) != sys.byteorder.encode():
                raise ValueError(f"the byte order {order[:20]!r}")
        size_bytes = entries["data/0"].file_size
        last = first + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))
        if 0 not in sizes and (last + 1) * dtype.itemsize > size_bytes:
            raise ValueError(f"{size_bytes} bytes")
        stored = _bytes(file, place, entries["data/0"], size_bytes - size_bytes % dtype.itemsize)
        return stored.view(dtype).as_strided(tuple(sizes), strides, first)
    except (ValueError, KeyError, RuntimeError, NotImplementedError, zipfile.BadZipFile, struct.error) as error:
        raise ValueError(f"expected {expected}, got: {type(error).__name__}: {error}") from error


class _Part(io.RawIOBase):
    """The bytes of a place, as a file."""

    def __init__(self, file: io.BufferedReader, place: Place) -> None:
        self._file, self._place, self._at = file, place, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._place.length}[whence]
        if at < 0:
            raise ValueError("a place before its beginning")
        self._at = at
        return at

    def readinto(self, buffer: Any, /) -> int:
        wanted = min(len(buffer), max(0, self._place.length - self._at))
        self._file.seek(self._place.offset + self._at)
        data = self._file.read(wanted)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _small(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    if entry.file_size > _MAX_PICKLE_BYTES or entry.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{entry.filename} of {entry.file_size} bytes, or a compressed one")
    return archive.read(entry)


def _bytes(file: io.BufferedReader, place: Place, entry: zipfile.ZipInfo, size_bytes: int) -> Tensor:
    """Return the first ``size_bytes`` of an archive's entry, which is not compressed, as uint8."""
    file.seek(max(0, place.offset + entry.header_offset))
    magic, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    begin = entry.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
    is_stored = entry.compress_type == zipfile.ZIP_STORED and magic == b"PK\x03\x04"
    if not is_stored or entry.header_offset < 0 or begin + size_bytes > place.length:
        raise ValueError(f"{size_bytes} bytes at {begin}, or compressed ones")
    stored = torch.empty(size_bytes, dtype=torch.uint8)
    file.seek(place.offset + begin)
    at, target = 0, memoryview(cast(Any, stored.numpy()))
    while at < size_bytes:
        count = file.readinto(target[at:])
        if not count:
            raise ValueError(f"an end of the file after {at} bytes")
        at += count
    return stored


def _layout(pickled: bytes, sizes: Sequence[int], dtype: torch.dtype) -> tuple[tuple[int, ...], int]:
    """Return the strides of the tensor that ``pickled`` describes, and the place of its first element, in elements."""
    record = read_pickle(pickled)
    arguments: Any = record.content if type(record) is Record else None
    kind = record.kind if type(record) is Record else ""
    if kind not in (_OF_STORAGE, _OF_DTYPE) or type(arguments) is not tuple or len(arguments) < 6:
        raise ValueError(f"{kind[:100] or type(record).__name__}, which is no plain tensor")
    storage, first, found, strides = arguments[:4]
    kept: Any = storage.content if type(storage) is Record and storage.kind == PERSISTENT else None
    if type(kept) is not tuple or len(kept) != 5 or kept[0] != "storage" or kept[2] != "0":
        raise ValueError("a tensor without its bytes")
    named: Any = kept[1] if kind == _OF_STORAGE else arguments[-1]
    of = (_STORAGES if kind == _OF_STORAGE else DTYPES).get(named.path) if type(named) is Name else None
    if of != dtype or found != tuple(sizes):
        raise ValueError(f"one of another shape, or of {of}")
    if not _are_counts((first,)) or type(strides) is not tuple or len(strides) != len(sizes):
        raise ValueError("one without strides")
    if not _are_counts(strides):
        raise ValueError("one with strides that are no numbers from 0 on")
    return strides, first


def _are_counts(values: Sequence[Any]) -> bool:
    return all(type(value) is int and 0 <= value < 1 << 62 for value in values)
