"""Who waits for whom among the ranks of a learner, over gloo, with processes that are stopped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from async_rl.extensions.ops.rank_watch import RankState, long_waits
from tests.learner.ranks import finish_ranks, start_ranks
from tests.learner.tiny import tiny_model

PHASES = {
    "forward": "all_gather", "backward": "all_gather", "clip": "all_reduce", "optimizer": "all_reduce",
    "gather of a version": "all_gather", "checkpoint": "all_gather",
}  # fmt: skip
"""Where rank 1 is stopped -> what rank 0 then waits in."""


def test_a_line_names_who_waits_together_for_whom_and_a_silent_rank_does_not_wait():
    together = "nccl:all_reduce #57 of group 0, sizes [[8]]"

    def state(rank: int, time: float, collective: str = "", since: float = 0.0) -> RankState:
        return RankState(rank, time, 30.0, "update", "async_rl.learner:7", collective, [0, 1, 2], since)

    stopped = state(2, 100.0, together, 99.0)  # more than three looks before the newest
    late = f"for rank 2, which 91 s ago was in {together}, at async_rl.learner:7"
    two = {0: state(0, 190.0, together, 99.0), 1: state(1, 191.0, together, 98.0)}
    assert long_waits({**two, 2: stopped}) == {0: f"rank 0, 1 waits in {together} since 93 s {late}"}
    assert long_waits({0: state(0, 100.0, together, 71.0)}) == {}  # less than a look
    ranks = {rank: state(rank, 200.0, together, 100.0) for rank in range(3)}
    assert long_waits(ranks)[0].endswith("for no other rank: all are there, so look at the network between them")
    assert "for rank 1 and rank 2, which 10 s ago was in update, at" in long_waits({0: ranks[0], 2: state(2, 190.0)})[0]


@pytest.mark.slow
def test_a_stopped_rank_is_named_with_what_the_other_waits_in_at_each_phase_and_the_other_ends(tmp_path: Path):
    tiny_model(tmp_path / "model")
    (tmp_path / "run" / "logs").mkdir(parents=True)
    leader, follower = start_ranks("stopped", tmp_path)
    try:
        ((code, output),) = finish_ranks([follower], timeout_s=120)
    finally:
        leader.kill()
    assert code == 1, output
    assert "imed out" in output
    reports = (tmp_path / "reports-0").read_text()
    for phase, collective in PHASES.items():
        waits = rf"^{phase}: rank 0 waits in gloo:{collective} #\d+ of group \S+, sizes \[.* since \d s for rank 1\b"
        assert re.search(waits, reports, re.MULTILINE), reports
    assert re.search(
        r": rank 1 waits in gloo:broadcast .* for rank 0, wh.* was in ", (tmp_path / "reports-1").read_text()
    )
