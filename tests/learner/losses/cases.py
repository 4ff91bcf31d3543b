"""Small batches for the losses, in float64: by ratios for numbers worked by hand, ragged and random for references."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from async_rl.config.loss import LossConfig
from async_rl.learner.losses.policy import PolicyInputs, PolicyLoss, policy_loss
from async_rl.learner.sequences import COLUMNS

MAX_LENGTH = 8

SETTINGS: dict[str, dict[str, Any]] = {
    **{preset: {"preset": preset, "kl_coef": 0.0} for preset in (
        "dapo", "grpo", "dr_grpo", "reinforce", "rloo", "reinforce_pp", "gspo", "cispo", "ppo_clip", "decoupled_ppo",
        "agpo", "sapo", "gmpo", "dppo_tv", "dppo_kl", "opsm", "icepop", "m2po",
    )},
    "grpo_with_kl": {"preset": "grpo"},
    "reinforce_pp_with_kl": {"preset": "reinforce_pp", "kl_coef": 0.1},
    "kl_beside_the_loss": {"kl_coef": 0.1, "kl_placement": "reward"},
    "uncorrected": {"preset": "reinforce", "importance_cap": 0, "skip_threshold": 0},
    "gspo_wide": {"preset": "gspo", "clip_low": 0.2, "clip_high": 0.3},
    "gspo_decoupled": {"preset": "gspo", "clip_low": 0.2, "clip_high": 0.3, "anchor": "proximal",
                       "importance_cap": 1.5},
    "cispo_bounded": {"preset": "cispo", "clip_low": 0.3, "clip_high": 0.5},
    "cispo_decoupled": {"preset": "cispo", "clip_high": 0.5, "anchor": "proximal", "importance_cap": 1.2},
    "cispo_by_sequence": {"preset": "cispo", "clip_high": 0.5, "ratio_level": "sequence"},
    "reinforce_by_sequence": {"preset": "reinforce", "ratio_level": "sequence", "importance_cap": 1.1},
    "interpolated": {"preset": "decoupled_ppo", "anchor": "interpolated", "importance_cap": 1.3},
    "proximal_only": {"preset": "decoupled_ppo", "importance_cap": 0},
    "icepop": {"preset": "decoupled_ppo", "token_range": [0.5, 5.0]},
    "range_on_behavior": {"token_range": [0.7, 1.6], "aggregation": "sequence"},
    "skip_mean": {"skip_threshold": 1.5},
    "skip_max": {"skip_threshold": 3.0, "skip_statistic": "max"},
    "skip_geometric": {"skip_threshold": 1.3, "skip_statistic": "geometric", "aggregation": "sequence"},
    "skip_k3": {"skip_threshold": 0.3, "skip_statistic": "k3", "aggregation": "sequence_sum"},
    "sapo_decoupled": {"preset": "sapo", "sapo_positive": 0.7, "anchor": "proximal", "importance_cap": 1.5},
    "gmpo_by_rules": {"preset": "gmpo", "clip_low": 0.1, "clip_high": 0.1, "dual_clip": 1.5, "rules": [
        {"level": "token", "statistic": "ratio", "above": 3.0}]},
    "gspo_by_rules": {"preset": "gspo", "clip_low": 0.2, "clip_high": 0.3, "rules": [
        {"level": "token", "statistic": "ratio", "above": 2.0}]},
    "kl_weighted": {"preset": "grpo", "kl_weighted": True},
    "rule_opsm": {"rules": [{"level": "sequence", "statistic": "k1", "above": 0.2, "when": "negative"}]},
    "rule_tv": {"preset": "reinforce", "importance_cap": 20.0, "rules": [
        {"level": "token", "statistic": "tv", "above": 0.1, "when": "outward", "action": "clip"}]},
    "rule_binary_kl": {"preset": "reinforce", "rules": [
        {"level": "token", "statistic": "binary_kl", "above": 0.05, "when": "outward"}]},
    "rule_geometric": {"aggregation": "sequence", "rules": [
        {"level": "sequence", "statistic": "k1", "above": 0.4, "below": -0.3, "action": "clip"}]},
    "rule_icepop": {"preset": "decoupled_ppo", "rules": [
        {"level": "token", "statistic": "ratio", "above": 5.0, "below": 0.5, "action": "clip", "policy": "anchor"}]},
    "rules_together": {"kl_coef": 0.2, "kl_placement": "loss", "entropy_coef": 0.1, "token_range": [0.1, 9.0],
                       "rules": [
        {"level": "token", "statistic": "k2", "above": 0.5, "when": "positive", "action": "clip"},
        {"level": "sequence", "statistic": "abs_log_ratio", "reduce": "max", "above": 2.5},
        {"level": "sequence", "statistic": "k1", "reduce": "sum", "below": -1.5},
        {"level": "sequence", "statistic": "k3", "above": 1.0, "when": "outward"}]},
    "entropy": {"entropy_coef": 0.05, "aggregation": "sequence"},
    "everything": {"preset": "decoupled_ppo", "dual_clip": 1.5, "token_range": [0.2, 8.0], "kl_coef": 0.2,
                   "kl_placement": "loss", "kl_estimator": "k2", "entropy_coef": 0.1, "aggregation": "sequence_sum",
                   "skip_threshold": 4.0, "skip_statistic": "k3"},
}  # fmt: skip
"""Every preset, and settings that reach every branch between them. KL is off in the presets' own entries."""


def settings(name: str) -> LossConfig:
    return LossConfig(**SETTINGS[name])


class Case(NamedTuple):
    """Lists over all tokens, one sequence after the other; ``lengths`` says where each ends."""

    logprobs: list[float]
    behavior: list[float]
    advantages: list[float]
    reference: list[float]
    proximal: list[float]
    entropies: list[float]
    lags: list[int]
    lengths: list[int]


@st.composite
def ragged_cases(draw: st.DrawFn, *, nonfinite: bool = True) -> Case:
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=5))
    n = sum(lengths)

    def floats(low: float, high: float) -> list[float]:
        return draw(st.lists(st.floats(low, high, width=32), min_size=n, max_size=n))

    behavior = floats(-3, 0)
    if nonfinite:
        bad = draw(st.lists(st.sampled_from([False] * 6 + [True]), min_size=n, max_size=n))
        behavior = [math.nan if is_bad else value for value, is_bad in zip(behavior, bad, strict=True)]
    return Case(
        floats(-3, 0),
        behavior,
        floats(-3, 3),
        floats(-3, 0),
        floats(-3, 0),
        floats(0, 3),
        draw(st.lists(st.integers(0, 4), min_size=n, max_size=n)),
        lengths,
    )


def joined(first: Case, second: Case) -> Case:
    values: Any = (a + b for a, b in zip(first, second, strict=True))
    return Case(*values)


def inputs_of(case: Case) -> PolicyInputs:
    """``logprobs`` and ``entropies`` are leaves that want a gradient."""
    floats = [torch.tensor(values, dtype=torch.float64) for values in case[:6]]
    logprobs, behavior, advantages, reference, proximal, entropies = floats
    return PolicyInputs(
        logprobs=logprobs.requires_grad_(),
        entropies=entropies.requires_grad_(),
        sequence_index=index_of(case.lengths),
        num_sequences=len(case.lengths),
        lag=torch.tensor(case.lags, dtype=torch.int64),
        **columns(
            behavior_logprobs=behavior, advantages=advantages, reference_logprobs=reference, proximal_logprobs=proximal
        ),
    )


def columns(**given: Tensor) -> dict[str, Any]:
    """All columns of tokens: those given, and the others without values."""
    return {name: torch.zeros(0) for name in COLUMNS} | given


def index_of(lengths: Sequence[int]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))


class Run(NamedTuple):
    out: PolicyLoss
    gradient: list[float]  # of the logprobs
    entropy_gradient: list[float]


def run(inputs: PolicyInputs, loss: LossConfig, max_length: int = MAX_LENGTH) -> Run:
    out = policy_loss(inputs, loss, max_length=max_length)
    out.loss_sum.backward()
    gradients = [t.grad if t.grad is not None else torch.zeros_like(t) for t in (inputs.logprobs, inputs.entropies)]
    return Run(out, *(g.tolist() for g in gradients))


def of_ratios(
    ratios: list[float], advantages: list[float], lengths: list[int] | None = None, **changes: Any
) -> PolicyInputs:
    """Tokens with these pi/mu, mu = e^-1 throughout, lag 0; ``changes`` replace fields, given as lists."""
    case = Case(
        [-1.0 + math.log(r) for r in ratios],
        [-1.0] * len(ratios),
        advantages,
        [],
        [],
        [0.0] * len(ratios),
        [0] * len(ratios),
        lengths if lengths is not None else [len(ratios)],
    )
    tensors = {k: torch.tensor(v, dtype=torch.int64 if k == "lag" else torch.float64) for k, v in changes.items()}
    return replace(inputs_of(case), **tensors)
