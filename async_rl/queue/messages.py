"""All messages between the queue server and its clients, as records. The receiver checks the types of their fields.

First come records that several messages and the queue itself use, then the requests, grouped by sender, and the
replies, grouped by receiver. ``REQUESTS`` and ``REPLIES`` map the type name of each message to its record.

One ROUTER socket serves all clients. Every request has a ``request_id``, and its reply has the same id. A client
repeats a request with the same id until the reply comes, so every request may be handled more than once. Each reply to
a generator may also carry a notice: the fields ``announcement``, ``cancelled`` and ``finished``. A message of type
``notice`` has only these fields, and no ``request_id``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args

import msgspec

from async_rl.records import Count, Group, Lease, Prompt

RECEIVE_HIGH_WATER_MARK = 64
"""Maximum number of received messages of one peer that wait in the socket's memory."""
Name = Annotated[str, msgspec.Meta(max_length=256)]
"""The type of a name that the server stores. Its length is limited."""
MAX_COUNTERS = 64
"""Maximum number of counters that a generator reports."""
MAX_TOTAL = 2**53
"""The largest total that a generator may report, and the largest sum of them."""
Total = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOTAL)]
"""The type of a total that is a number of things."""
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_TOTAL)]
"""The type of a total that is a time."""
MAX_DECODED = 32
"""Maximum number of elements of ``GeneratorStats.decoded``: enough for any number of sequences."""
MAX_DETAIL = 2000
"""Maximum number of characters of the text with which a generator says why a lease or a rollout failed."""
MAX_TROUBLE = 1000
"""Maximum number of characters of the text with which a generator says what is wrong."""

DropCause = Literal[
    "stale", "cancelled", "expired", "failed", "refused", "step_skipped", "policy_frozen", "rolled_back", "poison",
    "too_slow", "unused_at_end",
]  # fmt: skip
DROP_CAUSES: tuple[DropCause, ...] = get_args(DropCause)

Verdict = Literal["queued", "filtered", "duplicate", "stale", "unknown_lease", "old_lineage", "eval_done", "refused"]
"""What became of a returned group."""

FailureCause = Literal[
    "prompt_too_long", "engine_error", "reward_error", "environment_error", "filter_error", "no_progress"
]
"""The reason why a generator returns a lease without a group. A prompt that is too long is not tried again."""


class Failure(msgspec.Struct, frozen=True):
    """Why a lease or a rollout failed.

    Attributes:
        cause: what failed.
        detail: the exception as text for people.
        place: where it was raised: equal failures have equal places.
        is_transient: whether it is a failure that may pass by itself (``process.transient``).
    """

    cause: FailureCause
    detail: Annotated[str, msgspec.Meta(max_length=MAX_DETAIL)]
    place: Annotated[str, msgspec.Meta(max_length=MAX_DETAIL)] = ""
    is_transient: bool = False

    def shortened(self) -> Failure:
        """Return the failure with its texts cut to what the queue accepts. An empty place becomes the detail."""
        detail = self.detail[:MAX_DETAIL]
        return Failure(self.cause, detail, self.place[:MAX_DETAIL] or detail, self.is_transient)


class FailedRollouts(msgspec.Struct, frozen=True):
    """Rollouts of a returned group that failed for the same reason. ``count`` is their number."""

    lease_id: str
    failure: Failure
    count: Count


class Announcement(msgspec.Struct, frozen=True):
    """The learner's message that it has published a new version of the weights.

    Attributes:
        lineage: the learner's id.
        version: the number of the version.
        digest: the digest of the version's manifest.
        channel: the address at which generators get the weights.
        probe: an encoded ``parity.Probe``, tokens that generators must score at this version. It may be empty.
        ports: the ports of the learner's machine to which generators connect for the weights. People read them in the
            status.
    """

    lineage: str
    version: int
    digest: str
    channel: str
    probe: bytes = b""
    ports: tuple[int, ...] = ()

    @property
    def address(self) -> str:
        """The channel's address alone, for texts: ``channel`` may also have the learner's public key."""
        return self.channel.partition(" ")[0]


class Welcome(msgspec.Struct, frozen=True):
    """The data that a generator needs to start.

    ``files`` maps the names of the model config and tokenizer files to their bytes.
    """

    run_id: str
    config_toml: str
    files: Mapping[str, bytes]


class Decoded(msgspec.Struct, frozen=True, array_like=True):
    """What a generator sampled while about as many sequences ran.

    Attributes:
        busy_s: the time in which it sampled.
        busy_sequence_s: the sum, over all sequences, of the time in which each was sampled.
        num_tokens: the number of sampled tokens.
    """

    busy_s: Seconds = 0.0
    busy_sequence_s: Seconds = 0.0
    num_tokens: Total = 0


class GeneratorStats(msgspec.Struct, frozen=True):
    """A generator's totals since it started. Times are in seconds of wall-clock time.

    Attributes:
        max_running: the number of sequences that it can sample at a time.
        wall_s: the time since it started.
        busy_s: the time in which it sampled.
        busy_sequence_s: the sum, over all sequences, of the time in which each was sampled.
        pause_s: the time in which it paused to activate versions.
        grading_s: the time in which at least one answer waited for its score.
        environment_s: the time in which at least one rollout waited for its environment.
        idle_grading_s: the part of ``grading_s`` in which it sampled nothing.
        idle_environment_s: the part of ``environment_s`` in which it sampled nothing.
        idle_weights_s: the time in which it sampled nothing and waited for a version of the weights.
        idle_leases_s: the time in which it sampled nothing and waited for a lease.
        num_activations: the number of activated versions.
        num_tokens: the number of sampled tokens.
        decoded: element i is what was sampled while 2^i to 2^(i + 1) - 1 sequences ran.
        counters: the counts of its rewards, by name (``Reward.counters``).
    """

    max_running: Total = 0
    wall_s: Seconds = 0.0
    busy_s: Seconds = 0.0
    busy_sequence_s: Seconds = 0.0
    pause_s: Seconds = 0.0
    grading_s: Seconds = 0.0
    environment_s: Seconds = 0.0
    idle_grading_s: Seconds = 0.0
    idle_environment_s: Seconds = 0.0
    idle_weights_s: Seconds = 0.0
    idle_leases_s: Seconds = 0.0
    num_activations: Total = 0
    num_tokens: Total = 0
    decoded: Annotated[tuple[Decoded, ...], msgspec.Meta(max_length=MAX_DECODED)] = ()
    counters: Annotated[dict[Name, Total], msgspec.Meta(max_length=MAX_COUNTERS)] = {}


GENERATOR_TOTALS = tuple(name for name in GeneratorStats.__struct_fields__ if name not in ("decoded", "counters"))
"""The fields that are numbers."""


class LeasesGranted(msgspec.Struct, frozen=True):
    """The reply to a lease request. It has the granted leases.

    If no lease is granted, ``reason`` says why, and ``activate`` may name a version that the generator must activate
    first.
    """

    leases: tuple[Lease, ...]
    reason: str = ""
    activate: int | None = None


class Cancelled(msgspec.Struct, frozen=True):
    """The ids of leases whose groups can't be trained any more. The generator must stop sampling them."""

    lease_ids: tuple[str, ...]


class Returned(msgspec.Struct, frozen=True):
    """What became of a lease that the generator returned.

    ``why`` is the reason if the group was refused, else empty.
    """

    lease_id: str
    verdict: Verdict
    why: str = ""


class Announced(msgspec.Struct, frozen=True):
    """The event that the queue has announced a version, or a learner, that is new to this generator."""

    announcement: Announcement


class Finished(msgspec.Struct, frozen=True):
    """The event that the run is over. The generator exits with code 0."""


GeneratorEvent = LeasesGranted | Cancelled | Returned | Announced | Finished


Body = TypeVar("Body")
NewBody = TypeVar("NewBody")


class Taken(msgspec.Struct, Generic[Body], frozen=True):
    """A group that the learner took, with its prompt.

    Attributes:
        group: the encoded group in the queue; None in a message, whose parts have the encoded groups; the group itself
            at the learner (``TakenGroup``).
        queued_s: the seconds that the group was in the queue.
        arrival_version: the newest announced version when the group arrived. It splits the staleness of a token into a
            part before the arrival (arrival_version - version of the token) and a part in the queue (trained version -
            arrival_version).
        masked: whether the queue's filter did not keep the group. With ``queue.refill = false`` such a
            group stays in the batch.
    """

    group: Body
    prompt: Prompt
    queued_s: float
    arrival_version: int
    masked: bool = False

    def with_group(self, group: NewBody) -> Taken[NewBody]:
        return Taken(group, self.prompt, self.queued_s, self.arrival_version, self.masked)


TakenGroup = Taken[Group]


class QueueStats(msgspec.Struct, frozen=True):
    """Statistics of the queue at one time.

    Attributes:
        depth: the number of groups that are ready.
        bytes: the size of the groups that are stored, evaluations included.
        in_flight: the number of groups that are being sampled.
        num_generators: the number of generators that are alive.
        generators: the sums of their decode steps and counters.
        ledger: all counts of the ledger, by name.
        prompts_too_long: the number of prompts that were excluded as too long.
        epoch: the epoch of the newest sampled prompt.
        reports: the last report of each of these generators, by id, without what is in ``generators``.
        metrics: metrics of ``data.curriculum`` and ``queue.run_ahead``, by name.
    """

    depth: int
    bytes: int
    in_flight: int
    num_generators: int
    generators: GeneratorStats
    ledger: Mapping[str, Any]
    prompts_too_long: int = 0
    epoch: int = 0
    reports: Mapping[str, GeneratorStats] = {}
    metrics: Mapping[str, float] = {}


class Batch(msgspec.Struct, frozen=True):
    """The reply to a take: the groups of one step, in the order of (named version, stream position)."""

    groups: tuple[TakenGroup, ...]


class NotReady(msgspec.Struct, frozen=True):
    """The reply to a take for which too few groups are ready.

    ``reason`` says in one line for what the learner waits, and why: "groups (0 of 32 are queued, 0 in flight): no
    generator is connected". If no step will follow, it says only why.
    ``stop`` says why the run can't continue; empty if it can. ``exhausted`` says whether no further step will be ready,
    because the data has ended or all steps are trained.
    """

    reason: str
    stats: QueueStats
    stop: str = ""
    exhausted: bool = False


class TrainedCounts(msgspec.Struct, frozen=True):
    """What the learner did with the rollouts and tokens of a step. The ledger counts them.

    Each rollout and each received token of the step is counted as trained, or as masked under its first cause.
    ``stepped`` is False if the optimizer step was skipped.
    """

    stepped: bool
    rollouts_trained: int
    rollouts_masked: Mapping[str, Count] = msgspec.field(default_factory=dict)
    tokens_trained: int = 0
    tokens_masked: Mapping[str, Count] = msgspec.field(default_factory=dict)


class Acked(msgspec.Struct, frozen=True):
    """The reply to the learner's report of a step, with statistics and, if requested, a snapshot of the queue.

    The learner stores the snapshot's bytes in its checkpoint without reading them, and sends them back in its next
    ``Attach``.
    """

    stats: QueueStats
    snapshot: bytes | None = None


class Evaluated(msgspec.Struct, Generic[Body], frozen=True, eq=False):
    """A finished evaluation: the prompt and the group of every row, in the order of the rows.

    In the queue a group is encoded, or None if its row could not be sampled. In a message it says whether a part has
    the encoded group. At the learner it is the group itself (``EvalResult``).
    """

    dataset: str
    step: int
    groups: tuple[tuple[Prompt, Body], ...]


EvalResult = Evaluated[Group]


class Envelope(msgspec.Struct, frozen=True):
    """The fields that every request has in addition to those of its record. The reply repeats ``request_id``.

    On a server without keys, ``secret`` proves that a generator's message comes from the owner of its id.
    """

    request_id: Name | None = None
    secret: Name = ""
    wait_s: float = 0.0


# Requests of the learner.


class Attach(msgspec.Struct, frozen=True):
    """The learner takes over the queue.

    The parts are the contents of ``files`` in order, then the snapshot if there is one.
    """

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
    """Base class of requests that only a learner sends. ``lineage`` is the learner's id."""

    lineage: str


class Alive(OfLearner, frozen=True):
    """The learner reports that it is alive, and what is wrong with it or its weights. The server sends no reply."""

    trouble: str = ""


class ConfirmLineage(OfLearner, frozen=True):
    """The learner asks whether it still owns the queue. If it does not, the reply is an error of kind "lineage".

    It is also an error if the queue does not know the version ``announced``, or one of ``evaluations``, pairs (dataset,
    step). That happens if the queue server was restarted, and its journal had lost its end.
    """

    announced: int | None = None
    evaluations: tuple[tuple[str, int], ...] = ()


class LearnerGoodbye(OfLearner, frozen=True):
    """The learner ends. The server waits ``queue.linger_s`` for another learner."""


class Evaluate(OfLearner, frozen=True):
    """The learner requests an evaluation of a dataset of ``data.eval``.

    If ``exclusive``, no training lease is granted until the evaluation is done.
    """

    dataset: str
    step: int
    min_version: int
    exclusive: bool


class GetEvalResults(OfLearner, frozen=True):
    """The learner requests all finished evaluations except those in ``received``, which the server may delete."""

    received: tuple[tuple[str, int], ...] = ()


class AwaitEval(OfLearner, frozen=True):
    """The learner waits for a finished evaluation whose answers have not been sent yet."""


class Take(OfLearner, frozen=True):
    """The learner requests the groups of its next step.

    It has done ``step`` steps, and trains the groups at ``version``.
    """

    step: int
    version: int


class StepAck(msgspec.Struct, frozen=True):
    """The learner reports that it has done the step for which it took groups as ``step``. It is now at ``version``.

    If ``snapshot`` is true, the reply has the queue's snapshot for a checkpoint. ``training_notes`` are all that the
    learner has noted so far about how the training goes wrong.
    """

    lineage: str
    step: int
    version: int
    trained: TrainedCounts
    snapshot: bool = False
    training_notes: tuple[str, ...] = ()


class TakeSnapshot(OfLearner, frozen=True):
    """The learner requests a snapshot of the queue between two steps, for a checkpoint."""


class CheckpointCommitted(OfLearner, frozen=True):
    """The learner reports that the checkpoint after ``step`` steps is complete.

    The server may delete the groups that only older checkpoints need.
    """

    step: int


class GetProbeAnswers(OfLearner, frozen=True):
    """The learner requests each generator's newest ``AnswerProbe`` of version ``since`` or later."""

    since: int


class Quarantine(OfLearner, frozen=True):
    """The learner requests that a generator gets no more leases, and that its groups are dropped.

    ``reason`` is for people. Empty: somebody with the learner's key requests that it gets leases again.
    """

    generator_id: str
    reason: str


class Finish(OfLearner, frozen=True):
    """The learner reports that the run is over. The server notifies the generators."""


# Requests of generators.


class OfGenerator(msgspec.Struct, frozen=True):
    """Base class of requests that only a generator sends."""

    generator_id: Name


DOCTOR = "doctor"
"""The ``Hello.backend`` of ``async-rl doctor --connect``, which joins as a generator does, but takes no leases."""


class Hello(OfGenerator, frozen=True):
    """A generator registers. If ``replaces`` names a dead generator, that generator's leases are requeued at once."""

    host: Name
    backend: Name
    replaces: Name | None = None


class LeaseRequest(OfGenerator, frozen=True):
    """A generator requests up to ``max_leases`` leases. Its weights are ``version`` of the learner ``lineage``."""

    lineage: Name
    version: int
    max_leases: int


class Heartbeat(OfGenerator, frozen=True):
    """A generator reports the number of sampled tokens of each lease, and its totals.

    A lease expires if its number does not grow for ``queue.lease_timeout_s``. ``trouble`` says why the generator gets
    no weights at present; empty if nothing is wrong.
    """

    progress: dict[str, Count]
    stats: GeneratorStats
    trouble: Annotated[str, msgspec.Meta(max_length=MAX_TROUBLE)] = ""


class ReturnGroups(OfGenerator, frozen=True):
    """A generator returns finished groups.

    The parts are the encoded groups of the leases ``lease_ids``, in this order. ``failed`` has the failures of single
    rollouts of these groups.
    """

    lease_ids: tuple[str, ...]
    failed: tuple[FailedRollouts, ...] = ()


class FailLease(OfGenerator, frozen=True):
    """A generator returns a lease without a group."""

    lease_id: str
    failure: Failure


class AnswerProbe(OfGenerator, frozen=True):
    """A generator sends its log-probabilities for the tokens of ``Announcement.probe``. The learner compares them.

    ``answer`` is an encoded ``parity.Answer``.
    """

    lineage: Name
    version: int
    answer: bytes


class Goodbye(OfGenerator, frozen=True):
    """A generator shuts down. The prompts of its leases are requeued at once."""


# Requests of any client.


class Ping(msgspec.Struct, frozen=True):
    """A client requests the server's run id and package versions."""


class GetStatus(msgspec.Struct, frozen=True):
    """A client requests the full status of the queue, for people."""


# Replies to the learner. ``NotReady`` and ``Acked`` are above. A snapshot is sent as a part of an ``Acked``.


class Attached(msgspec.Struct, frozen=True):
    """The reply to ``Attach``: the learner now owns the queue.

    ``shared`` has the server's values of the config keys on which both must agree (``shared_values``).
    """

    shared: dict[str, Any]


class BatchPart(msgspec.Struct, frozen=True):
    """Some groups of a batch: number ``first`` and the following of ``num_groups`` groups.

    The parts are the encoded groups. If ``more`` is true, further messages with groups of the same batch follow.
    """

    groups: tuple[Taken[None], ...]
    first: int
    num_groups: int
    more: bool


class EvalResults(msgspec.Struct, frozen=True):
    """The reply to ``GetEvalResults``: all finished evaluations.

    The parts are the encoded groups of their answered rows.
    """

    results: tuple[Evaluated[bool], ...]


class EvalWait(msgspec.Struct, frozen=True):
    """The reply to ``AwaitEval``: for what the learner waits, and why, as in ``NotReady``; empty if it need not wait.

    ``answered`` of ``rows`` rows of the running evaluations are answered. ``stop`` is the reason why they can't go on;
    empty if they can.
    """

    reason: str
    answered: int
    rows: int
    stop: str


class ProbeAnswers(msgspec.Struct, frozen=True):
    """The reply to ``GetProbeAnswers``: the generators' log-probabilities.

    The parts are the encoded ``parity.Answer`` of each of ``generators``, in this order.
    """

    generators: tuple[str, ...]


# Replies to generators. ``LeasesGranted`` is above.


class WelcomeReply(msgspec.Struct, frozen=True):
    """The reply to ``Hello``, with the fields of ``Welcome``.

    The parts are the contents of ``files``, in the same order.
    """

    run_id: str
    config_toml: str
    files: tuple[str, ...]


class NotYet(msgspec.Struct, frozen=True):
    """The reply to ``Hello`` if no learner has attached."""

    reason: str


class HeartbeatReply(msgspec.Struct, frozen=True):
    """The reply to a heartbeat. The generator must stop sampling the leases ``cancelled``."""

    cancelled: tuple[str, ...]


class ReturnReply(msgspec.Struct, frozen=True):
    """The reply to returned or failed leases: what became of each, by lease id, and why a group was refused."""

    verdicts: dict[str, Verdict]
    why: dict[str, str]


# Replies to any client.


class Ok(msgspec.Struct, frozen=True):
    """The reply that a request succeeded."""


class Pong(msgspec.Struct, frozen=True):
    """The reply to a ping.

    ``versions`` has the versions of the packages that are installed where the server runs. ``time_s`` is the server's
    clock, in seconds since 1970.
    """

    run_id: str
    attached: bool
    versions: dict[str, str]
    time_s: float


class Status(msgspec.Struct, frozen=True):
    """The reply to ``GetStatus``: the status of the queue, as plain data for people."""

    status: dict[str, Any]


class ErrorReply(msgspec.Struct, frozen=True):
    """The reply that a request was refused. ``message`` says why.

    ``kind`` is "lineage" (a newer learner owns the queue), "id_in_use" (another generator has this id), "wire"
    (malformed request), "queue" (refused for another reason) or "internal" (a bug).
    """

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
"""The type name in the message's header, for each record that is a message."""
