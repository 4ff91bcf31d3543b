"""Leases and groups survive the wire; groups that don't fit together are refused."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import to_builtins
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


Arrays = Mapping[str, np.ndarray]


def changed(sent: Group, fields: dict[str, object], arrays: Arrays = MappingProxyType({})) -> bytes:
    """The message of a group after a change of some of its fields and arrays."""
    message = decode(encode_group(sent))
    return encode("group", {**message.fields, **fields}, list({**columns_of(message), **arrays}.values()))


PROMPT = Prompt(5, 3, 1, ({"role": "user", "content": "1+1"},), {"gt_answer": "2"})
LEASE = Lease("id", "eval", PROMPT, 8, Sampling(0.6, 1.0, 0, 10, 20, ("</answer>",)), "l", 2, 4, 1, 2**62)


def test_leases_survive_the_wire_as_they_are_or_are_refused_with_the_place():
    greedy = replace(LEASE, lease_id="other", sampling=Sampling(1.0, 1.0, 0, 10, 20, ()))
    message = decode(encode("leases", {"granted": LeasesGranted((LEASE, greedy), "why", 3)}))
    assert read_as(message.fields["granted"], LeasesGranted) == LeasesGranted((LEASE, greedy), "why", 3)
    newer = to_builtins(LEASE) | {"from_a_newer_peer": 1}
    assert read_as(newer, Lease) == LEASE
    with pytest.raises(WireError, match=r"malformed Lease: Invalid enum value 'test' - at `\$.kind`"):
        read_as(newer | {"kind": "test"}, Lease)


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


SESSION = AgentSession({"first": 1, "lost": 2}, {"add": 3}, 0.5, 2.0, ("user",))


def with_kept(sent: Group) -> Group:
    """Its sampled tokens were chosen from {0}, {0, 1}, {0, 1, 2} and so on, of a vocabulary of 100."""

    def kept(sequence: TokenSequence) -> SamplingMask:
        counts = 1 + np.arange(np.count_nonzero(sequence.loss_mask))
        return pack_ids(counts, np.concatenate([[], *map(np.arange, counts)]).astype(np.int32), vocab_size=100)

    rollouts = tuple(
        replace(r, sequences=tuple(replace(s, sampling_mask=kept(s)) for s in r.sequences)) for r in sent.rollouts
    )
    return replace(sent, rollouts=rollouts)


def test_other_names_of_columns_than_those_of_the_table_are_refused():
    message = decode(encode_group(group([[5]])))
    names = message.fields["columns"]
    assert names == [name for name, column in TOKEN_COLUMNS.items() if not column.when]
    for wrong in ([], names[:-1], names[::-1], [*names, names[0]], [*names, "dreams"], [*names, "sampling_mask.sizes"]):
        arrays = [*message.arrays, message.arrays[0]][: len(wrong)]
        with pytest.raises(WireError, match="expected a 'group' message with the columns"):
            decode_group(encode("group", {**message.fields, "columns": wrong}, arrays))
    with pytest.raises(WireError, match="expected a 'group' message with the columns"):
        decode_group(encode("group", message.fields, message.arrays[:-1]))


def with_routes(sent: Group, dtype: type[np.generic] = np.uint8) -> Group:
    """All tokens but the last of each sequence have routes through 3 layers, 2 experts in each."""

    def routed(sequence: TokenSequence) -> TokenSequence:
        shape = (max(0, len(sequence.token_ids) - 1), 3, 2)
        return replace(sequence, routes=(np.arange(np.prod(shape)) % 251).astype(dtype).reshape(shape))

    return replace(sent, rollouts=tuple(replace(r, sequences=tuple(map(routed, r.sequences))) for r in sent.rollouts))


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


def test_what_only_some_rollouts_have_stays_with_them():
    parts: list[dict[str, float]] = [{"correct": 1.0}, {"correct": 0.0, "overlong": -0.5}, {}]
    turns = ((Turn(1, 0.5, 0.0), Turn(1, -1.0, 1.0)), (), (Turn(4, 0.0, 0.25),))
    sessions = (SESSION, None, SESSION)
    plain = group([[3], [4, 2], []])
    sent = replace(plain, rollouts=tuple(
        replace(rollout, reward_parts=p, turns=t, session=s)
        for rollout, p, t, s in zip(plain.rollouts, parts, turns, sessions, strict=True)
    ))  # fmt: skip
    received = decode_group(encode_group(sent)).rollouts
    assert [rollout.reward_parts for rollout in received] == parts
    assert tuple(rollout.turns for rollout in received) == turns
    assert tuple(rollout.session for rollout in received) == sessions
    assert not {"turns", "sessions"} & decode(encode_group(plain)).fields.keys(), "nobody has any"


ONE = group([[5]])
SUM = "message: expected counts that add up to"
ROUTES = {"routes": np.zeros((4, 3, 2), np.uint8)}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "other"}, r"malformed GroupFields: .*\.kind"),
        ({"lengths": [4]}, f"'lengths' of a 'group' {SUM} 5"),
        ({"lengths": [-5]}, r"Expected `int` >= 0 - at `\$\.lengths\[0\]`"),
        ({"lengths": [True]}, "Expected `int`, got `bool`"),
        ({"num_sequences": [2]}, f"'num_sequences' of a 'group' {SUM} 1"),
        ({"reward_parts": {"correct": ["1"]}}, r"Expected `float \| null`, got `str`"),
        ({"reward_parts": {"correct": [1.0, 1.0]}}, "'reward_parts.correct' of a 'group' message: expected 1 values"),
        ({"accuracy": [1.0, 1.0]}, "'accuracy' of a 'group' message: expected 1 values"),
        ({"num_computed": [4]}, "expected num_computed with routes, and only with them"),
        ({"turns": [[[1, 1.0, 1.0]], []]}, "'turns' of a 'group' message: expected 1 values"),
        ({"turns": [[[-1, 1.0, 1.0]]]}, "Expected `int` >= 0"),
        ({"turns": [[[1, 1.0, 1.0, 1.0]]]}, "Expected `array` of at most length 3, got 4"),
        ({"sessions": [None, None]}, "message"),
        ({"sessions": [{**to_builtins(SESSION), "agent_s": float("nan")}]}, "malformed GroupFields"),
        ({"sessions": [{**to_builtins(SESSION), "tools": {"x" * 65: 1}}]}, "malformed GroupFields"),
        ({"sessions": [{**to_builtins(SESSION), "calls": {"first": -1}}]}, "malformed GroupFields"),
    ],
)
def test_a_field_that_does_not_fit_is_refused(fields: dict[str, object], message: str):
    with pytest.raises(WireError, match=message):
        decode_group(changed(ONE, fields))


# A group of one sequence of five tokens, of which four were sampled.
@pytest.mark.parametrize(
    ("sent", "num_computed", "arrays", "message"),
    [
        (ONE, None, {"token_ids": np.arange(5)}, r"expected token_ids of dtype int32 .*, got int64 \[5\]"),
        # The sum of this mask would be 1 + 1 + 1 + 7: tokens that were never sampled.
        (ONE, None, {"loss_mask": np.array([0, 1, 1, 1, 7], np.uint8).view(np.bool_)}, "bytes 0 and 1"),
        (with_kept(ONE), None, {"sampling_mask.sizes": np.array([1, 2, 3], np.int32)}, r"got \[3\]"),
        (with_kept(ONE), None, {"sampling_mask.sizes": np.array([1, 2, 3, 4])}, r"of dtype int32 .*, got int64 \[4\]"),
        (with_kept(ONE), None, {"sampling_mask.words": np.zeros(9, np.int32)}, "expected 10 words of sampling masks"),
        (with_kept(ONE), None, {"sampling_mask.words": np.full(10, -1, np.int32)}, "token ids of 0 and above"),
        (with_kept(ONE), None, {"sampling_mask.words": np.zeros((5, 2), np.int32)}, r"got int32 .5, 2"),
        (with_routes(ONE), [4], {"routes": np.zeros((4, 3, 2), np.int32)}, r"routes of dtype uint8 or uint16 .*int32"),
        (with_routes(ONE), [4], {"routes": np.zeros((3, 3, 2), np.uint8)}, f"'num_computed' of a 'group' {SUM} 3"),
        (with_routes(ONE), [4], {"routes": np.zeros((4, 6), np.uint8)}, r"3 axes .*, got uint8 \[4, 6\]"),
        (with_routes(ONE), [6], {"routes": np.zeros((6, 3, 2), np.uint8)}, "of no more tokens than a sequence has"),
        (with_routes(ONE), [4, 0], ROUTES, "'num_computed' of a 'group' message: expected 1 values"),
        (with_routes(ONE), None, ROUTES, "expected num_computed with routes, and only with them"),
        (with_teacher(ONE, 0), None, {"teacher.logprobs": np.zeros((3, 1), np.float32)}, "teacher.logprobs of"),
        (with_teacher(ONE, 0), None, {"teacher.logprobs": np.zeros((4, 1))}, "teacher.logprobs of"),
        (with_teacher(ONE, 1), None, {"teacher.logprobs": np.zeros((4, 1), np.float32)}, "teacher.logprobs of"),
    ],
)  # fmt: skip
def test_an_array_that_does_not_fit_is_refused(sent: Group, num_computed: object, arrays: Arrays, message: str):
    fields = {"num_computed": num_computed} if "routes" in columns_of(decode(encode_group(sent))) else {}
    with pytest.raises(WireError, match=message):
        decode_group(changed(sent, fields, arrays))


def test_optional_columns_cost_what_they_must():
    # Five tokens, four sampled, with 1, 2, 3 and, in 4 words of bits, 4 tokens kept: 4 + 10 words in all.
    kept = columns_of(decode(encode_group(with_kept(ONE))))
    assert [kept[f"sampling_mask.{part}"].nbytes for part in ("sizes", "words")] == [16, 40]
    # Four of five tokens, 3 layers, 2 experts.
    assert columns_of(decode(encode_group(with_routes(ONE))))["routes"].nbytes == 24


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ({"sampling_mask": with_kept(group([[4]])).rollouts[0].sequences[0].sampling_mask}, r"got \[3\]"),
        ({"routes": np.zeros((6, 3, 2), np.uint8)}, r"at most 5 computed tokens, got \[6, 3, 2\]"),
    ],
)  # fmt: skip
def test_columns_for_another_number_of_tokens_make_no_sequence(column: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        replace(sequence(5), **column)


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
