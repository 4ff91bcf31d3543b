"""Compares answers as mathematics, in worker processes. A worker that exceeds the time limit is killed and replaced.

``equality`` calls this module. The processes start with the first comparison. They end when this process ends, even if
this process is killed.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import threading
import time
import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from async_rl.errors import RewardError
from async_rl.net.streams import pack_frame, read_exactly, read_frame
from async_rl.process.child import module_command, package_environment
from async_rl.rewards.math.child import FORK, MAX_FRAME_BYTES, RECORD, WAIT

Verdict = Literal["equal", "different", "not_computed", "timed_out", "crashed"]

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
START_LIMIT_S = 120.0
"""Time limit in seconds for importing sympy on a busy machine. It is not part of the limit of a comparison."""
_WALL_FACTOR = 50.0
"""The wall-clock limit of a comparison, as a multiple of its processor time limit. A worker that exceeds the wall-clock
limit hangs."""


class _DeadlineError(Exception):
    """The worker sent no complete answer within the time limit."""


@dataclass(frozen=True, slots=True)
class _Worker:
    pid: int
    connection: socket.socket


class _Server:
    """The server process, which has imported sympy and forks workers (see ``child``).

    Raises:
        RewardError: the process does not start.
    """

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        descriptor, parent_pid = str(theirs.fileno()), str(os.getpid())
        # -P and the package's own root: the child must find this async_rl, and no module of the working directory.
        self._process = subprocess.Popen(
            module_command("async_rl.rewards.math.child", descriptor, parent_pid, flags=("-P",)),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=package_environment(), pass_fds=(theirs.fileno(),),
        )  # fmt: skip
        theirs.close()
        self.close = weakref.finalize(self, _end, self._process, self._control)
        try:
            self._reply(time.monotonic() + START_LIMIT_S)
        except (ConnectionError, _DeadlineError) as error:
            self.close()
            raise RewardError(
                "the process that compares answers did not start; run 'python -c \"import sympy\"' to see "
                "whether sympy is installed, and look for the process's own error above"
            ) from error

    def fork(self) -> _Worker:
        """Let the server process fork a worker, and return the worker.

        Raises:
            ConnectionError: the server process has ended, or the machine refuses another process.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [RECORD.pack(FORK, 0)], [theirs.fileno()])
        pid = self._reply(time.monotonic() + START_LIMIT_S)
        if not pid:
            ours.close()
            raise ConnectionError("the machine refuses another process for comparing answers; see ulimit -u")
        return _Worker(pid, ours)

    def end(self, worker: _Worker) -> int:
        """Kill ``worker`` if it still runs. Return the number of the signal that ended the worker, or 0."""
        worker.connection.close()
        # The server reaps workers only on request, so no other process can have this id.
        os.kill(worker.pid, signal.SIGKILL)
        self._control.sendall(RECORD.pack(WAIT, worker.pid))
        return self._reply(time.monotonic() + START_LIMIT_S)

    def _reply(self, deadline: float) -> int:
        return RECORD.unpack(read_exactly(partial(_read_some, self._control, deadline), RECORD.size))[1]


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
        self._server: _Server | None = None
        self._idle: list[_Worker] = []
        self._is_closed = False

    @property
    def idle_pids(self) -> tuple[int, ...]:
        """The process ids of the workers that wait for a comparison."""
        return tuple(worker.pid for worker in self._idle)

    def ask(self, gold: str, prediction: str, time_limit_s: float) -> Verdict:
        """Compare two answers by ``comparison`` and return the verdict.

        Args:
            gold: the row's answer. It must be short (see ``equality.MAX_ANSWER_CHARS``).
            prediction: the model's answer. It must be short too.
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
        try:
            worker.connection.sendall(pack_frame(json.dumps(request).encode()))
            body = read_frame(partial(_read_some, worker.connection, deadline), max_bytes=MAX_FRAME_BYTES)
        except _DeadlineError:
            return self._end_worker(server, worker, stuck=True)
        except ConnectionError:
            body = None
        if body is None:
            return self._end_worker(server, worker)
        with self._lock:
            if server is self._server:
                self._idle.append(worker)
        return json.loads(body)["finding"]

    def _take_worker(self) -> tuple[_Server, _Worker]:
        """Return the server and an idle or a new worker. Start or replace the server if necessary.

        The caller must hold the lock.

        Raises:
            RewardError: the server does not start, or ended twice.
        """
        assert not self._is_closed
        for _ in range(2):
            if self._server is None:
                self._server = _Server()
            if self._idle:
                return self._server, self._idle.pop()
            try:
                worker = self._server.fork()
            except ConnectionError:
                self._drop_server()
            else:
                self.counts["started"] += 1
                return self._server, worker
        raise RewardError(
            "the process that compares answers ended twice, so answers can't be scored; check that this machine has "
            "memory and processes left"
        )

    def _end_worker(self, server: _Server, worker: _Worker, *, stuck: bool = False) -> Verdict:
        """Kill a worker that did not answer, and return the verdict on its comparison.

        The verdict is ``timed_out`` if the worker is ``stuck`` or reached its processor time limit, else ``crashed``.
        """
        with self._lock:
            if server is not self._server:  # the server was replaced or closed, together with its workers
                return "crashed"
            try:
                by_limit = server.end(worker) == signal.SIGPROF
            except (ConnectionError, ProcessLookupError):  # the worker's server has ended as well
                self._drop_server()
                by_limit = False
        return "timed_out" if stuck or by_limit else "crashed"

    def _drop_server(self) -> None:
        if self._server is not None:
            self._server.close()
        for worker in self._idle:
            worker.connection.close()
        self._server, self._idle = None, []


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    # The server may still be importing. Its workers end with it.
    process.kill()
    process.wait()


def _read_some(connection: socket.socket, deadline: float, size: int) -> bytes:
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0 or not poller.poll(remaining_s * 1000):
        raise _DeadlineError
    return connection.recv(size)
