"""``async-rl quickstart``: warm start, run, what asynchrony gained if that is asked, and the next commands."""

from __future__ import annotations

import os
import shlex
import shutil
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from async_rl.config.loading import load_config
from async_rl.errors import ConfigError
from async_rl.extensions.insight.comparison.summary import RunSummary, summarise
from async_rl.extensions.quickstart.prepare import make_task, run_command, say, write_config
from async_rl.extensions.quickstart.tasks import Task
from async_rl.launch.summary import next_lines
from async_rl.run.directory import RunDir


def run_quickstart(task: Task, seed: int, overrides: Sequence[str], *, compare: bool) -> None:
    """Make the rows and the model of ``task``, train it, and report.

    Args:
        overrides: ``--set`` options for ``async-rl launch``.
        compare: train once more with ``queue.max_staleness = 0``, and compare the two runs.

    Raises:
        ConfigError: an override is wrong, or there is nothing to compare with. Nothing was trained.
        SystemExit: a command failed.
    """
    config = load_config(write_config(task, seed), overrides)
    if compare and not config.queue.max_staleness:
        raise ConfigError(
            "--compare: expected queue.max_staleness above 0, because it compares with a run at 0, got 0; leave out one"
        )
    path, run_dir = str(make_task(task, seed)), Path(config.run.dir)
    settings = [word for override in overrides for word in ("--set", override)]
    run_command("launch", path, "--fresh", "--no-next", *settings)
    if compare:
        other = run_dir.with_name(f"{run_dir.name}-on-policy")
        on_policy = ("--set", f"run.dir={other}", "--set", "queue.max_staleness=0")
        run_command("launch", path, "--fresh", "--no-next", *settings, *on_policy)
        run_command("compare", str(run_dir), str(other))
        say(measured_gain(summarise(run_dir), summarise(other)))
    report, _ = next_lines(RunDir(run_dir), config)
    say(*path_lines(), report, "      async-rl init my.toml    # writes the config of a run of your own")


def measured_gain(run: RunSummary, on_policy: RunSummary) -> str:
    """Return a line that compares the steps per second of a run and of one at bound 0. ``compare`` has the rest."""
    ratio = run.steps_per_s / on_policy.steps_per_s
    return (
        f"what asynchrony gained: {run.steps_per_s:.3g} steps/s instead of {on_policy.steps_per_s:.3g} at "
        f"queue.max_staleness = 0, {ratio:.2f} times as many"
    )


def path_lines() -> list[str]:
    """Return the command after which the user's shell finds ``async-rl``; empty if it does now."""
    scripts = Path(sysconfig.get_path("scripts"))
    own, found = scripts / "async-rl", shutil.which("async-rl")
    # `uv tool run` puts the folder on the path of this process only.
    is_found = found is not None and Path(found).resolve() == own.resolve() and "UV" not in os.environ
    if not own.exists() or is_found:
        return []
    return [f'first: export PATH={shlex.quote(str(scripts))}:"$PATH"    # so that this shell finds async-rl']
