"""The program that measures where a queue server ends: its smallest forms, and a ledger that is wrong."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.queue_limits import Options, memory, restart, settle, steady
from benchmarks.queue_limits_load import Report

# 10 leases: 6 trained, 2 in the queue at the end, 2 given back by generators that left.
STATUS = {"ledger": {"groups": {"trained": 6, "queued": 2, "taken": 0}}}
FINAL: dict[str, Any] = {
    "groups": {
        "issued": 10, "in_flight": 0, "queued": 0, "taken": 0, "trained": 6, "filtered": 0,
        "dropped": {"cancelled": 2, "unused_at_end": 2},
    },
}  # fmt: skip
TOTAL = Report(verdicts=Counter(queued=8), granted=10, given_back=2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"taken": 1}, "groups are left: {'taken': 1}"),
        ({"issued": 11}, "issued 11 is not trained 6"),
        ({"trained": 5}, "issued 10 is not trained 5"),
    ],
)
def test_a_group_that_nothing_accounts_for_is_named(change: dict[str, int], said: str):
    assert settle(TOTAL, STATUS, FINAL) == []
    assert any(said in line for line in settle(TOTAL, STATUS, {"groups": FINAL["groups"] | change}))


def test_a_lease_or_a_group_that_only_one_side_knows_is_named():
    missed = Report(verdicts=Counter(queued=7), granted=9)
    assert settle(missed, STATUS, FINAL) == [
        "issued 10 leases, but generators got 9 (0 replies unread)",
        "8 groups arrived, generators know of 7 (0 replies unread)",
    ]
    # Of a generator that left with a request unanswered, one lease and one verdict may be unknown.
    missed.unread = 1
    assert settle(missed, STATUS, FINAL) == []


@pytest.mark.long
def test_memory_and_a_restart_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert memory(Options(tmp_path, generators=10, processes=1, seconds=1)) == []
    assert restart(Options(tmp_path, generators=5, processes=1, groups=200)) == []
    assert "200 groups queued" in capsys.readouterr().out
    assert not list(tmp_path.iterdir()), "a run leaves nothing behind"


@pytest.mark.long
def test_a_thousand_generators_that_come_and_go_for_two_minutes_lose_no_lease(tmp_path: Path):
    assert steady(Options(tmp_path, seconds=120, warm_up_leases=1000)) == []
