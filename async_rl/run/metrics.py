"""Metrics: rows in, ``metrics.jsonl`` (and Weights & Biases, if asked) out. The learner writes, everyone reads.

One JSON object a line. A *step row* is written after every optimizer step and holds ``loss/policy`` (left out when
nothing could be trained) and the keys of ``METRIC_KEYS``; an *eval row* comes when an evaluation is done and holds
``step`` (the step it was asked for), ``time_s`` and ``eval/<dataset>/...``. Values that are not finite are written as
null, for JSON has no other word for them.
"""

from __future__ import annotations

import math
import netrc
import os
import uuid
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from async_rl.config.config import Config
from async_rl.errors import ConfigError
from async_rl.run.directory import RunDir, write_atomically
from async_rl.run.step_log import Row, StepLog, read_rows

EVAL_FIGURES: dict[str, str] = {
    "accuracy": "mean accuracy of the answers (mean@n); rows without an answer are wrong",
    "accuracy_se": "its standard error, over rows",
    "pass_at_N": "chance that one of N answers to a row is right, unbiased; N = 1, 2, 4, ...",
    "pass_at_k": "the same for all answers to a row",
    "best_of_n": "accuracy of the best answer to each row",
    "majority_at_n": "accuracy of the answer that most answers to a row agree on",
    "reward": "mean reward of an answer, punishments included",
    "reward_best_of_n": "reward of the answer to each row that earned most",
    "score": "mean sum of an answer's scores; with an environment",
    "score_best_of_n": "the highest of each row",
    "turns": "turns an answer; with an environment",
    "length_mean": "tokens an answer",
    "truncated": "share of answers cut at the limit",
    "failed": "answers whose environment failed, counted as wrong; absent if none",
    "rows": "rows of the set",
    "samples": "answers a row",
    "unanswered": "rows without an answer: too long, or failed; counted as wrong",
    "version_min": "oldest version that answered",
    "version_max": "newest version that answered",
}
"""What an evaluation tells of one set."""

METRIC_KEYS: dict[str, str] = {
    "step": "optimizer steps done, skipped ones included",
    "version": "optimizer steps that changed the weights",
    "time_s": "seconds since the run started, restarts not counted",
    "loss/policy": "policy loss of the step",
    "grad_norm": "gradient norm before clipping",
    "lr": "learning rate of the step",
    "entropy": "mean entropy of the policy on trained tokens, nats",
    "reward/mean": "mean reward of the rollouts taken",
    "accuracy/mean": "mean accuracy of the rollouts taken, no shaping",
    "tokens/trained": "tokens that carried a gradient",
    "tokens/masked": "tokens taken and left out of the loss",
    "temperature": "sampling temperature, mean over the groups taken",
    "length/mean": "sampled tokens a rollout",
    "score/mean": "sum of a rollout's scores; with an environment",
    "turns/mean": "answers of the model in a rollout; with an environment",
    "staleness/mean": "versions between sampling and training, mean over trained tokens",
    "staleness/max": "the same, largest",
    "staleness/in_flight_mean": "the part that passed before the group arrived",
    "staleness/in_queue_mean": "the part that passed in the queue",
    "staleness/bound": "the bound that leases are given by after the step; with queue.adaptive",
    "staleness/decision": "by how much the step changed it",
    "ratio/mean": "pi/mu over trained tokens",
    "ratio/max": "largest pi/mu",
    "ratio/p01": "1 % of trained tokens have a smaller pi/mu (from a histogram: within 5 % of its logarithm)",
    "ratio/p50": "the median",
    "ratio/p99": "1 % have a larger one",
    "ratio/clip_low": "share of trained tokens whose ratio was cut at a lower bound",
    "ratio/clip_high": "the same at an upper bound (loss.clip_high, dual_clip or importance_cap)",
    "ratio/clip_fraction": "both together",
    "ratio/ess": "normalised effective sample size, in (0, 1]; loss.min_ess bounds it",
    "ratio/kl": "k3 estimate of KL(mu || pi) over trained tokens, nats; loss.max_kl bounds it",
    "ratio/mean_abs_log": "mean |log pi - log mu| over tokens taken, skipped ones included, nats",
    "kl/reference": "KL to the reference, nats; with loss.kl_coef",
    "skip/tokens": "tokens of sequences above loss.skip_threshold",
    "skip/out_of_range": "single tokens outside loss.token_range",
    "skip/token_fraction": "both together over tokens that were not masked before",
    "skip/sequences": "sequences above loss.skip_threshold",
    "skip/steps": "optimizer steps skipped (past loss.min_ess or max_kl, a gradient that is not finite, or nothing to "
    "train on)",
    "mismatch_kl/mean": "k3 estimate of KL(mu || pi) over tokens taken, skipped ones included, nats",
    "mismatch_kl/k1": "the same by k1: unbiased, of either sign",
    "mismatch_kl/lag_N": "as mismatch_kl/mean, over tokens of staleness N",
    "mismatch_kl/after_swap_lag_N": "the same, over those that were sampled after a swap of weights in their answer",
    "mismatch_kl/no_swap_lag_N": "the same, over the others of staleness N",
    "mismatch_kl/swap_effect": "after_swap less no_swap, at equal staleness, mean over tokens after a swap, nats: what "
    "generator.kv_after_swap = keep costs, apart from policy staleness",
    "mismatch_kl/after_swap_tokens": "how many tokens that is the mean of",
    "parity/mean": "mean |engine - learner| of the same given tokens' log-probabilities at the same version, nats; in "
    "the steps in which generators answered",
    "parity/max": "the largest; p50, p95, p99, tokens, generators and version beside it",
    "parity/sampled_mean": "the same of tokens as they were sampled, by the version that the learner still held",
    "lag_N/<name>": "over tokens of staleness N: tokens, mismatch_k1, mean_abs_log, ratio_mean, ratio_max, ratio_p01, "
    "ratio_p50, ratio_p99, clip_low, clip_high, skipped, out_of_range, ess",
    "bias/groups": "groups that ended in the last 50 steps, of which the next four tell",
    "bias/lost": "share of them that was dropped or cancelled",
    "bias/length": "tokens an answer that was kept (trained or filtered, less tokens masked as stale) over those of "
    "all that ended; of what was cancelled, the tokens reported until then",
    "bias/reward": "mean reward of what was kept less that of all that was received and ended",
    "bias/accuracy": "the same of the accuracy",
    "queue/depth": "groups waiting in the queue",
    "queue/bytes": "their bytes, leases' reservations included",
    "queue/in_flight": "groups being sampled",
    "generators": "generators alive",
    "time/wait_s": "the learner waited for groups",
    "time/train_s": "the learner trained",
    "time/publish_s": "the learner staged weights",
    "time/pause_s": "mean pause of a generator per activation",
    "idle/learner": "share of the step that the learner waited",
    "idle/generators": "share of the step that generators decoded nothing",
    "overlap/efficiency": "steps/s over 1 / max(generation, training)",
    "throughput/trained_tokens_per_s": "tokens/trained a second",
    "throughput/generated_tokens_per_s": "tokens sampled a second, over all generators",
    **{f"eval/<dataset>/{name}": meaning for name, meaning in EVAL_FIGURES.items()},
}
"""The keys that others may rely on, with their meaning; rows may hold more."""


class MetricsWriter:
    """Appends rows to ``metrics.jsonl``, each flushed when ``write`` returns. One writer a run."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        """Open for appending; a last line that a dying process left half-written is cut off.

        Raises:
            ConfigError: ``log.wandb`` is on and can't work.
        """
        self._wandb = _start_wandb(run_dir, config)
        self._log = StepLog(RunDir(run_dir).metrics)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row; it must hold ``step``."""
        plain = {key: _finite(value) for key, value in row.items()}
        self._log.write(plain)
        if self._wandb is not None:
            self._wandb.log({key: value for key, value in plain.items() if value is not None})

    def rewind_to(self, step: int, *, evals_to_come: Collection[tuple[str, int]] = ()) -> int:
        """As ``StepLog.rewind_to``.

        ``evals_to_come`` are (dataset, step) that are asked for anew: an answer that was written after the checkpoint
        goes aside with what was trained then.
        """
        return self._log.rewind_to(step, is_gone=lambda row: _is_eval_of(row, evals_to_come))

    def close(self) -> None:
        """Close the file and finish the Weights & Biases run."""
        self._log.close()
        if self._wandb is not None:
            self._wandb.finish()


def read_metrics(path: Path) -> list[Row]:
    """All rows of a ``metrics.jsonl``, as ``step_log.read_rows``."""
    return read_rows(path)


def _finite(value: Any) -> Any:
    """Plain JSON data: NumPy scalars unwrapped, NaN and infinities as None."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_eval_of(row: Row, evals: Collection[tuple[str, int]]) -> bool:
    return any(
        row["step"] == step and any(key.startswith(f"eval/{dataset}/") for key in row) for dataset, step in evals
    )


def check_wandb(config: Config) -> None:
    """Refuse ``log.wandb = "online"`` where no API key is to be found, instead of asking for one.

    Raises:
        ConfigError: there is neither ``WANDB_API_KEY`` nor an entry in the netrc file.
    """
    if config.log.wandb != "online" or os.environ.get("WANDB_API_KEY"):
        return
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        found = path.exists() and netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError) as error:
        raise ConfigError(f'log.wandb = "online": can\'t read {path}: {error}') from error
    if not found:
        raise ConfigError(
            f'log.wandb = "online", but there is no API key for {host}: set WANDB_API_KEY, run `wandb login`, or set '
            f'log.wandb = "offline" (synced later with `wandb sync`)'
        )


def _start_wandb(run_dir: Path, config: Config) -> Any:
    """A Weights & Biases run that goes on under the same id when the run is resumed; None when it is off."""
    check_wandb(config)
    mode = config.log.wandb
    if mode == "off":
        return None
    import wandb

    id_file = run_dir / "wandb_id"
    if not id_file.exists():
        write_atomically(id_file, uuid.uuid4().hex[:12])
    try:
        run = wandb.init(
            project=config.log.project,
            name=config.run.name or run_dir.name,
            id=id_file.read_text(encoding="utf-8"),
            resume="allow",
            dir=run_dir,
            mode=mode,
            config=config.model_dump(mode="json"),
            settings=wandb.Settings(console="off", silent=True),
        )
    except wandb.Error as error:
        raise ConfigError(f'log.wandb = "{config.log.wandb}": wandb did not start: {error}') from error
    # Rows carry their own step: wandb's own counter refuses the smaller steps that follow a rollback.
    run.define_metric("*", step_metric="step")
    return run
