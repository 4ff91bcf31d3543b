"""Memory in which a process hands bodies to others on its machine: written once, read by whoever is told the place.

An ``Arena`` is an anonymous file with one writer. A message then carries a reference of 32 bytes for each body instead
of the body, and the reader copies it straight out of the writer's memory: no byte of it passes through a socket. Both
ends prove that they see the same memory: a file begins with a random token, which the reader must be able to name. It
is sealed against getting shorter, which would end every process that reads behind its end.

A reader may be late: after its message was answered, or its group trained, the writer uses the room again. So every
block begins with a serial number that is never used twice, is wiped when the block is freed, and is read before *and*
after the body. A body is read whole and as it was written, or not at all.

Used by both ends of the queue's sockets. The kernel frees a file when the last process that holds it is gone.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import secrets
import stat
import struct
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from async_rl.errors import WireError
from async_rl.net.wire import Piece

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<QQ")
"""A block's serial number and the length of its body. Of 16 bytes, so that arrays in a body stay aligned."""
_REFERENCE = struct.Struct("<8sQQQ")
_MAGIC = b"ARLBLOCK"
_TOKEN_BYTES = 32
_ALIGNMENT = 64
_MOST_BYTES = 1 << 30
_WIPED = bytes(_HEADER.size)


@dataclass(frozen=True, slots=True)
class ArenaAddress:
    """Where an arena is on this machine: a process and its descriptor of the file."""

    pid: int
    fd: int


@dataclass(slots=True, eq=False)
class Block:
    """A body in an arena. Whoever wants to have it longer than the message it came with says ``is_kept``."""

    arena: Arena
    view: memoryview
    offset: int
    serial: int
    is_kept: bool = False

    def __len__(self) -> int:
        return len(self.view)

    def __bytes__(self) -> bytes:
        return bytes(self.view)

    @property
    def reference(self) -> bytes:
        """What travels instead of the body."""
        return _REFERENCE.pack(_MAGIC, self.offset, len(self.view), self.serial)

    def free(self) -> None:
        """The room may be used again; nobody reads this body any more, neither by the reference nor by the view."""
        self.arena.free(self)


class Arena:
    """Room for ``max_bytes`` of bodies and their headers. Pages count as used memory from their first use on.

    Raises:
        OSError: the system refuses it.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = _aligned(max_bytes)
        size = _aligned(_TOKEN_BYTES) + self.max_bytes
        fd = os.memfd_create("async-rl-queue", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            self._map = mmap.mmap(fd, size)
        except BaseException:
            os.close(fd)
            raise
        self.address = ArenaAddress(os.getpid(), fd)
        self.token = secrets.token_bytes(_TOKEN_BYTES)
        self._map[:_TOKEN_BYTES] = self.token
        self._memory = memoryview(self._map)
        self._next_serial = secrets.randbits(62) + 1
        # Free ranges by their beginning; neighbours are always joined.
        self._starts = [_aligned(_TOKEN_BYTES)]
        self._ends = [size]

    def allocate(self, length: int) -> Block | None:
        """Room for a body of ``length`` bytes, at the lowest place that has it; None if none has."""
        needed = _aligned(_HEADER.size + length)
        index = next((i for i, (a, b) in enumerate(zip(self._starts, self._ends)) if b - a >= needed), None)
        if index is None:
            return None
        start, end = self._starts[index], self._ends[index]
        if start + needed == end:
            del self._starts[index], self._ends[index]
        else:
            self._starts[index] = start + needed
        serial, self._next_serial = self._next_serial, self._next_serial + 1
        _HEADER.pack_into(self._map, start, serial, length)
        body = start + _HEADER.size
        return Block(self, self._memory[body : body + length], start, serial)

    def write(self, pieces: Sequence[Piece], length: int) -> Block | None:
        """A block of these pieces, behind one another, of ``length`` bytes in all; None if there is no room."""
        block = self.allocate(length)
        if block is None:
            return None
        at = block.offset + _HEADER.size
        for piece in pieces:
            end = at + len(piece)
            self._map[at:end] = piece
            at = end
        return block

    def free(self, block: Block) -> None:
        """See ``Block.free``."""
        start, end = block.offset, block.offset + _aligned(_HEADER.size + len(block.view))
        self._map[start : start + _HEADER.size] = _WIPED
        index = bisect_left(self._starts, start)
        joins_next = index < len(self._starts) and self._starts[index] == end
        joins_last = index > 0 and self._ends[index - 1] == start
        if joins_last and joins_next:
            self._ends[index - 1] = self._ends[index]
            del self._starts[index], self._ends[index]
        elif joins_last:
            self._ends[index - 1] = end
        elif joins_next:
            self._starts[index] = start
        else:
            self._starts.insert(index, start)
            self._ends.insert(index, end)

    @property
    def used_bytes(self) -> int:
        """Of blocks with their headers."""
        return self.max_bytes - (sum(self._ends) - sum(self._starts))

    def close(self) -> None:
        """Let go of the file. What views there are stay readable."""
        os.close(self.address.fd)


@dataclass(frozen=True, slots=True)
class Reference:
    """A body in another process's arena, as its message names it."""

    offset: int
    length: int
    serial: int

    @classmethod
    def read(cls, frame: memoryview) -> Reference | None:
        """What this frame refers to; None if it is a body itself.

        Raises:
            WireError: no arena is so large.
        """
        if len(frame) != _REFERENCE.size or frame[: len(_MAGIC)] != _MAGIC:
            return None
        _, offset, length, serial = _REFERENCE.unpack(frame)
        if max(offset, length) > _MOST_BYTES:
            raise WireError(f"impossible reference to {length} bytes at {offset}")
        return cls(offset, length, serial)


class ArenaReader:
    """Another process's arena.

    Raises:
        OSError: there is none, not on this machine (or in this container), or it may not be read from here.
    """

    def __init__(self, address: ArenaAddress) -> None:
        self._path = f"/proc/{address.pid}/fd/{address.fd}"
        # Looked at before it is opened: opening a pipe or a device would do something to it.
        if not stat.S_ISREG(os.stat(self._path).st_mode):
            raise OSError(f"expected a plain file at {self._path}")
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise OSError(f"expected a file that can't get shorter at {self._path}")
            file = os.fstat(fd)
            if not _TOKEN_BYTES <= file.st_size <= _MOST_BYTES:
                raise OSError(f"expected an arena at {self._path}, got {file.st_size} bytes")
            self._map = mmap.mmap(fd, file.st_size, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        self._file = file.st_ino
        self._memory = memoryview(self._map)
        self.token = self._map[:_TOKEN_BYTES]

    @property
    def has_owner(self) -> bool:
        """Whether the process that writes it is alive."""
        try:
            return os.stat(self._path).st_ino == self._file
        except OSError:
            return False

    def read(self, reference: Reference) -> memoryview | None:
        """The body, in memory of its own; None if it is there no more."""
        start = reference.offset + _HEADER.size
        if not self._is_current(reference):
            return None
        body = bytes(self._memory[start : start + reference.length])
        return memoryview(body) if self._is_current(reference) else None

    def read_into(self, reference: Reference, room: memoryview) -> bool:
        """The body into ``room``, of its length; False, and ``room`` holds anything, if it is there no more."""
        start = reference.offset + _HEADER.size
        if not self._is_current(reference):
            return False
        room[:] = self._memory[start : start + reference.length]
        return self._is_current(reference)

    def _is_current(self, reference: Reference) -> bool:
        end = reference.offset + _HEADER.size
        is_inside = end + reference.length <= len(self._map)
        return is_inside and self._map[reference.offset : end] == _HEADER.pack(reference.serial, reference.length)

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.release()
        self._map.close()


def make_arena(max_bytes: int) -> Arena | None:
    """An arena; None where the system has no anonymous files that others can open by process and descriptor (only
    Linux has), or refuses one, which is logged: everything goes through the socket then.
    """
    if not hasattr(os, "memfd_create") or not os.path.isdir("/proc/self/fd"):
        return None
    try:
        return Arena(max_bytes)
    except OSError as error:
        logger.warning("groups do not pass through shared memory: the system refuses %d bytes: %s", max_bytes, error)
        return None


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
