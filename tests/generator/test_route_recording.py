"""The routes that the transformers backend records are those of the passes that computed its tokens."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from async_rl.config.generator import GeneratorConfig
from async_rl.generator.backend import Sampled
from async_rl.generator.hf.backend import TransformersBackend
from async_rl.generator.hf.lockstep import LockstepRows
from async_rl.generator.hf.rows import SlotRows
from async_rl.generator.rollouts import whole_sequence
from async_rl.routes import FAMILIES, in_order, routers_of
from tests.generator.leases import make_lease
from tests.learner.moe import loaded, moe_model


def backend_of(directory: Path, **engine: Any) -> TransformersBackend:
    return TransformersBackend.from_files(directory, GeneratorConfig(**engine), load_pretrained=True)


def submit(backend: TransformersBackend, lease_id: str, prompt: str, *, wants_routes: bool = True, **sampling: Any):
    lease = replace(make_lease(lease_id, max_new_tokens=12, **sampling), wants_routes=wants_routes)
    backend.submit(lease, backend.encode_prompt([{"role": "user", "content": prompt}]))


def run_all(backend: TransformersBackend) -> list[Sampled]:
    found = []
    while backend.num_running:
        found += backend.step()
    return found


@torch.no_grad()
def full_routes(model: Any, sampled: Sampled) -> np.ndarray:
    """The experts that one pass over the whole text chooses, but for its last token, [P + N - 1, L, K]."""
    model_type = model.config.model_type
    found: list[torch.Tensor] = []
    hooks = [
        router.register_forward_hook(lambda _module, _inputs, output: found.append(in_order(output)[2]))
        for router in routers_of(model, model_type)
    ]
    ids = np.concatenate([sampled.prompt_ids, sampled.token_ids])[None, :-1].astype(np.int64)
    model(input_ids=torch.from_numpy(ids), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(found, dim=1).numpy()


def check_all_routes(backend: TransformersBackend, directory: Path) -> list[Sampled]:
    """Three slots for six samples of prompts of different lengths: some wait, and rows move."""
    assert backend.max_running == 3
    submit(backend, "a", "12+3", group_size=2, seed=1)
    submit(backend, "b", "a longer prompt", group_size=3, seed=2)
    backend.submit(replace(make_lease("c", group_size=1, max_new_tokens=5), wants_routes=True), np.array([7], np.int32))
    model, samples = loaded(directory), run_all(backend)
    assert len(samples) == 6
    for sampled in samples:
        assert sampled.routes is not None
        assert sampled.routes.dtype == np.uint8
        np.testing.assert_array_equal(np.sort(sampled.routes, -1), np.sort(full_routes(model, sampled), -1))
    return samples


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_recorded_routes_are_those_of_a_full_forward_pass(tmp_path: Path, model_type: str):
    directory = moe_model(tmp_path, model_type)
    backend = backend_of(directory, batch_size=3)
    # The sinks of GPT-OSS need transformers' own attention.
    assert isinstance(backend._rows, LockstepRows if model_type == "gpt_oss" else SlotRows)
    samples = check_all_routes(backend, directory)
    sequence = whole_sequence(samples[0])
    assert np.shares_memory(sequence.routes, samples[0].routes)


@pytest.mark.parametrize("kv_after_update", ["keep", "recompute"])
@pytest.mark.parametrize("window", [None, 6])
def test_routes_stay_those_of_the_weights_that_sampled(tmp_path: Path, kv_after_update: str, window: int | None):
    old, new = (moe_model(tmp_path / str(seed), "mixtral", seed=seed, sliding_window=window) for seed in range(2))
    backend = backend_of(old, batch_size=2, kv_after_update=kv_after_update)
    assert isinstance(backend._rows, SlotRows if window is None else LockstepRows)
    submit(backend, "a", "1+1", group_size=1)
    for _ in range(4):
        assert not backend.step()
    backend.activate(1, dict(loaded(new).named_parameters()))
    (sampled,) = run_all(backend)
    assert sampled.routes is not None
    # Fed before the update: the prompt and three of the four tokens sampled until then.
    num_before = len(sampled.prompt_ids) + 3
    np.testing.assert_array_equal(sampled.routes[:num_before], full_routes(loaded(old), sampled)[:num_before])
    assert len(sampled.routes) == len(sampled.prompt_ids) + len(sampled.token_ids) - 1
