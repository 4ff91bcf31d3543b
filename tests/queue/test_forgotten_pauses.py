"""A restart of the queue server forgets which generators failed too often, and that the run was paused for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.net.codec import read_as
from async_rl.queue import messages
from async_rl.queue.messages import LeasesGranted
from tests.queue.direct import LINEAGE, Run

DOWN = messages.Failure("reward_error", "ConnectionRefusedError: tool:80", "/tool.py:7", is_transient=True)


def granted(run: Run) -> LeasesGranted:
    return read_as(run.call(b"g0", messages.LeaseRequest("g0", LINEAGE, 0, 4)).fields, LeasesGranted)


def test_a_restart_forgets_who_failed_and_the_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = Run(tmp_path, monkeypatch)
    run.attach()
    run.announce(0)
    run.call(b"g0", messages.Hello("g0", "host", "fake"))
    while leases := granted(run).leases:
        for lease in leases:
            run.call(b"g0", messages.FailLease("g0", lease.lease_id, DOWN))
    assert "quarantined: its last 8 leases failed" in granted(run).reason
    assert "the run is paused" in run.learner(messages.Take(LINEAGE, 0, 0)).fields["reason"]
    run.close()
    run = Run(tmp_path, monkeypatch)
    assert len(granted(run).leases) == 4
    assert "the run is paused" not in run.learner(messages.Take(LINEAGE, 0, 0)).fields["reason"]
    run.close()
