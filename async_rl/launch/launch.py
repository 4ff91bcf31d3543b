"""``async-rl launch``: check everything, start everything on this machine, show it, report how it ended.

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

    Args:
        config_path: the file that ``config`` was read from; ``dry_run`` prints commands with it.
        overrides: the ``--set`` values that ``config`` was read with.
        dry_run: print the commands and whether the launch would start here; write and start nothing.

    Raises:
        UserError: the run can't start for a reason that the user can fix; nothing was written or started.
    """
    console = Console(stderr=False)
    run_dir = check_run_dir(config, fresh=fresh)
    if run_dir.is_finished and not fresh:
        _print_line(
            console,
            f"the run in {run_dir.path} is finished; pass --fresh to start over (the old directory is moved aside)",
        )
        return 0
    if dry_run:
        arguments = [str(config_path), *(part for override in overrides for part in ("--set", override))]
        commands = _commands(config, arguments, run_id="RUN_ID", insecure=insecure)
        for line in [*describe_commands(config, commands), *_readiness(config, insecure=insecure)]:
            _print_line(console, line)
        return 0
    with console.status("checking data, model and address"):  # seconds; shown on a terminal only
        preflight(config, insecure=insecure)
    with _owned_run_dir(config, fresh=fresh) as run_dir:
        return _run(config, run_dir, console, insecure=insecure)


def preflight(config: Config, *, insecure: bool) -> None:
    """Check everything that can be checked before anything is written: data, model, address, devices, accounts.

    Raises:
        UserError: the first check that failed.
    """
    _commands(config, [], run_id="", insecure=insecure)
    check_launch(config, insecure=insecure)


def _readiness(config: Config, *, insecure: bool) -> list[str]:
    """Whether a launch would start on this machine. A dry run may be of a recipe for another machine."""
    try:
        preflight(config, insecure=insecure)
    except UserError as error:
        return [f"# launch would be refused here: {line}" for line in str(error).splitlines()]
    return ["# launch would start here: data, model and address passed the checks"]


def describe_commands(config: Config, commands: RunCommands) -> list[str]:
    """What ``--dry-run`` prints: one shell line per process. Ports chosen at start are shown as 0 and 29500."""
    address = config.queue.advertise or config.queue.address or "tcp://127.0.0.1:0"
    lines = [f"# run directory: {config.run.dir}; free ports are chosen at start"]
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
    """Whether there is an NVIDIA or AMD GPU. Then cores are not assigned: the system knows which are near it."""
    return Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists()


@contextmanager
def _owned_run_dir(config: Config, *, fresh: bool) -> Iterator[RunDir]:
    """The prepared run directory, locked against other launches on this machine until the block ends.

    Raises:
        RunError: another launch uses it.
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
        raise RunError(f"another `async-rl launch` uses {run_dir.path}; stop it, or choose another run.dir") from None


def _run(config: Config, run_dir: RunDir, console: Console, *, insecure: bool) -> int:
    started = time.monotonic()
    run_id = run_dir.run_id
    name = config.run.name or run_dir.path.name
    _print_line(console, f"{name}: {config.learner.steps} steps in {run_dir.path} (logs in {run_dir.logs})")
    if console.is_terminal:
        view = LiveView(console, run_dir.metrics, config.learner.steps, client_keys_of(config.queue.keys))
    else:
        view = PlainView(console, run_dir.metrics, config.learner.steps)
    try:
        # The roles read the resolved copy, so an edit of the source file can't affect a restarted process.
        commands = _commands(config, [str(run_dir.config)], run_id=run_id, insecure=insecure)
        supervisor = Supervisor(commands, run_dir, environment=dict(os.environ), view=view)
        outcome = supervisor.run()
    finally:
        view.close()
    if outcome.exit_code <= 1:
        write_curve(run_dir)
    for line in summary(run_dir, time.monotonic() - started):
        _print_line(console, line)
    sys.stdout.flush()
    sys.stderr.write("".join(f"{line}\n" for line in explain(outcome, checkpoint=run_dir.latest_checkpoint)))
    return outcome.exit_code


def summary(run_dir: RunDir, wall_s: float) -> list[str]:
    """The state of the run: steps, accuracies before and after, the ledger of groups, where its files are."""
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
    """Where all issued groups went: the terms of the ledger that are not zero."""
    groups = ledger["groups"]
    terms = [
        f"{name} {groups[name]}" for name in ("in_flight", "queued", "taken", "trained", "filtered") if groups[name]
    ]
    terms += [f"dropped as {cause} {count}" for cause, count in groups["dropped"].items() if count]
    return f"groups: issued {groups['issued']} = {' + '.join(terms) or '0'}"


def explain(outcome: Outcome, *, checkpoint: str | None = None) -> list[str]:
    """Why the run stopped, the first cause last; empty if it finished. ``checkpoint`` is the latest one's name."""
    if outcome.exit_code == 0:
        return []
    if outcome.exit_code > 128:
        remedy = f"resumes from {checkpoint}" if checkpoint else "starts over, since there is no checkpoint yet"
        return [f"async-rl: stopped by {outcome.stopped_by}; the same command {remedy}"]
    lines = [f"async-rl: the run stopped: {outcome.stopped_by}"]
    for number, death in enumerate(outcome.deaths, start=1):
        title = f"first cause: {death}" if number == len(outcome.deaths) else str(death)
        lines += [f"--- {title}; the end of {death.log}:", *(f"    {line}" for line in death.tail())]
    return lines


def _print_line(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
