"""A generator in a rank of the learner: its config, its weights, and how it fails and ends."""

from __future__ import annotations

import threading

import pytest
import torch

from async_rl.colocated.sampler import HeldByRank, HeldWeights, LearnerSampler, _engine_config
from async_rl.errors import AddressError
from async_rl.learner.sampling import SamplingOrder
from async_rl.net.keys import SECRET_VARIABLE
from tests.queue.builders import make_config

CPU = torch.device("cpu")
ORDER = SamplingOrder("tcp://192.0.2.1:5555", "line", 3, "digest-3")
"""An address of no machine (RFC 5737)."""


def sampler(report: list[str]) -> LearnerSampler:
    return LearnerSampler(make_config("run", learner={"generate": True}), rank=1, device=CPU, report=report.append)


def test_the_engine_is_the_built_in_one_on_the_ranks_device():
    config = make_config("run", generator={"backend": "vllm", "count": 4, "num_threads": 7, "devices": [4, 5, 6, 7]})
    engine = _engine_config(config, torch.device("cuda", 2)).generator
    assert (engine.backend, engine.devices, engine.count) == ("transformers", (2,), 1)
    assert engine.num_threads is None, "the learner's own threads are not changed"
    assert _engine_config(make_config("run", generator={"backend": "fake"}), CPU).generator.backend == "fake"


def test_weights_are_those_that_the_rank_holds():
    receiver = HeldByRank()
    assert receiver.poll() is None
    held = HeldWeights("line", 3, "digest-3", {"w": torch.ones(2)})
    receiver.hold(held)
    receiver.activated(held)
    assert receiver.poll() is held


def test_an_error_that_ends_sampling_is_reported_and_raised_where_the_learner_waits():
    reported: list[str] = []
    one = sampler(reported)
    one.check()
    one.resume(ORDER, {})
    _join("sampling")
    (text,) = reported
    assert text.startswith("rank 1, sampling: AddressError: tcp://192.0.2.1:5555 is on another machine")
    with pytest.raises(AddressError, match="not authenticated"):
        one.check()
    one.close()


def test_a_sampler_that_never_began_ends_at_once():
    one = sampler([])
    one.pause()
    one.close()


def test_the_secret_of_generators_is_not_left_to_code_that_the_learner_starts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(SECRET_VARIABLE, "mine")
    assert sampler([])._secret == "mine"
    assert sampler([])._secret is None


def _join(name: str) -> None:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(30)
