"""Frames: round trips, alignment, and refusal of everything malformed."""

import struct

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.errors import WireError
from async_rl.wire import ALIGNMENT, Limits, decode, encode

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.text(), st.dictionaries(st.text(), PLAIN, max_size=5))
def test_fields_come_back_as_they_went(type_: str, fields: dict):
    message = decode(encode(type_, fields))
    assert (message.type, message.fields, message.arrays) == (type_, fields, ())


@pytest.mark.parametrize("dtype", ["u1", "?", "i4", "i8", "f4", "f8"])
def test_arrays_come_back_equal_aligned_and_read_only(dtype: str):
    sent = [np.arange(7).astype(dtype), np.zeros((2, 3), dtype), np.zeros(0, dtype)]
    frame = encode("t", {}, sent)
    received = decode(frame).arrays
    start = np.frombuffer(frame, np.uint8).ctypes.data
    for before, after in zip(sent, received, strict=True):
        np.testing.assert_array_equal(before, after)
        assert after.dtype == before.dtype
        assert not after.flags.writeable
        assert (after.ctypes.data - start) % ALIGNMENT == 0


def test_arrays_are_views_into_the_frame():
    frame = bytearray(encode("t", {}, [np.zeros(4, np.int32)]))
    array = decode(memoryview(frame)).arrays[0]
    frame[-16] = 7
    assert array[0] == 7


def test_an_unknown_dtype_and_fields_that_are_not_plain_are_refused_at_the_sender():
    with pytest.raises(WireError, match=r"got <c8 in a 't' message"):
        encode("t", {}, [np.zeros(1, np.complex64)])
    with pytest.raises(WireError, match="not plain data"):
        encode("t", {"x": object()})


def frame_with(header: object, body: bytes = b"") -> bytes:
    packed = header if isinstance(header, bytes) else msgpack.packb(header)
    assert isinstance(packed, bytes)
    prefix = struct.pack("<4sI", b"ARL1", len(packed)) + packed
    return prefix.ljust(-(-len(prefix) // ALIGNMENT) * ALIGNMENT, b"\0") + body


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (b"", "at least 8 bytes, got 0"),
        (b"XXXX" + bytes(12), "begins with b'ARL1'"),
        (struct.pack("<4sI", b"ARL1", 1000), "header claims 1000 bytes"),
        (frame_with(b"\xc1"), "not msgpack"),
        (frame_with({"a": 1}), r"not \[schema"),
        (frame_with([2, "t", {}, []]), "expected schema 1, got 2"),
        (frame_with([1, 5, {}, []]), r"not \[schema"),
        (frame_with([1, "t", {}, [["<i4", [4], 0]]], bytes(8)), "claims bytes up to"),
        (frame_with([1, "t", {}, [["<i4", [-1], 0]]]), "impossible shape"),
        (frame_with([1, "t", {}, [["<i4", [2**39, 2**39], 0]]]), "claims bytes up to"),
        (frame_with([1, "t", {}, [["<i4", [0], 3]]]), "impossible shape"),
        (frame_with([1, "t", {}, [["|O", [1], 0]]]), "expected an array entry"),
        (frame_with([1, "t", {}, ["x"]]), "expected an array entry"),
        (frame_with([1, "t", {1.5: 2}, []]), "text or integer keys"),
    ],
)
def test_a_malformed_frame_is_refused(frame: bytes, message: str):
    with pytest.raises(WireError, match=message):
        decode(frame)


def test_limits_hold_on_size_arrays_and_nesting():
    limits = Limits(max_bytes=200, max_arrays=1, max_depth=3)
    with pytest.raises(WireError, match="at most 200 bytes"):
        decode(encode("t", {"x": b"0" * 300}), limits)
    with pytest.raises(WireError, match="at most 1 arrays, got 2"):
        decode(encode("t", {}, [np.zeros(1, np.int32)] * 2), limits)
    decode(encode("t", {"a": {"b": 1}}), limits)
    with pytest.raises(WireError, match="nested too deeply"):
        decode(encode("t", {"a": {"b": {"c": 1}}}), limits)


@settings(max_examples=300)
@given(st.data())
def test_a_mutated_frame_is_read_or_refused_and_nothing_else(data: st.DataObject):
    frame = bytearray(encode("group", {"a": [1, {"b": "c"}]}, [np.arange(5, dtype=np.int32)]))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(frame)))
    try:
        decode(bytes(frame[:cut]))
    except WireError:
        return
