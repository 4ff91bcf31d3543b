"""Weights that are held back: which version goes out when, and that its tensors are those of its own time."""

from __future__ import annotations

from collections.abc import Callable

import torch

from async_rl.learner.loop.publishing import FixedLagWeights, NamedTensors, Published


class Recorded:
    """A weight plane that keeps what it was given: (version, the weight's value)."""

    channel = "tcp://127.0.0.1:1"
    ports: tuple[int, ...] = (1, 2)

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

    def __init__(self, fixed_lag: int) -> None:
        self.plane, self.version, self.weight = Recorded(), 0, torch.zeros(())
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


def test_a_version_goes_out_when_it_is_fixed_lag_versions_old_and_no_more_are_held():
    learner = Learner(2)
    assert learner.publish() == 0
    assert [learner.step() for _ in range(5)] == [None, None, 1, 2, 3]
    assert sorted(learner.weights._delayed) == [3, 4, 5]
    assert learner.publish(is_last=True) == 5
    assert learner.plane.sent == [(version, float(version)) for version in (0, 1, 2, 3, 5)]


def test_a_version_that_a_skipped_step_left_is_neither_gathered_nor_sent_again():
    learner = Learner(1)
    learner.publish()
    learner.step()
    assert learner.publish() is None
    assert (learner.gathered, learner.step()) == (2, 1)
