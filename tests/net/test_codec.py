"""Leases and groups survive the wire; groups that don't fit together are refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs, to_builtins
from msgspec.structs import replace

from async_rl.errors import WireError
from async_rl.net.codec import decode_group, encode_group, read_as
from async_rl.net.wire import decode, encode
from async_rl.queue.messages import LeasesGranted
from async_rl.records import AgentSession, Group, Lease, Prompt, Rollout, Sampling, TeacherScores, TokenSequence, Turn
from async_rl.sampling_mask import SamplingMask, pack_ids


def sequence(length: int, version: int = 0) -> TokenSequence:
    return TokenSequence(
        token_ids=np.arange(length, dtype=np.int32),
        loss_mask=np.arange(length) >= 1,
        behavior_logprobs=np.linspace(-1, 0, length, dtype=np.float32),
        versions=np.full(length, version, np.int32),
    )


def group(lengths: list[list[int]]) -> Group:
    rollouts = tuple(
        Rollout(tuple(sequence(n) for n in each), {"correct": 1.0, "overlong": -0.5}, 1.0, "stop", "42")
        for each in lengths
    )
    return Group("lease", "train", 7, "generator", "lineage", 0.9, rollouts, {0: "abc"}, 1.5)


PROMPT = Prompt(5, 3, 1, ({"role": "user", "content": "1+1"},), {"gt_answer": "2"})
LEASE = Lease("id", "eval", PROMPT, 8, Sampling(0.6, 1.0, 0, 10, 20, ("</answer>",)), "l", 2, 4, 1, 2**62)


def test_leases_survive_the_wire_as_they_are():
    greedy = replace(LEASE, lease_id="other", sampling=Sampling(1.0, 1.0, 0, 10, 20, ()))
    message = decode(encode("leases", {"granted": LeasesGranted((LEASE, greedy), "why", 3)}))
    assert read_as(message.fields["granted"], LeasesGranted) == LeasesGranted((LEASE, greedy), "why", 3)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"kind": "test"}, r"Invalid enum value 'test' - at `\$.kind`"),
        ({"group_size": True}, r"Expected `int`, got `bool` - at `\$.group_size`"),
        ({"seed": 1.5}, r"Expected `int`, got `float` - at `\$.seed`"),
        (
            {"prompt": {**to_builtins(PROMPT), "messages": [{"role": 1}]}},
            r"Expected `str`, got `int` - at `\$.prompt.messages\[0\]",
        ),
        ({"sampling": None}, r"Expected `object`, got `null` - at `\$.sampling`"),
    ],
)
def test_a_lease_that_is_not_one_is_refused_with_the_place(change: dict[str, object], fault: str):
    plain = to_builtins(LEASE)
    assert read_as(plain, Lease) == LEASE
    assert read_as({**plain, "from_a_newer_peer": 1}, Lease) == LEASE
    with pytest.raises(WireError, match=f"^malformed Lease: {fault}"):
        read_as({**plain, **change}, Lease)
    del plain["attempt"]
    with pytest.raises(WireError, match="missing required field `attempt`"):
        read_as(plain, Lease)


@given(st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=4))
def test_a_group_survives_the_wire(lengths: list[list[int]]):
    sent = replace(group(lengths), example="so it is 42")
    first = [replace(one, metrics={"turns": 2.0}) for one in sent.rollouts[:1]]
    sent = replace(sent, rollouts=(*first, *sent.rollouts[1:]))
    received = decode_group(encode_group(sent))
    assert (received.example, decode_group(encode_group(group(lengths))).example) == ("so it is 42", "")
    assert (received.position, received.temperature, received.weights_digest) == (7, 0.9, {0: "abc"})
    assert received.num_sampled == sent.num_sampled
    for before, after in zip(sent.rollouts, received.rollouts, strict=True):
        assert (after.reward, after.accuracy, after.extracted) == (0.5, 1.0, "42")
        assert after.metrics == before.metrics
        for a, b in zip(before.sequences, after.sequences, strict=True):
            for name in TokenSequence.__struct_fields__:
                np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


SESSION = AgentSession({"first": 1, "lost": 2}, {"add": 3}, 0.5, 2.0)


def test_what_agents_did_survives_the_wire():
    plain = group([[3], [2], [4]])
    first, second, third = plain.rollouts
    sent = replace(plain, rollouts=(replace(first, session=SESSION), second, replace(third, session=SESSION)))
    assert [one.session for one in decode_group(encode_group(sent)).rollouts] == [SESSION, None, SESSION]
    assert "sessions" not in decode(encode_group(plain)).fields


@pytest.mark.parametrize(
    "sessions",
    [
        [],
        [None, None],
        [{**to_builtins(SESSION), "agent_s": float("nan")}],
        [{**to_builtins(SESSION), "sampling_s": -1.0}],
        [{**to_builtins(SESSION), "tools": {"x" * 65: 1}}],
        [{**to_builtins(SESSION), "tools": {str(number): 1 for number in range(65)}}],
        [{**to_builtins(SESSION), "calls": {"first": -1}}],
    ],
)
def test_a_report_on_agents_that_is_none_is_refused(sessions: list[object]):
    message = decode(encode_group(group([[3]])))
    with pytest.raises(WireError):
        decode_group(encode("group", {**message.fields, "sessions": sessions}, message.arrays))


@pytest.mark.parametrize("lengths", [[4], [6], [5, 1]])
def test_sequence_lengths_that_do_not_add_up_are_refused(lengths: list):
    message = decode(encode_group(group([[5]])))
    with pytest.raises(WireError, match="'lengths' of a 'group' message: expected counts that add up to 5"):
        decode_group(encode("group", {**message.fields, "lengths": lengths}, message.arrays))


@pytest.mark.parametrize("counts", [[2], [1, 1], []])
def test_numbers_of_sequences_that_do_not_add_up_are_refused(counts: list):
    message = decode(encode_group(group([[5]])))
    with pytest.raises(WireError, match="'num_sequences' of a 'group' message: expected counts that add up to 1"):
        decode_group(encode("group", {**message.fields, "num_sequences": counts}, message.arrays))


def test_a_reward_part_that_only_some_rollouts_have_stays_with_them():
    sent = group([[2], [3]])
    parts: list[dict[str, float]] = [{"correct": 1.0}, {"correct": 0.0, "overlong": -0.5}]
    rollouts = tuple(structs.replace(r, reward_parts=p) for r, p in zip(sent.rollouts, parts, strict=True))
    received = decode_group(encode_group(structs.replace(sent, rollouts=rollouts)))
    assert [r.reward_parts for r in received.rollouts] == parts


def test_arrays_of_another_dtype_are_refused():
    message = decode(encode_group(group([[5]])))
    arrays = [message.arrays[0].astype(np.int64), *message.arrays[1:]]
    with pytest.raises(WireError, match=r"expected four arrays of shape \[\d+\]"):
        decode_group(encode("group", message.fields, arrays))


@pytest.mark.parametrize(
    ("key", "value"),
    [("kind", "other"), ("position", "7"), ("position", True), ("weights_digest", {"0": 1}), ("lengths", "x")],
)
def test_a_field_of_the_wrong_kind_is_refused(key: str, value: object):
    message = decode(encode_group(group([[5]])))
    with pytest.raises(WireError, match=rf"malformed 'group' message: .*\.{key}"):
        decode_group(encode("group", {**message.fields, key: value}, message.arrays))


def test_a_mask_of_other_bytes_than_0_and_1_is_refused():
    # Its sum would be 1 + 1 + 1 + 7: tokens that were never sampled.
    message = decode(encode_group(group([[5]])))
    mask = np.array([0, 1, 1, 1, 7], np.uint8).view(np.bool_)
    with pytest.raises(WireError, match="bytes 0 and 1"):
        decode_group(encode("group", message.fields, [message.arrays[0], mask, *message.arrays[2:]]))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("lengths", 5, r"Expected `array`, got `int` - at `\$\[2\]\.lengths`"),
        ("lengths", [-5], r"Expected `int` >= 0 - at `\$\[2\]\.lengths\[0\]`"),
        ("lengths", [True], "Expected `int`, got `bool`"),
        ("num_sequences", ["1"], "Expected `int`, got `str`"),
        ("num_sequences", [2, -1], "Expected `int` >= 0"),
        ("reward_parts", {"correct": ["1"]}, r"Expected `float \| null`, got `str`"),
        ("reward_parts", {"correct": 1.0}, "Expected `array`, got `float`"),
        ("reward_parts", {"correct": [1.0, 1.0]}, "'reward_parts.correct' of a 'group' message: expected 1 values"),
        ("reward_parts", {7: [1.0]}, "Expected `str`, got `int`"),
        ("accuracy", ["1"], "Expected `float`, got `str`"),
        ("accuracy", [True], "Expected `float`, got `bool`"),
        ("accuracy", [1.0, 1.0], "'accuracy' of a 'group' message: expected 1 values"),
        ("finish_reason", ["bored"], "Invalid enum value 'bored'"),
        ("finish_reason", [["stop"]], "Expected `str`, got `array`"),
        ("extracted", [42], r"Expected `str \| null`, got `int`"),
    ],
)
def test_a_column_with_a_value_of_the_wrong_kind_is_refused(key: str, value: object, message: str):
    sent = decode(encode_group(group([[5]])))
    with pytest.raises(WireError, match=message):
        decode_group(encode("group", {**sent.fields, key: value}, sent.arrays))


def test_whole_numbers_come_back_as_floats():
    sent = decode(encode_group(group([[5]])))
    whole = {"reward_parts": {"correct": [1]}, "accuracy": [1], "temperature": 1}
    received = decode_group(encode("group", {**sent.fields, **whole}, sent.arrays))
    numbers = (received.temperature, received.rollouts[0].accuracy, received.rollouts[0].reward_parts["correct"])
    assert [type(number) for number in numbers] == [float, float, float]


def with_kept(sent: Group) -> Group:
    """Its sampled tokens were chosen from {0}, {0, 1}, {0, 1, 2} and so on, of a vocabulary of 100."""

    def kept(sequence: TokenSequence) -> SamplingMask:
        counts = 1 + np.arange(np.count_nonzero(sequence.loss_mask))
        return pack_ids(counts, np.concatenate([[], *map(np.arange, counts)]).astype(np.int32), vocab_size=100)

    rollouts = tuple(
        structs.replace(r, sequences=tuple(structs.replace(s, sampling_mask=kept(s)) for s in r.sequences))
        for r in sent.rollouts
    )
    return structs.replace(sent, rollouts=rollouts)


@given(st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=4))
def test_sampling_masks_survive_the_wire_with_their_sequences(lengths: list[list[int]]):
    sent = with_kept(group(lengths))
    received = decode_group(encode_group(sent))
    for before, after in zip(sent.rollouts, received.rollouts, strict=True):
        for a, b in zip(before.sequences, after.sequences, strict=True):
            assert a.sampling_mask is not None
            assert b.sampling_mask is not None
            assert b.sampling_mask.sizes.tolist() == a.sampling_mask.sizes.tolist()
            assert b.sampling_mask.words.tolist() == a.sampling_mask.words.tolist()


def test_a_group_that_leaves_nothing_out_has_four_columns_as_ever():
    assert len(decode(encode_group(group([[5]]))).arrays) == 4
    assert decode_group(encode_group(group([[5]]))).rollouts[0].sequences[0].sampling_mask is None


def test_sampling_masks_cost_four_bytes_a_token_and_an_id():
    # Five tokens, four sampled, with 1, 2, 3 and, in 4 words of bits, 4 tokens kept: 4 + 10 words in all.
    arrays = decode(encode_group(with_kept(group([[5]])))).arrays
    assert [array.nbytes for array in arrays[4:]] == [16, 40]


def test_sampling_masks_of_some_sequences_only_are_refused():
    sent = group([[5, 5]])
    some = (with_kept(sent).rollouts[0].sequences[0], sent.rollouts[0].sequences[1])
    with pytest.raises(ValueError, match="for all 2 sequences of a group or for none, got 1"):
        encode_group(structs.replace(sent, rollouts=(structs.replace(sent.rollouts[0], sequences=some),)))


@pytest.mark.parametrize(
    ("column", "array", "message"),
    [
        (4, np.array([1, 2, 3], np.int32), "expected sizes of 4 sampling masks"),
        (4, np.array([1, 2, 3, 4], np.int64), "expected sampling masks of dtype int32 in a 'group' message, got int64"),
        (5, np.zeros(9, np.int32), "expected 10 words of sampling masks"),
        (5, np.full(10, -1, np.int32), "token ids of 0 and above"),
        (5, np.zeros((5, 2), np.int32), "expected 10 words"),
    ],
)
def test_sampling_masks_that_do_not_fit_their_tokens_are_refused(column: int, array: np.ndarray, message: str):
    sent = decode(encode_group(with_kept(group([[5]]))))
    arrays = list(sent.arrays)
    arrays[column] = array
    with pytest.raises(WireError, match=message):
        decode_group(encode("group", sent.fields, arrays))


def test_half_of_the_sampling_masks_columns_are_refused():
    sent = decode(encode_group(with_kept(group([[5]]))))
    with pytest.raises(WireError, match="4 or 6 arrays besides its routes and its teacher's scores, got 5"):
        decode_group(encode("group", sent.fields, sent.arrays[:5]))


def test_sampling_masks_for_another_number_of_tokens_make_no_sequence():
    with pytest.raises(ValueError, match="expected a sampling mask for 4 sampled tokens, got one for 3"):
        structs.replace(sequence(5), sampling_mask=with_kept(group([[4]])).rollouts[0].sequences[0].sampling_mask)


def with_routes(sent: Group, dtype: type[np.generic] = np.uint8) -> Group:
    """All tokens but the last of each sequence have routes through 3 layers, 2 experts in each."""

    def routed(sequence: TokenSequence) -> TokenSequence:
        shape = (max(0, len(sequence.token_ids) - 1), 3, 2)
        return structs.replace(sequence, routes=(np.arange(np.prod(shape)) % 251).astype(dtype).reshape(shape))

    return structs.replace(
        sent,
        rollouts=tuple(structs.replace(r, sequences=tuple(map(routed, r.sequences))) for r in sent.rollouts),
    )


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@given(lengths=st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=4))
def test_routes_survive_the_wire_with_their_sequences(dtype: type[np.generic], lengths: list[list[int]]):
    for sent in (with_routes(group(lengths), dtype), with_routes(with_kept(group(lengths)), dtype)):
        received = decode_group(encode_group(sent))
        for before, after in zip(sent.rollouts, received.rollouts, strict=True):
            for a, b in zip(before.sequences, after.sequences, strict=True):
                assert a.routes is not None
                assert b.routes is not None
                assert (b.routes.dtype, b.routes.tolist()) == (a.routes.dtype, a.routes.tolist())


def test_routes_cost_a_byte_for_each_expert():
    # Four of five tokens, 3 layers, 2 experts.
    assert decode(encode_group(with_routes(group([[5]])))).arrays[4].nbytes == 24


def test_routes_of_some_sequences_only_are_refused():
    sent = group([[5, 5]])
    some = (with_routes(sent).rollouts[0].sequences[0], sent.rollouts[0].sequences[1])
    with pytest.raises(ValueError, match="expected routes for all 2 sequences of a group or for none, got 1"):
        encode_group(structs.replace(sent, rollouts=(structs.replace(sent.rollouts[0], sequences=some),)))


@pytest.mark.parametrize(
    ("shape", "array", "message"),
    [
        ({}, np.zeros(24, np.int32), r"dtype uint8 or uint16 and shape \[24\] in a 'group' message, got int32 \[24\]"),
        ({}, np.zeros(23, np.uint8), r"shape \[24\] in a 'group' message, got uint8 \[23\]"),
        ({}, np.zeros((4, 6), np.uint8), r"got uint8 \[4, 6\]"),
        ({"counts": [6]}, np.zeros(36, np.uint8), "routes of no more tokens than a sequence has"),
        ({"counts": [4, 0]}, np.zeros(24, np.uint8), "'routes.counts' of a 'group' message: expected 1 values"),
        ({"counts": [-1]}, np.zeros(24, np.uint8), "Expected `int` >= 0"),
        ({"counts": [0], "num_layers": 1 << 62}, np.zeros(0, np.uint8), "Expected `int` <= 65536"),
        ({"counts": [0], "top_k": 0}, np.zeros(0, np.uint8), "Expected `int` >= 1"),
    ],
)
def test_routes_that_do_not_fit_are_refused(shape: dict[str, object], array: np.ndarray, message: str):
    sent = decode(encode_group(with_routes(group([[5]]))))
    fields = {**sent.fields, "routes": {**sent.fields["routes"], **shape}}
    with pytest.raises(WireError, match=message):
        decode_group(encode("group", fields, [*sent.arrays[:4], array]))


def test_routes_that_are_announced_or_sent_alone_are_refused():
    sent = decode(encode_group(with_routes(group([[5]]))))
    with pytest.raises(WireError, match="4 or 6 arrays besides its routes and its teacher's scores, got 3"):
        decode_group(encode("group", sent.fields, sent.arrays[:4]))
    with pytest.raises(WireError, match="4 or 6 arrays besides its routes and its teacher's scores, got 5"):
        decode_group(encode("group", {**sent.fields, "routes": None}, sent.arrays))


def test_routes_of_more_tokens_than_there_are_make_no_sequence():
    with pytest.raises(ValueError, match=r"expected routes \[P, layers, top-k\] of at most its 5 tokens"):
        structs.replace(sequence(5), routes=np.zeros((6, 3, 2), np.uint8))


def test_turns_survive_the_wire_with_their_rollouts():
    plain = group([[3], [4, 2], []])
    turns = ((Turn(1, 0.5, 0.0), Turn(1, -1.0, 1.0)), (), (Turn(4, 0.0, 0.25),))
    sent = structs.replace(
        plain, rollouts=tuple(structs.replace(r, turns=t) for r, t in zip(plain.rollouts, turns, strict=True))
    )
    assert tuple(r.turns for r in decode_group(encode_group(sent)).rollouts) == turns
    assert "turns" not in decode(encode_group(plain)).fields


ONE_TURN = {"counts": [1], "num_tokens": [1], "rewards": [1.0], "scores": [1.0]}


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        (3, r"Expected `object \| null`, got `int` - at `\$\[2\]\.turns`"),
        ({**ONE_TURN, "counts": [1, 0]}, "'turns.counts' of a 'group' message: expected 1 values"),
        ({**ONE_TURN, "counts": [2]}, "'turns.counts' of a 'group' message: expected counts that add up to 1"),
        ({**ONE_TURN, "counts": [-1]}, r"Expected `int` >= 0 - at `\$\[2\]\.turns\.counts\[0\]`"),
        ({**ONE_TURN, "num_tokens": [1.5]}, "Expected `int`, got `float`"),
        ({**ONE_TURN, "num_tokens": [-1]}, "Expected `int` >= 0"),
        ({**ONE_TURN, "rewards": [1.0, 2.0]}, "'turns.rewards' of a 'group' message: expected 1 values"),
        ({**ONE_TURN, "scores": []}, "'turns.scores' of a 'group' message: expected 1 values"),
        ({**ONE_TURN, "scores": ["x"]}, "Expected `float`, got `str`"),
        ({"counts": [1], "num_tokens": [1], "rewards": [1.0]}, "missing required field `scores`"),
    ],
)
def test_turns_that_do_not_fit_their_rollouts_are_refused(turns: object, message: str):
    sent = decode(encode_group(group([[3]])))
    with pytest.raises(WireError, match=message):
        decode_group(encode("group", {**sent.fields, "turns": turns}, sent.arrays))


def taught(length: int, top_k: int) -> TokenSequence:
    n = max(0, length - 1)
    scores = TeacherScores(
        np.linspace(-3, 0, n * (1 + top_k), dtype=np.float32).reshape(n, 1 + top_k),
        np.arange(n * top_k, dtype=np.int32).reshape(n, top_k),
    )
    return replace(sequence(length), teacher=scores)


@pytest.mark.parametrize("top_k", [0, 3])
@given(st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=3))
def test_a_teachers_scores_survive_the_wire_with_their_sequences(top_k: int, lengths: list[list[int]]):
    whole = group(lengths)
    rollouts = tuple(
        replace(r, sequences=tuple(taught(len(s.token_ids), top_k) for s in r.sequences)) for r in whole.rollouts
    )
    decoded = decode_group(encode_group(replace(whole, rollouts=rollouts)))
    for sent, got in zip(rollouts, decoded.rollouts, strict=True):
        for a, b in zip(sent.sequences, got.sequences, strict=True):
            assert a.teacher is not None
            assert b.teacher is not None
            np.testing.assert_array_equal(a.teacher.logprobs, b.teacher.logprobs)
            np.testing.assert_array_equal(a.teacher.top_ids, b.teacher.top_ids)


def test_a_group_without_a_teacher_is_written_as_ever():
    # So journals of older versions stay readable, and these can read ours.
    message = decode(encode_group(group([[3]])))
    assert "teacher_top_k" not in message.fields
    assert len(message.arrays) == 4


@pytest.mark.parametrize(
    ("top_k", "logprobs"), [(0, np.zeros(1, np.float32)), (1, np.zeros(2, np.float32)), (0, np.zeros(2, np.float64))]
)
def test_a_teachers_scores_that_do_not_fit_their_tokens_are_refused(top_k: int, logprobs: np.ndarray):
    message = decode(encode_group(group([[3]])))  # two sampled tokens
    arrays = (*message.arrays, logprobs, np.zeros(2 * top_k, np.int32))
    with pytest.raises(WireError, match="a teacher's scores of 2 tokens"):
        decode_group(encode("group", {**message.fields, "teacher_top_k": top_k}, arrays))


def test_a_teachers_scores_of_some_sequences_only_are_refused():
    rollout = replace(group([[3, 3]]).rollouts[0], sequences=(sequence(3), taught(3, 0)))
    with pytest.raises(ValueError, match="a teacher's scores for all 2 sequences"):
        encode_group(replace(group([]), rollouts=(rollout,)))
