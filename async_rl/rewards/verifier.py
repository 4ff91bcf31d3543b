"""Compares answers with math_verify, in a child process that is killed and replaced when it exceeds the time limit.

Called by ``equality``. The child starts at the first question, and ends with this process whatever ends it.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import threading
import time
import weakref
from functools import partial
from typing import Any, Literal

from async_rl.errors import RewardError
from async_rl.net.streams import pack_frame, read_frame
from async_rl.process.child import module_command, package_environment
from async_rl.rewards.equality_child import MAX_FRAME_BYTES

Verdict = Literal["equal", "different", "timed_out", "crashed"]

START_LIMIT_S = 120.0
"""For importing sympy on a loaded machine; not part of any answer's time limit."""


class _DeadlineError(Exception):
    """No whole answer came in time."""


class MathVerifier:
    """One lazily started child; questions are asked one at a time, from any thread.

    ``counts`` has ``requests``, ``timed_out`` and ``crashed`` (questions without an answer), and ``started``
    (children).
    """

    def __init__(self) -> None:
        self.counts = {"requests": 0, "timed_out": 0, "crashed": 0, "started": 0}
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize | None = None

    @property
    def child_pid(self) -> int | None:
        """Process id of the running child; None if there is none."""
        return None if self._child is None else self._child.pid

    def ask(self, gold: str, prediction: str, time_limit_s: float) -> Verdict:
        """Whether math_verify calls them equal. Both short (``equality.MAX_ANSWER_CHARS``).

        Raises:
            RewardError: the child does not start.
        """
        request = {"gold": gold, "prediction": prediction, "time_limit_s": time_limit_s}
        with self._lock:
            self.counts["requests"] += 1
            # A child may be killed for another's sake (out of memory): only a second crash is laid on this question.
            for _ in range(2):
                child = self._running_child()
                try:
                    _send(child, request)
                    answer = _receive(child, time.monotonic() + time_limit_s)
                except _DeadlineError:
                    self._end_child()
                    self.counts["timed_out"] += 1
                    return "timed_out"
                except ConnectionError:  # it crashed or was killed
                    self._end_child()
                    continue
                return "equal" if answer["equal"] else "different"
            self.counts["crashed"] += 1
            return "crashed"

    def close(self) -> None:
        """Kill the child, if any."""
        with self._lock:
            self._end_child()

    def _running_child(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            self._child = _start_child()
            self._finalizer = weakref.finalize(self, _kill, self._child)
            self.counts["started"] += 1
            try:
                _receive(self._child, time.monotonic() + START_LIMIT_S)
            except (ConnectionError, _DeadlineError) as error:
                self._end_child()
                raise RewardError(
                    "the process that compares answers did not start; run 'python -m async_rl.rewards.equality_child "
                    f"{os.getpid()}' to see why (is math-verify installed?)"
                ) from error
        return self._child

    def _end_child(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._child = self._finalizer = None


def _start_child() -> subprocess.Popen[bytes]:
    # -P and the package's own root: the child must find this async_rl, and no module of the working directory.
    return subprocess.Popen(
        module_command("async_rl.rewards.equality_child", str(os.getpid()), flags=("-P",)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=package_environment(),
        bufsize=0,
    )


def _kill(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()


def _send(child: subprocess.Popen[bytes], request: dict[str, Any]) -> None:
    assert child.stdin is not None
    # Never blocks: two capped answers fit a pipe's 64 KiB, and the child has read everything before.
    child.stdin.write(pack_frame(json.dumps(request).encode()))


def _receive(child: subprocess.Popen[bytes], deadline: float) -> dict[str, Any]:
    body = read_frame(partial(_read_some, child, deadline), max_bytes=MAX_FRAME_BYTES)
    if body is None:
        raise ConnectionError("the child ended")
    return json.loads(body)


def _read_some(child: subprocess.Popen[bytes], deadline: float, size: int) -> bytes:
    assert child.stdout is not None
    poller = select.poll()
    poller.register(child.stdout, select.POLLIN)
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0 or not poller.poll(remaining_s * 1000):
        raise _DeadlineError
    return os.read(child.stdout.fileno(), size)
