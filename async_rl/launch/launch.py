"""``async-rl launch``: check everything, start everything on this machine, show it, report how it ended.

Called by the command line only. ``supervisor`` keeps the processes alive, ``live_view`` shows them. ``RunCommands`` has
the command line of each role: it assigns devices, threads and the ranks' rendezvous. The supervisor runs the commands,
``--dry-run`` prints them.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console

from async_rl.config.config import Config
from async_rl.config.loading import machine_overrides
from async_rl.errors import ConfigError, UserError
from async_rl.launch.live_view import LiveView, PlainView, duration, eval_accuracies
from async_rl.launch.preflight import check_launch
from async_rl.launch.supervisor import Command, Outcome, Supervisor, Timing
from async_rl.net.address import check_address
from async_rl.net.keys import CLIENT_FILE, SECRET_VARIABLE, client_keys_of
from async_rl.process.child import module_command, package_path
from async_rl.run.curve import write_curve
from async_rl.run.directory import RunDir, check_run_dir
from async_rl.run.lock import RunLock, locked_run_dir
from async_rl.run.step_log import read_rows
from async_rl.terminal import visible

_DAY_S = 86400
_MARGIN_S = 5.0
"""Time after ``checkpoint.grace_s`` in which a learner ends by itself."""


def launch(
    config: Config, config_path: Path, overrides: Sequence[str], *, fresh: bool, dry_run: bool, insecure: bool,
    takeover: bool = False,
) -> int:  # fmt: skip
    """Run ``config`` until the run is finished, has failed or is stopped. Returns the exit code.

    Args:
        config_path: the file that ``config`` was read from; ``dry_run`` prints commands with it.
        overrides: the ``--set`` values that ``config`` was read with.
        dry_run: print the commands and whether the launch would start here; write and start nothing.
        takeover: supersede a process that uses the run directory.

    Raises:
        UserError: the run can't start for a reason that the user can fix; nothing was written or started.
    """
    console = Console(stderr=False, markup=False)
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
    with locked_run_dir(config, role="launch", fresh=fresh, takeover=takeover) as (run_dir, lock):
        return _run(config, run_dir, lock, console, insecure=insecure, fresh=fresh)


def preflight(config: Config, *, insecure: bool) -> None:
    """Check everything that can be checked before anything is written: data, model, address, devices, accounts.

    Raises:
        UserError: the first check that failed.
    """
    _commands(config, [], run_id="", insecure=insecure)
    check_launch(config, insecure=insecure)


def _readiness(config: Config, *, insecure: bool) -> list[str]:
    """Return lines on whether a launch would start on this machine. A dry run's recipe may be for another machine."""
    try:
        preflight(config, insecure=insecure)
    except UserError as error:
        return [f"# launch would be refused here: {line}" for line in str(error).splitlines()]
    return ["# launch would start here: data, model and address passed the checks"]


def describe_commands(config: Config, commands: RunCommands) -> list[str]:
    """Return the output of ``--dry-run``: a shell line per process. Ports chosen at start appear as 0 and 29500."""
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
    """Return whether there is an NVIDIA or AMD GPU. If so, the system places processes on cores near the GPU."""
    return Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists()


def _run(config: Config, run_dir: RunDir, lock: RunLock, console: Console, *, insecure: bool, fresh: bool) -> int:
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
        environment = {SECRET_VARIABLE: secrets.token_hex(16), **os.environ}
        timing = Timing(learner_grace_s=config.checkpoint.grace_s + _MARGIN_S)
        supervisor = Supervisor(commands, run_dir, environment=environment, view=view, timing=timing, lock=lock)
        outcome = supervisor.run()
    finally:
        view.close()
    if outcome.exit_code <= 1 and lock.is_current:
        write_curve(run_dir)
    for line in summary(run_dir, time.monotonic() - started):
        _print_line(console, line)
    sys.stdout.flush()
    why = explain(outcome, checkpoint=run_dir.latest_checkpoint, fresh=fresh)
    sys.stderr.write("".join(f"{visible(line)}\n" for line in why))
    return outcome.exit_code


def summary(run_dir: RunDir, wall_s: float) -> list[str]:
    """Return lines about the run: steps, first and last accuracy of each set, what became of its groups, its files.

    ``wall_s`` is how long this launch took, in seconds.
    """
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
    """Return the terms of the ledger that are not zero: how many of the issued groups ended in each way."""
    groups = ledger["groups"]
    terms = [
        f"{name} {groups[name]}" for name in ("in_flight", "queued", "taken", "trained", "filtered") if groups[name]
    ]
    terms += [f"dropped as {cause} {count}" for cause, count in groups["dropped"].items() if count]
    return f"groups: issued {groups['issued']} = {' + '.join(terms) or '0'}"


def explain(outcome: Outcome, *, checkpoint: str | None = None, fresh: bool = False) -> list[str]:
    """Explain why the run stopped, the first cause last; empty if it ended by itself. ``checkpoint`` is the latest."""
    if outcome.exit_code == 0:
        return [f"async-rl: {outcome.stopped_by} came after the end of the run"] if outcome.stopped_by else []
    if outcome.exit_code > 128:
        again = "the same command, without --fresh," if fresh else "the same command"
        remedy = f"resumes from {checkpoint}" if checkpoint else "starts over, since no step is saved"
        return [f"async-rl: the run was stopped by {outcome.stopped_by}; {again} {remedy}"]
    lines = [f"async-rl: the run stopped: {outcome.stopped_by}"]
    for number, death in enumerate(outcome.deaths, start=1):
        title = f"first cause: {death}" if number == len(outcome.deaths) else str(death)
        lines += [f"--- {title}; the end of {death.log}:", *(f"    {line}" for line in death.tail())]
    return lines


def _print_line(console: Console, line: str) -> None:
    console.print(visible(line), markup=False, highlight=False, soft_wrap=True)


class RunCommands:
    """The commands of one ``launch`` of one config."""

    def __init__(
        self,
        config: Config,
        config_arguments: Sequence[str],
        *,
        run_id: str,
        insecure: bool,
        inherited: Mapping[str, str],
        num_cores: int,
        cores: Sequence[int] = (),
    ) -> None:
        """Assign devices, threads and cores.

        Args:
            config_arguments: how the roles name the config: a path and its ``--set`` options.
            inherited: the environment that every process inherits.
            cores: divided among ranks and generators, if there is at least one for each and the user has not set the
                number of threads. On a CPU this makes a run a fifth faster, because the system can't move processes
                away from their warm caches.

        Raises:
            ConfigError: a device index is not among those that ``inherited`` makes visible.
        """
        self._config, self._config_arguments, self._run_id = config, tuple(config_arguments), run_id
        self._flags = ("--insecure",) if insecure else ()
        keys = config.queue.keys
        self._generator_flags = self._flags if keys is None else (*self._flags, "--keys", str(Path(keys) / CLIENT_FILE))
        self._inherited = inherited
        self._num_threads = max(1, num_cores // max(1, config.learner.nproc + config.generator.count))
        chosen = (config.learner.num_threads, config.generator.num_threads, inherited.get("OMP_NUM_THREADS"))
        has_choice = any(threads is not None for threads in chosen)
        self._shares = _shares(() if has_choice else cores, config.learner.nproc + config.generator.count)
        self._learner_devices = _visible("learner.devices", config.learner.devices, inherited)
        self._generator_devices = _visible("generator.devices", config.generator.devices, inherited)

    @property
    def num_generators(self) -> int:
        return self._config.generator.count

    def queue(self, bound_port: int | None) -> Command:
        """The queue server. After a restart it binds its old port, since the others connect to it."""
        argv = ["queue", *self._config_arguments]
        if bound_port is not None:
            host, _ = check_address(self._config.queue.address or "tcp://127.0.0.1:0")
            host = f"[{host}]" if ":" in host else host
            argv += ["--set", f"queue.address=tcp://{host}:{bound_port}"]
        # The server ends with launch. Without a learner it must stay: loading a large model may take hours.
        argv += ["--set", f"experimental.linger_s={_DAY_S}", "--run-id", self._run_id, *self._flags]
        return Command("queue", _python(argv), self._environment(1, {"CUDA_VISIBLE_DEVICES": ""}))

    def learner(self, master_port: int) -> list[Command]:
        """Every rank of the learner. ``master_port`` is the port of the ranks' rendezvous on this machine."""
        world = self._config.learner.nproc
        threads = self._config.learner.num_threads
        devices = {} if self._learner_devices is None else {"CUDA_VISIBLE_DEVICES": ",".join(self._learner_devices)}
        return [
            Command(
                f"learner-{rank}",
                _python(["learner", *self._config_arguments, *self._flags]),
                self._environment(
                    threads,
                    {
                        "RANK": str(rank),
                        "LOCAL_RANK": str(rank),
                        "WORLD_SIZE": str(world),
                        "LOCAL_WORLD_SIZE": str(world),
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": str(master_port),
                        **devices,
                    },
                ),
                self._shares[rank],
            )
            for rank in range(world)
        ]

    def generator(self, index: int, address: str, num_restarts: int) -> Command:
        """The command of one generator. A restarted generator has a new name and names the one that it replaces."""
        name = f"generator-{index}"
        identity, dead = (f"{name}-{n}" if n else name for n in (num_restarts, num_restarts - 1))
        size = self._config.generator.tensor_parallel_size
        extra: dict[str, str] = {}
        if self._generator_devices is not None:
            extra["CUDA_VISIBLE_DEVICES"] = ",".join(self._generator_devices[index * size : (index + 1) * size])
        # The config's keys about the machine are for this machine. A generator ignores them in the config it is sent.
        own = [word for override in machine_overrides(self._config) for word in ("--set", override)]
        own += ["--replaces", dead] if num_restarts else []
        argv = _python(["generator", "--connect", address, "--id", identity, *self._generator_flags, *own])
        cores = self._shares[self._config.learner.nproc + index]
        return Command(name, argv, self._environment(self._config.generator.num_threads, extra), cores)

    def _environment(self, num_threads: int | None, extra: Mapping[str, str]) -> dict[str, str]:
        environment = {
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": package_path(self._inherited),
            **extra,
        }
        if num_threads is not None:
            environment["OMP_NUM_THREADS"] = str(num_threads)
        elif "OMP_NUM_THREADS" not in self._inherited:
            environment["OMP_NUM_THREADS"] = str(self._num_threads)
        return environment


def _shares(cores: Sequence[int], num_processes: int) -> list[tuple[int, ...]]:
    """Divide ``cores`` evenly into blocks of neighbours, one per process; return none if there are too few cores."""
    if len(cores) < num_processes:
        return [()] * num_processes
    bounds = [-(-index * len(cores) // num_processes) for index in range(num_processes + 1)]
    return [tuple(cores[start:end]) for start, end in pairwise(bounds)]


def _python(arguments: Sequence[str]) -> tuple[str, ...]:
    return module_command("async_rl", *arguments)


def _visible(key: str, devices: Sequence[int] | None, inherited: Mapping[str, str]) -> list[str] | None:
    """Return entries of CUDA_VISIBLE_DEVICES for ``devices``, which are indices of the devices visible to a process."""
    if devices is None:
        return None
    value = inherited.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return [str(device) for device in devices]
    visible = [entry for entry in value.split(",") if entry]
    for device in devices:
        if device not in range(len(visible)):
            raise ConfigError(
                f"{key}: expected indices below {len(visible)}, the number of devices in "
                f"CUDA_VISIBLE_DEVICES={value!r}, got {device}; correct {key}, or unset CUDA_VISIBLE_DEVICES"
            )
    return [visible[device] for device in devices]
