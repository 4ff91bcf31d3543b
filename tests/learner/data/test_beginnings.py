"""Which sequences begin alike: by hand, and against a search of all pairs."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from async_rl.learner.data.beginnings import Beginning, Computed, beginnings, computed, num_shared
from tests.examples import examples


def of(token_ids: list[int], experts: list[int] | None = None, *, prompt: int = 1) -> Computed:
    routes = None if experts is None else np.array(experts, np.uint8).reshape(-1, 1, 1)
    return computed(np.array(token_ids, np.int32), routes, prompt=prompt)


def test_each_sequence_shares_its_beginning_with_an_earlier_one():
    # The turns of a rollout, longest first: the third begins with the first two turns' prompts, 5 and 5 6 7.
    turns = [of([5, 6, 7, 8, 9]), of([5, 6, 7, 1]), of([5, 2]), of([4, 6, 7])]
    assert beginnings(turns)[:2] == [Beginning(0, 0), Beginning(0, 3)]
    assert [found.num_tokens for found in beginnings(turns)[2:]] == [1, 0]
    # A sequence that another begins with is shared as a whole.
    assert beginnings([of([5, 6]), of([5, 6])]) == [Beginning(0, 0), Beginning(0, 2)]


def test_tokens_that_other_experts_computed_are_not_shared():
    assert num_shared(of([5, 6, 7], [0, 1, 2]), of([5, 6, 7], [0, 1, 3])) == 2
    assert num_shared(of([5, 6, 7], [0, 1, 2]), of([5, 6, 8], [0, 3, 2])) == 1
    # By tokens alone, the second stands between the first and the third.
    first, second, third = of([5, 6], [0, 0]), of([5, 7], [1, 0]), of([5, 8], [0, 0])
    assert beginnings([first, second, third])[2] == Beginning(0, 1)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=12))
@examples(100)
def test_no_earlier_sequence_shares_more(drawn: list[list[int]]):
    sequences = [of(tokens) for tokens in drawn]
    for index, (other, num_tokens) in enumerate(beginnings(sequences)):
        of_earlier = [shared(drawn[index], earlier) for earlier in drawn[:index]]
        assert num_tokens == max(of_earlier, default=0)
        assert index == 0 or num_tokens == 0 or (other < index and of_earlier[other] == num_tokens)


def shared(one: list[int], other: list[int]) -> int:
    """The number of tokens before the first difference."""
    pairs = list(zip(one, other, strict=False))
    return next((place for place, (left, right) in enumerate(pairs) if left != right), len(pairs))
