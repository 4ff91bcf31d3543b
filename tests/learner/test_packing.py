"""Packing: every sequence once, budgets kept, ranks even and balanced, and the arrays of one micro-batch by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl import wire
from async_rl.errors import WireError
from async_rl.learner.packing import MicroBatch, TrainSequence, dummy_micro_batch, from_arrays, pack, to_arrays


def sequence(sequence_id: int, length: int, *, prompt: int = 1, temperature: float = 1.0) -> TrainSequence:
    places = np.arange(length)
    return TrainSequence(
        sequence_id=sequence_id,
        token_ids=(100 * sequence_id + places).astype(np.int32),
        loss_mask=places >= prompt,
        behavior_logprobs=(-places / 8).astype(np.float32),
        versions=np.full(length, sequence_id, dtype=np.int32),
        advantages=np.full(length, sequence_id + 0.5, dtype=np.float32),
        temperature=temperature,
    )


def num_tokens(batch: MicroBatch) -> int:
    return len(batch.token_ids)


def test_micro_batch_holds_its_sequences_end_to_end():
    # 4 tokens (prompt 2) and 2 tokens (prompt 1), longest first: T = 4 + 2; trained at 2, 3 and 5, so predicted from
    # 1, 2 and 4.
    [[batch]] = pack(
        [sequence(7, 2, temperature=0.5), sequence(3, 4, prompt=2, temperature=1.5)], max_tokens=6, num_ranks=1
    )
    assert batch.token_ids.tolist() == [300, 301, 302, 303, 700, 701]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 4, 6]
    assert batch.predict_index.tolist() == [1, 2, 4]
    assert batch.targets.tolist() == [302, 303, 701]
    assert batch.behavior_logprobs.tolist() == [-0.25, -0.375, -0.125]
    assert batch.advantages.tolist() == [3.5, 3.5, 7.5]
    assert batch.temperatures.tolist() == [1.5, 1.5, 0.5]
    assert batch.versions.tolist() == [3, 3, 7]
    assert batch.sequence_index.tolist() == [0, 0, 1]
    assert batch.sequence_ids.tolist() == [3, 7]


def test_longest_goes_first_to_the_emptiest_micro_batch():
    # 18 tokens at 9 ask for two micro-batches: 5 and 4, then 4 + 3 and 5 + 3, but 7 + 3 is above 9. With three:
    # 5, 4 and 3, then 3 + 3, then 4 + 3.
    [batches] = pack([sequence(i, n) for i, n in enumerate([5, 4, 3, 3, 3])], max_tokens=9, num_ranks=1)
    assert sorted(b.sequence_ids.tolist() for b in batches) == [[0], [1, 4], [2, 3]]


def test_rank_with_nothing_gets_a_dummy():
    ranks = pack([sequence(0, 5)], max_tokens=8, num_ranks=3)
    assert [[b.sequence_ids.tolist() for b in rank] for rank in ranks] == [[[0]], [[-1]], [[-1]]]


def test_no_sequences_is_one_dummy_on_every_rank():
    ranks = pack([], max_tokens=8, num_ranks=2)
    assert [[b.sequence_ids.tolist() for b in rank] for rank in ranks] == [[[-1]], [[-1]]]


def test_dummy_is_two_tokens_without_predictions():
    dummy = dummy_micro_batch()
    assert dummy.token_ids.tolist() == [0, 0]
    assert dummy.cu_seqlens.tolist() == [0, 2]
    assert len(dummy.targets) == 0


def test_sequence_at_the_budget_fits_and_one_token_more_is_refused():
    assert num_tokens(pack([sequence(0, 8)], max_tokens=8, num_ranks=1)[0][0]) == 8
    with pytest.raises(
        ValueError, match=r"sequence 4 has 9 tokens, learner\.max_tokens = 8; raise learner\.max_tokens"
    ):
        pack([sequence(4, 9)], max_tokens=8, num_ranks=1)


def test_trained_first_token_is_refused():
    with pytest.raises(ValueError, match="nothing predicts a first token"):
        pack([sequence(0, 3, prompt=0)], max_tokens=8, num_ranks=1)


def test_empty_sequence_is_refused():
    with pytest.raises(ValueError, match="at least one token"):
        pack([sequence(0, 0)], max_tokens=8, num_ranks=1)


def test_arrays_of_different_lengths_are_refused():
    good = sequence(0, 3)
    bad = TrainSequence(
        0, good.token_ids, good.loss_mask[:2], good.behavior_logprobs, good.versions, good.advantages, 1.0
    )
    with pytest.raises(ValueError, match=r"\[3, 2, 3, 3, 3\]"):
        pack([bad], max_tokens=8, num_ranks=1)


@settings(deadline=None)
@given(st.lists(st.integers(1, 64), max_size=60), st.integers(64, 200), st.integers(1, 5))
def test_pack_keeps_every_sequence_once_within_budget_and_balanced(lengths: list[int], max_tokens: int, num_ranks: int):
    sequences = [sequence(i, n) for i, n in enumerate(lengths)]
    ranks = pack(sequences, max_tokens=max_tokens, num_ranks=num_ranks)
    batches = [b for rank in ranks for b in rank]
    real = [b for b in batches if b.sequence_ids[0] != -1]

    assert len(ranks) == num_ranks
    assert len({len(rank) for rank in ranks}) == 1
    assert sorted(i for b in real for i in b.sequence_ids.tolist()) == list(range(len(lengths)))
    assert all(num_tokens(b) <= max_tokens for b in batches)
    for b in real:
        lengths_in = np.diff(b.cu_seqlens).tolist()
        assert lengths_in == sorted(lengths_in, reverse=True) == [lengths[i] for i in b.sequence_ids]
    if lengths:
        sizes = [num_tokens(b) if b.sequence_ids[0] != -1 else 0 for b in batches]
        assert max(sizes) - min(sizes) <= max(lengths)
        per_rank = [sum(num_tokens(b) for b in rank if b.sequence_ids[0] != -1) for rank in ranks]
        assert max(per_rank) - min(per_rank) <= max(lengths)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=30), st.integers(1, 3))
def test_pack_is_deterministic(lengths: list[int], num_ranks: int):
    sequences = [sequence(i, n) for i, n in enumerate(lengths)]
    first, second = (pack(sequences, max_tokens=64, num_ranks=num_ranks) for _ in range(2))
    for one, two in zip(first, second, strict=True):
        assert [b.sequence_ids.tolist() for b in one] == [b.sequence_ids.tolist() for b in two]


def test_many_equal_sequences_leave_no_rank_behind():
    # 16 of 100 tokens over 4 ranks at 400 a micro-batch: exactly 4 each, one round.
    ranks = pack([sequence(i, 100) for i in range(16)], max_tokens=400, num_ranks=4)
    assert [[num_tokens(b) for b in rank] for rank in ranks] == [[400]] * 4


def test_micro_batch_survives_the_wire():
    [[batch]] = pack([sequence(0, 4), sequence(1, 3)], max_tokens=9, num_ranks=1)
    frame = wire.encode("micro_batch", {}, to_arrays(batch))
    back = from_arrays(wire.decode(frame).arrays)
    for sent, received in zip(to_arrays(batch), to_arrays(back), strict=True):
        assert sent.dtype == received.dtype
        assert sent.tolist() == received.tolist()
        assert received.flags.writeable


def test_dummy_survives_the_wire():
    back = from_arrays(wire.decode(wire.encode("micro_batch", {}, to_arrays(dummy_micro_batch()))).arrays)
    assert back.sequence_ids.tolist() == [-1]


def test_micro_batch_with_an_array_missing_is_refused():
    with pytest.raises(WireError, match="expected the 11 arrays of a micro-batch, got 10"):
        from_arrays(to_arrays(dummy_micro_batch())[:-1])


def test_micro_batch_with_a_wrong_dtype_is_refused():
    arrays = to_arrays(dummy_micro_batch())
    arrays[0] = arrays[0].astype(np.int32)
    with pytest.raises(WireError, match=r"token_ids as int64 \[n\], got int32"):
        from_arrays(arrays)
