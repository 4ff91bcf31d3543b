"""The losses that the engine can train with, as objects that it calls for each micro-batch.

``PolicyObjective`` is that of reinforcement learning. An objective returns a loss to backpropagate, and statistics.
Statistics are sums and counts over trained tokens, so they can be added over micro-batches and ranks, however the step
is cut. ``engine/fsdp_engine.py`` calls this on every rank. N = trained tokens, S = sequences.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from async_rl.config.config import Config
from async_rl.config.distill import DistillConfig
from async_rl.config.loss import LossConfig
from async_rl.learner.interface import UpdateStats
from async_rl.learner.losses.batch import IndexedSlopeFunction, LossBatch, Slopes, TokenLogprobs
from async_rl.learner.losses.diagnostics import COLUMNS, diagnostic_sums, summarise
from async_rl.learner.losses.own import OwnLoss
from async_rl.learner.losses.own_trial import load_own_loss
from async_rl.learner.losses.parts import LOG_RATIO_LIMIT, aggregate, sum_by
from async_rl.learner.losses.policy import PolicyInputs, PolicyLoss, policy_loss, with_teacher
from async_rl.learner.losses.rules import Verdict, why_skip
from async_rl.learner.losses.statistics import Statistics

_OF_TOKENS = dict.fromkeys(("denominator", "loss", "tokens", "entropy"), 1)
_OF_A_POLICY = dict.fromkeys(("reference_kl", "sequences", "weight", "weight_square"), 1)
_RULE_TOKENS, _RULE_SUM, METRIC = "rule_tokens/", "rule_sum/", "metric/"
"""Beginnings of statistics' names: of each rule the tokens that it masked or clipped, and the sum of what it looks at
(``PolicyLoss.rule_counts``, ``rule_sums``); and metrics of the objective's own."""


class TokenResults(NamedTuple):
    """What a policy's loss computed for the trained tokens of one micro-batch, [N] each, without grad."""

    logprobs: Tensor
    entropies: Tensor
    kept: Tensor
    capped_low: Tensor
    capped_high: Tensor

    def fates(self) -> Tensor:
        """Return uint8 [N], places in ``interface.FATES``."""
        codes = self.capped_low.byte() + 2 * (self.capped_high & ~self.capped_low).byte()
        return codes.masked_fill(~self.kept, 3)


class MicroBatchResult(NamedTuple):
    """The loss of one micro-batch, and its statistics (``Objective.statistics``)."""

    loss_sum: Tensor  # [], float64, carries grad: this micro-batch's part of the step's loss times its denominator
    sums: Tensor  # float64 [Statistics.num_values]
    skipped: Tensor  # bool [S]
    ratio_max: Tensor  # [], float64
    tokens: TokenResults | None = None


class Objective(ABC):
    """A loss that is a sum over trained tokens, divided by a denominator that is known only after the whole step.

    One that overrides nothing else has no entropies, no reference and no rules, and skips no step.
    """

    @property
    def needs_entropy_grad(self) -> bool:
        """Whether entropies must carry a gradient."""
        return False

    @property
    def has_reference_kl(self) -> bool:
        """Whether the loss contains a KL to the reference model."""
        return False

    @property
    def own_metric_keys(self) -> tuple[str, ...]:
        """Metrics whose sums ``statistics`` has."""
        return ()

    @property
    def statistics(self) -> Statistics:
        """The table of ``MicroBatchResult.sums``, the same for every micro-batch and on every rank."""
        return Statistics(_OF_TOKENS | dict.fromkeys((f"{METRIC}{key}" for key in self.own_metric_keys), 1))

    @abstractmethod
    def __call__(self, batch: LossBatch, scored: TokenLogprobs, *, version: int) -> MicroBatchResult: ...

    def predict_slopes(self, batch: LossBatch, *, version: int) -> IndexedSlopeFunction | None:
        """Return a function that predicts the derivatives of ``loss_sum`` from the values of some tokens alone.

        A wrong prediction costs time, but changes no gradient. None: the loss does not separate by token.
        """
        return None

    def why_skip(self, sums: Tensor) -> str:
        """Return why the optimizer step must be skipped. Empty if it need not be skipped.

        ``sums`` are the sums of the whole step, on the host.
        """
        return ""

    def denominator(self, sums: Tensor) -> float:
        """Return what the loss sum of the whole step is divided by. 0: nothing is left to train on.

        ``sums`` are the sums of the whole step, on the host.
        """
        return self.statistics.value(sums, "denominator")


@dataclass(frozen=True, slots=True)
class PolicyObjective(Objective):
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
    def statistics(self) -> Statistics:
        numbers = (*_OF_TOKENS, *_OF_A_POLICY, *self._names(_RULE_TOKENS), *self._names(_RULE_SUM), *self._own_names)
        return Statistics(dict.fromkeys(numbers, 1) | {"by_lag": COLUMNS * (self.max_lag + 1)})

    def _names(self, beginning: str) -> list[str]:
        """Return the names of a statistic of each rule. Labels differ (``LossConfig.rules``)."""
        return [f"{beginning}{rule.label}" for rule in self.loss.all_rules]

    @property
    def _own_names(self) -> list[str]:
        return [] if self.own is None else [f"{METRIC}{key}" for key in self.own.metric_keys]

    def __call__(self, batch: LossBatch, scored: TokenLogprobs, *, version: int) -> MicroBatchResult:
        """Return the loss and the statistics of one micro-batch, whose log-probabilities are ``scored``.

        No token may be newer than ``version``; the queue has checked that.

        Raises:
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
        num_sequences, weight, weight_square = sequence_weights(out, batch.sequence_index, batch.num_sequences)
        skipped_N = out.skipped[batch.sequence_index]
        by_lag = diagnostic_sums(out, skipped_N, inputs.lag, self.max_lag + 1, after_update_N=batch.after_update)
        kept_N = out.log_ratio.masked_fill(~out.kept, -torch.inf)
        ratio_max = torch.cat([kept_N, kept_N.new_full((1,), -torch.inf)]).max().exp()
        sums = self.statistics.flat(
            {
                "denominator": out.denominator,
                "loss": out.loss_sum,
                "tokens": out.kept.sum(),
                "entropy": scored.entropies.detach().masked_fill(~out.kept, 0.0).sum(dtype=torch.float64),
                "reference_kl": out.kl_sum,
                "sequences": num_sequences,
                "weight": weight,
                "weight_square": weight_square,
                "by_lag": by_lag,
                **dict(zip(self._names(_RULE_TOKENS), out.rule_counts, strict=True)),
                **dict(zip(self._names(_RULE_SUM), out.rule_sums, strict=True)),
                **dict(zip(self._own_names, counts, strict=True)),
            }
        )
        logprobs, entropies = scored.logprobs.detach(), scored.entropies.detach()
        tokens = TokenResults(logprobs, entropies, out.kept, out.capped_low, out.capped_high)
        return MicroBatchResult(out.loss_sum, sums, out.skipped, ratio_max, tokens)

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
        rule_sums = [total for _, total in self.statistics.under(sums, _RULE_SUM)]
        step = summarise(self.statistics.of(sums, "by_lag").view(-1, COLUMNS).sum(0).numpy())
        num_tokens = self.statistics.value(sums, "tokens")
        return why_skip(self.loss.all_rules, rule_sums, tokens=num_tokens, ess=step["ess"])


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


def sequence_ess(sums: Tensor, statistics: Statistics) -> float:
    """Return the normalised effective sample size of a step's sequences, in (0, 1], from its sums (host, float64).

    ``(sum w)^2 / (n sum w^2)``, as VCPO's rho (arXiv:2602.17616). 1 if there are no sequences, or no policy.
    """
    if not statistics.sizes.keys() >= _OF_A_POLICY.keys():
        return 1.0
    number, weight, square = (statistics.value(sums, name) for name in ("sequences", "weight", "weight_square"))
    return weight**2 / (number * square) if square else 1.0


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
    table = objective.statistics
    num_tokens = table.value(sums, "tokens")
    count = max(1.0, num_tokens)
    denominator = objective.denominator(sums)
    by_lag = table.of(sums, "by_lag") if "by_lag" in table.sizes else sums[:0]
    rows = by_lag.view(-1, COLUMNS).numpy()
    step = summarise(rows.sum(0))
    return UpdateStats(
        stepped=not outcome.reason,
        reason=outcome.reason,
        loss=table.value(sums, "loss") / denominator if denominator else 0.0,
        grad_norm=outcome.grad_norm,
        lr=outcome.lr,
        tokens_trained=int(num_tokens),
        ratio_mean=step["ratio_mean"],
        ratio_max=ratio_max,
        clip_fraction=step["clip_low"] + step["clip_high"],
        ess=step["ess"],
        entropy=table.value(sums, "entropy") / count,
        sequence_ess=sequence_ess(sums, table),
        mean_abs_log_ratio=step["mean_abs_log"],
        skipped_sequence_ids=tuple(skipped_sequence_ids),
        skipped_tokens=int(step["num_skipped"]),
        out_of_range_tokens=int(step["num_out_of_range"]),
        reference_kl=table.value(sums, "reference_kl") / count if objective.has_reference_kl else None,
        by_lag=rows,
        rule_tokens={label: int(number) for label, number in table.under(sums, _RULE_TOKENS)},
        own_metrics=_own_metrics(
            dict(table.under(sums, METRIC)), num_tokens=max(1, int(step["tokens"])), num_kept=count
        ),
    )


def _own_metrics(own: Mapping[str, float], *, num_tokens: int, num_kept: float) -> dict[str, float]:
    """Return the share of tokens under each of the user's masks, and the mean of each of the user's metrics."""
    return {key: value / (num_tokens if key.startswith("loss_mask/") else num_kept) for key, value in own.items()}
