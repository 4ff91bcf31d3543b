"""``async-rl launch``: check a config, start all processes of its run on this machine, and report how the run ended.

``RunCommands`` builds the command line of each process (queue server, learner ranks, generators, scorers,
relay), with its devices and threads. ``supervisor`` runs these commands, and ``--dry-run`` prints them. Only the
command line and ``async_rl.train`` call this module.
"""

from __future__ import annotations

import os
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

from rich.console import Console

from async_rl.config.config import Config
from async_rl.config.document import preset_line
from async_rl.config.loading import changed_keys, load_run_config, machine_overrides, show_change
from async_rl.errors import ConfigError, UserError
from async_rl.launch.checks.capacity import has_gpu
from async_rl.launch.checks.placement import VISIBLE, place, visible_devices
from async_rl.launch.checks.settings import begins_too_few
from async_rl.launch.checks.table import check_launch, launch_problems
from async_rl.launch.live_view import LiveView, PlainView
from async_rl.launch.memory_deaths import MemoryDeaths
from async_rl.launch.planned_steps import planned_steps, schedule_note
from async_rl.launch.summary import next_lines, summary
from async_rl.launch.supervisor import Command, Outcome, Supervisor, Timing
from async_rl.learner.checkpoints.mirror import is_complete, mirror_of
from async_rl.net.address import check_address
from async_rl.net.keys import CLIENT_FILE, SECRET_VARIABLE, client_keys_of
from async_rl.output import Progress, can_redraw, new_console, print_json, prints_to_stderr
from async_rl.process.child import DEVICES_ARE_DEALT, module_command, package_path
from async_rl.process.user_code import changed_code, stored_digests
from async_rl.run.directory import RunDir
from async_rl.run.following.follower import followed
from async_rl.run.lock import RunLock, locked_run_dir
from async_rl.run.records.step_log import last_step
from async_rl.run.reuse import check_run_dir, has_ended
from async_rl.terminal import visible

_CHECKING = "checking data, model and address"
_AGAIN = "the same command"
_DAY_S = 86400
_MARGIN_S = 5.0
"""Seconds that a stopped learner gets in addition to ``checkpoint.grace_s`` before it is killed."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a launch ended.

    Attributes:
        exit_code: as that of ``Outcome``.
        why: lines of text that explain why the run stopped, with the first cause last; empty if nothing stopped it.
    """

    exit_code: int
    why: list[str] = field(default_factory=list)


def launch(
    config: Config, *, fresh: bool, insecure: bool, takeover: bool = False, quiet: bool = False,
    source: str | None = None, name_next: bool = True, write_inputs: Callable[[], None] = lambda: None,
) -> Ended:  # fmt: skip
    """Start the run of ``config`` and wait until it is finished, has failed or was stopped. Return how it ended.

    Args:
        fresh: rename the directory of an earlier run, and start a new run.
        insecure: allow network addresses without keys.
        takeover: take the run directory from another process that uses it.
        quiet: print only the summary at the end, and errors.
        source: ``RUN`` or ``RUN@STEP``, the run from which to fork. None if the run is no fork.
        name_next: name commands to try next at the end of a finished run.
        write_inputs: writes what the run reads into the run directory. It is called before the checks, and once more
            when the directory is locked, because an earlier run may have been moved aside in between.

    Raises:
        UserError: the run can't start, for a reason that the user can correct. No process was started.
    """
    console = new_console()
    check_run_dir(config, fresh=fresh)
    with Progress(quiet=quiet) as progress:
        is_fork, mirror = source is not None, mirror_of(config)
        fetched = mirror.bring_back(config, fresh=fresh, is_fork=is_fork, show=progress.show) if mirror else []
    for line in fetched:
        _print_line(console, line)
    run_dir = check_run_dir(config, fresh=fresh)
    make_fork = None if source is None else _planned_fork(config, source, fresh=fresh)
    if not fresh and has_ended(run_dir, config):
        _print_line(console, _has_ended_line(run_dir))
        if not is_complete(config):
            say = partial(_print_line, console)
            locked = locked_run_dir(config, role="launch", fresh=False)
            with locked as (run_dir, lock), followed(config, run_dir, lock, say):
                pass
        return Ended(0)
    write_inputs()
    with Progress(quiet=quiet) as progress:
        progress.show(_CHECKING)
        most_prompts = preflight(config, insecure=insecure)
    earlier = None if fresh else _earlier_config(run_dir)
    with locked_run_dir(config, role="launch", fresh=fresh, takeover=takeover) as (run_dir, lock):
        write_inputs()
        shown = new_console(quiet=quiet)
        for line in make_fork() if make_fork is not None else continuation_lines(run_dir, config, earlier):
            _print_line(shown, line)
        num_steps = planned_steps(config, most_prompts, run_dir)
        for line in filter(None, (preset_line(config), schedule_note(config, num_steps))):
            _print_line(shown, line)
        ended = _run(config, run_dir, lock, console, num_steps, insecure=insecure, fresh=fresh, quiet=quiet)
        if run_dir.is_finished and name_next:
            for line in next_lines(run_dir, config):
                _print_line(shown, line)
        return ended


def dry_run(
    config: Config, config_path: Path, overrides: Sequence[str], *, fresh: bool, insecure: bool, as_json: bool = False,
    quiet: bool = False, source: str | None = None,
) -> None:  # fmt: skip
    """Print the commands of the run, then check whether it could start on this machine. Write and start nothing.

    Args:
        config_path: the file from which ``config`` was read. The printed commands name this file.
        overrides: the ``--set`` options with which ``config`` was read.
        fresh: as if the directory of an earlier run were renamed.
        insecure: allow network addresses without keys.
        as_json: print one JSON object, after the checks. ``problems`` say why launch would refuse, and ``problem`` is
            the first of them, or null.
        quiet: show no progress of the checks.
        source: ``RUN`` or ``RUN@STEP``, the run from which launch would fork. None if the run is no fork.

    Raises:
        UserError: launch would refuse to start. The commands were printed before.
    """
    console = new_console()
    run_dir = check_run_dir(config, fresh=fresh)
    if source is not None:
        _planned_fork(config, source, fresh=fresh)
    is_finished = not fresh and has_ended(run_dir, config)
    arguments = [str(config_path), *(part for override in overrides for part in ("--set", override))]
    commands = _commands(config, arguments, run_id="RUN_ID", insecure=insecure)
    if not as_json:
        for line in [_has_ended_line(run_dir)] if is_finished else describe_commands(config, commands):
            _print_line(console, line)
    problems: list[str] = []
    if not is_finished:
        with Progress(quiet=quiet) as progress, prints_to_stderr():  # own code is tried
            progress.show(_CHECKING)
            problems = launch_problems(config, insecure=insecure)
    if as_json:
        planned = [] if is_finished else [asdict(command) for command in _all_commands(config, commands)]
        first = problems[0] if problems else None
        shown = {"run_dir": config.run.dir, "finished": is_finished, "problem": first, "problems": problems}
        print_json({**shown, "processes": planned})
    if problems:
        raise UserError(problems[0] if len(problems) == 1 else "\n  ".join(["launch would refuse this:", *problems]))
    if not as_json and not is_finished:
        _print_line(console, "# launch would start here: data, model and address passed the checks")


def _planned_fork(config: Config, source: str, *, fresh: bool) -> Callable[[], list[str]] | None:
    """Return the function that makes the fork in the prepared run directory, and returns lines that describe it.

    None if the directory already has the fork, which is then resumed.
    """
    from async_rl.learner.checkpoints.fork import find_fork_point, fork_run, must_fork, notes_on_models  # imports torch

    point = find_fork_point(source)
    if not must_fork(point, config, fresh=fresh):
        return None

    def make_fork() -> list[str]:
        changed = {key: values for key, values in fork_run(point, config).items() if key != "run.dir"}
        line = f"forked from {point.checkpoint}: the first step is {point.step + 1}"
        changes = [f"changed since step {point.step}: {show_change(key, *two)}" for key, two in changed.items()]
        return [line, *changes, *notes_on_models(point, changed, config)]

    return make_fork


def preflight(config: Config, *, insecure: bool) -> float:
    """Check that this machine can run ``config``: data, model, queue address, keys, devices. Write nothing.

    Returns:
        As ``check_launch``.

    Raises:
        UserError: a check failed. The message is that of the first failed check.
    """
    _commands(config, [], run_id="", insecure=insecure)
    with prints_to_stderr():  # own code is tried
        return check_launch(config, insecure=insecure)


def describe_commands(config: Config, commands: RunCommands) -> list[str]:
    """Return the lines that ``--dry-run`` prints: the run directory, then the name and shell command of each process.

    Ports that are chosen only when the run starts appear as 0 (queue server) and 29500 (ranks of the learner).
    """
    lines = [f"# run directory: {config.run.dir}; free ports are chosen at start"]
    lines += [f"# GPUs: {line}"] if (line := commands.placement.line) else []
    lines += [f"# {line}"] if (line := preset_line(config)) else []
    for command in _all_commands(config, commands):
        lines += [f"# {command.name}", command.shell_line()]
    return lines


def _all_commands(config: Config, commands: RunCommands) -> list[Command]:
    address = config.queue.advertise or config.queue.address or "tcp://127.0.0.1:0"
    generators = (commands.generator(index, address, 0) for index in range(commands.num_generators))
    return [commands.queue(None), *commands.learner(29500), *commands.services, *generators]


def _has_ended_line(run_dir: RunDir) -> str:
    return (
        f"the run in {run_dir.path} is finished; raise learner.steps to train on, or pass --fresh to start over (in "
        f"Python: fresh=True; the old directory is moved aside)"
    )


def _earlier_config(run_dir: RunDir) -> Config | None:
    """Return the config with which the run was launched last; None if there is none, or none that can be read."""
    with suppress(ConfigError):
        return load_run_config(run_dir.config) if run_dir.config.exists() else None
    return None


def continuation_lines(run_dir: RunDir, config: Config, earlier: Config | None) -> list[str]:
    """Return lines that say from where the run goes on, and which config keys and user code have changed.

    Return none if the run starts anew. ``earlier`` is the config of the launch before, None if it is unknown.
    """
    trained = last_step(run_dir.metrics)
    checkpoint = run_dir.latest_checkpoint
    if checkpoint is None and not trained:
        return []
    if checkpoint is None:
        line = (
            f"starts again at step 0: the earlier start made {trained} steps and no checkpoint (checkpoint.every "
            f"sets how often one is saved)"
        )
    else:
        line = f"goes on from checkpoint {checkpoint}; the earlier start had made {trained} steps"
    changed = {} if earlier is None else changed_keys(earlier, config)
    lines = [f"changed since the last launch: {show_change(key, *values)}" for key, values in changed.items()]
    code = changed_code(stored_digests(run_dir.path), config.recorded_code_names)
    lines += [
        f"the source of {name} has changed, SHA-256 {old} -> {new}; copy it to the machines that run it"
        for name, (old, new) in code.items()
    ]
    return [line, *lines]


def _commands(config: Config, config_arguments: Sequence[str], *, run_id: str, insecure: bool) -> RunCommands:
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return RunCommands(
        config, config_arguments, run_id=run_id, insecure=insecure, inherited=os.environ,
        num_cores=len(cores) or os.cpu_count() or 1, cores=() if has_gpu() else cores,
        gpus=visible_devices(os.environ),
    )  # fmt: skip


def _run(
    config: Config, run_dir: RunDir, lock: RunLock, console: Console, num_steps: int, *, insecure: bool, fresh: bool,
    quiet: bool,
) -> Ended:  # fmt: skip
    started = time.monotonic()
    run_id = run_dir.run_id
    name = config.run.name or run_dir.path.name
    shown = new_console(quiet=quiet)
    at_most = "at most " if num_steps < config.learner.steps else ""
    _print_line(shown, f"{name}: {at_most}{num_steps} steps in {run_dir.path} (logs in {run_dir.logs})")
    memory_deaths, say = MemoryDeaths(), partial(_print_line, shown)
    with followed(config, run_dir, lock, say, shows_notes=False) as follower:  # the view shows them
        if can_redraw(sys.stdout) and not quiet:
            view = LiveView(console, run_dir.metrics, num_steps, client_keys_of(config.queue.keys))
        else:
            view = PlainView(shown, run_dir.metrics, num_steps)
        try:
            # The processes read the copy in the run directory, so an edit of the user's file can't affect a restart.
            commands = _commands(config, [str(run_dir.config)], run_id=run_id, insecure=insecure)
            if line := commands.placement.line:
                view.note(f"GPUs: {line}")
            if line := nobody_samples_line(config):
                view.note(line)
            environment = {SECRET_VARIABLE: secrets.token_hex(16), **os.environ}
            timing = Timing(learner_grace_s=config.checkpoint.grace_s + _MARGIN_S)
            supervisor = Supervisor(
                commands, run_dir, environment=environment, view=view, timing=timing, lock=lock,
                memory_deaths=memory_deaths,
            )  # fmt: skip
            outcome = supervisor.run()
            follower.is_failed = 0 < outcome.exit_code < 128
        finally:
            view.close()
    for line in [*summary(run_dir, time.monotonic() - started, has_notes=quiet), *memory_deaths.summary()]:
        _print_line(console, line)
    sys.stdout.flush()
    again = f"`async-rl launch {shlex.quote(str(run_dir.config))}`" if fresh else _AGAIN
    return Ended(outcome.exit_code, explain(outcome, checkpoint=run_dir.latest_checkpoint, again=again))


def nobody_samples_line(config: Config) -> str:
    """Return what to start by hand if the processes that ``launch`` starts sample too little for a step, or nothing;
    empty if they do.
    """
    if not config.samples_here:
        what = "nothing samples here (generator.count = 0, learner.generate = false)"
    elif begins_too_few(config, config.learner.nproc):
        what = "the learner alone begins fewer groups (learner.generate_groups) than a step has"
    else:
        return ""
    return (
        f"{what}: the run waits until you start `async-rl generator --connect ADDRESS` with the queue server's address"
    )


def explain(outcome: Outcome, *, checkpoint: str | None = None, again: str = _AGAIN) -> list[str]:
    """Return lines of text that explain why the run stopped, with the first cause last; empty if nothing stopped it.

    Args:
        checkpoint: the name of the run's latest checkpoint; None if the run has saved no step.
        again: what resumes the run. With ``--fresh``, the same command would start over.
    """
    if outcome.exit_code == 0:
        return [f"async-rl: {outcome.stopped_by}"] if outcome.stopped_by else []
    if outcome.exit_code > 128:
        remedy = f"resumes from {checkpoint}" if checkpoint else "starts over, since no step is saved"
        return [f"async-rl: the run was stopped by {outcome.stopped_by}; {again} {remedy}"]
    lines = [f"async-rl: the run stopped: {outcome.stopped_by}"]
    for number, death in enumerate(outcome.deaths, start=1):
        title = f"first cause: {death}" if number == len(outcome.deaths) else str(death)
        lines += [f"--- {title}; the end of {death.log}:", *(f"    {line}" for line in death.tail())]
    lines += [f"remedy: {remedy}" for remedy in dict.fromkeys(death.remedy for death in outcome.deaths) if remedy]
    return lines


def _print_line(console: Console, line: str) -> None:
    console.print(visible(line), markup=False, highlight=False, soft_wrap=True)


class RunCommands:
    """Builds the command lines and environment variables of a run's processes: queue server, learner, generators,
    scorers.
    """

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
        gpus: Sequence[str] = (),
    ) -> None:
        """Divide this machine's devices, threads and CPU cores among the processes.

        Args:
            config_arguments: the config's path and ``--set`` options, as arguments of the queue server and the learner.
            run_id: the id of the run that the queue server serves.
            inherited: the environment variables that every process inherits.
            num_cores: the number of CPU cores, from which each process's number of threads is computed.
            cores: the numbers of the CPU cores to which ranks and generators are bound. They are not bound if there are
                fewer cores than processes, or if the user has set a number of threads. On a CPU binding makes a run a
                fifth faster, because processes keep their warm caches.
            gpus: the GPUs that ``placement.visible_devices`` found for ``inherited``.

        Raises:
            ConfigError: the GPUs do not suffice, or one that the config names is not visible.
        """
        self._config, self._config_arguments, self._run_id = config, tuple(config_arguments), run_id
        self._flags = ("--insecure",) if insecure else ()
        keys = config.queue.keys
        self._generator_flags = self._flags if keys is None else (*self._flags, "--keys", str(Path(keys) / CLIENT_FILE))
        self._inherited = inherited
        num_processes = config.learner.nproc + config.generator.count + len(self.scorer_names)
        self._num_threads = max(1, num_cores // max(1, num_processes))
        chosen = (config.learner.num_threads, config.generator.num_threads, inherited.get("OMP_NUM_THREADS"))
        has_choice = any(threads is not None for threads in chosen)
        self._shares = _shares(() if has_choice else cores, num_processes)
        self.placement = place(config, gpus, is_limited=VISIBLE in inherited)

    @property
    def num_generators(self) -> int:
        return self._config.generator.count

    @property
    def scorer_names(self) -> tuple[str, ...]:
        """The scorers that launch starts."""
        return tuple(name for name, scorer in self._config.scorer.items() if scorer.launch)

    @property
    def services(self) -> list[Command]:
        """The commands that start the relay of agents on other machines, if there is one, and the scorers."""
        relay = [] if self._config.environment.relay is None else [self._relay()]
        return [*relay, *map(self._scorer, self.scorer_names)]

    def queue(self, bound_port: int | None) -> Command:
        """Return the command that starts the queue server.

        ``bound_port`` is the port that the server had before a restart. The restarted server binds this port, because
        the other processes connect to it. It is None at the first start.
        """
        argv = ["queue", *self._config_arguments]
        if bound_port is not None:
            host, _ = check_address(self._config.queue.address or "tcp://127.0.0.1:0")
            host = f"[{host}]" if ":" in host else host
            argv += ["--set", f"queue.address=tcp://{host}:{bound_port}"]
        # The server ends with launch. Without a learner it must stay: loading a large model may take hours.
        argv += ["--set", f"queue.linger_s={_DAY_S}", "--run-id", self._run_id, *self._flags]
        return Command("queue", _python(argv), self._environment(1, {VISIBLE: ""}))

    def learner(self, master_port: int) -> list[Command]:
        """Return the commands that start the learner, one for each rank.

        ``master_port`` is the port on this machine at which the ranks find each other (``MASTER_PORT`` of torch).
        """
        world = self._config.learner.nproc
        threads = self._config.learner.num_threads
        devices: dict[str, str] = {}
        if self.placement.learner is not None:
            devices = {VISIBLE: ",".join(self.placement.learner), DEVICES_ARE_DEALT: "1"}
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
        """Return the command that starts generator number ``index``, which connects to the queue server at ``address``.

        After each restart the generator has a new id, and ``--replaces`` gives the id of the dead generator.
        """
        name = f"generator-{index}"
        identity, dead = (f"{name}-{n}" if n else name for n in (num_restarts, num_restarts - 1))
        extra: dict[str, str] = {}
        if self.placement.generators is not None:
            extra[VISIBLE] = ",".join(self.placement.generators[index])
        # A generator gets the run's config from the queue server, but the keys about its machine from its arguments.
        own = [word for override in machine_overrides(self._config) for word in ("--set", override)]
        if (port := self._config.log.prometheus_port) is not None:
            own += ["--set", f"generator.prometheus_port={port + 2 + index}"]
        own += ["--replaces", dead] if num_restarts else []
        argv = _python(["generator", "--connect", address, "--id", identity, *self._generator_flags, *own])
        cores = self._shares[self._config.learner.nproc + index]
        return Command(name, argv, self._environment(self._config.generator.num_threads, extra), cores)

    def _scorer(self, name: str) -> Command:
        index = self.scorer_names.index(name)
        extra = {VISIBLE: self.placement.scorers[index]} if self.placement.scorers else {}
        cores = self._shares[self._config.learner.nproc + self._config.generator.count + index]
        argv = _python(["scorer", *self._config_arguments, name, *self._flags])
        return Command(f"scorer-{name}", argv, self._environment(None, extra), cores)

    def _relay(self) -> Command:
        argv = _python(["relay", *self._config_arguments, *self._flags])
        return Command("relay", argv, self._environment(1, {VISIBLE: ""}))

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
    """Divide ``cores`` evenly into blocks of neighbouring cores, and return one block for each process.

    All blocks are empty if there are fewer cores than processes.
    """
    if len(cores) < num_processes:
        return [()] * num_processes
    bounds = [-(-index * len(cores) // num_processes) for index in range(num_processes + 1)]
    return [tuple(cores[start:end]) for start, end in pairwise(bounds)]


def _python(arguments: Sequence[str]) -> tuple[str, ...]:
    return module_command("async_rl", *arguments)
