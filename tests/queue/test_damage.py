"""A journal that is damaged while no server runs: the run goes on to its end, and no prompt is trained twice.

The run has seen an outage and a forging generator before, so the journal has failures, charges and a quarantine.

``make test-long`` damages every kind of file at 200 random places, other tests at a few.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from random import Random
from typing import Literal

import pytest

from async_rl.net.codec import read_as
from async_rl.queue import messages
from async_rl.queue.messages import LeasesGranted
from tests.damage import damage
from tests.queue.direct import LINEAGE, RefusedError, Run

Kind = Literal["group", "index", "wal", "files"]
"""``files``: whole files of groups are swapped, repeated or missing, or the index is an older one."""
KINDS: tuple[Kind, ...] = ("group", "index", "wal", "files")
NUM_STEPS = 8
CHECKPOINT = 3
"""The step of the learner's last checkpoint."""
NUM_PLACES = 200
FORGER = "forger"
SEED = 15


class Killed:
    """A run whose processes all died after the take of step ``CHECKPOINT``, and the checkpoint that is left."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory, self._monkeypatch = directory, monkeypatch
        run = Run(directory, monkeypatch, num_steps=NUM_STEPS)
        run.attach()
        run.announce(0)
        run.evaluate()
        _fail_leases(run)
        _forge_groups(run)
        for step in range(CHECKPOINT):
            run.trained += run.take(step)
            self.snapshot = run.ack(step)
            if step == 1:
                # As after many commits: records in the index, and newer ones in its log.
                assert run.server._journal is not None
                run.server._journal._index.execute("PRAGMA wal_checkpoint(PASSIVE)")
                shutil.copytree(directory / "journal", directory / "older")
        self.trained = list(run.trained)
        self.taken = run.take(CHECKPOINT)
        run.sample(CHECKPOINT)
        shutil.copytree(directory / "journal", directory / "left")
        run.close()

    def damaged(self, kind: Kind, random: Random, number: int) -> tuple[Path, str]:
        """A copy of what is left, with a damaged file."""
        directory = self.directory / f"{kind}-{number}"
        shutil.copytree(self.directory / "left", directory / "journal")
        if kind == "files":
            return directory, _scramble(directory / "journal", self.directory / "older", random)
        pattern = {"group": "group-*", "index": "index.sqlite", "wal": "index.sqlite-wal"}[kind]
        path = random.choice(sorted((directory / "journal").glob(pattern)))
        return directory, damage(path, random)

    def finish(self, directory: Path, *, restarts_learner: bool) -> tuple[Run, list[int]]:
        """Go on to the end, with a new learner or with the one that waits for its batch; the positions trained."""
        if not restarts_learner:
            run = Run(directory, self._monkeypatch, num_steps=NUM_STEPS)
            run.evaluations = (("test", 0),)
            try:
                trained = [*self.trained, *run.take(CHECKPOINT)]
                return run, self._live(run, CHECKPOINT, trained)
            except RefusedError as error:
                run.close()
                # The learner ends with this message. Its remedy is the restart below.
                assert "start the run again" in str(error) or "start the learner again" in str(error)  # noqa: PT017
        run = Run(directory, self._monkeypatch, num_steps=NUM_STEPS, lineage="line-b")
        run.attach(parent=LINEAGE, step=CHECKPOINT, snapshot=self.snapshot)
        run.announce(CHECKPOINT)
        run.evaluate()
        return run, self._live(run, CHECKPOINT, [*self.trained, *run.take(CHECKPOINT)])

    def _live(self, run: Run, step: int, trained: list[int]) -> list[int]:
        run.announce(step)
        run.ack(step)
        for later in range(step + 1, NUM_STEPS):
            trained += run.take(later)
            run.ack(later)
        run.end()
        return trained


def _lease_ids(run: Run, name: str) -> list[str]:
    reply = run.call(name.encode(), messages.LeaseRequest(name, LINEAGE, 0, 4))
    return [lease.lease_id for lease in read_as(reply.fields, LeasesGranted).leases]


def _fail_leases(run: Run) -> None:
    """An outage of the tool of the only generator, until a lease of another one is good."""
    run.call(b"sick", messages.Hello("sick", "host", "fake"))
    failure = messages.Failure("reward_error", "ConnectionRefusedError: tool:80", "/tool.py:7", is_transient=True)
    while run.server._state.retries.outage is None:
        for lease_id in _lease_ids(run, "sick"):
            run.call(b"sick", messages.FailLease("sick", lease_id, failure))
    run.sample(0)
    assert run.server._state.retries.outage is None


def _forge_groups(run: Run) -> None:
    run.call(FORGER.encode(), messages.Hello(FORGER, "host", "fake"))
    while lease_ids := _lease_ids(run, FORGER):
        for lease_id in lease_ids:
            run.call(FORGER.encode(), messages.ReturnGroups(FORGER, (lease_id,)), [b"no group"])
    assert _quarantined(run)


def _quarantined(run: Run) -> bool:
    forger = run.server._state.generators.get(FORGER)
    return forger is not None and "malformed" in forger.quarantined


def _scramble(journal: Path, older: Path, random: Random) -> str:
    """Swap, copy or delete whole files of a journal; what was done."""
    paths = sorted(journal.glob("group-*"))
    first, second = random.sample(paths, 2)
    what = random.choice(("swap", "copy", "repeat", "delete", "older"))
    if what == "swap":
        data = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(data)
    elif what == "copy":
        shutil.copy(first, second)
    elif what == "repeat":
        shutil.copy(first, journal / f"group-{int(paths[-1].name.removeprefix('group-')) + 1:010d}")
    elif what == "delete":
        first.unlink()
        second.unlink()
    else:
        for path in [*journal.glob("index*")]:
            path.unlink()
        for path in older.glob("index*"):
            shutil.copy(path, journal / path.name)
    return f"{what} {first.name} {second.name} of {len(paths)}"


def survive(killed: Killed, kind: Kind, number: int, *, restarts_learner: bool) -> str:
    """Damage one place and go on; what came of it. Raises AssertionError: the run is wrong."""
    random = Random(f"{SEED} {kind} {number}")
    directory, what = killed.damaged(kind, random, number)
    run, trained = killed.finish(directory, restarts_learner=restarts_learner)
    try:
        groups = run.ledger["groups"]
        assert sorted(trained) == sorted(set(trained)), what
        assert (len(trained), run.num_answers) == (2 * NUM_STEPS, 2), what
        assert groups["trained"] == len(trained), what
        assert groups["in_flight"] == groups["queued"] == groups["taken"] == 0, what
        assert [one["detail"] for one in run.ledger["failures"]] == ["ConnectionRefusedError: tool:80"], what
        assert groups["dropped"]["poison"] == 0, what
        # A quarantine is in the index only, so it is lost with the index, or with the end of its log.
        assert _quarantined(run) or kind in ("index", "wal"), what
        assert run.server._journal is not None
        num_damaged = run.server._state.num_damaged
        return "moved aside" if run.server._journal.damage else "groups sampled again" if num_damaged else "unnoticed"
    finally:
        run.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_journal_is_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind):
    killed = Killed(tmp_path, monkeypatch)
    for number in range(6):
        survive(killed, kind, number, restarts_learner=bool(number % 2))


def test_damaged_groups_count_as_rolled_back_and_are_named_by_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    killed = Killed(tmp_path, monkeypatch)
    for path in (tmp_path / "left").glob("group-*"):
        path.write_bytes(bytes(path.stat().st_size))
    directory = tmp_path / "hurt"
    shutil.copytree(tmp_path / "left", directory / "journal")
    run = Run(directory, monkeypatch, num_steps=NUM_STEPS)
    # The learner may have received this batch before, so it can't be replaced by another.
    with pytest.raises(RefusedError, match=r"can't be read again: .*group-000000.*; start the run again"):
        run.take(CHECKPOINT)
    run.close()
    run, trained = killed.finish(directory, restarts_learner=True)
    # The snapshot of the checkpoint has the groups that were queued then. Their prompts come again.
    num_damaged = run.server._state.num_damaged
    assert num_damaged >= 2
    assert run.ledger["groups"]["dropped"]["rolled_back"] >= num_damaged
    assert set(killed.taken) <= set(trained)
    assert len(trained) == len(set(trained)) == 2 * NUM_STEPS
    lines = [line for line in caplog.messages if "count as rolled_back" in line]
    assert sum(int(line.split(": ")[1].split()[0]) for line in lines) == num_damaged
    assert all("journal/group-000000" in line for line in lines)
    assert run.learner(messages.GetStatus()).fields["status"]["damaged_groups"] == num_damaged
    run.close()


def test_a_run_goes_on_with_another_journal_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    killed = Killed(tmp_path, monkeypatch)
    run, trained = killed.finish(tmp_path / "elsewhere", restarts_learner=True)
    assert len(trained) == len(set(trained)) == 2 * NUM_STEPS
    assert run.ledger["groups"]["dropped"]["rolled_back"] >= 2
    run.close()


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("restarts_learner", [True, False])
def test_a_journal_damaged_at_many_places_is_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, restarts_learner: bool
):
    killed = Killed(tmp_path, monkeypatch)
    ends = Counter(survive(killed, kind, n, restarts_learner=restarts_learner) for n in range(NUM_PLACES))
    print(f"{kind}, {'a new' if restarts_learner else 'the same'} learner: {dict(ends)}")
