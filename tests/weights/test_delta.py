import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.errors import WeightsError
from async_rl.weights.tcp import delta
from async_rl.weights.tcp.delta import apply_delta, element_runs, encode_delta
from tests.examples import examples
from tests.weights.layouts import plan_layout


def applied(base: np.ndarray, encoded: bytes, runs) -> np.ndarray:
    bucket = base.copy()
    apply_delta(bucket, encoded, runs)
    return bucket


@examples(80)
@given(
    dtypes=st.lists(st.sampled_from(["bfloat16", "float32", "uint8", "int64", "bool"]), min_size=1, max_size=5),
    size=st.integers(0, 3000),
    share=st.sampled_from([0.0, 0.001, 0.02, 0.5, 1.0]),
    seed=st.integers(0, 1 << 30),
)
def test_base_and_delta_give_the_target_bit_for_bit(dtypes, size: int, share: float, seed: int):
    layout = plan_layout([(f"t{i}", dtype, [size + i]) for i, dtype in enumerate(dtypes)], 1 << 30)
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 256, layout.bucket_sizes[0], np.uint8)
    target = np.where(rng.random(len(base)) < share, rng.integers(0, 256, len(base), np.uint8), base)
    (runs,) = element_runs(layout.tensors, layout.bucket_sizes)
    encoded = encode_delta(base, target, runs)
    if encoded is None:
        assert share > 0.01 or len(base) < 1000
    else:
        assert len(encoded) < max(1, len(target))
        assert np.array_equal(applied(base, encoded, runs), target)


@examples(200)
@given(data=st.data())
def test_a_damaged_delta_is_an_error_or_gives_other_bytes_but_never_anything_worse(data: st.DataObject):
    base = np.arange(2000, dtype=np.uint16)
    target = base.copy()
    target[::37] += 1
    runs = [(4000, 2)]
    encoded = encode_delta(base.view(np.uint8), target.view(np.uint8), runs)
    assert encoded is not None
    at = data.draw(st.integers(0, len(encoded) - 1))
    damaged = bytearray(encoded)
    damaged[at] ^= data.draw(st.integers(1, 255))
    cut = damaged[: data.draw(st.sampled_from([at, len(damaged)]))]
    try:
        bucket = applied(base.view(np.uint8), bytes(cut), runs)
    except WeightsError:
        return
    assert len(bucket) == 4000


def test_a_plane_that_claims_to_be_huge_is_refused_before_it_is_unpacked():
    import zstandard

    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    piece = delta._PIECE.pack(delta._SPARSE, 5) + delta._PLANE.pack(1, len(bomb)) + bomb
    with pytest.raises(WeightsError, match="bytes in one part of the delta"):
        apply_delta(np.zeros(4000, np.uint8), piece, [(4000, 2)])
