"""The replies to lease requests outlive the server, each as a record of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_rl.queue import messages
from tests.queue.direct import LINEAGE, Run


def granted(run: Run, name: str, request_id: str) -> list[str]:
    """The ids of the leases in the reply to a request, which is sent once."""
    peer = name.encode()
    run.endpoint.sent.clear()
    run.post(peer, messages.LeaseRequest(name, LINEAGE, 0, 1), request_id=request_id)
    run.turn()
    (reply,) = [message for to, message in run.endpoint.sent if to == peer and message.type == "leases"]
    return [lease["lease_id"] for lease in reply.fields["leases"]]


def records(run: Run) -> dict[str, Any]:
    journal = run.server._journal
    assert journal is not None
    found = journal.load()
    assert found is not None
    return dict(found.entries["granted"])


def test_a_reply_is_repeated_after_a_restart_and_writes_no_other_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = Run(tmp_path, monkeypatch)
    try:
        run.attach()
        run.announce(0)
        first, second = granted(run, "a", "1"), granted(run, "b", "2")
        assert len({*first, *second}) == 2
        assert records(run) == {
            "a": {"request_id": "1", "lease_ids": first},
            "b": {"request_id": "2", "lease_ids": second},
        }
        # A third reply would have written the first two again if they were in the record of the handlers.
        before = run.server._handlers.save()
        granted(run, "c", "3")
        assert run.server._handlers.save() == before
        run.server._durable.revert()
        assert granted(run, "a", "1") == first
        assert granted(run, "a", "4") != first
        run.post(b"b", messages.Goodbye("b"))
        run.turn()
        assert set(records(run)) == {"a", "c"}
    finally:
        run.close()
