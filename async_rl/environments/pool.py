"""The generator's side of environments: gives each running rollout a process and exchanges messages with the process.

``generator.environment_rollouts`` calls this module in one thread. No call waits: not for a process, not for the fork
server, which is replaced if it dies or stands still. After a rollout without errors, its process plays another
rollout; an agent's ends with all that it has started, because nothing must outlive its rollout. If a process crashes or
spends more than ``environment.timeout_s`` on one reset or step (``first_reset_timeout_s`` on its first reset), the
process and all that it started are killed, and its rollout fails.
"""

from __future__ import annotations

import logging
import math
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from async_rl.config.generator import EnvironmentConfig
from async_rl.environments.child import FrameError, pack, unpack
from async_rl.errors import ConfigError
from async_rl.process.fork_client import ForkServer, ServerLostError, StartError
from async_rl.process.fork_server import FORK
from async_rl.process.helper import Channel

logger = logging.getLogger(__name__)

_CHECK_S = 0.05
"""Time between two looks for processes that take too long. The caller polls thousands of times a second."""
_LONG_S = 5.0
"""Seconds after which a silent fork server is worth a word."""
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


class ForkedCode(NamedTuple):
    """What the processes of a pool run.

    Attributes:
        server: the module of its fork server, which calls ``fork_server.main``.
        code: the name of the code that plays.
        settings: what the code's function ``prepare`` gets.
    """

    server: str
    code: str
    settings: Mapping[str, Any]


@dataclass(slots=True, eq=False)
class _Process:
    """One environment process.

    ``key`` is the key of the rollout that the process plays. It is None while the process is idle or cancels a
    rollout. ``deadline_s`` is the time on the pool's clock by which the process must answer. It is None if the process
    owes no answer. ``pid`` is 0 until the process is forked; until then ``sent`` is its first message, and ``theirs``
    its end of the socket; ``num_tries`` says how often it was asked for. ``is_new`` says that the process has not
    answered yet, so its first reset may still import modules.
    """

    channel: Channel
    theirs: socket.socket
    pid: int = 0
    sent: bytes = b""
    num_tries: int = 1
    key: str | None = None
    deadline_s: float | None = None
    cancelling: bool = False
    is_new: bool = True


class EnvironmentPool:
    """Plays rollouts with the user's environment, each in a process of its own.

    The environment's fork server is started at once, so that a failing import is reported at the start. ``counts`` has
    the number of processes ``started``, and the numbers of rollouts that ``timed_out`` and ``crashed``.

    Args:
        config: the section ``[environment]``.
        allowed: the code that this machine may run, as in ``generator.allow_code``.
        digest: the digest that the environment's code must have. If None, any code is accepted.
        agent: what plays if that is no environment. It needs one answer of this pool only, its end, and may take
            ``environment.session_timeout_s``.
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
        agent: ForkedCode | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._has_agents = agent is not None
        self.counts = {"started": 0, "timed_out": 0, "crashed": 0}
        self._config = config
        code = agent or ForkedCode("async_rl.environments.fork_server", config.name, config.extra)
        self._start_server = partial(_fork_server, code, allowed, digest, clock)
        self._clock = clock
        self._check_at_s = -math.inf
        self._processes: dict[str, _Process] = {}
        self._cancelling: list[_Process] = []
        self._idle: list[_Process] = []
        self._failed_at_start: list[Event] = []
        self._unforked: deque[_Process] = deque()
        self._forking: deque[_Process] = deque()
        self._had_trouble = False
        self._num_killed = 0
        self._selector = selectors.DefaultSelector()
        self._server = self._start_server()
        try:
            self._server.wait()
        except BaseException as error:
            self._server.close()
            self._selector.close()
            if isinstance(error, StartError):
                raise _refused(error) from None
            raise

    @property
    def pids(self) -> list[int]:
        """The ids of the processes that play a rollout now."""
        return [process.pid for process in self._processes.values() if process.pid]

    @property
    def trouble(self) -> str:
        """What the rollouts wait for that have no process yet; empty if that is nothing unusual."""
        waiting = len(self._unforked) + len(self._forking)
        if not waiting or self._server.silent_s < _LONG_S:
            return ""
        return (
            f"{waiting} rollouts wait for a process: the environment's fork server (process {self._server.pid}) has "
            f"not answered for {self._server.silent_s:.0f} s; it may be stopped, or the environment's import is slow"
        )

    def is_working(self, key: str) -> bool:
        """Return whether the rollout ``key`` waits for its process, which has a time limit, or for its fork."""
        process = self._processes.get(key)
        return process is not None and (process.deadline_s is not None or not process.pid)

    def awaits_fork(self, key: str) -> bool:
        """Return whether the process of the rollout ``key`` is not forked yet, so that its time has not begun."""
        process = self._processes.get(key)
        return process is not None and not process.pid

    def start(self, key: str, start: Mapping[str, Any]) -> None:
        """Begin the rollout ``key``. ``start`` has the fields of the message ``start``, which ``child`` lists.

        If no process is idle, the fork server is asked for one, which is not waited for.
        """
        try:
            frame = pack({"type": "start", **start})
            process = self._idle.pop() if self._idle else self._new_process()
        except (OSError, FrameError) as error:
            self._failed_at_start.append(Event(key, {"type": "failed", "error": str(error)}))
            return
        process.key, process.cancelling = key, False
        self._processes[key] = process
        process.sent = b"" if process.pid else frame
        self._ask(process, frame)
        self._ask_for_forks()

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
        """Exchange messages with all processes without waiting. Return the events of rollouts since the last call.

        Raises:
            ConfigError: the fork server died, and another one can't import or prepare the environment.
        """
        events, self._failed_at_start = self._failed_at_start, []
        events += self._take_forked()
        self._ask_for_forks()
        trouble = self.trouble
        if trouble and not self._had_trouble:
            logger.warning("%s; other rollouts go on", trouble)
        self._had_trouble = bool(trouble)
        for selected, mask in self._selector.select(0):
            process: _Process = selected.data
            if mask & selectors.EVENT_WRITE:
                self._send(process)
            # What arrives before the fork server's answer is read once its process is known.
            if mask & selectors.EVENT_READ and process.pid:
                events += self._receive(process)
        if (now_s := self._clock()) < self._check_at_s:
            return events
        self._check_at_s = now_s + _CHECK_S
        for process in [*self._processes.values(), *self._cancelling]:
            if process.pid and process.deadline_s is not None and now_s > process.deadline_s:
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
            process.channel.socket.close()
        for process in self._unforked:
            process.theirs.close()
        for kept in (self._processes, self._cancelling, self._idle, self._unforked, self._forking):
            kept.clear()
        self._selector.close()
        self._server.close()

    def _limit(self, process: _Process) -> tuple[str, str]:
        """Return what of the environment runs now, and the key of ``[environment]`` that limits it."""
        if self._has_agents and not process.cancelling:
            return "agent", "session_timeout_s"
        is_first = process.is_new and not process.cancelling
        return ("first reset", "first_reset_timeout_s") if is_first else ("reset or step", "timeout_s")

    def _ask(self, process: _Process, frame: bytes) -> None:
        process.deadline_s = self._clock() + getattr(self._config, self._limit(process)[1])
        self._send(process, frame)

    def _send(self, process: _Process, frame: bytes = b"") -> None:
        channel = process.channel
        channel.send(frame)
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.outgoing else 0)
        if self._selector.get_key(channel.socket).events != mask:
            self._selector.modify(channel.socket, mask, process)

    def _receive(self, process: _Process) -> list[Event]:
        is_alive = process.channel.receive()
        events: list[Event] = []
        try:
            while (message := unpack(process.channel.incoming)) is not None:
                events += self._handle(process, message)
        except FrameError as error:
            return events + self._fail(
                process,
                "crashed",
                f"the environment's process sent a message that can't be read: {error}; let the environment write only "
                f"to descriptors that it opened",
            )
        if not is_alive:
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
                self._rest(process, message)
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
            self._rest(process, message)
        return [event]

    def _rest(self, process: _Process, message: Mapping[str, Any]) -> None:
        """Keep a process whose rollout has ended for another one. An agent's ends."""
        if self._has_agents:
            self._end(process, with_family=not message.get("is_alone"))
            return
        process.key, process.deadline_s, process.cancelling = None, None, False
        self._idle.append(process)

    def _fail(self, process: _Process, count: str, error: str, *, is_transient: bool = False) -> list[Event]:
        """Kill a process. Return the event ``failed`` of the rollout that it played, or an empty list if it was idle.

        ``count`` is the key in ``counts`` to add the rollout to, and ``error`` the message for the log. Other rollouts
        than those that ``timed_out`` may be ``is_transient``, too.
        """
        if process.channel.socket.fileno() < 0:
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
        is_transient |= count == "timed_out"
        return [Event(process.key, {"type": "failed", "error": error, "is_transient": is_transient})]

    def _end(self, process: _Process, *, with_family: bool = True) -> None:
        self._disconnect(process)
        if process.pid:
            self._server.kill(process.pid, with_family=with_family)
        elif process in self._unforked:
            self._unforked.remove(process)
            process.theirs.close()

    def _new_process(self) -> _Process:
        """Return a process that is still to be forked. What is sent to it waits in its socket."""
        process = _Process(*_sockets())
        self._selector.register(process.channel.socket, selectors.EVENT_READ, process)
        self._unforked.append(process)
        return process

    def _ask_for_forks(self) -> None:
        """Ask the fork server for the processes that it has not been asked for, as far as it takes requests now."""
        try:
            while self._unforked and self._server.fork(self._unforked[0].theirs):
                process = self._unforked.popleft()
                process.theirs.close()
                self._forking.append(process)
        except ServerLostError:
            self._replace_server()

    def _take_forked(self) -> list[Event]:
        """Take the fork server's answers. Return events of rollouts for which there is no process.

        Raises:
            ConfigError: the fork server was replaced, and the new one can't import or prepare the environment, or it
                was killed while it did, as the ones before.
        """
        events: list[Event] = []
        try:
            answers = self._server.receive()
        except ServerLostError:
            self._replace_server()
            return events
        except StartError as error:
            # The code was imported before, so it may be again if only a signal has ended the import.
            if (error.exit_code or 0) >= 0 or self._num_killed == _MAX_KILLED:
                raise _refused(error) from None
            self._num_killed += 1
            self._replace_server()
            return events
        if self._server.is_ready:
            self._num_killed = 0
        for pid in (number for kind, number in answers if kind == FORK):
            process = self._forking.popleft()
            process.pid = pid
            if not pid:
                events += self._fail(process, "crashed", _REFUSED)
                continue
            self.counts["started"] += 1
            if process.channel.socket.fileno() < 0:  # its rollout has ended meanwhile
                self._server.kill(pid, with_family=True)
            elif process.deadline_s is not None:
                process.deadline_s = self._clock() + getattr(self._config, self._limit(process)[1])
        return events

    def _replace_server(self) -> None:
        """Start another fork server, because this one has ended or is silent. Its processes end with it.

        The processes that it has not forked are asked for again, with their first messages. Agents for which it was
        asked already fail.
        """
        self._server.close()
        lost = [process for process in self._forking if process.channel.socket.fileno() >= 0]
        self._forking.clear()
        # An agent may have been forked and have called. It must not play again with the session of these calls.
        max_tries = 1 if self._has_agents else _MAX_TRIES
        again = [process for process in lost if process.num_tries < max_tries and process.key is not None]
        for process in lost:
            if process not in again:
                error = _LOST_WITH_AGENT if self._has_agents else _NO_SERVER
                self._failed_at_start += self._fail(process, "crashed", error, is_transient=self._has_agents)
        for process in again:
            self._disconnect(process)
            process.num_tries += 1
            process.channel, process.theirs = _sockets()
            self._selector.register(process.channel.socket, selectors.EVENT_READ, process)
            self._send(process, process.sent)
        self._unforked.extendleft(reversed(again))
        self._server = self._start_server()

    def _disconnect(self, process: _Process) -> None:
        self._selector.unregister(process.channel.socket)
        process.channel.socket.close()


def _fork_server(
    code: ForkedCode, allowed: Collection[str], digest: str | None, clock: Callable[[], float]
) -> ForkServer:
    """Start a fork server, which imports the environment's code.

    Raises:
        ConfigError: ``environment.extra`` is no JSON.
    """
    try:
        settings = pack({"type": "prepare", "allowed": [*allowed], "digest": digest, "extra": code.settings})
    except FrameError as error:
        raise ConfigError(f"environment.extra: {error}") from None
    return ForkServer(code.server, code.code, content=code.code, settings=settings, clock=clock)


def _refused(error: StartError) -> ConfigError:
    return ConfigError(f"environment.name: {error}")


_REFUSED = (
    "the machine refuses another process for the environment; lower generator.max_concurrent_groups, or free memory "
    "and raise the limit on processes (ulimit -u)"
)


_NO_SERVER = (
    "the fork server of the environment ended whenever it was asked for a process; see its output above, and check "
    "that the machine has memory left"
)
_LOST_WITH_AGENT = (
    "the fork server of the environment ended, or was silent for too long, while it forked this agent's process; see "
    "its output above, and check that the machine has memory left"
)
_MAX_KILLED = 2
"""How many fork servers in a row may be killed while they import the environment, which an earlier one did import."""
_MAX_TRIES = 2
"""How often a process is asked for, if the fork server ends each time."""


def _sockets() -> tuple[Channel, socket.socket]:
    """Return the pool's and the process's end of a connection. Only the pool's does not block."""
    ours, theirs = socket.socketpair()
    return Channel(ours), theirs
