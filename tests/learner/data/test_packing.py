"""Packing: every sequence once, budgets kept, ranks even and balanced, and the arrays of one micro-batch by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.learner.data.packing import (
    MicroBatch,
    Packing,
    by_sequence,
    dummy_micro_batch,
    from_arrays,
    pack,
    padded_cost,
    to_arrays,
)
from async_rl.learner.interface import PaddedCost
from async_rl.learner.sequences import TrainSequence, after_update
from async_rl.net import wire
from async_rl.sampling_mask import pack_ids
from tests.examples import examples


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


def sharing(sequence_id: int, prompt: list[int], answer: list[int]) -> TrainSequence:
    plain = sequence(sequence_id, len(prompt) + len(answer), prompt=len(prompt))
    return replace(plain, token_ids=np.array(prompt + answer, dtype=np.int32))


def num_tokens(batch: MicroBatch) -> int:
    return len(batch.token_ids)


def row_of(batch: MicroBatch, sequence_id: int) -> list[int]:
    """The tokens that the model computes for one sequence."""
    index = batch.sequence_ids.tolist().index(sequence_id)
    places = batch.token_index[batch.cu_seqlens[index] : batch.cu_seqlens[index + 1]]
    return batch.token_ids[places].tolist()


def test_micro_batch_holds_its_sequences_end_to_end_without_their_last_tokens():
    # 4 tokens (prompt 2) and 2 tokens (prompt 1), longest first. Nothing needs what stands behind the last prediction,
    # so T = 3 + 1; trained at 2 and 3 (predicted from 1 and 2), and at 1 (predicted from 0, at 3 in the row).
    [[batch]] = pack(
        [sequence(7, 2, temperature=0.5), sequence(3, 4, prompt=2, temperature=1.5)], max_tokens=6, num_ranks=1
    )
    assert batch.token_ids.tolist() == [300, 301, 302, 700]
    assert batch.position_ids.tolist() == [0, 1, 2, 0]
    assert batch.token_index.tolist() == [0, 1, 2, 3]
    assert batch.cu_seqlens.tolist() == [0, 3, 4]
    assert batch.predict_index.tolist() == [1, 2, 3]
    assert batch.targets.tolist() == [302, 303, 701]
    assert batch.behavior_logprobs.tolist() == [-0.25, -0.375, -0.125]
    assert batch.advantages.tolist() == [3.5, 3.5, 7.5]
    assert batch.temperatures.tolist() == [1.5, 1.5, 0.5]
    assert batch.versions.tolist() == [3, 3, 7]
    assert batch.sequence_index.tolist() == [0, 0, 1]
    assert batch.sequence_ids.tolist() == [3, 7]
    assert batch.reference_logprobs.shape == batch.mask_sizes.shape == (0,)


def scored(sequence_id: int, length: int) -> TrainSequence:
    """Its reference logprobs are those of behavior less 1, its proximal ones less 2."""
    plain = sequence(sequence_id, length)
    behavior = plain.behavior_logprobs
    return replace(plain, reference_logprobs=behavior - 1, proximal_logprobs=behavior - 2)


def keeping(plain: TrainSequence) -> TrainSequence:
    """The i-th token was chosen from itself and the i below it."""
    tokens = plain.token_ids[plain.loss_mask]
    ids = [np.arange(max(0, token - i), token + 1) for i, token in enumerate(tokens.tolist())]
    counts, flat = np.array([len(each) for each in ids], np.int64), np.concatenate([np.zeros(0, np.int32), *ids])
    return replace(plain, sampling_mask=pack_ids(counts, flat, vocab_size=2000))


@pytest.mark.parametrize(
    ("sequences", "named"),
    [
        ([scored(0, 3), replace(scored(1, 3), proximal_logprobs=np.zeros(0, np.float32))], "of all 2 .* got 1"),
        ([scored(0, 3), replace(scored(1, 3), reference_logprobs=np.zeros(2, np.float32))], "sequence 1: .* got 2"),
        ([replace(sequence(0, 3), loss_mask=np.ones(2, bool))], "loss_mask of 3 tokens, got 2"),
        ([replace(sequence(0, 3), advantages=np.ones(2, np.float32))], "advantages of 3 tokens, got 2"),
        ([replace(sequence(0, 4), sampling_mask=keeping(sequence(0, 3)).sampling_mask)], "for 3 trained .* got 2"),
        ([sequence(4, 10)], r"sequence 4: .* learner\.max_tokens x parallel\.sequence = 9 tokens, got 10"),
        ([sequence(0, 3, prompt=0)], "nothing predicts a first token"),
    ],
)
def test_sequences_that_can_not_be_packed_are_refused(sequences: Sequence[TrainSequence], named: str):
    with pytest.raises(ValueError, match=named):
        pack(sequences, max_tokens=9, num_ranks=1)


def test_sequence_at_the_budget_fits():
    assert num_tokens(pack([sequence(0, 8)], max_tokens=8, num_ranks=1)[0][0]) == 7


@given(
    drawn=st.lists(st.tuples(st.integers(1, 12), st.booleans()), max_size=12),
    num_ranks=st.integers(1, 4),
    max_tokens=st.integers(12, 40),
)
@examples(50)
def test_every_trained_token_keeps_its_values_and_its_sampling_mask_through_packing(
    drawn: list[tuple[int, bool]], num_ranks: int, max_tokens: int
):
    plain = [scored(i, length) for i, (length, _) in enumerate(drawn)]
    sequences = [keeping(s) if has_kept else s for s, (_, has_kept) in zip(plain, drawn, strict=True)]
    parts = pack(sequences, max_tokens=max_tokens, num_ranks=num_ranks)
    values = by_sequence(parts, [np.concatenate([batch.behavior_logprobs for batch in part]) for part in parts])
    assert values.keys() == set(range(len(drawn)))
    found: dict[int, list[int]] = {}
    for batch in (b for part in parts for b in part if len(b.targets)):
        np.testing.assert_array_equal(batch.reference_logprobs, batch.behavior_logprobs - 1)
        np.testing.assert_array_equal(batch.proximal_logprobs, batch.behavior_logprobs - 2)
        if not len(batch.mask_sizes):
            continue
        assert batch.mask_sizes.shape == batch.targets.shape
        *sets, rest = np.split(batch.mask_words, np.cumsum(batch.mask_sizes))
        assert not len(rest)
        for index, words in zip(batch.sequence_index.tolist(), sets, strict=True):
            found.setdefault(int(batch.sequence_ids[index]), []).extend(words.tolist())
    for s in sequences:
        np.testing.assert_array_equal(values[s.sequence_id], s.behavior_logprobs[s.loss_mask])
        assert found.get(s.sequence_id, []) == ([] if s.sampling_mask is None else s.sampling_mask.words.tolist())


def test_prompt_of_a_group_lies_in_the_row_once():
    # Prompt 5, 6; answers 7, 8, 9 and 4, 3. The second computes only its 4: the first answer token comes from the
    # shared 6 (place 1), the next from 4 (place 4).
    [[batch]] = pack([sharing(0, [5, 6], [7, 8, 9]), sharing(1, [5, 6], [4, 3])], max_tokens=8, num_ranks=1)
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 4]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 2]
    assert batch.token_index.tolist() == [0, 1, 2, 3, 0, 1, 4]
    assert batch.cu_seqlens.tolist() == [0, 4, 7]
    assert batch.predict_index.tolist() == [1, 2, 3, 1, 4]
    assert batch.targets.tolist() == [7, 8, 9, 4, 3]


def test_turns_that_begin_with_each_other_share_what_they_have_in_common():
    # The second turn saw 5, 6, then the answer 7 without its thoughts, 8, and an observation 9. The first turn's 5, 6
    # and 7 lie there already, so only its 1 is added: 1 is trained, and predicted from the shared 7.
    first, second = sharing(0, [5, 6], [7, 1, 2]), sharing(1, [5, 6, 7, 8, 9], [3, 4])
    [[batch]] = pack([first, second], max_tokens=12, num_ranks=1)
    assert batch.sequence_ids.tolist() == [1, 0]
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 9, 3, 1]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 3]
    assert batch.token_index.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 6]
    assert batch.targets.tolist() == [3, 4, 7, 1, 2]
    assert batch.predict_index.tolist() == [4, 5, 1, 2, 6]


def test_trained_tokens_between_untrained_ones_keep_their_places():
    # Trained at 2 and 5 of 7 tokens: predicted from 1 and 4, and the last two tokens are not computed.
    mask = np.array([False, False, True, False, False, True, False])
    [[batch]] = pack([replace(sequence(3, 7), loss_mask=mask)], max_tokens=7, num_ranks=1)
    assert batch.token_ids.tolist() == [300, 301, 302, 303, 304]
    assert (batch.predict_index.tolist(), batch.targets.tolist()) == ([1, 4], [302, 305])
    assert batch.behavior_logprobs.tolist() == [-2 / 8, -5 / 8]


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_a_rank_with_nothing_gets_a_dummy_of_one_token_without_predictions(packing: Packing):
    for sequences, ids in (([sequence(0, 5)], [[[0]], [[-1]], [[-1]]]), ([], [[[-1]]] * 3)):
        ranks = pack(sequences, max_tokens=8, num_ranks=3, packing=packing)
        assert [[b.sequence_ids.tolist() for b in rank] for rank in ranks] == ids
    dummy = dummy_micro_batch()
    assert (dummy.token_ids.tolist(), dummy.cu_seqlens.tolist(), len(dummy.targets)) == ([0], [0, 1], 0)


Drawn = list[tuple[list[int], int]]
DRAWN = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=20), st.integers(1, 40)), max_size=60
)  # fmt: skip
"""Prompts, and the lengths of answers."""


def packed_once(drawn: Drawn, max_tokens: int, num_ranks: int, packing: Packing) -> list[list[MicroBatch]]:
    """What ``pack`` makes of ``drawn``: each sequence is in one micro-batch, with its tokens, longest first."""
    sequences = [sharing(i, prompt, list(range(answer))) for i, (prompt, answer) in enumerate(drawn)]
    ranks = pack(sequences, max_tokens=max_tokens, num_ranks=num_ranks, packing=packing)
    assert len(ranks) == num_ranks
    assert len({len(rank) for rank in ranks}) == 1
    real = [b for rank in ranks for b in rank if b.sequence_ids[0] != -1]
    assert sorted(i for b in real for i in b.sequence_ids.tolist()) == list(range(len(drawn)))
    for b in real:
        lengths = np.diff(b.cu_seqlens).tolist()
        assert lengths == sorted(lengths, reverse=True)
        for i in b.sequence_ids.tolist():
            prompt, answer = drawn[i]
            assert row_of(b, i) == prompt + list(range(answer - 1))
    return ranks


@given(DRAWN, st.integers(64, 200), st.integers(1, 5))
def test_pack_keeps_every_sequence_once_within_budget_and_balanced(drawn: Drawn, max_tokens: int, num_ranks: int):
    ranks = packed_once(drawn, max_tokens, num_ranks, "packed")
    sizes = [num_tokens(b) if b.sequence_ids[0] != -1 else 0 for rank in ranks for b in rank]
    assert max(sizes) <= max_tokens
    # Parts are at most the longest sequence or a quarter of an even load; parts of one group that meet again in a
    # micro-batch make it smaller by a prompt each, at most.
    longest = max((len(prompt) + answer for prompt, answer in drawn), default=0)
    slack = max(longest, sum(sizes) / len(sizes) / 4) + sum(len(prompt) for prompt, _ in drawn)
    assert max(sizes) - min(sizes) <= slack


def padded_tokens(batch: MicroBatch) -> int:
    """The tokens of the batch with each sequence as a padded row. A dummy has none."""
    lengths = np.diff(batch.cu_seqlens)
    return 0 if batch.sequence_ids[0] == -1 else len(lengths) * int(lengths.max())


@given(DRAWN, st.integers(64, 200), st.integers(1, 5))
def test_padded_micro_batches_stay_within_the_limit_and_are_few(drawn: Drawn, max_tokens: int, num_ranks: int):
    ranks = packed_once(drawn, max_tokens, num_ranks, "padded")
    largest = max(padded_tokens(b) for rank in ranks for b in rank)
    assert largest <= max_tokens
    lengths = sorted((len(prompt) + answer - 1 for prompt, answer in drawn), reverse=True)
    assert len(ranks[0]) == max(1, -(-fewest_cuts(lengths, max_tokens) // num_ranks))
    if drawn:
        assert fewest_cuts(lengths, largest - 1) > len(ranks[0]) * num_ranks


def fewest_cuts(lengths: list[int], limit: int) -> int:
    """The fewest parts into which the falling ``lengths`` can be cut so that each, padded, is within ``limit``."""
    fewest: list[int] = [0]
    for end in range(1, len(lengths) + 1):
        fits = [fewest[start] + 1 for start in range(end) if (end - start) * lengths[start] <= limit]
        fewest.append(min(fits, default=len(lengths) * 10))
    return fewest[-1]


def test_cost_of_padded_rows_is_padding_and_prompts_computed_again():
    # Computed: 2 + 2 and 2 + 1 tokens, so 2 x 4 = 8 with padding, of which 1 is padding; the prompt's 2 occur twice.
    group = [sharing(0, [5, 6], [7, 8, 9]), sharing(1, [5, 6], [4, 3])]
    for num_ranks, cost in ((1, PaddedCost(padding=1 / 8, repeated=2 / 8)), (2, PaddedCost(0.0, 0.0))):
        assert padded_cost(pack(group, max_tokens=8, num_ranks=num_ranks, packing="padded")) == cost
    assert padded_cost([[dummy_micro_batch()]]) == PaddedCost(0.0, 0.0)


def test_micro_batches_survive_the_wire():
    [[batch]] = pack([keeping(sequence(0, 4)), sequence(1, 3)], max_tokens=9, num_ranks=1)
    for whole in (batch, dummy_micro_batch()):
        back = from_arrays(wire.decode(wire.encode("micro_batch", {}, to_arrays(whole))).arrays)
        for sent, received in zip(to_arrays(whole), to_arrays(back), strict=True):
            assert sent.dtype == received.dtype
            assert sent.tolist() == received.tolist()
            assert received.flags.writeable


def test_tokens_after_a_weight_update_are_those_of_newer_weights_than_their_answer_began_with():
    # Prompt, three tokens by version 1, two by 2; an environment's token; an answer begun by version 2, ended by 3.
    versions = np.array([-1, 1, 1, 1, 2, 2, -1, 2, 3, 3], np.int32)
    # What version 1 sampled is too old to be trained on, and counts all the same.
    whole = replace(sequence(0, len(versions)), loss_mask=versions >= 2, versions=versions)
    assert np.flatnonzero(after_update([versions])[0]).tolist() == [4, 5, 8, 9]
    (micro_batch,) = pack([whole], max_tokens=64, num_ranks=1)[0]
    assert micro_batch.after_update.tolist() == [True, True, False, True, True]
    assert not dummy_micro_batch().after_update.any()
