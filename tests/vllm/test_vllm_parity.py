"""Given tokens scored by the real vLLM, beside running sequences, and what the parity experiments find in it.

Each of vLLM's model runners is tested.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from async_rl.generator.parity import answer_probe
from async_rl.queue.parity import Probe, ProbeSequence
from tests.generator.leases import run_all, submit
from tests.generator.tiny_model import probe_scores
from tests.vllm.tiny import TOLERANCE, assert_scored_by, at_version_3, engine, make_model, weights_of, write_files

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

GIVEN = (
    ProbeSequence(np.arange(3, 43, dtype=np.int32), 32),
    ProbeSequence(np.array([5, 9, 4, 7, 8, 3, 20], np.int32), 3),
    ProbeSequence(np.array([12, 13], np.int32), 1),
)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, runner: str) -> Iterator:
    with engine(write_files(tmp_path_factory.mktemp("model")), runner=runner) as backend:
        yield backend


@pytest.fixture
def backend(started) -> Iterator:
    yield from at_version_3(started)


def expected(temperature: float = 1.0) -> tuple[np.ndarray, ...]:
    return probe_scores(make_model(0), GIVEN, temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("mode", ["cached_decode", "full_forward"])
def test_given_tokens_score_as_in_a_plain_forward_pass(backend, temperature, mode):
    found = backend.score_tokens(GIVEN, temperature, mode)
    np.testing.assert_allclose(found, np.concatenate(expected(temperature)), atol=TOLERANCE)


def test_scoring_beside_running_sequences_leaves_their_samples_right(backend):
    for i in range(6):
        submit(backend, str(i), group_size=2, max_new_tokens=60, seed=i)
    for _ in range(3):
        backend.step()
    np.testing.assert_allclose(backend.score_tokens(GIVEN, 1.0), np.concatenate(expected()), atol=TOLERANCE)
    finished = run_all(backend)
    assert len(finished) == 12
    assert_scored_by({3: make_model(0)}, finished.values())


def test_it_scores_nothing_while_sampling_masks_are_listed(backend):
    submit(backend, "a", group_size=2, max_new_tokens=30, top_k=5)
    assert backend.score_tokens(GIVEN, 1.0) is None
    assert all(sampled.sampling_mask is not None for sampled in run_all(backend).values())


def test_a_stale_tensor_inside_the_engine_is_named(backend):
    stale = dict(weights_of(0))
    name = "model.layers.1.mlp.down_proj.weight"
    stale[name] = weights_of(7)[name]
    backend.activate(3, stale)
    answer = answer_probe(backend, Probe("l", 3, 1.0, GIVEN, expected(), "float32"), weights_of(0))
    assert answer.cause.endswith(f"of 0:{name}")
    assert backend.score_tokens(GIVEN, 1.0) == pytest.approx(np.concatenate(expected()), abs=TOLERANCE)
