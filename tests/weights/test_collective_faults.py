"""What the others notice when a collective's library fails: nothing but a version that comes by the stream."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from async_rl.queue.messages import Announcement
from async_rl.weights.channel.publisher import Publisher
from async_rl.weights.collective.libraries import SUBSTITUTE
from async_rl.weights.staging import StagedVersion, Staging
from tests.weights.conftest import ReceiverProcess, a_publisher
from tests.weights.faulty_library import file_of

DEADLINE_S = 6.0
FAULTS = [
    *((f"init:{fault}") for fault in ("progress", "raise", "async")),
    *((f"broadcast:{fault}") for fault in ("raise", "async", "stall")),
]
CASES = [
    *((who, fault) for who in ("broadcaster", "faulty") for fault in FAULTS),
    *((who, "broadcast:hang") for who in ("broadcaster", "faulty")),
    *(pytest.param(who, "init:hang", marks=pytest.mark.long) for who in ("broadcaster", "faulty")),
    ("faulty", "abort:hang"),
]


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ASYNC_RL_FAULTS", str(tmp_path))
    monkeypatch.setenv(SUBSTITUTE, "tests.weights.faulty_library:FaultyLibrary")
    return tmp_path


@pytest.fixture
def publisher(directory: Path) -> Iterator[Publisher]:
    with a_publisher(DEADLINE_S) as publisher:
        yield publisher


def num_starts(publisher: Publisher) -> int:
    """How often the broadcaster was started."""
    collective: Any = publisher._manager._collective
    return collective._server.num_starts


class Versions:
    """Stages and publishes versions, and measures for how long the learner would have waited."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._staging = Staging(None, 1 << 16, deadline_s=DEADLINE_S)
        self.longest_s = 0.0

    def publish(self, version: int) -> StagedVersion:
        start = time.monotonic()
        tensor = torch.full((50_000,), float(version))
        staged = self._staging.stage("faults", version, iter([("weight", tensor)]))
        self._publisher.publish(staged)
        self.longest_s = max(self.longest_s, time.monotonic() - start)
        return staged


def joined(publisher: Publisher, versions: Versions, receivers: list[ReceiverProcess]) -> None:
    """Bring version 0, which is pulled, to all receivers, and version 1 by a collective of all."""
    manifest = versions.publish(0).manifest
    for receiver in receivers:
        receiver.follow(Announcement(manifest.lineage, 0, manifest.digest, publisher.address))
    for receiver in receivers:
        receiver.version(0)
    assert publisher.wait(0, DEADLINE_S, num_members=len(receivers))
    versions.publish(1)
    for receiver in receivers:
        receiver.version(1)
    assert publisher.wait(1, DEADLINE_S, num_members=len(receivers))
    assert publisher.stats().attempts == 1


def arm(directory: Path, publisher: Publisher, versions: Versions, who: str, fault: str, extra: Callable) -> None:
    """Inject ``fault`` into ``who``. A fault of ``init`` needs a new communicator, so another receiver joins first."""
    if fault.startswith("init"):
        late = extra("late")
        manifest = versions.publish(2).manifest
        late.follow(Announcement(manifest.lineage, 2, manifest.digest, publisher.address))
        late.version(2)
        assert publisher.wait(2, DEADLINE_S)
    file_of(directory, who).write_text(fault)


@pytest.mark.slow
@pytest.mark.parametrize(("who", "fault"), CASES)
def test_a_library_that_fails_or_hangs_costs_the_others_no_more_than_two_deadlines(
    directory: Path, publisher: Publisher, start_receiver: Callable[[str], ReceiverProcess], who: str, fault: str
):
    healthy, faulty = start_receiver("healthy"), start_receiver("faulty")
    versions = Versions(publisher)
    joined(publisher, versions, [healthy, faulty])
    if fault == "abort:hang":  # it is aborted when the broadcaster has failed
        file_of(directory, "broadcaster").write_text("broadcast:raise")
    arm(directory, publisher, versions, who, fault, start_receiver)
    # A call that never returns ends its process, be it the broadcaster or the generator, and no other.
    is_lost = who == "faulty" and fault.endswith("hang")
    start = time.monotonic()
    versions.publish(3)
    for receiver in [healthy] if is_lost else [healthy, faulty]:
        receiver.version(3, 2 * DEADLINE_S)
    assert time.monotonic() - start < 2 * DEADLINE_S
    if is_lost:
        assert faulty.process.wait(2 * DEADLINE_S) == -signal.SIGKILL
    elif fault.endswith("hang"):
        while num_starts(publisher) == 1:
            assert time.monotonic() - start < 3 * DEADLINE_S, "the broadcaster was not ended"
            publisher.wait(3, 0.05, num_members=9)
        assert publisher.wait_for_collective(60)
    else:
        assert publisher.stats().failures > 0
        assert (faulty.process.poll(), publisher.stats().dropped) == (None, 0), publisher.stats().last_drop
    assert os.listdir(directory) == [], "the fault was not injected"
    num_attempts = publisher.stats().attempts
    versions.publish(4)
    for receiver in [healthy] if is_lost else [healthy, faulty]:
        receiver.version(4, 2 * DEADLINE_S)
    if who == "broadcaster" and fault.endswith("hang"):
        assert publisher.wait(4, 2 * DEADLINE_S)
        assert publisher.stats().attempts > num_attempts, "the collective did not come back"
    assert healthy.process.poll() is None
    assert versions.longest_s < DEADLINE_S
