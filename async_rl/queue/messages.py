"""All messages between the queue server and its clients, as records. The receiver checks the types of their fields.

First come records that several messages and the queue itself use, then the requests, grouped by sender, and the
replies, grouped by receiver. ``REQUESTS`` and ``REPLIES`` list the wire type of each.

One ROUTER socket serves all clients. Every request carries ``request_id``, and its reply carries the same id. A client
repeats a request under the same id until it is answered, so every handler is idempotent. Any reply to a generator may
also carry a notice (``announcement``, ``cancelled``, ``finished``); a message of type ``notice`` without
``request_id`` carries only that. Several messages to one peer may travel as the frames of one multipart message.
No torch, no sockets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

import msgspec

from async_rl.net.codec import Count
from async_rl.records import Group, Lease, Prompt

SAME_VERSION = "install the same version of async-rl on every machine"
"""The remedy in errors about a message that does not fit its record."""
RECEIVE_HIGH_WATER_MARK = 64
"""Maximum number of received messages of one peer that wait in memory."""
Name = Annotated[str, msgspec.Meta(max_length=256)]
"""A name that the server stores; its length is limited."""

DropCause = Literal[
    "stale", "cancelled", "expired", "failed", "refused", "step_skipped", "rolled_back", "poison", "too_slow",
    "unused_at_end",
]  # fmt: skip
DROP_CAUSES: tuple[DropCause, ...] = get_args(DropCause)

Verdict = Literal["queued", "filtered", "duplicate", "stale", "unknown_lease", "old_lineage", "eval_done", "refused"]
"""The outcome of a returned group."""

FailureCause = Literal["prompt_too_long", "engine_error", "reward_error", "environment_error"]
"""The reason why a generator returns a lease without a group. A prompt that is too long is not tried again."""


class Announcement(msgspec.Struct, frozen=True):
    """The newest published version. ``channel`` is the learner's weights address, ``digest`` its manifest's digest.

    ``probe`` holds tokens that generators must score at this version (``parity.decode_probe``). It may be empty.
    """

    lineage: str
    version: int
    digest: str
    channel: str
    probe: bytes = b""


class Welcome(msgspec.Struct, frozen=True):
    """The data that a generator needs to start. ``files`` has the model config and the tokenizer, name -> bytes."""

    run_id: str
    config_toml: str
    files: Mapping[str, bytes]


class GeneratorStats(msgspec.Struct, frozen=True):
    """Totals since the generator started. Times are wall-clock; ``busy_sequence_s`` is a sum over running sequences."""

    max_running: int = 0
    wall_s: float = 0.0
    busy_s: float = 0.0
    busy_sequence_s: float = 0.0
    pause_s: float = 0.0
    num_activations: int = 0
    num_tokens: int = 0


class LeasesGranted(msgspec.Struct, frozen=True):
    """Answer to a lease request.

    If no lease is granted, ``reason`` says why, and ``activate`` may name a version that the generator must activate.
    """

    leases: tuple[Lease, ...]
    reason: str = ""
    activate: int | None = None


class Cancelled(msgspec.Struct, frozen=True):
    """Leases that can't be trained any more. The generator must stop sampling them."""

    lease_ids: tuple[str, ...]


class Returned(msgspec.Struct, frozen=True):
    """The outcome of a returned or failed lease. ``why`` is the reason of a refusal; empty for other outcomes."""

    lease_id: str
    verdict: Verdict
    why: str = ""


class Announced(msgspec.Struct, frozen=True):
    """The queue announced a version, or a learner, that is new to this generator."""

    announcement: Announcement


class Finished(msgspec.Struct, frozen=True):
    """The run is over. The generator exits with code 0."""


GeneratorEvent = LeasesGranted | Cancelled | Returned | Announced | Finished


class TakenGroup(msgspec.Struct, frozen=True, eq=False):
    """A group that the learner took. ``queued_s`` is its time in the queue.

    ``masked``: its accuracy is outside ``queue.filter_range``, but ``queue.refill = false`` keeps it in the batch.
    ``arrival_version`` is the newest announced version when the group arrived, so that staleness in flight
    (arrival_version - sampled version) and in the queue (trained version - arrival_version) can be distinguished.
    """

    group: Group
    prompt: Prompt
    queued_s: float
    arrival_version: int
    masked: bool = False


class QueueStats(msgspec.Struct, frozen=True):
    """Statistics of the queue. ``generators`` is the sum over the generators in ``alive_generators`` (ids)."""

    depth: int
    bytes: int
    in_flight: int
    num_generators: int
    generators: GeneratorStats
    ledger: Mapping[str, Any]
    prompts_too_long: int = 0
    epoch: int = 0
    alive_generators: tuple[str, ...] = ()


class Batch(msgspec.Struct, frozen=True):
    """Answer to a take: exactly ``num_groups`` groups, in order of (named version, stream position)."""

    groups: tuple[TakenGroup, ...]


class NotReady(msgspec.Struct, frozen=True):
    """Answer to a take that can't be filled yet. ``reason`` is one line for the watchdog.

    ``stop`` says why the run can't continue; empty if it can. ``exhausted``: no further step can be filled, because the
    stream has ended or all steps are trained.
    """

    reason: str
    stats: QueueStats
    stop: str = ""
    exhausted: bool = False


class TrainedCounts(msgspec.Struct, frozen=True):
    """Counts of a trained step, for the ledger of rollouts and tokens (sums over its groups).

    Each rollout and each received token of the step counts as trained, or as masked under its first cause.
    """

    stepped: bool
    rollouts_trained: int
    rollouts_masked: Mapping[str, Count] = msgspec.field(default_factory=dict)
    tokens_trained: int = 0
    tokens_masked: Mapping[str, Count] = msgspec.field(default_factory=dict)


class Acked(msgspec.Struct, frozen=True):
    """Answer to an ack. ``snapshot`` is opaque: the checkpoint stores it, and the next attach sends it back."""

    stats: QueueStats
    snapshot: bytes | None = None


class EvalResult(msgspec.Struct, frozen=True, eq=False):
    """One finished evaluation: the prompt and the group of every row, in row order."""

    dataset: str
    step: int
    groups: tuple[tuple[Prompt, Group], ...]


class Envelope(msgspec.Struct, frozen=True):
    """Fields of every request in addition to those of its record. The reply repeats ``request_id``.

    ``secret`` proves, on a server without keys, that a generator's messages come from the owner of its id.
    """

    request_id: Name | None = None
    secret: Name = ""


# Requests of the learner.


class Attach(msgspec.Struct, frozen=True):
    """The sender takes over the queue. The parts are the ``files`` in order, then the snapshot if there is one."""

    run_id: str
    lineage: Name
    parent_lineage: Name
    fork_version: int
    step: int
    num_steps: int
    config_toml: str
    files: tuple[str, ...]
    has_snapshot: bool


class OfLearner(msgspec.Struct, frozen=True):
    """A request of a learner."""

    lineage: str


class Alive(OfLearner, frozen=True):
    """The learner is alive. No reply."""


class ConfirmLineage(OfLearner, frozen=True):
    """Confirm that the learner still owns the queue. If it does not, the reply is an error of kind "lineage"."""


class LearnerGoodbye(OfLearner, frozen=True):
    """The learner ends. The server waits ``experimental.linger_s`` for another learner."""


class Evaluate(OfLearner, frozen=True):
    """Evaluate a dataset of ``data.eval``. If ``exclusive``, no training lease is granted until it is done."""

    dataset: str
    step: int
    min_version: int
    exclusive: bool


class GetEvalResults(OfLearner, frozen=True):
    """Send the finished evaluations except those in ``received``, which the server may delete."""

    received: tuple[tuple[str, int], ...] = ()


class AwaitEval(OfLearner, frozen=True):
    """Wait for a finished evaluation that was not delivered yet."""


class Take(OfLearner, frozen=True):
    """Take the groups of the next step, after ``step`` steps. The learner trains them first at ``version``."""

    step: int
    version: int


class StepAck(msgspec.Struct, frozen=True):
    """The step that was taken as ``step`` is done, and the learner is at ``version``.

    ``lease_bound`` is the staleness bound of new leases; if unset, ``queue.max_staleness``. If ``snapshot``, the answer
    contains the queue's snapshot for a checkpoint.
    """

    lineage: str
    step: int
    version: int
    trained: TrainedCounts
    snapshot: bool = False
    lease_bound: int | None = None


class TakeSnapshot(OfLearner, frozen=True):
    """Request the queue's state between two steps, for a checkpoint."""


class CheckpointCommitted(OfLearner, frozen=True):
    """The checkpoint after ``step`` steps is complete. The server may delete groups that only older ones need."""

    step: int


class GetProbeAnswers(OfLearner, frozen=True):
    """Request every generator's newest probe answer, of version ``since`` or later."""

    since: int


class Quarantine(OfLearner, frozen=True):
    """Grant this generator no more leases, and drop its groups. ``reason`` is text for people."""

    generator_id: str
    reason: str


class Finish(OfLearner, frozen=True):
    """The run is over. The server notifies the generators."""


# Requests of generators.


class OfGenerator(msgspec.Struct, frozen=True):
    """A request of a generator."""

    generator_id: Name


class Hello(OfGenerator, frozen=True):
    """Register a generator. ``replaces`` names a dead generator, whose leases are requeued at once."""

    host: Name
    backend: Name
    replaces: Name | None = None


class LeaseRequest(OfGenerator, frozen=True):
    """Request up to ``max_leases`` leases. The generator samples with ``version`` of ``lineage``."""

    lineage: Name
    version: int
    max_leases: int


class Heartbeat(OfGenerator, frozen=True):
    """Report progress by lease. A lease expires if its progress does not grow for ``queue.lease_timeout_s``."""

    progress: dict[str, Count]
    stats: GeneratorStats


class ReturnGroups(OfGenerator, frozen=True):
    """Return finished groups. The parts are the encoded groups of these leases, in this order."""

    lease_ids: tuple[str, ...]


class FailLease(OfGenerator, frozen=True):
    """Return a lease without a group. ``detail`` is text for people."""

    lease_id: str
    cause: FailureCause
    detail: str


class AnswerProbe(OfGenerator, frozen=True):
    """The answer to a version's probe (``parity.encode_answer``)."""

    lineage: Name
    version: int
    answer: bytes


class Goodbye(OfGenerator, frozen=True):
    """A generator leaves. Its leases are requeued at once."""


# Requests of any client.


class Ping(msgspec.Struct, frozen=True):
    """Request the run id and the package versions of the server."""


class GetStatus(msgspec.Struct, frozen=True):
    """Request the full status of the queue, for people."""


# Replies to the learner. ``NotReady`` and ``Acked`` are above. A snapshot is sent as a part of an ``Acked``.


class Attached(msgspec.Struct, frozen=True):
    """The learner owns the queue."""

    run_id: str


class TakenEntry(msgspec.Struct, frozen=True):
    """Metadata of one taken group in a batch reply. The group itself is a separate message part.

    The fields mean the same as in ``TakenGroup``.
    """

    prompt: Prompt
    queued_s: float
    arrival_version: int
    masked: bool


class BatchPart(msgspec.Struct, frozen=True):
    """Groups ``first``, ``first + 1``, ... of a batch of ``num_groups`` groups. The parts are the encoded groups.

    If ``more``, further messages of the same reply follow.
    """

    groups: tuple[TakenEntry, ...]
    first: int
    num_groups: int
    more: bool


class EvalRow(msgspec.Struct, frozen=True):
    """A row of a finished evaluation. If ``answered``, a part has its group; if not, it could not be sampled."""

    prompt: Prompt
    answered: bool


class EvalEntry(msgspec.Struct, frozen=True):
    """One finished evaluation."""

    dataset: str
    step: int
    prompts: tuple[EvalRow, ...]


class EvalResults(msgspec.Struct, frozen=True):
    """Finished evaluations. The parts are the encoded groups of all answered rows, in order."""

    results: tuple[EvalEntry, ...]


class EvalWait(msgspec.Struct, frozen=True):
    """The reason why no evaluation can be delivered yet; empty if one can."""

    reason: str


class ProbeAnswers(msgspec.Struct, frozen=True):
    """Answers to probes. The parts are the encoded answers of these generators, in this order."""

    generators: tuple[str, ...]


# Replies to generators. ``LeasesGranted`` is above.


class WelcomeReply(msgspec.Struct, frozen=True):
    """A ``Welcome``. ``files`` lists file names; the parts are their contents, in the same order."""

    run_id: str
    config_toml: str
    files: tuple[str, ...]


class NotYet(msgspec.Struct, frozen=True):
    """No learner has attached yet."""

    reason: str


class HeartbeatReply(msgspec.Struct, frozen=True):
    """Answer to a heartbeat. The generator must stop sampling the ``cancelled`` leases."""

    cancelled: tuple[str, ...]


class ReturnReply(msgspec.Struct, frozen=True):
    """The outcomes of the returned or failed leases. ``why`` has the reason of each refusal."""

    verdicts: dict[str, Verdict]
    why: dict[str, str]


# Replies to any client.


class Ok(msgspec.Struct, frozen=True):
    """The request succeeded."""


class Pong(msgspec.Struct, frozen=True):
    """Answer to a ping. ``versions`` has the versions of the packages that are installed where the server runs."""

    run_id: str
    attached: bool
    versions: dict[str, str]


class Status(msgspec.Struct, frozen=True):
    """The status of the queue, as plain data for people."""

    status: dict[str, Any]


class ErrorReply(msgspec.Struct, frozen=True):
    """The request was refused. ``kind`` is "lineage", "wire" (malformed), "queue" or "internal" (a bug)."""

    kind: str
    message: str


LEARNER_REQUESTS: Mapping[str, type[msgspec.Struct]] = {
    "attach": Attach, "alive": Alive, "confirm": ConfirmLineage, "bye_learner": LearnerGoodbye,
    "announce": Announcement, "evaluate": Evaluate,
    "eval_results": GetEvalResults, "await_eval": AwaitEval, "take": Take, "ack": StepAck, "snapshot": TakeSnapshot,
    "checkpoint_committed": CheckpointCommitted, "quarantine": Quarantine, "finish": Finish,
    "parity_answers": GetProbeAnswers,
}  # fmt: skip
GENERATOR_REQUESTS: Mapping[str, type[msgspec.Struct]] = {
    "hello": Hello, "lease": LeaseRequest, "heartbeat": Heartbeat, "return": ReturnGroups, "fail": FailLease,
    "parity": AnswerProbe, "bye": Goodbye,
}  # fmt: skip
REQUESTS = {**LEARNER_REQUESTS, **GENERATOR_REQUESTS, "ping": Ping, "status": GetStatus}
REPLIES: Mapping[str, type[msgspec.Struct]] = {
    "attached": Attached, "batch": BatchPart, "not_ready": NotReady, "acked": Acked, "eval_results": EvalResults,
    "await_eval": EvalWait, "parity_answers": ProbeAnswers,
    "welcome": WelcomeReply, "not_yet": NotYet, "leases": LeasesGranted, "heartbeat": HeartbeatReply,
    "returned": ReturnReply,
    "ok": Ok, "pong": Pong, "status": Status, "error": ErrorReply,
}  # fmt: skip
WIRE_TYPES = {record: type_ for types in (REQUESTS, REPLIES) for type_, record in types.items()}
"""The wire type of every record that is a message."""
