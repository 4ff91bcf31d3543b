"""The policy loss token by token in Python floats, value and derivative, straight from the papers' formulas."""

from __future__ import annotations

import math
from typing import NamedTuple

from async_rl.config.loss import LossConfig
from async_rl.config.rules import Rule
from tests.learner.losses.cases import MAX_LENGTH, Case


class Expected(NamedTuple):
    loss: float
    gradient: list[float]
    entropy_gradient: list[float]
    denominator: int
    skipped: list[bool]
    kept: list[bool]


def loss_by_loops(case: Case, loss: LossConfig) -> Expected:
    num_tokens = len(case.logprobs)
    total, denominator = 0.0, 0
    gradient, entropy_gradient, kept = [0.0] * num_tokens, [0.0] * num_tokens, [False] * num_tokens
    skipped: list[bool] = []
    start = 0
    for length in case.lengths:
        tokens = list(range(start, start + length))
        start += length
        if length and is_skipped(case, tokens, loss):
            skipped.append(True)
            continue
        left = [t for t in tokens if loss.token_range is None or is_in_range(case, t, loss)]
        left = [t for t in left if not any(is_hit(rule, case, t, tokens, loss) for rule in loss.rules if is_mask(rule))]
        skipped.append(bool(tokens) and not left)
        if not left:
            continue
        if loss.aggregation == "token":
            weight = 1.0
            denominator += len(left)
        elif loss.aggregation == "sequence":
            weight = 1.0 / len(left)
            denominator += 1
        else:
            weight = 1.0 / MAX_LENGTH
            denominator += 1
        for t in left:
            kept[t] = True
            objective, slope = token_objective(case, t, left, loss)
            if any(is_hit(rule, case, t, tokens, loss) for rule in loss.rules if is_clip(rule)):
                objective, slope = 0.0, 0.0
            total -= weight * objective
            gradient[t] -= weight * slope
            if loss.kl_coef and loss.kl_placement == "loss":
                d = case.logprobs[t] - case.reference[t]
                kl, kl_slope = {"k2": (d * d / 2, d), "k3": (math.exp(-d) - 1 + d, 1 - math.exp(-d))}[loss.kl_estimator]
                if loss.kl_weighted:
                    ratio = math.exp(case.logprobs[t] - case.behavior[t])
                    kl, kl_slope = ratio * kl, ratio * (kl + kl_slope)
                total += weight * loss.kl_coef * kl
                gradient[t] += weight * loss.kl_coef * kl_slope
            total -= weight * loss.entropy_coef * case.entropies[t]
            entropy_gradient[t] -= weight * loss.entropy_coef
    return Expected(total, gradient, entropy_gradient, denominator, skipped, kept)


def is_skipped(case: Case, tokens: list[int], loss: LossConfig) -> bool:
    if any(not math.isfinite(case.behavior[t]) for t in tokens):
        return True
    if loss.skip_threshold is None:
        return False
    ratios = [math.exp(case.logprobs[t] - case.behavior[t]) for t in tokens]
    if loss.skip_statistic == "mean":
        statistic = sum(ratios) / len(ratios)
    elif loss.skip_statistic == "max":
        statistic = max(ratios)
    elif loss.skip_statistic == "geometric":
        product = 1.0
        for ratio in ratios:
            product *= ratio
        statistic = product ** (1 / len(ratios))
    else:
        statistic = sum(ratio - 1 - math.log(ratio) for ratio in ratios) / len(ratios)
    return statistic > loss.skip_threshold


def is_in_range(case: Case, t: int, loss: LossConfig) -> bool:
    assert loss.token_range is not None
    numerator = proximal(case, t, loss) if loss.anchor != "behavior" else case.logprobs[t]
    return loss.token_range[0] <= math.exp(numerator - case.behavior[t]) <= loss.token_range[1]


def is_mask(rule: Rule) -> bool:
    return rule.action == "mask" and rule.level != "step"


def is_clip(rule: Rule) -> bool:
    return rule.action == "clip" and rule.level != "step"


def is_hit(rule: Rule, case: Case, t: int, tokens: list[int], loss: LossConfig) -> bool:
    """Whether ``rule`` says something of token t, of a sequence with these tokens."""
    of = tokens if rule.level == "sequence" else [t]
    ratios: list[float] = []
    values: list[float] = []
    for i in of:
        numerator = case.logprobs[i] if rule.policy == "trained" else proximal(case, i, loss)
        mu, pi = math.exp(case.behavior[i]), math.exp(numerator)
        ratios.append(pi / mu)
        values.append(statistic_of(rule.statistic, mu, pi))
    value = {"max": max(values), "sum": sum(values), "mean": sum(values) / len(values)}[rule.reduce]
    outside = (rule.above is not None and value > rule.above) or (rule.below is not None and value < rule.below)
    advantage = case.advantages[t]
    if rule.when == "positive":
        return outside and advantage > 0
    if rule.when == "negative":
        return outside and advantage < 0
    if rule.when == "outward":
        return outside and (advantage > 0 if math.prod(ratios) > 1 else advantage < 0 and math.prod(ratios) < 1)
    return outside


def statistic_of(name: str, mu: float, pi: float) -> float:
    ratio = pi / mu
    if name == "binary_kl":
        rest = 0.0 if mu == 1 else (1 - mu) * (math.log(1 - mu) - (math.log(1 - pi) if pi < 1 else -math.inf))
        return mu * math.log(mu / pi) + rest
    return {
        "ratio": ratio,
        "abs_log_ratio": abs(math.log(ratio)),
        "k1": -math.log(ratio),
        "k2": math.log(ratio) ** 2 / 2,
        "k3": ratio - 1 - math.log(ratio),
        "tv": abs(pi - mu),
    }[name]


def proximal(case: Case, t: int, loss: LossConfig) -> float:
    if loss.anchor == "proximal":
        return case.proximal[t]
    lag = case.lags[t]
    if lag == 0:
        return case.logprobs[t]
    return case.behavior[t] / lag + case.logprobs[t] * (lag - 1) / lag


def token_objective(case: Case, t: int, left: list[int], loss: LossConfig) -> tuple[float, float]:
    """What is maximised, and its derivative by the token's logprob."""
    anchors = {i: proximal(case, i, loss) if loss.anchor != "behavior" else case.behavior[i] for i in left}
    numerators = anchors if loss.anchor != "behavior" else {i: case.logprobs[i] for i in left}
    if loss.ratio_level == "token":
        ratio = math.exp(case.logprobs[t] - anchors[t])
        importance = math.exp(numerators[t] - case.behavior[t])
    else:
        ratio = math.exp(sum(case.logprobs[i] - anchors[i] for i in left) / len(left))
        importance = math.exp(sum(numerators[i] - case.behavior[i] for i in left) / len(left))
    advantage, logprob = case.advantages[t], case.logprobs[t]
    if loss.surrogate == "clip":
        # d ratio / d logprob = ratio; for a sequence's ratio the 1 / length is in the aggregation (GSPO-token).
        bounded = min(max(ratio, 1 - loss.clip_low), 1 + loss.clip_high)
        objective, slope = ratio * advantage, ratio * advantage
        if bounded * advantage < objective:
            objective, slope = bounded * advantage, 0.0
        if loss.dual_clip is not None and advantage < 0 and objective < loss.dual_clip * advantage:
            objective, slope = loss.dual_clip * advantage, 0.0
    elif loss.surrogate == "cispo":
        bounded = min(max(ratio, 1 - loss.clip_low), 1 + loss.clip_high)
        objective, slope = bounded * advantage * logprob, bounded * advantage
    elif loss.surrogate == "plain":
        objective, slope = advantage * logprob, advantage
    elif loss.surrogate == "sapo":
        tau = loss.sapo_positive if advantage > 0 else loss.sapo_negative
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        objective, slope = 4 / tau * gate * advantage, 4 * gate * (1 - gate) * ratio * advantage
    elif loss.surrogate == "gmpo":
        logs = {i: case.logprobs[i] - anchors[i] for i in left}
        for i, value in logs.items():
            if case.advantages[i] > 0:
                logs[i] = min(value, math.log(1 + loss.clip_high))
            elif case.advantages[i] < 0:
                logs[i] = max(value, math.log(1 - loss.clip_low))
        objective = math.exp(sum(logs.values()) / len(left)) * advantage
        slope = objective if logs[t] == case.logprobs[t] - anchors[t] else 0.0
        if loss.dual_clip is not None and advantage < 0 and objective < loss.dual_clip * advantage:
            objective, slope = loss.dual_clip * advantage, 0.0
    else:
        raise NotImplementedError(f"write loss.surrogate = {loss.surrogate!r} here as a plain loop")
    weight = 1.0 if loss.importance_cap is None else min(importance, loss.importance_cap)
    return weight * objective, weight * slope
