"""The losses that the engine can train with, as objects that it calls for each micro-batch.

``PolicyObjective`` is for reinforcement learning, ``SupervisedObjective`` for ``async-rl sft``, and
``slopes.SlopeObjective`` for losses over whole sequences. An objective returns a loss to backpropagate, and statistics.
Statistics are sums and counts over trained tokens, so they can be added over micro-batches and ranks, however the step
is cut. ``engine/fsdp_engine.py`` calls this on every rank. N = trained tokens, S = sequences.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from async_rl.config.config import Config
from async_rl.config.distill import DistillConfig
from async_rl.config.loss import LossConfig
from async_rl.learner.interface import UpdateStats
from async_rl.learner.losses.batch import IndexedSlopeFunction, LossBatch, Slopes, TokenLogprobs
from async_rl.learner.losses.diagnostics import COLUMNS, diagnostic_sums, k3_sum_and_tokens, summarise
from async_rl.learner.losses.own import OwnLoss
from async_rl.learner.losses.own_trial import load_own_loss
from async_rl.learner.losses.parts import LOG_RATIO_LIMIT, aggregate, sum_by
from async_rl.learner.losses.policy import PolicyInputs, PolicyLoss, policy_loss, with_teacher
from async_rl.learner.losses.rules import Verdict, why_skip

SUM_NAMES = ("denominator", "loss", "tokens", "entropy", "reference_kl", "sequences", "weight", "weight_square")
"""The first entries of ``MicroBatchResult.sums``. A count and a sum for each rule follow (``PolicyLoss.rule_counts``,
``rule_sums``), then the numbers of ``OwnLoss.metric_keys``, and then the rows of ``diagnostic_sums``.
"""


class MicroBatchResult(NamedTuple):
    """The loss and the statistics of one micro-batch.

    ``sums`` has the statistics that are summed over tokens. Its length is the same on every rank and in every
    micro-batch, so that the engine can add them up.
    """

    loss_sum: Tensor  # [], float64, carries grad: this micro-batch's part of the step's loss times its denominator
    sums: Tensor  # float64 [len(SUM_NAMES) + 2 * rules + own metrics + COLUMNS * lags]
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

    @property
    def rule_labels(self) -> Sequence[str]:
        """The names of the rules whose counts ``MicroBatchResult.sums`` has, in order."""
        ...

    @property
    def own_metric_keys(self) -> tuple[str, ...]:
        """The metrics in ``MicroBatchResult.sums`` that a loss of the user's own counts, in order."""
        ...

    @property
    def num_sums(self) -> int:
        """The length of ``MicroBatchResult.sums``."""
        ...

    def __call__(self, batch: LossBatch, scored: TokenLogprobs, *, version: int) -> MicroBatchResult: ...

    def predict_slopes(self, batch: LossBatch, *, version: int) -> IndexedSlopeFunction | None:
        """Return a function that predicts the derivatives of ``loss_sum`` from the values of some tokens alone.

        A wrong prediction costs time, but changes no gradient. None: the loss does not separate by token.
        """
        ...

    def why_skip(self, sums: Tensor) -> str:
        """Return why the optimizer step must be skipped. Empty if it need not be skipped.

        ``sums`` are the sums of the whole step, on the host.
        """
        ...

    def denominator(self, sums: Tensor) -> float:
        """Return what the loss sum of the whole step is divided by. 0: nothing is left to train on.

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
        own: the function of ``loss.function``. None: the built-in loss.
        distill: the section ``[distill]``. None: there is no teacher.
    """

    loss: LossConfig
    max_lag: int
    max_length: int
    own: OwnLoss | None = None
    distill: DistillConfig | None = None

    @property
    def needs_entropy_grad(self) -> bool:
        return self.loss.entropy_coef != 0

    @property
    def has_reference_kl(self) -> bool:
        return self.loss.is_kl_in_loss

    @property
    def rule_labels(self) -> Sequence[str]:
        return [rule.label for rule in self.loss.all_rules]

    @property
    def own_metric_keys(self) -> tuple[str, ...]:
        return () if self.own is None else self.own.metric_keys

    @property
    def num_sums(self) -> int:
        rows = COLUMNS * (self.max_lag + 1)
        return len(SUM_NAMES) + 2 * len(self.rule_labels) + len(self.own_metric_keys) + rows

    def __call__(self, batch: LossBatch, scored: TokenLogprobs, *, version: int) -> MicroBatchResult:
        """Return the loss and the statistics of one micro-batch, whose log-probabilities are ``scored``.

        No token may be newer than ``version``; the engine has checked that on the host.

        Raises:
            ValueError: ``policy_loss`` refuses the batch.
            OwnCodeError: the user's function fails.
        """
        inputs = _inputs(batch, scored, version)
        counts = batch.advantages.new_zeros(0, dtype=torch.float64)
        if self.own is None:
            out = policy_loss(inputs, self.loss, max_length=self.max_length, distill=self.distill)
        else:
            if self.distill is not None:
                inputs = with_teacher(inputs, self.distill)
            out, counts = self.own(inputs, self.loss, max_length=self.max_length)
        entropy = scored.entropies.detach().masked_fill(~out.kept, 0.0).sum(dtype=torch.float64)
        fixed = [out.denominator.double(), out.loss_sum.detach(), out.kept.sum().double(), entropy, out.kl_sum]
        fixed += sequence_weights(out, batch.sequence_index, batch.num_sequences)
        skipped_N = out.skipped[batch.sequence_index]
        by_lag = diagnostic_sums(out, skipped_N, inputs.lag, self.max_lag + 1, after_update_N=batch.after_update)
        kept_N = out.log_ratio.masked_fill(~out.kept, -torch.inf)
        ratio_max = torch.cat([kept_N, kept_N.new_full((1,), -torch.inf)]).max().exp()
        sums = torch.cat([torch.stack(fixed), out.rule_counts, out.rule_sums, counts, by_lag.view(-1)])
        return MicroBatchResult(out.loss_sum, sums, out.skipped, ratio_max)

    def predict_slopes(self, batch: LossBatch, *, version: int) -> IndexedSlopeFunction | None:
        """Return ``policy_loss``'s derivatives as if the given tokens were all that their sequences have, as
        ``Objective.predict_slopes`` says.

        Only the weights of the aggregation are those of whole sequences of which every token is kept. So the prediction
        is right unless a rule judges the whole sequence otherwise than its part, or masks some of its tokens under
        ``aggregation = "sequence"``.
        """
        has_top_k = self.distill is not None and self.distill.top_k > 0
        if self.own is not None or has_top_k or not self.loss.separates_by_token:
            return None
        may_keep_N = torch.ones_like(batch.advantages, dtype=torch.bool)
        if len(batch.verdicts):
            may_keep_N = batch.verdicts != Verdict.MASK
        index_N, num_sequences, max_length = batch.sequence_index, batch.num_sequences, self.max_length
        weight_N = aggregate(may_keep_N, index_N, num_sequences, self.loss.aggregation, max_length=max_length).weight
        unweighted, distill = self.loss.model_copy(update={"aggregation": "token"}), self.distill

        @torch.enable_grad()
        def predict(place: slice | Tensor, scored: TokenLogprobs) -> Slopes:
            leaves = TokenLogprobs(*(values.detach().requires_grad_() for values in scored[:2]))
            inputs = _inputs(batch, leaves, version, place)
            out = policy_loss(inputs, unweighted, max_length=max_length, distill=distill)
            by_logprobs, by_entropies = torch.autograd.grad(out.loss_sum, leaves[:2], allow_unused=True)
            weight = weight_N[place] if isinstance(weight_N, Tensor) else weight_N
            entropies = None if by_entropies is None else (by_entropies * weight).float()  # the loss may not use them
            return Slopes((by_logprobs * weight).float(), entropies)

        return predict

    def why_skip(self, sums: Tensor) -> str:
        """Return why the optimizer step must be skipped, as ``Objective.why_skip`` says.

        The rules of ``[loss]`` that skip steps are over the kept tokens. A step without tokens is skipped by the
        engine.
        """
        rules = self.loss.all_rules
        rule_sums = sums[len(SUM_NAMES) + len(rules) :][: len(rules)].tolist()
        step = summarise(_split(sums, self).rows.sum(0).numpy())
        return why_skip(rules, rule_sums, tokens=float(sums[SUM_NAMES.index("tokens")]), ess=step.ess)

    def denominator(self, sums: Tensor) -> float:
        return float(sums[SUM_NAMES.index("denominator")])


class PlainObjective:
    """What an objective without a policy's parts has: no entropies, no reference, no rules. It skips no step."""

    @property
    def needs_entropy_grad(self) -> bool:
        return False

    @property
    def has_reference_kl(self) -> bool:
        return False

    @property
    def rule_labels(self) -> Sequence[str]:
        return ()

    @property
    def own_metric_keys(self) -> tuple[str, ...]:
        return ()

    @property
    def num_sums(self) -> int:
        return len(SUM_NAMES) + len(self.own_metric_keys)

    def why_skip(self, sums: Tensor) -> str:
        return ""


class LinearObjective(PlainObjective, ABC):
    """A sum over trained tokens of a slope, known beforehand, times the token's value."""

    @abstractmethod
    def slopes(self, batch: LossBatch) -> Tensor:
        """Return the slopes of the trained tokens, float32 [N]."""

    @abstractmethod
    def denominator(self, sums: Tensor) -> float: ...

    def __call__(self, batch: LossBatch, scored: TokenLogprobs, *, version: int) -> MicroBatchResult:
        loss_sum = (scored.logprobs * self.slopes(batch)).sum(dtype=torch.float64)
        entropy = scored.entropies.detach().sum(dtype=torch.float64)
        num_tokens, none = torch.full_like(entropy, len(scored.logprobs)), torch.zeros_like(entropy)
        sums = torch.stack([num_tokens, loss_sum.detach(), num_tokens, entropy, none, none, none, none])
        nothing = torch.zeros(batch.num_sequences, dtype=torch.bool, device=sums.device)
        return MicroBatchResult(loss_sum, sums, nothing, sums.new_zeros(()))

    def predict_slopes(self, batch: LossBatch, *, version: int) -> IndexedSlopeFunction:
        """Return the slopes themselves: the prediction is exact."""
        slopes_N = self.slopes(batch)
        return lambda place, _: Slopes(slopes_N[place])


class SupervisedObjective(LinearObjective):
    """The mean negative log-likelihood of all trained tokens."""

    def slopes(self, batch: LossBatch) -> Tensor:
        return torch.full_like(batch.advantages, -1.0)

    def denominator(self, sums: Tensor) -> float:
        return float(sums[SUM_NAMES.index("tokens")])


def _inputs(batch: LossBatch, scored: TokenLogprobs, version: int, place: slice | Tensor = slice(None)) -> PolicyInputs:
    """Return the tokens at ``place`` in N, whose values are ``scored``. Fields without values stay without."""

    return PolicyInputs(
        logprobs=scored.logprobs,
        entropies=scored.entropies,
        top_logprobs=scored.others,
        sequence_index=batch.sequence_index[place],
        num_sequences=batch.num_sequences,
        lag=version - batch.versions[place].long(),
        is_finite=batch.is_finite,
        **batch.columns(lambda values: values[place]),
    )


def sequence_weights(out: PolicyLoss, sequence_index_N: Tensor, num_sequences: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the number of sequences with kept tokens, and the sum and the sum of squares of their weights, float64.

    A sequence's weight is the product of pi/mu over its kept tokens.
    """
    log_S = sum_by(sequence_index_N, out.log_ratio.masked_fill(~out.kept, 0.0), num_sequences)
    has_kept_S = sum_by(sequence_index_N, out.kept.double(), num_sequences) > 0
    weight_S = log_S.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp() * has_kept_S
    return has_kept_S.sum().double(), weight_S.sum(), weight_S.square().sum()


def sequence_ess(sums: Tensor) -> float:
    """Return the normalised effective sample size of a step's sequences, in (0, 1], from its sums (host, float64).

    ``(sum w)^2 / (n sum w^2)``, as VCPO's rho (arXiv:2602.17616). 1 if there are no sequences.
    """
    total = dict(zip(SUM_NAMES, sums.tolist()))
    if not total["weight_square"]:
        return 1.0
    return total["weight"] ** 2 / (total["sequences"] * total["weight_square"])


def policy_objective(config: Config, *, device: torch.device | None = None) -> PolicyObjective:
    """Build the objective of a reinforcement learning run, with diagnostics for every staleness that may occur.

    Args:
        config: the run's config.
        device: that of the micro-batches, where the user's own loss is tried. None: the CPU.

    Raises:
        ConfigError: ``loss.function`` can't be imported, or fails its trial.
    """
    own = load_own_loss(config, device=device)
    distill = config.distill if config.distill.is_set else None
    return PolicyObjective(config.loss, config.queue.max_staleness, config.sampling.max_new_tokens, own, distill)


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
    objective: Objective,
) -> UpdateStats:
    """Return a step's statistics, computed from its sums over micro-batches and ranks (host, float64)."""
    total = dict(zip(SUM_NAMES, sums.tolist()))
    count = max(1.0, total["tokens"])
    denominator = objective.denominator(sums)
    parts = _split(sums, objective)
    rows = parts.rows.numpy()
    step = summarise(rows.sum(0))
    return UpdateStats(
        stepped=not outcome.reason,
        reason=outcome.reason,
        loss=total["loss"] / denominator if denominator else 0.0,
        grad_norm=outcome.grad_norm,
        lr=outcome.lr,
        tokens_trained=int(total["tokens"]),
        ratio_mean=step.ratio_mean,
        ratio_max=ratio_max,
        clip_fraction=step.clip_low + step.clip_high,
        ess=step.ess,
        entropy=total["entropy"] / count,
        sequence_ess=sequence_ess(sums),
        mean_abs_log_ratio=step.mean_abs_log,
        skipped_sequence_ids=tuple(skipped_sequence_ids),
        skipped_tokens=step.num_skipped,
        mismatch_kl={lag: k3_sum_and_tokens(row) for lag, row in enumerate(rows) if row.any()},
        out_of_range_tokens=step.num_out_of_range,
        reference_kl=total["reference_kl"] / count if objective.has_reference_kl else None,
        by_lag=rows,
        rule_tokens=parts.rule_tokens,
        own_metrics=_own_metrics(parts.own, num_tokens=max(1, step.tokens), num_kept=count),
    )


def _own_metrics(own: Mapping[str, float], *, num_tokens: int, num_kept: float) -> dict[str, float]:
    """Return the share of tokens under each of the user's masks, and the mean of each of the user's metrics."""
    return {key: value / (num_tokens if key.startswith("loss_mask/") else num_kept) for key, value in own.items()}


class _Sums(NamedTuple):
    """The parts of ``MicroBatchResult.sums`` after ``SUM_NAMES``.

    Attributes:
        rule_tokens: for each rule, by its label, the number of tokens it masked or clipped.
        own: the numbers of the user's own loss, by metric.
        rows: the rows of ``diagnostic_sums``, float64 [lags, COLUMNS].
    """

    rule_tokens: dict[str, int]
    own: dict[str, float]
    rows: Tensor


def _split(sums: Tensor, objective: Objective) -> _Sums:
    labels, keys = objective.rule_labels, objective.own_metric_keys
    counts, _, own, rows = sums[len(SUM_NAMES) :].tensor_split(list(accumulate([len(labels), len(labels), len(keys)])))
    return _Sums(
        dict(zip(labels, map(int, counts.tolist()), strict=True)),
        dict(zip(keys, own.tolist(), strict=True)),
        rows.view(-1, COLUMNS),
    )
