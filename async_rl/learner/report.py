"""One step's metrics from its parts; the keys are DESIGN's. With several updates a step, means are token-weighted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from async_rl.learner.batch import PreparedBatch, StalenessSummary
from async_rl.learner.engine import UpdateStats
from async_rl.queue.messages import QueueStats, TakenGroup, TrainedFacts


def step_metrics(
    taken: Sequence[TakenGroup],
    prepared: PreparedBatch,
    updates: Sequence[UpdateStats],
    staleness: StalenessSummary,
    facts: TrainedFacts,
    queue: QueueStats,
) -> dict[str, float]:
    """The row for ``metrics.jsonl`` but for step, version and times."""
    return {
        **_sampled_metrics(taken, prepared),
        **_update_metrics(updates),
        "tokens/trained": facts.tokens_trained,
        "tokens/masked": sum(facts.tokens_masked.values()),
        **{f"masked/{cause}": count for cause, count in facts.rollouts_masked.items()},
        "skip/sequences": sum(len(u.skipped_sequence_ids) for u in updates),
        "skip/tokens": sum(u.skipped_tokens for u in updates),
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
        "length/mean": float(np.mean(lengths)),
        "length/max": max(lengths),
        "length/truncated": float(np.mean([r.finish_reason == "length" for r in rollouts])),
        **{f"reward/{name}": total / len(rollouts) for name, total in parts.items()},
    }


def _update_metrics(updates: Sequence[UpdateStats]) -> dict[str, float]:
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
        **_mismatch_metrics(updates),
    }


def _mismatch_metrics(updates: Sequence[UpdateStats]) -> dict[str, float]:
    sums: defaultdict[int, float] = defaultdict(float)
    tokens: Counter[int] = Counter()
    for update in updates:
        for lag, (total, count) in update.mismatch_kl.items():
            sums[lag] += total
            tokens[lag] += count
    if not sum(tokens.values()):
        return {}
    by_lag = {f"mismatch_kl/lag_{lag}": sums[lag] / tokens[lag] for lag in sorted(tokens) if tokens[lag]}
    return {"mismatch_kl/mean": sum(sums.values()) / sum(tokens.values()), **by_lag}
