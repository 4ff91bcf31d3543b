"""Judges the tokens of one optimizer step by statistics of the whole step, before it is made.

``loss.rules`` at the level ``step`` that mask or clip, and ``loss.entropy_quantile``, are decided here. The trainer
calls it on rank 0 with the sequences of the step and the scores of the policy that the step changes. It gets the
sequences back with a verdict on each token, which travels with the micro-batches (``losses/rules.py`` applies it).
Because the whole step is judged at once, the result depends neither on the cut into micro-batches nor on the number of
ranks.

Shape letters: N = trained tokens of the step, M = those of them that a rule judges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from async_rl.config.loss import LossConfig
from async_rl.config.rules import ENTROPY_QUANTILE, Rule
from async_rl.learner.interface import PolicyScores
from async_rl.learner.losses.parts import log_ratio
from async_rl.learner.losses.rules import Verdict, applies, token_statistic
from async_rl.learner.sequences import TrainSequence


class JudgedStep(NamedTuple):
    """The result of ``judge_step``.

    Attributes:
        sequences: those of the step, with ``TrainSequence.verdicts``.
        counts: for each rule that judges the step, by its label, the number of tokens it masked or clipped; and
            that of ``loss.entropy_quantile``.
    """

    sequences: list[TrainSequence]
    counts: dict[str, int]


def judge_step(sequences: Sequence[TrainSequence], scores: Mapping[int, PolicyScores], loss: LossConfig) -> JudgedStep:
    """Decide which tokens of one optimizer step leave the loss or its objective.

    Args:
        sequences: all sequences of the step, with advantages.
        scores: what the policy says of each before the step, by sequence id.
        loss: the rules and the quantile.
    """
    tokens = _tokens(sequences, scores)
    verdicts_N = torch.zeros(len(tokens.finite), dtype=torch.uint8)
    counts: dict[str, int] = {}
    for rule in loss.rules:
        if rule.masks_step:
            hit_N = _hits(rule, tokens)
            verdict = Verdict.MASK if rule.action == "mask" else Verdict.CLIP
            verdicts_N = torch.where(hit_N, verdicts_N.clamp(min=verdict), verdicts_N)
            counts[rule.label] = int(hit_N.sum())
    if loss.entropy_quantile is not None:
        low_N = low_entropy([scores[s.sequence_id].entropies for s in sequences], loss.entropy_quantile)
        verdicts_N = torch.where(low_N, verdicts_N.clamp(min=Verdict.SILENT), verdicts_N)
        counts[ENTROPY_QUANTILE] = int(low_N.sum())
    lengths = [int(np.count_nonzero(s.loss_mask)) for s in sequences]
    parts = np.split(verdicts_N.numpy(), np.cumsum(lengths)[:-1])
    return JudgedStep([_with_verdicts(s, part) for s, part in zip(sequences, parts, strict=True)], counts)


class _Tokens(NamedTuple):
    """The trained tokens of a step: log pi/mu and log mu float64 [N], 0 where mu is not finite; advantages [N]."""

    log_ratio: Tensor
    behavior_logprobs: Tensor
    finite: Tensor
    advantages: Tensor


def _tokens(sequences: Sequence[TrainSequence], scores: Mapping[int, PolicyScores]) -> _Tokens:
    def joined(parts: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(np.float64))

    behavior_N = joined([s.behavior_logprobs[s.loss_mask] for s in sequences])
    policy_N = joined([scores[s.sequence_id].logprobs for s in sequences])
    finite_N = behavior_N.isfinite()
    return _Tokens(
        log_ratio=log_ratio(policy_N, behavior_N, finite_N),
        behavior_logprobs=behavior_N.masked_fill(~finite_N, 0.0),
        finite=finite_N,
        advantages=joined([s.advantages[s.loss_mask] for s in sequences]),
    )


def _hits(rule: Rule, tokens: _Tokens) -> Tensor:
    """Return the tokens that ``rule`` leaves out, bool [N]."""
    statistic_N = token_statistic(rule.statistic, tokens.log_ratio, tokens.behavior_logprobs)
    # A NaN comes from the policy. It stays in, so that the step fails visibly.
    judged_N = applies(rule, tokens.log_ratio, tokens.advantages) & tokens.finite & ~statistic_N.isnan()
    hit_N = torch.zeros_like(judged_N)
    hit_N[judged_N] = left_out(statistic_N[judged_N], limit=rule.above or 0.0, is_clip=rule.action == "clip")
    return hit_N


def left_out(statistic_M: Tensor, *, limit: float, is_clip: bool) -> Tensor:
    """Return the fewest tokens with the highest statistic without which the mean is at most ``limit``, bool [M].

    With the action ``mask`` the mean is over the other tokens, as in AReaL's form of M2PO. With ``clip`` it is over all
    tokens, and those left out count as the highest of the others, because they are cut there. This is the criterion of
    the code of M2PO's authors (arXiv:2510.01161). If no token is within the limit, all are left out. Among equals the
    later ones stay.

    Args:
        statistic_M: float64 [M], without NaN; infinity is allowed.
        limit: the largest mean.
        is_clip: whether the action is ``clip``.
    """
    num = len(statistic_M)
    sorted_M, order_M = statistic_M.sort(descending=True, stable=True)
    # Entry m: m tokens are left out. Summed from the lowest up, so that an infinite token does not spoil other sums.
    rest_M = sorted_M.flip(0).cumsum(0).flip(0)
    index_M = torch.arange(num, dtype=torch.float64)
    # Not m times the statistic at m = 0, where it may be infinite.
    cut_M = torch.where(index_M > 0, index_M * sorted_M, 0.0)
    mean_M = (rest_M + cut_M) / num if is_clip else rest_M / (num - index_M)
    hit_M = torch.zeros(num, dtype=torch.bool)
    hit_M[order_M[: int((mean_M > limit).sum())]] = True
    return hit_M


def low_entropy(entropies: Sequence[np.ndarray], quantile: float) -> Tensor:
    """Return the tokens below the ``quantile`` of all entropies, bool [N] (arXiv:2506.01939: 0.8).

    Between two entropies the quantile is linear. It is over all trained tokens of the optimizer step. (The paper's is
    over a batch, that of TRL over a micro-batch of all ranks.) NaN is below nothing.

    Args:
        entropies: float32 [tokens] for each sequence, nats.
        quantile: between 0 and 1.
    """
    values_N = np.concatenate(entropies).astype(np.float64)
    return torch.from_numpy(values_N < np.quantile(values_N, quantile)) if len(values_N) else torch.zeros(0).bool()


def _with_verdicts(sequence: TrainSequence, verdicts: np.ndarray) -> TrainSequence:
    along = np.zeros(len(sequence.token_ids), dtype=np.uint8)
    along[sequence.loss_mask] = verdicts
    return replace(sequence, verdicts=along)
