"""The order in which sources take turns: exact shares at every position, and what an epoch is."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.queue.core.prompts import Mixture, PromptStream, StreamCursor

WEIGHTS = st.lists(st.integers(1, 40), min_size=1, max_size=8)


@given(WEIGHTS)
def test_after_any_number_of_prompts_every_source_is_within_one_of_its_share(weights: list[int]):
    mixture = Mixture([1] * len(weights), weights)
    counts = [0] * len(weights)
    for position in range(2 * sum(weights)):
        source, earlier = mixture.locate(position)
        assert earlier == counts[source] == mixture.count(source, position)
        counts[source] += 1
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - Fraction((position + 1) * weight, sum(weights))) < 1


def test_three_to_one_is_worked_out_by_hand():
    # Shares 3/4 and 1/4. At the second prompt both are behind by 1/2, and the first goes first. At the third the
    # first is behind by 9/4 - 2 = 1/4, too little to be due.
    mixture = Mixture([10, 10], [3, 1])
    assert [mixture.locate(p) for p in range(8)] == [
        (0, 0), (0, 1), (1, 0), (0, 2), (0, 3), (0, 4), (1, 1), (0, 5),
    ]  # fmt: skip


def test_weights_count_in_lowest_terms():
    same = [[Mixture([5, 5], weights).locate(p) for p in range(20)] for weights in ([3, 1], [300, 100])]
    assert same[0] == same[1]


@given(WEIGHTS, st.data())
def test_an_epoch_ends_with_the_last_source_that_has_been_passed_over(weights: list[int], data: st.DataObject):
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=len(weights), max_size=len(weights)))
    mixture, epochs = Mixture(sizes, weights), data.draw(st.integers(1, 3))
    end = mixture.end_of(epochs)
    passed = [[mixture.count(s, p) >= epochs * size for s, size in enumerate(sizes)] for p in (end - 1, end)]
    assert not all(passed[0])
    assert all(passed[1])
    assert mixture.epoch(end) >= epochs - 1


def test_one_source_is_the_stream_without_sources():
    plain, mixed = PromptStream(7, seed=3, epochs=2), PromptStream(7, seed=3, epochs=2, weights=[5], sizes=[7])
    assert [plain.locate(p) for p in range(14)] == [mixed.locate(p) for p in range(14)]
    assert [mixed.draw() for _ in range(15)] == [*range(14), None]


def test_each_source_is_shuffled_anew_in_each_epoch_of_its_own():
    # Rows 0..3 are the first source, row 4 and 5 the second. Weights 1 and 1: sources alternate.
    stream = PromptStream(6, seed=0, weights=[1, 1], sizes=[4, 2])
    located = [stream.locate(p) for p in range(16)]
    first, second = [at for at in located if at[0] < 4], [at for at in located if at[0] >= 4]
    assert len(first) == len(second) == 8
    assert [epoch for _, epoch in first] == [0] * 4 + [1] * 4
    assert [epoch for _, epoch in second] == [0, 0, 1, 1, 2, 2, 3, 3]
    orders = [[row for row, epoch in located if row < 4 and epoch == e] for e in (0, 1)]
    assert [sorted(order) for order in orders] == [[0, 1, 2, 3]] * 2
    assert orders[0] != orders[1]
    assert all(sorted(row for row, at in second if at == e) == [4, 5] for e in range(4))


def test_a_restarted_stream_of_sources_goes_on_exactly():
    streams = [PromptStream(30, seed=4, weights=[7, 2, 3], sizes=[11, 9, 10]) for _ in range(2)]
    for _ in range(50):
        streams[0].draw()
    streams[1].cursor = StreamCursor(50)
    assert [streams[0].locate(p) for p in range(40, 200)] == [streams[1].locate(p) for p in range(40, 200)]
    assert streams[0].draw() == streams[1].draw() == 50


def test_the_stream_ends_when_every_source_has_been_passed_over():
    # Weights 3 and 1, sizes 3 and 2: the second prompt of the second source is at position 6, so seven prompts.
    stream = PromptStream(5, seed=0, shuffle=False, epochs=1, weights=[3, 1], sizes=[3, 2])
    drawn = [position for _ in range(9) if (position := stream.draw()) is not None]
    assert [stream.locate(p) for p in drawn] == [(0, 0), (1, 0), (3, 0), (2, 0), (0, 1), (1, 1), (4, 0)]
    assert stream.exhausted
    assert stream.epoch == 0


@pytest.mark.parametrize("num_sources", [2, 3, 30])
def test_many_equal_sources_take_turns(num_sources: int):
    mixture = Mixture([1] * num_sources, [1] * num_sources)
    assert sorted(mixture.locate(p)[0] for p in range(num_sources)) == list(range(num_sources))
