"""Summarise a run: speed, idle time, staleness, off-policy statistics, lost data, rewards and evaluations.

Means over steps are those over ``warm_steps``. Means of shares of time are weighted by the time of each step, means
over tokens by the trained tokens of each step. Seconds are seconds of training, without start-up (``speed``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.config.config import Config
from async_rl.config.loading import load_run_config
from async_rl.errors import RunError
from async_rl.extensions.insight.comparison.speed import Startups, find_startups, relative_error, training_s
from async_rl.run.config_changes import ConfigChange, read_changes
from async_rl.run.directory import RunDir
from async_rl.run.records.metric_table import SHOWN, weight_of
from async_rl.run.records.starts import Origin, first_steps, read_origin, warm_steps
from async_rl.run.records.step_log import Row, eval_figures, is_metrics_row, mean_of, read_rows

_LAG = re.compile(r"lag_(\d+)/tokens")
LATE = ("stale", "cancelled", "too_slow")
"""Causes in the ledger for which groups are dropped because of their age."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation of a run on one dataset.

    Attributes:
        step: the step that requested it.
        time_s: seconds of training until all answers were there.
        accuracy: mean accuracy, 0 to 1.
        error: standard error of the accuracy over rows. 0 if it is unknown.
    """

    step: int
    time_s: float
    accuracy: float
    error: float


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The figures of one run. A figure is None if the run has not measured it.

    Attributes:
        name: the run's directory, as the user gave it.
        config: the run's config, which the run directory holds.
        first_step: number of the run's first step; of a fork, the step after its origin.
        num_steps: number of steps that the run itself has made so far.
        is_finished: whether the run has ended.
        steps_per_s: steps per second, without start-up.
        speed_error: standard error of ``steps_per_s`` from the spread of this run's steps. It does not tell how much
            another run of the same config would differ. None with too few steps.
        means: means over steps, by metric: of each that ``SHOWN`` has with a ``column``.
        mismatch_by_lag: for each staleness in versions, the mean k3 estimate of KL(mu || pi) of its tokens, nats.
        dropped: share of the groups that ended which were dropped because they were too old.
        masked: share of the tokens of ended groups that were masked as stale.
        reward: mean reward over the last tenth of the steps.
        curve: (step, seconds of training, mean reward) of every step.
        evaluations: the evaluations of each dataset, in the order of their steps; datasets by name.
        changes: the config keys that changed during the run, with their steps.
        origin: the run and step from which this run was forked. None if it was not.
    """

    name: str
    config: Config
    first_step: int
    num_steps: int
    is_finished: bool
    steps_per_s: float
    speed_error: float | None
    means: Mapping[str, float | None]
    mismatch_by_lag: Mapping[int, float]
    dropped: float | None
    masked: float | None
    reward: float | None
    curve: Sequence[tuple[int, float, float]]
    evaluations: Mapping[str, Sequence[Evaluation]]
    changes: Sequence[ConfigChange] = ()
    origin: Origin | None = None

    @property
    def last_step(self) -> int:
        """Number of the run's last step so far."""
        return self.first_step + self.num_steps - 1

    @property
    def bound(self) -> int:
        """The run's staleness bound, in versions."""
        return self.config.queue.max_staleness


def summarise(path: Path) -> RunSummary:
    """Return the summary of the run in the directory ``path``, whether it is running or has ended.

    Raises:
        RunError: there is no run, it has made no step yet, or a file of it is damaged.
        ConfigError: this version of async-rl can't read the run's config.
    """
    run_dir = RunDir(path)
    if not run_dir.metrics.is_file() or not run_dir.config.is_file():
        raise RunError(
            f"{path}: expected a run directory (with config.toml and metrics.jsonl), got none; correct the path"
        )
    rows = sorted(read_rows(run_dir.metrics, is_whole=_is_whole), key=lambda row: row["step"])
    starts = set(first_steps(run_dir))
    steps = [row for row in rows if "version" in row]
    if not steps:
        raise RunError(f"{path}: expected a run that has made a step, got none yet; wait for its first step")
    ledger = run_dir.read_ledger()
    warm = warm_steps(steps, starts)
    startups = find_startups(steps, starts)
    steps_per_s, error = len(warm) / sum(row["time/step_s"] for row in warm), relative_error(warm)
    return RunSummary(
        name=str(path),
        config=load_run_config(run_dir.config),
        first_step=steps[0]["step"],
        num_steps=len(steps),
        is_finished=run_dir.is_finished,
        steps_per_s=steps_per_s,
        speed_error=None if error is None else error * steps_per_s,
        means=means_of(warm),
        mismatch_by_lag={lag["lag"]: lag["kl"] for lag in lags(warm) if lag["kl"] is not None},
        dropped=_dropped(ledger),
        masked=_masked(ledger),
        reward=mean_of(steps[-max(1, len(steps) // 10) :], "reward/mean", None),
        curve=[
            (row["step"], training_s(row["time_s"], startups), row["reward/mean"])
            for row in steps
            if row.get("reward/mean") is not None
        ],
        evaluations=_evaluations(rows, startups),
        changes=read_changes(run_dir),
        origin=read_origin(run_dir, "delete the file: the run itself does not need it"),
    )


def means_of(rows: Sequence[Row]) -> dict[str, float | None]:
    """Return the mean over ``rows`` of each metric with a ``column``, or its maximum if the key ends in ``/max``."""
    keys = [key for key, shown in SHOWN.items() if shown.column]
    highest = {key: max((row[key] for row in rows if row.get(key) is not None), default=None) for key in keys}
    return {key: highest[key] if key.endswith("/max") else mean_of(rows, key, weight_of(key)) for key in keys}


def _is_whole(row: Row) -> bool:
    return is_metrics_row(row, needed=("time_s", "time/step_s")) and (row.get("time/step_s") or 1) > 0


def lags(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return for each staleness its trained tokens, and the means over them of their KL (k3, nats) and ESS."""
    tokens: Counter[int] = Counter()
    for row in rows:
        tokens.update({int(lag[1]): count for key, count in row.items() if count and (lag := _LAG.fullmatch(key))})
    keys = {"kl": "mismatch_kl/lag_{}", "ess": "lag_{}/ess"}
    return [
        {"lag": n, "tokens": tokens[n]}
        | {name: mean_of(rows, key.format(n), f"lag_{n}/tokens") for name, key in keys.items()}
        for n in sorted(tokens)
    ]


def _dropped(ledger: Mapping[str, Any]) -> float | None:
    groups = ledger.get("groups")
    if not groups:
        return None
    lost = sum(groups["dropped"].get(cause, 0) for cause in LATE)
    ended = groups["trained"] + groups["filtered"] + sum(groups["dropped"].values())
    return lost / ended if ended else None


def _masked(ledger: Mapping[str, Any]) -> float | None:
    tokens = ledger.get("tokens")
    if not tokens:
        return None
    ended = tokens["trained"] + sum(tokens["masked"].values())
    return tokens["masked"].get("stale", 0) / ended if ended else None


def _evaluations(rows: Sequence[Row], startups: Startups) -> dict[str, list[Evaluation]]:
    evaluations: dict[str, list[Evaluation]] = {}
    for row in rows:
        for dataset, figures in eval_figures(row, "accuracy").items():
            time_s, error = training_s(row["time_s"], startups), figures.get("accuracy_se", 0.0)
            evaluation = Evaluation(row["step"], time_s, figures["accuracy"], error)
            evaluations.setdefault(dataset, []).append(evaluation)
    return dict(sorted(evaluations.items()))
