"""Records to messages and back: the only place that knows how a ``Lease`` or a ``Group`` looks on the wire."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import numpy as np

from async_rl.errors import WireError
from async_rl.records import Group, Lease, Prompt, Rollout, Sampling, TokenSequence
from async_rl.wire import DEFAULT_LIMITS, Limits, decode, encode

_T = TypeVar("_T")


def field(fields: Mapping[str, Any], key: str, kind: type[_T]) -> _T:
    """``fields[key]``, checked to be a ``kind`` (an int passes for a float, a bool never for an int).

    Raises:
        WireError: the key is missing or of another type.
    """
    value: Any = fields.get(key)
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
    fields["sampling"] = {**asdict(lease.sampling), "stop": list(lease.sampling.stop)}
    return fields


def lease_from_fields(fields: Mapping[str, Any]) -> Lease:
    sampling = field(fields, "sampling", dict)
    kind = field(fields, "kind", str)
    if kind not in ("train", "eval"):
        raise WireError(f"expected a lease of kind 'train' or 'eval', got {kind!r}")
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
        _joined((s.token_ids for s in sequences), np.int32),
        _joined((s.loss_mask for s in sequences), np.bool_),
        _joined((s.behavior_logprobs for s in sequences), np.float32),
        _joined((s.versions for s in sequences), np.int32),
    ]
    return encode("group", fields, arrays)


def _joined(arrays: Iterable[np.ndarray], dtype: type) -> np.ndarray:
    parts = list(arrays)
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)


def decode_group(frame: bytes | memoryview, limits: Limits = DEFAULT_LIMITS) -> Group:
    """The group in ``frame``; its arrays are views into it.

    Raises:
        WireError: the frame is malformed or its lengths, dtypes or values don't fit together.
    """
    message = decode(frame, limits)
    if message.type != "group" or len(message.arrays) != 4:
        raise WireError(f"expected a 'group' message with 4 arrays, got {message.type!r} with {len(message.arrays)}")
    fields, columns = message.fields, message.arrays
    expected = ("<i4", "|b1", "<f4", "<i4")
    if any(
        a.dtype.str != d or a.ndim != 1 or len(a) != len(columns[0]) for a, d in zip(columns, expected, strict=True)
    ):
        raise WireError("expected four flat arrays of one length: int32, bool, float32, int32")
    rollouts: list[Rollout] = []
    start = 0
    for entry in field(fields, "rollouts", list):
        rollout, start = _rollout(entry, columns, start)
        rollouts.append(rollout)
    if start != len(columns[0]):
        raise WireError(f"sequence lengths add up to {start} tokens, arrays have {len(columns[0])}")
    kind = field(fields, "kind", str)
    if kind not in ("train", "eval"):
        raise WireError(f"expected a group of kind 'train' or 'eval', got {kind!r}")
    digests = field(fields, "weights_digest", dict)
    if not all(isinstance(k, int) and isinstance(v, str) for k, v in digests.items()):
        raise WireError("expected 'weights_digest' to map versions to digests")
    return Group(
        lease_id=field(fields, "lease_id", str),
        kind=kind,
        position=field(fields, "position", int),
        generator_id=field(fields, "generator_id", str),
        lineage=field(fields, "lineage", str),
        temperature=field(fields, "temperature", float),
        rollouts=tuple(rollouts),
        weights_digest=digests,
        sampling_time_s=field(fields, "sampling_time_s", float),
    )


def _rollout(entry: Any, columns: Sequence[np.ndarray], start: int) -> tuple[Rollout, int]:
    if not isinstance(entry, dict):
        raise WireError(f"expected a rollout to be a map, got {type(entry).__name__}")
    sequences: list[TokenSequence] = []
    for length in field(entry, "lengths", list):
        if not isinstance(length, int) or length < 0 or start + length > len(columns[0]):
            raise WireError(f"impossible sequence length {length!r} at token {start} of {len(columns[0])}")
        token_ids, loss_mask, logprobs, versions = (column[start : start + length] for column in columns)
        sequences.append(TokenSequence(token_ids, loss_mask, logprobs, versions))
        start += length
    parts = field(entry, "reward_parts", dict)
    if not all(isinstance(k, str) and isinstance(v, int | float) for k, v in parts.items()):
        raise WireError("expected 'reward_parts' to map names to numbers")
    finish_reason = field(entry, "finish_reason", str)
    if finish_reason not in ("stop", "length", "error"):
        raise WireError(f"unknown finish reason {finish_reason!r}")
    extracted = entry.get("extracted")
    if extracted is not None and not isinstance(extracted, str):
        raise WireError("expected 'extracted' to be text or nothing")
    rollout = Rollout(
        sequences=tuple(sequences),
        reward_parts={k: float(v) for k, v in parts.items()},
        accuracy=field(entry, "accuracy", float),
        finish_reason=finish_reason,
        extracted=extracted,
    )
    return rollout, start
