"""A source of prompts of the user's own: what is asked of it, what is kept, and what happens when it fails or hangs."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from async_rl.errors import ConfigError
from async_rl.extensions.own_prompts import stream as own
from async_rl.queue.core import learner_requests
from async_rl.queue.core.state import QueueState
from async_rl.queue.messages import NotReady
from async_rl.queue.server.durable import DurableState, QueueData
from async_rl.queue.storage.journal import Journal
from async_rl.records import Prompt
from tests.queue.builders import LINEAGE, announce, fail, group, leases, make_config, put, settings, take

pytestmark = pytest.mark.usefixtures("patient")
GATE = threading.Event()
"""Opened by a test to let its source go on."""

COUNTING = """
    for number in range(state or 0, 99):
        yield {"prompt": f"{number} after {[(row['gt_answer'], accuracy) for row, accuracy in results]}",
               "gt_answer": str(number)}, number + 1
"""


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Requests wait as long as the source takes."""
    monkeypatch.setattr(own, "_WAIT_S", 60.0)
    GATE.clear()
    yield
    GATE.set()


def queue(tmp_path: Path, body: str, journal: Journal | None = None) -> DurableState:
    source = tmp_path / "source.py"
    source.write_text(f"from tests.extensions.own_prompts.test_stream import GATE\ndef rows(state, results):{body}")
    config = make_config(str(tmp_path), data={"train": "", "shuffle": True, "source": f"{source}:rows"})
    return DurableState(config, settings(max_staleness=3), QueueData((), {}), journal, "run")


def attached(durable: DurableState, lineage: str = LINEAGE, before: str = "", snapshot: bytes | None = None):
    learner_requests.attach(durable.state, lineage, before, 0, 0, 50, snapshot, 0.0)
    announce(durable.state, 0, lineage)
    return durable.state


def numbers(prompts: list[Prompt]) -> list[tuple[int, str]]:
    return [(prompt.position, prompt.reward_data["gt_answer"]) for prompt in prompts]


def drawn(state: QueueState, count: int) -> list[tuple[int, str]]:
    return numbers([lease.prompt for lease in leases(state, count)])


def test_prompts_that_have_not_ended_and_the_state_outlive_the_server_and_a_learner_that_goes_back(tmp_path: Path):
    with closing(Journal(tmp_path / "journal")) as journal:
        durable = queue(tmp_path, COUNTING, journal)
        state = attached(durable)
        first, second, third = leases(state, 3)
        assert numbers([first.prompt, second.prompt, third.prompt]) == [(0, "0"), (1, "1"), (2, "2")]
        assert put(state, group(first, accuracies=(1.0, 1.0))) == "filtered"
        assert put(state, group(second)) == "queued"
        durable.commit()
    with closing(Journal(tmp_path / "journal")) as journal:
        again = queue(tmp_path, COUNTING, journal)
        again.load()
        state = again.state
        # Row 0 has ended. Row 1 is queued and row 2 is leased, so the source goes on with row 3.
        assert sorted(state.stream.curriculum.places) == [1, 2]
        assert state.prompt(2) == third.prompt
        assert drawn(state, 2) == [(3, "3"), (4, "4")]
        snapshot = learner_requests.snapshot(state, LINEAGE, 0.0)
        assert drawn(state, 2) == [(5, "5"), (6, "6")]
        attached(again, "line-b", LINEAGE, snapshot)
        # What was in flight at the snapshot comes first, with its rows; then the source, from the state of then.
        assert drawn(state, 5) == [(2, "2"), (3, "3"), (4, "4"), (5, "5"), (6, "6")]
        state.check()


def test_a_source_sees_the_accuracies_of_returned_groups_and_a_prompt_that_failed_is_not_asked_for_again(
    tmp_path: Path,
):
    state = attached(queue(tmp_path, COUNTING))
    first, second = leases(state, 2)
    fail(state, second)
    put(state, group(first, accuracies=(1.0, 0.0)))
    # Row 2 was asked for when row 1 was drawn, before the group came.
    assert [lease.prompt.messages[-1]["content"] for lease in leases(state, 3)] == [
        "1 after []", "2 after []", "3 after [('0', 0.5)]",
    ]  # fmt: skip


FAILING = {
    "\n    yield {'prompt': 'a', 'gt_answer': '1'}, 1\n    raise KeyError('feed')": (
        r"source\.py:rows failed after 1 rows: KeyError: 'feed' \(.*source\.py, line 4, in rows.*; correct it, and run"
    ),
    " yield {'prompt': 'a', 'gt_answer': '1'}": r"row 1 since its start: expected a pair \(row, state\), got \{",
    " yield {'prompt': 'a'}, 1": r"row 1 since its start: expected a row with .*gt_answer",
    " yield {'prompt': 'a', 'gt_answer': '1'}, {1}": "after 1 rows: TypeError: Object of type set is not JSON",
    " yield {'prompt': 'a', 'gt_answer': '1'}, 'x' * 65536": r"a state of at most 65536 bytes, got 65538",
    " return 7": "after 0 rows: TypeError: 'int' object is not iterable",
}


@pytest.mark.parametrize("body", FAILING)
def test_a_source_that_fails_stops_the_run_with_the_cause(tmp_path: Path, body: str):
    state = attached(queue(tmp_path, body))
    for lease in leases(state, 2):
        put(state, group(lease))
    answer = take(state)
    assert isinstance(answer, NotReady)
    assert re.search(FAILING[body], answer.stop), answer.stop
    assert leases(state, 1) == []


def test_a_source_without_the_function_is_refused_at_the_start(tmp_path: Path):
    with pytest.raises(ConfigError, match="to define 'rows'"):
        queue(tmp_path, " pass\ndel rows")


def test_while_a_source_hangs_the_run_says_for_how_long_and_goes_on_when_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(own, "_WAIT_S", 0.0)
    body = "\n    if state: return\n    GATE.wait()\n    yield {'prompt': 'a', 'gt_answer': '1'}, 1"
    state = attached(queue(tmp_path, body))
    assert leases(state, 1) == []
    answer = take(state)
    assert isinstance(answer, NotReady)
    assert re.search(r"data\.source = .*source\.py:rows has given no row for 0 s", answer.reason), answer.reason
    assert not answer.exhausted
    assert state.next_deadline is not None  # the server looks again, without a request
    GATE.set()
    assert isinstance(state.stream, own.OwnStream)
    state.stream._awaited.result(60)
    before = state.revision
    state.expire(0.0)
    state.expire(0.0)
    assert state.revision == before + 1  # what waits is tried again, once
    monkeypatch.setattr(own, "_WAIT_S", 60.0)
    assert drawn(state, 2) == [(0, "1")]
    assert state.stream.exhausted
