"""The queue's state as bytes for a checkpoint: where the stream is, which groups are queued, and the ledger so far.

One wire frame behind a checksum. The buffer writes it in the transaction that acks the checkpointed step, and reads
it when the next learner attaches. It names its groups; their bodies stay pinned in the queue's own store
(``pins.py``), and a group whose body is gone by then is sampled again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from async_rl.errors import QueueError, WireError
from async_rl.net.codec import field
from async_rl.net.wire import Limits, decode, encode
from async_rl.queue.core.stored_group import HeldGroup

_DIGEST_BYTES = 16
_LIMITS = Limits(max_bytes=1 << 40, max_header_bytes=1 << 30, max_arrays=1 << 24, max_items=1 << 24)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State right after the ack of ``step`` steps. ``again`` holds what was in flight too.

    ``data_digest`` names the training rows. ``attempts`` maps a position to its (failed, stale) attempts;
    ``set_aside`` an epoch to its prompts given up, ``set_aside_last`` the last of these to the cause.
    """

    lineage: str
    step: int
    version: int
    lease_bound: int
    data_digest: str
    position: int
    again: tuple[int, ...]
    attempts: Mapping[int, tuple[int, int]]
    set_aside: Mapping[int, int]
    set_aside_last: Mapping[int, str]
    filtered_since_step: int
    filtered_right_since_step: int
    prompts_too_long: int
    ledger: Mapping[str, Any]
    eval_ledger: Mapping[str, Any]
    groups: Sequence[HeldGroup]

    def encode(self, now: float) -> bytes:
        """Times inside are kept as ages at ``now``."""
        fields = {name: getattr(self, name) for name in self.__slots__ if name != "groups"}
        fields["groups"] = [{**g.facts(), "arrived_at": g.arrived_at - now} for g in self.groups]
        frame = bytes(encode("queue_snapshot", fields))
        return xxhash.xxh3_128_digest(frame) + frame

    @classmethod
    def decode(cls, data: bytes, now: float) -> Snapshot:
        """Raises QueueError: the bytes are damaged or not a snapshot."""
        digest, frame = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        if xxhash.xxh3_128_digest(frame) != digest:
            raise QueueError(
                f"the queue's snapshot of {len(data)} bytes does not match its checksum; resume from another checkpoint"
            )
        try:
            message = decode(frame, _LIMITS)
            if message.type != "queue_snapshot":
                raise WireError(f"expected a 'queue_snapshot', got {message.type!r}")
            return cls._from_fields(message.fields, now)
        except (WireError, TypeError, KeyError, ValueError) as error:
            raise QueueError(f"the queue's snapshot is whole but not understood: {error}") from error

    @classmethod
    def _from_fields(cls, fields: Mapping[str, Any], now: float) -> Snapshot:
        groups = [
            HeldGroup.from_facts({**facts, "arrived_at": now + facts["arrived_at"]})
            for facts in field(fields, "groups", list)
        ]
        return cls(
            lineage=field(fields, "lineage", str),
            step=field(fields, "step", int),
            version=field(fields, "version", int),
            lease_bound=field(fields, "lease_bound", int),
            data_digest=field(fields, "data_digest", str),
            position=field(fields, "position", int),
            again=tuple(field(fields, "again", list)),
            attempts={int(p): (int(a[0]), int(a[1])) for p, a in field(fields, "attempts", dict).items()},
            set_aside={int(e): int(n) for e, n in field(fields, "set_aside", dict).items()},
            set_aside_last={int(p): str(cause) for p, cause in field(fields, "set_aside_last", dict).items()},
            filtered_since_step=field(fields, "filtered_since_step", int),
            filtered_right_since_step=field(fields, "filtered_right_since_step", int),
            prompts_too_long=field(fields, "prompts_too_long", int),
            ledger=field(fields, "ledger", dict),
            eval_ledger=field(fields, "eval_ledger", dict),
            groups=groups,
        )
