"""Who computes what: parts, room and rounds by hand, and what holds for any sequences."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from async_rl.learner.data.balance import Sizes, Work, packed_bins
from tests.examples import examples

ROW_TOKENS = Work()


def sizes_of(lengths: Sequence[int], shared: Sequence[int] | None = None, work: Work = ROW_TOKENS) -> Sizes:
    return Sizes(
        lengths=lengths,
        beside=[work.beside(length, 0) for length in lengths],
        order=range(len(lengths)),
        shared=shared or [0] * len(lengths),
    )


def test_answers_stay_with_a_prompt_that_is_much_longer_and_are_spread_over_the_ranks_otherwise():
    # Two prompts of 20 with four answers of 2 each: 28 + 28 tokens, an even load of 28. A part of a quarter of that
    # would hold one answer, and repeat the prompt for each.
    bins = packed_bins(sizes_of([22] * 8, [0, 20, 20, 20] * 2), max_tokens=100, num_ranks=2)
    assert bins == [[0, 1, 2, 3], [4, 5, 6, 7]]
    bins = packed_bins(sizes_of([22] * 4, [0, 2, 2, 2]), max_tokens=100, num_ranks=2)
    assert sorted(map(len, bins)) == [2, 2]


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
