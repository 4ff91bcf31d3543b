"""A generator's answer to a probe: right engines agree with a plain forward pass, wrong ones are told apart."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from async_rl.config.generator import GeneratorConfig
from async_rl.generator.fake import FakeBackend
from async_rl.generator.hf.backend import TransformersBackend
from async_rl.generator.hf.rows import SlotRows
from async_rl.generator.parity import answer_probe
from async_rl.queue.parity import Probe, ProbeSequence, compare
from tests.generator.leases import make_lease
from tests.generator.tiny_model import make_model, probe_scores, weights_of, write_model

GIVEN = (
    ProbeSequence(np.array([5, 9, 4, 7, 8, 3, 20], np.int32), 3),
    ProbeSequence(np.array([6, 30, 11], np.int32), 2),
    ProbeSequence(np.array([12, 13], np.int32), 1),
    ProbeSequence(np.arange(3, 43, dtype=np.int32), 32),
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path, 0)
    return path


def make_backend(directory: Path) -> TransformersBackend:
    return TransformersBackend.from_files(directory, GeneratorConfig(batch_size=4), dtype="float32")


def make_probe(model: PreTrainedModel, temperature: float = 1.0, *, computed_at: float | None = None) -> Probe:
    scores = probe_scores(model, GIVEN, temperature if computed_at is None else computed_at)
    return Probe("lineage", 5, temperature, GIVEN, scores, "float32")


def ready(directory: Path) -> tuple[TransformersBackend, PreTrainedModel, Mapping[str, Any]]:
    model = make_model(3)
    backend = make_backend(directory)
    backend.activate(5, weights := weights_of(model))
    return backend, model, weights


def test_scoring_leaves_what_runs_as_it_is(directory: Path):
    def sample(*, with_probe: bool) -> list[int]:
        backend, _, _ = ready(directory)
        lease = make_lease(group_size=1, max_new_tokens=12, seed=2)
        backend.submit(lease, backend.encode_prompt(lease.prompt.messages))
        while not (done := backend.step()):
            if with_probe:
                backend.score_tokens(GIVEN, 1.0)
        return done[0].token_ids.tolist()

    assert sample(with_probe=True) == sample(with_probe=False)


def test_an_engine_at_the_learners_weights_agrees(directory: Path):
    backend, model, weights = ready(directory)
    answer = answer_probe(backend, make_probe(model, 0.8), weights)
    assert answer.logprobs is not None
    assert compare(answer.logprobs, np.concatenate(probe_scores(model, GIVEN, 0.8))).max < 1e-5
    assert (answer.version, answer.backend, answer.dtype, answer.cause) == (5, "transformers", "float32", "")


Patch = pytest.MonkeyPatch


def flipped(backend: TransformersBackend, _: Patch) -> None:
    held = dict(backend._model.named_parameters())["model.embed_tokens.weight"]
    held.data = held.data.clone()
    held.data[5, 0] *= -50


def without_temperature(backend: TransformersBackend, patch: Patch) -> None:
    score = backend.score_tokens
    patch.setattr(backend, "score_tokens", lambda given, _, *mode: score(given, 1.0, *mode))


def masked(backend: TransformersBackend, patch: Patch) -> None:
    # Half of the vocabulary's probability left out: what is kept has log 2 more.
    score = backend.score_tokens
    patch.setattr(backend, "score_tokens", lambda *given: score(*given) + np.log(2))


def wrong_cache(backend: TransformersBackend, patch: Patch) -> None:
    forward = cast(SlotRows, backend._rows).forward
    prefill = forward.prefill

    def swapped(ids: torch.Tensor) -> Any:
        cache = prefill(ids)
        cache._keys = [keys.flip(2) for keys in cache._keys]
        return cache

    patch.setattr(forward, "prefill", swapped)


def rounded_head(backend: TransformersBackend, patch: Patch) -> None:
    score = backend.score_tokens
    noise = np.random.default_rng(0).normal(0, 0.5, sum(g.num_scored for g in GIVEN)).astype(np.float32)

    def rounded(given: Any, temperature: float, mode: Any = "cached_decode") -> np.ndarray:
        return score(given, temperature, mode) + (0 if mode == "float32_head" else noise)

    patch.setattr(backend, "score_tokens", rounded)


@pytest.mark.parametrize(
    ("spoil", "begin", "end"),
    [
        (flipped, "stale or corrupt tensors", "of model.embed_tokens.weight"),
        (without_temperature, "temperature: the engine gives the same at 0.7 and 1.4", "it applies none"),
        (masked, "a top-p or top-k mask", ""),
        (wrong_cache, "reuse of keys and values", ""),
        (rounded_head, "the precision of the output head", ""),
    ],
)
def test_what_is_wrong_with_an_engine_is_told(directory: Path, monkeypatch: Patch, spoil: Any, begin: str, end: str):
    backend, model, weights = ready(directory)
    spoil(backend, monkeypatch)
    answer = answer_probe(backend, make_probe(model, 0.7), weights)
    assert answer.cause.startswith(begin)
    assert answer.cause.endswith(end)


def test_a_learner_at_another_temperature_is_told(directory: Path):
    backend, model, weights = ready(directory)
    answer = answer_probe(backend, make_probe(model, 0.7, computed_at=1.0), weights)
    assert answer.cause == "temperature: asked for 0.7, the engine differs; at 1 it agrees with the learner"


def test_a_difference_that_nothing_here_explains_says_what_was_excluded(directory: Path):
    backend, _, weights = ready(directory)
    answer = answer_probe(backend, make_probe(make_model(4)), weights)
    assert answer.cause == ""
    assert len(answer.excluded) == 4


def test_a_backend_that_has_no_model_says_that_it_cant_score():
    answer = answer_probe(FakeBackend(GeneratorConfig(backend="fake")), make_probe(make_model(0)), {})
    assert (answer.logprobs, answer.backend) == (None, "FakeBackend")
