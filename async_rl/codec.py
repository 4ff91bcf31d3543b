"""Records to messages and back: the only place that knows how a ``Lease`` or a ``Group`` looks on the wire."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from async_rl.errors import WireError
from async_rl.kept_tokens import KeptTokens, split, why_malformed
from async_rl.records import (
    FINISH_REASONS,
    BoolArray,
    FinishReason,
    Float32Array,
    Group,
    Int32Array,
    Lease,
    Prompt,
    Rollout,
    Sampling,
    TokenSequence,
    Turn,
)
from async_rl.wire import DEFAULT_LIMITS, Limits, Pieces, decode, encode

_T = TypeVar("_T")
_COLUMN_DTYPES = tuple(np.dtype(name) for name in ("<i4", "|b1", "<f4", "<i4"))
_INTEGERS = {int}
_INTEGERS_ONLY = frozenset((int,))
_NUMBERS = frozenset((int, float))
_NUMBERS_OR_NONE = _NUMBERS | {type(None)}
_TEXTS = frozenset((str,))
_TEXTS_OR_NONE = _TEXTS | {type(None)}


def field(fields: Mapping[str, Any], key: str, kind: type[_T]) -> _T:
    """``fields[key]``, checked to be a ``kind`` (an int passes for a float, a bool never for an int).

    Raises:
        WireError: the key is missing or of another type.
    """
    value: Any = fields.get(key)
    if type(value) is kind:
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise WireError(f"expected {key!r} to be {kind.__name__}, got {type(value).__name__}")
    return value


def prompt_fields(prompt: Prompt) -> dict[str, Any]:
    return {
        "position": prompt.position,
        "row": prompt.row,
        "epoch": prompt.epoch,
        "messages": [dict(m) for m in prompt.messages],
        "reward_data": dict(prompt.reward_data),
    }


def prompt_from_fields(fields: Mapping[str, Any]) -> Prompt:
    messages = field(fields, "messages", list)
    if not all(isinstance(m, dict) for m in messages):
        raise WireError("expected 'messages' to be a list of maps")
    return Prompt(
        position=field(fields, "position", int),
        row=field(fields, "row", int),
        epoch=field(fields, "epoch", int),
        messages=tuple(messages),
        reward_data=field(fields, "reward_data", dict),
    )


def leases_fields(leases: Iterable[Lease]) -> dict[str, Any]:
    """``samplings`` are the different ones, of which each lease names its own by index: mostly all have the same."""
    samplings: dict[Sampling, int] = {}
    # Spelled out: a loop over the names, or ``asdict``, would cost four to twenty times as much, for every lease.
    entries = [
        {
            "lease_id": lease.lease_id,
            "kind": lease.kind,
            "prompt": prompt_fields(lease.prompt),
            "group_size": lease.group_size,
            "sampling": samplings.setdefault(lease.sampling, len(samplings)),
            "lineage": lease.lineage,
            "min_version": lease.min_version,
            "max_staleness": lease.max_staleness,
            "attempt": lease.attempt,
            "seed": lease.seed,
        }
        for lease in leases
    ]
    return {"leases": entries, "samplings": [_sampling_fields(sampling) for sampling in samplings]}


def leases_from_fields(fields: Mapping[str, Any]) -> tuple[Lease, ...]:
    """The inverse of ``leases_fields``.

    Raises:
        WireError: something is missing or of the wrong kind.
    """
    samplings = [_sampling_from_fields(entry) for entry in field(fields, "samplings", list)]
    return tuple(_lease_from_fields(entry, samplings) for entry in field(fields, "leases", list))


def _sampling_fields(sampling: Sampling) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in Sampling.__slots__} | {"stop": list(sampling.stop)}


def _sampling_from_fields(fields: Mapping[str, Any]) -> Sampling:
    return Sampling(
        temperature=field(fields, "temperature", float),
        top_p=field(fields, "top_p", float),
        top_k=field(fields, "top_k", int),
        max_new_tokens=field(fields, "max_new_tokens", int),
        max_prompt_tokens=field(fields, "max_prompt_tokens", int),
        stop=tuple(field(fields, "stop", list)),
    )


def _lease_from_fields(fields: Mapping[str, Any], samplings: Sequence[Sampling]) -> Lease:
    kind, sampling = field(fields, "kind", str), field(fields, "sampling", int)
    if not 0 <= sampling < len(samplings):
        raise WireError(f"expected one of {len(samplings)} samplings, got number {sampling}")
    if kind not in ("train", "eval"):
        raise WireError(f"expected a lease of kind 'train' or 'eval', got {reprlib.repr(kind)}")
    return Lease(
        lease_id=field(fields, "lease_id", str),
        kind=kind,
        prompt=prompt_from_fields(field(fields, "prompt", dict)),
        group_size=field(fields, "group_size", int),
        sampling=samplings[sampling],
        lineage=field(fields, "lineage", str),
        min_version=field(fields, "min_version", int),
        max_staleness=field(fields, "max_staleness", int),
        attempt=field(fields, "attempt", int),
        seed=field(fields, "seed", int),
    )


def encode_group(group: Group) -> bytes:
    """The group as a frame of its own, so that the queue can keep and hand on its bytes unread.

    Rollouts travel as columns, as ``FlatGroup`` has them: a fixed number of lists is packed, checked and summed up
    much faster than a map for each.
    """
    rollouts = group.rollouts
    sequences = [s for r in rollouts for s in r.sequences]
    names = dict.fromkeys(name for r in rollouts for name in r.reward_parts)
    fields = {
        "lease_id": group.lease_id,
        "kind": group.kind,
        "position": group.position,
        "generator_id": group.generator_id,
        "lineage": group.lineage,
        "temperature": group.temperature,
        "weights_digest": dict(group.weights_digest),
        "sampling_time_s": group.sampling_time_s,
        "num_sequences": [len(r.sequences) for r in rollouts],
        "lengths": [len(s.token_ids) for s in sequences],
        "reward_parts": {name: [r.reward_parts.get(name) for r in rollouts] for name in names},
        "accuracy": [r.accuracy for r in rollouts],
        "finish_reason": [r.finish_reason for r in rollouts],
        "extracted": [r.extracted for r in rollouts],
    }
    if any(r.turns for r in rollouts):
        turns = [turn for r in rollouts for turn in r.turns]
        fields["turns"] = {
            "counts": [len(r.turns) for r in rollouts],
            "num_tokens": [turn.num_tokens for turn in turns],
            "rewards": [turn.reward for turn in turns],
            "scores": [turn.score for turn in turns],
        }
    arrays = [
        _column("<i4", [s.token_ids for s in sequences]),
        _column("|b1", [s.loss_mask for s in sequences]),
        _column("<f4", [s.behavior_logprobs for s in sequences]),
        _column("<i4", [s.versions for s in sequences]),
    ]
    kept = [s.kept for s in sequences if s.kept is not None]
    if kept:
        if len(kept) != len(sequences):
            raise ValueError(f"expected kept tokens of all {len(sequences)} sequences or of none, got {len(kept)}")
        arrays += [_column("<i4", [k.sizes for k in kept]), _column("<i4", [k.words for k in kept])]
    return encode("group", fields, arrays)


def _column(dtype: str, arrays: Iterable[np.ndarray]) -> Pieces:
    return Pieces(dtype, [np.ascontiguousarray(array, dtype).data for array in arrays])


@dataclass(frozen=True, slots=True, eq=False)
class FlatGroup:
    """A group's message as it came, everything in it checked. R rollouts of S sequences with T tokens in all.

    Attributes:
        fields: by name, those of ``Group`` that are neither its rollouts nor made of them.
        num_sequences: [R], adds up to S.
        lengths: [S], tokens of each sequence, adds up to T.
        reward_parts: by name [R], None for a rollout without that part. Numbers may be int or float, here and below.
        accuracy: [R].
        finish_reason: [R].
        extracted: [R].
        token_ids: int32 [T], like the others a view into the frame, and sequence behind sequence.
        loss_mask: bool [T].
        behavior_logprobs: float32 [T].
        versions: int32 [T].
        kept: of the tokens under the mask; None where nothing was left out.
        turns: [R], of each rollout; all empty where no environment played.
    """

    fields: Mapping[str, Any]
    num_sequences: list[int]
    lengths: list[int]
    reward_parts: dict[str, list[float | None]]
    accuracy: list[float]
    finish_reason: list[FinishReason]
    extracted: list[str | None]
    token_ids: Int32Array
    loss_mask: BoolArray
    behavior_logprobs: Float32Array
    versions: Int32Array
    kept: KeptTokens | None
    turns: list[tuple[Turn, ...]]

    @property
    def num_rollouts(self) -> int:
        return len(self.num_sequences)


def decode_group(frame: bytes | bytearray | memoryview, limits: Limits = DEFAULT_LIMITS) -> Group:
    """The group in ``frame``; its arrays are views into it.

    Raises:
        WireError: the frame is malformed or its lengths, dtypes or values don't fit together.
    """
    flat = decode_flat_group(frame, limits)
    token_ids, loss_mask, logprobs, versions = flat.token_ids, flat.loss_mask, flat.behavior_logprobs, flat.versions
    kept = _kept_by_sequence(flat)
    sequences: list[TokenSequence] = []
    start = 0
    for length, of_sequence in zip(flat.lengths, kept, strict=True):
        at = slice(start, start + length)
        sequences.append(TokenSequence(token_ids[at], loss_mask[at], logprobs[at], versions[at], of_sequence))
        start = at.stop
    rollouts: list[Rollout] = []
    first = 0
    for index, count in enumerate(flat.num_sequences):
        parts = {name: float(v) for name, values in flat.reward_parts.items() if (v := values[index]) is not None}
        rollouts.append(
            Rollout(
                sequences=tuple(sequences[first : first + count]),
                reward_parts=parts,
                accuracy=float(flat.accuracy[index]),
                finish_reason=flat.finish_reason[index],
                extracted=flat.extracted[index],
                turns=flat.turns[index],
            )
        )
        first += count
    return Group(rollouts=tuple(rollouts), **flat.fields)


def _kept_by_sequence(flat: FlatGroup) -> Sequence[KeptTokens | None]:
    if flat.kept is None:
        return [None] * len(flat.lengths)
    ends = np.concatenate([[0], np.cumsum(flat.loss_mask)])[np.cumsum(flat.lengths)]
    return split(flat.kept, np.diff(ends, prepend=0).tolist())


def decode_flat_group(frame: bytes | bytearray | memoryview, limits: Limits = DEFAULT_LIMITS) -> FlatGroup:
    """The group in ``frame``, not taken apart: for whoever needs only a few facts of it.

    Raises:
        WireError: where ``decode_group`` does.
    """
    message = decode(frame, limits)
    fields, arrays = message.fields, message.arrays
    if message.type != "group" or len(arrays) not in (4, 6):
        raise WireError(
            f"expected a 'group' message with 4 or 6 arrays, got {reprlib.repr(message.type)} with {len(arrays)}"
        )
    num_tokens = arrays[0].size
    for array, dtype in zip(arrays[:4], _COLUMN_DTYPES, strict=True):
        if array.dtype != dtype or array.shape != (num_tokens,):
            raise WireError("expected four flat arrays of one length: int32, bool, float32, int32")
    # Sums of other bytes would count tokens that are not there.
    if num_tokens and arrays[1].view(np.uint8).max() > 1:
        raise WireError("expected a mask of bytes 0 and 1")
    num_sequences, lengths = field(fields, "num_sequences", list), field(fields, "lengths", list)
    _check_counts("lengths", lengths, num_tokens)
    _check_counts("num_sequences", num_sequences, len(lengths))
    reward_parts = field(fields, "reward_parts", dict)
    num_rollouts = len(num_sequences)
    for name, values in reward_parts.items():
        if type(name) is not str:
            raise WireError("expected 'reward_parts' to map names to lists of numbers")
        _check_column(f"reward_parts.{name}", values, num_rollouts, _NUMBERS_OR_NONE)
    _check_column("accuracy", fields.get("accuracy"), num_rollouts, _NUMBERS)
    _check_column("extracted", fields.get("extracted"), num_rollouts, _TEXTS_OR_NONE)
    _check_column("finish_reason", fields.get("finish_reason"), num_rollouts, _TEXTS)
    if unknown := set(fields["finish_reason"]) - FINISH_REASONS:
        raise WireError(f"unknown finish reason {reprlib.repr(unknown.pop())}")
    return FlatGroup(
        _group_fields(fields), num_sequences, lengths, reward_parts, fields["accuracy"], fields["finish_reason"],
        fields["extracted"], *arrays[:4], kept=None if len(arrays) == 4 else _kept(arrays),
        turns=_turns(fields, num_rollouts),
    )  # fmt: skip


def _turns(fields: Mapping[str, Any], num_rollouts: int) -> list[tuple[Turn, ...]]:
    if "turns" not in fields:
        return [()] * num_rollouts
    columns = field(fields, "turns", dict)
    counts, num_tokens = field(columns, "counts", list), field(columns, "num_tokens", list)
    _check_counts("turns.counts", counts, len(num_tokens))
    if len(counts) != num_rollouts:
        raise WireError(f"expected 'turns.counts' of {num_rollouts} rollouts, got {len(counts)}")
    _check_column("turns.num_tokens", num_tokens, len(num_tokens), _INTEGERS_ONLY)
    scored = [field(columns, name, list) for name in ("rewards", "scores")]
    for values in scored:
        _check_column("turns.rewards and scores", values, len(num_tokens), _NUMBERS)
    turns = iter([Turn(n, float(r), float(s)) for n, r, s in zip(num_tokens, *scored, strict=True)])
    return [tuple(islice(turns, count)) for count in counts]


def _kept(arrays: Sequence[np.ndarray]) -> KeptTokens:
    sizes, words = arrays[4:]
    if sizes.dtype != _COLUMN_DTYPES[0] or words.dtype != _COLUMN_DTYPES[0]:
        raise WireError(f"expected kept tokens as int32, got {sizes.dtype} and {words.dtype}")
    if fault := why_malformed(sizes, words, int(np.count_nonzero(arrays[1]))):
        raise WireError(fault)
    return KeptTokens(sizes, words)


def _check_counts(name: str, counts: list[Any], total: int) -> None:
    if (counts and (set(map(type, counts)) != _INTEGERS or min(counts) < 0)) or sum(counts) != total:
        raise WireError(f"expected {name!r} to be counts that add up to {total}, got {reprlib.repr(counts)}")


def _check_column(name: str, values: Any, length: int, types: frozenset[type]) -> None:
    if type(values) is not list or len(values) != length or not types.issuperset(map(type, values)):
        allowed = " or ".join(sorted(t.__name__ for t in types))
        raise WireError(f"expected {name!r} to be a list of {length} {allowed}, got {reprlib.repr(values)}")


def _group_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    kind = field(fields, "kind", str)
    if kind not in ("train", "eval"):
        raise WireError(f"expected a group of kind 'train' or 'eval', got {reprlib.repr(kind)}")
    digests = field(fields, "weights_digest", dict)
    for version, digest in digests.items():
        if not isinstance(version, int) or not isinstance(digest, str):
            raise WireError("expected 'weights_digest' to map versions to digests")
    return {
        "lease_id": field(fields, "lease_id", str),
        "kind": kind,
        "position": field(fields, "position", int),
        "generator_id": field(fields, "generator_id", str),
        "lineage": field(fields, "lineage", str),
        "temperature": field(fields, "temperature", float),
        "weights_digest": digests,
        "sampling_time_s": field(fields, "sampling_time_s", float),
    }
