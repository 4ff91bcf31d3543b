"""The rule that limits leases: how many groups may wait for training, and how old their tokens may be.

``QueueSettings`` has the config values that the rule needs. ``LearnerSide`` has the learner's step and version.
The functions that grant leases, receive groups and deliver batches use both.

With ``k`` optimizer steps per batch, the last step on a batch taken at version ``v`` is done at version ``v + k - 1``,
the last step on the next batch at ``v + 2k - 1``, and so on. A group sampled at version ``m`` may be trained if that
last version is at most ``m + eta``, with ``eta = queue.max_staleness``.

"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import xxhash
from msgspec.structs import replace

from async_rl.config.config import Config
from async_rl.config.generator import MAX_SESSION_CALLS
from async_rl.config.queue import QueueConfig
from async_rl.errors import ConfigError, QueueError
from async_rl.queue.core.pace import RunAheadSetting
from async_rl.queue.messages import Announcement, StepAck
from async_rl.queue.storage.payloads import in_blocks
from async_rl.records import BYTES_PER_TOKEN, TOKEN_COLUMNS, LeaseKind, Sampling
from async_rl.routes import RoutingShape
from async_rl.sampling_mask import words_at_most

_ITEM_BYTES = {name: column.dtype.itemsize for name, column in TOKEN_COLUMNS.items()}
_BYTES_PER_SPAN = 15
"""Largest size of a span in a group's message, in bytes: its list (1 in MessagePack), end (5) and reward (9)."""
_BUG = "this is a bug in async-rl, please report it"
_ROLLOUT_OVERHEAD = 1024
_BYTES_PER_ANSWER = 64
"""Size of what a group says of each answer of an agent besides tokens: a turn, and the length of a sequence."""
_GROUP_OVERHEAD = 4096
GENERATOR_TIMEOUT_S = 30.0
"""Seconds of silence after which a generator does not count as alive."""


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """The config values that the queue's core needs.

    ``from_config`` makes them from the config, which has the defaults. ``updates_per_batch`` is the number of optimizer
    steps on a batch in all its epochs (``LearnerConfig.versions_per_batch``).

    Raises:
        ConfigError: the groups of a step don't fit into ``max_bytes``, or all groups would be too old to train, or
            nothing limits the number of tokens that top-p may leave.
    """

    group_size: int
    groups_per_step: int
    sampling: Sampling
    updates_per_batch: int
    queue: QueueConfig
    max_filtered: int
    seed: int
    accepts_changed_data: bool
    temperature_end: float | None
    temperature_steps: int
    vocab_size: int | None
    max_turns: int
    max_abs_reward: float
    routing: RoutingShape | None = None
    """The shape of the routes that training leases want. None: they want none."""
    teacher_bytes: int = 0
    """Bytes of a teacher's scores of one sampled token. 0 without a teacher."""
    span_bytes: int = 0
    """Bytes of one span, of which an answer has at most one for each sampled token. 0 if no reward can make spans."""
    rollout_tokens: int | None = None
    """The limit on the tokens of all sequences of an agent's rollout together. None without agents."""
    mask_truncated: bool = False
    """The value of ``loss.mask_truncated``."""
    max_turn_tokens: int | None = None
    """The value of ``environment.max_turn_tokens``. None without an environment."""
    run_ahead: RunAheadSetting = "bound"
    """The value of ``queue.run_ahead``, or what takes its place with other keys."""
    generator_timeout_s: float = GENERATOR_TIMEOUT_S

    def __post_init__(self) -> None:
        if not self.sampling.keeps_all and not self.sampling.top_k and self.vocab_size is None:
            key = "top_p" if self.sampling.top_p < 1 else "min_p"
            raise ConfigError(
                f"sampling.{key}: {getattr(self.sampling, key)} alone may keep the whole vocabulary, whose size is "
                f"unknown, because the config.json of model.path has no vocab_size; set sampling.top_k, which limits "
                f"the number of tokens"
            )
        needed = self.groups_per_step * self.reserved_bytes
        if needed > self.queue.max_bytes:
            remedies = ["raise it", "lower learner.groups_per_step, sampling.group_size or sampling.max_new_tokens"]
            if not self.sampling.keeps_all:
                remedies.append("lower (or set) sampling.top_k")
            if self.routing is not None:
                token_bytes = self.routing.bytes_per_token
                remedies.append(f"set model.routing_replay = false: routes take {token_bytes} bytes a token")
            raise ConfigError(
                f"queue.max_bytes: expected at least {needed}, which one step of {self.groups_per_step} groups may "
                f"need, got {self.queue.max_bytes}; {', or '.join(remedies)}"
            )

    @classmethod
    def from_config(
        cls, config: Config, *, vocab_size: int | None, routing: RoutingShape | None = None
    ) -> QueueSettings:
        """Build the settings from the config.

        Args:
            vocab_size: limit on the number of tokens that top-p may leave. None if unknown.
            routing: the shape of the routes under ``model.routing_replay``, else None.
        """
        run_ahead = config.queue.run_ahead
        # Steps that wait for the oldest groups are too uneven for a pace: beside a slow generator it cost 6 %.
        waits = config.queue.on_stale == "wait" and run_ahead == "auto"
        if waits or config.learner.fixed_lag is not None:
            run_ahead = "bound"
        return cls(
            group_size=config.sampling.group_size,
            groups_per_step=config.learner.groups_per_step,
            sampling=train_sampling(config),
            updates_per_batch=config.learner.versions_per_batch,
            queue=config.queue,
            max_filtered=config.max_filtered,
            seed=config.run.seed,
            accepts_changed_data=config.data.on_change == "accept",
            temperature_end=config.sampling.temperature_end,
            temperature_steps=config.temperature_steps,
            vocab_size=vocab_size,
            max_turns=config.environment.max_turns if config.environment.is_set else 1,
            rollout_tokens=config.max_rollout_tokens,
            max_abs_reward=config.reward.max_abs,
            routing=routing,
            teacher_bytes=_ITEM_BYTES["teacher.logprobs"] * (1 + config.distill.top_k)
            + _ITEM_BYTES["teacher.top_ids"] * config.distill.top_k
            if config.distill.is_set
            else 0,
            span_bytes=_BYTES_PER_SPAN if config.makes_spans else 0,
            mask_truncated=config.loss.mask_truncated,
            max_turn_tokens=config.environment.max_turn_tokens if config.environment.is_set else None,
            run_ahead=run_ahead,
        )

    @property
    def worst_case_bytes(self) -> int:
        """The size in bytes of the largest group that a generator may return for a training lease.

        The longest prompt and answer count once for every turn,
        because each turn may start a new token sequence that repeats the whole text so far. Agents have a limit for all
        their sequences together.
        """
        sampling = self.sampling
        tokens = self.max_turns * (sampling.max_prompt_tokens + sampling.max_new_tokens)
        answers = 0
        if self.rollout_tokens is not None:
            tokens, answers = self.rollout_tokens, min(sampling.max_new_tokens, MAX_SESSION_CALLS)
        kept = sampling.max_new_tokens * (self._mask_bytes + self.teacher_bytes + self.span_bytes)
        token_bytes = BYTES_PER_TOKEN + (0 if self.routing is None else self.routing.bytes_per_token)
        kept += answers * _BYTES_PER_ANSWER
        return self.group_size * (tokens * token_bytes + kept + _ROLLOUT_OVERHEAD) + _GROUP_OVERHEAD

    @property
    def reserved_bytes(self) -> int:
        """What the queue reserves for each group in flight: what the largest takes on disk, in bytes."""
        return in_blocks(self.worst_case_bytes)

    @property
    def bytes_for_bound(self) -> int:
        """What ``queue.max_bytes`` must be so that only the staleness bound limits the groups in flight."""
        most = (self.queue.max_staleness + 1) // self.updates_per_batch * self.groups_per_step
        return most * self.reserved_bytes

    @property
    def _mask_bytes(self) -> int:
        """The maximum size of the sampling mask of one sampled token: the ids that top-p and top-k allowed there."""
        if self.sampling.keeps_all:
            return 0
        bounds = [self.sampling.top_k or None, None if self.vocab_size is None else words_at_most(self.vocab_size)]
        most_words = min(bound for bound in bounds if bound is not None)
        return _ITEM_BYTES["sampling_mask.sizes"] + _ITEM_BYTES["sampling_mask.words"] * most_words

    def sampling_at(self, version: int) -> Sampling:
        """Return the sampling settings of ``version``.

        The temperature changes linearly to ``sampling.temperature_end``.
        """
        if self.temperature_end is None:
            return self.sampling
        done, start = min(1.0, version / self.temperature_steps), self.sampling.temperature
        return replace(self.sampling, temperature=(1 - done) * start + done * self.temperature_end)

    def group_limit(self, *, version: int, active_version: int, steps_left: int) -> int:
        """Return how many groups may be in flight, queued and taken together when a generator requests leases.

        Args:
            version: the learner's version.
            active_version: the generator's version.
            steps_left: the number of steps that the learner has still to train.
        """
        batches = (self.queue.max_staleness + 1 - (version - active_version)) // self.updates_per_batch
        return max(0, min(batches, steps_left)) * self.groups_per_step

    def oldest_trainable(self, version: int) -> int:
        """Return the oldest version that may be in a batch that the learner takes at ``version``."""
        return version + self.updates_per_batch - 1 - self.queue.max_staleness

    def oldest_after_step(self, version: int) -> int:
        """Return the oldest version that may be in the batch after the one that the learner takes at ``version``."""
        return self.oldest_trainable(version + self.updates_per_batch)

    def oldest_for_lease(self, *, version: int, outstanding: int) -> int:
        """Return the oldest version that may sample the next lease if ``outstanding`` groups are trained before.

        ``version`` is the learner's version.
        """
        batches_before = outstanding // self.groups_per_step
        return max(0, version + (batches_before + 1) * self.updates_per_batch - 1 - self.queue.max_staleness)


LEARNER_STATUS = ("lineage", "step", "num_steps", "version", "training_notes")
"""The names of the learner's fields that the queue's status shows."""


class LearnerSide(msgspec.Struct):
    """What the queue knows about the attached learner.

    Attributes:
        lineage: the learner's id.
        step: the number of optimizer steps that it has reported as done.
        num_steps: the number of steps of the run.
        version: its weights version.
        fork_version: its version when it attached.
        announcement: the newest version that it published; None before the first.
        taken_ids: the lease ids of the groups that it took for ``step``.
        acked: the last step that it reported, with the queue's snapshot if it asked for one. None before the first.
        finished: whether it has ended the run.
        digests: the digests of the published versions that a lease may still use.
        training_notes: what it has noted about how the training goes wrong.
    """

    lineage: str
    step: int
    num_steps: int
    version: int
    fork_version: int
    announcement: Announcement | None = None
    taken_ids: tuple[str, ...] = ()
    acked: tuple[int, bytes | None] | None = None
    finished: bool = False
    digests: dict[int, str] = msgspec.field(default_factory=dict)
    training_notes: tuple[str, ...] = ()

    @classmethod
    def continued(
        cls, before: LearnerSide | None, lineage: str, step: int, num_steps: int, version: int
    ) -> LearnerSide:
        """Return a learner that attaches at ``version``.

        The notes of ``before``, the learner in the restored snapshot, stay.
        """
        notes = () if before is None else before.training_notes
        return cls(lineage, step, num_steps, version, version, training_notes=notes)

    def group_limit(self, settings: QueueSettings, active_version: int) -> int:
        """Return how many groups may be in flight, queued and taken together. See ``QueueSettings.group_limit``."""
        return settings.group_limit(version=self.version, active_version=active_version, steps_left=self.steps_left)

    def check(self, ack: StepAck, settings: QueueSettings) -> None:
        """Check the learner's report of a step.

        Raises:
            QueueError: the report is about another step than the taken one, or its version is out of range.
        """
        if ack.step != self.step:
            raise QueueError(
                f"expected an ack of step {self.step}, which was taken last, got one of step {ack.step}; {_BUG}"
            )
        oldest = self.version + ack.trained.stepped
        newest = self.version + (settings.updates_per_batch if ack.trained.stepped else 0)
        if not oldest <= ack.version <= newest:
            raise QueueError(
                f"expected version {oldest}..{newest} after step {ack.step}, got version {ack.version}; {_BUG}"
            )

    def advance(self, ack: StepAck) -> None:
        """Set step, version and notes from a report that ``check`` accepted."""
        self.step, self.version, self.training_notes = ack.step + 1, ack.version, ack.training_notes

    @property
    def steps_left(self) -> int:
        return max(0, self.num_steps - self.step)

    @property
    def announced_version(self) -> int | None:
        return None if self.announcement is None else self.announcement.version


def lease_seed(run_seed: int, kind: LeaseKind, dataset: str, position: int) -> int:
    """Return a lease's seed, 63 bits: a hash of the run's seed, the lease's kind, the data set and the position."""
    return xxhash.xxh3_64_intdigest(f"{run_seed}/{kind}/{dataset}/{position}".encode()) >> 1


def train_sampling(config: Config) -> Sampling:
    s = config.sampling
    return Sampling(
        s.temperature, s.top_p, s.top_k, s.max_new_tokens, s.max_prompt_tokens, s.stop, s.min_p, s.stop_token_ids
    )


def eval_sampling(config: Config, name: str) -> Sampling:
    """Return the sampling settings of the evaluation set ``name`` of ``data.eval``."""
    own, chosen = train_sampling(config), config.eval.of(name)
    return replace(
        own, temperature=chosen.temperature, top_p=chosen.top_p, top_k=chosen.top_k, min_p=chosen.min_p,
        max_new_tokens=chosen.max_new_tokens or own.max_new_tokens,
    )  # fmt: skip
