"""Settings of every test, and the fixture that keeps tests of other subjects apart from the admission rule."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from async_rl.process.child import package_environment
from tests.examples import QUICK
from tests.resumable import Passed, Piece

# Tests run side by side. With a thread for each core in each of them torch's threads wait for one another, and a step
# takes five times as long. Processes that tests start inherit this.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(package_environment())

settings.load_profile(QUICK)  # before any test module is read; --hypothesis-profile=full replaces it


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=4, help="kills and stops at random moments, 20 a run")
    parser.addoption("--first-seed", type=int, default=0, help="seed of the first of these runs")
    parser.addoption("--mutants", type=int, default=250_000, help="mutants for each of four ports in the long tests")
    parser.addoption("--first-mutant", type=int, default=0, help="number of the first, to go on with a long test")
    parser.addoption("--done", type=Path, help="file of what has passed: it is left out, and what passes is added")
    parser.addoption("--minutes", type=float, help="start no test later than this; go on with --done")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Passed(config.option.done, is_worker=hasattr(config, "workerinput")), "passed")
    if config.option.minutes is not None:
        config.pluginmanager.register(Piece(config.option.minutes), "piece")


@pytest.fixture(scope="session")
def passed(pytestconfig: pytest.Config) -> Passed:
    """What ``--done`` lists, for tests that are hours long themselves."""
    plugin = pytestconfig.pluginmanager.get_plugin("passed")
    assert isinstance(plugin, Passed)
    return plugin


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread, so that the order of sums, and so every bit, is the same on all machines."""
    import torch  # here, because many tests need no torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def fixed_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix how many leases there are, for tests of what happens to leases: only ``test_admission`` has the rule."""
    from async_rl.queue.core.admission import QueueSettings

    def group_limit(self: QueueSettings, *, version: int, active_version: int, steps_left: int) -> int:
        batches = (self.queue.max_staleness + 1 - (version - active_version)) // self.updates_per_batch
        return max(0, min(batches, steps_left)) * self.groups_per_step

    def oldest_for_lease(self: QueueSettings, *, version: int, outstanding: int) -> int:
        batches = outstanding // self.groups_per_step + 1
        return max(0, version + batches * self.updates_per_batch - 1 - self.queue.max_staleness)

    monkeypatch.setattr(QueueSettings, "group_limit", group_limit)
    monkeypatch.setattr(QueueSettings, "oldest_for_lease", oldest_for_lease)
