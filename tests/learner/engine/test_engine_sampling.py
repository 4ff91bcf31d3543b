"""The engine lets its rank sample between ``sample`` and the next command, with the policy's own memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.sampling import SamplingOrder
from tests.learner.model.reference import engine_of
from tests.learner.rank_scenarios import PLAIN, batch_for
from tests.learner.tiny import tiny_config, tiny_model


class LoggedSampler:
    """Notes what the engine asks of it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.weights: Mapping[str, Tensor] = {}
        self.error: Exception | None = None
        self.busy_s = 2.5

    def resume(self, order: SamplingOrder, weights: Iterable[tuple[str, Tensor]] | None) -> None:
        self.log.append(f"version {order.version}, {'no' if weights is None else 'new'} weights")
        self.weights = self.weights if weights is None else dict(weights)

    def pause(self) -> None:
        self.log.append("pause")

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self.log.append("close")


@pytest.fixture
def sampler() -> LoggedSampler:
    return LoggedSampler()


@pytest.fixture
def engine(tmp_path: Path, sampler: LoggedSampler) -> FsdpEngine:
    tiny_model(tmp_path / "model")
    config = tiny_config(tmp_path, "model", **PLAIN)
    return engine_of(config, sampler=sampler)


def order(version: int) -> SamplingOrder:
    return SamplingOrder("tcp://127.0.0.1:1", "line", version, f"digest-{version}")


def test_a_command_ends_sampling_and_a_tick_does_not(engine: FsdpEngine, sampler: LoggedSampler):
    for version in (0, 0, 1):
        engine.sample(order(version))
        engine.tick()
    new, same, next_one = ("version 0, new weights", "version 0, no weights", "version 1, new weights")
    assert sampler.log == ["pause", new, "pause", same, "pause", next_one]
    # The whole policy is shared and not copied.
    before = {name: tensor.clone() for name, tensor in sampler.weights.items()}
    engine.score(batch_for(0), of="policy")
    engine.update(batch_for(0), version=0)
    assert sampler.log[6:] == ["pause", "pause"]
    assert any(not torch.equal(before[name], tensor) for name, tensor in sampler.weights.items())
    assert engine.stop_sampling() == 2.5
    engine.close()
    assert sampler.log[-1] == "close"


def test_an_error_of_the_sampler_reaches_the_waiting_learner(engine: FsdpEngine, sampler: LoggedSampler):
    engine.sample(order(0))
    sampler.error = ValueError("no space left")
    with pytest.raises(ValueError, match="no space left"):
        engine.tick()
