"""Where payloads lie in memory."""

from async_rl.queue.storage.payloads import MemoryPayloads


def test_a_payload_in_memory_keeps_no_larger_message():
    store, message = MemoryPayloads(), bytearray(100_000)
    for payload in (memoryview(message)[:99_999], memoryview(message)[1:], memoryview(bytearray(1000))):
        kept = store.read(store.keep(payload))
        assert isinstance(kept, bytes)
        assert kept == bytes(payload)
