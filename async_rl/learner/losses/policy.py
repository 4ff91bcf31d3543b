"""The policy loss of one micro-batch: pure functions that combine the parts that ``[loss]`` names.

The loss of a step is ``sum over kept tokens of weight * (-w * objective + kl_coef * KL - entropy_coef * entropy)``
divided by a denominator. The parts are in ``parts.py``, each with its paper.

This module returns the *sum*. Skipped sequences do not count in the denominator, so it is known only after the last
micro-batch of the step, on all ranks. The engine therefore backpropagates the sums, adds up the denominators, and
divides the gradients once. So the result does not depend on the cut into micro-batches or on the number of ranks.
Sequences are never cut, so this is also true of values per sequence. The exception is a rule at the level
``micro_batch``.

Shape letters: N = trained tokens, S = sequences, R = rules. Called by ``objective.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from async_rl.config.distill import DistillConfig
from async_rl.config.loss import LossConfig
from async_rl.config.section import look_up
from async_rl.learner.losses.distill import sampled_kl, taught_advantages, top_k_kl
from async_rl.learner.losses.parts import (
    SURROGATE_FUNCTIONS,
    SurrogateInputs,
    TokenObjective,
    aggregate,
    importance_weights,
    interpolated_proximal,
    kl_estimate,
    log_ratio,
    sequence_log_ratio,
    sum_by,
)
from async_rl.learner.losses.rules import RuleHits, RuleInputs, apply_rules, step_sums
from async_rl.learner.sequences import TokenColumns


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PolicyInputs(TokenColumns[Tensor]):
    """The tokens of one micro-batch, with what the learner's policy says of them.

    Attributes:
        logprobs: float [N], nats, the learner's; carries grad.
        entropies: float [N], nats, of the same distributions; carries grad if ``loss.entropy_coef`` is not 0.
        top_logprobs: float [N, K], nats, the learner's of the teacher's likeliest tokens; carries grad. None if the
            loss needs none.
        lag: int64 [N], versions between sampling and now, >= 0.
        sequence_index: int64 [N], in [0, num_sequences).
        num_sequences: S.
        is_finite: whether the host knows that all ``behavior_logprobs`` are finite.
    """

    logprobs: Tensor
    entropies: Tensor
    lag: Tensor
    sequence_index: Tensor
    num_sequences: int
    top_logprobs: Tensor | None = None
    is_finite: bool = False

    @property
    def has_proximal(self) -> bool:
        return self.proximal_logprobs.numel() > 0


class PolicyLoss(NamedTuple):
    """The result of ``policy_loss``. Only ``loss_sum`` carries grad. *Kept* tokens are those in loss and
    denominator.
    """

    loss_sum: Tensor  # [], float64, carries grad
    denominator: Tensor  # [], int64
    skipped: Tensor  # bool [S], sequences none of whose tokens is kept
    kept: Tensor  # bool [N]
    finite: Tensor  # bool [N], the behavior logprob is finite
    log_ratio: Tensor  # float64 [N], log pi/mu, nats; 0 where not finite
    capped_low: Tensor  # bool [N], kept, and its ratio was cut at a lower bound, or below 1 and clipped by a rule
    capped_high: Tensor  # bool [N], kept, and the same at an upper bound: clip_high, dual_clip, importance_cap, rules
    kl_sum: Tensor  # [], float64, nats, sum of the kept tokens' KL to the reference
    rule_counts: Tensor  # float64 [R], tokens that each rule masked or clipped
    rule_sums: Tensor  # float64 [R], sum over kept tokens of the statistic of each rule that skips steps


def policy_loss(
    inputs: PolicyInputs, loss: LossConfig, *, max_length: int, distill: DistillConfig | None = None
) -> PolicyLoss:
    """Return the sum of the losses of one micro-batch, and which of its tokens count.

    A NaN in a token that is left out (behavior logprob or advantage) does not reach the gradient of the others: its log
    ratio and advantage are replaced, not multiplied by 0. A *learner* logprob that is not finite stays in, so that the
    step fails visibly.

    Args:
        inputs: the micro-batch.
        loss: all keys but those of the advantages.
        max_length: ``sampling.max_new_tokens``, the constant of ``aggregation = "sequence_sum"``.
        distill: the section ``[distill]``. None: there is no teacher.
    """
    if distill is not None:
        inputs = with_teacher(inputs, distill)
    finite_N = inputs.behavior_logprobs.isfinite()
    log_ratio_N = log_ratio(inputs.logprobs.detach(), inputs.behavior_logprobs, finite_N).double()
    anchor_N = _anchor_logprobs(inputs, loss)
    hits = _judge(inputs, anchor_N, log_ratio_N, finite_N, loss)
    kept_N = ~hits.masked
    tokens = _token_objective(inputs, anchor_N, kept_N, loss)
    # Not a product with 0, because 0 times infinity is NaN, in the gradient too.
    loss_N = -torch.where(hits.silent, 0.0, tokens.objective)
    kl_sum = log_ratio_N.new_zeros(())
    if loss.is_kl_in_loss:
        kl_N = kl_estimate(log_ratio(inputs.logprobs, inputs.reference_logprobs, kept_N), loss.kl_estimator)
        if loss.kl_weighted:
            # DeepSeek-V3.2, arXiv:2512.02556 eq. 7. Through k3 and this ratio the gradient is r log(pi/ref).
            kl_N = kl_N * log_ratio(inputs.logprobs, inputs.behavior_logprobs, kept_N).exp()
        loss_N = loss_N + loss.kl_coef * kl_N
        kl_sum = kl_N.detach().sum(dtype=torch.float64)
    if distill is not None and distill.form == "loss":
        loss_N = loss_N + distill.coef * _teacher_kl(inputs, kept_N)
    if loss.entropy_coef:
        loss_N = loss_N - loss.entropy_coef * inputs.entropies.masked_fill(~kept_N, 0.0)
    weights = aggregate(kept_N, inputs.sequence_index, inputs.num_sequences, loss.aggregation, max_length=max_length)
    return PolicyLoss(
        loss_sum=(loss_N * weights.weight).sum(dtype=torch.float64),
        denominator=weights.denominator,
        skipped=_left_out(kept_N, inputs),
        kept=kept_N,
        finite=finite_N,
        log_ratio=log_ratio_N,
        capped_low=kept_N & (tokens.capped_low | (hits.clipped & (log_ratio_N < 0))),
        capped_high=kept_N & (tokens.capped_high | (hits.clipped & (log_ratio_N >= 0))),
        kl_sum=kl_sum,
        rule_counts=hits.counts,
        rule_sums=step_sums(loss.all_rules, log_ratio_N, inputs.behavior_logprobs.double(), kept_N),
    )


def with_teacher(inputs: PolicyInputs, distill: DistillConfig) -> PolicyInputs:
    """Return the inputs with the teacher's advantages, or without those of rewards if only the teacher counts."""
    advantages_N = inputs.advantages
    if distill.form == "advantage":
        advantages_N = taught_advantages(advantages_N, inputs.logprobs, inputs.teacher_logprobs, distill)
    elif not distill.rewards:
        advantages_N = torch.zeros_like(advantages_N)
    return replace(inputs, advantages=advantages_N)


def _teacher_kl(inputs: PolicyInputs, kept_N: Tensor) -> Tensor:
    """Return KL(pi || teacher) at each token, [N]: over the likeliest tokens if there are any, else estimated."""
    if inputs.top_logprobs is not None:
        return top_k_kl(inputs.top_logprobs, inputs.teacher_top_logprobs, kept_N)
    return sampled_kl(inputs.logprobs, inputs.behavior_logprobs, inputs.teacher_logprobs, kept_N)


def _judge(inputs: PolicyInputs, anchor_N: Tensor, log_ratio_N: Tensor, finite_N: Tensor, loss: LossConfig) -> RuleHits:
    """Apply the rules of ``loss``. Sequences with a behavior logprob that is not finite are masked too."""
    index_N, every_N = inputs.sequence_index, torch.ones_like(finite_N)
    behavior_N = inputs.behavior_logprobs.masked_fill(~finite_N, 0.0)
    hits = apply_rules(
        loss.all_rules,
        RuleInputs(
            log_ratio=log_ratio_N,
            anchor_log_ratio=log_ratio(anchor_N.detach(), behavior_N, every_N).double(),
            behavior_logprobs=behavior_N.double(),
            finite=finite_N,
            advantages=inputs.advantages,
            sequence_index=index_N,
            num_sequences=inputs.num_sequences,
            verdicts=inputs.verdicts,
        ),
    )
    nonfinite_S = sum_by(index_N, (~finite_N).long(), inputs.num_sequences) > 0
    return hits._replace(masked=hits.masked | nonfinite_S[index_N])


def _left_out(kept_N: Tensor, inputs: PolicyInputs) -> Tensor:
    """Return the sequences that have tokens, but none that is kept, bool [S]."""
    before_S = sum_by(inputs.sequence_index, torch.ones_like(inputs.sequence_index), inputs.num_sequences)
    return (before_S > 0) & (sum_by(inputs.sequence_index, kept_N.long(), inputs.num_sequences) == 0)


def _anchor_logprobs(inputs: PolicyInputs, loss: LossConfig) -> Tensor:
    """Return the log-probabilities [N], detached, under the anchor, which is the policy that pi is compared with."""
    if loss.anchor == "behavior":
        return inputs.behavior_logprobs
    if loss.anchor == "proximal":
        return inputs.proximal_logprobs if inputs.has_proximal else inputs.logprobs.detach()
    return interpolated_proximal(inputs.logprobs, inputs.behavior_logprobs, inputs.lag)


def _token_objective(inputs: PolicyInputs, anchor_N: Tensor, kept_N: Tensor, loss: LossConfig) -> TokenObjective:
    """Return the surrogate times its importance weight. It is 0 with gradient 0 for tokens that are not kept."""
    advantages_N = inputs.advantages.masked_fill(~kept_N, 0.0)

    def sequence_mean(log_ratio_N: Tensor) -> Tensor:
        return sequence_log_ratio(log_ratio_N, kept_N, inputs.sequence_index, inputs.num_sequences)

    def ratio(logprobs_N: Tensor, other_logprobs_N: Tensor) -> Tensor:
        token_N = log_ratio(logprobs_N, other_logprobs_N, kept_N)
        return token_N if loss.ratio_level == "token" else sequence_mean(token_N)

    tokens = look_up(SURROGATE_FUNCTIONS, loss.surrogate, "loss.surrogate")(
        SurrogateInputs(
            log_ratio=ratio(inputs.logprobs, anchor_N),
            logprobs=torch.where(kept_N, inputs.logprobs, 0.0),
            advantages=advantages_N,
            sequence_mean=sequence_mean,
        ),
        loss,
    )
    if loss.importance_cap is None:
        return tokens
    # prox/mu corrects a surrogate with ratio pi/prox; pi/mu corrects a surrogate without a ratio.
    numerator_N = inputs.logprobs.detach() if loss.anchor == "behavior" else anchor_N
    importance_N = ratio(numerator_N, inputs.behavior_logprobs)
    return TokenObjective(
        tokens.objective * importance_weights(importance_N, loss.importance_cap),
        tokens.capped_low,
        tokens.capped_high | (importance_N.exp() > loss.importance_cap),
    )
