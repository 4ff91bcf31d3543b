"""A generator in a rank of the learner: its config, its weights, and how it fails and ends."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from async_rl.colocated.sampler import LearnerSampler, _engine_config, engine_environment
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
    # vLLM gets its device from the environment, and no memory for a second version.
    vllm = {"generate": True, "generate_backend": "vllm"}
    config = make_config("run", learner=vllm, generator={"backend": "transformers", "devices": [4]})
    engine = _engine_config(config, torch.device("cuda", 2)).generator
    assert (engine.backend, engine.devices, engine.double_buffer) == ("vllm", None, False)


@pytest.mark.parametrize(
    ("visible", "device", "expected"),
    [
        (None, torch.device("cuda", 1), "1"),
        ("4,7", torch.device("cuda", 1), "7"),
        ("4,7", CPU, "4,7"),
        (None, CPU, None),
    ],
)
def test_an_engines_processes_see_the_ranks_device_and_are_no_ranks(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, device: torch.device, expected: str | None
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for name in ("RANK", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "1")
    before = dict(os.environ)
    with engine_environment(device):
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == expected
        assert not os.environ.keys() & {"RANK", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"}
        os.environ["KEPT_BY_THE_ENGINE"] = "1"
        os.environ["LOCAL_WORLD_SIZE"] = "1"  # vLLM's CPU build sets it in this process
    assert os.environ.pop("KEPT_BY_THE_ENGINE") == "1"
    assert dict(os.environ) == before


def test_an_error_that_ends_sampling_is_reported_and_raised_where_the_learner_waits():
    reported: list[str] = []
    one = sampler(reported)
    one.check()
    one.resume(ORDER, [])
    _join("sampling")
    (text,) = reported
    assert text.startswith("rank 1, sampling: AddressError: tcp://192.0.2.1:5555 is on another machine")
    with pytest.raises(AddressError, match="not authenticated"):
        one.check()
    one.close()


def test_a_sampler_that_keeps_its_device_does_not_hold_up_the_learners_end(monkeypatch: pytest.MonkeyPatch):
    """Its engine is being built, or what its thread closes before the engine takes long."""
    monkeypatch.setattr("async_rl.colocated.sampler._END_S", 0.05)
    one, ended = sampler([]), threading.Event()

    def sample(order: SamplingOrder) -> None:
        with one._device.turn():
            one._device.keep(lambda: None)
        ended.wait(30)

    monkeypatch.setattr(one, "_sample", sample)
    one.resume(ORDER, None)
    while not one._device._is_used:
        pass
    one.close()
    assert any(thread.name == "sampling" for thread in threading.enumerate()), "it goes on, and nobody waits for it"
    ended.set()
    _join("sampling")
    one.pause()


def test_the_secret_of_generators_is_not_left_to_code_that_the_learner_starts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(SECRET_VARIABLE, "mine")
    assert sampler([])._secret == "mine"
    assert sampler([])._secret is None


def _join(name: str) -> None:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(30)
