"""Sets of sampling masks: the three ways to write one, by hand, and against Python's own sets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.sampling_mask import (
    SamplingMask,
    contains,
    join,
    largest_id,
    pack_ids,
    select,
    split,
    why_malformed,
    words_at_most,
)

Sets = list[set[int]]


def packed(sets: Sets, vocab_size: int) -> SamplingMask:
    ids = [i for each in sets for i in sorted(each)]
    return pack_ids(np.array([len(each) for each in sets], np.int64), np.array(ids, np.int32), vocab_size=vocab_size)


def unpacked(kept: SamplingMask, vocab_size: int) -> Sets:
    """By asking every set about every token of the vocabulary."""
    columns = [contains(kept, np.full(len(kept), token, np.int32)) for token in range(vocab_size)]
    return [{token for token in range(vocab_size) if columns[token][row]} for row in range(len(kept))]


@st.composite
def sets_and_vocabulary(draw: st.DrawFn) -> tuple[Sets, int]:
    vocab_size = draw(st.sampled_from([1, 2, 31, 32, 33, 64, 100, 200]))
    one = st.one_of(
        st.sets(st.integers(0, vocab_size - 1), min_size=1, max_size=4),
        st.sets(st.integers(0, vocab_size - 1), min_size=1),
        st.just(set(range(vocab_size))),
    )
    return draw(st.lists(one, max_size=6)), vocab_size


def test_a_set_is_written_in_the_shortest_way():
    # 100 tokens are 4 words of bits. Three ids are shorter; of four and more, bits are; all 100 need no word.
    # Bits 0, 31 | 32 | - | 99 = 3 * 32 + 3: words 1 + 2^31 (as int32: -2^31 + 1), 1, 0, 2^3.
    kept = packed([{5, 7, 99}, {0, 31, 32, 99}, set(range(100))], 100)
    assert kept.sizes.tolist() == [3, -4, 0]
    assert kept.words.tolist() == [5, 7, 99, -(2**31) + 1, 1, 0, 8]
    assert (kept.sizes.dtype, kept.words.dtype) == (np.int32, np.int32)
    assert words_at_most(100) == 4
    for beyond in (-1, 100, 128, 2**30):
        assert not contains(kept, np.full(3, beyond, np.int32))[:2].any()


@given(sets_and_vocabulary())
def test_sets_come_back_as_they_went_in(drawn: tuple[Sets, int]):
    sets, vocab_size = drawn
    kept = packed(sets, vocab_size)
    assert unpacked(kept, vocab_size) == sets
    assert why_malformed(kept.sizes, kept.words, len(sets)) == ""
    # The bound that the queue reserves room by.
    assert all(abs(size) <= min(len(s), words_at_most(vocab_size)) for size, s in zip(kept.sizes, sets, strict=True))


@given(sets_and_vocabulary(), st.data())
def test_splitting_joining_and_choosing_are_those_of_lists(drawn: tuple[Sets, int], data: st.DataObject):
    sets, vocab_size = drawn
    kept = packed(sets, vocab_size)
    cut = data.draw(st.integers(0, len(sets)))
    parts = split(kept, [cut, 0, len(sets) - cut])
    assert [unpacked(part, vocab_size) for part in parts] == [sets[:cut], [], sets[cut:]]
    assert unpacked(join(parts), vocab_size) == sets
    chosen = data.draw(st.lists(st.booleans(), min_size=len(sets), max_size=len(sets)))
    expected = [each for each, is_chosen in zip(sets, chosen, strict=True) if is_chosen]
    assert unpacked(select(kept, np.array(chosen, np.bool_)), vocab_size) == expected


@given(sets_and_vocabulary())
def test_no_id_is_larger_than_the_largest(drawn: tuple[Sets, int]):
    sets, vocab_size = drawn
    largest = largest_id(packed(sets, vocab_size))
    partial = [max(each) for each in sets if len(each) < vocab_size]
    assert largest < vocab_size
    assert largest >= max(partial, default=-1) // 32 * 32


@pytest.mark.parametrize(
    ("sizes", "words", "message"),
    [
        ([1], [3], "expected sizes of 2 sampling masks"),
        ([1, -2], [3, 0], "expected 3 words of sampling masks"),
        ([1, 0], [3, 4], "expected 1 words of sampling masks"),
        ([-(2**31), 0], [], "expected 2147483648 words"),
        ([1, -1], [-3, -3], "expected token ids of 0 and above"),
    ],
)
def test_arrays_that_do_not_fit_together_are_malformed(sizes: list[int], words: list[int], message: str):
    assert message in why_malformed(np.array(sizes, np.int32), np.array(words, np.int32), 2)
