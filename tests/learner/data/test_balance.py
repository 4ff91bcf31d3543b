"""Who computes what: parts, room and rounds by hand, and what holds for any sequences."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.learner.data.balance import Sizes, Work, dealt, packed_bins, padded_bins
from tests.examples import examples

ROW_TOKENS = Work()


def sizes_of(lengths: Sequence[int], shared: Sequence[int] | None = None, work: Work = ROW_TOKENS) -> Sizes:
    return Sizes(
        lengths=lengths,
        beside=[work.beside(length, 0) for length in lengths],
        order=range(len(lengths)),
        shared=shared or [0] * len(lengths),
    )


def test_attention_and_predictions_count_beside_row_tokens():
    # 3 trained tokens at half a token's work, and 10 x 10 / 2 pairs at a hundredth.
    assert Work(prediction=0.5, pair=0.01).beside(10, 3) == pytest.approx(1.5 + 0.5)


def test_long_sequences_get_a_micro_batch_with_less_else():
    # 8 tokens and 8 x 8 / 2 pairs at 1/8 are 12; four times 4 tokens and 8 pairs, 5 each. By tokens: 8 + 4 and 4 x 3.
    lengths = [8, 4, 4, 4, 4]
    assert packed_bins(sizes_of(lengths), max_tokens=20, num_ranks=2) == [[0, 3], [1, 2, 4]]
    by_work = packed_bins(sizes_of(lengths, work=Work(pair=1 / 8)), max_tokens=20, num_ranks=2)
    assert sorted(map(sorted, by_work)) == [[0, 4], [1, 2, 3]]
    heavier = packed_bins(sizes_of(lengths, work=Work(pair=1.0)), max_tokens=20, num_ranks=2)
    assert sorted(map(sorted, heavier)) == [[0], [1, 2, 3, 4]]


def test_a_micro_batch_with_little_work_and_no_room_waits_for_smaller_sequences():
    # 10 and 6 at 10: the 3 fits beside the 6 only, then the 2 does not, and the 1 does.
    bins = packed_bins(sizes_of([10, 6, 3, 1]), max_tokens=10, num_ranks=2)
    assert sorted(map(sorted, bins)) == [[0], [1, 2, 3]]


def test_there_may_be_more_micro_batches_than_the_limit_asks_for():
    # A pipeline of three stages wants three. By work: 4 + 4, 4 and 4.
    assert packed_bins(sizes_of([4] * 4), max_tokens=100, num_ranks=1, min_rounds=3) == [[0, 3], [1], [2]]
    # 8 tokens are the least room with which 5, 4 and 3 take two padded batches: 2 x 4 and 5.
    assert padded_bins(sizes_of([5, 4, 3]), max_tokens=100, num_ranks=1, min_rounds=2) == [[1, 2], [0]]


def test_each_round_has_micro_batches_of_similar_work():
    bins = packed_bins(sizes_of([9, 8, 5, 4]), max_tokens=9, num_ranks=2)
    assert bins == [[0], [1], [2], [3]]
    # The second rank begins the second round.
    assert dealt(bins, 2) == [[[0], [3]], [[1], [2]]]


def test_sequences_above_half_the_limit_take_a_micro_batch_each():
    assert [len(members) for members in packed_bins(sizes_of([6] * 10), max_tokens=10, num_ranks=2)] == [1] * 10
    # An eleventh opens a round, in which the other rank has nothing.
    bins = packed_bins(sizes_of([6] * 11), max_tokens=10, num_ranks=2)
    assert sorted(map(len, bins)) == [0, *[1] * 11]


def test_answers_much_shorter_than_their_prompt_stay_with_it():
    # Two prompts of 20 with four answers of 2 each: 28 + 28 tokens, an even load of 28. A part of a quarter of that
    # would hold one answer, and repeat the prompt for each.
    lengths, shared = [22] * 8, [0, 20, 20, 20] * 2
    bins = packed_bins(sizes_of(lengths, shared), max_tokens=100, num_ranks=2)
    assert bins == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_answers_much_longer_than_their_prompt_are_spread_over_the_ranks():
    bins = packed_bins(sizes_of([22] * 4, [0, 2, 2, 2]), max_tokens=100, num_ranks=2)
    assert sorted(map(len, bins)) == [2, 2]


def test_padded_rounds_are_sorted_by_work():
    # 2 x 6 and 4 x 3 tokens: as many, but longer ones attend to more.
    lengths = [3, 3, 3, 3, 6, 6]
    bins = padded_bins(sizes_of(lengths, work=Work(pair=1)), max_tokens=12, num_ranks=1)
    assert bins == [[4, 5], [0, 1, 2, 3]]


@given(
    lengths=st.lists(st.integers(1, 60), max_size=40),
    max_tokens=st.integers(60, 150),
    num_ranks=st.integers(1, 4),
    pair=st.sampled_from([0.0, 0.01, 1.0]),
)
@examples(100)
def test_every_sequence_is_in_one_micro_batch_with_room_and_there_are_few(
    lengths: list[int], max_tokens: int, num_ranks: int, pair: float
):
    sizes = sizes_of(lengths, work=Work(pair=pair))
    bins = packed_bins(sizes, max_tokens=max_tokens, num_ranks=num_ranks)
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    tokens = [sum(lengths[index] for index in members) for members in bins]
    assert max(tokens) <= max_tokens
    works = [sum(lengths[i] + sizes.beside[i] for i in members) for members in bins]
    assert works == sorted(works, reverse=True)
    assert len(bins) % num_ranks == 0
    # First-fit leaves at most one micro-batch half empty; one round more is for the ranks, one for the spreading.
    assert len(bins) <= 2 * sum(lengths) / max_tokens + 2 * num_ranks
