"""The metrics of one step, from its parts. With several updates a step, means are token-weighted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from async_rl.learner.batch import PreparedBatch
from async_rl.learner.engine.protocol import UpdateStats
from async_rl.learner.losses.diagnostics import Summary, summarise, update_effect
from async_rl.learner.step_result import StepResult
from async_rl.queue.messages import QueueStats, TakenGroup
from async_rl.records import Rollout


def step_metrics(result: StepResult, queue: QueueStats) -> dict[str, float]:
    """The row for ``metrics.jsonl`` but for step, version and times."""
    prepared, updates, staleness, facts = result.prepared, result.measured, result.staleness, result.facts
    return {
        **_sampled_metrics(result.groups, prepared),
        **update_metrics(updates),
        **({} if prepared.reference_kl is None else {"kl/reference": prepared.reference_kl}),
        "tokens/trained": facts.tokens_trained,
        "tokens/masked": sum(facts.tokens_masked.values()),
        **{f"masked/{cause}": count for cause, count in facts.rollouts_masked.items()},
        "skip/sequences": sum(len(u.skipped_sequence_ids) for u in updates),
        "skip/tokens": sum(u.skipped_tokens for u in updates),
        "skip/out_of_range": sum(u.out_of_range_tokens for u in updates),
        "skip/steps": len(prepared.updates) - sum(u.stepped for u in updates),
        "staleness/mean": staleness.mean,
        "staleness/max": staleness.max,
        "staleness/in_flight_mean": staleness.in_flight_mean,
        "staleness/in_queue_mean": staleness.in_queue_mean,
        "queue/depth": queue.depth,
        "queue/bytes": queue.bytes,
        "queue/in_flight": queue.in_flight,
        "generators": queue.num_generators,
    }


def _sampled_metrics(taken: Sequence[TakenGroup], prepared: PreparedBatch) -> dict[str, float]:
    rollouts, lengths = [r for item in taken for r in item.group.rollouts], prepared.rollout_tokens
    parts: defaultdict[str, float] = defaultdict(float)
    for rollout in rollouts:
        for name, value in rollout.reward_parts.items():
            parts[name] += value
    return {
        "reward/mean": float(np.mean([r.reward for r in rollouts])),
        "accuracy/mean": float(np.mean([r.accuracy for r in rollouts])),
        "temperature": float(np.mean([item.group.temperature for item in taken])),
        "length/mean": float(np.mean(lengths)),
        "length/max": max(lengths),
        "length/truncated": float(np.mean([r.finish_reason == "length" for r in rollouts])),
        **{f"reward/{name}": total / len(rollouts) for name, total in parts.items()},
        **turn_metrics(rollouts),
    }


def turn_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Of the rollouts that an environment played to their end; nothing without one."""
    played = [rollout for rollout in rollouts if rollout.turns]
    if not played:
        return {}
    return {
        "score/mean": float(np.mean([rollout.score for rollout in played])),
        "turns/mean": float(np.mean([len(rollout.turns) for rollout in played])),
        "turns/max": max(len(rollout.turns) for rollout in played),
    }


def update_metrics(updates: Sequence[UpdateStats]) -> dict[str, float]:
    """What the optimizer steps measured; nothing without one."""
    if not updates:
        return {}
    weights = np.array([max(u.tokens_trained, 0) for u in updates], dtype=np.float64)
    weights = weights / weights.sum() if weights.sum() else np.full(len(updates), 1 / len(updates))

    def mean(name: str) -> float:
        return float(np.dot(weights, [getattr(u, name) for u in updates]))

    return {
        "loss/policy": mean("loss"),
        "entropy": mean("entropy"),
        "grad_norm": mean("grad_norm"),
        "lr": updates[-1].lr,
        "ratio/mean": mean("ratio_mean"),
        "ratio/max": max(u.ratio_max for u in updates),
        "ratio/clip_fraction": mean("clip_fraction"),
        "ratio/ess": mean("ess"),
        "ratio/mean_abs_log": mean("mean_abs_log_ratio"),
        **({"kl/reference": mean("reference_kl")} if any(u.reference_kl for u in updates) else {}),
        **_lag_metrics(updates),
    }


def _lag_metrics(updates: Sequence[UpdateStats]) -> dict[str, float]:
    """Diagnostics over all tokens, then over those of each lag that occurred."""
    measured = [u.by_lag for u in updates if len(u.by_lag)]
    if not measured:
        return {}
    rows = np.sum(measured, axis=0)
    total = summarise(rows.sum(0))
    metrics = {
        "mismatch_kl/mean": total.mismatch_k3,
        "mismatch_kl/k1": total.mismatch_k1,
        "ratio/p01": total.ratio_p01,
        "ratio/p50": total.ratio_p50,
        "ratio/p99": total.ratio_p99,
        "ratio/clip_low": total.capped_low,
        "ratio/clip_high": total.capped_high,
        "ratio/kl": total.kl,
        "skip/token_fraction": total.skipped + total.out_of_range,
    }
    for lag in np.flatnonzero(rows.any(1)).tolist():
        metrics |= _metrics_of_lag(lag, summarise(rows[lag]))
    return metrics | _weight_update_metrics(rows)


def _weight_update_metrics(rows: np.ndarray) -> dict[str, float]:
    """What keys and values from before a weight update do to the mismatch, apart from staleness.

    Tokens after a weight update in their answer are compared with others of the same lag.
    """
    by_lag = update_effect(rows)
    if not by_lag:
        return {}
    metrics: dict[str, float] = {"mismatch_kl/after_update_tokens": sum(tokens for tokens, _, _ in by_lag.values())}
    for lag, (_, after, others) in by_lag.items():
        metrics |= {f"mismatch_kl/after_update_lag_{lag}": after, f"mismatch_kl/no_update_lag_{lag}": others}
    surplus = sum(tokens * (after - others) for tokens, after, others in by_lag.values())
    return metrics | {"mismatch_kl/update_effect": surplus / metrics["mismatch_kl/after_update_tokens"]}


def _metrics_of_lag(lag: int, of_lag: Summary) -> dict[str, float]:
    values = {
        "tokens": of_lag.tokens,
        "mismatch_k1": of_lag.mismatch_k1,
        "mean_abs_log": of_lag.mean_abs_log_ratio,
        "ratio_mean": of_lag.ratio_mean,
        "ratio_max": of_lag.ratio_max,
        "ratio_p01": of_lag.ratio_p01,
        "ratio_p50": of_lag.ratio_p50,
        "ratio_p99": of_lag.ratio_p99,
        "clip_low": of_lag.capped_low,
        "clip_high": of_lag.capped_high,
        "skipped": of_lag.skipped,
        "out_of_range": of_lag.out_of_range,
        "ess": of_lag.ess,
    }
    return {f"mismatch_kl/lag_{lag}": of_lag.mismatch_k3, **{f"lag_{lag}/{name}": v for name, v in values.items()}}
