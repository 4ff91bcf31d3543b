"""The time in which the server itself does not run, and the replies to lease requests that outlive it."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from async_rl.queue import messages
from async_rl.queue.server import server as server_module
from tests.queue.direct import LINEAGE, Run


@pytest.mark.parametrize(("wait_is_late", "leases"), [(True, 1), (False, 0)])
def test_time_in_which_the_server_was_suspended_ends_no_lease(
    run: Run, monkeypatch: pytest.MonkeyPatch, wait_is_late: bool, leases: int
):
    passed_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s)
    monkeypatch.setattr(server_module, "time", clock)

    def suspended(timeout_ms: int) -> list[tuple[int, int]]:
        nonlocal passed_s
        passed_s += 3600.0
        return []

    assert len(granted(run, "a", "1")) == 1
    if wait_is_late:
        run.server._poller.poll = suspended  # type: ignore[method-assign]
    else:
        passed_s = 3600.0
    run.server._wait()
    run.turn()
    assert len(run.server._state.leases) == leases
    is_alive = run.server._lifetime.is_learner_alive(run.server._state, clock.monotonic(), learner_left=False)
    assert is_alive == wait_is_late
    assert run.server._state.learner is not None


# The replies to lease requests outlive the server, each as a record of its own.


def granted(run: Run, name: str, request_id: str) -> list[str]:
    """The ids of the leases in the reply to a request, which is sent once."""
    peer = name.encode()
    run.endpoint.sent.clear()
    run.post(peer, messages.LeaseRequest(name, LINEAGE, 0, 1), request_id=request_id)
    run.turn()
    (reply,) = [message for to, message in run.endpoint.sent if to == peer and message.type == "leases"]
    return [lease["lease_id"] for lease in reply.fields["leases"]]


def test_a_reply_is_repeated_after_a_restart_and_writes_no_other_again(run: Run):
    first, second = granted(run, "a", "1"), granted(run, "b", "2")
    assert len({*first, *second}) == 2
    # A third reply would write the first two again if they were in the record of the handlers.
    before = run.server._handlers.save()
    granted(run, "c", "3")
    assert run.server._handlers.save() == before
    run.server._durable.revert()
    assert granted(run, "a", "1") == first
    assert granted(run, "a", "4") != first
    run.post(b"b", messages.Goodbye("b"))
    run.turn()
    assert run.server._journal is not None
    saved = run.server._journal.load()
    assert saved is not None
    assert set(saved.entries["granted"]) == {"a", "c"}
