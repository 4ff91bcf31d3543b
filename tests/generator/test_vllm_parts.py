"""What the vLLM backend is made of, as far as it can be told without vLLM."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_rl.config.config import Config
from async_rl.config.loading import parse_config
from async_rl.errors import EngineError, ModelError, WeightsError
from async_rl.generator.start import backends
from async_rl.generator.vllm.adapter import (
    Gathered,
    check_installed,
    check_model_runner,
    max_versions,
    num_listed,
    prepare_environment,
    sampling_parameters,
    seeds,
    token_versions,
    workers_receive,
)
from async_rl.generator.vllm.engine import KvCacheCapacity, Load, VllmEngine
from async_rl.generator.vllm.shared_staging import SharedStaging, map_memory
from async_rl.launch.checks import machine
from async_rl.launch.checks.start import Start
from async_rl.records import Sampling
from async_rl.sampling_mask import contains
from tests.generator.leases import make_lease


@dataclass
class FlatLogprobs:
    """vLLM's own, as far as we read it: entries of position i are start_indices[i] to end_indices[i]."""

    positions: list[list[tuple[int, float]]]
    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        for entries in self.positions:
            self.start_indices.append(len(self.token_ids))
            for token_id, logprob in entries:
                self.token_ids.append(token_id)
                self.logprobs.append(logprob)
            self.end_indices.append(len(self.token_ids))


def sampling(*, top_p: float = 1.0, top_k: int = 0, temperature: float = 1.0) -> Sampling:
    return Sampling(temperature, top_p, top_k, 8, 8, ())


def test_without_vllm_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ModelError, match=r"needs vllm 0\.32.*pip install \"async-rl\[vllm\]\""):
        check_installed()


@pytest.mark.parametrize(("runner", "is_refused"), [(None, False), ("v1", False), ("v2", True)])
def test_model_runner_v2_is_refused_without_triton_before_a_model_is_loaded(monkeypatch, runner, is_refused):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.triton_utils", SimpleNamespace(HAS_TRITON=False))
    refusal = pytest.raises(ModelError, match=r'experimental\.vllm\.model_runner: expected "v1"')
    with refusal if is_refused else nullcontext():
        check_model_runner(runner)


@pytest.mark.parametrize(("runner", "expected"), [(None, "kept"), ("v1", "0"), ("v2", "1")])
def test_the_model_runner_is_vllms_choice_unless_the_key_names_one(monkeypatch, runner, expected):
    monkeypatch.setattr(os, "environ", {"VLLM_USE_V2_MODEL_RUNNER": "kept"})
    prepare_environment(None, runner)
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == expected


def config(**generator: Any) -> Config:
    return parse_config({"run": {"dir": "run"}, "model": {"path": "model"}, "generator": generator}, "test")


def test_launch_refuses_generators_on_vllm_where_there_is_none_before_it_starts_anything(monkeypatch):
    monkeypatch.setattr(machine, "package_versions", dict)
    assert 'vllm: not installed, but generator.backend = "vllm" needs 0.32' in refusal(config(backend="vllm"), "launch")
    assert refusal(config(backend="vllm"), "generator")
    # Generators of other machines have engines of their own.
    assert not refusal(config(backend="vllm", count=0), "launch")
    assert not refusal(config(backend="vllm"), "learner")
    assert not refusal(config(backend="auto"), "generator")


def refusal(config: Config, role: Any) -> str:
    """Why the check of engines refuses a start; empty if it does not."""
    found = machine.check_engines(Start(config, role))
    return "".join(finding.message for finding in found if finding.state == "FAIL")


def test_a_learner_that_samples_with_vllm_is_refused_where_there_is_none_before_it_loads_a_model(monkeypatch):
    monkeypatch.setattr(machine, "package_versions", dict)
    learner = {"generate": True, "generate_backend": "vllm"}
    samples = parse_config({"run": {"dir": "run"}, "model": {"path": "model"}, "learner": learner}, "test")
    found = refusal(samples, "learner")
    assert 'learner.generate_backend = "vllm" needs 0.32' in found
    assert found.endswith('or set learner.generate_backend = "transformers"')
    assert not refusal(samples, "generator")


@pytest.mark.parametrize(
    ("backend", "is_installed", "device", "expected"),
    [
        ("auto", True, "cuda:0", "vllm"),
        ("auto", True, None, "transformers"),
        ("auto", False, "cuda:0", "transformers"),
        ("vllm", False, None, "vllm"),
        ("transformers", True, "cuda:0", "transformers"),
    ],
)
def test_auto_is_vllm_only_with_cuda_and_vllm(monkeypatch, backend, is_installed, device, expected):
    monkeypatch.setattr(backends, "find_spec", lambda name: object() if is_installed else None)
    monkeypatch.setattr(backends, "cuda_device", lambda config: device)
    assert backends.resolve_backend(config(backend=backend)) == expected


@pytest.mark.parametrize(
    ("device", "settings", "expected"),
    [
        ("cpu", {"generator": {"tensor_parallel_size": 2}, "weights": {"transport": "tcp"}}, True),
        ("cuda:0", {}, True),
        ("cuda:0", {"generator": {"double_buffer": False}}, False),
        ("cuda:0", {"generator": {"tensor_parallel_size": 2}}, False),
        ("cuda:0", {"weights": {"transport": "tcp"}}, False),
        ("cuda:0", {"weights": {"port": 5556}}, False),
        ("cuda:0", {"lora": {"rank": 4, "publish": "adapters"}}, False),
    ],
)
def test_workers_on_a_gpu_receive_if_each_has_memory_and_a_gpu_for_itself(device, settings, expected):
    raw = {"run": {"dir": "run"}, "model": {"path": "model"}, **settings}
    assert workers_receive(parse_config(raw, "test"), device=device) == expected


@pytest.mark.parametrize(("max_staleness", "expected"), [(0, 2), (3, 5), (14, 16), (100, 16)])
def test_the_versions_of_the_bound_and_one_more_are_in_flight_but_no_more_than_16(max_staleness, expected):
    raw = {"run": {"dir": "run"}, "model": {"path": "model"}, "queue": {"max_staleness": max_staleness}}
    assert max_versions(parse_config(raw, "test")) == expected


def test_another_vllm_than_the_supported_one_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.31.2"))
    with pytest.raises(ModelError, match=r"expected vLLM 0\.32\.\*, got 0\.31\.2"):
        check_installed()


def test_seeds_of_a_lease_and_of_the_next_differ_and_are_signed_63_bit_numbers():
    numbers = [n for seed in (7, 8, (5 << 32) + 7) for n in seeds(make_lease(group_size=64, seed=seed))]
    assert len(set(numbers)) == 3 * 64
    assert all(0 <= n < 2**63 for n in numbers)
    assert seeds(make_lease(group_size=2, seed=7)) == numbers[:2]


def test_logprobs_are_asked_for_as_many_as_a_sampling_mask_can_have():
    assert num_listed(sampling(), 150_000) == 0
    assert num_listed(sampling(top_k=20), 150_000) == 28
    assert num_listed(sampling(top_k=20, top_p=0.9), 24) == 24
    assert num_listed(sampling(top_p=0.9), 4096) == 4096
    assert num_listed(sampling(top_p=0.9, temperature=0.0), 150_000) == 0
    with pytest.raises(ModelError, match=r"at most 4096 tokens, of a vocabulary of 150000; set sampling\.top_k"):
        num_listed(sampling(top_p=0.9), 150_000)


def test_a_temperature_that_vllm_would_raise_is_refused(monkeypatch):
    fake = SimpleNamespace(SamplingParams=dict, RequestOutputKind=SimpleNamespace(DELTA=1))
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", fake)
    found = sampling_parameters(sampling(temperature=0.01), 5, listed=0, eos_ids={4, 2})
    assert found["stop_token_ids"] == [2, 4]
    assert found["skip_special_tokens"] is False  # else vLLM would not find a stop string that is one
    with pytest.raises(ModelError, match=r"temperature 0\.009: vLLM can't sample at temperatures between 0 and 0\.01"):
        sampling_parameters(sampling(temperature=0.009), 5, listed=0, eos_ids={4, 2})


def test_pieces_of_an_answer_add_up_and_finite_logprobs_are_the_sampling_mask():
    gathered = Gathered(vocab_size=64)
    gathered.add([7], FlatLogprobs([[(7, -0.5), (7, -0.5), (3, -1.0), (9, -np.inf)]]))
    gathered.add(
        [3, 9], FlatLogprobs([[(3, -0.1), (3, -0.1), (1, -np.inf)], [(9, -2.0), (4, -0.2), (9, -2.0), (0, -np.inf)]])
    )
    token_ids, logprobs = gathered.arrays()
    assert (token_ids.dtype, logprobs.dtype) == (np.int32, np.float32)
    assert token_ids.tolist() == [7, 3, 9]
    np.testing.assert_allclose(logprobs, [-0.5, -0.1, -2.0])
    kept = gathered.sampling_mask()
    assert kept is not None
    sets = [[t for t in range(64) if contains(kept, np.full(3, t, np.int32))[i]] for i in range(3)]
    assert sets == [[3, 7], [3], [4, 9]]


def test_a_sampling_mask_that_may_go_on_beyond_the_list_is_an_error():
    # Three tokens listed and all kept: a fourth with the logit of the third would not be seen.
    with pytest.raises(EngineError, match=r"the 3 most likely tokens.*raise sampling\.top_k"):
        Gathered(vocab_size=64).add([7], FlatLogprobs([[(7, -0.5), (3, -1.0), (9, -2.0)]]))
    # Of a vocabulary of three nothing is left to be seen.
    whole = Gathered(vocab_size=3)
    whole.add([1], FlatLogprobs([[(1, -0.5), (0, -1.0), (2, -2.0)]]))
    kept = whole.sampling_mask()
    assert kept is not None
    assert kept.sizes.tolist() == [0]


def test_logprobs_of_other_tokens_than_the_sampled_ones_are_an_error():
    with pytest.raises(EngineError, match="log-probabilities of 2 tokens, got 1"):
        Gathered(None).add([7, 8], FlatLogprobs([[(7, -0.5)]]))
    with pytest.raises(EngineError, match="log-probability of the sampled token 7, got that of 8"):
        Gathered(None).add([7], FlatLogprobs([[(8, -0.5)]]))


def span(version: str, start: int, end: int) -> SimpleNamespace:
    return SimpleNamespace(version=version, start=start, end=end)


def test_spans_become_a_version_a_token_and_must_cover_all():
    assert token_versions([span("3", 0, 2), span("5", 2, 5)], 5).tolist() == [3, 3, 5, 5, 5]
    assert token_versions([], 0).tolist() == []
    for spans in (
        None,
        [span("3", 0, 2)],
        [span("3", 0, 2), span("4", 3, 5)],
        [span("default", 0, 5)],
        [span("3", 1, 5)],
        [span("3", 0, 6)],
    ):
        with pytest.raises(EngineError, match="weight version of each of 5 tokens, as spans"):
            token_versions(spans, 5)


def test_slots_are_as_many_as_the_cache_holds():
    capacity = KvCacheCapacity(64)
    assert capacity.max_running == 64
    # 16 sequences hold a twelfth of the cache: 64 would hold a third.
    capacity.observe(16, 1 / 12)
    assert capacity.max_running == 64
    # 16 hold half of it: 0.9 / (0.5 / 16) = 28.8.
    capacity.observe(16, 0.5)
    assert capacity.max_running == 28
    capacity.observe(0, 0.0)
    assert capacity.max_running == 28
    # The need is forgotten slowly, so that a lull doesn't fetch leases that will not fit.
    capacity.observe(28, 0.28)
    assert capacity.max_running == 28
    for _ in range(400):
        capacity.observe(28, 0.28)
    assert capacity.max_running == 64


@given(st.lists(st.tuples(st.integers(0, 64), st.floats(0, 1))))
def test_there_is_always_a_slot_and_never_more_than_asked_for(observed):
    capacity = KvCacheCapacity(64)
    for num_running, usage in observed:
        capacity.observe(num_running, usage)
        assert 1 <= capacity.max_running <= 64


WEIGHTS = {
    "a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "c": torch.tensor(7, dtype=torch.int64),
}


def test_another_process_sees_every_version_that_is_written_and_the_memory_has_no_name():
    staging = SharedStaging()
    staging.write(WEIGHTS)
    program = (
        "import sys; from async_rl.generator.vllm.shared_staging import map_memory, tensors_in\n"
        f"views = tensors_in(map_memory({staging.path!r}, {staging.size_bytes}), {staging.rows!r})\n"
        "for _ in sys.stdin: print([v.tolist() for v in views.values()], flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        for factor in (1, 2):
            staging.write({name: tensor * factor for name, tensor in WEIGHTS.items()})
            print(file=reader.stdin, flush=True)
            assert reader.stdout.readline() == f"{[(tensor * factor).tolist() for tensor in WEIGHTS.values()]}\n"
        reader.stdin.close()
    staging.close()
    with pytest.raises(FileNotFoundError):
        map_memory(staging.path, staging.size_bytes)


def test_tensors_of_another_layout_are_refused_by_name():
    staging = SharedStaging()
    staging.write(WEIGHTS)
    for other in (WEIGHTS | {"b": torch.zeros(3)}, {"a": WEIGHTS["a"], "b": WEIGHTS["b"]}):
        with pytest.raises(WeightsError, match=r"the same tensors in every version of the weights, but '[bc]' was"):
            staging.write(other)
    staging.close()


class DyingLlm:
    """vLLM's ``AsyncLLM``, whose engine dies while it falls asleep: the call gets no answer."""

    errored = False
    dead_error = RuntimeError("the engine is dead")

    async def sleep(self, level: int, mode: str) -> None:
        self.errored = True
        await asyncio.Event().wait()


@pytest.mark.timeout(60)
def test_an_engine_that_dies_during_a_call_fails_it_at_once():
    loop = asyncio.new_event_loop()
    engine = VllmEngine(loop, DyingLlm(), Load())
    with pytest.raises(WeightsError, match="vLLM did not give its memory up: RuntimeError: the engine is dead"):
        engine.sleep(keeps_weights=False)
    assert not engine.is_asleep
    loop.close()
