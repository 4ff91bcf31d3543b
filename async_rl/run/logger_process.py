"""One logger of a run, seen from the run: a process, a queue and a thread, so that ``write`` never waits.

If the server of wandb can't be reached at the start, the rows go to files that ``wandb sync`` sends later; if it fails
later, wandb itself keeps the rows in such files. Of other tools the rows that they did not take are named at the end.
``metrics.jsonl`` has all rows in any case.
"""

from __future__ import annotations

import json
import os
import queue
import select
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.process.child import module_command, package_environment
from async_rl.run.directory import RunDir
from async_rl.run.logger_child import END, STATES, UNSENT
from async_rl.run.logger_tools import Settings


@dataclass(frozen=True, slots=True)
class Limits:
    """How long to wait for a tool, in seconds. Tests use shorter limits.

    Attributes:
        load_s: for the import of its package, on a busy machine too.
        server_s: for its server's answer at the start.
        finish_s: for its server to take the last rows at the end.
        margin_s: for the tool to notice that one of the other two limits has passed.
    """

    load_s: float = 120.0
    server_s: float = 20.0
    finish_s: float = 10.0
    margin_s: float = 10.0


_MAX_WAITING_ROWS = 4096
_MAX_TABLE_ROWS = 32
_MAX_CELL_CHARACTERS = 2000
ONLY_FILE = "metrics.jsonl has all rows"
_COLUMNS = ("step", "row", "prompt", "response", "reward", "accuracy", "num_tokens", "finish_reason")


class LoggerProcess:
    """A run in one tool. One thread may call its methods. ``place`` says where the tool has the run."""

    def __init__(self, child: Child, place: str, *, note: Callable[[str], None], limits: Limits) -> None:
        self.place, self.name = place, child.name
        self._child, self._note, self._limits = child, note, limits
        self._messages: queue.Queue[tuple[str, Any]] = queue.Queue(_MAX_WAITING_ROWS)
        self._unanswered: deque[tuple[str, Any]] = deque()
        self._missing: list[int] = []
        self._has_refused = self._has_ended = False
        self._thread = threading.Thread(target=self._send_all, name=self.name, daemon=True)
        self._thread.start()

    def send(self, kind: str, content: Any) -> None:
        """Send a message of ``logger_child``, without waiting. What finds no room is left out, and counted."""
        message = (kind, content)
        if self._has_ended:
            self._miss(message)
            return
        try:
            self._messages.put_nowait(message)
        except queue.Full:
            if not self._missing:
                self._note(f"{self.name} takes no rows now, so some are left out there; {ONLY_FILE}")
            self._miss(message)

    def close(self, began: float) -> None:
        """Finish the run in the tool. Give up after ``finish_s`` seconds, and name the rows that are missing.

        ``began`` is the time at which all loggers of the run were asked to end, by ``time.monotonic``.
        """
        deadline = began + self._limits.finish_s + self._limits.margin_s
        with suppress(queue.Full):
            self._messages.put(END, timeout=max(0.01, deadline - time.monotonic()))
        self._thread.join(max(0.0, deadline - time.monotonic()))
        code = self._child.wait(max(0.0, deadline - time.monotonic()))
        if code is None:
            self._child.kill()  # the thread's write fails then
        if code in (None, UNSENT):
            sync = f"; to send what is left: wandb sync {self.place}" if self.name == "wandb" else f"; {ONLY_FILE}"
            self._note(
                f"{self.name} did not send everything within {self._limits.finish_s:g} s at the end of the run{sync}"
            )
        elif code and not self._has_ended:
            self._note(f"{self.name}'s process failed at the end of the run ({self._child.log} says why); {ONLY_FILE}")
        self._thread.join()
        self._take_answers()
        self._child.close()
        for message in (*self._unanswered, *self._messages.queue):
            self._miss(message)
        if self._missing:
            steps = _ranges(self._missing)
            self._note(f"{len(self._missing)} rows are missing in {self.name} (steps {steps}); {ONLY_FILE}")

    def _send_all(self) -> None:
        while (message := self._messages.get()) != END:
            self._unanswered.append(message)
            if not self._child.send(message):
                if self._child.wait(0.0) is not None:  # else ``close`` has given up, and says so
                    self._has_ended = True
                    self._note(f"{self.name}'s process has ended ({self._child.log} says why); {ONLY_FILE}")
                return
            self._take_answers()
        self._child.send(END)

    def _take_answers(self) -> None:
        """Take what the process has answered to messages, without waiting."""
        while (answer := self._child.answer(0.0)) is not None:
            if not isinstance(answer, bool):
                if not self._has_refused:
                    self._note(f"{self.name} did not take a row: {answer['error']}; the run goes on, and {ONLY_FILE}")
                self._has_refused = True
                continue
            if not self._unanswered:
                self._child.kill()
                self._note(f"{self.name}'s process answers what it was not asked, and is ended; {ONLY_FILE}")
                return
            message = self._unanswered.popleft()
            if not answer:
                self._miss(message)

    def _miss(self, message: tuple[str, Any]) -> None:
        if message[0] == "row":
            self._missing.append(int(message[1]["step"]))


def samples_message(step: int, lines: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the content of a message ``table``: the step, its columns, and at most 32 rows of rollouts.

    ``lines`` are those of ``rollouts/step-NNNNNN.jsonl``. Texts are cut after 2,000 characters.
    """
    rows: list[list[Any]] = []
    for line in lines[:_MAX_TABLE_ROWS]:
        prompt = "\n".join(f"{one.get('role')}: {one.get('content')}" for one in line["messages"])
        cells = {"step": step, **line, "prompt": prompt}
        rows.append([_cut(cells.get(column)) for column in _COLUMNS])
    return [step, _COLUMNS, rows]


def _cut(cell: Any) -> Any:
    is_long = isinstance(cell, str) and len(cell) > _MAX_CELL_CHARACTERS
    return f"{cell[:_MAX_CELL_CHARACTERS]}... ({len(cell)} characters)" if is_long else cell


def _ranges(steps: Sequence[int]) -> str:
    """Return the steps as text, such as ``4 to 6, 9``; at most eight parts."""
    parts: list[list[int]] = []
    for step in sorted(set(steps)):
        if parts and step == parts[-1][1] + 1:
            parts[-1][1] = step
        else:
            parts.append([step, step])
    texts = [f"{first}" if first == last else f"{first} to {last}" for first, last in parts[:8]]
    return ", ".join([*texts, *(["..."] if len(parts) > 8 else [])])


class Child:
    """The process of ``logger_child`` for the tool ``name``. ``log`` is the file with what it prints."""

    def __init__(self, name: str, settings: Settings) -> None:
        """Start the process, and send it the ``settings`` of the run."""
        self.name, self.log = name, RunDir(Path(settings["directory"])).logs / f"{name}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = module_command("async_rl.run.logger_child", str(os.getpid()), flags=("-P",))
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=package_environment()
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._replies = self._process.stdin, self._process.stdout
        self._received = b""
        self._poller = select.poll()
        self._poller.register(self._replies, select.POLLIN)
        self.send((name, settings))

    def started(self, limits: Limits) -> dict[str, Any]:
        """Wait for the start. Return the process's answer, ``started`` or ``failed``; one that failed is ended."""
        limit_s = limits.load_s
        while (reply := self.answer(limit_s)) is not None and reply["state"] == "loaded":
            limit_s = limits.server_s + limits.margin_s
        if reply is not None and reply["state"] == "started":
            return reply
        has_ended = self.wait(0.0) is not None
        self.end()
        why = f"its process ended; {self.log} says why" if has_ended else f"no answer within {limit_s:g} s"
        return reply or {"state": "failed", "error": why, "is_away": not has_ended}

    def send(self, message: Any) -> bool:
        """Send one message; wait while the process takes none. Return False if the process has ended."""
        try:
            self._input.write(json.dumps(message).encode() + b"\n")
            self._input.flush()
        except OSError:
            return False
        return True

    def end(self) -> None:
        """End the process, and what it started."""
        self.kill()
        self.close()

    def close(self) -> None:
        """Close the pipes of a process that has ended."""
        for pipe in (self._input, self._replies):
            with suppress(OSError):  # what was not written
                pipe.close()

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the process's end. Return its exit code; None if it has not ended by then."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        self._process.kill()  # wandb's own service ends with it
        self._process.wait()

    def answer(self, limit_s: float) -> Any:
        """Return the process's next answer; None if there is none within ``limit_s`` seconds, or it has ended.

        A process whose tool writes other text into the pipe is ended, and the answer is ``failed``.
        """
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._received:
            remaining_s = max(0.0, deadline - time.monotonic())
            if not self._poller.poll(remaining_s * 1000):
                return None
            chunk = os.read(self._replies.fileno(), 1 << 16)
            if not chunk:
                self.wait(limit_s)
                return None
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if isinstance(answer, bool) or (isinstance(answer, dict) and answer.get("state") in STATES):
            return answer
        self.kill()  # which of its rows it has taken is not known any more
        error = f"it wrote {line[:40]!r} into the pipe of its answers, and is ended"
        return {"state": "failed", "error": error, "is_away": True}
