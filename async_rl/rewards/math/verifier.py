"""Compares answers as mathematics, in worker processes. A worker that exceeds the time limit is killed and replaced.

``answers`` calls this module for what ``latex_answers`` can't decide without its reader. The processes start with the
first comparison. They end when this process ends, even if this process is killed.
"""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any, Literal

from async_rl.errors import RewardError
from async_rl.net.streams import pack_frame, read_frame, until
from async_rl.process.fork_client import ForkServer, ServerLostError, StartError
from async_rl.rewards.math.child import MAX_FRAME_BYTES
from latex_answers import Finding

Verdict = Finding | Literal["timed_out", "crashed"]

MAX_WORKERS = 8
"""Maximum number of comparisons that run at the same time. It may exceed the number of cores, so that a comparison does
not have to wait for others that use their whole time limit."""
SLOW_WORKERS = 4
"""Maximum number of comparisons that run at the same time in addition, because they took longer than
``FIRST_LIMIT_S``."""
FIRST_LIMIT_S = 0.1
"""Processor seconds after which a comparison begins again in the slow queue, where no others wait for it. Nearly all
comparisons of real answers take less."""
MAX_CALLERS = 64
"""How many threads should call ``MathVerifier.ask``: so many that nearly all may wait in the slow queue."""
_WALL_FACTOR = 50.0
"""The wall-clock limit of a comparison, as a multiple of its processor time limit. A worker that exceeds the wall-clock
limit hangs."""


@dataclass(frozen=True, slots=True)
class _Worker:
    pid: int
    connection: socket.socket


class MathVerifier:
    """Compares answers in worker processes. Any thread may call it.

    At most ``MAX_WORKERS`` comparisons run at a time, for at most ``FIRST_LIMIT_S`` processor seconds. Those that take
    longer begin again in a queue of their own, of which ``SLOW_WORKERS`` run at a time. So hostile answers, which use
    up their whole limit, delay no others.

    The processes are started when they are needed. ``counts`` has the number of comparisons (``requests``), of those
    that sympy gave up (``not_computed``), that ``timed_out`` and that ``crashed``, and of workers that were
    ``started``.
    """

    def __init__(self) -> None:
        self.counts = {"requests": 0, "not_computed": 0, "timed_out": 0, "crashed": 0, "started": 0}
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(MAX_WORKERS)
        self._slow_slots = threading.BoundedSemaphore(SLOW_WORKERS)
        self._server: ForkServer | None = None
        self._idle: list[_Worker] = []
        self._is_closed = False

    @property
    def idle_pids(self) -> tuple[int, ...]:
        """The process ids of the workers that wait for a comparison."""
        return tuple(worker.pid for worker in self._idle)

    def ask(self, gold: str, prediction: str, time_limit_s: float) -> Verdict:
        """Compare two answers by the reader of ``latex_answers`` and return the verdict.

        Args:
            gold: the row's answer, as ``latex_answers.compare_by`` hands it over. It is short (``MAX_ANSWER_CHARS``).
            prediction: the model's answer, likewise.
            time_limit_s: processor seconds that the comparison may use.

        Raises:
            RewardError: the processes do not start.
        """
        first_limit_s = min(time_limit_s, FIRST_LIMIT_S)
        verdict = self._ask_in(self._slots, gold, prediction, first_limit_s)
        if verdict == "timed_out" and first_limit_s < time_limit_s:
            verdict = self._ask_in(self._slow_slots, gold, prediction, time_limit_s)
        with self._lock:
            self.counts["requests"] += 1
            if verdict in self.counts:
                self.counts[verdict] += 1
        return verdict

    def close(self) -> None:
        """End all processes. Running comparisons return ``crashed``. ``ask`` must not be called afterwards."""
        with self._lock:
            self._is_closed = True
            self._drop_server()

    def _ask_in(self, slots: threading.BoundedSemaphore, gold: str, prediction: str, time_limit_s: float) -> Verdict:
        """Wait for one of ``slots``, then compare."""
        request = {"gold": gold, "prediction": prediction, "time_limit_s": time_limit_s}
        with slots:
            verdict = self._ask_once(request)
            if verdict == "crashed" and not self._is_closed:
                # If memory runs out, a worker may be killed that did not cause it: only the second crash counts.
                verdict = self._ask_once(request)
        return verdict

    def _ask_once(self, request: dict[str, Any]) -> Verdict:
        with self._lock:
            if self._is_closed:  # while this call waited
                return "crashed"
            server, worker = self._take_worker()
        deadline = time.monotonic() + _WALL_FACTOR * request["time_limit_s"]
        worker.connection.settimeout(None)
        try:
            worker.connection.sendall(pack_frame(json.dumps(request).encode()))
            body = read_frame(until(worker.connection, deadline), max_bytes=MAX_FRAME_BYTES)
        except TimeoutError:
            return self._end_worker(server, worker, stuck=True)
        except ConnectionError:
            body = None
        if body is None:
            return self._end_worker(server, worker)
        with self._lock:
            if server is self._server:
                self._idle.append(worker)
        return json.loads(body)["finding"]

    def _take_worker(self) -> tuple[ForkServer, _Worker]:
        """Return the server and an idle or a new worker. Start or replace the server if necessary.

        The caller must hold the lock.

        Raises:
            RewardError: the server does not start, or ended twice.
        """
        assert not self._is_closed
        for _ in range(2):
            if self._server is None:
                self._server = _start_server()
            if self._idle:
                return self._server, self._idle.pop()
            try:
                worker = _fork_worker(self._server)
            except ServerLostError:
                self._drop_server()
            else:
                self.counts["started"] += 1
                return self._server, worker
        raise RewardError(
            "the process that compares answers ended twice, so answers can't be scored; check that this machine has "
            "memory and processes left"
        )

    def _end_worker(self, server: ForkServer, worker: _Worker, *, stuck: bool = False) -> Verdict:
        """Kill a worker that did not answer, and return the verdict on its comparison.

        The verdict is ``timed_out`` if the worker is ``stuck`` or reached its processor time limit, else ``crashed``.
        """
        with self._lock:
            if server is not self._server:  # the server was replaced or closed, together with its workers
                return "crashed"
            worker.connection.close()
            server.kill(worker.pid)
            try:
                ((_, signum),) = server.wait()
            except ServerLostError:  # with all its workers
                self._drop_server()
                signum = 0
        return "timed_out" if stuck or signum == signal.SIGPROF else "crashed"

    def _drop_server(self) -> None:
        if self._server is not None:
            self._server.close()
        for worker in self._idle:
            worker.connection.close()
        self._server, self._idle = None, []


def _start_server() -> ForkServer:
    """Start the process that has imported sympy and forks workers, and wait until it is ready.

    Raises:
        RewardError: the process does not start.
    """
    server = ForkServer("async_rl.rewards.math.child", content="sympy")
    try:
        server.wait()
    except StartError as error:
        server.close()
        raise RewardError(
            "the process that compares answers did not start; run 'python -c \"import sympy\"' to see "
            "whether sympy is installed, and look for the process's own error above"
        ) from error
    return server


def _fork_worker(server: ForkServer) -> _Worker:
    """Let the server fork a worker, and return the worker.

    Raises:
        ServerLostError: the server has ended, or the machine refuses another process.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        server.fork(theirs)
    ((_, pid),) = server.wait()
    if not pid:
        ours.close()
        raise ServerLostError("the machine refuses another process for comparing answers; see ulimit -u")
    return _Worker(pid, ours)
