"""Sends rows of metrics to Weights & Biases. No trouble there stops or delays a run that has begun.

wandb runs in a process of its own (``wandb_child``). Rows go to it through a queue and a thread, so that ``write``
never waits. If the server can't be reached at the start, the rows go to files that ``wandb sync`` sends later. If it
fails later, wandb itself keeps the rows in such files. ``metrics.jsonl`` has all rows in any case.
"""

from __future__ import annotations

import json
import netrc
import os
import queue
import select
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from async_rl.config.config import Config
from async_rl.errors import ConfigError
from async_rl.process.child import module_command, package_environment
from async_rl.run.directory import RunDir, write_atomically
from async_rl.run.wandb_child import END, UNSENT


@dataclass(frozen=True, slots=True)
class Limits:
    """How long to wait for wandb, in seconds. Tests use shorter limits.

    Attributes:
        load_s: for the import of wandb, on a busy machine too.
        server_s: for the server's answer at the start.
        finish_s: for the server to take the last rows at the end.
        margin_s: for wandb to notice that one of the other two limits has passed.
    """

    load_s: float = 120.0
    server_s: float = 20.0
    finish_s: float = 10.0
    margin_s: float = 10.0


_MAX_WAITING_ROWS = 4096
_ONLY_FILE = "metrics.jsonl has all rows"


class WandbLog:
    """A run in Weights & Biases. ``write`` may be called by one thread. ``directory`` has wandb's own files."""

    def __init__(self, child: _Child, directory: str, *, note: Callable[[str], None], limits: Limits) -> None:
        self.directory = directory
        self._child, self._note, self._limits = child, note, limits
        self._rows: queue.Queue[Any] = queue.Queue(_MAX_WAITING_ROWS)
        self._num_left_out = 0
        self._has_ended = False
        self._thread = threading.Thread(target=self._send_all, name="wandb", daemon=True)
        self._thread.start()

    def write(self, row: Mapping[str, Any]) -> None:
        """Send one row, without waiting. A row for which there is no room is left out, and counted."""
        if self._has_ended:
            self._num_left_out += 1
            return
        try:
            self._rows.put_nowait(dict(row))
        except queue.Full:
            if not self._num_left_out:
                self._note(f"wandb takes no rows now, so some are left out there; {_ONLY_FILE}")
            self._num_left_out += 1

    def close(self) -> None:
        """Finish the run in wandb. Give up after ``finish_s`` seconds, and say how to send what is left."""
        limit_s = self._limits.finish_s + self._limits.margin_s
        deadline = time.monotonic() + limit_s
        with suppress(queue.Full):
            self._rows.put(END, timeout=limit_s)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        code = self._child.wait(max(0.0, deadline - time.monotonic()))
        if code is None:
            self._child.kill()  # the thread's write fails then
        if code in (None, UNSENT):
            self._note(
                f"wandb did not send everything within {self._limits.finish_s:g} s at the end of the run; to send "
                f"what is left: wandb sync {self.directory}"
            )
        elif code and not self._has_ended:
            self._note(f"wandb's process failed at the end of the run ({self._child.log} says why); {_ONLY_FILE}")
        self._thread.join()
        self._child.close()
        if self._num_left_out:
            self._note(f"{self._num_left_out} rows are missing in wandb; {_ONLY_FILE}")

    def _send_all(self) -> None:
        while (row := self._rows.get()) != END:
            if not self._child.send(row):
                if self._child.wait(0.0) is not None:  # else ``close`` has given up, and says so
                    self._has_ended = True
                    self._note(f"wandb's process has ended ({self._child.log} says why); {_ONLY_FILE}")
                return
        self._child.send(END)


def start_wandb(
    directory: Path, config: Config, *, name: str, note: Callable[[str], None], limits: Limits | None = None
) -> WandbLog | None:
    """Start to log to Weights & Biases what ``directory`` records. Return None if ``log.wandb`` is off.

    The wandb run's id is kept in the file ``wandb_id``, so that a resumed run goes on in the same wandb run. What goes
    to files in place of the server gets an id of its own, because wandb could not add it to that run later.

    Args:
        directory: the run directory, or that of an offline command. A run has begun if it has rows of metrics.
        name: the name of the run in wandb.
        note: tells the user a line of text. Any thread calls it.

    Raises:
        ConfigError: there is no API key, or a run that has not begun is refused by wandb or its server.
    """
    check_wandb(config)
    mode, limits = config.log.wandb, limits or Limits()
    if mode == "off":
        return None
    metrics, id_file = RunDir(directory).metrics, directory / "wandb_id"
    has_begun = metrics.exists() and metrics.stat().st_size > 0
    if not id_file.exists():
        write_atomically(id_file, uuid.uuid4().hex[:12])
    run_id = id_file.read_text(encoding="utf-8")
    settings: dict[str, Any] = {
        "project": config.log.project, "name": name, "id": run_id, "resume": "allow", "dir": str(directory),
        "mode": mode, "config": config.model_dump(mode="json"),
    }  # fmt: skip
    child = _Child(directory, settings, limits)
    found = child.started(limits)
    if found["state"] == "failed" and mode == "online" and (has_begun or found["is_timeout"]):
        cause = found["error"]
        settings |= {"mode": "offline", "id": f"{run_id}-{uuid.uuid4().hex[:6]}", "name": f"{name} (offline)"}
        child = _Child(directory, settings, limits)
        found = child.started(limits)
        if found["state"] == "started":
            note(
                f"wandb did not start within {limits.server_s:g} s ({cause}); the run goes on, and what it logs goes "
                f"to files; when the server answers again: wandb sync {found['directory']}"
            )
    if found["state"] == "started":
        return WandbLog(child, found["directory"], note=note, limits=limits)
    if not has_begun and not found["is_timeout"]:
        raise ConfigError(
            f'log.wandb = "{mode}": wandb did not start: {found["error"]}; correct the cause, or set log.wandb = "off"'
        )
    note(f"wandb did not start: {found['error']}; the run goes on without it, and {_ONLY_FILE}")
    return None


def check_wandb(config: Config) -> None:
    """Check that there is an API key for Weights & Biases if ``log.wandb`` is ``"online"``.

    Without an API key, wandb would wait for the user to type one.

    Raises:
        ConfigError: ``WANDB_API_KEY`` is not set, and the netrc file has no key for the server.
    """
    if config.log.wandb != "online" or os.environ.get("WANDB_API_KEY"):
        return
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        found = path.exists() and netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError) as error:
        raise ConfigError(
            f'log.wandb = "online" needs an API key, but {path} can\'t be read: {error}; set WANDB_API_KEY, or correct '
            f"that file"
        ) from error
    if not found:
        raise ConfigError(
            f'log.wandb = "online", but there is no API key for {host}: set WANDB_API_KEY, run `wandb login`, or set '
            f'log.wandb = "offline" (synced later with `wandb sync`)'
        )


class _Child:
    """The process of ``wandb_child``. ``log`` is the file with what it prints."""

    def __init__(self, directory: Path, settings: Mapping[str, Any], limits: Limits) -> None:
        """Start the process, and send it the ``settings`` of the wandb run."""
        self.log = RunDir(directory).logs / "wandb.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = module_command("async_rl.run.wandb_child", str(os.getpid()), flags=("-P",))
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
        self.send({**settings, "limit_s": limits.server_s, "finish_s": limits.finish_s, "stats_pid": os.getpid()})

    def started(self, limits: Limits) -> dict[str, Any]:
        """Wait for the start. Return the process's answer, ``started`` or ``failed``; one that failed is ended."""
        limit_s = limits.load_s
        while (reply := self._reply(limit_s)) is not None and reply["state"] == "loaded":
            limit_s = limits.server_s + limits.margin_s
        if reply is not None and reply["state"] == "started":
            return reply
        has_ended = self.wait(0.0) is not None
        self.kill()
        self.close()
        why = f"its process ended; {self.log} says why" if has_ended else f"no answer within {limit_s:g} s"
        return reply or {"state": "failed", "error": why, "is_timeout": not has_ended}

    def send(self, message: Any) -> bool:
        """Send one message; wait while the process takes none. Return False if the process has ended."""
        try:
            self._input.write(json.dumps(message).encode() + b"\n")
            self._input.flush()
        except OSError:
            return False
        return True

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

    def _reply(self, limit_s: float) -> dict[str, Any] | None:
        """Return the process's next line; None if there is none within ``limit_s`` seconds, or it has ended."""
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._received:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0 or not self._poller.poll(remaining_s * 1000):
                return None
            chunk = os.read(self._replies.fileno(), 1 << 16)
            if not chunk:
                self.wait(limit_s)
                return None
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)
