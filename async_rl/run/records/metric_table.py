"""The keys of all metrics: meaning and unit (``METRIC_SECTIONS``), and where each is shown (``SHOWN``, ``PANELS``).

All displays read these tables: the step line, the live view, ``status``, ``curve.png``, the report, the comparison and
Prometheus. Pure.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

EVAL_FIGURES: dict[str, str] = {
    "accuracy": "Mean accuracy of the answers (mean@n), 0 to 1; rows without an answer count as wrong. Of a reward "
    "without an accuracy: its mean, unscaled.",
    "accuracy_se": "Standard error of the accuracy over rows.",
    "pass_at_N": "Unbiased estimate of the probability that one of N answers to a row is right, for N = 1, 2, 4, ...",
    "pass_at_k": "The same estimate for as many answers as a row has.",
    "best_of_n": "Mean accuracy of the best answer to each row.",
    "majority_at_n": "Mean accuracy of the answer that most answers to a row agree on.",
    "reward": "Mean reward of an answer, penalties included.",
    "reward_best_of_n": "Mean reward of the answer to each row with the highest reward.",
    "score": "Mean score of an answer, which is the sum of the scores of its turns; only with an environment.",
    "score_best_of_n": "Mean score of the answer to each row with the highest score; only with an environment.",
    "turns": "Mean turns per answer; only with an environment.",
    "length_mean": "Mean tokens per answer.",
    "truncated": "Share of answers that were cut at the token limit.",
    "failed": "Number of answers that failed or that the reward does not judge, counted as wrong; absent if there are "
    "none.",
    "rows": "Number of rows in the set.",
    "samples": "Answers per row.",
    "unanswered": "Number of rows without an answer (prompt too long, or every attempt failed), counted as wrong.",
    "version_min": "Oldest version of the weights that answered.",
    "version_max": "Newest version of the weights that answered.",
}
"""Meaning of each figure of an evaluation, by name."""

METRIC_SECTIONS: dict[str, dict[str, str]] = {
    "Step": {
        "step": "Optimizer steps so far, skipped ones included.",
        "version": "Optimizer steps so far that changed the weights.",
        "time_s": "Seconds since the run started, without the time between restarts.",
        "generators": "Number of generators that are alive.",
    },
    "What the step trained": {
        "loss/policy": "Policy loss of the step.",
        "grad_norm": "Norm of the gradient before clipping.",
        "lr": "Learning rate of the step.",
        "entropy": "Mean entropy of the policy over trained tokens, in nats.",
        "temperature": "Sampling temperature, mean over the groups of the step.",
        "tokens/trained": "Number of tokens that carried a gradient.",
        "tokens/masked": "Number of tokens of the step's groups that were left out of the loss.",
        "masked/<cause>": "Number of rollouts left out of the loss for this cause.",
        "packing/padding": "Share of padding among the tokens that the learner computed; only if rows are padded "
        "(learner.packing).",
        "packing/repeated": "Share of prompt tokens that were computed again for another answer of the same "
        "micro-batch, among the tokens that the learner computed; only if rows are padded.",
        "routing/different": "Share of the tokens and layers at which the replayed experts differ from those that the "
        "learner's routers would choose; only with model.routing_replay.",
        "routing/balance_loss": "Load-balancing loss of the step, without its coefficient; only with "
        "loss.load_balancing_coef.",
        "routing/busiest": "Tokens for which the routers of a layer chose its busiest expert, divided by an even "
        "share, in the layer where this is largest: 1 is balanced. This and routing/unused only of models whose "
        "routers are understood (docs/algorithms.md), and not with learner.compile.",
        "routing/unused": "Share of the experts of all layers that no router chose for any token of the step.",
    },
    "The critic": {
        "critic/loss": "Value loss of the step, half the squared error of values to their targets; this and the other "
        'keys of this section only with loss.advantage = "gae".',
        "critic/grad_norm": "Norm of the critic's gradient before clipping.",
        "critic/lr": "Learning rate of the critic.",
        "critic/clip_fraction": "Share of tokens at which critic.value_clip decided the loss.",
        "critic/skipped_steps": "Number of the critic's optimizer steps that were skipped for a gradient that is not "
        "finite.",
        "critic/value_mean": "Mean value before the batch's first update, in reward units.",
        "critic/target_mean": "Mean value target, in reward units.",
        "critic/explained_variance": "1 minus the variance of target - value, divided by the variance of the targets: "
        "1 is a perfect critic, 0 one that knows only the mean, less is worse than that.",
        "critic/target_error_lag_N": "Mean of target - value over tokens of staleness N, in reward units. If it falls "
        "with N, older policies earned less, and their value targets are out of date.",
    },
    "The step's rollouts": {
        "reward/mean": "Mean reward of the step's rollouts.",
        "reward/<part>": "Mean of this part of the reward over the step's rollouts.",
        "grading/<counter>": "Count of the rewards, over the generators that are alive, since their start, such as "
        "judge_requests, judge_prompt_tokens, verifier_timed_out or code_tests_passed.",
        "agent/<counter>": "Count of the agents' calls (generator.serve), over the generators that are alive, since "
        "their start: sessions that have ended; calls that were the first of a conversation, that continued a "
        "sequence, branched off or had a rewritten history, or were untrained; answers that were lost because they "
        "never reached the agent; tool_calls that answers asked for; and the sums of the sessions' seconds, sampling_s "
        "and own_s, as below.",
        "agent/tool_calls_mean": "Mean number of tool calls that the answers of a rollout ask for; only with agents.",
        "agent/sampling_s_mean": "Mean seconds of a rollout in which its agent waits for an answer; only with agents.",
        "agent/own_s_mean": "Mean seconds of a rollout in which its agent works by itself, with tools for example; "
        "only with agents.",
        "agent/failed_<class>": "Count of failed rollouts of agents, by the class of the exception; of a taskset of "
        "verifiers by its class of the error.",
        "agent/metric/<name>": "Mean of a metric that the agent returned, or a taskset of verifiers: its metrics, its "
        "rewards before they are weighted, and turns.",
        "accuracy/mean": "Mean accuracy of the step's rollouts, 0 to 1, without any shaping; or reward, as in "
        "evaluations.",
        "accuracy/received": "Mean accuracy of all training answers that were graded and ended in the step before, "
        "those of filtered groups included. Only if every step's prompts are drawn at random from the same rows "
        "(data.shuffle, and no data.curriculum), so that steps can be compared.",
        "advantage/agreement": "Whether more accurate answers get higher advantages: over the pairs of answers to one "
        "prompt, the share in which they do minus the share in which they get lower ones. Absent without such a pair.",
        "advantage/zero_groups": "Share of the step's groups whose trained tokens all have the advantage 0, as those "
        "of answers with equal rewards: they train nothing.",
        "length/mean": "Mean sampled tokens per rollout.",
        "length/max": "Most sampled tokens of a rollout.",
        "length/truncated": "Share of rollouts that were cut at a token limit.",
        "length/cut_turn": "Share of rollouts that were cut at environment.max_turn_tokens. Only with an environment.",
        "length/cut_context": "Share of rollouts that were cut because states and answers fill the context "
        "(sampling.max_prompt_tokens + sampling.max_new_tokens). Only with an environment.",
        "score/mean": "Mean score of a rollout, which is the sum of the scores of its turns; only with an environment.",
        "turns/mean": "Mean turns per rollout; only with an environment.",
        "turns/max": "Most turns of a rollout; only with an environment.",
        "source/<source>/groups": "Number of the step's groups from this source; only if data.train is a table.",
        "source/<source>/accuracy": "Mean accuracy of the step's rollouts from this source, 0 to 1.",
        "source/<source>/reward": "Mean reward of the step's rollouts from this source.",
        "source/<source>/distill_kl": "distill/kl of the step's rollouts from this source.",
        "source/<source>/aside": "curriculum/aside of this source's rows, with a curriculum.",
        "source/<source>/known": "curriculum/known of this source's rows, with a curriculum.",
        "source/<source>/pass_rate": "curriculum/pass_rate of this source's rows, with a curriculum.",
        "distill/kl": "Mean of log behavior policy - log teacher over the step's sampled tokens, in nats: an unbiased "
        "estimate of KL(behavior policy || teacher) per token; only with a teacher.",
        "distill/top_k_mass": "Mean probability of the teacher's distill.top_k likeliest tokens at the sampled tokens.",
    },
    "Curriculum": {
        "curriculum/aside": "Share of the rows that are set aside now; only with data.curriculum, as all of these.",
        "curriculum/known": "Share of the rows of which a group has come back.",
        "curriculum/pass_rate": "Mean accuracy of the newest group of each of these rows, 0 to 1.",
        "curriculum/passed_aside": "How often a row was passed over so far because it was set aside.",
        "curriculum/passed_thinned": "How often a row was passed over so far by chance (data.curriculum.chance).",
    },
    "Staleness": {
        "staleness/mean": "Staleness, in versions, mean over trained tokens.",
        "staleness/max": "Staleness of the oldest trained token, in versions.",
        "staleness/in_flight_mean": "Part of staleness/mean from before the group arrived at the queue, in versions.",
        "staleness/in_queue_mean": "Part of staleness/mean from the time in the queue, in versions.",
    },
    "Ratio of the learner's policy pi to the sampling policy mu": {
        "ratio/mean": "Mean of pi/mu over trained tokens.",
        "ratio/max": "Largest pi/mu of a trained token.",
        "ratio/clip_low": "Share of trained tokens whose ratio was clipped at a lower bound.",
        "ratio/clip_high": "Share of trained tokens clipped at an upper bound (loss.clip_high, dual_clip, "
        "importance_cap).",
        "ratio/clip_fraction": "Share of trained tokens clipped at either bound.",
        "ratio/ess": "Normalised effective sample size over trained tokens, in (0, 1]; loss.min_ess bounds it.",
        "ratio/sequence_ess": "The same over sequences, whose weight is the product of pi/mu over its trained tokens; "
        "optimizer.ess_reference uses it.",
        "ratio/kl": "k3 estimate of KL(mu || pi) over trained tokens, in nats; loss.max_kl bounds it.",
        "ratio/mean_abs_log": "Mean |log pi - log mu| over the step's tokens, skipped ones included, in nats.",
        "kl/reference": "KL divergence to the reference model, in nats; only with loss.kl_coef.",
        "skip/tokens": "Number of tokens in sequences that loss.skip_threshold, loss.rules or loss.function left out.",
        "skip/out_of_range": "Number of single tokens that loss.token_range, loss.rules or loss.function left out.",
        "rule/<name>": "Share of tokens that the entry <name> of loss.rules masked or clipped, or that "
        "loss.entropy_quantile left out of the objective (<name> = entropy_quantile), among tokens that were "
        "not masked before.",
        "skip/token_fraction": "Share of tokens skipped for either reason, among tokens that were not masked before.",
        "skip/sequences": "Number of sequences that loss.skip_threshold, loss.rules or loss.function left out.",
        "loss_mask/<name>": "Share of the step's tokens that loss.function left out for this cause; only with such a "
        "loss.",
        "loss_metric/<name>": "Mean of a figure of loss.function over trained tokens; only with such a loss.",
        "skip/steps": "Number of the step's optimizer steps that were skipped: beyond loss.min_ess, max_kl or a "
        "rule, a gradient that is not finite, or nothing to train on.",
        "mismatch_kl/mean": "k3 estimate of KL(mu || pi) over the step's tokens, skipped ones included, in nats.",
        "mismatch_kl/k1": "k1 estimate of KL(mu || pi) over the same tokens as mismatch_kl/mean, in nats. It is "
        "unbiased, and it may be negative.",
        "mismatch_kl/lag_N": "mismatch_kl/mean over tokens of staleness N, in nats.",
        "mismatch_kl/update_effect": "mismatch_kl/mean of tokens whose answer had received a weight update before "
        "them, less that of other tokens of equal staleness, in nats: the cost of keeping keys and values across "
        "updates, apart from policy staleness.",
        "lag_N/<name>": "Figures over tokens of staleness N: tokens, mismatch_k1, mean_abs_log, ratio_mean, clip_low, "
        "clip_high, skipped, out_of_range, ess.",
    },
    "Engine against learner": {
        "parity/mean": "Mean |engine - learner| of the log-probabilities of the same token sequences at the same "
        "version, in nats; in steps in which generators answered.",
        "parity/<name>": "More figures of the differences in parity/mean: max, p50, p95, p99 in nats; number of "
        "tokens and generators; version.",
        "parity/sampled_<name>": "The same figures for tokens as they were sampled, by the version that the learner "
        "still held; in nats.",
    },
    "Bias by groups that are lost": {
        "bias/groups": "Number of groups that ended in the last 50 steps; the other bias figures are about them.",
        "bias/lost": "Share of the groups in bias/groups that were dropped or cancelled.",
        "bias/length": "Mean tokens per answer that was kept (trained or filtered, without tokens masked as stale) "
        "divided by the mean over all answers that ended; a cancelled answer counts the tokens reported by then.",
        "bias/reward": "Mean reward of what was kept minus the mean of all that was received and ended.",
        "bias/accuracy": "Mean accuracy of what was kept minus the mean of all that was received and ended.",
    },
    "Queue": {
        "queue/depth": "Number of groups that are ready in the queue.",
        "queue/bytes": "Size of the ready groups and of finished evaluation groups, in bytes.",
        "queue/in_flight": "Number of groups that are being sampled.",
        "queue/run_ahead_limit": "Most groups taken, in flight and ready together (queue.run_ahead); absent if none.",
        "queue/run_ahead_held": "1 if this limit held a lease back while the learner trained the step, else 0.",
        "queue/run_ahead_slack": "Slack in the limit: it grows after steps that waited for groups held back.",
    },
    "Time": {
        "time/step_s": "Seconds that the step took.",
        "time/wait_s": "Seconds in which the learner waited for groups.",
        "time/group_s": "Mean seconds from a lease to its group, newer groups counting more (L of queue.run_ahead).",
        "time/own_step_s": "Median of the seconds of the last five steps, without waits (S of queue.run_ahead).",
        "time/train_s": "Seconds in which the learner trained; the next seven are parts of it.",
        "time/prepare_s": "Seconds in which the learner prepared the batch: masks, advantages, and the scores that "
        "the loss needs.",
        "time/critic_s": "Seconds of the critic's scores and optimizer steps, a part of time/train_s; only with a "
        "critic.",
        "time/pack_s": "Seconds in which rank 0 packed the sequences into micro-batches.",
        "time/scatter_s": "Seconds in which rank 0 sent the other ranks their micro-batches.",
        "time/forward_s": "Seconds of rank 0's forward passes, with head and loss. On a GPU this and the next two are "
        "times of the device. With several ranks they include the collectives of FSDP, which overlap with computation, "
        "and in a pipeline (`parallel.pipeline`) the waits of the first stage for others.",
        "time/backward_s": "Seconds of rank 0's backward passes.",
        "time/optimizer_s": "Seconds of the statistics' sum over ranks, the gradient's norm and the optimizer step.",
        "time/publish_s": "Seconds in which the learner staged weights for publishing.",
        "time/checkpoint_s": "Seconds in which training stood still for checkpoints: copying the state, waiting for "
        "the files of the one before, committing. What follows a step's row counts in the next row.",
        "mirror/behind_steps": "Steps by which the newest checkpoint is newer than that of the mirror; only with "
        "checkpoint.mirror.",
        "time/checkpoint_write_s": "Seconds from the beginning of a checkpoint until its files were written, in the "
        "row of the step in which it was committed.",
        "time/generate_s": "Busy sequence-seconds of all generators divided by the sequences that fit, per step.",
        "time/decode_step_s": "Seconds of a decode step that don't depend on how many sequences run.",
        "time/decode_sequence_s": "Seconds that each running sequence adds to a decode step. Both are fitted to all "
        "decode steps since the start of the generators that are alive, by the number of sequences in them.",
        "time/grading_s": "Seconds of the step in which a generator had answers that waited for their score; mean over "
        "the generators. Other answers may have been sampled meanwhile.",
        "time/environment_s": "The same for rollouts that waited for their environments.",
        "time/gather_s": "Seconds in which the learner gathered the newest version and copied it to the host; a part "
        "of time/publish_s.",
        "time/transfer_s": "Seconds of the newest transfer of a version that has ended. Nobody waits for it.",
        "time/verify_s": "Seconds of that transfer in which the slowest generator computed digests.",
        "time/pause_s": "Mean seconds of a generator's pause per activation of a version.",
        "idle/learner": "Share of the step's time in which the learner waited.",
        "idle/learner_used": "Share of time/wait_s in which rank 0's device sampled; this and the next two only with "
        "learner.generate.",
        "learner_sampled/groups": "Number of the step's groups that ranks of the learner sampled.",
        "learner_sampled/tokens": "Number of tokens that they sampled in these groups.",
        "idle/generators": "Share of the step's time in which generators decoded nothing; ranks of the learner that "
        "sample count, also while they train.",
        "idle/grading": "Share of the generators' time in which they decoded nothing and waited for scores. This and "
        "the next three add up to idle/generators, but for pauses and what happens between decode steps.",
        "idle/environment": "Share in which they decoded nothing and waited for environments.",
        "idle/weights": "Share in which they decoded nothing and waited for a version of the weights.",
        "idle/leases": "Share in which they decoded nothing and had no lease: sampling is as far ahead as "
        "queue.run_ahead or the staleness bound lets it, or the queue grants none.",
        "idle/spare": "Share of the generators that the others could replace with full batches, by time/decode_*.",
        "overlap/efficiency": "Busy seconds per step of the busier side (time/generate_s, or the learner's) divided "
        "by time/step_s; 1 is perfect overlap.",
        "throughput/trained_tokens_per_s": "Trained tokens per second.",
        "throughput/flops_per_s": "Floating-point operations per second of time/train_s, over all ranks: those of the "
        "optimizer steps that are necessary, attention included, also of a critic's; shared prompts count once, "
        "padding and recomputed activations not at all.",
        "throughput/mfu": "throughput/flops_per_s divided by the dense half-precision peak of the ranks' devices; only "
        "if that is known.",
        "throughput/transfer_bytes_per_s": "Size of that version divided by time/transfer_s.",
        "throughput/generated_tokens_per_s": "Sampled tokens per second, over all generators.",
    },
    "Memory": {
        "memory/peak_bytes": "Highest peak memory of a learner rank, in bytes: on a GPU that of torch's tensors on the "
        "device during the step; on a CPU the resident memory of the process since it began.",
    },
    "Weights": {
        "weights/members": "Number of generators that receive weights.",
        "weights/bytes": "Size of the version of time/transfer_s, in bytes.",
        "weights/<name>": "Counts since the learner started: dropped_members, dropped_versions, superseded "
        "(versions), failures, corrupt (buckets), pulled_bytes and pulled_full_bytes (bytes), peer_bytes (those of "
        "pulled_bytes that generators sent to others; the learner sent the rest), peer_faults (failures of those "
        "generators); delta_bytes and delta_s (bytes and seconds of the newest difference).",
    },
    "Evaluations": {
        **{f"eval/<dataset>/{name}": meaning for name, meaning in EVAL_FIGURES.items()},
    },
}
"""Meaning and unit of each key of ``metrics.jsonl``, by subject. ``N``, ``<name>`` and the like stand for parts of a
key that vary."""

METRIC_KEYS: dict[str, str] = {key: meaning for keys in METRIC_SECTIONS.values() for key, meaning in keys.items()}
"""The same for all subjects together."""
SUBJECTS: dict[str, str] = {key: subject for subject, keys in METRIC_SECTIONS.items() for key in keys}
"""The subject of each key."""


class Shown(NamedTuple):
    """Where a metric is shown.

    Attributes:
        figure: label and ``{}`` for the number, in the live view, ``status`` and the line of a step with a note. One
            that begins with a space continues the figure before.
        panel: title of the panel of ``PANELS`` that has the metric's curve, with its unit and better direction.
        label: of the curve.
        least: the curve is drawn only if it reaches this value. None: always.
        column: heading and number format of a mean over the run's steps, a column of the comparison and a figure at the
            top of the report. Without a heading it is only for the advice and for ``--json``.
        prometheus: name of the learner's gauge, after ``async_rl_learner_``.
    """

    figure: str = ""
    panel: str = ""
    label: str = ""
    least: float | None = None
    column: tuple[str, str] | None = None
    prometheus: str = ""


class Panel(NamedTuple):
    """A panel with curves.

    Attributes:
        section: of the report.
        unit: of the metrics.
        better: the direction that is better, if one is.
        low, high: ends of the axis. None: as the values are.
        is_log: whether the axis is logarithmic.
    """

    section: Literal["learning", "waits", "staleness"]
    unit: str = ""
    better: Literal["", "higher", "lower"] = ""
    low: float | None = None
    high: float | None = None
    is_log: bool = False


PANELS: dict[str, Panel] = {
    "Accuracy": Panel("learning", better="higher", low=0.0),
    "Who waits": Panel("waits", "share of the time", "lower", low=0.0, high=1.0),
    "Staleness": Panel("staleness", "versions", "lower", low=0.0),
    "Reward": Panel("learning", "per rollout", "higher"),
    "Length": Panel("learning", "sampled tokens"),
    "Entropy": Panel("learning", "nats"),
    "Gradient norm": Panel("learning", is_log=True),
    "Cut answers": Panel("learning", "share", "lower", low=0.0),
    "Turns": Panel("learning", "per rollout"),
    "Seconds per step": Panel("waits", better="lower", low=0.0),
    "Tokens per second": Panel("waits", better="higher", low=0.0),
    "Groups in the queue": Panel("waits", low=0.0),
    "Effective sample size": Panel("staleness", "share of the tokens", "higher", high=1.0),
    "KL to the sampling policy": Panel("staleness", "nats", "lower", is_log=True),
    "Clipped tokens": Panel("staleness", "share", "lower", low=0.0),
}
"""The panels of ``curve.png`` and of the report, by title, in their order. Panels without a value are left out.

The picture has the first ones large, in a row of their own."""

_ANY, _MUCH = 1e-9, 0.05

SHOWN: dict[str, Shown] = {
    "step": Shown(prometheus="step"),
    "version": Shown(prometheus="version"),
    "reward/mean": Shown("reward {}", "Reward", "mean of the rollouts", prometheus="reward"),
    "accuracy/mean": Shown("accuracy {}", "Accuracy", "rollouts trained on", prometheus="accuracy"),
    "eval/<dataset>/accuracy": Shown("", "Accuracy", "evaluation: <dataset>", prometheus="eval_accuracy"),
    "distill/kl": Shown("KL to the teacher {}"),
    "ratio/ess": Shown("ESS {}", "Effective sample size", "tokens", None, ("ESS", ".3f"), "ess"),
    "ratio/kl": Shown("KL {}", "KL to the sampling policy", "trained tokens"),
    "entropy": Shown("entropy {}", "Entropy", "policy", prometheus="entropy"),
    "grad_norm": Shown("gradient {}", "Gradient norm", "before clipping", prometheus="grad_norm"),
    "length/mean": Shown("", "Length", "mean", prometheus="length_tokens"),
    "length/truncated": Shown("", "Cut answers", "at a token limit", _ANY),
    "turns/mean": Shown("", "Turns", "mean"),
    "staleness/mean": Shown("staleness {}", "Staleness", "mean", None, ("staleness", ".2f"), "staleness"),
    "staleness/max": Shown(" (max {})", "Staleness", "oldest token", None, ("oldest", ".0f")),
    "ratio/clip_low": Shown("", "Clipped tokens", "at a lower bound", _ANY),
    "ratio/clip_high": Shown("", "Clipped tokens", "at an upper bound", _ANY),
    "ratio/clip_fraction": Shown(column=("clipped", ".2%")),
    "queue/depth": Shown("queue {}", "Groups in the queue", "ready"),
    "queue/in_flight": Shown(" ready, {} in flight", "Groups in the queue", "being sampled"),
    "queue/run_ahead_limit": Shown(prometheus="run_ahead_limit_groups"),
    "throughput/trained_tokens_per_s": Shown(
        "trained {} tok/s", "Tokens per second", "trained", prometheus="trained_tokens_per_second"
    ),
    "throughput/generated_tokens_per_s": Shown(
        "generated {} tok/s", "Tokens per second", "sampled", prometheus="generated_tokens_per_second"
    ),
    "time/step_s": Shown("", "Seconds per step", "step", prometheus="step_seconds"),
    "time/train_s": Shown("", "Seconds per step", "training"),
    "time/group_s": Shown(prometheus="group_seconds"),
    "time/own_step_s": Shown(prometheus="own_step_seconds"),
    "overlap/efficiency": Shown(column=("overlap", ".2f")),
    "idle/learner": Shown("", "Who waits", "learner", None, ("learner idle", ".0%"), "idle_ratio"),
    "idle/generators": Shown("", "Who waits", "generators", None, ("generators idle", ".0%"), "generators_idle_ratio"),
    "idle/grading": Shown("", "Who waits", "for grading", _MUCH, ("", ".0%")),
    "idle/environment": Shown("", "Who waits", "for environments", _MUCH, ("", ".0%")),
    "idle/weights": Shown("", "Who waits", "for weights", _MUCH),
    "idle/leases": Shown("", "Who waits", "for leases", _MUCH),
}
"""Where metrics are shown, by key, in the order of the figures, curves and columns."""


def curves(title: str) -> dict[str, Shown]:
    """Return the metrics with a curve in the panel of this title, by key."""
    return {key: shown for key, shown in SHOWN.items() if shown.panel == title}


def unit_of(title: str) -> str:
    """Return what the axis of a panel shows, such as ``nats, lower is better``; empty if there is nothing to say."""
    panel = PANELS[title]
    return ", ".join(filter(None, (panel.unit, panel.better and f"{panel.better} is better")))


def weight_of(key: str) -> str:
    """Return the metric that weights a step in the mean of ``key``: its seconds or its trained tokens."""
    return "time/step_s" if SUBJECTS[key] == "Time" else "tokens/trained"


def columns(weight: str) -> dict[str, tuple[str, str]]:
    """Return heading and number format of the means with this weight, by key."""
    of_keys = {key: shown.column for key, shown in SHOWN.items() if shown.column and shown.column[0]}
    return {key: column for key, column in of_keys.items() if weight_of(key) == weight}


def meaning(key: str) -> str:
    """Return what a metric of ``METRIC_KEYS`` is, and which direction is better."""
    better = PANELS[SHOWN[key].panel].better if key in SHOWN and SHOWN[key].panel else ""
    return f"{METRIC_KEYS[key]} {better.capitalize()} is better." if better else METRIC_KEYS[key]
