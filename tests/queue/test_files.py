"""Payloads in files of their own."""

import errno
import os
from pathlib import Path

import pytest

from async_rl.errors import DamagedPayloadError, QueueError, StorageFullError
from async_rl.queue.storage.payloads import Files, PayloadRef, digest_of
from tests.full_disk import file_size_limit


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_payloads_are_read_as_they_were_kept(tmp_path: Path):
    files = Files(tmp_path)
    refs = [files.keep(payload) for payload in (b"one", b"", bytearray(b"three"), memoryview(b"four"))]
    assert [files.read(ref) for ref in refs] == [b"one", b"", b"three", b"four"]
    assert names(tmp_path) == [f"group-000000000{number}" for number in (1, 2, 3, 4)]
    assert (tmp_path / "group-0000000003").read_bytes() == b"three"
    assert refs[2] == PayloadRef(3, 5, digest_of(b"three"))


def test_what_a_payload_takes_on_disk_is_counted_in_blocks():
    assert [PayloadRef(1, length, 0).disk_bytes for length in (0, 1, 600, 4096, 4097)] == [0, 4096, 4096, 4096, 8192]


@pytest.mark.parametrize("content", [b"bodX", b"bo", b"body and more", b""])
def test_a_damaged_file_is_named_and_the_others_are_read(tmp_path: Path, content: bytes):
    files = Files(tmp_path)
    whole, hurt = files.keep(b"whole"), files.keep(b"body")
    (tmp_path / "group-0000000002").write_bytes(content)
    with pytest.raises(DamagedPayloadError, match=r"group-0000000002: expected a group of 4 bytes .* damaged"):
        files.read(hurt)
    assert files.read(whole) == b"whole"
    files.release(hurt)


def test_a_file_that_is_gone_or_too_short_is_lost_alone(tmp_path: Path):
    first = Files(tmp_path)
    refs = [first.keep(payload) for payload in (b"gone", b"short", b"whole")]
    (tmp_path / "group-0000000001").unlink()
    (tmp_path / "group-0000000002").write_bytes(b"sh")
    second = Files(tmp_path)
    assert [path.name for path in second.adopt(refs)] == ["group-0000000001", "group-0000000002"]
    for ref in refs[:2]:
        with pytest.raises(DamagedPayloadError, match="missing or too short"):
            second.read(ref)
        second.release(ref)
    second.settle()
    assert second.read(refs[2]) == b"whole"
    assert names(tmp_path) == ["group-0000000003"]


def test_a_number_is_never_used_twice(tmp_path: Path):
    files = Files(tmp_path, after=7)
    ref = files.keep(b"body")
    assert ref.number == 8
    files.release(ref)
    files.settle()
    assert files.keep(b"body").number == 9
    # What a process left that was killed before its commit counts, too.
    assert Files(tmp_path, after=8).keep(b"next").number == 10


def test_files_go_when_settled(tmp_path: Path):
    files = Files(tmp_path)
    stays, goes = files.keep(b"stays"), files.keep(b"goes")
    files.release(goes)
    assert len(names(tmp_path)) == 2
    files.settle()
    assert names(tmp_path) == ["group-0000000001"]
    assert files.read(stays) == b"stays"


def test_files_that_nobody_adopts_go_and_other_files_stay(tmp_path: Path):
    first = Files(tmp_path)
    ref, _ = first.keep(b"named"), first.keep(b"not named")
    (tmp_path / "lock").touch()
    (tmp_path / "group-1").touch()
    second = Files(tmp_path)
    assert second.adopt([ref]) == []
    second.settle()
    assert names(tmp_path) == ["group-0000000001", "group-1", "lock"]


def test_what_was_released_or_never_adopted_is_not_read(tmp_path: Path):
    files = Files(tmp_path)
    ref = files.keep(b"body")
    files.release(ref)
    for gone in (ref, PayloadRef(5, 4, 0)):
        for use in (files.read, files.release):
            with pytest.raises(QueueError, match="expected a live group, got none"):
                use(gone)


def test_a_full_disk_is_named_and_leaves_no_part_of_a_file(tmp_path: Path):
    files = Files(tmp_path)
    kept = files.keep(b"kept")
    with file_size_limit(100), pytest.raises(QueueError, match=str(tmp_path)):
        files.keep(bytes(1000))
    assert names(tmp_path) == ["group-0000000001"]
    again = files.keep(b"again")
    assert (files.read(kept), files.read(again), again.number) == (b"kept", b"again", 3)


def test_a_file_that_can_not_be_opened_now_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = Files(tmp_path)
    ref = files.keep(b"body")

    def refuse(self: Path) -> bytes:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(StorageFullError, match="has no room"):
        files.read(ref)
    monkeypatch.undo()
    assert files.read(ref) == b"body"


def test_a_file_that_can_not_be_removed_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = Files(tmp_path)
    files.release(files.keep(b"body"))

    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(QueueError, match="can't be read or written"):
        files.settle()
    monkeypatch.undo()
    files.settle()
    assert names(tmp_path) == []
