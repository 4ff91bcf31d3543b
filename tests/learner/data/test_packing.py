"""Packing: every sequence once, budgets kept, ranks even and balanced, and the arrays of one micro-batch by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.errors import WireError
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
from async_rl.learner.sequences import TrainSequence
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


def scored(sequence_id: int, length: int) -> TrainSequence:
    """Its reference logprobs are those of behavior less 1, its proximal ones less 2."""
    plain = sequence(sequence_id, length)
    behavior = plain.behavior_logprobs
    return replace(plain, reference_logprobs=behavior - 1, proximal_logprobs=behavior - 2)


def test_reference_and_proximal_logprobs_go_with_their_tokens_or_are_absent():
    [[batch]] = pack([scored(7, 2), scored(3, 4)], max_tokens=6, num_ranks=1)
    # Longest first: trained at 1, 2, 3 of the one and at 1 of the other.
    assert batch.behavior_logprobs.tolist() == [-0.125, -0.25, -0.375, -0.125]
    assert batch.reference_logprobs.tolist() == [-1.125, -1.25, -1.375, -1.125]
    assert batch.proximal_logprobs.tolist() == [-2.125, -2.25, -2.375, -2.125]
    [[plain]] = pack([sequence(7, 2)], max_tokens=6, num_ranks=1)
    assert plain.reference_logprobs.shape == plain.proximal_logprobs.shape == (0,)
    assert plain.reference_logprobs.dtype == plain.proximal_logprobs.dtype == np.float32


@pytest.mark.parametrize("name", ["reference_logprobs", "proximal_logprobs"])
def test_optional_logprobs_of_some_sequences_or_of_another_length_are_refused(name: str):
    with pytest.raises(ValueError, match=f"expected {name} of all 2 sequences or of none, got 1"):
        pack([scored(0, 3), replace(scored(1, 3), **{name: np.zeros(0, np.float32)})], max_tokens=9, num_ranks=1)
    with pytest.raises(ValueError, match=f"sequence 1: expected {name} of 3 tokens, got 2"):
        pack([scored(0, 3), replace(scored(1, 3), **{name: np.zeros(2, np.float32)})], max_tokens=9, num_ranks=1)


@given(lengths=st.lists(st.integers(1, 12), max_size=12), num_ranks=st.integers(1, 4), max_tokens=st.integers(12, 40))
@examples(50)
def test_by_sequence_undoes_pack(lengths: list[int], num_ranks: int, max_tokens: int):
    sequences = [sequence(i, length) for i, length in enumerate(lengths)]
    parts = pack(sequences, max_tokens=max_tokens, num_ranks=num_ranks)
    values = [np.concatenate([mb.behavior_logprobs for mb in part]) for part in parts]
    found = by_sequence(parts, values)
    assert found.keys() == set(range(len(lengths)))
    for s in sequences:
        np.testing.assert_array_equal(found[s.sequence_id], s.behavior_logprobs[s.loss_mask])


def keeping(plain: TrainSequence) -> TrainSequence:
    """The i-th token was chosen from itself and the i below it."""
    tokens = plain.token_ids[plain.loss_mask]
    ids = [np.arange(max(0, token - i), token + 1) for i, token in enumerate(tokens.tolist())]
    counts, flat = np.array([len(each) for each in ids], np.int64), np.concatenate([np.zeros(0, np.int32), *ids])
    return replace(plain, sampling_mask=pack_ids(counts, flat, vocab_size=2000))


def test_sampling_masks_go_with_their_tokens_or_are_absent():
    # Longest first: 301, 302, 303 were chosen from one, two and three tokens; 701 from anything, as nothing was told.
    [[batch]] = pack([sequence(7, 2), keeping(sequence(3, 4))], max_tokens=6, num_ranks=1)
    assert batch.targets.tolist() == [301, 302, 303, 701]
    assert batch.mask_sizes.tolist() == [1, 2, 3, 0]
    assert batch.mask_words.tolist() == [301, 301, 302, 301, 302, 303]
    [[plain]] = pack([sequence(7, 2)], max_tokens=6, num_ranks=1)
    assert plain.mask_sizes.shape == plain.mask_words.shape == (0,)
    assert plain.mask_sizes.dtype == plain.mask_words.dtype == np.int32


def test_sampling_masks_for_another_number_of_trained_tokens_are_refused():
    with pytest.raises(ValueError, match="sequence 0: expected sampling masks for 3 trained tokens, got 2"):
        pack([replace(sequence(0, 4), sampling_mask=keeping(sequence(0, 3)).sampling_mask)], max_tokens=9, num_ranks=1)


@given(
    drawn=st.lists(st.tuples(st.integers(2, 12), st.booleans()), max_size=12),
    num_ranks=st.integers(1, 4),
    max_tokens=st.integers(12, 40),
)
@examples(50)
def test_every_trained_token_keeps_its_own_set_through_packing(
    drawn: list[tuple[int, bool]], num_ranks: int, max_tokens: int
):
    plain = [sequence(i, length) for i, (length, _) in enumerate(drawn)]
    sequences = [keeping(s) if has_kept else s for s, (_, has_kept) in zip(plain, drawn, strict=True)]
    found: dict[int, list[int]] = {}
    for batch in (b for part in pack(sequences, max_tokens=max_tokens, num_ranks=num_ranks) for b in part):
        if not len(batch.mask_sizes):
            assert all(sequences[i].sampling_mask is None for i in batch.sequence_ids.tolist() if i >= 0)
            continue
        assert batch.mask_sizes.shape == batch.targets.shape
        *sets, rest = np.split(batch.mask_words, np.cumsum(batch.mask_sizes))
        assert not len(rest)
        for index, words in zip(batch.sequence_index.tolist(), sets, strict=True):
            found.setdefault(int(batch.sequence_ids[index]), []).extend(words.tolist())
    for s in sequences:
        assert found.get(s.sequence_id, []) == ([] if s.sampling_mask is None else s.sampling_mask.words.tolist())


def test_by_sequence_refuses_another_number_of_values():
    parts = pack([sequence(0, 4)], max_tokens=9, num_ranks=1)
    with pytest.raises(ValueError, match="expected 3 values, one per trained token, got 2"):
        by_sequence(parts, [np.zeros(2, np.float32)])


def sharing(sequence_id: int, prompt: list[int], answer: list[int]) -> TrainSequence:
    length = len(prompt) + len(answer)
    return TrainSequence(
        sequence_id=sequence_id,
        token_ids=np.array(prompt + answer, dtype=np.int32),
        loss_mask=np.arange(length) >= len(prompt),
        behavior_logprobs=np.zeros(length, dtype=np.float32),
        versions=np.zeros(length, dtype=np.int32),
        advantages=np.zeros(length, dtype=np.float32),
        temperature=1.0,
    )


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


def test_tokens_that_one_sequence_trains_and_another_does_not_are_shared():
    [[batch]] = pack([sharing(0, [5, 6], [7, 8]), sharing(1, [5], [6, 7])], max_tokens=8, num_ranks=1)
    assert batch.token_ids.tolist() == [5, 6, 7]
    assert batch.token_index.tolist() == [0, 1, 2, 0, 1]
    assert batch.targets.tolist() == [7, 8, 6, 7]
    assert batch.predict_index.tolist() == [1, 2, 0, 1]


def test_trained_tokens_between_untrained_ones_keep_their_places():
    # Trained at 2 and 5 of 7 tokens: predicted from 1 and 4, and the last two tokens are not computed.
    mask = np.array([False, False, True, False, False, True, False])
    [[batch]] = pack([replace(sequence(3, 7), loss_mask=mask)], max_tokens=7, num_ranks=1)
    assert batch.token_ids.tolist() == [300, 301, 302, 303, 304]
    assert batch.predict_index.tolist() == [1, 4]
    assert batch.targets.tolist() == [302, 305]
    assert batch.behavior_logprobs.tolist() == [-2 / 8, -5 / 8]


def test_group_is_cut_where_ranks_would_be_uneven():
    # Prompt 2 and four answers of 3 tokens (2 computed): 2 + 4 x 2 = 10 tokens if whole, an even load is 5. A quarter
    # of that holds no second answer, so each goes alone: 4 a sequence, two a rank, which share the prompt there again.
    ranks = pack([sharing(i, [5, 6], [i, i, i]) for i in range(4)], max_tokens=12, num_ranks=2)
    assert [[num_tokens(b) for b in rank] for rank in ranks] == [[6], [6]]


def test_longest_goes_first_to_the_emptiest_micro_batch():
    # Their last tokens are not computed: 18 tokens at 9 ask for two micro-batches: 5 and 4, then 4 + 3 and 5 + 3, but
    # 7 + 3 is above 9. With three: 5, 4 and 3, then 3 + 3, then 4 + 3.
    [batches] = pack([sequence(i, n) for i, n in enumerate([6, 5, 4, 4, 4])], max_tokens=9, num_ranks=1)
    assert sorted(b.sequence_ids.tolist() for b in batches) == [[0], [1, 4], [2, 3]]


def test_rank_with_nothing_gets_a_dummy():
    ranks = pack([sequence(0, 5)], max_tokens=8, num_ranks=3)
    assert [[b.sequence_ids.tolist() for b in rank] for rank in ranks] == [[[0]], [[-1]], [[-1]]]


def test_no_sequences_is_one_dummy_on_every_rank():
    ranks = pack([], max_tokens=8, num_ranks=2)
    assert [[b.sequence_ids.tolist() for b in rank] for rank in ranks] == [[[-1]], [[-1]]]


def test_dummy_is_one_token_without_predictions():
    dummy = dummy_micro_batch()
    assert dummy.token_ids.tolist() == [0]
    assert dummy.cu_seqlens.tolist() == [0, 1]
    assert len(dummy.targets) == 0


def test_sequence_at_the_budget_fits_and_one_token_more_is_refused():
    assert num_tokens(pack([sequence(0, 8)], max_tokens=8, num_ranks=1)[0][0]) == 7
    with pytest.raises(
        ValueError,
        match=r"sequence 4: expected at most learner\.max_tokens x parallel\.sequence = 8 tokens, got 9; raise this",
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
    for name in ("loss_mask", "advantages"):
        bad = replace(good, **{name: getattr(good, name)[:2]})
        with pytest.raises(ValueError, match=f"expected {name} of 3 tokens, got 2"):
            pack([bad], max_tokens=8, num_ranks=1)


answers = st.integers(1, 40)
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=20)


@given(st.lists(st.tuples(prompts, answers), max_size=60), st.integers(64, 200), st.integers(1, 5))
def test_pack_keeps_every_sequence_once_within_budget_and_balanced(
    drawn: list[tuple[list[int], int]], max_tokens: int, num_ranks: int
):
    sequences = [sharing(i, prompt, list(range(answer))) for i, (prompt, answer) in enumerate(drawn)]
    ranks = pack(sequences, max_tokens=max_tokens, num_ranks=num_ranks)
    batches = [b for rank in ranks for b in rank]
    real = [b for b in batches if b.sequence_ids[0] != -1]

    assert len(ranks) == num_ranks
    assert len({len(rank) for rank in ranks}) == 1
    assert sorted(i for b in real for i in b.sequence_ids.tolist()) == list(range(len(drawn)))
    assert all(num_tokens(b) <= max_tokens for b in batches)
    for b in real:
        lengths_in = np.diff(b.cu_seqlens).tolist()
        assert lengths_in == sorted(lengths_in, reverse=True)
        for i in b.sequence_ids.tolist():
            prompt, answer = drawn[i]
            assert row_of(b, i) == prompt + list(range(answer - 1))
    if drawn:
        sizes = [num_tokens(b) if b.sequence_ids[0] != -1 else 0 for b in batches]
        longest = max(len(prompt) + answer for prompt, answer in drawn)
        # Parts are at most the longest sequence or a quarter of an even load; parts of one group that meet again in a
        # micro-batch make it smaller by a prompt each, at most.
        slack = max(longest, sum(sizes) / len(sizes) / 4) + sum(len(prompt) for prompt, _ in drawn)
        assert max(sizes) - min(sizes) <= slack


@given(st.lists(st.integers(2, 64), min_size=1, max_size=60), st.integers(64, 200), st.integers(1, 5))
def test_sequences_that_share_nothing_differ_by_at_most_the_longest(
    lengths: list[int], max_tokens: int, num_ranks: int
):
    ranks = pack([sequence(i, n) for i, n in enumerate(lengths)], max_tokens=max_tokens, num_ranks=num_ranks)
    sizes = [[num_tokens(b) if b.sequence_ids[0] != -1 else 0 for b in rank] for rank in ranks]
    assert max(map(max, sizes)) - min(map(min, sizes)) <= max(lengths)
    assert max(map(sum, sizes)) - min(map(sum, sizes)) <= max(lengths)


def padded_tokens(batch: MicroBatch) -> int:
    """The tokens of the batch with each sequence as a padded row. A dummy has none."""
    lengths = np.diff(batch.cu_seqlens)
    return 0 if batch.sequence_ids[0] == -1 else len(lengths) * int(lengths.max())


def test_padded_micro_batches_hold_similar_lengths():
    # Computed: 9, 8, 3, 3 and 2 tokens. [9, 8] take 18 with one token of padding, [3, 3, 2] take 9 with one.
    lengths = [10, 4, 9, 4, 3]
    [batches] = pack([sequence(i, n) for i, n in enumerate(lengths)], max_tokens=18, num_ranks=1, packing="padded")
    assert [batch.sequence_ids.tolist() for batch in batches] == [[0, 2], [1, 3, 4]]
    assert [padded_tokens(batch) for batch in batches] == [18, 9]


def test_padded_micro_batches_are_as_even_as_the_cuts_allow():
    # Four times 5 computed tokens fit into 20, but two ranks share them.
    ranks = pack([sequence(i, 6) for i in range(4)], max_tokens=20, num_ranks=2, packing="padded")
    assert [[padded_tokens(batch) for batch in rank] for rank in ranks] == [[10], [10]]
    [[batch], [idle]] = pack([sequence(0, 6)], max_tokens=20, num_ranks=2, packing="padded")
    assert (batch.sequence_ids.tolist(), idle.sequence_ids.tolist()) == ([0], [-1])
    assert [len(rank) for rank in pack([], max_tokens=20, num_ranks=2, packing="padded")] == [1, 1]


def test_cost_of_padded_rows_is_padding_and_prompts_computed_again():
    # Computed: 2 + 2 and 2 + 1 tokens, so 2 x 4 = 8 with padding, of which 1 is padding; the prompt's 2 occur twice.
    parts = pack(
        [sharing(0, [5, 6], [7, 8, 9]), sharing(1, [5, 6], [4, 3])], max_tokens=8, num_ranks=2, packing="padded"
    )
    assert padded_cost(parts) == PaddedCost(0.0, 0.0)  # two ranks: one sequence each
    [part] = pack(
        [sharing(0, [5, 6], [7, 8, 9]), sharing(1, [5, 6], [4, 3])], max_tokens=8, num_ranks=1, packing="padded"
    )
    assert padded_cost([part]) == PaddedCost(padding=1 / 8, repeated=2 / 8)
    assert padded_cost([[dummy_micro_batch()]]) == PaddedCost(0.0, 0.0)


@given(st.lists(st.tuples(prompts, answers), max_size=60), st.integers(64, 200), st.integers(1, 5))
def test_padded_micro_batches_stay_within_the_limit_and_are_few(
    drawn: list[tuple[list[int], int]], max_tokens: int, num_ranks: int
):
    sequences = [sharing(i, prompt, list(range(answer))) for i, (prompt, answer) in enumerate(drawn)]
    ranks = pack(sequences, max_tokens=max_tokens, num_ranks=num_ranks, packing="padded")
    real = [b for rank in ranks for b in rank if b.sequence_ids[0] != -1]

    assert len(ranks) == num_ranks
    assert len({len(rank) for rank in ranks}) == 1
    assert sorted(i for b in real for i in b.sequence_ids.tolist()) == list(range(len(drawn)))
    for b in real:
        assert padded_tokens(b) <= max_tokens
        lengths_in = np.diff(b.cu_seqlens).tolist()
        assert lengths_in == sorted(lengths_in, reverse=True)
        for i in b.sequence_ids.tolist():
            prompt, answer = drawn[i]
            assert row_of(b, i) == prompt + list(range(answer - 1))
    lengths = sorted((len(prompt) + answer - 1 for prompt, answer in drawn), reverse=True)
    assert len(ranks[0]) == max(1, -(-fewest_cuts(lengths, max_tokens) // num_ranks))
    if drawn:
        largest = max(map(padded_tokens, real))
        assert fewest_cuts(lengths, largest - 1) > len(ranks[0]) * num_ranks


def fewest_cuts(lengths: list[int], limit: int) -> int:
    """The fewest parts into which the falling ``lengths`` can be cut so that each, padded, is within ``limit``."""
    fewest: list[int] = [0]
    for end in range(1, len(lengths) + 1):
        fits = [fewest[start] + 1 for start in range(end) if (end - start) * lengths[start] <= limit]
        fewest.append(min(fits, default=len(lengths) * 10))
    return fewest[-1]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=30), st.integers(1, 3), st.sampled_from(["packed", "padded"]))
def test_pack_is_deterministic(lengths: list[int], num_ranks: int, packing: Packing):
    sequences = [sequence(i, n) for i, n in enumerate(lengths)]
    first, second = (pack(sequences, max_tokens=64, num_ranks=num_ranks, packing=packing) for _ in range(2))
    for one, two in zip(first, second, strict=True):
        assert [b.sequence_ids.tolist() for b in one] == [b.sequence_ids.tolist() for b in two]


def test_many_equal_sequences_leave_no_rank_behind():
    # 16 of 101 tokens over 4 ranks at 400 a micro-batch: exactly 4 each (their last tokens aside), one round.
    ranks = pack([sequence(i, 101) for i in range(16)], max_tokens=400, num_ranks=4)
    assert [[num_tokens(b) for b in rank] for rank in ranks] == [[400]] * 4


def test_micro_batch_survives_the_wire():
    [[batch]] = pack([sequence(0, 4), sequence(1, 3)], max_tokens=9, num_ranks=1)
    frame = wire.encode("micro_batch", {}, to_arrays(batch))
    back = from_arrays(wire.decode(frame).arrays)
    for sent, received in zip(to_arrays(batch), to_arrays(back), strict=True):
        assert sent.dtype == received.dtype
        assert sent.tolist() == received.tolist()
        assert received.flags.writeable


def test_sampling_masks_survive_the_wire():
    [[batch]] = pack([keeping(sequence(0, 4))], max_tokens=9, num_ranks=1)
    back = from_arrays(wire.decode(wire.encode("micro_batch", {}, to_arrays(batch))).arrays)
    assert (back.mask_sizes.tolist(), back.mask_words.tolist()) == ([1, 2, 3], [1, 1, 2, 1, 2, 3])


def test_dummy_survives_the_wire():
    back = from_arrays(wire.decode(wire.encode("micro_batch", {}, to_arrays(dummy_micro_batch()))).arrays)
    assert back.sequence_ids.tolist() == [-1]


def test_micro_batch_with_an_array_missing_is_refused():
    with pytest.raises(WireError, match="expected the 25 arrays of a micro-batch, got 24"):
        from_arrays(to_arrays(dummy_micro_batch())[:-1])


def test_micro_batch_with_a_wrong_dtype_is_refused():
    arrays = to_arrays(dummy_micro_batch())
    arrays[0] = arrays[0].astype(np.int64)
    with pytest.raises(WireError, match=r"behavior_logprobs as float32 \[n\], got int64"):
        from_arrays(arrays)


def test_tokens_after_a_weight_update_are_those_of_newer_weights_than_their_answer_began_with():
    # Prompt, three tokens by version 1, two by 2; an environment's token; an answer begun by version 2, ended by 3.
    versions = np.array([-1, 1, 1, 1, 2, 2, -1, 2, 3, 3], np.int32)
    size = len(versions)
    sequence = TrainSequence(
        sequence_id=0,
        token_ids=np.arange(size, dtype=np.int32),
        loss_mask=versions >= 2,  # what version 1 sampled is too old to be trained on, and counts all the same
        behavior_logprobs=np.zeros(size, np.float32),
        versions=versions,
        advantages=np.zeros(size, np.float32),
        temperature=1.0,
    )
    assert np.flatnonzero(sequence.after_update).tolist() == [4, 5, 8, 9]
    (micro_batch,) = pack([sequence], max_tokens=64, num_ranks=1)[0]
    assert micro_batch.after_update.tolist() == [True, True, False, True, True]


def test_no_token_is_after_a_weight_update_where_nothing_was_sampled():
    assert not dummy_micro_batch().after_update.any()
