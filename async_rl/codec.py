"""Records to messages and back: the only place that knows how a ``Lease`` or a ``Group`` looks on the wire."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from async_rl.errors import WireError
from async_rl.records import (
    BoolArray,
    Float32Array,
    Group,
    Int32Array,
    Lease,
    Prompt,
    Rollout,
    Sampling,
    TokenSequence,
)
from async_rl.wire import DEFAULT_LIMITS, Limits, Pieces, decode, encode_pieces

_T = TypeVar("_T")
_COLUMN_DTYPES = ("<i4", "|b1", "<f4", "<i4")
_NUMBER = (int, float)


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


def lease_fields(lease: Lease) -> dict[str, Any]:
    fields = {name: getattr(lease, name) for name in Lease.__slots__}
    fields["prompt"] = prompt_fields(lease.prompt)
    sampling = lease.sampling
    # ``asdict`` would cost ten times as much, for every lease.
    fields["sampling"] = {name: getattr(sampling, name) for name in Sampling.__slots__}
    fields["sampling"]["stop"] = list(sampling.stop)
    return fields


def lease_from_fields(fields: Mapping[str, Any]) -> Lease:
    sampling = field(fields, "sampling", dict)
    kind = field(fields, "kind", str)
    if kind not in ("train", "eval"):
        raise WireError(f"expected a lease of kind 'train' or 'eval', got {reprlib.repr(kind)}")
    return Lease(
        lease_id=field(fields, "lease_id", str),
        kind=kind,
        prompt=prompt_from_fields(field(fields, "prompt", dict)),
        group_size=field(fields, "group_size", int),
        sampling=Sampling(
            temperature=field(sampling, "temperature", float),
            top_p=field(sampling, "top_p", float),
            top_k=field(sampling, "top_k", int),
            max_new_tokens=field(sampling, "max_new_tokens", int),
            max_prompt_tokens=field(sampling, "max_prompt_tokens", int),
            stop=tuple(field(sampling, "stop", list)),
        ),
        lineage=field(fields, "lineage", str),
        min_version=field(fields, "min_version", int),
        max_staleness=field(fields, "max_staleness", int),
        attempt=field(fields, "attempt", int),
        seed=field(fields, "seed", int),
    )


def encode_group(group: Group) -> bytes:
    """The group as a frame of its own, so that the queue can keep and hand on its bytes unread."""
    return b"".join(group_pieces(group).pieces)


def group_pieces(group: Group) -> Pieces:
    """``encode_group`` for the inside of another frame: nothing is copied before that one is put together."""
    sequences = [s for r in group.rollouts for s in r.sequences]
    fields = {
        "lease_id": group.lease_id,
        "kind": group.kind,
        "position": group.position,
        "generator_id": group.generator_id,
        "lineage": group.lineage,
        "temperature": group.temperature,
        "weights_digest": dict(group.weights_digest),
        "sampling_time_s": group.sampling_time_s,
        "rollouts": [
            {
                "lengths": [len(s.token_ids) for s in r.sequences],
                "reward_parts": dict(r.reward_parts),
                "accuracy": r.accuracy,
                "finish_reason": r.finish_reason,
                "extracted": r.extracted,
            }
            for r in group.rollouts
        ],
    }
    arrays = [
        _column("<i4", [s.token_ids for s in sequences]),
        _column("|b1", [s.loss_mask for s in sequences]),
        _column("<f4", [s.behavior_logprobs for s in sequences]),
        _column("<i4", [s.versions for s in sequences]),
    ]
    return Pieces("|u1", encode_pieces("group", fields, arrays))


def _column(dtype: str, arrays: Iterable[np.ndarray]) -> Pieces:
    return Pieces(dtype, [np.ascontiguousarray(array, dtype).data for array in arrays])


@dataclass(frozen=True, slots=True, eq=False)
class FlatGroup:
    """A group's message as it came, everything in it checked. ``T`` is the number of tokens of all its sequences.

    Attributes:
        fields: by name, those of ``Group`` that are neither its rollouts nor made of them.
        rollouts: for each its ``lengths`` (of its sequences; over all rollouts they add up to T), ``reward_parts``,
            ``accuracy``, ``finish_reason`` and ``extracted``. Numbers may be int or float.
        token_ids: int32 [T], like the others a view into the frame, and sequence behind sequence.
        loss_mask: bool [T].
        behavior_logprobs: float32 [T].
        versions: int32 [T].
    """

    fields: Mapping[str, Any]
    rollouts: list[dict[str, Any]]
    token_ids: Int32Array
    loss_mask: BoolArray
    behavior_logprobs: Float32Array
    versions: Int32Array


def decode_group(frame: bytes | bytearray | memoryview, limits: Limits = DEFAULT_LIMITS) -> Group:
    """The group in ``frame``; its arrays are views into it.

    Raises:
        WireError: the frame is malformed or its lengths, dtypes or values don't fit together.
    """
    flat = decode_flat_group(frame, limits)
    token_ids, loss_mask, logprobs, versions = flat.token_ids, flat.loss_mask, flat.behavior_logprobs, flat.versions
    rollouts: list[Rollout] = []
    start = 0
    for entry in flat.rollouts:
        sequences: list[TokenSequence] = []
        for length in entry["lengths"]:
            end = start + length
            sequences.append(
                TokenSequence(token_ids[start:end], loss_mask[start:end], logprobs[start:end], versions[start:end])
            )
            start = end
        rollouts.append(
            Rollout(
                sequences=tuple(sequences),
                reward_parts={name: float(value) for name, value in entry["reward_parts"].items()},
                accuracy=float(entry["accuracy"]),
                finish_reason=entry["finish_reason"],
                extracted=entry.get("extracted"),
            )
        )
    return Group(rollouts=tuple(rollouts), **flat.fields)


def decode_flat_group(frame: bytes | bytearray | memoryview, limits: Limits = DEFAULT_LIMITS) -> FlatGroup:
    """The group in ``frame``, not taken apart: for whoever needs only a few facts of it.

    Raises:
        WireError: where ``decode_group`` does.
    """
    message = decode(frame, limits)
    fields, columns = message.fields, message.arrays
    if message.type != "group" or len(columns) != 4:
        raise WireError(
            f"expected a 'group' message with 4 arrays, got {reprlib.repr(message.type)} with {len(columns)}"
        )
    num_tokens = columns[0].size
    for column, dtype in zip(columns, _COLUMN_DTYPES, strict=True):
        if column.dtype.str != dtype or column.shape != (num_tokens,):
            raise WireError("expected four flat arrays of one length: int32, bool, float32, int32")
    # Sums of other bytes would count tokens that are not there.
    if num_tokens and columns[1].view(np.uint8).max() > 1:
        raise WireError("expected a mask of bytes 0 and 1")
    rollouts = field(fields, "rollouts", list)
    start = 0
    for entry in rollouts:
        start = _check_rollout(entry, start, num_tokens)
    if start != num_tokens:
        raise WireError(f"sequence lengths add up to {start} tokens, arrays have {num_tokens}")
    return FlatGroup(_group_fields(fields), rollouts, *columns)


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


def _check_rollout(entry: Any, start: int, num_tokens: int) -> int:
    """Where the rollout that begins at token ``start`` of ``num_tokens`` ends."""
    if not isinstance(entry, dict):
        raise WireError(f"expected a rollout to be a map, got {type(entry).__name__}")
    for length in field(entry, "lengths", list):
        if not isinstance(length, int) or not 0 <= length <= num_tokens - start:
            raise WireError(f"impossible sequence length {reprlib.repr(length)} at token {start} of {num_tokens}")
        start += length
    for name, value in field(entry, "reward_parts", dict).items():
        if not isinstance(name, str) or not isinstance(value, _NUMBER):
            raise WireError("expected 'reward_parts' to map names to numbers")
    finish_reason = field(entry, "finish_reason", str)
    if finish_reason not in ("stop", "length", "error"):
        raise WireError(f"unknown finish reason {reprlib.repr(finish_reason)}")
    extracted = entry.get("extracted")
    if extracted is not None and not isinstance(extracted, str):
        raise WireError("expected 'extracted' to be text or nothing")
    field(entry, "accuracy", float)
    return start
