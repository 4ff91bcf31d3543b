"""The losses that the engine can train with, as objects that it calls for each micro-batch.

``PolicyObjective`` is for reinforcement learning, ``SupervisedObjective`` for ``async-rl sft``. An objective returns a
loss to backpropagate, and statistics. Statistics are sums and counts over trained tokens, so they can be added over
micro-batches and ranks, however the step is cut. ``engine/fsdp_engine.py`` calls this on every rank. N = trained
tokens, S = sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from async_rl.config.config import Config
from async_rl.config.loss import LossConfig
from async_rl.learner.engine import UpdateStats
from async_rl.learner.engine.logprobs import TokenLogprobs
from async_rl.learner.engine.model import DeviceBatch
from async_rl.learner.losses.diagnostics import COLUMNS, diagnostic_sums, k3_sum_and_tokens, summarise
from async_rl.learner.losses.policy import PolicyInputs, policy_loss

SUM_NAMES = ("denominator", "loss", "tokens", "entropy", "reference_kl")
"""The first entries of ``MicroBatchResult.sums``; the rows of ``diagnostic_sums`` follow."""


class MicroBatchResult(NamedTuple):
    """The loss and the statistics of one micro-batch.

    ``sums`` has the statistics that are summed over tokens. Its length is the same on every rank and in every
    micro-batch, so that the engine can add them up.
    """

    loss_sum: Tensor  # [], float64, carries grad: this micro-batch's part of the step's loss times its denominator
    sums: Tensor  # float64 [len(SUM_NAMES) + COLUMNS * lags]
    skipped: Tensor  # bool [S]
    ratio_max: Tensor  # [], float64


class Objective(Protocol):
    """A loss that is a sum over trained tokens, divided by a denominator that is known only after the whole step."""

    @property
    def needs_entropy_grad(self) -> bool:
        """Whether entropies must carry a gradient."""
        ...

    @property
    def has_reference_kl(self) -> bool:
        """Whether the loss contains a KL to the reference model."""
        ...

    def __call__(self, batch: DeviceBatch, scored: TokenLogprobs, *, version: int) -> MicroBatchResult: ...

    def why_skip(self, sums: Tensor) -> str:
        """Return why the optimizer step must be skipped. Empty if it need not be skipped.

        ``sums`` are the sums of the whole step, on the host.
        """
        ...


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """The policy-gradient loss that the section ``[loss]`` describes.

    Attributes:
        loss: the section.
        max_lag: statistics are separate for each staleness up to this.
        max_length: the value of ``sampling.max_new_tokens``, the divisor under ``aggregation = "sequence_sum"``.
    """

    loss: LossConfig
    max_lag: int
    max_length: int

    @property
    def needs_entropy_grad(self) -> bool:
        return self.loss.entropy_coef != 0

    @property
    def has_reference_kl(self) -> bool:
        return self.loss.is_kl_in_loss

    def __call__(self, batch: DeviceBatch, scored: TokenLogprobs, *, version: int) -> MicroBatchResult:
        """Return the loss and the statistics of one micro-batch, whose log-probabilities are ``scored``.

        Raises:
            ValueError: a token is newer than ``version``, or ``policy_loss`` refuses the batch.
        """
        lag_N = version - batch.versions.long()
        if bool((lag_N < 0).any()):
            newest = int(batch.versions.max())
            raise ValueError(
                f"expected tokens of versions up to the learner's {version}, got {newest}; this is a bug in async-rl, "
                f"please report it"
            )
        inputs = PolicyInputs(
            logprobs=scored.logprobs,
            entropies=scored.entropies,
            behavior_logprobs=batch.behavior_logprobs,
            advantages=batch.advantages,
            sequence_index=batch.sequence_index,
            num_sequences=batch.num_sequences,
            lag=lag_N,
            reference_logprobs=batch.reference_logprobs,
            proximal_logprobs=batch.proximal_logprobs,
        )
        out = policy_loss(inputs, self.loss, max_length=self.max_length)
        entropy = scored.entropies.detach().masked_fill(~out.kept, 0.0).sum(dtype=torch.float64)
        fixed = [out.denominator.double(), out.loss_sum.detach(), out.kept.sum().double(), entropy, out.kl_sum]
        skipped_N = out.skipped[batch.sequence_index]
        by_lag = diagnostic_sums(out, skipped_N, lag_N, self.max_lag + 1, after_update_N=batch.after_update)
        kept_N = out.log_ratio.masked_fill(~out.kept, -torch.inf)
        ratio_max = torch.cat([kept_N, kept_N.new_full((1,), -torch.inf)]).max().exp()
        return MicroBatchResult(out.loss_sum, torch.cat([torch.stack(fixed), by_lag.view(-1)]), out.skipped, ratio_max)

    def why_skip(self, sums: Tensor) -> str:
        """Return why the optimizer step must be skipped, as ``Objective.why_skip`` says.

        ``loss.min_ess`` limits the effective sample size of the kept tokens' ratios. ``loss.max_kl`` limits the k3
        estimate of KL(mu || pi) over kept tokens. A step without tokens is skipped by the engine.
        """
        loss, step = self.loss, summarise(_rows(sums).sum(0).numpy())
        if loss.min_ess is not None and step.ess < loss.min_ess:
            return (
                f"the effective sample size is {step.ess:.3g} of its tokens, below loss.min_ess = {loss.min_ess}; "
                f"lower queue.max_staleness or optimizer.lr"
            )
        if loss.max_kl is not None and step.kl > loss.max_kl:
            return (
                f"KL(mu || pi) is {step.kl:.3g} nats, above loss.max_kl = {loss.max_kl}; lower queue.max_staleness or "
                f"optimizer.lr"
            )
        return ""


class SupervisedObjective:
    """The mean negative log-likelihood of all trained tokens. It skips no step and uses no behavior policy."""

    @property
    def needs_entropy_grad(self) -> bool:
        return False

    @property
    def has_reference_kl(self) -> bool:
        return False

    def __call__(self, batch: DeviceBatch, scored: TokenLogprobs, *, version: int) -> MicroBatchResult:
        loss_sum = -scored.logprobs.sum(dtype=torch.float64)
        entropy = scored.entropies.detach().sum(dtype=torch.float64)
        num_tokens = torch.full_like(entropy, len(scored.logprobs))
        sums = torch.stack([num_tokens, loss_sum.detach(), num_tokens, entropy, torch.zeros_like(entropy)])
        nothing = torch.zeros(batch.num_sequences, dtype=torch.bool, device=sums.device)
        return MicroBatchResult(loss_sum, sums, nothing, sums.new_zeros(()))

    def why_skip(self, sums: Tensor) -> str:
        return ""


def policy_objective(config: Config) -> PolicyObjective:
    """Build the objective of a reinforcement learning run, with diagnostics for every staleness that may occur."""
    return PolicyObjective(config.loss, config.queue.max_staleness, config.sampling.max_new_tokens)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What the optimizer step did.

    Attributes:
        reason: why the step was skipped. Empty if it was not.
        grad_norm: norm of the mean loss's gradient, before clipping.
        lr: the learning rate.
    """

    reason: str
    grad_norm: float
    lr: float


def update_stats(
    sums: Tensor,
    ratio_max: float,
    skipped_sequence_ids: Sequence[int],
    outcome: StepOutcome,
    *,
    has_reference_kl: bool = False,
) -> UpdateStats:
    """Return a step's statistics, computed from its sums over micro-batches and ranks (host, float64)."""
    total = dict(zip(SUM_NAMES, sums.tolist()))
    count = max(1.0, total["tokens"])
    rows = _rows(sums).numpy()
    step = summarise(rows.sum(0))
    return UpdateStats(
        stepped=not outcome.reason,
        reason=outcome.reason,
        loss=total["loss"] / total["denominator"] if total["denominator"] else 0.0,
        grad_norm=outcome.grad_norm,
        lr=outcome.lr,
        tokens_trained=int(total["tokens"]),
        ratio_mean=step.ratio_mean,
        ratio_max=ratio_max,
        clip_fraction=step.clip_low + step.clip_high,
        ess=step.ess,
        entropy=total["entropy"] / count,
        mean_abs_log_ratio=step.mean_abs_log,
        skipped_sequence_ids=tuple(skipped_sequence_ids),
        skipped_tokens=step.num_skipped,
        mismatch_kl={lag: k3_sum_and_tokens(row) for lag, row in enumerate(rows) if row.any()},
        out_of_range_tokens=step.num_out_of_range,
        reference_kl=total["reference_kl"] / count if has_reference_kl else None,
        by_lag=rows,
    )


def _rows(sums: Tensor) -> Tensor:
    """Return the part of ``sums`` that holds the rows of ``diagnostic_sums``, float64 [lags, COLUMNS]."""
    return sums[len(SUM_NAMES) :].view(-1, COLUMNS)
