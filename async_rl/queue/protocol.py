"""Queue messages as plain wire fields and back: what the server and its clients must agree on. No sockets.

Every request carries ``request_id``; its reply carries the same. Any reply to a generator may carry ``announcement``,
``cancelled`` and ``finished`` (a ``notice``); a message of type ``notice`` without ``request_id`` carries only those.
The server hands what it has to say to one peer to the socket in one go, as the frames of one multipart message; its
reader takes them one by one, and each is a message of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from async_rl.codec import field, leases_fields, leases_from_fields
from async_rl.errors import WireError
from async_rl.queue.messages import (
    Announcement,
    GeneratorStats,
    LeasesGranted,
    NotReady,
    QueueStats,
    TrainedFacts,
)

RECEIVE_HIGH_WATER_MARK = 64
"""Messages of one peer that may wait in memory."""
EXTRA_MESSAGE_BYTES = 256 << 20
"""What a message may be larger than the queue: tokenizer files and headers."""
MAX_NAME_LENGTH = 256
MAX_PROBE_BYTES = 32 << 10
"""Of a probe, which goes out with every notice while its version is the newest; and of an answer to one."""


def as_array(data: bytes | bytearray | memoryview) -> np.ndarray:
    """Bytes as uint8 [N], a view."""
    return np.frombuffer(data, np.uint8)


def announcement_fields(announcement: Announcement) -> dict[str, Any]:
    return _flat(announcement)


def stats_fields(stats: QueueStats) -> dict[str, Any]:
    return {**_flat(stats), "generators": _flat(stats.generators)}


def _flat(record: Announcement | GeneratorStats | QueueStats) -> dict[str, Any]:
    """The record's fields as they are. ``asdict`` would copy them deeply, on every message."""
    return {name: getattr(record, name) for name in type(record).__slots__}


def stats_from_fields(fields: Mapping[str, Any]) -> QueueStats:
    known = {name: fields[name] for name in QueueStats.__slots__ if name in fields}
    known["generators"] = generator_stats_from_fields(field(fields, "generators", dict))
    known["roster"] = strings(known.get("roster", []))
    return _built(QueueStats, known)


def generator_stats_from_fields(fields: Mapping[str, Any]) -> GeneratorStats:
    numbers = {name: fields[name] for name in GeneratorStats.__slots__ if name in fields}
    if not all(isinstance(value, int | float) for value in numbers.values()):
        raise WireError("expected generator statistics to be numbers")
    return GeneratorStats(**numbers)


def announcement_from_fields(fields: Mapping[str, Any]) -> Announcement:
    return Announcement(
        lineage=field(fields, "lineage", str),
        version=field(fields, "version", int),
        digest=field(fields, "digest", str),
        channel=field(fields, "channel", str),
        probe=field(fields, "probe", bytes),
    )


def granted_fields(granted: LeasesGranted) -> dict[str, Any]:
    return {**leases_fields(granted.leases), "reason": granted.reason, "activate": granted.activate}


def granted_from_fields(fields: Mapping[str, Any]) -> LeasesGranted:
    activate = fields.get("activate")
    if activate is not None and not isinstance(activate, int):
        raise WireError(f"expected 'activate' to be a version or nothing, got {activate!r}")
    return LeasesGranted(leases_from_fields(fields), field(fields, "reason", str), activate)


def not_ready_fields(answer: NotReady) -> dict[str, Any]:
    return {
        "reason": answer.reason,
        "stats": stats_fields(answer.stats),
        "stop": answer.stop,
        "exhausted": answer.exhausted,
    }


def not_ready_from_fields(fields: Mapping[str, Any]) -> NotReady:
    return NotReady(
        reason=field(fields, "reason", str),
        stats=stats_from_fields(field(fields, "stats", dict)),
        stop=field(fields, "stop", str),
        exhausted=field(fields, "exhausted", bool),
    )


def facts_fields(facts: TrainedFacts) -> dict[str, Any]:
    return {
        **asdict(facts),
        "rollouts_masked": dict(facts.rollouts_masked),
        "tokens_masked": dict(facts.tokens_masked),
    }


def facts_from_fields(fields: Mapping[str, Any]) -> TrainedFacts:
    return TrainedFacts(
        stepped=field(fields, "stepped", bool),
        rollouts_trained=field(fields, "rollouts_trained", int),
        rollouts_masked=counts(field(fields, "rollouts_masked", dict)),
        tokens_trained=field(fields, "tokens_trained", int),
        tokens_masked=counts(field(fields, "tokens_masked", dict)),
    )


def name(fields: Mapping[str, Any], key: str) -> str:
    """A name that the server keeps, and so a short one."""
    value = field(fields, key, str)
    if len(value) > MAX_NAME_LENGTH:
        raise WireError(f"expected {key!r} to be at most {MAX_NAME_LENGTH} characters, got {len(value)}")
    return value


def counts(fields: Mapping[Any, Any]) -> dict[str, int]:
    """A map of names to counts, checked."""
    if not all(isinstance(k, str) and isinstance(v, int) and v >= 0 for k, v in fields.items()):
        raise WireError("expected a map of names to counts")
    return dict(fields)


def eval_keys(items: Iterable[Any]) -> list[tuple[str, int]]:
    """(dataset, step) pairs, checked."""
    keys: list[tuple[str, int]] = []
    for item in items:
        match item:
            case [str(dataset), int(step)]:
                keys.append((dataset, step))
            case _:
                raise WireError(f"expected [dataset, step], got {item!r}")
    return keys


def strings(items: Iterable[Any]) -> tuple[str, ...]:
    """A list of text, checked."""
    values = tuple(items)
    if not all(isinstance(value, str) for value in values):
        raise WireError("expected a list of text")
    return values


def _built(kind: type[QueueStats], known: Mapping[str, Any]) -> QueueStats:
    try:
        return kind(**known)
    except TypeError as error:
        raise WireError(f"queue statistics are incomplete: {error}") from error
