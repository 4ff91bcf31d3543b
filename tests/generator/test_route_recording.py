"""The routes that the transformers backend records are those of the passes that computed its tokens."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from async_rl.config.generator import GeneratorConfig
from async_rl.errors import ModelError
from async_rl.generator.backend import Sampled
from async_rl.generator.environment_rollouts import Trajectory
from async_rl.generator.hf.backend import TransformersBackend
from async_rl.generator.hf.lockstep import LockstepRows
from async_rl.generator.hf.rows import SlotRows
from async_rl.generator.rollouts import whole_sequence
from async_rl.routes import FAMILIES, routers_of
from tests.generator.leases import make_lease
from tests.learner.moe import loaded, moe_model
from tests.learner.tiny import tiny_model


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
    place = 2 - FAMILIES[model_type].logits
    hooks = [
        router.register_forward_hook(lambda _module, _inputs, output: found.append(output[place]))
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


@pytest.mark.parametrize("has_cache", [True, False])
def test_routes_are_recorded_in_lockstep_with_a_cache_and_without(tmp_path: Path, has_cache: bool):
    # A window of 6 tokens, narrower than the prompts, which the slots do not have.
    directory = moe_model(tmp_path, "mixtral", sliding_window=6)
    backend = backend_of(directory, batch_size=3)
    assert isinstance(backend._rows, LockstepRows)
    if not has_cache:
        backend._chosen_rows = LockstepRows(backend._model, "eager", has_cache=False)
    assert backend._rows.has_cache == has_cache
    check_all_routes(backend, directory)


def test_experts_above_256_take_two_bytes(tmp_path: Path):
    backend = backend_of(moe_model(tmp_path, num_experts=300), batch_size=2)
    submit(backend, "a", "1", group_size=1)
    (sampled,) = run_all(backend)
    assert sampled.routes is not None
    assert sampled.routes.dtype == np.uint16
    assert sampled.routes.max() > 255


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


def test_only_leases_that_want_routes_get_them_and_a_dense_model_has_none(tmp_path: Path):
    backend = backend_of(moe_model(tmp_path / "moe"), batch_size=4)
    submit(backend, "a", "1", group_size=2)
    submit(backend, "b", "1", group_size=2, wants_routes=False)
    assert [s.routes is not None for s in sorted(run_all(backend), key=lambda s: s.lease_id)] == [True] * 2 + [
        False
    ] * 2
    with pytest.raises(ModelError, match="routing_replay: expected a model with experts"):
        submit(backend_of(tiny_model(tmp_path / "dense")), "a", "1")


class Words:
    """A text whose tokens are its characters."""

    def render(self, messages: Any) -> str:
        return "".join(message["content"] for message in messages)

    def encode(self, text: str, before: str = "") -> np.ndarray:
        return np.array([ord(c) for c in text], np.int32)

    def encode_start(self, text: str) -> np.ndarray:
        return self.encode(text)

    def ending(self, token_id: int) -> str:
        return ""


def test_a_token_of_several_turns_keeps_the_routes_of_the_first_turn_that_computed_it():
    trajectory = Trajectory(Words())

    def answer(prompt: np.ndarray, text: str, expert: int) -> Sampled:
        ids, zeros = np.array([ord(c) for c in text], np.int32), np.zeros(len(text), np.float32)
        routes = np.full((len(prompt) + len(ids) - 1, 1, 1), expert, np.uint8)
        return Sampled("a", 0, prompt, ids, zeros, zeros.astype(np.int32), "stop", text, routes=routes)

    trajectory.add_answer(answer(trajectory.add_state("ab"), "cd", 1))
    trajectory.add_answer(answer(trajectory.add_state("abcdef"), "gh", 2))
    (sequence,) = trajectory.sequences()
    assert sequence.routes is not None
    # a b c of turn 1, whose d was never fed; d e f g of turn 2, whose h was not.
    assert sequence.routes[:, 0, 0].tolist() == [1, 1, 1, 2, 2, 2, 2]
