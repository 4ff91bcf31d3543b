"""Long tests that go on where they were stopped: ``--done FILE`` lists what has passed, and leaves it out.

Of several processes of one test run, only the one that controls the others hears of every test, and writes.

With ``--minutes N`` no test begins later than that, and the exit code is pytest's of an interrupted run. The same
command then goes on with what is left.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest


class Passed:
    """The lines of a file, each the name of something that has passed. Without a file, nothing is kept."""

    def __init__(self, path: Path | None, *, is_worker: bool = False) -> None:
        self._path, self._is_worker = path, is_worker
        self._names = set(path.read_text().splitlines()) if path is not None and path.exists() else set[str]()
        self._num_done = 0

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def add(self, *names: str) -> None:
        """Append ``names`` to the file."""
        self._names.update(names)
        if self._path is not None:
            with self._path.open("a") as file:
                file.writelines(f"{name}\n" for name in names)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out the tests that have passed."""
        done = [item for item in items if item.nodeid in self]
        config.hook.pytest_deselected(items=done)
        self._num_done += len(done)
        items[:] = [item for item in items if item.nodeid not in self]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that has passed."""
        if report.when == "call" and report.passed and not self._is_worker:
            self.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Let a run succeed that has nothing left to do."""
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self._num_done:
            session.exitstatus = pytest.ExitCode.OK


class Piece:
    """Ends a test run when its minutes are over, after the test that runs then."""

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        if time.monotonic() >= self._end:
            item.session.shouldstop = "the minutes of this piece are over; the same command goes on with what is left"
