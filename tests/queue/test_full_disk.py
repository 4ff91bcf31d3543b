"""The journal on a disk without room: every call may be made again, and nothing is lost."""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import zmq

from async_rl.errors import QueueError, StorageFullError
from async_rl.net.wire import decode, encode
from async_rl.queue.client.clients import LearnerQueue
from async_rl.queue.storage import payloads
from async_rl.queue.storage.journal import Change, Journal
from async_rl.queue.storage.payloads import disk_error
from tests.queue.test_journal import delete, put, reopened

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE)


def fail_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, code: int) -> None:
    """Let the next call of ``owner.name`` fail with this error number."""
    original: Callable[..., Any] = getattr(owner, name)

    def fails(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(owner, name, original)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(owner, name, fails)


@pytest.mark.parametrize("code", NO_ROOM)
def test_a_payload_is_kept_at_the_second_try(tmp_path: Path, monkeypatch, code):
    with closing(Journal(tmp_path)) as journal:
        first = journal.keep(b"first")
        fail_once(monkeypatch, os, "write", code)
        with pytest.raises(StorageFullError, match=r"has no room.*free disk space"):
            journal.keep(b"second")
        second = journal.keep(b"second")
        assert (journal.read(first), journal.read(second)) == (b"first", b"second")


def test_a_disk_that_fails_is_not_a_full_one(tmp_path: Path, monkeypatch):
    with closing(Journal(tmp_path)) as journal:
        fail_once(monkeypatch, os, "write", errno.EIO)
        with pytest.raises(QueueError, match="can't be read or written") as caught:
            journal.keep(b"first")
    assert not isinstance(caught.value, StorageFullError)


def test_a_file_is_opened_at_the_second_try(tmp_path: Path, monkeypatch):
    with closing(Journal(tmp_path)) as journal:
        fail_once(monkeypatch, os, "open", errno.EMFILE)
        with pytest.raises(StorageFullError):
            journal.keep(b"first")
        ref = journal.keep(b"first")
        journal.commit([put("a", ref)], {})
    journal, _, refs = reopened(tmp_path)
    with closing(journal):
        assert journal.read(refs["a"]) == b"first"


def test_a_commit_that_finds_no_room_is_made_again(tmp_path: Path):
    with closing(Journal(tmp_path)) as journal:
        ref = journal.keep(b"body")
        journal.commit([put("a", ref)], {"queue": b"1"})
        (num_pages,) = journal._index.execute("PRAGMA page_count").fetchone()
        journal._index.execute(f"PRAGMA max_page_count = {num_pages}")
        changes = [delete("a"), Change("lease", "l", {"x": "y" * 100_000})]
        for _ in range(2):
            with pytest.raises(StorageFullError, match="database or disk is full"):
                journal.commit(changes, {"queue": b"2"})
        saved = journal.load()
        assert saved is not None
        assert (set(saved.entries["group"]), saved.state) == ({"a"}, {"queue": b"1"})
        journal._index.execute("PRAGMA max_page_count = 1000000")
        journal.commit(changes, {"queue": b"2"})
        saved = journal.load()
        assert saved is not None
        assert (set(saved.entries["group"]), set(saved.entries["lease"])) == (set(), {"l"})
        assert saved.state == {"queue": b"2"}


@pytest.mark.parametrize("name", ["SQLITE_IOERR_WRITE", "SQLITE_CANTOPEN"])
@pytest.mark.parametrize("has_room", [False, True])
def test_a_probe_tells_whether_sqlite_met_a_full_disk(tmp_path: Path, monkeypatch, name, has_room):
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = getattr(sqlite3, name)
    if not has_room:
        fail_once(monkeypatch, payloads.tempfile, "TemporaryFile", errno.EDQUOT)
    assert isinstance(disk_error(tmp_path, error), StorageFullError) is not has_room


def test_revert_forgets_what_was_kept_and_released_since_the_commit(tmp_path: Path):
    with closing(Journal(tmp_path)) as journal:
        kept = journal.keep(b"kept")
        journal.commit([put("a", kept)], {"queue": b"1"})
        journal.release(kept)
        journal.keep(b"not committed")
        journal.revert()
        saved = journal.load()
        assert saved is not None
        journal.adopt([kept])
        assert journal.read(kept) == b"kept"
        again = journal.keep(b"again")
        journal.commit([put("b", again)], {})
        assert len(list(tmp_path.glob("group-*"))) == 2
    journal, _, refs = reopened(tmp_path)
    with closing(journal):
        assert refs == {"a": kept, "b": again}


@pytest.mark.slow
def test_the_learner_waits_longer_than_its_limit_while_the_queue_waits_for_room():
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    port = router.bind_to_random_port("tcp://127.0.0.1")

    def serve() -> None:
        peer, frame = router.recv_multipart()
        # Notices every half second go on for longer than the limit of 3 s; a busy machine may delay each by 2 s.
        for _ in range(7):
            time.sleep(0.5)
            router.send_multipart([peer, encode("notice", {"storage_full": "the disk is full"})])
        request_id = decode(frame).fields["request_id"]
        router.send_multipart([peer, encode("ok", {"request_id": request_id})])

    thread = threading.Thread(target=serve)
    thread.start()
    queue = LearnerQueue(f"tcp://127.0.0.1:{port}", 3.0)
    try:
        queue.finish("line-a")
    finally:
        queue.close()
        thread.join()
        router.close()
        context.term()
