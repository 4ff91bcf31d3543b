"""Say why runs tell nothing about ``queue.max_staleness`` when they are compared. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from async_rl.config.loading import changed_keys, is_among
from async_rl.extensions.insight.comparison.summary import RunSummary

FREE = ("run.dir", "run.name", "run.seed", "queue.max_staleness", "queue.address", "queue.advertise", "queue.keys",
        "queue.journal_dir", "weights.port", "log", "checkpoint")  # fmt: skip
"""Keys and sections in which compared runs may differ."""
SAME_STEPS = 0.9
"""Share of the longest run's steps that every run must have made. Answers may become longer, so steps slower."""


def why_incomparable(summaries: Sequence[RunSummary]) -> tuple[str, str] | None:
    """Return what to do and why, if runs of several bounds can't be compared. None if they can."""
    for find in (_other_steps, _changed_while_running, _other_length):
        if (found := find(summaries)) is not None:
            return found
    return None


def differing_keys(summaries: Sequence[RunSummary]) -> list[str]:
    """Return the keys in which the configs of the runs differ, apart from those of ``FREE``."""
    first = summaries[0].config
    found = {key for summary in summaries[1:] for key in changed_keys(first, summary.config)}
    return sorted(key for key in found if not is_among(key, FREE))


def _other_steps(summaries: Sequence[RunSummary]) -> tuple[str, str] | None:
    if len({summary.first_step for summary in summaries}) == 1:
        return None
    fork = max(summaries, key=lambda summary: summary.first_step)
    other = min(summaries, key=lambda summary: summary.first_step)
    same = "RUN@STEP" if fork.origin is None else fork.origin.source
    return (
        f"compare forks of the same step, such as this one: async-rl launch {Path(other.name) / 'config.toml'} --from "
        f"{same} --set run.dir=NEW --set queue.max_staleness={other.bound}",
        f"{_name(fork)} is a fork and has the steps {_steps(fork)}, but {_name(other)} has the steps {_steps(other)}.",
    )


def _changed_while_running(summaries: Sequence[RunSummary]) -> tuple[str, str] | None:
    for summary in summaries:
        for change in summary.changes:
            keys = [
                key
                for key in change.changed
                if key == "queue.max_staleness" or not is_among(key, (*FREE, "learner.steps"))
            ]
            if keys and summary.first_step <= change.step < summary.last_step:
                return (
                    "compare runs that kept their config.",
                    f"In {_name(summary)} {', '.join(keys)} changed after step {change.step}, so its figures are of "
                    f"both values.",
                )
    return None


def _other_length(summaries: Sequence[RunSummary]) -> tuple[str, str] | None:
    short = min(summaries, key=lambda summary: summary.num_steps)
    long = max(summaries, key=lambda summary: summary.num_steps)
    if short.num_steps >= SAME_STEPS * long.num_steps:
        return None
    return (
        "wait until all runs have made the same steps.",
        f"{_name(short)} has made {short.num_steps} steps, {_name(long)} {long.num_steps}.",
    )


def _name(summary: RunSummary) -> str:
    return Path(summary.name).name or summary.name


def _steps(summary: RunSummary) -> str:
    return f"{summary.first_step} to {summary.last_step}"
