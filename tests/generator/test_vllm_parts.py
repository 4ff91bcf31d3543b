"""What the vLLM backend is made of, as far as it can be told without vLLM."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from async_rl.config.engine_arguments import check_engine_arguments
from async_rl.errors import ConfigError, EngineError, ModelError, WeightsError
from async_rl.generator.start import backends
from async_rl.generator.vllm import adapter
from async_rl.generator.vllm.adapter import (
    Gathered,
    check_installed,
    check_model_runner,
    engine_arguments,
    known_arguments,
    num_listed,
    sampling_parameters,
    token_versions,
    workers_receive,
)
from async_rl.generator.vllm.engine import KvCacheCapacity, Load, VllmEngine
from async_rl.generator.vllm.shared_staging import SharedStaging, map_memory
from async_rl.launch.checks.machine import check_engine_arguments as check_arguments_here
from async_rl.records import Sampling
from async_rl.sampling_mask import contains
from tests.config.made import a_config


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


@pytest.mark.parametrize(
    ("backend", "is_installed", "device", "expected"),
    [
        ("auto", True, "cuda:0", "vllm"),
        ("auto", True, None, "transformers"),
        ("auto", False, "cuda:0", "transformers"),
        ("vllm", False, None, "vllm"),
    ],
)
def test_auto_is_vllm_only_with_cuda_and_vllm(monkeypatch, backend, is_installed, device, expected):
    monkeypatch.setattr(backends, "find_spec", lambda name: object() if is_installed else None)
    monkeypatch.setattr(backends, "cuda_device", lambda config: device)
    assert backends.resolve_backend(a_config(generator={"backend": backend})) == expected


@pytest.mark.parametrize(
    ("device", "settings", "expected"),
    [
        ("cpu", {"generator": {"tensor_parallel_size": 2}, "weights": {"transport": "tcp"}}, True),
        ("cuda:0", {}, True),
        ("cuda:0", {"generator": {"double_buffer": False}}, False),
        ("cuda:0", {"generator": {"tensor_parallel_size": 2}}, False),
        ("cuda:0", {"weights": {"transport": "tcp"}}, False),
        ("cuda:0", {"lora": {"rank": 4, "publish": "adapters"}}, False),
        ("cpu", {"generator": {"engine": {"quantization": "fp8"}}}, False),
    ],
)
def test_workers_on_a_gpu_receive_if_each_has_memory_and_a_gpu_for_itself(device, settings, expected):
    assert workers_receive(a_config(**settings), device=device) == expected


def test_logprobs_are_asked_for_as_many_as_a_sampling_mask_can_have():
    assert num_listed(sampling(), 150_000) == 0
    assert num_listed(sampling(top_k=20), 150_000) == 28
    assert num_listed(sampling(top_k=20, top_p=0.9), 24) == 24
    assert num_listed(sampling(top_p=0.9), 4096) == 4096
    assert num_listed(sampling(top_p=0.9, temperature=0.0), 150_000) == 0
    with pytest.raises(ModelError, match=r"at most 4096 tokens, of a vocabulary of 150000; set sampling\.top_k"):
        num_listed(sampling(top_p=0.9), 150_000)


def test_end_tokens_stop_vllm_and_special_ones_are_not_skipped(monkeypatch):
    fake = SimpleNamespace(SamplingParams=dict, RequestOutputKind=SimpleNamespace(DELTA=1))
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", fake)
    found = sampling_parameters(sampling(temperature=0.01), 5, listed=0, eos_ids={4, 2})
    assert found["stop_token_ids"] == [2, 4]
    assert found["skip_special_tokens"] is False  # else vLLM would not find a stop string that is one


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


NO_TRITON = {"vllm": SimpleNamespace(), "vllm.triton_utils": SimpleNamespace(HAS_TRITON=False)}


@pytest.mark.parametrize(
    ("modules", "check", "told"),
    [
        ({"vllm": None}, check_installed, r"needs vllm 0\.32.*pip install vllm==0\.32\.0"),
        ({"vllm": SimpleNamespace(__version__="0.33.0")}, check_installed, r"got 0\.33\.0: .* vllm==0\.32\.0"),
        (NO_TRITON, lambda: check_model_runner("v2"), r'experimental\.vllm\.model_runner: expected "v1"'),
        (NO_TRITON, lambda: check_model_runner("v1"), ""),
        (NO_TRITON, lambda: check_model_runner(None), ""),
    ],
    ids=["none", "another", "no triton", "runner 1", "runner of its choice"],
)
def test_what_vllm_lacks_is_said_before_a_model_is_loaded(
    monkeypatch, modules: dict[str, Any], check: Callable[[], None], told: str
):
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(ModelError, match=told) if told else nullcontext():
        check()


@pytest.mark.parametrize(
    ("vocab_size", "token_ids", "entries", "told"),
    [
        # Three tokens listed and all kept: a fourth with the logit of the third would not be seen.
        (64, [7], [[(7, -0.5), (3, -1.0), (9, -2.0)]], r"the 3 most likely tokens.*raise sampling\.top_k"),
        (None, [7, 8], [[(7, -0.5)]], "log-probabilities of 2 tokens, got 1"),
        (None, [7], [[(8, -0.5)]], "log-probability of the sampled token 7, got that of 8"),
    ],
)
def test_logprobs_that_leave_a_doubt_are_an_error(vocab_size: Any, token_ids: Any, entries: Any, told: str):
    with pytest.raises(EngineError, match=told):
        Gathered(vocab_size).add(token_ids, FlatLogprobs(entries))
    # Of a vocabulary of three nothing is left to be seen.
    whole = Gathered(vocab_size=3)
    whole.add([1], FlatLogprobs([[(1, -0.5), (0, -1.0), (2, -2.0)]]))
    kept = whole.sampling_mask()
    assert kept is not None
    assert kept.sizes.tolist() == [0]


ENGINE = {"max_num_batched_tokens": 4096, "enable_prefix_caching": False}


def test_the_engine_gets_what_generator_engine_says_and_all_else_that_it_gets_is_refused_there(monkeypatch, tmp_path):
    monkeypatch.setattr(adapter, "known_arguments", lambda: list(ENGINE))
    monkeypatch.setitem(sys.modules, "vllm.config", SimpleNamespace(WeightTransferConfig=dict))
    monkeypatch.setitem(sys.modules, "vllm.config.lora", SimpleNamespace(MaxLoRARanks=Literal[8, 16]))
    found: dict[str, Any] = {}
    for device, lora in (("cpu", {}), ("cuda:0", {"rank": 8, "publish": "adapters"})):
        config = a_config(generator={"engine": ENGINE}, lora=lora)
        found |= engine_arguments(tmp_path, config, device=device, max_length=64, can_sleep=True)
    assert ENGINE.items() <= found.items()
    for name in found.keys() - ENGINE:
        with pytest.raises(ValueError, match=rf"{name}: expected no value, got 1; leave it out: "):
            check_engine_arguments({name: 1})


def test_names_that_the_installed_vllm_lacks_are_refused_with_near_ones(monkeypatch, tmp_path):
    config = a_config(generator={"engine": {"max_num_batch_tokens": 4096}})
    [row] = check_arguments_here(config)
    assert row.found.startswith("vLLM gets max_num_batch_tokens = 4096; vLLM is not installed here")
    place = tmp_path / "vllm" / "engine"
    place.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('it takes seconds to import')\n")
    (place / "arg_utils.py").write_text(
        "class EngineArgs:\n    max_num_batched_tokens: int = 0\n    _rank: int = 0\n"
        "class AsyncEngineArgs(EngineArgs):\n    log: bool = False\nclass Other:\n    x: int = 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert known_arguments() == ["max_num_batched_tokens", "log"]
    with pytest.raises(ConfigError, match=r"max_num_batch_tokens: .*; did you mean max_num_batched_tokens\?"):
        list(check_arguments_here(config))
