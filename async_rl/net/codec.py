"""Encode a group of rollouts as a message, and decode it. Only this module defines the wire format of a ``Group``.

``read_as`` and ``decode_as`` convert and check the fields of other messages.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import msgspec
import numpy as np

from async_rl.errors import WireError
from async_rl.net.wire import SAME_VERSION, Frame, Limits, Pieces, decode, encode
from async_rl.records import (
    PER_TOKEN,
    TOKEN_COLUMNS,
    AgentSession,
    Count,
    FinishReason,
    Group,
    LeaseKind,
    Rollout,
    Span,
    TeacherScores,
    TokenColumn,
    TokenSequence,
    Turn,
    column_of,
    why_columns_misfit,
)
from async_rl.sampling_mask import SamplingMask, why_malformed

_T = TypeVar("_T")
_LIMITS = Limits(max_depth=None)
"""Limits on a group's message. ``GroupFields`` limits the types and the nesting of the fields."""
_RECORDS = {"sampling_mask": SamplingMask, "teacher": TeacherScores}
"""The classes of records that columns of ``TOKEN_COLUMNS`` belong to, by the field of ``TokenSequence``."""


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


def decode_as(frame: Frame, kinds: Sequence[type[_T]], limits: Limits) -> _T:
    """Return the message in ``frame`` as the one of the records ``kinds`` whose name is the message's type.

    Raises:
        WireError: the frame is malformed, or none of ``kinds`` fits it.
    """
    message = decode(frame, limits)
    for kind in kinds:
        if kind.__name__ == message.type:
            return read_as(message.fields, kind)
    raise WireError(
        f"expected a message of type {' or '.join(kind.__name__ for kind in kinds)}, got {message.type!r}; "
        f"{SAME_VERSION}"
    )


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
        turns: [R], as in ``Rollout``. None if no rollout has one.
        spans: [R], as in ``Rollout``. None if no rollout has one.
        columns: the names of the message's arrays in ``TOKEN_COLUMNS``, in that order.
        num_computed: [S], the rows that each sequence has in columns for computed tokens. None if there are none.
        sessions: [R], as in ``Rollout``. None if no rollout has one.
        example, kept: as in ``Group``.
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
    columns: list[str]
    reward_parts: dict[str, list[float | None]]
    accuracy: list[float]
    finish_reason: list[FinishReason]
    extracted: list[str | None]
    turns: list[tuple[Turn, ...]] | None = None
    num_computed: list[Count] | None = None
    spans: list[tuple[Span, ...]] | None = None
    sessions: list[AgentSession | None] | None = None
    example: str = ""
    kept: bool = True
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
    turns, spans = [r.turns for r in rollouts], [r.spans for r in rollouts]
    sessions = [r.session for r in rollouts]
    columns = {name: _all_or_none(name, sequences) for name in TOKEN_COLUMNS}
    columns = {name: arrays for name, arrays in columns.items() if arrays or not TOKEN_COLUMNS[name].when}
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
        columns=list(columns),
        reward_parts={name: [r.reward_parts.get(name) for r in rollouts] for name in names},
        accuracy=[r.accuracy for r in rollouts],
        finish_reason=[r.finish_reason for r in rollouts],
        extracted=[r.extracted for r in rollouts],
        turns=turns if any(turns) else None,
        num_computed=[len(routes) for routes in columns["routes"]] if "routes" in columns else None,
        spans=spans if any(spans) else None,
        sessions=sessions if any(sessions) else None,
        metrics={name: [r.metrics.get(name) for r in rollouts] for name in metrics},
        example=group.example,
        kept=group.kept,
    )
    return encode("group", fields, [_pieces(TOKEN_COLUMNS[name], arrays) for name, arrays in columns.items()])


def _all_or_none(name: str, sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
    """Return the column of all sequences; an empty list if none has it."""
    arrays = column_of(sequences, name)
    if len(arrays) not in (0, len(sequences)) or len({array.shape[1:] for array in arrays}) > 1:
        raise ValueError(
            f"expected {name} of one shape for all {len(sequences)} sequences of a group or for none, got "
            f"{len(arrays)} of shapes {sorted({array.shape[1:] for array in arrays})}; this is a bug in the "
            f"generator's backend"
        )
    return arrays


def _pieces(column: TokenColumn, arrays: Sequence[np.ndarray]) -> Pieces:
    dtype = column.dtype if len(column.dtypes) == 1 else arrays[0].dtype
    shape = [sum(map(len, arrays)), *(arrays[0].shape[1:] if arrays else ())]
    # The memory of an empty array can't be cast.
    return Pieces(
        dtype.str, shape, [np.ascontiguousarray(array, dtype).data.cast("B") for array in arrays if array.size]
    )


class FlatGroup(TokenSequence, frozen=True, eq=False, kw_only=True):
    """A group's message after decoding and checking: one sequence of all its tokens, whose arrays are views of it.

    Attributes:
        fields: the message without its arrays.
    """

    fields: GroupFields

    def __post_init__(self) -> None:
        if misfit := why_columns_misfit(self):
            raise WireError(f"malformed 'group' message: {misfit}; {SAME_VERSION}")

    @property
    def num_rollouts(self) -> int:
        return len(self.fields.num_sequences)


def decode_group(frame: Frame) -> Group:
    """Decode a group's message ``frame`` to a ``Group``. The arrays of the group are views of ``frame``.

    Raises:
        WireError: the message is malformed, or its lengths, dtypes or values don't fit together.
    """
    flat = decode_flat_group(frame)
    fields, rewards = flat.fields, flat.fields.reward_parts
    sequences = _sequences(flat)
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
                turns=() if fields.turns is None else fields.turns[index],
                spans=() if fields.spans is None else fields.spans[index],
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
        kept=fields.kept,
    )


def _sequences(flat: FlatGroup) -> list[TokenSequence]:
    """Return the token sequences of a group, whose arrays are views of the flat ones."""
    lengths = flat.fields.lengths
    if not lengths:
        return []
    ends = {"token": list(accumulate(lengths)), "computed": list(accumulate(flat.fields.num_computed or ()))}
    if len(flat.fields.columns) > len(PER_TOKEN):
        sampled = np.concatenate([[0], np.cumsum(flat.loss_mask)])[ends["token"]]
        ends["sampled"] = sampled.tolist()
        if flat.sampling_mask is not None:
            words = np.concatenate([[0], np.cumsum(np.abs(flat.sampling_mask.sizes))])
            ends["word"] = words[sampled].tolist()
    columns: dict[str, Sequence[np.ndarray]] = {}
    for name in flat.fields.columns:
        ((array,), bounds) = column_of([flat], name), ends[TOKEN_COLUMNS[name].per]
        columns[name] = [array[start:end] for start, end in zip([0, *bounds], bounds, strict=False)]
    parts = _parts_of_sequences(columns)
    return [TokenSequence(**dict(zip(parts, values, strict=True))) for values in zip(*parts.values(), strict=True)]


def _parts_of_sequences(columns: Mapping[str, Sequence[np.ndarray]]) -> dict[str, Sequence[Any]]:
    """Return the fields of ``TokenSequence`` of S sequences, [S] each, that have these columns, [S] each."""
    parts: dict[str, Sequence[Any]] = {name: arrays for name, arrays in columns.items() if "." not in name}
    for name, record in _RECORDS.items():
        if of_record := [arrays for column, arrays in columns.items() if column.startswith(f"{name}.")]:
            parts[name] = list(map(record, *of_record))
    return parts


def decode_flat_group(frame: Frame) -> FlatGroup:
    """Decode a group's message ``frame`` to flat arrays, for callers that need only sums or checks over all tokens.

    Raises:
        WireError: as for ``decode_group``.
    """
    message = decode(frame, _LIMITS)
    if message.type != "group" or message.num_parts:
        raise WireError(
            f"expected a 'group' message without parts, got a {reprlib.repr(message.type)} message with "
            f"{message.num_parts} parts; {SAME_VERSION}"
        )
    fields = read_as(message.fields, GroupFields)
    columns = _named(fields.columns, message.arrays)
    # With other bytes, a sum over the mask would be larger than the number of masked tokens.
    if np.greater(columns["loss_mask"].view(np.uint8), 1).tobytes().find(1) >= 0:
        raise WireError(
            f"expected only the bytes 0 and 1 in the loss mask of a 'group' message, got a byte above 1; {SAME_VERSION}"
        )
    _check_sum("lengths", fields.lengths, columns["token_ids"].size)
    _check_sum("num_sequences", fields.num_sequences, len(fields.lengths))
    num_rollouts = len(fields.num_sequences)
    for what, lists in (("reward_parts", fields.reward_parts), ("metrics", fields.metrics)):
        for name, values in lists.items():
            _check_length(f"{what}.{name}", values, num_rollouts)
    _check_length("accuracy", fields.accuracy, num_rollouts)
    _check_length("finish_reason", fields.finish_reason, num_rollouts)
    _check_length("extracted", fields.extracted, num_rollouts)
    for name, values in (("turns", fields.turns), ("spans", fields.spans), ("sessions", fields.sessions)):
        if values is not None:
            _check_length(name, values, num_rollouts)
    _check_computed(fields, columns.get("routes"))
    whole = _parts_of_sequences({name: [array] for name, array in columns.items()})
    group = FlatGroup(fields=fields, **{name: part for name, (part,) in whole.items()})
    mask = group.sampling_mask
    if mask is not None and (fault := why_malformed(mask.sizes, mask.words, len(mask))):
        raise WireError(fault)
    return group


def _named(names: Sequence[str], arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays of a message by the names of their columns, with dtypes and numbers of axes as in the table."""
    present = {name.partition(".")[0] for name in names}
    expected = [n for n, column in TOKEN_COLUMNS.items() if n.partition(".")[0] in present or not column.when]
    if list(names) != expected or len(arrays) != len(names):
        raise WireError(
            f"expected a 'group' message with the columns {expected}, got {len(arrays)} arrays named "
            f"{reprlib.repr(names)}; {SAME_VERSION}"
        )
    for name, array in zip(names, arrays, strict=True):
        column = TOKEN_COLUMNS[name]
        if array.dtype not in column.dtypes or array.ndim != column.num_axes:
            raise WireError(
                f"expected {name} of dtype {' or '.join(map(str, column.dtypes))} and {column.num_axes} axes in a "
                f"'group' message, got {array.dtype} {list(array.shape)}; {SAME_VERSION}"
            )
    return dict(zip(names, arrays, strict=True))


def _check_computed(fields: GroupFields, routes: np.ndarray | None) -> None:
    """Check that the rows of ``routes`` are those of each sequence's first tokens."""
    counts = fields.num_computed
    if (counts is None) != (routes is None):
        raise WireError(f"expected num_computed with routes, and only with them, in a 'group' message; {SAME_VERSION}")
    if counts is None or routes is None:
        return
    _check_length("num_computed", counts, len(fields.lengths))
    _check_sum("num_computed", counts, len(routes))
    if any(count > length for count, length in zip(counts, fields.lengths, strict=True)):
        raise WireError(f"expected routes of no more tokens than a sequence has in a 'group' message; {SAME_VERSION}")


def _check_sum(name: str, counts: list[int], total: int) -> None:
    if sum(counts) != total:
        raise WireError(
            f"{name!r} of a 'group' message: expected counts that add up to {total}, got {reprlib.repr(counts)}; "
            f"{SAME_VERSION}"
        )


def _check_length(name: str, values: Sequence[object], length: int) -> None:
    if len(values) != length:
        raise WireError(f"{name!r} of a 'group' message: expected {length} values, got {len(values)}; {SAME_VERSION}")
