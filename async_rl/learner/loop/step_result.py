"""The result of one step: the tokens that it trained on, the tokens that it left out and why, and its metrics.

The trainer makes a ``StepResult`` after the updates of a batch. The acknowledgement to the queue and the metrics
are computed from it. ``step_metrics`` gives the step's row of ``metrics.jsonl``. With several updates per step, means
are weighted by tokens. With several epochs per batch
(``learner.epochs_per_batch``), metrics are over the optimizer steps of all epochs, but the ledger counts each rollout
and token once.

``count_skipped`` and ``check_skipped`` stop the run with a diagnosis when too many optimizer steps in a row were
skipped. The engine skips a step that exceeds the limits of ``[loss]``, has a gradient that is not finite, or has no
token left to train on. The count survives restarts (``TrainerState.skipped_in_a_row``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from async_rl.config.rules import SHORT_RULES
from async_rl.errors import TrainingError
from async_rl.learner.data.batch import MASK_CAUSES, PreparedBatch
from async_rl.learner.interface import UpdateStats
from async_rl.learner.loop.staleness import StalenessSummary, staleness_summary
from async_rl.learner.losses.advantages import agreement, zero_groups
from async_rl.learner.losses.diagnostics import summarise, update_effect
from async_rl.queue.messages import QueueStats, TakenGroup, TrainedCounts
from async_rl.records import Rollout, cut_limit

_LAG_FIGURES = (
    "tokens", "mismatch_k1", "mean_abs_log", "ratio_mean", "clip_low", "clip_high", "skipped", "out_of_range", "ess",
)  # fmt: skip
"""Statistics of ``summarise`` that become ``lag_N/...``."""


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What came out of one step on one batch.

    Attributes:
        groups: the groups of the batch, from the queue.
        prepared: the sequences of these groups, with advantages.
        updates: statistics of the update on each mini-batch, epoch after epoch. None for a mini-batch in which
            everything was masked. Empty if the step trained only the critic.
        version: the learner's version before the first update.
        staleness: staleness of the trained tokens.
        facts: counts of trained and masked rollouts and tokens, for the queue's ledger.
        causes: for each sequence that was left out as a whole after it was prepared, the cause.
    """

    groups: tuple[TakenGroup, ...]
    prepared: PreparedBatch
    updates: tuple[UpdateStats | None, ...]
    version: int
    staleness: StalenessSummary
    facts: TrainedCounts
    causes: Mapping[int, str] = field(default_factory=dict)

    @property
    def versions(self) -> list[int]:
        """The learner's version before each of ``updates``."""
        return _versions_trained(self.version, self.updates)

    @property
    def measured(self) -> list[UpdateStats]:
        """Statistics of the updates that the engine ran, skipped optimizer steps included."""
        return [update for update in self.updates if update is not None]

    @property
    def num_tokens(self) -> int:
        """Number of tokens that were not masked before the updates, summed over the epochs."""
        once = sum(self.prepared.sequence_tokens[s.sequence_id] for s in self.prepared.sequences)
        return once * len(self.updates) // max(1, len(self.prepared.mini_batches))


def step_result(
    groups: tuple[TakenGroup, ...], prepared: PreparedBatch, updates: Sequence[UpdateStats | None], *,
    version: int, has_own_loss: bool = False,
) -> StepResult:  # fmt: skip
    """Return the result of a step that made ``updates`` on the batch ``prepared``.

    ``version`` is the learner's version before the first update. ``has_own_loss`` says whether ``loss.function`` left
    tokens out, not the built-in loss.
    """
    num_mini_batches = max(1, len(prepared.mini_batches))
    of_each = [updates[first::num_mini_batches] for first in range(len(prepared.mini_batches))]
    stepped = [[update for update in epochs if update is not None and update.stepped] for epochs in of_each]
    skipped, did_step = [i for epochs in of_each for i in _skipped_in_all(epochs)], [bool(epochs) for epochs in stepped]
    return StepResult(
        groups=groups,
        prepared=prepared,
        updates=tuple(updates),
        version=version,
        staleness=staleness_summary(prepared, versions=_versions_trained(version, updates)),
        facts=trained_counts(
            prepared,
            skipped,
            stepped=did_step,
            # Later epochs may leave out other single tokens, but every token is to be counted once.
            out_of_range=sum(epochs[0].out_of_range_tokens for epochs in stepped if epochs),
            has_own_loss=has_own_loss,
        ),
        causes=_sequence_causes(prepared, skipped, stepped=did_step, has_own_loss=has_own_loss),
    )


def _skipped_in_all(epochs: Sequence[UpdateStats | None]) -> list[int]:
    """Return the sequences that the loss left out in every epoch in which the optimizer stepped on their mini-batch.
    If it never did: in every epoch.
    """
    measured = [update for update in epochs if update is not None]
    counted = [update for update in measured if update.stepped] or measured
    ids = [set(update.skipped_sequence_ids) for update in counted]
    return sorted(set.intersection(*ids)) if ids else []


def _versions_trained(version: int, updates: Sequence[UpdateStats | None]) -> list[int]:
    """Return the learner's version before each update. ``version`` is the one before the first."""
    versions: list[int] = []
    for update in updates:
        versions.append(version)
        version += update is not None and update.stepped
    return versions


def trained_counts(
    prepared: PreparedBatch, skipped_sequence_ids: Sequence[int], *, stepped: Sequence[bool], out_of_range: int = 0,
    has_own_loss: bool = False,
) -> TrainedCounts:  # fmt: skip
    """Count every rollout and token of the step as trained or masked. A rollout is masked if all its sequences are.

    Args:
        prepared: the batch.
        skipped_sequence_ids: sequences that the loss left out (``loss.skip_threshold``, ``loss.rules``).
        stepped: for each mini-batch, whether the optimizer stepped. If not, nothing of it was trained.
        out_of_range: number of single tokens that ``loss.token_range`` or ``loss.rules`` left out, in the first epoch
            that stepped on their mini-batch.
        has_own_loss: whether ``loss.function`` is the cause instead of these two keys.
    """
    causes = _sequence_causes(prepared, skipped_sequence_ids, stepped=stepped, has_own_loss=has_own_loss)
    rollouts_masked = Counter(filter(None, rollout_causes(prepared, causes)))
    tokens_masked: Counter[str] = Counter()
    for rollout, cause in prepared.masked.items():
        tokens_masked[cause] += prepared.rollout_tokens[rollout]
    if prepared.stale_tokens:
        tokens_masked["stale"] += prepared.stale_tokens
    for sequence, cause in causes.items():
        tokens_masked[cause] += prepared.sequence_tokens[sequence]
    if out_of_range:
        tokens_masked[cause_of_tokens(has_own_loss=has_own_loss)] += out_of_range
    return TrainedCounts(
        stepped=any(stepped),
        rollouts_trained=len(prepared.rollout_tokens) - sum(rollouts_masked.values()),
        rollouts_masked=dict(rollouts_masked),
        tokens_trained=sum(prepared.rollout_tokens) - sum(tokens_masked.values()),
        tokens_masked=dict(tokens_masked),
    )


def _sequence_causes(
    prepared: PreparedBatch, skipped_sequence_ids: Sequence[int], *, stepped: Sequence[bool], has_own_loss: bool
) -> dict[int, str]:
    """Return the cause for each sequence that no update trained on, as ``trained_counts`` says."""
    causes = dict.fromkeys(
        (s.sequence_id for each, did in zip(prepared.mini_batches, stepped, strict=True) if not did for s in each),
        "step_skipped",
    )
    return causes | dict.fromkeys(skipped_sequence_ids, "loss_function" if has_own_loss else "skip_threshold")


def rollout_causes(prepared: PreparedBatch, causes: Mapping[int, str]) -> list[str]:
    """Return for each rollout of the step why it was left out of the loss. Empty if some of it was trained.

    ``causes`` are those of the sequences that no update trained on.
    """
    found = [prepared.masked.get(number, "") for number in range(len(prepared.rollout_tokens))]
    outcomes: dict[int, set[str]] = {}
    for sequence, rollout in prepared.rollout_of.items():
        outcomes.setdefault(rollout, set()).add(causes.get(sequence, ""))
    for rollout, of_sequences in outcomes.items():
        if "" not in of_sequences:
            found[rollout] = min(of_sequences, key=MASK_CAUSES.index)
    return found


def cause_of_tokens(*, has_own_loss: bool) -> str:
    """Return the cause under which single tokens are counted that the loss left out."""
    return "loss_function" if has_own_loss else "token_range"


def count_skipped(skipped_in_a_row: int, updates: Sequence[UpdateStats | None]) -> int:
    """Return the number of optimizer steps that were skipped in a row, after ``updates``.

    None is an update in which everything was masked. It counts as skipped.
    """
    for update in updates:
        skipped_in_a_row = 0 if update is not None and update.stepped else skipped_in_a_row + 1
    return skipped_in_a_row


def check_skipped(skipped_in_a_row: int, last: UpdateStats | None, most: int) -> None:
    """Stop the run if ``skipped_in_a_row``, the number of optimizer steps skipped in a row, is above ``most``.

    ``last`` has the statistics of the last one.

    Raises:
        TrainingError: the number is above ``most``. The message has measurements and remedies.
    """
    if skipped_in_a_row <= most:
        return
    raise TrainingError(
        f"{skipped_in_a_row} optimizer steps in a row were skipped, expected at most {most}. Reason of the last one: "
        f"{_measured(last)}. If mismatch_kl is large at lag 0, generators and learner compute differently "
        f"with the same weights: compare dtype, temperature and engine. If it grows with the lag, lower "
        f"queue.max_staleness or optimizer.lr. If it does neither, lower loss.min_ess or raise loss.max_kl. If the "
        f"gradient is not finite, lower optimizer.lr or check the rewards. If nothing is left to train on, masked/* in "
        f"metrics.jsonl has the causes"
    )


def _measured(last: UpdateStats | None) -> str:
    if last is None:
        return "every token was masked"
    lags = {lag: summarise(row)["mismatch_k3"] for lag, row in enumerate(last.by_lag) if row.any()}
    by_lag = ", ".join(f"{kl:.3g} at lag {lag}" for lag, kl in lags.items())
    return (
        f"{last.reason} (ESS {last.ess:.3g}, ratio mean {last.ratio_mean:.3g} and max {last.ratio_max:.3g}, gradient "
        f"norm {last.grad_norm:.3g}; mismatch_kl in nats: {by_lag or 'of no token'})"
    )


def trained_metrics(result: StepResult) -> dict[str, float]:
    """Return the part of the step's row of ``metrics.jsonl`` that is about its rollouts and its training."""
    prepared, updates, staleness, facts = result.prepared, result.measured, result.staleness, result.facts
    return {
        **_sampled_metrics(result.groups, prepared),
        **update_metrics(updates),
        **({} if (agrees := agreement(prepared)) is None else {"advantage/agreement": agrees}),
        **({} if (zero := zero_groups(prepared)) is None else {"advantage/zero_groups": zero}),
        **({} if prepared.reference_kl is None else {"kl/reference": prepared.reference_kl}),
        "tokens/trained": facts.tokens_trained,
        "tokens/masked": sum(facts.tokens_masked.values()),
        **{f"masked/{cause}": count for cause, count in facts.rollouts_masked.items()},
        "skip/sequences": sum(len(u.skipped_sequence_ids) for u in updates),
        "skip/tokens": sum(u.skipped_tokens for u in updates),
        "skip/out_of_range": sum(u.out_of_range_tokens for u in updates),
        **_rule_metrics(updates, result.num_tokens),
        "skip/steps": len(result.updates) - sum(u.stepped for u in updates),
        "staleness/mean": staleness.mean,
        "staleness/max": staleness.max,
        "staleness/in_flight_mean": staleness.in_flight_mean,
        "staleness/in_queue_mean": staleness.in_queue_mean,
    }


def queue_metrics(queue: QueueStats) -> dict[str, float]:
    """Return the part of the step's row that is about the queue after the step."""
    return {
        "queue/depth": queue.depth,
        "queue/bytes": queue.bytes,
        "queue/in_flight": queue.in_flight,
        "generators": queue.num_generators,
        **queue.metrics,
    }


def _sampled_metrics(taken: Sequence[TakenGroup], prepared: PreparedBatch) -> dict[str, float]:
    rollouts, lengths = [r for item in taken for r in item.group.rollouts], prepared.rollout_tokens
    parts = dict.fromkeys(name for rollout in rollouts for name in rollout.reward_parts)
    return {
        "reward/mean": float(np.mean([r.reward for r in rollouts])),
        "accuracy/mean": float(np.mean([r.accuracy for r in rollouts])),
        "temperature": float(np.mean([item.group.temperature for item in taken])),
        "length/mean": float(np.mean(lengths)),
        "length/max": max(lengths, default=0),
        "length/truncated": float(np.mean([r.finish_reason == "length" for r in rollouts])),
        **{f"reward/{name}": float(np.mean([r.reward_parts.get(name, 0.0) for r in rollouts])) for name in parts},
        **agent_metrics(rollouts),
        **turn_metrics(rollouts),
        **teacher_metrics(rollouts),
        **source_metrics(taken),
    }


def agent_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the mean of each metric that agents reported, over the rollouts that have it."""
    names = dict.fromkeys(name for rollout in rollouts for name in rollout.metrics)
    return {
        f"agent/metric/{name}": float(np.mean([r.metrics[name] for r in rollouts if name in r.metrics]))
        for name in names
    }


def source_metrics(taken: Sequence[TakenGroup]) -> dict[str, float]:
    """Return the metrics of each named source of the training rows. Empty if the rows have no named sources."""
    sources: dict[str, list[TakenGroup]] = {}
    for item in taken:
        if item.prompt.source:
            sources.setdefault(item.prompt.source, []).append(item)
    metrics: dict[str, float] = {}
    for name, items in sorted(sources.items()):
        rollouts = [rollout for item in items for rollout in item.group.rollouts]
        metrics |= {
            f"source/{name}/groups": len(items),
            f"source/{name}/accuracy": float(np.mean([rollout.accuracy for rollout in rollouts])),
            f"source/{name}/reward": float(np.mean([rollout.reward for rollout in rollouts])),
        }
        if (kl := teacher_metrics(rollouts).get("distill/kl")) is not None:
            metrics[f"source/{name}/distill_kl"] = kl
    return metrics


def teacher_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return how far the behavior policy is from its teacher, over all sampled tokens. Empty without a teacher.

    The mean of log mu - log teacher over tokens of mu is an unbiased estimate of KL(mu || teacher).
    """
    pairs = [(s, s.teacher) for rollout in rollouts for s in rollout.sequences if s.teacher is not None]
    if not pairs or not sum(len(teacher.logprobs) for _, teacher in pairs):
        return {}
    behavior = np.concatenate([s.behavior_logprobs[s.loss_mask] for s, _ in pairs]).astype(np.float64)
    scores = np.concatenate([teacher.logprobs for _, teacher in pairs]).astype(np.float64)
    metrics = {"distill/kl": float((behavior - scores[:, 0]).mean())}
    if scores.shape[1] > 1:
        metrics["distill/top_k_mass"] = float(np.exp(scores[:, 1:]).sum(1).mean())
    return metrics


def turn_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the metrics of the rollouts that an environment played to their end. Empty if there are no such
    rollouts.
    """
    played = [rollout for rollout in rollouts if rollout.turns]
    if not played:
        return {}
    sessions = [rollout.session for rollout in played if rollout.session is not None]
    of_agents = {
        "agent/tool_calls_mean": [sum(session.tools.values()) for session in sessions],
        "agent/sampling_s_mean": [session.sampling_s for session in sessions],
        "agent/own_s_mean": [session.agent_s for session in sessions],
    }
    return {
        **{name: float(np.mean(values)) for name, values in of_agents.items() if values},
        "score/mean": float(np.mean([rollout.score for rollout in played])),
        "turns/mean": float(np.mean([len(rollout.turns) for rollout in played])),
        "turns/max": max(len(rollout.turns) for rollout in played),
    }


def cut_metrics(rollouts: Sequence[Rollout], *, max_new_tokens: int, max_turn_tokens: int | None) -> dict[str, float]:
    """Return the shares of all rollouts that ``environment.max_turn_tokens`` and the context cut. Empty without an
    environment, where only ``sampling.max_new_tokens`` cuts answers.
    """
    if not any(rollout.turns for rollout in rollouts):
        return {}
    limits = Counter(
        cut_limit(
            rollout.num_sampled, rollout.turns[-1].num_tokens if rollout.turns else 0, max_new_tokens=max_new_tokens,
            max_turn_tokens=max_turn_tokens,
        )
        for rollout in rollouts
        if rollout.finish_reason == "length"
    )  # fmt: skip
    return {
        "length/cut_turn": limits["max_turn_tokens"] / len(rollouts),
        "length/cut_context": limits["context"] / len(rollouts),
    }


def update_metrics(updates: Sequence[UpdateStats]) -> dict[str, float]:
    """Return the metrics of a step's optimizer steps, weighted by trained tokens. Empty if there was none."""
    if not updates:
        return {}
    weights = np.array([max(u.tokens_trained, 0) for u in updates], dtype=np.float64)
    weights = weights / weights.sum() if weights.sum() else np.full(len(updates), 1 / len(updates))

    def mean_of(values: Sequence[float]) -> float:
        return float(np.dot(weights, values))

    def mean(name: str) -> float:
        return mean_of([getattr(u, name) for u in updates])

    return {
        "loss/policy": mean("loss"),
        "entropy": mean("entropy"),
        "grad_norm": mean("grad_norm"),
        "lr": updates[-1].lr,
        "ratio/mean": mean("ratio_mean"),
        "ratio/max": max(u.ratio_max for u in updates),
        "ratio/clip_fraction": mean("clip_fraction"),
        "ratio/ess": mean("ess"),
        "ratio/sequence_ess": mean("sequence_ess"),
        "ratio/mean_abs_log": mean("mean_abs_log_ratio"),
        **({"kl/reference": mean("reference_kl")} if updates[0].reference_kl is not None else {}),
        **{key: mean_of([u.own_metrics[key] for u in updates]) for key in updates[0].own_metrics},
        **_packing_metrics(updates),
        **({"routing/balance_loss": mean("balance_loss")} if updates[0].balance_loss is not None else {}),
        **_routing_metrics(updates),
        **_cost_metrics(updates),
        **_lag_metrics(updates),
    }


def _rule_metrics(updates: Sequence[UpdateStats], tokens: int) -> dict[str, float]:
    """Return for each entry of ``loss.rules`` the share of the step's ``tokens`` that it masked or clipped."""
    labels = dict.fromkeys(label for u in updates for label in u.rule_tokens if label not in SHORT_RULES)
    return {f"rule/{label}": sum(u.rule_tokens.get(label, 0) for u in updates) / max(1, tokens) for label in labels}


def _packing_metrics(updates: Sequence[UpdateStats]) -> dict[str, float]:
    """Return what padded rows cost, a mean over the step's optimizer steps. Empty if rows are packed."""
    costs = [u.padded_cost for u in updates if u.padded_cost is not None]
    if not costs:
        return {}
    return {
        "packing/padding": float(np.mean([cost.padding for cost in costs])),
        "packing/repeated": float(np.mean([cost.repeated for cost in costs])),
    }


def _routing_metrics(updates: Sequence[UpdateStats]) -> dict[str, float]:
    """Return how often the replayed experts differ from the learner's own choice, and how even the experts' load is.
    Empty for a model without experts.
    """
    metrics: dict[str, float] = {}
    if counts := [u.routing for u in updates if u.routing is not None]:
        metrics["routing/different"] = sum(n for n, _ in counts) / max(1, sum(total for _, total in counts))
    load_LE = np.sum([u.expert_load for u in updates], axis=0)
    if load_LE.any():
        metrics["routing/busiest"] = float((load_LE.max(1) / load_LE.mean(1)).max())
        metrics["routing/unused"] = float((load_LE == 0).mean())
    return metrics


def _cost_metrics(updates: Sequence[UpdateStats]) -> dict[str, float]:
    """Return the seconds of each phase of the step's optimizer steps. Empty if the engine does not measure them."""
    costs = [u.cost for u in updates if u.cost is not None]
    phases = dict.fromkeys(name for cost in costs for name in cost.phase_s)
    return {f"time/{name}_s": sum(cost.phase_s.get(name, 0.0) for cost in costs) for name in phases}


def device_metrics(updates: Sequence[UpdateStats], train_s: float) -> dict[str, float]:
    """Return how a step that trained for ``train_s`` seconds used the devices: their peak memory, and the
    floating-point operations per second with their share of the devices' peak, if that is known. Empty if the engine
    does not measure them.

    ``updates`` are the optimizer steps of all models: the policy, and the critic if there is one.
    """
    costs = [u.cost for u in updates if u.cost is not None]
    if not costs:
        return {}
    metrics: dict[str, float] = {"memory/peak_bytes": max(cost.peak_memory_bytes for cost in costs)}
    if train_s > 0:
        metrics["throughput/flops_per_s"] = sum(cost.flops for cost in costs) / train_s
        if (peak := costs[0].peak_flops_per_s) is not None:
            metrics["throughput/mfu"] = metrics["throughput/flops_per_s"] / peak
    return metrics


def _lag_metrics(updates: Sequence[UpdateStats]) -> dict[str, float]:
    """Return metrics of the difference between policy and behavior policy, over all tokens and for each lag that
    occurred.
    """
    measured = [u.by_lag for u in updates if len(u.by_lag)]
    if not measured:
        return {}
    rows = np.sum(measured, axis=0)
    total = summarise(rows.sum(0))
    metrics = {
        "mismatch_kl/mean": total["mismatch_k3"],
        "mismatch_kl/k1": total["mismatch_k1"],
        "ratio/clip_low": total["clip_low"],
        "ratio/clip_high": total["clip_high"],
        "ratio/kl": total["kl"],
        "skip/token_fraction": total["skipped"] + total["out_of_range"],
    }
    for lag in np.flatnonzero(rows.any(1)).tolist():
        of_lag = summarise(rows[lag])
        metrics[f"mismatch_kl/lag_{lag}"] = of_lag["mismatch_k3"]
        metrics |= {f"lag_{lag}/{name}": of_lag[name] for name in _LAG_FIGURES}
    effect = update_effect(rows)
    return metrics | ({} if effect is None else {"mismatch_kl/update_effect": effect})
