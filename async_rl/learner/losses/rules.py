"""Applies ``loss.rules`` to the tokens of one micro-batch: which leave the loss, which get no gradient, and the sums by
which a step is judged.

``config/rules.py`` describes the rules. A rule at the level ``token`` or ``sequence`` is decided here, within the
micro-batch, because a sequence is never cut. A rule that skips a step adds its statistic up here and is decided when
all micro-batches are summed (``why_skip``). A rule that masks or clips tokens by the step's mean is decided before the
step (``learner/losses/step_masks.py``): its decision arrives as a ``Verdict`` on each token.

Shape letters: N = trained tokens, S = sequences, R = rules. Logarithms are in nats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from async_rl.config.rules import SHORT_RULES, STATISTICS, Rule
from async_rl.config.section import look_up
from async_rl.learner.losses.parts import sum_by


class Verdict(IntEnum):
    """What was decided on a token by a statistic of its whole step. The highest of several counts."""

    KEEP = 0
    SILENT = 1  # adds nothing to the policy's objective, but counts in the denominator
    CLIP = 2  # the same, by a limit on ratios, so it counts as clipped
    MASK = 3  # leaves the loss and its denominator


class RuleInputs(NamedTuple):
    """The tokens of one micro-batch, detached.

    Attributes:
        log_ratio: float64 [N], log pi/mu; 0 where not finite.
        anchor_log_ratio: float64 [N], log anchor/mu.
        behavior_logprobs: float64 [N], log mu; 0 where not finite.
        finite: bool [N], whether the behavior logprob is finite.
        advantages: float [N].
        sequence_index: int64 [N], in [0, num_sequences).
        num_sequences: S.
        verdicts: uint8 [N], a ``Verdict`` on each token; [0] if there are none.
    """

    log_ratio: Tensor
    anchor_log_ratio: Tensor
    behavior_logprobs: Tensor
    finite: Tensor
    advantages: Tensor
    sequence_index: Tensor
    num_sequences: int
    verdicts: Tensor


class RuleHits(NamedTuple):
    """What the rules decided, together.

    Attributes:
        masked: bool [N], tokens that leave the loss and its denominator.
        silent: bool [N], tokens that add nothing to the objective.
        clipped: bool [N], those of them whose ratio is beyond a limit.
        counts: float64 [R], the number of tokens that each rule masked or clipped.
    """

    masked: Tensor
    silent: Tensor
    clipped: Tensor
    counts: Tensor


def token_statistic(name: str, log_ratio_N: Tensor, behavior_logprobs_N: Tensor) -> Tensor:
    """Return the statistic ``name`` of each token, float64 [N]."""
    return look_up(STATISTIC_FUNCTIONS, name, "loss.rules.statistic")(log_ratio_N, behavior_logprobs_N)


def _total_variation(log_ratio_N: Tensor, behavior_N: Tensor) -> Tensor:
    """Return ``|pi - mu|`` (DPPO, arXiv:2602.04879)."""
    return (behavior_N.exp() * log_ratio_N.expm1()).abs()


def _binary_kl(log_ratio_N: Tensor, behavior_N: Tensor) -> Tensor:
    """Return ``mu log(mu/pi) + (1 - mu) log((1 - mu)/(1 - pi))`` (DPPO, arXiv:2602.04879)."""
    mu_N, pi_N = behavior_N.exp(), (behavior_N + log_ratio_N).exp().clamp(max=1.0)
    # xlogy, because 0 log 0 is 0: a token of probability 1 has no other to lose to.
    rest_N = torch.xlogy(1 - mu_N, 1 - mu_N) - torch.xlogy(1 - mu_N, 1 - pi_N)
    return -mu_N * log_ratio_N + rest_N


STATISTIC_FUNCTIONS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ratio": lambda d_N, _: d_N.exp(),
    "abs_log_ratio": lambda d_N, _: d_N.abs(),
    "k1": lambda d_N, _: -d_N,
    "k2": lambda d_N, _: d_N.square() / 2,
    # expm1, because for small d exp(d) - 1 - d would be rounding noise.
    "k3": lambda d_N, _: d_N.expm1() - d_N,
    "tv": _total_variation,
    "binary_kl": _binary_kl,
}
"""``loss.rules.statistic`` -> its function: d = log pi/mu [N], log mu [N] -> [N]. The effective sample size is missing,
because no single token has one.
"""


@torch.no_grad()
def apply_rules(rules: Sequence[Rule], inputs: RuleInputs) -> RuleHits:
    """Return which tokens the rules mask and clip. Tokens that are not finite count in no statistic.

    Every rule sees all tokens, also those that another one has masked, so their order does not matter. A rule that
    masks or clips by the step's mean counts 0 tokens here.
    """
    masked_N = torch.zeros_like(inputs.finite)
    clipped_N = torch.zeros_like(inputs.finite)
    counts: list[Tensor] = []
    for rule in rules:
        hit_N = _hits(rule, inputs)
        if rule.action == "mask":
            masked_N = masked_N | hit_N
        else:
            clipped_N = clipped_N | hit_N
        counts.append(hit_N.sum())
    silent_N = clipped_N
    if len(inputs.verdicts):
        masked_N = masked_N | (inputs.verdicts == Verdict.MASK)
        clipped_N = clipped_N | (inputs.verdicts == Verdict.CLIP)
        silent_N = clipped_N | (inputs.verdicts == Verdict.SILENT)
    counts_R = torch.stack(counts).double() if counts else masked_N.new_zeros(0, dtype=torch.float64)
    return RuleHits(masked_N, silent_N & ~masked_N, clipped_N & ~masked_N, counts_R)


def _hits(rule: Rule, inputs: RuleInputs) -> Tensor:
    """Return the tokens that ``rule`` masks or clips, bool [N]."""
    if rule.level == "step":
        return torch.zeros_like(inputs.finite)
    log_ratio_N = inputs.log_ratio if rule.policy == "trained" else inputs.anchor_log_ratio
    statistic_N = token_statistic(rule.statistic, log_ratio_N, inputs.behavior_logprobs)
    if rule.level != "token":
        # Tokens that are not finite have ratio 1. They form a separate unit, so they don't change the statistic.
        index_N, num_units = inputs.sequence_index, inputs.num_sequences + 1
        unit_N = torch.where(inputs.finite, 0 if rule.level == "micro_batch" else index_N, num_units - 1)
        statistic_N = _reduced(rule, statistic_N, unit_N, num_units)
        log_ratio_N = _mean_by(unit_N, log_ratio_N, num_units)[unit_N]
    return beyond(rule, statistic_N) & applies(rule, log_ratio_N, inputs.advantages) & inputs.finite


def beyond(rule: Rule, statistic_N: Tensor) -> Tensor:
    """Return where a statistic is beyond a limit of ``rule``, bool."""
    hit_N = torch.zeros_like(statistic_N, dtype=torch.bool)
    if rule.above is not None:
        hit_N = hit_N | (statistic_N > rule.above)
    if rule.below is not None:
        hit_N = hit_N | (statistic_N < rule.below)
    return hit_N


def applies(rule: Rule, log_ratio_N: Tensor, advantages_N: Tensor) -> Tensor:
    """Return the tokens whose advantages ``rule.when`` names, bool [N]."""
    if rule.when == "always":
        return torch.ones_like(log_ratio_N, dtype=torch.bool)
    if rule.when == "outward":
        return log_ratio_N * advantages_N > 0
    return advantages_N > 0 if rule.when == "positive" else advantages_N < 0


def _reduced(rule: Rule, statistic_N: Tensor, unit_N: Tensor, num_units: int) -> Tensor:
    """Return for each token the mean, sum or maximum of the statistic over its unit, [N]."""
    if rule.reduce == "mean":
        return _mean_by(unit_N, statistic_N, num_units)[unit_N]
    if rule.reduce == "sum":
        return sum_by(unit_N, statistic_N, num_units)[unit_N]
    highest = statistic_N.new_full((num_units,), -torch.inf)
    return highest.scatter_reduce_(0, unit_N, statistic_N, "amax")[unit_N]


def _mean_by(unit_N: Tensor, values_N: Tensor, num_units: int) -> Tensor:
    counts = sum_by(unit_N, torch.ones_like(unit_N), num_units)
    return sum_by(unit_N, values_N, num_units) / counts.clamp(min=1)


def step_sums(rules: Sequence[Rule], log_ratio_N: Tensor, behavior_logprobs_N: Tensor, kept_N: Tensor) -> Tensor:
    """Return float64 [R]: for each rule that skips steps, the sum of its statistic over the kept tokens, else 0."""
    sums = log_ratio_N.new_zeros(len(rules))
    for number, rule in enumerate(rules):
        if rule.action == "skip" and rule.statistic in STATISTIC_FUNCTIONS:
            statistic_N = token_statistic(rule.statistic, log_ratio_N, behavior_logprobs_N)
            sums[number] = statistic_N.masked_fill(~kept_N, 0.0).sum()
    return sums


def why_skip(rules: Sequence[Rule], sums_R: Sequence[float], *, tokens: float, ess: float) -> str:
    """Return which rule says that the optimizer step must be skipped. Empty if none does.

    Args:
        rules: all rules.
        sums_R: for each rule the sum of ``step_sums`` over the whole step, on the host.
        tokens: number of the step's kept tokens.
        ess: their normalised effective sample size.
    """
    for rule, total in zip(rules, sums_R, strict=True):
        if rule.action != "skip":
            continue
        value = ess if STATISTICS[rule.statistic].of_step else total / max(1.0, tokens)
        if (rule.above is not None and value > rule.above) or (rule.below is not None and value < rule.below):
            return (
                f"{_NAMES.get(rule.statistic, f'the mean {rule.statistic}')} is {value:.3g}, beyond {_limits(rule)}; "
                f"lower queue.max_staleness or optimizer.lr"
            )
    return ""


_NAMES = {"ess": "the effective sample size as a share of the tokens", "k3": "KL(mu || pi) in nats"}


def _limits(rule: Rule) -> str:
    if rule.name in SHORT_RULES:
        return f"loss.{rule.name} = {rule.above if rule.below is None else rule.below}"
    limits = [
        f"{side} = {limit}" for side, limit in (("above", rule.above), ("below", rule.below)) if limit is not None
    ]
    return f"{' or '.join(limits)} of the rule {rule.label!r} in loss.rules"
