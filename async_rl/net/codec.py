"""Encode a group of rollouts as a message, and decode it. Only this module defines the wire format of a ``Group``.

``read_as`` and ``field`` convert and check the fields of other messages.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from async_rl.errors import WireError
from async_rl.net.wire import DEFAULT_LIMITS, SAME_VERSION, Limits, Pieces, TypedReader, encode
from async_rl.records import (
    AgentSession,
    BoolArray,
    FinishReason,
    Float32Array,
    Group,
    Int32Array,
    LeaseKind,
    Rollout,
    Span,
    TeacherScores,
    TokenSequence,
    Turn,
)
from async_rl.routes import RouteArray
from async_rl.sampling_mask import SamplingMask, split, why_malformed

_T = TypeVar("_T")
_ROUTE_DTYPES = tuple(np.dtype(name) for name in ("|u1", "<u2"))
_COLUMN_DTYPES = tuple(np.dtype(name) for name in ("<i4", "|b1", "<f4", "<i4"))
Count = Annotated[int, msgspec.Meta(ge=0)]
"""The type of a record's field that is an integer of at least 0."""
_Axis = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]


def field(fields: Mapping[str, Any], key: str, kind: type[_T]) -> _T:
    """Return ``fields[key]`` after a check that its type is ``kind``.

    An int is accepted as a float, but not a bool as an int.

    Raises:
        WireError: the key is missing, or its value has another type.
    """
    value: Any = fields.get(key)
    if type(value) is kind:
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        got = type(value).__name__ if key in fields else "no such field"
        raise WireError(f"field {key!r} of a message: expected {kind.__name__}, got {got}; {SAME_VERSION}")
    return value


def read_as(plain: Any, kind: type[_T]) -> _T:
    """Convert the plain data of a message to ``kind``: a record (a msgspec ``Struct``) or a container of plain types.

    The types are checked in C. Fields that the record does not have are ignored.

    Raises:
        WireError: a field is missing or has the wrong type.
    """
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        raise WireError(f"malformed {getattr(kind, '__name__', 'data')}: {error}; {SAME_VERSION}") from error


class TurnFields(msgspec.Struct, frozen=True, gc=False):
    """The turns of all rollouts of a group in its message, one rollout after the other. R = rollouts, U = turns.

    Attributes:
        counts: [R], the number of turns of each rollout. The sum is U.
        num_tokens: [U], the number of tokens that the policy sampled in each turn.
        rewards: [U], the reward of each turn.
        scores: [U], the score of each turn, a figure that is only logged.
    """

    counts: list[Count]
    num_tokens: list[Count]
    rewards: list[float]
    scores: list[float]


class SpanFields(msgspec.Struct, frozen=True, gc=False):
    """The spans of all rollouts of a group in its message, one rollout after the other. R = rollouts, U = spans.

    Attributes:
        counts: [R], the number of spans of each rollout. The sum is U.
        ends: [U], as in ``Span``.
        rewards: [U], as in ``Span``.
    """

    counts: list[Count]
    ends: list[Count]
    rewards: list[float]


class RouteFields(msgspec.Struct, frozen=True, gc=False):
    """The shape of a group's routes in its message. S = token sequences.

    Attributes:
        counts: [S], the number of tokens of each sequence that have routes: its first ones.
        num_layers: the number of layers with experts.
        top_k: the number of experts for each token.
    """

    counts: list[Count]
    num_layers: _Axis
    top_k: _Axis


class GroupFields(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A group's message without its arrays. The group has R rollouts, S token sequences and T tokens.

    Attributes:
        num_sequences: [R], the number of sequences of each rollout. The sum is S.
        lengths: [S], the number of tokens of each sequence. The sum is T.
        reward_parts: for each name of a reward part a list [R]. None in the list means that the rollout has no such
            part.
        accuracy: [R], as in ``Rollout``.
        finish_reason: [R], as in ``Rollout``.
        extracted: [R], as in ``Rollout``.
        turns: the turns of all rollouts. None if the group was sampled without an environment.
        routes: the shape of the routes. None if the group has none.
        spans: the spans of all rollouts. None if there are none.
        teacher_top_k: K of the teacher's scores, whose two arrays are the last of the message. None if the group has
            none.
        sessions: [R], as in ``Rollout``. None if no rollout has one.
        example: as in ``Group``.
        metrics: for each name of an agent's metric a list [R]. None in the list means that the rollout has none.
    """

    lease_id: str
    kind: LeaseKind
    position: int
    generator_id: str
    lineage: str
    temperature: float
    weights_digest: dict[int, str]
    sampling_time_s: float
    num_sequences: list[Count]
    lengths: list[Count]
    reward_parts: dict[str, list[float | None]]
    accuracy: list[float]
    finish_reason: list[FinishReason]
    extracted: list[str | None]
    turns: TurnFields | None = None
    routes: RouteFields | None = None
    spans: SpanFields | None = None
    teacher_top_k: Annotated[int, msgspec.Meta(ge=0, le=1024)] | None = None
    sessions: list[AgentSession | None] | None = None
    example: str = ""
    metrics: dict[str, list[float | None]] = {}


def encode_group(group: Group) -> bytes:
    """Encode a group as the bytes of one message. The queue can store and forward these bytes without decoding them.

    The message has one list or array for each field of a rollout, as in ``FlatGroup``. Packing, checking and summing a
    fixed number of lists is much faster than doing so with one map for each rollout.
    """
    rollouts = group.rollouts
    sequences = [s for r in rollouts for s in r.sequences]
    names = dict.fromkeys(name for r in rollouts for name in r.reward_parts)
    metrics = dict.fromkeys(name for r in rollouts for name in r.metrics)
    turns = [turn for r in rollouts for turn in r.turns]
    spans = [span for r in rollouts for span in r.spans]
    sessions = [r.session for r in rollouts]
    routes = _all_or_none("routes", [s.routes for s in sequences])
    teachers = _all_or_none("a teacher's scores", [s.teacher for s in sequences])
    fields = GroupFields(
        lease_id=group.lease_id,
        kind=group.kind,
        position=group.position,
        generator_id=group.generator_id,
        lineage=group.lineage,
        temperature=group.temperature,
        weights_digest=dict(group.weights_digest),
        sampling_time_s=group.sampling_time_s,
        num_sequences=[len(r.sequences) for r in rollouts],
        lengths=[len(s.token_ids) for s in sequences],
        reward_parts={name: [r.reward_parts.get(name) for r in rollouts] for name in names},
        accuracy=[r.accuracy for r in rollouts],
        finish_reason=[r.finish_reason for r in rollouts],
        extracted=[r.extracted for r in rollouts],
        turns=TurnFields(
            counts=[len(r.turns) for r in rollouts],
            num_tokens=[turn.num_tokens for turn in turns],
            rewards=[turn.reward for turn in turns],
            scores=[turn.score for turn in turns],
        )
        if turns
        else None,
        routes=RouteFields([len(r) for r in routes], *routes[0].shape[1:]) if routes else None,
        spans=SpanFields([len(r.spans) for r in rollouts], [s.end for s in spans], [s.reward for s in spans])
        if spans
        else None,
        teacher_top_k=teachers[0].top_k if teachers else None,
        sessions=sessions if any(sessions) else None,
        metrics={name: [r.metrics.get(name) for r in rollouts] for name in metrics},
        example=group.example,
    )
    arrays = [
        _column("<i4", [s.token_ids for s in sequences]),
        _column("|b1", [s.loss_mask for s in sequences]),
        _column("<f4", [s.behavior_logprobs for s in sequences]),
        _column("<i4", [s.versions for s in sequences]),
    ]
    if masks := _all_or_none("sampling masks", [s.sampling_mask for s in sequences]):
        arrays += [_column("<i4", [mask.sizes for mask in masks]), _column("<i4", [mask.words for mask in masks])]
    if routes:
        arrays.append(_column(routes[0].dtype.str, routes))
    if teachers:
        arrays.append(_column("<f4", [teacher.logprobs for teacher in teachers]))
        arrays.append(_column("<i4", [teacher.top_ids for teacher in teachers]))
    return encode("group", fields, arrays)


def _all_or_none(what: str, of_sequences: Sequence[_T | None]) -> list[_T]:
    """Return what all sequences have; an empty list if none has it."""
    found = [one for one in of_sequences if one is not None]
    if len(found) not in (0, len(of_sequences)):
        raise ValueError(
            f"expected {what} for all {len(of_sequences)} sequences of a group or for none, got {len(found)}; this is "
            f"a bug in the generator's backend"
        )
    return found


def _column(dtype: str, arrays: Iterable[np.ndarray]) -> Pieces:
    # The memory of an empty array can't be cast.
    return Pieces(dtype, [np.ascontiguousarray(array, dtype).data.cast("B") for array in arrays if array.size])


_READER = TypedReader("group", GroupFields)


@dataclass(frozen=True, slots=True, eq=False)
class FlatGroup:
    """A group's message after decoding and checking. Flat arrays, which are views of the message, have all tokens.

    Attributes:
        fields: the message without its arrays.
        token_ids: int32 [T], one sequence after the other.
        loss_mask: bool [T], True on tokens that the policy sampled.
        behavior_logprobs: float32 [T], log-probabilities in nats.
        versions: int32 [T], the weights version of each token.
        sampling_mask: the token sets of all sampled tokens. None if top-p and top-k left every token.
        routes: uint8 or uint16 [P, L, K], the routes of all sequences, one after the other; ``fields.routes`` counts
            them. None if the group has none.
        teacher: the teacher's scores of all sampled tokens. None if the group has none.
    """

    fields: GroupFields
    token_ids: Int32Array
    loss_mask: BoolArray
    behavior_logprobs: Float32Array
    versions: Int32Array
    sampling_mask: SamplingMask | None
    routes: RouteArray | None
    teacher: TeacherScores | None = None

    @property
    def num_rollouts(self) -> int:
        return len(self.fields.num_sequences)


def decode_group(frame: bytes | bytearray | memoryview, limits: Limits = DEFAULT_LIMITS) -> Group:
    """Decode a group's message ``frame`` to a ``Group``. The arrays of the group are views of ``frame``.

    Raises:
        WireError: the message is malformed, or its lengths, dtypes or values don't fit together.
    """
    flat = decode_flat_group(frame, limits)
    fields, rewards = flat.fields, flat.fields.reward_parts
    token_ids, loss_mask, logprobs, versions = flat.token_ids, flat.loss_mask, flat.behavior_logprobs, flat.versions
    sequences: list[TokenSequence] = []
    start = 0
    parts_by_sequence = zip(
        fields.lengths, _masks_by_sequence(flat), _routes_by_sequence(flat), _teachers_by_sequence(flat), strict=True
    )
    for length, mask, routes, teacher in parts_by_sequence:
        at = slice(start, start + length)
        sequences.append(TokenSequence(token_ids[at], loss_mask[at], logprobs[at], versions[at], mask, routes, teacher))
        start = at.stop
    turns, spans = _turns_by_rollout(flat), _spans_by_rollout(flat)
    rollouts: list[Rollout] = []
    first = 0
    for index, count in enumerate(fields.num_sequences):
        parts, metrics = (
            {name: value for name, values in columns.items() if (value := values[index]) is not None}
            for columns in (rewards, fields.metrics)
        )
        rollouts.append(
            Rollout(
                sequences=tuple(sequences[first : first + count]),
                reward_parts=parts,
                accuracy=fields.accuracy[index],
                finish_reason=fields.finish_reason[index],
                extracted=fields.extracted[index],
                turns=next(turns),
                spans=next(spans),
                session=None if fields.sessions is None else fields.sessions[index],
                metrics=metrics,
            )
        )
        first += count
    return Group(
        lease_id=fields.lease_id,
        kind=fields.kind,
        position=fields.position,
        generator_id=fields.generator_id,
        lineage=fields.lineage,
        temperature=fields.temperature,
        rollouts=tuple(rollouts),
        weights_digest=fields.weights_digest,
        sampling_time_s=fields.sampling_time_s,
        example=fields.example,
    )


def _masks_by_sequence(flat: FlatGroup) -> Sequence[SamplingMask | None]:
    if flat.sampling_mask is None or not flat.fields.lengths:
        return [None] * len(flat.fields.lengths)
    return split(flat.sampling_mask, np.diff(_sampled_ends(flat), prepend=0).tolist())


def _teachers_by_sequence(flat: FlatGroup) -> Sequence[TeacherScores | None]:
    if flat.teacher is None or not flat.fields.lengths:
        return [None] * len(flat.fields.lengths)
    ends = _sampled_ends(flat).tolist()
    return [
        TeacherScores(flat.teacher.logprobs[start:end], flat.teacher.top_ids[start:end])
        for start, end in zip([0, *ends], ends)
    ]


def _sampled_ends(flat: FlatGroup) -> np.ndarray:
    """Return how many tokens are sampled up to the end of each sequence, int64 [S]."""
    return np.concatenate([[0], np.cumsum(flat.loss_mask)])[np.cumsum(flat.fields.lengths)]


def _routes_by_sequence(flat: FlatGroup) -> Sequence[RouteArray | None]:
    if flat.routes is None or flat.fields.routes is None:
        return [None] * len(flat.fields.lengths)
    ends = np.cumsum(flat.fields.routes.counts, dtype=np.int64).tolist()
    return [flat.routes[start:end] for start, end in zip([0, *ends], ends)]


def _turns_by_rollout(flat: FlatGroup) -> Iterator[tuple[Turn, ...]]:
    columns = flat.fields.turns
    if columns is None:
        return repeat((), flat.num_rollouts)
    turns = map(Turn, columns.num_tokens, columns.rewards, columns.scores)
    return (tuple(islice(turns, count)) for count in columns.counts)


def _spans_by_rollout(flat: FlatGroup) -> Iterator[tuple[Span, ...]]:
    columns = flat.fields.spans
    if columns is None:
        return repeat((), flat.num_rollouts)
    spans = map(Span, columns.ends, columns.rewards)
    return (tuple(islice(spans, count)) for count in columns.counts)


def decode_flat_group(frame: bytes | bytearray | memoryview, limits: Limits = DEFAULT_LIMITS) -> FlatGroup:
    """Decode a group's message ``frame`` to flat arrays, for callers that need only sums or checks over all tokens.

    Raises:
        WireError: as for ``decode_group``.
    """
    fields, arrays = _READER.read(frame, limits)
    num_taught = 0 if fields.teacher_top_k is None else 2
    num_others = len(arrays) - (fields.routes is not None) - num_taught
    if num_others not in (4, 6):
        raise WireError(
            f"expected a 'group' message with 4 or 6 arrays besides its routes and its teacher's scores, got "
            f"{num_others}; {SAME_VERSION}"
        )
    arrays, taught = arrays[: len(arrays) - num_taught], arrays[len(arrays) - num_taught :]
    token_ids, loss_mask, logprobs, versions = arrays[:4]
    num_tokens = token_ids.size
    for array, dtype in zip(arrays, _COLUMN_DTYPES):
        if array.dtype != dtype or array.shape != (num_tokens,):
            raise WireError(
                f"expected four arrays of shape [{num_tokens}] in a 'group' message (dtypes <i4, |b1, <f4, <i4), got "
                f"one of shape {list(array.shape)}, dtype {array.dtype.str}; {SAME_VERSION}"
            )
    # With other bytes, a sum over the mask would be larger than the number of masked tokens.
    if np.greater(loss_mask.view(np.uint8), 1).tobytes().find(1) >= 0:
        raise WireError(
            f"expected only the bytes 0 and 1 in the loss mask of a 'group' message, got a byte above 1; {SAME_VERSION}"
        )
    _check_sum("lengths", fields.lengths, num_tokens)
    _check_sum("num_sequences", fields.num_sequences, len(fields.lengths))
    num_rollouts = len(fields.num_sequences)
    for what, columns in (("reward_parts", fields.reward_parts), ("metrics", fields.metrics)):
        for name, values in columns.items():
            _check_length(f"{what}.{name}", values, num_rollouts)
    _check_length("accuracy", fields.accuracy, num_rollouts)
    _check_length("finish_reason", fields.finish_reason, num_rollouts)
    _check_length("extracted", fields.extracted, num_rollouts)
    if fields.turns is not None:
        _check_turns(fields.turns, num_rollouts)
    if fields.spans is not None:
        _check_spans(fields.spans, num_rollouts)
    if fields.sessions is not None:
        _check_length("sessions", fields.sessions, num_rollouts)
    mask = None if num_others == 4 else _sampling_mask(arrays[:6])
    routes = None if fields.routes is None else _routes(fields.routes, fields.lengths, arrays[-1])
    teacher = None if fields.teacher_top_k is None else _teacher(taught, fields.teacher_top_k, loss_mask)
    return FlatGroup(fields, token_ids, loss_mask, logprobs, versions, mask, routes, teacher)


def _teacher(arrays: Sequence[np.ndarray], top_k: int, loss_mask: np.ndarray) -> TeacherScores:
    num_sampled = int(np.count_nonzero(loss_mask))
    sizes = ((num_sampled * (1 + top_k),), (num_sampled * top_k,))
    found = [(array.dtype.str, array.shape) for array in arrays]
    if found != [("<f4", sizes[0]), ("<i4", sizes[1])]:
        raise WireError(
            f"expected a teacher's scores of {num_sampled} tokens with top_k {top_k} in a 'group' message, got arrays "
            f"{found}; {SAME_VERSION}"
        )
    return TeacherScores(arrays[0].reshape(num_sampled, 1 + top_k), arrays[1].reshape(num_sampled, top_k))


def _check_turns(turns: TurnFields, num_rollouts: int) -> None:
    num_turns = len(turns.num_tokens)
    _check_length("turns.counts", turns.counts, num_rollouts)
    _check_sum("turns.counts", turns.counts, num_turns)
    _check_length("turns.rewards", turns.rewards, num_turns)
    _check_length("turns.scores", turns.scores, num_turns)


def _check_spans(spans: SpanFields, num_rollouts: int) -> None:
    num_spans = len(spans.ends)
    _check_length("spans.counts", spans.counts, num_rollouts)
    _check_sum("spans.counts", spans.counts, num_spans)
    _check_length("spans.rewards", spans.rewards, num_spans)


def _sampling_mask(arrays: Sequence[np.ndarray]) -> SamplingMask:
    sizes, words = arrays[4:]
    if sizes.dtype != _COLUMN_DTYPES[0] or words.dtype != _COLUMN_DTYPES[0]:
        raise WireError(
            f"expected sampling masks of dtype int32 in a 'group' message, got {sizes.dtype}, {words.dtype}; "
            f"{SAME_VERSION}"
        )
    if fault := why_malformed(sizes, words, int(np.count_nonzero(arrays[1]))):
        raise WireError(fault)
    return SamplingMask(sizes, words)


def _routes(shape: RouteFields, lengths: list[int], flat: np.ndarray) -> RouteArray:
    _check_length("routes.counts", shape.counts, len(lengths))
    if any(count > length for count, length in zip(shape.counts, lengths, strict=True)):
        raise WireError(f"expected routes of no more tokens than a sequence has in a 'group' message; {SAME_VERSION}")
    size = sum(shape.counts) * shape.num_layers * shape.top_k
    if flat.dtype not in _ROUTE_DTYPES or flat.shape != (size,):
        raise WireError(
            f"expected routes of dtype uint8 or uint16 and shape [{size}] in a 'group' message, got {flat.dtype} "
            f"{list(flat.shape)}; {SAME_VERSION}"
        )
    return flat.reshape(sum(shape.counts), shape.num_layers, shape.top_k)


def _check_sum(name: str, counts: list[int], total: int) -> None:
    if sum(counts) != total:
        raise WireError(
            f"{name!r} of a 'group' message: expected counts that add up to {total}, got {reprlib.repr(counts)}; "
            f"{SAME_VERSION}"
        )


def _check_length(name: str, values: Sequence[object], length: int) -> None:
    if len(values) != length:
        raise WireError(f"{name!r} of a 'group' message: expected {length} values, got {len(values)}; {SAME_VERSION}")
