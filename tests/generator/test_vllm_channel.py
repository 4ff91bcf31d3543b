"""The pipes past vLLM's engine, with threads' ends opened as its workers open them; no vLLM."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from async_rl.errors import WeightsError
from async_rl.generator.vllm.worker_link import PrepareChannel, write_report


class Worker:
    """The ends of one worker."""

    def __init__(self, channel: PrepareChannel, rank: int, stack: ExitStack) -> None:
        self.rank = rank
        self.command_fd = os.open(channel.paths["command_paths"][rank], os.O_RDONLY)
        self.report_fd = os.open(str(channel.paths["report_path"]), os.O_WRONLY)
        stack.callback(os.close, self.command_fd)
        stack.callback(os.close, self.report_fd)

    def report(self, number: int, error: str = "") -> None:
        write_report(self.report_fd, rank=self.rank, number=number, error=error)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def make(stack: ExitStack, limit_s: float = 60.0) -> tuple[PrepareChannel, list[Worker]]:
    channel = PrepareChannel(2, limit_s=limit_s)
    stack.callback(channel.close)
    return channel, [Worker(channel, rank, stack) for rank in range(2)]


def test_every_worker_gets_every_command_in_order(stack):
    channel, workers = make(stack)
    channel.prepare()
    channel.release()
    channel.prepare()
    for worker in workers:
        assert os.read(worker.command_fd, 4096) == b"prepare 1\nrelease\nprepare 2\n"


def test_it_waits_for_all_workers_and_passes_over_reports_of_older_preparations(stack):
    channel, workers = make(stack)
    channel.prepare()
    workers[0].report(1)
    assert channel.wait(1.0)
    channel.prepare()
    workers[1].report(1, "too late")
    workers[1].report(2)
    assert channel.wait(1.0)
    assert channel.wait(0.0)
    workers[0].report(2)
    assert not channel.wait(1.0)
    assert not channel.wait(0.0)


def test_a_report_may_come_in_pieces(stack):
    channel, workers = make(stack)
    channel.prepare()
    line = json.dumps({"rank": 0, "number": 1, "error": ""}).encode() + b"\n"
    os.write(workers[0].report_fd, line[:9])
    assert channel.wait(1.0)
    os.write(workers[0].report_fd, line[9:])
    workers[1].report(1)
    assert not channel.wait(1.0)


def test_a_failure_is_told_once_all_have_reported_and_the_next_preparation_is_free_of_it(stack):
    channel, workers = make(stack)
    channel.prepare()
    # However long and whatever its letters: written at once, and read whole.
    workers[1].report(1, "MemoryError: " + 'ä"\n' * 10_000)
    assert channel.wait(1.0)
    workers[0].report(1)
    with pytest.raises(WeightsError, match=r'keeps its current version: worker 1: MemoryError: \?"'):
        channel.wait(1.0)
    channel.prepare()
    for worker in workers:
        worker.report(2)
    assert not channel.wait(1.0)


def test_workers_that_take_for_ever_are_named(stack):
    channel, workers = make(stack, limit_s=0.0)
    channel.prepare()
    workers[0].report(1)
    with pytest.raises(WeightsError, match=r"workers \[1\] did not prepare the new weights within 0 s"):
        channel.wait(0.1)
