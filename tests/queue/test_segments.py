import os
from pathlib import Path

import pytest

from async_rl.errors import DamagedPayloadError, QueueError
from async_rl.queue.storage.payloads import PayloadRef, Segments, Spot, digest_of
from tests.full_disk import file_size_limit

HEADER = 24
"""Bytes: magic, length and digest, 8 each."""


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_bodies_are_read_as_they_were_kept(tmp_path: Path):
    segments = Segments(tmp_path, 1000)
    refs = [segments.keep(payload) for payload in (b"one", b"", bytearray(b"three"), memoryview(b"four"))]
    assert [segments.read(ref) for ref in refs] == [b"one", b"", b"three", b"four"]
    # 3 + 0 + 5 + 4 bytes behind four headers.
    assert segments.num_bytes == segments.live_bytes == 12 + 4 * HEADER
    segments.close()


def test_a_file_can_be_checked_alone(tmp_path: Path):
    segments = Segments(tmp_path, 1000)
    segments.keep(b"one")
    segments.keep(b"second")
    segments.close()
    data = (tmp_path / "segment-00000001").read_bytes()
    digest = digest_of(b"second").to_bytes(8, "little")
    assert data[HEADER : HEADER + 3] == b"one"
    assert data[HEADER + 3 :] == b"ARLBODY1" + (6).to_bytes(8, "little") + digest + b"second"


def test_a_file_ends_once_it_is_long_enough(tmp_path: Path):
    # Two payloads of 24 + 26 bytes make 100; the third goes to the next file, a huge one fills a file alone.
    segments = Segments(tmp_path, 100)
    refs = [segments.keep(bytes(size)) for size in (26, 26, 5000, 1)]
    assert [(ref.segment, ref.offset) for ref in refs] == [(1, 0), (1, 50), (2, 0), (3, 0)]
    segments.close()


def test_a_damaged_byte_is_named_by_file_and_offset(tmp_path: Path):
    segments = Segments(tmp_path, 1000)
    whole, hurt = segments.keep(b"whole"), segments.keep(b"body")
    path = tmp_path / "segment-00000001"
    data = bytearray(path.read_bytes())
    data[hurt.offset + HEADER + 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(QueueError, match=rf"segment-00000001, offset {hurt.offset}: .* damaged"):
        segments.read(hurt)
    assert segments.read(whole) == b"whole"
    segments.close()


def test_a_torn_tail_is_left_alone_and_never_written_over(tmp_path: Path):
    first = Segments(tmp_path, 1000)
    ref = first.keep(b"whole")
    first.close()
    with (tmp_path / "segment-00000001").open("ab") as file:
        file.write(b"ARLBODY1 and no more")
    second = Segments(tmp_path, 1000)
    second.adopt(ref, Spot(ref.segment, ref.offset))
    new = second.keep(b"new")
    assert (new.segment, new.offset) == (2, 0)
    assert second.read(ref) == b"whole"
    assert second.num_bytes - second.live_bytes == len(b"ARLBODY1 and no more")
    second.close()


def test_a_body_behind_the_end_of_its_file_is_not_adopted(tmp_path: Path):
    first = Segments(tmp_path, 1000)
    ref = first.keep(b"body")
    first.close()
    os.truncate(tmp_path / "segment-00000001", 20)
    second = Segments(tmp_path, 1000)
    moved = PayloadRef(2, 0, 4, ref.digest)
    assert not second.adopt(ref, Spot(1, 0))
    assert not second.adopt(moved, Spot(9, 0))
    for lost, file in ((ref, "segment-00000001"), (moved, "segment-00000009")):
        with pytest.raises(DamagedPayloadError, match=f"{file}: the file is missing or too short"):
            second.read(lost)
        second.release(lost)
        with pytest.raises(QueueError, match="expected a live group"):
            second.read(lost)
    assert second.live_bytes == 0
    second.close()


def test_a_file_that_is_cut_off_while_it_is_open_loses_the_payloads_behind_the_cut(tmp_path: Path):
    segments = Segments(tmp_path, 1000)
    kept, lost = segments.keep(b"kept"), segments.keep(b"lost")
    os.truncate(tmp_path / "segment-00000001", lost.offset + HEADER + 1)
    with pytest.raises(DamagedPayloadError, match="expected 4 bytes, got 1; the file is cut off"):
        segments.read(lost)
    assert segments.read(kept) == b"kept"
    segments.close()


def test_what_can_t_be_copied_forward_is_lost_alone(tmp_path: Path):
    # Five files of a dead payload (84 bytes) and a live one (54). 420 dead bytes are 150 more than live ones: the first
    # two files must go.
    segments = Segments(tmp_path, 100)
    pairs = [(segments.keep(bytes(60)), segments.keep(bytes(30))) for _ in range(5)]
    for dead, _ in pairs:
        segments.release(dead)
    (_, lost), (_, kept), *_ = pairs
    os.truncate(tmp_path / "segment-00000001", lost.offset + HEADER)
    moves = segments.copy_forward()
    segments.settle(moves)
    assert [move.ref for move in moves] == [kept]
    assert segments.read(kept) == bytes(30)
    with pytest.raises(DamagedPayloadError):
        segments.read(lost)
    segments.release(lost)
    assert segments.live_bytes == 4 * 54
    segments.close()


def test_a_number_is_never_used_twice(tmp_path: Path):
    segments = Segments(tmp_path, 1, after=7)
    ref = segments.keep(b"a")
    assert ref.segment == 8
    segments.release(ref)
    segments.settle([])
    assert names(tmp_path) == ["spare"]
    assert segments.keep(b"b").segment == 9
    segments.close()


def test_a_file_that_was_given_up_is_written_over_and_another_one_deleted(tmp_path: Path):
    segments = Segments(tmp_path, 60)
    # Two payloads a file.
    for ref in [segments.keep(letter * 6) for letter in (b"a", b"b", b"c", b"d")]:
        segments.release(ref)
    segments.settle([])
    assert names(tmp_path) == ["spare"]
    ref = segments.keep(b"new")
    assert (names(tmp_path), ref.segment, ref.offset) == (["segment-00000003"], 3, 0)
    assert (segments.read(ref), segments.num_bytes) == (b"new", 24 + 3)
    segments.close()
    # Behind what was written is what the file held before; whoever comes next reads the one and ignores the other.
    held = (tmp_path / "segment-00000003").read_bytes()
    assert (len(held), held[24:27]) == (60, b"new")
    later = Segments(tmp_path, 60, after=3)
    later.adopt(ref, Spot(3, 0))
    assert (later.read(ref), later.keep(b"more").segment) == (b"new", 4)
    later.close()


def test_a_spare_file_of_an_earlier_process_goes(tmp_path: Path):
    segments = Segments(tmp_path, 1)
    segments.release(segments.keep(b"a"))
    segments.settle([])
    segments.close()
    assert names(tmp_path) == ["spare"]
    Segments(tmp_path, 1, after=1).close()
    assert names(tmp_path) == []


def test_files_go_when_settled_and_only_those_without_a_live_payload(tmp_path: Path):
    segments = Segments(tmp_path, 60)
    # Two payloads a file: 1 holds a and b, 2 holds c and d, 3 (open) holds e.
    a, b, c, d, e = (segments.keep(letter * 6) for letter in (b"a", b"b", b"c", b"d", b"e"))
    for ref in (a, b, c, e):
        segments.release(ref)
    assert names(tmp_path) == ["segment-00000001", "segment-00000002", "segment-00000003"]
    segments.settle([])
    assert names(tmp_path) == ["segment-00000002", "segment-00000003", "spare"]
    assert segments.read(d) == b"d" * 6
    segments.release(d)
    segments.settle([])
    assert names(tmp_path) == ["segment-00000003", "spare"]
    segments.close()


def test_what_was_released_or_never_adopted_is_not_read(tmp_path: Path):
    segments = Segments(tmp_path, 1000)
    ref = segments.keep(b"body")
    segments.release(ref)
    for gone in (ref, PayloadRef(5, 0, 4, 0)):
        with pytest.raises(QueueError, match="expected a live group at offset 0, got none"):
            segments.read(gone)
        with pytest.raises(QueueError, match="expected a live group at offset 0, got none"):
            segments.release(gone)
    segments.close()


def test_the_emptiest_files_are_copied_forward_and_places_stay(tmp_path: Path):
    # Files of four payloads of 24 + 26 bytes. Of six files the first keeps three live payloads, the others one each:
    # 8 * 50 live, 16 * 50 dead, which is more than two files and more than what is live.
    segments = Segments(tmp_path, 200)
    refs = [segments.keep(bytes([number]) * 26) for number in range(24)]
    live = [ref for number, ref in enumerate(refs) if number < 3 or (number > 3 and number % 4 == 0)]
    for ref in set(refs) - set(live):
        segments.release(ref)
    moves = segments.copy_forward()
    # 400 dead bytes may stay: three of the five emptiest files go, 450 dead bytes with them.
    assert len(moves) == 3
    assert len(names(tmp_path)) == 7
    segments.settle(moves)
    assert len(names(tmp_path)) == 4 + 1
    assert "spare" in names(tmp_path)
    assert (segments.live_bytes, segments.num_bytes - segments.live_bytes) == (400, 350)
    assert "segment-00000001" in names(tmp_path)
    for ref in live:
        assert segments.read(ref) == bytes([refs.index(ref)]) * 26
    moved = moves[0].ref
    segments.release(moved)
    assert moved not in segments.moved
    segments.close()


def test_copies_that_are_not_settled_change_nothing(tmp_path: Path):
    # Three payloads a file, of which one is live: 4 * 50 live and 8 * 50 dead bytes, 100 more than two files may have.
    segments = Segments(tmp_path, 150)
    refs = [segments.keep(bytes([number]) * 26) for number in range(12)]
    for number, ref in enumerate(refs):
        if number % 3:
            segments.release(ref)
    assert [move.ref for move in segments.copy_forward()] == [refs[0]]
    assert segments.moved == {}
    assert (segments.live_bytes, segments.num_bytes) == (200, 650)
    assert [segments.read(ref) for ref in refs[::3]] == [bytes([number]) * 26 for number in range(0, 12, 3)]
    segments.close()


def test_a_full_disk_is_named_and_leaves_the_file_as_it_was(tmp_path: Path):
    segments = Segments(tmp_path, 1 << 20)
    first = segments.keep(b"first")
    # The header and 71 bytes of the payload fit.
    with file_size_limit(first.length + HEADER + 95), pytest.raises(QueueError, match=str(tmp_path)):
        segments.keep(bytes(1000))
    assert (tmp_path / "segment-00000001").stat().st_size == segments.num_bytes == 29
    second = segments.keep(b"second")
    assert (second.segment, second.offset) == (1, 29)
    assert [segments.read(ref) for ref in (first, second)] == [b"first", b"second"]
    segments.close()
