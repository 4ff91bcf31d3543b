"""Receivers as real processes, forked from one that has imported torch."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from msgspec.structs import asdict

from async_rl.queue.messages import Announcement
from async_rl.weights.channel.publisher import Publisher
from tests.forked import Forked, preload
from tests.weights import receiver_program

preload("tests.weights.receiver_program", "torch")


class ReceiverProcess:
    """A running ``receiver_program``."""

    def __init__(self, name: str) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        self.process = Forked(receiver_program.run, name, theirs, environment={"FAULTY_NAME": name})
        theirs.close()

    def send(self, **command: Any) -> None:
        self._connection.send(command)

    def follow(self, announcement: Announcement) -> None:
        self.send(follow={name: value for name, value in asdict(announcement).items() if name != "probe"})

    def take_fault(self, fault: str) -> None:
        """Let a fault happen in the next collective, as ``receiver_program`` says."""
        self.send(fault=fault)
        self.version(receiver_program.READY)

    def version(self, version: int, timeout_s: float = 60.0) -> dict[str, Any]:
        """Return what it reported about this version, after skipping earlier reports."""
        deadline = time.monotonic() + timeout_s
        while True:
            assert self._connection.poll(max(0.01, deadline - time.monotonic())), f"no version {version} in time"
            facts = self._connection.recv()
            if facts["version"] == version:
                return facts

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def a_publisher(deadline_s: float, chunk_bytes: int = 10_000) -> Iterator[Publisher]:
    """With a collective; chunks are small, so that a version has several."""
    with closing(Publisher("127.0.0.1", deadline_s=deadline_s, insecure=False, chunk_bytes=chunk_bytes)) as publisher:
        assert publisher.wait_for_collective(60)
        yield publisher


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
