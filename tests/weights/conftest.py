"""Receivers as real processes. Starting one takes seconds (torch), so tests share those that they leave alive."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import asdict

from async_rl.queue.messages import Announcement

PROGRAM = Path(__file__).with_name("receiver_program.py")


class ReceiverProcess:
    """A running ``receiver_program``."""

    def __init__(self, name: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROGRAM.parents[2])}
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment,
        )  # fmt: skip
        self.reports: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.reports.put(json.loads(line))

    def send(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def follow(self, announcement: Announcement) -> None:
        self.send(follow={name: value for name, value in asdict(announcement).items() if name != "probe"})

    def version(self, version: int, timeout_s: float = 60.0) -> dict[str, Any]:
        """Return what it reported about this version, after skipping earlier reports."""
        deadline = time.monotonic() + timeout_s
        while True:
            facts = self.reports.get(timeout=max(0.01, deadline - time.monotonic()))
            if facts.get("version") == version:
                return facts

    def end(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="session")
def shared_receivers() -> Iterator[list[ReceiverProcess]]:
    """Two receivers for tests that leave them alive."""
    started = [ReceiverProcess(f"shared-{index}") for index in range(2)]
    yield started
    for receiver in started:
        receiver.end()


@pytest.fixture
def start_receiver() -> Iterator[Callable[[str], ReceiverProcess]]:
    """Starts receivers that the test may kill."""
    started: list[ReceiverProcess] = []

    def start(name: str) -> ReceiverProcess:
        started.append(ReceiverProcess(name))
        return started[-1]

    yield start
    for receiver in started:
        receiver.end()
