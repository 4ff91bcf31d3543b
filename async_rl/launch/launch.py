"""``async-rl launch``: check everything, start everything on this machine, show it, say how it ended.

Called by the command line only. ``supervisor`` keeps the processes alive, ``live_view`` shows them.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from async_rl.config.config import Config
from async_rl.errors import RunError, UserError
from async_rl.launch.commands import RunCommands
from async_rl.launch.live_view import LiveView, PlainView, duration, eval_accuracies
from async_rl.launch.preflight import check_launch
from async_rl.launch.supervisor import Outcome, Supervisor
from async_rl.net.keys import client_keys_of
from async_rl.run.curve import write_curve
from async_rl.run.directory import RunDir, check_run_dir, prepare_run_dir
from async_rl.run.step_log import read_rows


def launch(
    config: Config, config_path: Path, overrides: Sequence[str], *, fresh: bool, dry_run: bool, insecure: bool
) -> int:
    """Run ``config`` until it is finished, has failed or is stopped; the exit code.

    ``config_path`` and ``overrides`` are what ``config`` was read from: ``dry_run`` prints commands with them, and
    what stands in the way here, if anything does.

    Raises:
        UserError: something that the user can mend stands in the way; nothing was written or started.
    """
    console = Console(stderr=False)
    run_dir = check_run_dir(config, fresh=fresh)
    if run_dir.is_finished and not fresh:
        _say(console, f"the run in {run_dir.path} is finished; --fresh starts over (the old directory is moved aside)")
        return 0
    if dry_run:
        arguments = [str(config_path), *(part for override in overrides for part in ("--set", override))]
        commands = _commands(config, arguments, run_id="RUN_ID", insecure=insecure)
        for line in [*describe_commands(config, commands), *_readiness(config, insecure=insecure)]:
            _say(console, line)
        return 0
    with console.status("checking data, model and address"):  # seconds; shown on a terminal only
        preflight(config, insecure=insecure)
    with _owned_run_dir(config, fresh=fresh) as run_dir:
        return _run(config, run_dir, console, insecure=insecure)


def preflight(config: Config, *, insecure: bool) -> None:
    """Everything that can be known to fail before anything is written: data, model, address, devices, accounts.

    Raises:
        UserError: the first thing found wrong.
    """
    _commands(config, [], run_id="", insecure=insecure)
    check_launch(config, insecure=insecure)


def _readiness(config: Config, *, insecure: bool) -> list[str]:
    """Whether a launch on this machine would start; the recipes of another machine may be looked at here, too."""
    try:
        preflight(config, insecure=insecure)
    except UserError as error:
        return [f"# launch would be refused here: {line}" for line in str(error).splitlines()]
    return ["# launch would start here: data, model and address are fit"]


def describe_commands(config: Config, commands: RunCommands) -> list[str]:
    """What ``--dry-run`` prints: one shell line a process. Ports that are chosen at start read as 0 and 29500."""
    address = config.queue.advertise or config.queue.address or "tcp://127.0.0.1:0"
    lines = [f"# run directory: {config.run.dir}; ports that are free are chosen at start"]
    for command in (
        commands.queue(None),
        *commands.learner(29500),
        *(commands.generator(index, address, 0) for index in range(commands.num_generators)),
    ):
        lines += [f"# {command.name}", command.shell_line()]
    return lines


def _commands(config: Config, config_arguments: Sequence[str], *, run_id: str, insecure: bool) -> RunCommands:
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return RunCommands(
        config, config_arguments, run_id=run_id, insecure=insecure, inherited=os.environ,
        num_cores=len(cores) or os.cpu_count() or 1, cores=() if _has_gpu() else cores,
    )  # fmt: skip


def _has_gpu() -> bool:
    """Whether there is one of NVIDIA's or AMD's. Which cores are near it is the system's to know."""
    return Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists()


@contextmanager
def _owned_run_dir(config: Config, *, fresh: bool) -> Iterator[RunDir]:
    """The prepared run directory, ours alone among launches of this machine until the block ends.

    Raises:
        RunError: another launch runs in it.
    """
    run_dir = RunDir(Path(config.run.dir))
    if run_dir.lock.exists():
        with run_dir.lock.open("r") as old:  # before --fresh moves a directory away from under its owner
            _lock(old.fileno(), run_dir)
    run_dir = prepare_run_dir(config, fresh=fresh)
    with run_dir.lock.open("a") as held:
        _lock(held.fileno(), run_dir)
        yield run_dir


def _lock(fd: int, run_dir: RunDir) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RunError(
            f"another `async-rl launch` runs in {run_dir.path}; stop it, or choose another run.dir"
        ) from None


def _run(config: Config, run_dir: RunDir, console: Console, *, insecure: bool) -> int:
    started = time.monotonic()
    run_id = run_dir.run_id
    name = config.run.name or run_dir.path.name
    _say(console, f"{name}: {config.learner.steps} steps in {run_dir.path} (logs in {run_dir.logs})")
    if console.is_terminal:
        view = LiveView(console, run_dir.metrics, config.learner.steps, client_keys_of(config.queue.keys))
    else:
        view = PlainView(console, run_dir.metrics, config.learner.steps)
    try:
        # The roles read the resolved copy: an edit of the source while the run goes on can't reach a restart.
        commands = _commands(config, [str(run_dir.config)], run_id=run_id, insecure=insecure)
        supervisor = Supervisor(commands, run_dir, environment=dict(os.environ), view=view)
        outcome = supervisor.run()
    finally:
        view.close()
    if outcome.exit_code <= 1:
        write_curve(run_dir)
    for line in summary(run_dir, time.monotonic() - started):
        _say(console, line)
    sys.stdout.flush()
    sys.stderr.write("".join(f"{line}\n" for line in explain(outcome, checkpoint=run_dir.latest_checkpoint)))
    return outcome.exit_code


def summary(run_dir: RunDir, wall_s: float) -> list[str]:
    """How the run stands: steps, accuracies before and after, the groups' ledger, where to look."""
    rows = read_rows(run_dir.metrics)
    steps = max((row["step"] for row in rows), default=0)
    evals: dict[str, list[float]] = {}
    for row in rows:
        for dataset, accuracy in eval_accuracies(row).items():
            evals.setdefault(dataset, []).append(accuracy)
    state = "finished" if run_dir.is_finished else "not finished"
    lines = [f"{state}: {steps} steps, this launch took {duration(wall_s)}"]
    lines += [f"accuracy on {name}: {values[0]:.3f} -> {values[-1]:.3f}" for name, values in evals.items()]
    if any(len(values) > 2 for values in evals.values()):
        lines.append(f"all evaluations: async-rl eval --compare {run_dir.path}")
    if run_dir.ledger.exists():
        lines.append(ledger_line(json.loads(run_dir.ledger.read_text(encoding="utf-8"))))
    lines.append(f"run directory: {run_dir.path}")
    if run_dir.curve.exists():
        lines.append(f"curve: {run_dir.curve}")
    return lines


def ledger_line(ledger: Mapping[str, Any]) -> str:
    """The groups' identity with its terms that are not zero."""
    groups = ledger["groups"]
    terms = [
        f"{name} {groups[name]}" for name in ("in_flight", "queued", "taken", "trained", "filtered") if groups[name]
    ]
    terms += [f"dropped as {cause} {count}" for cause, count in groups["dropped"].items() if count]
    return f"groups: issued {groups['issued']} = {' + '.join(terms) or '0'}"


def explain(outcome: Outcome, *, checkpoint: str | None = None) -> list[str]:
    """Why a run stopped, the first cause last; empty when it finished. ``checkpoint`` is the latest one's name."""
    if outcome.exit_code == 0:
        return []
    if outcome.exit_code > 128:
        remedy = f"resumes from {checkpoint}" if checkpoint else "starts anew, for there is no checkpoint yet"
        return [f"async-rl: stopped by {outcome.stopped_by}; the same command {remedy}"]
    lines = [f"async-rl: the run stopped: {outcome.stopped_by}"]
    for number, death in enumerate(outcome.deaths, start=1):
        title = f"first cause: {death}" if number == len(outcome.deaths) else str(death)
        lines += [f"--- {title}; the end of {death.log}:", *(f"    {line}" for line in death.tail())]
    return lines


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
