"""Frames and exact reads: whatever pieces a stream delivers, the same messages come out."""

import io
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.errors import WireError
from async_rl.net.streams import pack_frame, read_frame, receive_into, take_frame


def in_pieces(data: bytes, size: int):
    """A ``read`` that returns at most ``size`` bytes at a time."""
    stream = io.BytesIO(data)
    return lambda wanted: stream.read(min(wanted, size))


@given(st.lists(st.binary(max_size=50), max_size=5), st.integers(min_value=1, max_value=60))
def test_frames_survive_any_division_of_the_stream(bodies: list[bytes], size: int):
    data = b"".join(map(pack_frame, bodies))
    read = in_pieces(data, size)
    assert [read_frame(read, max_bytes=50) for _ in bodies] == bodies
    assert read_frame(read, max_bytes=50) is None
    taken, buffer = [], bytearray()
    for start in range(0, len(data), size):
        buffer += data[start : start + size]
        while (body := take_frame(buffer, max_bytes=50)) is not None:
            taken.append(body)
    assert (taken, buffer) == (bodies, b"")


def test_a_frame_may_have_the_limit_and_no_byte_more():
    assert read_frame(in_pieces(pack_frame(b"1234"), 9), max_bytes=4) == b"1234"
    with pytest.raises(WireError, match="at most 3 bytes, got 4"):
        read_frame(in_pieces(pack_frame(b"1234"), 9), max_bytes=3)
    with pytest.raises(WireError, match="at most 3 bytes, got 4"):
        take_frame(bytearray(pack_frame(b"1234")), max_bytes=3)


def test_receive_into_fills_a_buffer_or_says_how_far_it_came():
    ours, theirs = socket.socketpair()
    into = bytearray(5)
    with ours:
        with theirs:
            theirs.sendall(b"abcdefg")
        receive_into(ours, memoryview(into))
        assert into == b"abcde"
        with pytest.raises(ConnectionError, match="after 2 of 5 bytes"):
            receive_into(ours, memoryview(into))
