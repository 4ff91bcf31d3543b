"""Frames: round trips, alignment, and refusal of everything malformed."""

import struct
import tracemalloc

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.errors import WireError
from async_rl.net.wire import ALIGNMENT, Limits, decode, encode
from async_rl.net.wire import SCHEMA_VERSION as V
from tests.examples import examples

HEAD = b"\x95" + bytes([V])
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.text(), st.dictionaries(st.text(), PLAIN, max_size=5))
def test_fields_come_back_as_they_went(type_: str, fields: dict):
    message = decode(encode(type_, fields))
    assert (message.type, message.fields, message.arrays) == (type_, fields, ())


@pytest.mark.parametrize("dtype", ["u1", "?", "u2", "i4", "i8", "f4", "f8"])
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


def test_an_unknown_dtype_and_fields_that_are_not_plain_are_refused_at_the_sender():
    with pytest.raises(WireError, match=r"array of a 't' message: expected a dtype in .*, got <c8"):
        encode("t", {}, [np.zeros(1, np.complex64)])
    with pytest.raises(WireError, match="can't be encoded"):
        encode("t", {"x": object()})


def frame_with(header: object, body: bytes = b"") -> bytes:
    packed = header if isinstance(header, bytes) else msgpack.packb(header)
    assert isinstance(packed, bytes)
    prefix = struct.pack("<4sI", b"ARL1", len(packed)) + packed
    return prefix.ljust(-(-len(prefix) // ALIGNMENT) * ALIGNMENT, b"\0") + body


LONG = b"\x91" * 700 + b"\x90"
"""Nested deeper than ``repr`` can go."""


def with_array(*entry: object) -> bytes:
    return frame_with([V, "t", {}, [list(entry)], 0], bytes(8))


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (b"", "at least 8 bytes, got one of 0 bytes"),
        (b"XXXX" + bytes(12), "begins with b'ARL1'"),
        (struct.pack("<4sI", b"ARL1", 1000), "got one of 1000 bytes"),
        (frame_with(b"\xc1"), "not msgpack"),
        (frame_with({"a": 1}), r"expected a header \[schema"),
        (frame_with([V - 1, "t", {}, [], 0]), rf"of schema {V}, got schema {V - 1}; install the same version"),
        (frame_with([V, "t", {}, [], True]), r"expected a header \[schema"),
        (frame_with([V, "t", {}, [], -1]), "0 to 65536 parts in a message, got 0 arrays and -1 parts"),
        (frame_with([V, "t", {1.5: 2}, [], 0]), "text or integer keys"),
        (frame_with([V, "t", {"a": [msgpack.ExtType(5, b"x")]}, [], 0]), "expected plain data in a message, got a Ext"),
        (with_array("<i4", [2**39, 2**39], 0), "got one that ends at"),
        (with_array("<i4", [-1], 0), "array entry .*Expected `int` >= 0"),
        (with_array("<i4", [0, 2**39, 2**39], 0), "expected a shape that numpy supports, got .* too big"),
        (with_array("<i4", [0], -16), "array entry .*Expected `int` >= 0"),
        (with_array("|O", [1], 0), r"expected a dtype in .*, got '\|O'"),
        (with_array("<i4", [0], 8), "array entry .*multiple of 16"),
        (with_array("<i4", [1] * 5, 0), "array entry .*length <= 4"),
        (frame_with(b"\x95" + LONG + b"\xa1t\x80\x90\x00"), f"expected a message of schema {V}"),
        (frame_with(HEAD + b"\xa1t\x80\x91" + LONG + b"\x00"), "array entry"),
    ],
)
def test_a_malformed_frame_is_refused(frame: bytes, message: str):
    with pytest.raises(WireError, match=message):
        decode(frame)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (encode("t", {"x": b"0" * 300}), "at most 200 bytes"),
        (encode("t", {}, [np.zeros(1, np.int32)] * 2), "at most 1 arrays and 0 to 1 parts in a message, got 2 arrays"),
        (encode("t", {"a": {"b": {"c": 1}}}), "nested at most"),
        (encode("t", {"x": [0] * 6}), "at most 5 items in a message, got 6"),
        (encode("t", {str(i): 0 for i in range(6)}), "at most 5 items in a message, got 6"),
    ],
)
def test_limits_hold_on_size_arrays_nesting_and_items(frame: bytes, message: str):
    limits = Limits(max_bytes=200, max_arrays=1, max_depth=3, max_items=5)
    decode(encode("t", {"a": {"b": 1}, "x": [0] * 2}), limits)
    with pytest.raises(WireError, match=message):
        decode(frame, limits)


def test_the_bytes_of_a_frame_are_fixed():
    frame = encode("t", {"a": [1, "b"]}, [np.array([[1, -2]], np.int32), np.array([True]), np.array(0.5)], num_parts=2)
    # 8 bytes of prefix and 43 of header end at 51, so array 0 begins at 64.
    header = (
        b"\x95\x03\xa1t\x81\xa1a\x92\x01\xa1b\x93"  # [3, "t", {"a": [1, "b"]}, 3 arrays:
        b"\x93\xa3<i4\x92\x01\x02\x00"  # ["<i4", [1, 2], 0]
        b"\x93\xa3|b1\x91\x01\x10"  # ["|b1", [1], 16]
        b"\x93\xa3<f8\x90\x20"  # ["<f8", [], 32]
        b"\x02"  # 2 parts
    )
    arrays = [b"\x01\0\0\0\xfe\xff\xff\xff", b"\x01", b"\0\0\0\0\0\0\xe0\x3f"]
    assert frame == frame_with(header, b"".join(body.ljust(16, b"\0") for body in arrays))


def test_arrays_that_are_not_contiguous_are_sent_by_value():
    sent = np.arange(12, dtype=np.int64).reshape(3, 4)
    received = decode(encode("t", {}, [sent.T, sent[:, ::2], np.array(7, np.int32)])).arrays
    np.testing.assert_array_equal(received[0], sent.T)
    np.testing.assert_array_equal(received[1], sent[:, ::2])
    assert (received[2].shape, received[2].item()) == ((), 7)


def test_deep_nesting_ends_in_a_refusal_not_in_the_stack():
    for one_deeper in (b"\x91", b"\x81\xa1a"):
        with pytest.raises(WireError, match="RecursionError"):
            decode(frame_with(HEAD + b"\xa1t" + one_deeper * 100_000 + b"\x90\x90\x00"))
        # 500 levels are within the reader's own limit.
        with pytest.raises(WireError, match="nested at most"):
            decode(frame_with(HEAD + b"\xa1t\x81\xa1a" + one_deeper * 500 + b"\x90\x90\x00"))


def test_a_refusal_does_not_quote_megabytes():
    with pytest.raises(WireError) as refused:
        decode(frame_with([V, "t", {}, [["<i4", ["x" * 1_000_000] * 3, 0]], 0]))
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize(
    "claim",
    [
        pytest.param(b"\xdd" + struct.pack(">I", 1_000), id="list of a small claim"),
        pytest.param(b"\xdd" + struct.pack(">I", 1_000_000), id="list"),
        pytest.param(b"\x81\xa1a\xdf" + struct.pack(">I", 1_000_000), id="map"),
        pytest.param(b"\xc6" + struct.pack(">I", 2**31), id="bytes"),
        pytest.param(b"\xdb" + struct.pack(">I", 2**32 - 1), id="text"),
        pytest.param(b"\xc9" + struct.pack(">I", 2**31) + b"\x05", id="extension"),
    ],
)
def test_nothing_is_allocated_for_what_a_header_only_claims(claim: bytes):
    frame = frame_with(b"\x94\x01\xa1t" + claim * 500)
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match="not msgpack"):
            decode(frame)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_parts_make_a_message_whole():
    message = decode(encode("t", {}, num_parts=2))
    parts = memoryview(b"one"), memoryview(b"two")
    assert message.with_parts(parts).parts == parts
    for wrong in (parts[:1], (*parts, parts[0])):
        with pytest.raises(WireError, match=f"expected 2 parts after its frame, got {len(wrong)}"):
            message.with_parts(wrong)


@examples(300)
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
