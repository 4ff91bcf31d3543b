"""The admission rule: how many groups may be outstanding, and how old their tokens may be. Pure.

``QueueSettings`` holds the config values that the queue needs, ``LearnerSide`` the step, version and bound of the
learner. The functions that grant leases, receive groups and deliver batches use both.

With ``k`` optimizer steps per batch, the last step on a batch taken at version ``v`` is done at version ``v + k - 1``,
the last step on the next batch at ``v + 2k - 1``, and so on. A group sampled at version ``m`` is within the bound
``eta = queue.max_staleness`` if that last version is at most ``m + eta``.

New leases follow the learner's own staleness bound, which is at most ``eta``. Existing groups are trained as long as
``eta`` allows. So a lower bound (``queue.adaptive``) loses no sample: new leases wait until few enough groups are
outstanding.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import xxhash
from msgspec.structs import replace

from async_rl.config.config import Config
from async_rl.config.queue import OnStale
from async_rl.errors import ConfigError, QueueError
from async_rl.queue.messages import Announcement, StepAck
from async_rl.records import LeaseKind, Sampling
from async_rl.sampling_mask import words_at_most

BYTES_PER_TOKEN = 13
"""int32 id, bool mask, float32 logprob, int32 version."""
_BYTES_PER_WORD = 4
_BUG = "this is a bug in async-rl, please report it"
_ROLLOUT_OVERHEAD = 1024
_GROUP_OVERHEAD = 4096
GENERATOR_TIMEOUT_S = 30.0
"""A generator that sent nothing for this long does not count as alive."""


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """The config values that the queue's core needs. ``from_config`` builds them; the config owns the defaults.

    Raises:
        ConfigError: no step fits into ``max_bytes``, or generators could never be fresh enough, or nothing limits the
            tokens that top-p may keep.
    """

    group_size: int
    groups_per_step: int
    max_staleness: int
    sampling: Sampling
    updates_per_batch: int
    sync_every: int
    max_bytes: int
    filter_range: tuple[float, float] | None
    refill: bool
    max_filtered: int
    lease_timeout_s: float
    max_attempts: int
    seed: int
    generator_timeout_s: float
    on_stale: OnStale
    wait_s: float
    accepts_changed_data: bool
    temperature_end: float | None
    temperature_steps: int
    vocab_size: int | None
    max_turns: int
    max_abs_reward: float
    max_refused_share: float

    def __post_init__(self) -> None:
        if not self.sampling.keeps_all and not self.sampling.top_k and self.vocab_size is None:
            raise ConfigError(
                f"sampling.top_p: {self.sampling.top_p} alone may keep the whole vocabulary, whose size is unknown, "
                f"because the config.json of model.path has no vocab_size; set sampling.top_k, which limits the "
                f"number of tokens"
            )
        needed = self.groups_per_step * self.worst_case_bytes
        if needed > self.max_bytes:
            raise ConfigError(
                f"queue.max_bytes: expected at least {needed}, which one step of {self.groups_per_step} groups may "
                f"need, got {self.max_bytes}; raise it, or lower learner.groups_per_step, sampling.group_size or "
                f"sampling.max_new_tokens" + ("" if self.sampling.keeps_all else ", or lower (or set) sampling.top_k")
            )
        if self.lowest_bound > self.max_staleness:
            raise ConfigError(
                f"weights.sync_every + learner.updates_per_batch: expected at most queue.max_staleness + 2 = "
                f"{self.max_staleness + 2}, got {self.sync_every} + {self.updates_per_batch}, with which every group "
                f"would be too old; lower one of the two, or raise queue.max_staleness"
            )

    @classmethod
    def from_config(cls, config: Config, *, vocab_size: int | None) -> QueueSettings:
        """Build the settings. ``vocab_size`` limits the tokens that top-p keeps if top-k does not; None if unknown."""
        return cls(
            group_size=config.sampling.group_size,
            groups_per_step=config.learner.groups_per_step,
            max_staleness=config.queue.max_staleness,
            sampling=train_sampling(config),
            updates_per_batch=config.learner.updates_per_batch,
            sync_every=config.weights.sync_every,
            max_bytes=config.queue.max_bytes,
            filter_range=config.queue.filter_range,
            refill=config.queue.refill,
            max_filtered=config.max_filtered,
            lease_timeout_s=config.queue.lease_timeout_s,
            max_attempts=config.queue.max_attempts,
            seed=config.run.seed,
            generator_timeout_s=GENERATOR_TIMEOUT_S,
            on_stale=config.queue.on_stale,
            wait_s=config.queue.wait_s,
            accepts_changed_data=config.data.on_change == "accept",
            temperature_end=config.sampling.temperature_end,
            temperature_steps=config.temperature_steps,
            vocab_size=vocab_size,
            max_turns=config.environment.max_turns if config.environment.is_set else 1,
            max_abs_reward=config.reward.max_abs,
            max_refused_share=config.queue.max_refused_share,
        )

    @property
    def worst_case_bytes(self) -> int:
        """Bytes of the largest payload that a training lease may return.

        In a rollout of several turns, each turn may start a new token sequence that repeats the whole text so far.
        """
        sampling = self.sampling
        tokens = self.max_turns * (sampling.max_prompt_tokens + sampling.max_new_tokens)
        kept = 0 if sampling.keeps_all else sampling.max_new_tokens * _BYTES_PER_WORD * (1 + self._most_mask_words)
        return self.group_size * (tokens * BYTES_PER_TOKEN + kept + _ROLLOUT_OVERHEAD) + _GROUP_OVERHEAD

    @property
    def _most_mask_words(self) -> int:
        """The number of words of the largest sampling mask."""
        bounds = [self.sampling.top_k or None, None if self.vocab_size is None else words_at_most(self.vocab_size)]
        return min(bound for bound in bounds if bound is not None)

    def sampling_at(self, version: int) -> Sampling:
        """The sampling settings of ``version``. Its temperature is interpolated from ``sampling.temperature``."""
        if self.temperature_end is None:
            return self.sampling
        done, start = min(1.0, version / self.temperature_steps), self.sampling.temperature
        return replace(self.sampling, temperature=(1 - done) * start + done * self.temperature_end)

    @property
    def lowest_bound(self) -> int:
        """The lowest staleness bound of the learner, as ``Config.lowest_bound``."""
        return self.sync_every + self.updates_per_batch - 2

    def group_limit(self, *, version: int, active_version: int, steps_left: int, bound: int) -> int:
        """Maximum sum of groups in flight, queued and taken, for a lease request of a generator at ``active_version``.

        ``bound`` is the learner's staleness bound for new leases, here and for ``oldest_for_lease``.
        """
        batches = (bound + 1 - (version - active_version)) // self.updates_per_batch
        return max(0, min(batches, steps_left)) * self.groups_per_step

    def oldest_trainable(self, version: int) -> int:
        """The oldest version that a batch taken at ``version`` may contain."""
        return version + self.updates_per_batch - 1 - self.max_staleness

    def oldest_after_step(self, version: int) -> int:
        """The oldest version that the next batch after one taken at ``version`` may contain."""
        return self.oldest_trainable(version + self.updates_per_batch)

    def oldest_for_lease(self, *, version: int, outstanding: int, bound: int) -> int:
        """The oldest version that may sample the next lease, if ``outstanding`` groups are trained before it."""
        batches_before = outstanding // self.groups_per_step
        return max(0, version + (batches_before + 1) * self.updates_per_batch - 1 - bound)


LEARNER_STATUS = ("lineage", "step", "num_steps", "version", "lease_bound")
"""The fields of the learner that the status shows."""


class LearnerSide(msgspec.Struct):
    """The attached learner. The last ack sets ``step``, ``version`` and ``lease_bound``, the bound of new leases.

    ``taken_ids`` are the lease ids of the groups that were taken for ``step``. ``acked`` is the last acked step, with
    the snapshot that its ack requested. ``digests`` has the digests of the announced versions that a lease may use.
    """

    lineage: str
    step: int
    num_steps: int
    version: int
    fork_version: int
    lease_bound: int
    announcement: Announcement | None = None
    taken_ids: tuple[str, ...] = ()
    acked: tuple[int, bytes | None] | None = None
    finished: bool = False
    digests: dict[int, str] = msgspec.field(default_factory=dict)

    @classmethod
    def continued(
        cls, before: LearnerSide | None, settings: QueueSettings, lineage: str, step: int, num_steps: int, version: int
    ) -> LearnerSide:
        """A learner that starts at ``version``. It keeps the lease bound of ``before``, the learner of its snapshot."""
        bound = settings.max_staleness if before is None else before.lease_bound
        return cls(lineage, step, num_steps, version, version, bound)

    def group_limit(self, settings: QueueSettings, active_version: int) -> int:
        """Maximum sum of groups in flight, queued and taken. See ``QueueSettings.group_limit``."""
        return settings.group_limit(
            version=self.version, active_version=active_version, steps_left=self.steps_left, bound=self.lease_bound
        )

    def oldest_for_lease(self, settings: QueueSettings, outstanding: int) -> int:
        """The oldest version that may sample the next lease, with ``outstanding`` groups before it."""
        return settings.oldest_for_lease(version=self.version, outstanding=outstanding, bound=self.lease_bound)

    def check(self, ack: StepAck, settings: QueueSettings) -> None:
        """Check an ack. Raises QueueError: it is of another step, or its version or bound is out of range."""
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
        lowest, highest = settings.lowest_bound, settings.max_staleness
        if ack.lease_bound is not None and not lowest <= ack.lease_bound <= highest:
            raise QueueError(
                f"expected a staleness bound of {lowest}..{highest} for new leases, got {ack.lease_bound}; {_BUG}"
            )

    def advance(self, ack: StepAck, settings: QueueSettings) -> None:
        """Set step, version and bound from an ack that ``check`` accepted."""
        self.step, self.version = ack.step + 1, ack.version
        self.lease_bound = settings.max_staleness if ack.lease_bound is None else ack.lease_bound

    @property
    def steps_left(self) -> int:
        return max(0, self.num_steps - self.step)

    @property
    def announced_version(self) -> int | None:
        return None if self.announcement is None else self.announcement.version


def lease_seed(run_seed: int, kind: LeaseKind, dataset: str, position: int) -> int:
    """A lease's seed, 63 bits: a hash of the run's seed, the lease's kind, the data set and the prompt's position."""
    return xxhash.xxh3_64_intdigest(f"{run_seed}/{kind}/{dataset}/{position}".encode()) >> 1


def train_sampling(config: Config) -> Sampling:
    s = config.sampling
    return Sampling(s.temperature, s.top_p, s.top_k, s.max_new_tokens, s.max_prompt_tokens, s.stop)


def eval_sampling(config: Config, name: str) -> Sampling:
    """The sampling settings of the evaluation set ``name`` of ``data.eval``."""
    s, chosen = config.sampling, config.eval.of(name)
    longest = chosen.max_new_tokens or s.max_new_tokens
    return Sampling(chosen.temperature, chosen.top_p, chosen.top_k, longest, s.max_prompt_tokens, s.stop)
