"""Memory that processes share: no two bodies lie over one another, and nobody reads what is not there any more."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.errors import WireError
from async_rl.queue.arena import Arena, ArenaAddress, ArenaReader, Block, Reference


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(1 << 16)
    yield made
    made.close()


def written(arena: Arena, body: bytes) -> Block:
    block = arena.write([body], len(body))
    assert block is not None
    return block


def reference_of(block: Block) -> Reference:
    found = Reference.read(memoryview(block.reference))
    assert found is not None
    return found


def test_a_body_is_read_by_its_reference_as_it_was_written(arena):
    reader = ArenaReader(arena.address)
    assert reader.token == arena.token
    pieces = [b"one", memoryview(b"-two-"), b""]
    block = arena.write(pieces, 8)
    assert block is not None
    assert len(block) == 8
    body = reader.read(reference_of(block))
    assert body is not None
    assert bytes(body) == b"one-two-"
    # In memory of its own: what is written there next is not seen.
    block.free()
    assert written(arena, b"another!").offset == block.offset
    assert bytes(body) == b"one-two-"


def test_a_freed_body_is_not_read_and_neither_is_what_took_its_place(arena):
    reader, block = ArenaReader(arena.address), written(arena, b"first")
    old = reference_of(block)
    block.free()
    assert reader.read(old) is None
    again = written(arena, b"other")
    assert again.offset == block.offset
    assert reader.read(old) is None
    room = bytearray(5)
    assert not reader.read_into(old, memoryview(room))
    assert reader.read_into(reference_of(again), memoryview(room))
    assert bytes(room) == b"other"


def test_a_body_that_is_freed_while_it_is_read_is_not_read(arena, monkeypatch):
    reader, block = ArenaReader(arena.address), written(arena, b"body")
    is_current, looked = ArenaReader._is_current, []

    def freed_after_the_first_look(self: ArenaReader, reference: Reference) -> bool:
        found = is_current(self, reference)
        if not looked:
            block.free()
        looked.append(found)
        return found

    monkeypatch.setattr(ArenaReader, "_is_current", freed_after_the_first_look)
    assert reader.read(reference_of(block)) is None
    assert looked == [True, False]


@pytest.mark.parametrize("change", [{"length": 5}, {"serial": 1}, {"offset": 1 << 29}, {"offset": 0}])
def test_a_reference_that_lies_reads_nothing(arena, change):
    reader = ArenaReader(arena.address)
    assert reader.read(replace(reference_of(written(arena, b"body")), **change)) is None


def test_an_impossible_reference_is_malformed_and_a_body_is_none():
    frame = Block(None, memoryview(b""), (1 << 30) + 1, 7).reference  # type: ignore[arg-type]
    with pytest.raises(WireError, match="impossible reference to 0 bytes at 1073741825"):
        Reference.read(memoryview(frame))
    assert Reference.read(memoryview(b"ARL1" + bytes(28))) is None
    assert Reference.read(memoryview(b"ARLBLOCK")) is None


def test_what_has_no_room_gets_none(arena):
    # 65536 bytes; 16 of them are each block's header, and the end of a block is rounded up to 64.
    first = arena.allocate(65_536 - 16 - 64)
    assert first is not None
    assert arena.allocate(49) is None
    last = arena.allocate(48)
    assert last is not None
    assert arena.used_bytes == arena.max_bytes == 65_536
    first.free()
    assert arena.used_bytes == 64
    assert arena.allocate(65_536 - 16) is None
    last.free()
    assert arena.allocate(65_536 - 16) is not None


@given(st.lists(st.one_of(st.integers(0, 5000), st.integers(0, 30).map(lambda n: -n - 1)), max_size=60))
def test_blocks_never_overlap_and_all_room_comes_back(script):
    """A number is a body of that length, a negative one frees the so many-th of those that live."""
    arena = Arena(1 << 14)
    reader = ArenaReader(arena.address)
    live: list[tuple[Block, bytes]] = []
    for number, event in enumerate(script):
        if event >= 0:
            body = bytes([number]) * event
            block = arena.write([body], event)
            if block is not None:
                live.append((block, body))
        elif live:
            live.pop(event % len(live))[0].free()
        for block, body in live:
            assert reader.read(reference_of(block)) == body
            assert bytes(block.view) == body
        assert arena.used_bytes == sum(-(-(16 + len(body)) // 64) * 64 for _, body in live)
    for block, _ in live:
        block.free()
    assert arena.used_bytes == 0
    assert arena.allocate(arena.max_bytes - 16) is not None
    reader.close()
    arena.close()


def test_only_an_arena_can_be_read(arena):
    read_end, write_end = os.pipe()
    short, plain = os.memfd_create("short", os.MFD_ALLOW_SEALING), os.memfd_create("plain")
    os.ftruncate(plain, 1 << 16)
    for fd, why in ((read_end, "expected a plain file"), (plain, "get shorter|not permitted"), (9999, "No such file")):
        with pytest.raises(OSError, match=why):
            ArenaReader(ArenaAddress(os.getpid(), fd))
    import fcntl

    fcntl.fcntl(short, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with pytest.raises(OSError, match="got 0 bytes"):
        ArenaReader(ArenaAddress(os.getpid(), short))
    with pytest.raises(OSError, match="No such file"):
        ArenaReader(ArenaAddress(2**22 + 1, arena.address.fd))
    # It can't be cut short under a reader, which would end it.
    with pytest.raises(PermissionError):
        os.ftruncate(arena.address.fd, 0)
    for fd in (read_end, write_end, short, plain):
        os.close(fd)


def test_the_memory_of_a_dead_process_is_readable_and_known_to_have_no_owner():
    script = (
        "import sys\nfrom async_rl.queue.arena import Arena\narena = Arena(1 << 16)\n"
        "block = arena.write([b'last words'], 10)\n"
        "print(arena.address.pid, arena.address.fd, block.reference.hex(), flush=True)\nsys.stdin.read()"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid, fd, reference = process.stdout.readline().split()
    reader = ArenaReader(ArenaAddress(int(pid), int(fd)))
    assert reader.has_owner
    process.kill()
    process.communicate()
    assert not reader.has_owner
    found = Reference.read(memoryview(bytes.fromhex(reference)))
    assert found is not None
    assert reader.read(found) == b"last words"
    reader.close()
