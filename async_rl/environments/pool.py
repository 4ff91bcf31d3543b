"""The generator's side of environments: gives each running rollout a process and exchanges messages with the process.

``generator.environment_rollouts`` calls this module in one thread. The calls wait only for forks, which take
milliseconds. After a rollout without errors, its process plays another rollout. If a process crashes or spends more
than ``environment.timeout_s`` on one reset or step (``first_reset_timeout_s`` on its first reset), the process and all
that it started are killed, and its rollout fails.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from async_rl.config.generator import EnvironmentConfig
from async_rl.environments.child import FrameError, pack, unpack
from async_rl.environments.fork_server import READY, RECORD, digest_word
from async_rl.errors import ConfigError, EnvironmentProcessError
from async_rl.net.streams import read_exactly
from async_rl.process.child import module_command, package_environment

START_TIMEOUT_S = 120.0
"""Time limit for importing the environment's code and for its function ``prepare``."""

_CHUNK = 1 << 16
_FORK_LIMIT_S = 30.0
_REPLIES = ("sample", "ended", "failed")


@dataclass(frozen=True, slots=True)
class Event:
    """A message from the environment of the rollout ``key``.

    ``type`` is ``sample`` (the model must answer), ``ended`` or ``failed``. The module ``child`` lists the fields of
    ``message``.
    """

    key: str
    message: Mapping[str, Any]

    @property
    def type(self) -> str:
        return self.message["type"]


@dataclass(slots=True, eq=False)
class _Process:
    """One environment process.

    ``key`` is the key of the rollout that the process plays. It is None while the process is idle or cancels a
    rollout. ``deadline_s`` is the time on the pool's clock by which the process must answer. It is None if the process
    owes no answer. ``is_new`` says that the process has not answered yet, so its first reset may still import modules.
    """

    pid: int
    sock: socket.socket
    key: str | None = None
    deadline_s: float | None = None
    cancelling: bool = False
    is_new: bool = True
    incoming: bytearray = field(default_factory=bytearray)
    outgoing: bytearray = field(default_factory=bytearray)


class EnvironmentPool:
    """Plays rollouts with the user's environment, each in a process of its own.

    The environment's fork server is started at once, so that a failing import is reported at the start. ``counts`` has
    the number of processes ``started``, and the numbers of rollouts that ``timed_out`` and ``crashed``.

    Args:
        config: the section ``[environment]``.
        allowed: the code that this machine may run, as in ``generator.allow_code``.
        digest: the digest that the environment's code must have. If None, any code is accepted.
        clock: returns the time in seconds.

    Raises:
        ConfigError: the code is not allowed here, is missing, differs from the learner's, or fails on import.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        *,
        allowed: Collection[str],
        digest: str | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = {"started": 0, "timed_out": 0, "crashed": 0}
        self._config = config
        self._start_server = partial(_start_server, config, allowed, digest)
        self._clock = clock
        self._processes: dict[str, _Process] = {}
        self._cancelling: list[_Process] = []
        self._idle: list[_Process] = []
        self._failed_at_start: list[Event] = []
        self._selector = selectors.DefaultSelector()
        self._server, self._control = self._start_server()

    @property
    def pids(self) -> list[int]:
        """The ids of the processes that play a rollout now."""
        return [process.pid for process in self._processes.values()]

    def is_working(self, key: str) -> bool:
        """Return whether the rollout ``key`` waits for its process, which has a time limit."""
        process = self._processes.get(key)
        return process is not None and process.deadline_s is not None

    def start(self, key: str, start: Mapping[str, Any]) -> None:
        """Begin the rollout ``key``. ``start`` has the fields of the message ``start``, which ``child`` lists.

        Raises:
            ConfigError: the fork server died and can't be started again.
        """
        try:
            frame = pack({"type": "start", **start})
            process = self._idle.pop() if self._idle else self._fork()
        except (EnvironmentProcessError, FrameError) as error:
            self._failed_at_start.append(Event(key, {"type": "failed", "error": str(error)}))
            return
        process.key, process.cancelling = key, False
        self._processes[key] = process
        self._ask(process, frame)

    def answer(self, key: str, message: Mapping[str, Any]) -> None:
        """Send the environment of the rollout ``key`` the answer to its message ``sample``.

        ``message`` has the type ``sampled`` (the model's text) or ``over`` (no further turn). Do nothing if the process
        has ended: an event of ``poll`` says so.
        """
        if (process := self._processes.get(key)) is not None:
            self._ask(process, pack(dict(message)))

    def cancel(self, key: str) -> None:
        """End the rollout ``key`` without a result. Its environment has ``timeout_s`` seconds to clean up.

        Do nothing if there is no rollout of this key.
        """
        self._failed_at_start = [event for event in self._failed_at_start if event.key != key]
        process = self._processes.pop(key, None)
        if process is None:
            return
        process.key, process.cancelling = None, True
        self._cancelling.append(process)
        self._ask(process, pack({"type": "cancel"}))

    def poll(self) -> list[Event]:
        """Exchange messages with all processes without waiting. Return the events of rollouts since the last call."""
        events, self._failed_at_start = self._failed_at_start, []
        for selected, mask in self._selector.select(0):
            process: _Process = selected.data
            if mask & selectors.EVENT_WRITE:
                self._flush(process)
            if mask & selectors.EVENT_READ:
                events += self._receive(process)
        now_s = self._clock()
        for process in [*self._processes.values(), *self._cancelling]:
            if process.deadline_s is not None and now_s > process.deadline_s:
                call, key = self._limit(process)
                events += self._fail(
                    process,
                    "timed_out",
                    f"the environment's {call} took longer than environment.{key} = "
                    f"{getattr(self._config, key):g} s; raise the key, or make the environment faster",
                )
        return events

    def close(self) -> None:
        """Kill the fork server and every process that plays rollouts."""
        for process in [*self._processes.values(), *self._cancelling, *self._idle]:
            self._end(process)
        self._processes.clear()
        self._cancelling.clear()
        self._idle.clear()
        self._selector.close()
        self._control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._server.wait(_FORK_LIMIT_S)
        self._server.kill()
        self._server.wait()

    def _limit(self, process: _Process) -> tuple[str, str]:
        """Return what the process does now, and the key of ``[environment]`` that limits it."""
        is_first = process.is_new and not process.cancelling
        return ("first reset", "first_reset_timeout_s") if is_first else ("reset or step", "timeout_s")

    def _ask(self, process: _Process, frame: bytes) -> None:
        process.deadline_s = self._clock() + getattr(self._config, self._limit(process)[1])
        process.outgoing += frame
        self._flush(process)

    def _flush(self, process: _Process) -> None:
        try:
            while process.outgoing:
                del process.outgoing[: process.sock.send(process.outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            process.outgoing.clear()  # the process is gone; reading from the socket reports that
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if process.outgoing else 0)
        if self._selector.get_key(process.sock).events != wanted:
            self._selector.modify(process.sock, wanted, process)

    def _receive(self, process: _Process) -> list[Event]:
        ended = False
        try:
            while chunk := process.sock.recv(_CHUNK):
                process.incoming += chunk
            ended = True
        except BlockingIOError:
            pass
        except OSError:
            ended = True
        events: list[Event] = []
        try:
            while (message := unpack(process.incoming)) is not None:
                events += self._handle(process, message)
        except FrameError as error:
            return events + self._fail(
                process,
                "crashed",
                f"the environment's process sent a message that can't be read: {error}; let the environment write only "
                f"to descriptors that it opened",
            )
        if ended:
            events += self._fail(
                process,
                "crashed",
                "the environment's process ended during a rollout: it crashed, called exit or was killed; see its "
                "output above, and check that the machine has memory left",
            )
        return events

    def _handle(self, process: _Process, message: dict[str, Any]) -> list[Event]:
        kind = message.get("type")
        process.is_new = False
        if process.cancelling:
            # Messages sent before the cancellation arrived no longer matter.
            if kind == "cancelled":
                self._cancelling.remove(process)
                self._rest(process)
            return []
        if process.key is None or process.deadline_s is None or kind not in _REPLIES:
            return self._fail(
                process,
                "crashed",
                f"the environment's process sent a message {kind!r} when none was expected; let the environment write "
                f"only to descriptors that it opened",
            )
        process.deadline_s = None
        event = Event(process.key, message)
        if kind != "sample":
            del self._processes[process.key]
            self._rest(process)
        return [event]

    def _rest(self, process: _Process) -> None:
        process.key, process.deadline_s, process.cancelling = None, None, False
        self._idle.append(process)

    def _fail(self, process: _Process, count: str, error: str) -> list[Event]:
        """Kill a process. Return the event ``failed`` of the rollout that it played, or an empty list if it was idle.

        ``count`` is the key in ``counts`` to add the rollout to, and ``error`` the message for the log.
        """
        if process.sock.fileno() < 0:
            return []
        self._end(process)
        if process in self._idle:
            self._idle.remove(process)
        if process in self._cancelling:
            self._cancelling.remove(process)
        if process.key is None:
            return []
        self._processes.pop(process.key, None)
        self.counts[count] += 1
        return [Event(process.key, {"type": "failed", "error": error, "is_transient": count == "timed_out"})]

    def _end(self, process: _Process) -> None:
        self._selector.unregister(process.sock)
        process.sock.close()
        with contextlib.suppress(OSError):  # with the server gone, the kernel has killed its children
            self._control.sendall(RECORD.pack(b"K", process.pid))

    def _fork(self) -> _Process:
        """Return a new process of the environment. If the fork server has died, start it again first.

        Raises:
            EnvironmentProcessError: the machine refuses another process.
            ConfigError: the fork server died and can't be started again.
        """
        pid, ours = self._try_fork()
        if pid is None:
            self._control.close()
            self._server.kill()
            self._server.wait()
            self._server, self._control = self._start_server()
            pid, ours = self._try_fork()
        if not pid:
            ours.close()
            raise EnvironmentProcessError(
                "the machine refuses another process for the environment; lower generator.max_concurrent_groups, or "
                "free memory and raise the limit on processes (ulimit -u)"
            )
        ours.setblocking(False)
        process = _Process(pid, ours)
        self._selector.register(ours, selectors.EVENT_READ, process)
        self.counts["started"] += 1
        return process

    def _try_fork(self) -> tuple[int | None, socket.socket]:
        """Ask the fork server for a process. Return the process's id and the socket that is connected to it.

        The id is 0 if the fork failed, and None if the fork server has ended.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [RECORD.pack(b"F", 0)], [theirs.fileno()])
                return RECORD.unpack(read_exactly(self._control.recv, RECORD.size))[1], ours
            except OSError:
                ours.close()
                return None, ours


def _start_server(
    config: EnvironmentConfig, allowed: Collection[str], digest: str | None
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    try:
        settings = pack({"type": "prepare", "extra": config.extra})
    except FrameError as error:
        raise ConfigError(f"environment.extra: {error}") from None
    ours, theirs = socket.socketpair()
    with theirs:
        server = subprocess.Popen(
            module_command(
                "async_rl.environments.fork_server", str(theirs.fileno()), config.name, digest_word(digest), *allowed,
                flags=("-P",),
            ),
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env=package_environment(),
        )  # fmt: skip
    try:
        ours.settimeout(START_TIMEOUT_S)
        ours.sendall(settings)
        kind, size = RECORD.unpack(read_exactly(ours.recv, RECORD.size))
        if kind != READY:
            raise ConfigError(read_exactly(ours.recv, size).decode(errors="replace"))
    except BaseException as error:
        if isinstance(error, ConnectionError):  # the process is ending; its exit code says why
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(_FORK_LIMIT_S)
        server.kill()
        server.wait()
        ours.close()
        if isinstance(error, TimeoutError):
            raise ConfigError(
                f"environment.name: {config.name} was not imported and prepared within {START_TIMEOUT_S:g} s; do slow "
                f"work in reset instead"
            ) from None
        if isinstance(error, ConnectionError):
            raise ConfigError(
                f"environment.name: the process that imports {config.name} ended with exit code {server.returncode}; "
                f"see its output above"
            ) from None
        raise
    ours.settimeout(_FORK_LIMIT_S)
    return server, ours
