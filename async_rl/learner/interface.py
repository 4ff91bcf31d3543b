"""What the loop asks of an engine, and what it gets back.

The trainer or ``offline`` gives an ``Engine`` the sequences of one optimizer step, and gets ``UpdateStats`` back.
``engine.fsdp_engine.FsdpEngine`` implements it; tests have smaller ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np

from async_rl.learner.sequences import TrainSequence

if TYPE_CHECKING:
    from torch import Tensor

ScoredBy = Literal["policy", "reference"]
"""The model that ``Engine.score`` uses: the policy with its current weights, or the reference."""


ModelName = Literal["policy", "critic"]
"""A model that the engine trains."""


class PolicyScores(NamedTuple):
    """What the policy, with its current weights, says of one sequence's trained tokens: float32 [N] each, nats."""

    logprobs: np.ndarray
    entropies: np.ndarray


class TokenOutcomes(NamedTuple):
    """What an update computed for one sequence's trained tokens, [N] each.

    Attributes:
        logprobs: float32, nats, the policy's before the update, and entropies: of the same distributions.
        fates: uint8, what the loss did with the token: a place in ``FATES``.
    """

    logprobs: np.ndarray
    entropies: np.ndarray
    fates: np.ndarray


FATES = ("trained", "clipped_low", "clipped_high", "left_out")


class PaddedCost(NamedTuple):
    """Shares of the tokens that padded rows compute and one packed row would not, each from 0 to below 1.

    Attributes:
        padding: share of the tokens that are padding.
        repeated: share of the tokens of prompts that another sequence of the micro-batch has computed.
    """

    padding: float
    repeated: float


@dataclass(frozen=True, slots=True)
class UpdateCost:
    """What one optimizer step cost.

    Attributes:
        phase_s: seconds of each phase on rank 0 (``phases.Phase``). On CUDA those of the device, except for ``pack``
            and ``scatter``.
        flops: floating-point operations that the step must compute, over all ranks (``flops.StepFlops``).
        peak_flops_per_s: what the devices of all ranks can compute in a second. None if it is not known.
        peak_memory_bytes: highest peak memory of a rank (``phases.peak_memory_bytes``).
    """

    phase_s: Mapping[str, float]
    flops: float
    peak_flops_per_s: float | None
    peak_memory_bytes: int


@dataclass(frozen=True, slots=True)
class UpdateStats:
    """Statistics of one optimizer step, over all micro-batches and ranks.

    Attributes:
        stepped: False if the optimizer step was skipped: the gradient is not finite, no token is left to train on, or
            a limit is exceeded (``loss.min_ess``, ``loss.max_kl``).
        reason: why the step was skipped. Empty if it was not.
        loss: the loss of the step.
        grad_norm: norm of the gradient, before clipping.
        lr: learning rate of the step.
        tokens_trained: number of tokens in the loss.
        ratio_mean: mean of pi/mu over trained tokens.
        ratio_max: maximum of pi/mu over trained tokens.
        clip_fraction: share of trained tokens whose ratio was clipped at a bound.
        ess: normalised effective sample size, in (0, 1].
        entropy: mean over trained tokens, nats.
        mean_abs_log_ratio: mean of |log pi/mu| over trained tokens, nats.
        skipped_sequence_ids: sequences that the loss skipped.
        skipped_tokens: number of tokens of these sequences.
        out_of_range_tokens: number of single tokens that ``loss.token_range`` or another rule left out.
        reference_kl: mean KL to the reference model in the loss, nats. None if the loss has none.
        by_lag: float64 [lags, columns], rows for ``losses.diagnostics.summarise``. No rows if nothing was measured.
        sequence_ess: normalised effective sample size of the sequences, whose weights are products of pi/mu.
        padded_cost: what padded rows cost. None if rows are packed.
        rule_tokens: for each rule (``LossConfig.all_rules``) by its label, the number of tokens it masked or clipped.
        own_metrics: metrics of the user's own loss, by key. Empty with the built-in loss.
        routing: at how many tokens and layers the replayed experts differ from those that the model's routers choose,
            and the number of tokens and layers. None without routing replay.
        expert_load: float64 [L, E], how often the routers of the L layers with experts chose each, up to a factor.
            Empty if it was not counted.
        balance_loss: the load-balancing loss, without its coefficient. None if there is none.
        tokens: for each recorded sequence of a policy, what was computed for its tokens, without a further pass.
        cost: time, memory and operations of the step. None if the engine does not measure them.
    """

    stepped: bool
    reason: str
    loss: float
    grad_norm: float
    lr: float
    tokens_trained: int
    ratio_mean: float
    ratio_max: float
    clip_fraction: float
    ess: float
    entropy: float
    mean_abs_log_ratio: float
    skipped_sequence_ids: tuple[int, ...] = ()
    skipped_tokens: int = 0
    out_of_range_tokens: int = 0
    reference_kl: float | None = None
    by_lag: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    sequence_ess: float = 1.0
    padded_cost: PaddedCost | None = None
    rule_tokens: Mapping[str, int] = field(default_factory=dict)
    own_metrics: Mapping[str, float] = field(default_factory=dict)
    routing: tuple[int, int] | None = None
    expert_load: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    balance_loss: float | None = None
    tokens: Mapping[int, TokenOutcomes] = field(default_factory=dict, compare=False)
    cost: UpdateCost | None = field(default=None, compare=False)


class Critic(Protocol):
    """The learner's model of values, on the same ranks as the policy."""

    def score(self, sequences: Sequence[TrainSequence]) -> Mapping[int, np.ndarray]:
        """Return the value of the state before each trained token: sequence id to float32 [N], reward units."""
        ...

    def update(self, sequences: Sequence[TrainSequence], *, version: int) -> UpdateStats:
        """Make one optimizer step of the critic on ``sequences`` (``losses.value.critic_sequences``)."""
        ...


class Engine(Protocol):
    """The learner's model, optimizer and ranks, as the trainer uses them."""

    def update(self, sequences: Sequence[TrainSequence], *, version: int) -> UpdateStats:
        """Make one optimizer step on ``sequences`` and return its statistics.

        ``version`` is the learner's version before the step.
        """
        ...

    def score(self, sequences: Sequence[TrainSequence], *, of: ScoredBy) -> Mapping[int, np.ndarray]:
        """Return the log-probabilities of each sequence's trained tokens: sequence id to float32 [N], nats, without
        gradient.

        They are computed as ``update`` does: with temperature, in such micro-batches, on all ranks. No state of the
        engine changes.
        """
        ...

    def score_policy(self, sequences: Sequence[TrainSequence]) -> Mapping[int, PolicyScores]:
        """Return ``score(sequences, of="policy")`` and the entropies of the same distributions, by sequence id."""
        ...

    def gather(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter, unsharded, with its Hugging Face name, in a fixed order, on rank 0's host or device.

        The iterator runs collectives on all ranks, so read it to the end before you call another method.
        """
        ...

    def save(self, directory: Path, extra: Mapping[str, Any]) -> None:
        """Write model, optimizer, schedule, random state and ``extra`` (plain data) into ``directory``."""
        ...

    def begin_save(self, directory: Path, extra: Mapping[str, Any]) -> Future[None]:
        """Copy what ``save`` writes to host memory, and write it in the background.

        Return when it is copied, so that the engine may go on. The result is there when every rank has written its
        files, or failed with the errors of ``save``. Until then, call neither ``save`` nor ``begin_save`` again.
        """
        ...

    def load(self, directory: Path) -> None:
        """Restore what ``save`` wrote into ``directory``, on any number of ranks."""
        ...

    def tick(self) -> None:
        """Notify the other ranks that rank 0 is alive, so that they do not time out while rank 0 waits."""
        ...

    def close(self) -> None:
        """Let the other ranks end. Further calls do nothing."""
        ...
