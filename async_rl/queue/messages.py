"""Every message between the queue server and its clients, as records: sent as they are, checked by type on arrival.

One ROUTER socket serves everyone. Every request carries ``request_id``, and its reply carries the same id. A client
repeats a request under the same id until it is answered, so every handler is idempotent. Any reply to a generator may
also carry a notice (``announcement``, ``cancelled``, ``finished``); a message of type ``notice`` without
``request_id`` carries only that. Several messages to one peer may travel as the frames of one multipart message.
No torch, no sockets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec
import numpy as np

from async_rl.errors import WireError
from async_rl.net.codec import Count, field
from async_rl.records import Group, Lease, Prompt

RECEIVE_HIGH_WATER_MARK = 64
"""Messages of one peer that may wait in memory."""
MAX_NAME_LENGTH = 256

DropCause = Literal[
    "stale", "cancelled", "expired", "failed", "refused", "step_skipped", "rolled_back", "poison", "too_slow",
    "unused_at_end",
]  # fmt: skip
DROP_CAUSES: tuple[DropCause, ...] = get_args(DropCause)

Verdict = Literal["queued", "filtered", "duplicate", "stale", "unknown_lease", "old_lineage", "eval_done", "refused"]
"""What became of a returned group."""

FailureCause = Literal["prompt_too_long", "engine_error", "reward_error", "environment_error"]
"""Why a generator gives a lease back unsampled. A prompt that is too long is refused at once, never tried again."""


class Announcement(msgspec.Struct, frozen=True):
    """The newest published version. ``channel`` is the learner's weights address, ``digest`` the manifest's.

    ``probe`` is what generators are to score at this version (``parity.decode_probe``); empty: nothing.
    """

    lineage: str
    version: int
    digest: str
    channel: str
    probe: bytes = b""


class Welcome(msgspec.Struct, frozen=True):
    """Everything a stateless generator needs. ``files`` are the model config and the tokenizer, name -> bytes."""

    run_id: str
    config_toml: str
    files: Mapping[str, bytes]


class GeneratorStats(msgspec.Struct, frozen=True):
    """Cumulative since the generator started; seconds are wall-clock, sequence-seconds sum over running sequences."""

    max_running: int = 0
    wall_s: float = 0.0
    busy_s: float = 0.0
    busy_sequence_s: float = 0.0
    pause_s: float = 0.0
    num_activations: int = 0
    num_tokens: int = 0


class LeasesGranted(msgspec.Struct, frozen=True):
    """Answer to a lease request. With no lease, ``reason`` says what is waited for; ``activate`` names a version."""

    leases: tuple[Lease, ...]
    reason: str = ""
    activate: int | None = None


class Cancelled(msgspec.Struct, frozen=True):
    """These leases can't be trained any more: stop sampling them."""

    lease_ids: tuple[str, ...]


class Returned(msgspec.Struct, frozen=True):
    """What became of a returned (or failed) lease."""

    lease_id: str
    verdict: Verdict


class Announced(msgspec.Struct, frozen=True):
    """A version (or a learner) that the generator did not know."""

    announcement: Announcement


class Finished(msgspec.Struct, frozen=True):
    """The run is over; exit 0."""


GeneratorEvent = LeasesGranted | Cancelled | Returned | Announced | Finished


class TakenEntry(msgspec.Struct, frozen=True):
    """A taken group as its message has it, beside its encoded payload; see ``TakenGroup``."""

    prompt: Prompt
    queued_s: float
    arrival_version: int
    masked: bool


class TakenGroup(msgspec.Struct, frozen=True, eq=False):
    """A group handed to the learner. ``queued_s`` is its time in the queue; ``masked`` marks ``refill = false``.

    ``arrival_version`` is the newest announced version when the group arrived, so that staleness in flight
    (arrival_version - sampled version) and in the queue (trained version - arrival_version) can be told apart.
    """

    group: Group
    prompt: Prompt
    queued_s: float
    arrival_version: int
    masked: bool = False


class QueueStats(msgspec.Struct, frozen=True):
    """The queue at one instant. ``generators`` is the sum over those alive (``roster``) of their cumulative stats."""

    depth: int
    bytes: int
    in_flight: int
    num_generators: int
    generators: GeneratorStats
    ledger: Mapping[str, Any]
    prompts_too_long: int = 0
    epoch: int = 0
    roster: tuple[str, ...] = ()


class Batch(msgspec.Struct, frozen=True):
    """Answer to a take: exactly ``num_groups`` groups, in order of (named version, stream position)."""

    groups: tuple[TakenGroup, ...]


class NotReady(msgspec.Struct, frozen=True):
    """Answer to a take that can't be filled yet; ``reason`` is one line for the watchdog.

    ``stop`` is a diagnosis when the run can't go on; ``exhausted`` says that the stream has ended and fewer groups
    than a step needs are left.
    """

    reason: str
    stats: QueueStats
    stop: str = ""
    exhausted: bool = False


class TrainedCounts(msgspec.Struct, frozen=True):
    """What the learner did with a taken step, for the ledger of rollouts and tokens (sums over its groups).

    Every rollout and every received token of the step is trained or masked (by its first cause).
    """

    stepped: bool
    rollouts_trained: int
    rollouts_masked: Mapping[str, Count] = msgspec.field(default_factory=dict)
    tokens_trained: int = 0
    tokens_masked: Mapping[str, Count] = msgspec.field(default_factory=dict)


class StepAck(msgspec.Struct, frozen=True):
    """The step that was taken as ``step`` is done, and the learner is at ``version``.

    ``lease_bound`` is the staleness bound of leases from here on; if unset, ``queue.max_staleness``. With ``snapshot``
    the answer carries the queue's snapshot for a checkpoint.
    """

    lineage: str
    step: int
    version: int
    trained: TrainedCounts
    snapshot: bool = False
    lease_bound: int | None = None


class Acked(msgspec.Struct, frozen=True):
    """Answer to an ack. ``snapshot`` is opaque; the checkpoint keeps it and the next attach gives it back."""

    stats: QueueStats
    snapshot: bytes | None = None


class EvalResult(msgspec.Struct, frozen=True, eq=False):
    """One finished evaluation: every row's group with its prompt, in row order."""

    dataset: str
    step: int
    groups: tuple[tuple[Prompt, Group], ...]


def as_array(data: bytes | bytearray | memoryview) -> np.ndarray:
    """Bytes as uint8 [N], a view."""
    return np.frombuffer(data, np.uint8)


def name(fields: Mapping[str, Any], key: str) -> str:
    """A name that the server stores, and which is therefore short."""
    value = field(fields, key, str)
    if len(value) > MAX_NAME_LENGTH:
        raise WireError(f"expected {key!r} to be at most {MAX_NAME_LENGTH} characters, got {len(value)}")
    return value
