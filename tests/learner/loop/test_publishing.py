"""Weights that are held back: which version goes out when, and that its tensors are those of its own time."""

from __future__ import annotations

from collections.abc import Callable

import torch

from async_rl.learner.loop.publishing import FixedLagWeights, NamedTensors, Published


class Recorded:
    """A weight plane that keeps what it was given: (version, the weight's value)."""

    channel = "tcp://127.0.0.1:1"
    ports = (1, 2)

    def __init__(self) -> None:
        self.sent: list[tuple[int, float]] = []

    def publish(
        self, lineage: str, version: int, tensors: NamedTensors, *, tick: Callable[[], None], is_last: bool = False
    ) -> Published:
        [(name, tensor)] = tensors
        assert (lineage, name) == ("line", "w")
        self.sent.append((version, float(tensor)))
        return Published(version, f"digest-{version}")

    def stats(self) -> dict[str, float]:
        return {"members": 1}


class Learner:
    """Its one weight is always its version, in one tensor that every update overwrites."""

    def __init__(self, fixed_lag: int, version: int = 0) -> None:
        self.plane, self.version, self.weight = Recorded(), version, torch.zeros(())
        self.weights = FixedLagWeights(self.plane, fixed_lag)
        self.gathered = 0

    def gather(self) -> NamedTensors:
        self.gathered += 1
        yield "w", self.weight.fill_(self.version)

    def publish(self, *, is_last: bool = False) -> int | None:
        found = self.weights.publish("line", self.version, self.gather(), tick=lambda: None, is_last=is_last)
        return None if found is None else found.version

    def step(self) -> int | None:
        self.version += 1
        return self.publish()


def test_a_version_goes_out_when_it_is_fixed_lag_versions_old():
    learner = Learner(2)
    assert learner.publish() == 0
    assert [learner.step() for _ in range(5)] == [None, None, 1, 2, 3]
    assert learner.publish(is_last=True) == 5
    assert learner.plane.sent == [(version, float(version)) for version in (0, 1, 2, 3, 5)]


def test_not_held_back_every_version_goes_out_at_once():
    learner = Learner(0)
    assert [learner.publish(), learner.step(), learner.step()] == [0, 1, 2]


def test_a_learner_start_begins_with_its_own_version():
    learner = Learner(3, version=7)
    assert learner.publish() == 7
    assert [learner.step() for _ in range(4)] == [None, None, None, 8]


def test_a_version_that_a_skipped_step_left_is_neither_gathered_nor_sent_again():
    learner = Learner(1)
    learner.publish()
    learner.step()
    assert learner.publish() is None
    assert (learner.gathered, learner.step()) == (2, 1)


def test_no_more_versions_are_held_than_needed():
    learner = Learner(2)
    learner.publish()
    for _ in range(9):
        learner.step()
    assert sorted(learner.weights._delayed) == [7, 8, 9]
    assert learner.weights.stats() == {"members": 1}
    assert learner.weights.channel == learner.plane.channel
