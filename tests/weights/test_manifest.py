import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from async_rl.errors import WeightsError, WireError
from async_rl.net.wire import decode, encode
from async_rl.weights.manifest import (
    ALIGNMENT,
    ITEM_SIZES,
    Manifest,
    digest_bytes,
    manifest_from_fields,
)
from tests.weights.layouts import plan_layout

SPECS = st.lists(
    st.tuples(st.sampled_from(sorted(ITEM_SIZES)), st.lists(st.integers(0, 40), max_size=3)), max_size=30
).map(lambda rows: [(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(rows)])


def manifest_of(specs, bucket_bytes: int) -> Manifest:
    layout = plan_layout(specs, bucket_bytes)
    digests = tuple(digest_bytes(bytes(size)) for size in layout.bucket_sizes)
    return Manifest("lineage", 3, layout.tensors, layout.bucket_sizes, digests)


def test_tensors_lie_aligned_one_after_the_other_and_a_large_one_gets_a_bucket_of_its_own():
    layout = plan_layout(
        [("a", "float32", [3]), ("b", "bfloat16", [2, 2]), ("c", "uint8", [500]), ("d", "bool", [])], 128
    )
    # a: 12 bytes at 0; b: 8 bytes at 64; c does not fit beside them nor in a bucket at all; d neither beside c.
    places = [(spec.bucket, spec.offset, spec.size_bytes) for spec in layout.tensors]
    assert places == [(0, 0, 12), (0, 64, 8), (1, 0, 500), (2, 0, 1)]
    assert layout.bucket_sizes == (72, 500, 1)


@given(SPECS, st.integers(64, 5000))
def test_no_two_tensors_overlap_and_the_wire_gives_back_the_same_manifest(specs, bucket_bytes):
    manifest = manifest_of(specs, bucket_bytes)
    ends: dict[int, int] = {}
    for spec in manifest.tensors:
        assert spec.offset % ALIGNMENT == 0
        assert spec.offset >= ends.get(spec.bucket, 0)
        ends[spec.bucket] = spec.offset + spec.size_bytes
    assert [ends[bucket] for bucket in range(len(manifest.bucket_sizes))] == list(manifest.bucket_sizes)
    frame = encode("manifest", asdict(manifest))
    again = manifest_from_fields(decode(frame).fields)
    assert again == manifest
    assert again.digest == manifest.digest


def test_item_sizes_are_those_of_torch():
    assert {name: getattr(torch, name).itemsize for name in ITEM_SIZES} == dict(ITEM_SIZES)


def test_the_digest_tells_content_apart_but_not_lineage_or_version():
    manifest = manifest_of([("a", "float32", [3])], 128)
    assert replace(manifest, lineage="other", version=9).digest == manifest.digest
    assert replace(manifest, bucket_digests=("0" * 32,)).digest != manifest.digest
    assert manifest_of([("b", "float32", [3])], 128).digest != manifest.digest
    assert manifest_of([("a", "int32", [3])], 128).digest != manifest.digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bucket_sizes": [-1]}, r"Expected `int` >= 0 - at `\$\.bucket_sizes\[0\]`"),
        ({"bucket_sizes": [1 << 50]}, "at most 17592186044416 bytes in all"),
        ({"bucket_digests": []}, "a digest for each of 1 buckets"),
        ({"tensors": [["a", "float32", [3], 1, 0]]}, "expected a place inside a bucket"),
        ({"tensors": [["a", "float32", [3], 0, 3]]}, "expected a place inside a bucket"),
        ({"tensors": [["a", "float32", [-3], 0, 0]]}, r"Expected `int` >= 0 - at `\$\.tensors\[0\]\[2\]\[0\]`"),
        ({"tensors": [["a", "object", [3], 0, 0]]}, "tensor 'a': expected a dtype in .* got 'object'"),
        ({"tensors": [["a", "uint8", [3], 0, 0], ["a", "uint8", [3], 0, 0]]}, "twice"),
        ({"version": "3"}, r"malformed Manifest: Expected `int`, got `str` - at `\$\.version`"),
    ],
)
def test_a_manifest_that_lies_is_refused_before_anything_is_allocated(change, message):
    fields = asdict(manifest_of([("a", "float32", [3])], 128)) | change
    with pytest.raises(WireError, match=message):
        manifest_from_fields(fields)


def test_a_dtype_that_does_not_travel_is_named():
    with pytest.raises(WeightsError, match=r"'w'.*complex64"):
        plan_layout([("w", "complex64", [1])], 128)
