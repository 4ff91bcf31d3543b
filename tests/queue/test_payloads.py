"""Where payloads lie in memory: what is copied, what is shared, and how much of a journal's is kept beside it."""

import zmq

from async_rl.queue.storage.payloads import MemoryPayloads, RecentPayloads, owned


def test_a_body_that_fills_its_memory_is_kept_as_it_is():
    frame = zmq.Frame(bytes(100_000))
    assert owned(frame.buffer).obj is frame  # type: ignore[union-attr]
    payload = bytes(100_000)
    assert owned(payload) is payload


def test_a_part_of_a_message_and_a_small_one_are_copied():
    message = bytearray(100_000)
    for payload in (memoryview(message)[:99_999], memoryview(message)[1:], memoryview(bytearray(1000))):
        kept = owned(payload)
        assert isinstance(kept, bytes)
        assert kept == bytes(payload)


def test_recent_bodies_hold_no_more_than_they_may_and_forget_what_is_released():
    below = MemoryPayloads()
    recent = RecentPayloads(below, max_bytes=10)
    first, second, third = (recent.keep(payload) for payload in (b"four", b"sixsix", b"x"))
    # 4 + 6 bytes are all there is room for; the store below has everything.
    assert (recent.num_bytes, len(below)) == (10, 3)
    assert [recent.read(ref) for ref in (first, second, third)] == [b"four", b"sixsix", b"x"]
    recent.release(first)
    assert (recent.num_bytes, len(below)) == (6, 2)
    fourth = recent.keep(b"1234")
    assert (recent.num_bytes, recent.read(fourth)) == (10, b"1234")
    for ref in (second, third, fourth):
        recent.release(ref)
    assert (recent.num_bytes, len(below)) == (0, 0)


def test_a_body_of_an_earlier_process_is_read_from_the_store():
    below = MemoryPayloads()
    ref = below.keep(b"old")
    recent = RecentPayloads(below, max_bytes=10)
    assert recent.read(ref) == b"old"
    recent.release(ref)
    assert len(below) == 0
