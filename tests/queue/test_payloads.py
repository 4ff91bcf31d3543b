"""Where payloads lie in memory: what is copied and what is shared."""

import zmq

from async_rl.queue.storage.payloads import owned


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
