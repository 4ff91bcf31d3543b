"""Leases and groups survive the wire; groups that don't fit together are refused."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs, to_builtins
from msgspec.structs import replace

from async_rl.errors import WireError
from async_rl.net.codec import decode_group, encode_group, read_as
from async_rl.net.wire import Message, decode, encode
from async_rl.queue.messages import LeasesGranted
from async_rl.records import (
    TOKEN_COLUMNS,
    AgentSession,
    Group,
    Lease,
    Prompt,
    Rollout,
    Sampling,
    TeacherScores,
    TokenSequence,
    Turn,
    column_of,
)
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


def columns_of(message: Message) -> dict[str, np.ndarray]:
    """The arrays of a group's message by the names of their columns."""
    return dict(zip(message.fields["columns"], message.arrays, strict=True))


def changed(sent: Group, fields: dict[str, object], arrays: Mapping[str, np.ndarray] = MappingProxyType({})) -> bytes:
    """The message of a group after a change of some of its fields and arrays."""
    message = decode(encode_group(sent))
    return encode("group", {**message.fields, **fields}, list({**columns_of(message), **arrays}.values()))


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
    with pytest.raises(WireError):
        decode_group(changed(group([[3]]), {"sessions": sessions}))


@pytest.mark.parametrize("lengths", [[4], [6], [5, 1]])
def test_sequence_lengths_that_do_not_add_up_are_refused(lengths: list):
    with pytest.raises(WireError, match="'lengths' of a 'group' message: expected counts that add up to 5"):
        decode_group(changed(group([[5]]), {"lengths": lengths}))


@pytest.mark.parametrize("counts", [[2], [1, 1], []])
def test_numbers_of_sequences_that_do_not_add_up_are_refused(counts: list):
    with pytest.raises(WireError, match="'num_sequences' of a 'group' message: expected counts that add up to 1"):
        decode_group(changed(group([[5]]), {"num_sequences": counts}))


def test_a_reward_part_that_only_some_rollouts_have_stays_with_them():
    sent = group([[2], [3]])
    parts: list[dict[str, float]] = [{"correct": 1.0}, {"correct": 0.0, "overlong": -0.5}]
    rollouts = tuple(structs.replace(r, reward_parts=p) for r, p in zip(sent.rollouts, parts, strict=True))
    received = decode_group(encode_group(structs.replace(sent, rollouts=rollouts)))
    assert [r.reward_parts for r in received.rollouts] == parts


def test_arrays_of_another_dtype_are_refused():
    with pytest.raises(WireError, match=r"expected token_ids of dtype int32 .*, got int64 \[5\]"):
        decode_group(changed(group([[5]]), {}, {"token_ids": np.arange(5)}))


@pytest.mark.parametrize(
    ("key", "value"),
    [("kind", "other"), ("position", "7"), ("position", True), ("weights_digest", {"0": 1}), ("lengths", "x")],
)
def test_a_field_of_the_wrong_kind_is_refused(key: str, value: object):
    with pytest.raises(WireError, match=rf"malformed 'group' message: .*\.{key}"):
        decode_group(changed(group([[5]]), {key: value}))


def test_a_mask_of_other_bytes_than_0_and_1_is_refused():
    # Its sum would be 1 + 1 + 1 + 7: tokens that were never sampled.
    mask = np.array([0, 1, 1, 1, 7], np.uint8).view(np.bool_)
    with pytest.raises(WireError, match="bytes 0 and 1"):
        decode_group(changed(group([[5]]), {}, {"loss_mask": mask}))


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
    with pytest.raises(WireError, match=message):
        decode_group(changed(group([[5]]), {key: value}))


def test_whole_numbers_come_back_as_floats():
    whole = {"reward_parts": {"correct": [1]}, "accuracy": [1], "temperature": 1}
    received = decode_group(changed(group([[5]]), whole))
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


def test_a_group_has_the_columns_that_its_message_names_and_no_others():
    message = decode(encode_group(group([[5]])))
    always = [name for name, column in TOKEN_COLUMNS.items() if not column.when]
    assert (message.fields["columns"], len(message.arrays)) == (always, len(always))
    assert decode_group(encode_group(group([[5]]))).rollouts[0].sequences[0].sampling_mask is None


def test_other_names_of_columns_than_those_of_the_table_are_refused():
    message = decode(encode_group(group([[5]])))
    names = message.fields["columns"]
    for wrong in ([], names[:-1], names[::-1], [*names, names[0]], [*names, "dreams"], [*names, "sampling_mask.sizes"]):
        arrays = [*message.arrays, message.arrays[0]][: len(wrong)]
        with pytest.raises(WireError, match="expected a 'group' message with the columns"):
            decode_group(encode("group", {**message.fields, "columns": wrong}, arrays))
    with pytest.raises(WireError, match="expected a 'group' message with the columns"):
        decode_group(encode("group", message.fields, message.arrays[:-1]))


def test_sampling_masks_cost_four_bytes_a_token_and_an_id():
    # Five tokens, four sampled, with 1, 2, 3 and, in 4 words of bits, 4 tokens kept: 4 + 10 words in all.
    found = columns_of(decode(encode_group(with_kept(group([[5]])))))
    assert [found[f"sampling_mask.{part}"].nbytes for part in ("sizes", "words")] == [16, 40]


@pytest.mark.parametrize(
    ("column", "array", "message"),
    [
        ("sizes", np.array([1, 2, 3], np.int32), r"sampling_mask.sizes of 4 sampled tokens, got \[3\]"),
        ("sizes", np.array([1, 2, 3, 4], np.int64), r"sampling_mask.sizes of dtype int32 .*, got int64 \[4\]"),
        ("words", np.zeros(9, np.int32), "expected 10 words of sampling masks"),
        ("words", np.full(10, -1, np.int32), "token ids of 0 and above"),
        ("words", np.zeros((5, 2), np.int32), r"sampling_mask.words of dtype int32 and 1 axes .*, got int32 \[5, 2\]"),
    ],
)
def test_sampling_masks_that_do_not_fit_their_tokens_are_refused(column: str, array: np.ndarray, message: str):
    with pytest.raises(WireError, match=message):
        decode_group(changed(with_kept(group([[5]])), {}, {f"sampling_mask.{column}": array}))


def test_sampling_masks_for_another_number_of_tokens_make_no_sequence():
    with pytest.raises(ValueError, match=r"expected sampling_mask.sizes of 4 sampled tokens, got \[3\]"):
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


def test_routes_cost_a_byte_for_each_expert():
    # Four of five tokens, 3 layers, 2 experts.
    assert columns_of(decode(encode_group(with_routes(group([[5]])))))["routes"].nbytes == 24


@pytest.mark.parametrize(
    ("counts", "array", "message"),
    [
        ([4], np.zeros((4, 3, 2), np.int32), r"routes of dtype uint8 or uint16 .*, got int32 \[4, 3, 2\]"),
        ([4], np.zeros((3, 3, 2), np.uint8), "'num_computed' of a 'group' message: expected counts that add up to 3"),
        ([4], np.zeros((4, 6), np.uint8), r"routes of dtype .* and 3 axes .*, got uint8 \[4, 6\]"),
        ([6], np.zeros((6, 3, 2), np.uint8), "routes of no more tokens than a sequence has"),
        ([4, 0], np.zeros((4, 3, 2), np.uint8), "'num_computed' of a 'group' message: expected 1 values"),
        ([-1], np.zeros((4, 3, 2), np.uint8), "Expected `int` >= 0"),
        (None, np.zeros((4, 3, 2), np.uint8), "expected num_computed with routes, and only with them"),
    ],
)
def test_routes_that_do_not_fit_are_refused(counts: list[int] | None, array: np.ndarray, message: str):
    with pytest.raises(WireError, match=message):
        decode_group(changed(with_routes(group([[5]])), {"num_computed": counts}, {"routes": array}))


def test_routes_that_are_announced_alone_are_refused():
    with pytest.raises(WireError, match="expected num_computed with routes, and only with them"):
        decode_group(changed(group([[5]]), {"num_computed": [4]}))


def test_routes_of_more_tokens_than_there_are_make_no_sequence():
    with pytest.raises(ValueError, match=r"expected routes of at most 5 computed tokens, got \[6, 3, 2\]"):
        structs.replace(sequence(5), routes=np.zeros((6, 3, 2), np.uint8))


def test_turns_survive_the_wire_with_their_rollouts():
    plain = group([[3], [4, 2], []])
    turns = ((Turn(1, 0.5, 0.0), Turn(1, -1.0, 1.0)), (), (Turn(4, 0.0, 0.25),))
    sent = structs.replace(
        plain, rollouts=tuple(structs.replace(r, turns=t) for r, t in zip(plain.rollouts, turns, strict=True))
    )
    assert tuple(r.turns for r in decode_group(encode_group(sent)).rollouts) == turns
    assert "turns" not in decode(encode_group(plain)).fields


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        (3, r"Expected `array \| null`, got `int` - at `\$\[2\]\.turns`"),
        ([[[1, 1.0, 1.0]], []], "'turns' of a 'group' message: expected 1 values"),
        ([[[1.5, 1.0, 1.0]]], "Expected `int`, got `float`"),
        ([[[-1, 1.0, 1.0]]], "Expected `int` >= 0"),
        ([[[1, 1.0, "x"]]], "Expected `float`, got `str`"),
        ([[[1, 1.0]]], "Expected `array` of at least length 3, got 2"),
        ([[[1, 1.0, 1.0, 1.0]]], "Expected `array` of at most length 3, got 4"),
    ],
)
def test_turns_that_do_not_fit_their_rollouts_are_refused(turns: object, message: str):
    with pytest.raises(WireError, match=message):
        decode_group(changed(group([[3]]), {"turns": turns}))


def taught(length: int, top_k: int) -> TokenSequence:
    n = max(0, length - 1)
    scores = TeacherScores(
        np.linspace(-3, 0, n * (1 + top_k), dtype=np.float32).reshape(n, 1 + top_k),
        np.arange(n * top_k, dtype=np.int32).reshape(n, top_k),
    )
    return replace(sequence(length), teacher=scores)


def with_teacher(sent: Group, top_k: int) -> Group:
    rollouts = (
        replace(r, sequences=tuple(taught(len(s.token_ids), top_k) for s in r.sequences)) for r in sent.rollouts
    )
    return replace(sent, rollouts=tuple(rollouts))


OPTIONAL = [
    (with_kept, "sampling_mask.sizes"),
    (with_routes, "routes"),
    (lambda sent: with_routes(with_kept(sent), np.uint16), "sampling_mask.sizes"),
    (lambda sent: with_teacher(sent, 0), "teacher.logprobs"),
    (lambda sent: with_teacher(sent, 3), "teacher.logprobs"),
]


@pytest.mark.parametrize(("change", "name"), OPTIONAL)
@given(lengths=st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=4))
def test_optional_columns_survive_the_wire_with_their_sequences(
    change: Callable[[Group], Group], name: str, lengths: list[list[int]]
):
    sent = change(group(lengths))
    received = decode_group(encode_group(sent))
    for before, after in zip(sent.rollouts, received.rollouts, strict=True):
        assert len(column_of(after.sequences, name)) == len(after.sequences)
        for column in TOKEN_COLUMNS:
            for a, b in zip(column_of(before.sequences, column), column_of(after.sequences, column), strict=True):
                assert (a.dtype, a.shape, a.tolist()) == (b.dtype, b.shape, b.tolist())


@pytest.mark.parametrize(("change", "name"), OPTIONAL)
def test_a_column_of_some_sequences_only_is_refused(change: Callable[[Group], Group], name: str):
    sent = group([[5, 5]])
    some = (change(sent).rollouts[0].sequences[0], sent.rollouts[0].sequences[1])
    with pytest.raises(ValueError, match=f"expected {name} of one shape for all 2 sequences of a group or for none"):
        encode_group(replace(sent, rollouts=(replace(sent.rollouts[0], sequences=some),)))


@pytest.mark.parametrize(
    ("top_k", "logprobs"),
    [(0, np.zeros((1, 1), np.float32)), (1, np.zeros((2, 1), np.float32)), (0, np.zeros((2, 1), np.float64))],
)
def test_a_teachers_scores_that_do_not_fit_their_tokens_are_refused(top_k: int, logprobs: np.ndarray):
    scores = {"teacher.logprobs": logprobs, "teacher.top_ids": np.zeros((2, top_k), np.int32)}
    with pytest.raises(WireError, match=r"expected teacher.logprobs of"):
        decode_group(changed(with_teacher(group([[3]]), 0), {}, scores))  # two sampled tokens
