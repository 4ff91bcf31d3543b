"""Keeps the processes of one run alive and ends them all: queue server, learner ranks, generators.

``launch`` constructs a ``Supervisor`` and calls ``run``. It restarts dead generators and a dead queue server, a limited
number of times and after a growing pause; it restarts a dead learner once per new checkpoint. Anything else stops the
run, and the first cause is kept. Until the run is finished (the learner writes ``finished.json``) every exit counts as
a death, whatever its code.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Protocol

from async_rl.net.address import check_address
from async_rl.process.child import ParentWatch, kill_group
from async_rl.run.directory import RunDir
from async_rl.run.lock import LOCK_FD, RunLock
from async_rl.run.queue_files import QueueRecord, read_record

MAX_RESTARTS = 5
"""Restarts of one generator, or of the queue server, without ``HEALTHY_S`` of life between them."""
HEALTHY_S = 600.0
USER_ERROR = 2
TAIL_LINES = 25
TAIL_BYTES = 64 << 10
CAUSE_S = 30.0
"""A restarted process that has lived this long is not the cause of a later death."""


@dataclass(frozen=True, slots=True)
class Timing:
    """The supervisor's time limits, polling interval and pauses before restarts, in seconds. Tests shorten them."""

    poll_s: float = 0.2
    queue_start_s: float = 120.0
    backoff_s: float = 1.0
    max_backoff_s: float = 30.0
    finish_s: float = 20.0
    grace_s: float = 10.0
    learner_grace_s: float = 30.0


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """One process as the view shows it: running, restarting, done, or how it ended."""

    name: str
    state: str
    num_restarts: int


@dataclass(frozen=True, slots=True)
class Death:
    """A process that ended unexpectedly. Its output is bytes ``log_start`` to ``log_end`` of ``log``."""

    name: str
    exit_code: int
    log: Path
    log_start: int
    log_end: int

    def __str__(self) -> str:
        return f"{self.name} {describe_exit(self.exit_code)}"

    def tail(self) -> list[str]:
        """The last lines of its output."""
        with self.log.open("rb") as lines:
            lines.seek(max(self.log_start, self.log_end - TAIL_BYTES))
            text = lines.read(self.log_end - lines.tell()).decode("utf-8", errors="replace")
        return text.splitlines()[-TAIL_LINES:]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the run ended.

    Attributes:
        exit_code: 0 finished, 1 failed, 128 + N stopped by signal N before it was finished.
        deaths: the death that stopped the run, then the first cause if that is another death.
    """

    exit_code: int
    stopped_by: str = ""
    deaths: tuple[Death, ...] = ()


@dataclass(frozen=True, slots=True)
class Command:
    """One process to start.

    Attributes:
        name: also the name of its log file.
        environment: variables in addition to the inherited ones.
        cores: CPU cores that it is bound to; if empty, any.
    """

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] = ()

    def shell_line(self) -> str:
        """The command as a user would type it."""
        variables = [f"{key}={shlex.quote(value)}" for key, value in sorted(self.environment.items())]
        pinned = ["taskset", "-c", ",".join(map(str, self.cores))] if self.cores else []
        return " ".join([*variables, *pinned, shlex.join(self.argv)])


class Commands(Protocol):
    """Gives the supervisor the commands that start the queue server, the learner's processes and each generator.

    ``async_rl.launch.launch.RunCommands`` implements this protocol.
    """

    @property
    def num_generators(self) -> int: ...
    def queue(self, bound_port: int | None) -> Command: ...
    def learner(self, master_port: int) -> list[Command]: ...
    def generator(self, index: int, address: str, num_restarts: int) -> Command: ...


class View(Protocol):
    """Where progress is shown. Calls must not block."""

    def refresh(self, processes: Sequence[ProcessStatus]) -> None: ...
    def note(self, line: str) -> None: ...
    def watch_queue(self, address: str) -> None: ...


@dataclass(slots=True)
class _Process:
    command: Command
    popen: subprocess.Popen[bytes]
    log: Path
    log_start: int

    def death(self) -> Death:
        return Death(self.command.name, self.popen.returncode, self.log, self.log_start, self.log.stat().st_size)


@dataclass(slots=True)
class _Unit:
    """Processes that are started and ended together. ``restart_at`` is set between a death and the restart."""

    name: str
    commands: Callable[[], list[Command]]
    processes: list[_Process] = field(default_factory=list)
    num_restarts: int = 0
    recent_restarts: int = 0
    started_at: float = 0.0
    restart_at: float | None = None

    def running(self) -> list[_Process]:
        return [p for p in self.processes if p.popen.poll() is None]

    def ended(self) -> list[_Process]:
        return [p for p in self.processes if p.popen.poll() is not None]

    def dead(self) -> list[_Process]:
        return [p for p in self.ended() if p.popen.returncode != 0]

    def done(self) -> bool:
        """Whether it was started and every process has exited with code 0."""
        return bool(self.processes) and all(p.popen.poll() == 0 for p in self.processes)


class _Stop(Exception):  # noqa: N818 - not an error: it leaves the loop
    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.stopped_by)
        self.outcome = outcome


class Supervisor:
    """One run's processes, from the first start to the last exit."""

    def __init__(
        self,
        commands: Commands,
        run_dir: RunDir,
        *,
        environment: dict[str, str],
        view: View,
        timing: Timing | None = None,
        lock: RunLock | None = None,
    ) -> None:
        """``environment`` is what every child process inherits; the learner inherits ``lock``, too."""
        self._commands, self._run_dir = commands, run_dir
        self._environment, self._view, self._timing = environment, view, timing or Timing()
        self._lock = lock
        self._parent_watch = ParentWatch()
        self._wake = threading.Event()
        self._signals: list[int] = []
        self._num_heeded = 0
        self._address = ""
        self._bound_port: int | None = None
        self._checkpoint: str | None = None
        self._deaths: list[tuple[_Unit, Death]] = []
        self._queue = _Unit("queue", lambda: [commands.queue(self._bound_port)])
        self._learner = _Unit("learner", lambda: commands.learner(_free_port()))
        self._generators = [
            _Unit(f"generator-{i}", lambda i=i: self._generator_command(i)) for i in range(commands.num_generators)
        ]

    def run(self) -> Outcome:
        """Start everything, keep it alive until the learner is done, end everything.

        SIGINT or SIGTERM ends the processes in order, the learner after it has saved its last step; a second signal
        ends them at once.
        """
        with self._handle_signals():
            try:
                self._start_all()
                while not self._learner.done():
                    self._check()
                self._view.note("the learner is done")
                self._await_others()
                return Outcome(0)
            except _Stop as stop:
                self._view.note(f"stopping: {stop.outcome.stopped_by}")
                # The learner has written everything, so a signal can interrupt nothing any more.
                is_complete = self._signals and self._run_dir.is_finished
                return Outcome(0, stop.outcome.stopped_by) if is_complete else stop.outcome
            finally:
                self._stop_all()
                self._parent_watch.close()

    def processes(self) -> list[ProcessStatus]:
        """The status of every process."""
        return [
            ProcessStatus(p.command.name, _state(unit, p), unit.num_restarts)
            for unit in self._units()
            for p in unit.processes
        ]

    def _units(self) -> list[_Unit]:
        return [self._queue, self._learner, *self._generators]

    def _start_all(self) -> None:
        self._start(self._queue)
        self._address = self._await_queue()
        self._view.watch_queue(self._address)
        self._checkpoint = self._run_dir.latest_checkpoint
        self._start(self._learner)
        for unit in self._generators:
            self._start(unit)

    def _generator_command(self, index: int) -> list[Command]:
        return [self._commands.generator(index, self._address, self._generators[index].num_restarts)]

    def _start(self, unit: _Unit) -> None:
        unit.processes = []
        unit.started_at, unit.restart_at = time.monotonic(), None
        for command in unit.commands():
            log = self._run_dir.logs / f"{command.name}.log"
            with log.open("ab") as out:
                out.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {command.shell_line()}\n".encode())
            offset = log.stat().st_size
            environment, pass_fds = {**self._environment, **command.environment}, ()
            if unit is self._learner and self._lock is not None:
                environment[LOCK_FD], pass_fds = str(self._lock.fd), (self._lock.fd,)
            popen = self._parent_watch.spawn(command.argv, environment=environment, log=log, pass_fds=pass_fds)
            if command.cores:
                os.sched_setaffinity(popen.pid, command.cores)
            unit.processes.append(_Process(command, popen, log, offset))

    def _await_queue(self) -> str:
        """Wait until the new queue server has written ``queue.json``. Return the server's address.

        If a signal kills the server meanwhile, restart it.
        """
        unit = self._queue
        while True:
            self._pause()
            if unit.restart_at is not None:
                self._start_if_due(unit)
            elif ended := unit.ended():
                death = ended[0].death()
                if death.exit_code >= 0:  # it ended for a reason of its own, and would again
                    raise self._failure(unit, death)
                self._restart_later(unit)
            elif (record := self._queue_record()) is not None:
                _, self._bound_port = check_address(record.address)
                return record.address
            elif time.monotonic() - unit.started_at >= self._timing.queue_start_s:
                break
        reason = f"the queue server did not write {self._run_dir.queue} within {self._timing.queue_start_s:.0f} s"
        process = unit.processes[0]
        kill_group(process.popen.pid, signal.SIGKILL)
        process.popen.wait()
        raise _Stop(Outcome(1, reason, (process.death(),)))

    def _queue_record(self) -> QueueRecord | None:
        """What the running queue server wrote to ``queue.json``; an earlier server's record has another pid."""
        record = read_record(self._run_dir.path)
        return record if record is not None and record.pid in {p.popen.pid for p in self._queue.running()} else None

    def _pause(self) -> None:
        """Wait for the next poll, refresh the view, and stop on a signal."""
        self._wake.wait(self._timing.poll_s)
        self._view.refresh(self.processes())
        if self._signals:
            raise _Stop(Outcome(128 + self._signals[0], signal.Signals(self._signals[0]).name))

    def _check(self) -> None:
        """One round: find dead processes, decide what to do, start what is due."""
        self._pause()
        if self._lock is not None and not self._lock.is_current:
            # A queue server started now would write over the files of the other run.
            raise _Stop(Outcome(1, f"another process has taken over {self._run_dir.path}"))
        # The queue first: if its death made others die, it is the first cause.
        for unit in (self._queue, *self._generators):
            # In this order: the file exists before the queue server tells anyone to end.
            if unit.restart_at is None and unit.ended() and (unit.dead() or not self._run_dir.is_finished):
                self._restart_later(unit)
        if self._learner.dead():
            self._restart_learner()
        for unit in self._units():
            if unit is self._learner and self._queue_record() is None:
                continue  # without a queue server the learner would start one that nobody here supervises
            self._start_if_due(unit)

    def _start_if_due(self, unit: _Unit) -> None:
        if unit.restart_at is not None and time.monotonic() >= unit.restart_at:
            unit.num_restarts += 1
            unit.recent_restarts += 1
            self._start(unit)

    def _restart_later(self, unit: _Unit) -> None:
        process = unit.processes[0]
        death = process.death()
        kill_group(process.popen.pid, signal.SIGKILL)  # its children must not outlive it
        self._deaths.append((unit, death))
        if time.monotonic() - unit.started_at > HEALTHY_S:
            unit.recent_restarts = 0
            self._deaths = [(u, d) for u, d in self._deaths if u is not unit or d is death]
        if death.exit_code == USER_ERROR:
            raise self._failure(unit, death)
        if unit.recent_restarts >= MAX_RESTARTS:
            raise self._failure(unit, death, f"{death}, after {unit.num_restarts} restarts")
        pause = min(self._timing.backoff_s * 2**unit.recent_restarts, self._timing.max_backoff_s)
        unit.restart_at = time.monotonic() + pause
        self._view.note(f"{death}; restarting it in {pause:.0f} s (log: {death.log})")

    def _restart_learner(self) -> None:
        # Several ranks may be dead by now: the one whose log ended first is the cause.
        dead = sorted(self._learner.dead(), key=lambda p: (p.popen.returncode != USER_ERROR, p.log.stat().st_mtime))
        death = dead[0].death()
        self._end(self._learner.processes, grace_s=0.0)
        self._deaths.append((self._learner, death))
        # A learner that died after its last file, but before it notified the others, is restarted to do so.
        newest = "its end" if self._run_dir.is_finished else self._run_dir.latest_checkpoint
        if death.exit_code == USER_ERROR or newest is None or newest == self._checkpoint:
            raise self._failure(self._learner, death)
        self._checkpoint = newest
        self._learner.restart_at = time.monotonic() + self._timing.backoff_s
        self._learner.processes = []
        self._view.note(f"{death}; restarting the learner from {newest} (log: {death.log})")

    def _failure(self, unit: _Unit, death: Death, stopped_by: str = "") -> _Stop:
        """Build the exception that ends the run. The first cause is the oldest death whose unit has not recovered."""
        now = time.monotonic()
        open_deaths = [d for u, d in self._deaths if u is unit or not u.running() or now - u.started_at < CAUSE_S]
        deaths = (death,) if not open_deaths or open_deaths[0] is death else (death, open_deaths[0])
        return _Stop(Outcome(1, stopped_by or str(death), deaths))

    def _await_others(self) -> None:
        """Wait for the generators, which end when the queue server notifies them that the run is finished."""
        deadline = time.monotonic() + self._timing.finish_s
        while time.monotonic() < deadline and any(unit.running() for unit in self._generators):
            self._pause()

    def _stop_all(self) -> None:
        """End the learner first: it saves its last step with the help of the queue server, which ends last.

        A further signal skips all waits.
        """
        self._num_heeded = len(self._signals)
        can_save = self._learner.running() and self._queue.running()
        if can_save:
            self._view.note("the learner saves its last step; a second signal ends everything at once")
        self._end(self._learner.processes, self._timing.learner_grace_s if can_save else 0.0)
        self._end([p for unit in self._generators for p in unit.processes], self._timing.grace_s)
        # At SIGTERM it would wait for a learner that was killed.
        self._end(self._queue.processes, self._timing.grace_s, signal.SIGINT)

    def _end(self, processes: Sequence[_Process], grace_s: float, signum: int = signal.SIGTERM) -> None:
        """Send ``signum``, wait ``grace_s``, kill whole process groups."""
        for process in processes:
            if process.popen.poll() is None:
                process.popen.send_signal(signum)
        deadline = time.monotonic() + grace_s
        while any(p.popen.poll() is None for p in processes):
            if time.monotonic() >= deadline or len(self._signals) > self._num_heeded:
                break
            self._wake.clear()
            self._wake.wait(min(0.05, self._timing.poll_s))
        for process in processes:
            kill_group(process.popen.pid, signal.SIGKILL)
            process.popen.wait()

    @contextmanager
    def _handle_signals(self) -> Iterator[None]:
        def note(signum: int, _frame: FrameType | None) -> None:
            self._signals.append(signum)
            self._wake.set()

        before = {signum: signal.signal(signum, note) for signum in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)


def describe_exit(code: int) -> str:
    """Describe an exit code in words."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def _state(unit: _Unit, process: _Process) -> str:
    code = process.popen.poll()
    if code is None:
        return "running"
    if unit.restart_at is not None:
        return "restarting"
    return "done" if code == 0 else describe_exit(code)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
