"""Which killed processes died because memory ran out."""

import pytest

from async_rl.launch import memory_deaths
from async_rl.launch.memory_deaths import MemoryDeaths
from async_rl.process.cgroup import MemoryKills


class Kills(MemoryKills):
    """Gives the counts that a test has put there."""

    def __init__(self) -> None:
        self.own = self.anywhere = 0

    def poll(self) -> tuple[int, int]:
        found = self.own, self.anywhere
        self.own = self.anywhere = 0
        return found


@pytest.fixture
def kills() -> Kills:
    return Kills()


@pytest.fixture
def clock() -> list[float]:
    return [0.0]


@pytest.fixture
def deaths(kills: Kills, clock: list[float], monkeypatch: pytest.MonkeyPatch) -> MemoryDeaths:
    monkeypatch.setattr(memory_deaths, "limit_text", lambda: "the limit of the cgroup /x, 2 GiB")
    return MemoryDeaths(kills, lambda: clock[0])


def test_a_kill_that_its_own_group_has_counted_is_certain(deaths: MemoryDeaths, kills: Kills, clock: list[float]):
    assert deaths.cause("learner-0") == ""  # a kill that the kernel did not count
    kills.own = kills.anywhere = 1
    assert deaths.note() == ""  # the process may still be ending
    clock[0] = 9.0
    assert deaths.cause("learner-0") == "because memory ran out (the limit of the cgroup /x, 2 GiB)"
    clock[0] = 20.0
    assert deaths.cause("learner-0") == ""  # it was the cause of one death
    assert deaths.note() == ""


def test_a_kill_somewhere_on_the_machine_is_a_probable_cause_for_a_while(
    deaths: MemoryDeaths, kills: Kills, clock: list[float]
):
    kills.anywhere = 1
    assert deaths.cause("learner-0") == "probably because memory ran out (the limit of the cgroup /x, 2 GiB)"
    clock[0] = 10.0
    assert deaths.cause("learner-0") == ""
    assert deaths.note() == ""  # it may be any other user's process


def test_kills_of_no_role_are_told_once_a_minute(deaths: MemoryDeaths, kills: Kills, clock: list[float]):
    kills.own = kills.anywhere = 2
    assert deaths.note() == ""
    clock[0] = 10.0
    assert "the kernel killed 2 processes beside" in deaths.note()
    assert deaths.note() == ""
    kills.own = 1
    clock[0] = 15.0
    assert deaths.note() == ""
    clock[0] = 69.0
    assert deaths.note() == ""
    clock[0] = 70.0
    assert "the kernel killed 1 process beside" in deaths.note()


def test_the_summary_counts_the_kills_by_process(deaths: MemoryDeaths, kills: Kills, clock: list[float]):
    assert deaths.summary() == []
    kills.own = kills.anywhere = 4
    assert deaths.cause("generator-0")
    assert deaths.cause("learner-0")
    assert deaths.cause("generator-0")
    clock[0] = 10.0
    assert deaths.note()
    assert deaths.summary() == [
        "note: memory ran out (the limit of the cgroup /x, 2 GiB): the kernel killed generator-0 2 times, learner-0 1 "
        "time, other processes 1 time; raise the limit"
    ]
