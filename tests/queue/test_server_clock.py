"""The time in which the server itself does not run."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from async_rl.queue.server import server as server_module
from tests.queue.direct import LINEAGE, Run
from tests.queue.test_granted import granted


@pytest.mark.parametrize(("wait_is_late", "leases"), [(True, 1), (False, 0)])
def test_time_in_which_the_server_was_suspended_ends_no_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_is_late: bool, leases: int
):
    passed_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s)
    monkeypatch.setattr(server_module, "time", clock)
    run = Run(tmp_path, monkeypatch)

    def suspended(timeout_ms: int) -> list[tuple[int, int]]:
        nonlocal passed_s
        passed_s += 3600.0
        return []

    try:
        run.attach()
        run.announce(0)
        assert len(granted(run, "a", "1")) == 1
        if wait_is_late:
            run.server._poller.poll = suspended  # type: ignore[method-assign]
        else:
            passed_s = 3600.0
        run.server._wait()
        run.turn()
        assert len(run.server._state.leases) == leases
        status = run.server._lifetime.is_learner_alive(run.server._state, clock.monotonic(), learner_left=False)
        assert status == wait_is_late
        assert run.server._state.learner is not None
        assert run.server._state.learner.lineage == LINEAGE
    finally:
        run.close()
