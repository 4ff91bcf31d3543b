"""Start the processes of one run (queue server, learner ranks, generators, scorers, relay), restart those that die,
and end them all.

``launch`` constructs a ``Supervisor`` and calls ``run``. Dead generators, scorers, relays and a dead queue server
are restarted, a limited number of times and after a growing pause. A dead learner is restarted if it has saved a new
checkpoint since its last start. Any other death stops the run, and the first cause is reported. A generator, scorer,
relay or queue server that exits before the learner has written ``finished.json`` counts as dead, even with exit code 0.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Protocol

from async_rl.launch.memory_deaths import MEMORY_REMEDIES, MemoryDeaths
from async_rl.net.address import check_address
from async_rl.process.cgroup import prefer_for_memory_kill
from async_rl.process.child import ParentWatch, kill_group
from async_rl.run.directory import RunDir
from async_rl.run.lock import LOCK_FD, RunLock
from async_rl.run.queue_files import QueueRecord, read_record

MAX_RESTARTS = 5
"""How many times one generator, one scorer or the queue server is restarted. The count starts again at 0 if the process
has lived longer than ``HEALTHY_S`` seconds before it dies."""
HEALTHY_S = 600.0
USER_ERROR = 2
TAIL_LINES = 25
TAIL_BYTES = 64 << 10
MEMORY_PREFERENCE = 200
"""By how many thousandths of the memory's limit the learner, generators and scorers count as larger when the kernel
chooses a process to kill. Without it, it may choose ``launch``, with which the run would end, although it can go on
after the death of any of them."""
CAUSE_S = 30.0
"""Seconds. The death of a process does not count as the cause of later deaths if its restart has lived this long."""


@dataclass(frozen=True, slots=True)
class Timing:
    """The supervisor's polling interval, time limits and pauses before restarts, in seconds. Tests use shorter ones.

    Attributes:
        poll_s: time between two looks at the processes.
        queue_start_s: limit for the queue server to write ``queue.json``.
        backoff_s: pause before the first restart. It doubles with each further restart, up to ``max_backoff_s``.
        finish_s: how long generators may run after the learner is done.
        grace_s: how long a generator or the queue server may run after the signal to end, before it is killed.
        learner_grace_s: the same limit for a learner that saves its last step.
    """

    poll_s: float = 0.2
    queue_start_s: float = 120.0
    backoff_s: float = 1.0
    max_backoff_s: float = 30.0
    finish_s: float = 20.0
    grace_s: float = 10.0
    learner_grace_s: float = 30.0


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """The state of one process, for the view: ``running``, ``restarting``, ``done`` or words on how it ended."""

    name: str
    state: str
    num_restarts: int


@dataclass(frozen=True, slots=True)
class Death:
    """The unexpected end of a process. Bytes ``log_start`` to ``log_end`` of the file ``log`` are its output.

    ``memory`` says which memory ran out if that is why the kernel killed it; else it is empty.
    """

    name: str
    exit_code: int
    log: Path
    log_start: int
    log_end: int
    memory: str = ""

    def __str__(self) -> str:
        return f"{self.name} {describe_exit(self.exit_code)}{f', {self.memory}' if self.memory else ''}"

    @property
    def remedy(self) -> str:
        """What to do if memory ran out; empty if it did not."""
        return MEMORY_REMEDIES[self.name.partition("-")[0]] if self.memory else ""

    def tail(self) -> list[str]:
        """Return the last lines of the dead process's output, at most ``TAIL_LINES``.

        If Python's last error stands above them, it comes first: libraries print many lines while a process ends.
        """
        try:
            with self.log.open("rb") as file:
                file.seek(max(self.log_start, self.log_end - TAIL_BYTES))
                lines = file.read(self.log_end - file.tell()).decode("utf-8", errors="replace").splitlines()
        except OSError as error:  # the run directory is gone: whoever died of that must still be named
            return [f"can't be read: {error}"]
        error = _last_error(lines)
        hidden = [] if error is None or error >= len(lines) - TAIL_LINES else [lines[error], "..."]
        return hidden + lines[-TAIL_LINES:]


def _last_error(lines: Sequence[str]) -> int | None:
    """Return the index of the line that names the error of the last traceback, or None if there is no traceback."""
    found, is_inside = None, False
    for index, line in enumerate(lines):
        if line == "Traceback (most recent call last):":
            is_inside = True
        elif is_inside and line and not line[0].isspace():
            found, is_inside = index, False
    return found


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the run ended.

    Attributes:
        exit_code: 0 if the run is finished, 1 if it failed, 128 + N if signal N stopped it before it was finished.
        stopped_by: the name of the signal, or the reason in words, that stopped the run. Empty if nothing stopped it.
        deaths: the death that stopped the run, then the death that caused it if that is another one.
    """

    exit_code: int
    stopped_by: str = ""
    deaths: tuple[Death, ...] = ()


@dataclass(frozen=True, slots=True)
class Command:
    """The command that starts one process of the run.

    Attributes:
        name: the process's name, such as ``generator-0``. The log file is NAME.log.
        argv: the program and its arguments.
        environment: environment variables of the process, in addition to those that it inherits.
        cores: the numbers of the CPU cores to which the process is bound; empty if it may use all cores.
    """

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] = ()

    def shell_line(self) -> str:
        """Return the command as one line for a shell, with its environment variables and cores."""
        variables = [f"{key}={shlex.quote(value)}" for key, value in sorted(self.environment.items())]
        pinned = ["taskset", "-c", ",".join(map(str, self.cores))] if self.cores else []
        return " ".join([*variables, *pinned, shlex.join(self.argv)])


class Commands(Protocol):
    """Gives the supervisor the commands that start the queue server, the learner's processes, each generator, and each
    service: a scorer, or the relay of agents.

    ``async_rl.launch.launch.RunCommands`` implements this protocol.
    """

    @property
    def num_generators(self) -> int: ...
    @property
    def services(self) -> Sequence[Command]: ...
    def queue(self, bound_port: int | None) -> Command: ...
    def learner(self, master_port: int) -> list[Command]: ...
    def generator(self, index: int, address: str, num_restarts: int) -> Command: ...


class View(Protocol):
    """Shows the user what the supervisor does. ``live_view`` has the implementations. The methods must not block."""

    def refresh(self, processes: Sequence[ProcessStatus]) -> None: ...
    def note(self, line: str) -> None: ...
    def watch_queue(self, address: str) -> None: ...


@dataclass(slots=True)
class _Process:
    command: Command
    popen: subprocess.Popen[bytes]
    log: Path
    log_start: int

    @property
    def log_time(self) -> float:
        """When the process last printed something; 0 if its log is gone."""
        return self.log.stat().st_mtime if self.log.exists() else 0.0

    def death(self) -> Death:
        log_end = self.log.stat().st_size if self.log.exists() else self.log_start
        return Death(self.command.name, self.popen.returncode, self.log, self.log_start, log_end)


@dataclass(slots=True)
class _Unit:
    """Processes that are started and ended together: the queue server, all ranks of the learner, or one generator.

    Attributes:
        commands: returns the commands of the next start.
        num_restarts: how many times the unit was restarted.
        recent_restarts: the same count, since the unit last lived longer than ``HEALTHY_S``.
        started_at: time of the last start, from ``time.monotonic``.
        restart_at: time of the next restart, from ``time.monotonic``; None if no restart is planned.
    """

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
        """Return whether the unit was started and all its processes have exited with code 0."""
        return bool(self.processes) and all(p.popen.poll() == 0 for p in self.processes)


class _Stop(Exception):  # noqa: N818 - not an error: it leaves the loop
    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.stopped_by)
        self.outcome = outcome


class Supervisor:
    """Starts, watches, restarts and ends the processes of one run."""

    def __init__(
        self,
        commands: Commands,
        run_dir: RunDir,
        *,
        environment: dict[str, str],
        view: View,
        timing: Timing | None = None,
        lock: RunLock | None = None,
        memory_deaths: MemoryDeaths | None = None,
    ) -> None:
        """Prepare a supervisor that has started no process yet.

        Args:
            commands: builds the commands of the processes.
            environment: the environment variables that every process inherits.
            view: shows the progress.
            lock: the lock of the run directory, which the learner inherits. None if the directory is not locked.
            memory_deaths: tells whether a killed process died because memory ran out.
        """
        self._commands, self._run_dir = commands, run_dir
        self._environment, self._view, self._timing = environment, view, timing or Timing()
        self._lock, self._memory_deaths = lock, memory_deaths or MemoryDeaths()
        self._parent_watch = ParentWatch()
        self._wake = threading.Event()
        self._signals: list[int] = []
        self._num_heeded = 0
        self._address = ""
        self._bound_port: int | None = None
        self._checkpoint: str | None = None
        self._deaths: list[tuple[_Unit, Death]] = []
        self._remedies: set[str] = set()
        self._queue = _Unit("queue", lambda: [commands.queue(self._bound_port)])
        self._learner = _Unit("learner", lambda: commands.learner(_free_port()))
        self._services = [_Unit(service.name, lambda service=service: [service]) for service in commands.services]
        self._generators = [
            _Unit(
                f"generator-{i}", lambda i=i: [commands.generator(i, self._address, self._generators[i].num_restarts)]
            )
            for i in range(commands.num_generators)
        ]

    def run(self) -> Outcome:
        """Start all processes, restart those that die until the learner is done, end all, and return the outcome.

        After SIGINT or SIGTERM the learner saves its last step and ends, then the other processes are ended. A second
        signal ends all processes at once.
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
                return _after_the_end(stop.outcome.stopped_by) if is_complete else stop.outcome
            except OSError as error:
                if not str(error.filename).startswith(str(self._run_dir.path)):
                    raise
                return self._unusable(error)
            finally:
                self._stop_all()
                self._parent_watch.close()

    def processes(self) -> list[ProcessStatus]:
        """Return the status of every process that was started."""
        return [
            ProcessStatus(p.command.name, _state(unit, p), unit.num_restarts)
            for unit in self._units()
            for p in unit.processes
        ]

    def _units(self) -> list[_Unit]:
        return [self._queue, self._learner, *self._services, *self._generators]

    def _start_all(self) -> None:
        self._start(self._queue)
        self._address = self._await_queue()
        self._view.watch_queue(self._address)
        self._checkpoint = self._run_dir.latest_checkpoint
        self._start(self._learner)
        for unit in (*self._services, *self._generators):
            self._start(unit)

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
            if unit is not self._queue:
                prefer_for_memory_kill(popen.pid, MEMORY_PREFERENCE)
            unit.processes.append(_Process(command, popen, log, offset))

    def _await_queue(self) -> str:
        """Wait until the new queue server has written ``queue.json``. Return the server's address.

        A server that a signal kills in the meantime is restarted.

        Raises:
            _Stop: the server ended by itself, or did not write the file in time.
        """
        unit = self._queue
        while True:
            self._pause()
            if unit.restart_at is not None:
                self._start_if_due(unit)
            elif ended := unit.ended():
                death = self._death(ended[0])
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
        """Return the content of ``queue.json``; None if the running queue server has not written the file yet."""
        record = read_record(self._run_dir.path)
        return record if record is not None and record.pid in {p.popen.pid for p in self._queue.running()} else None

    def _pause(self) -> None:
        """Wait for ``poll_s`` seconds and refresh the view.

        Raises:
            _Stop: this process has received a signal.
        """
        self._wake.wait(self._timing.poll_s)
        self._view.refresh(self.processes())
        if self._signals:
            raise _Stop(Outcome(128 + self._signals[0], signal.Signals(self._signals[0]).name))

    def _check(self) -> None:
        """Wait once, look for dead processes, plan their restarts, and start those whose time has come.

        Raises:
            _Stop: the run can't go on.
        """
        self._pause()
        if self._lock is not None and not self._lock.is_current:
            # A queue server started now would write over the files of the other run.
            path = self._run_dir.path
            why = f"another process has taken over {path}; to take it back, launch with --takeover"
            is_there = self._lock.path.exists()
            raise _Stop(Outcome(1, why if is_there else f"{path} is gone; put it back, and launch again"))
        # The queue first: if its death made others die, it is the first cause.
        for unit in (self._queue, *self._services, *self._generators):
            # In this order: the file exists before the queue server tells anyone to end.
            if unit.restart_at is None and unit.ended() and (unit.dead() or not self._run_dir.is_finished):
                self._restart_later(unit)
        if self._learner.dead():
            self._restart_learner()
        if self._learner.restart_at is not None and self._queue.done() and self._run_dir.is_finished:
            # The run is finished and its queue has ended, so a learner that starts again has nobody to tell.
            death = next(death for unit, death in reversed(self._deaths) if unit is self._learner)
            raise _Stop(_after_the_end(f"{death}, which"))
        for unit in self._units():
            if unit is self._learner and self._queue_record() is None:
                continue  # without a queue server the learner would start one that nobody here supervises
            self._start_if_due(unit)
        if line := self._memory_deaths.note():
            self._view.note(line)

    def _start_if_due(self, unit: _Unit) -> None:
        if unit.restart_at is not None and time.monotonic() >= unit.restart_at:
            unit.num_restarts += 1
            unit.recent_restarts += 1
            self._start(unit)

    def _restart_later(self, unit: _Unit) -> None:
        process = unit.processes[0]
        death = self._death(process)
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
        self._note_remedy(death)

    def _restart_learner(self) -> None:
        # Several ranks may be dead by now: the one whose log ended first is the cause.
        dead = sorted(self._learner.dead(), key=lambda p: (p.popen.returncode != USER_ERROR, p.log_time))
        death = self._death(dead[0])
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
        self._note_remedy(death)

    def _death(self, process: _Process) -> Death:
        """Return the death of a process that has ended by itself, with its cause if memory ran out."""
        death = process.death()
        is_killed = death.exit_code == -signal.SIGKILL
        return replace(death, memory=self._memory_deaths.cause(death.name)) if is_killed else death

    def _note_remedy(self, death: Death) -> None:
        """Say what to do if memory ran out, once for all processes of a role."""
        if (remedy := death.remedy) and remedy not in self._remedies:
            self._remedies.add(remedy)
            self._view.note(f"against it: {remedy}")

    def _failure(self, unit: _Unit, death: Death, stopped_by: str = "") -> _Stop:
        """Return the exception that stops the run because of ``death``, for the reason ``stopped_by``.

        The exception also has the first cause: the oldest death from which the run had not recovered.
        """
        now = time.monotonic()
        open_deaths = [d for u, d in self._deaths if u is unit or not u.running() or now - u.started_at < CAUSE_S]
        deaths = (death,) if not open_deaths or open_deaths[0] is death else (death, open_deaths[0])
        return _Stop(Outcome(1, stopped_by or str(death), deaths))

    def _unusable(self, error: OSError) -> Outcome:
        """Return the outcome of a run whose directory is read-only, full or moved, with the death that showed it."""
        reason = f"can't use the run directory {self._run_dir.path}: {error}; put it right, and launch again"
        return Outcome(1, reason, tuple(death for _, death in self._deaths[-1:]))

    def _await_others(self) -> None:
        """Wait up to ``finish_s`` seconds for the generators to end. The queue server notifies them."""
        deadline = time.monotonic() + self._timing.finish_s
        while time.monotonic() < deadline and any(unit.running() for unit in self._generators):
            self._pause()

    def _stop_all(self) -> None:
        """End the learner, then generators and scorers, then the queue server, which the learner needs to save its last
        step.

        If this process receives a further signal, all are killed without waiting.
        """
        self._num_heeded = len(self._signals)
        can_save = self._learner.running() and self._queue.running()
        if can_save:
            self._view.note("the learner saves its last step; a second signal ends everything at once")
        self._end(self._learner.processes, self._timing.learner_grace_s if can_save else 0.0)
        others = (*self._generators, *self._services)
        self._end([p for unit in others for p in unit.processes], self._timing.grace_s)
        # At SIGTERM it would wait for a learner that was killed.
        self._end(self._queue.processes, self._timing.grace_s, signal.SIGINT)

    def _end(self, processes: Sequence[_Process], grace_s: float, signum: int = signal.SIGTERM) -> None:
        """Send ``signum`` to the processes, wait up to ``grace_s`` seconds, then kill their process groups."""
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


def _after_the_end(what: str) -> Outcome:
    """Return the outcome of a finished run after which ``what`` came."""
    return Outcome(0, f"{what} came after the end of the run")


def describe_exit(code: int) -> str:
    """Return words for a process's exit code, such as ``exited with code 1``. A negative code is a signal's number."""
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
