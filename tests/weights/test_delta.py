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


def bf16(values: np.ndarray) -> np.ndarray:
    """float32 [N] -> the bits of bfloat16, rounded to nearest even, as uint16 [N]."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


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


def test_runs_follow_the_widths_of_the_tensors_and_cover_every_byte():
    # 3 bfloat16 end at 6, the float32 begins at the next 64; an empty tensor of another width cuts nothing.
    layout = plan_layout(
        [("a", "bfloat16", [3]), ("none", "int64", [0]), ("b", "float32", [5]), ("c", "float32", [2])], 1 << 20
    )
    assert element_runs(layout.tensors, layout.bucket_sizes) == [[(64, 2), (136, 4)]]


def test_pieces_are_encoded_one_by_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(delta, "PIECE_ELEMENTS", 1000)
    base = np.arange(10_001, dtype=np.uint16)
    target = base.copy()
    target[[0, 999, 1000, 5500, 10_000]] += 1
    encoded = encode_delta(base.view(np.uint8), target.view(np.uint8), [(20_002, 2)])
    assert encoded is not None
    assert np.array_equal(applied(base.view(np.uint8), encoded, [(20_002, 2)]).view(np.uint16), target)
    # 11 pieces of 5 bytes; 4 have changes: gaps (5 bytes and 1 to 5 of content), two planes of 5 and up to 2 each.
    assert len(encoded) < 11 * 5 + 4 * 25


def test_gaps_of_exactly_the_escape_and_its_multiples_survive():
    for index in ([0], [254], [255], [256], [509, 510, 511], [0, 255, 511, 1021], [254, 510]):
        array = np.asarray(index)
        assert delta._positions(delta._gaps(array), len(array)).tolist() == index


def test_an_optimizer_step_on_bfloat16_takes_a_few_hundredths_of_the_bytes():
    rng = np.random.default_rng(0)
    master = rng.normal(0, 0.02, 1 << 20).astype(np.float32)
    base = bf16(master).view(np.uint8)
    target = bf16(master + 1e-6 * rng.choice([-1, 1], len(master)).astype(np.float32)).view(np.uint8)
    encoded = encode_delta(base, target, [(len(base), 2)])
    assert encoded is not None
    assert np.array_equal(applied(base, encoded, [(len(base), 2)]), target)
    assert len(encoded) < 0.05 * len(base)


def test_float32_weights_that_all_moved_a_little_travel_as_dense_differences():
    rng = np.random.default_rng(0)
    base = rng.normal(0, 0.02, 1 << 18).astype(np.float32)
    target = (base + 1e-6 * rng.choice([-1, 1], len(base))).astype(np.float32)
    runs = [(base.nbytes, 4)]
    encoded = encode_delta(base.view(np.uint8), target.view(np.uint8), runs)
    assert encoded is not None
    assert len(encoded) < 0.75 * base.nbytes
    assert np.array_equal(applied(base.view(np.uint8), encoded, runs), target.view(np.uint8))


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
