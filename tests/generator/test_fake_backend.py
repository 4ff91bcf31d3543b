"""The fake backend: lengths, right answers, versions and sampling masks as asked for."""

from __future__ import annotations

import math

import numpy as np
import pytest

from async_rl.config.generator import GeneratorConfig
from async_rl.config.run import FakeConfig
from async_rl.generator.backend import Sampled
from async_rl.generator.fake import FakeBackend
from async_rl.sampling_mask import contains
from tests.generator.leases import make_lease


def make_backend(max_running: int = 4, version: int = 0, **fake: float | str) -> FakeBackend:
    settings = {"mean_tokens": 6.0, "sigma": 0.5, "vocab_size": 32} | fake
    backend = FakeBackend(GeneratorConfig(batch_size=max_running), FakeConfig.model_validate(settings))
    backend.activate(version, {})
    return backend


def run_all(backend: FakeBackend) -> dict[tuple[str, int], Sampled]:
    finished = {}
    while backend.num_running:
        finished |= {(s.lease_id, s.index): s for s in backend.step()}
    assert backend.progress() == {}
    return finished


def prompt_of(backend: FakeBackend) -> np.ndarray:
    return backend.encode_prompt([{"role": "user", "content": "how much is 1 + 1?"}])


def test_lengths_have_the_mean_asked_for_and_are_cut_at_the_limit():
    backend = make_backend(max_running=512, mean_tokens=40.0, sigma=0.6)
    for i in range(8):
        backend.submit(make_lease(str(i), group_size=512, max_new_tokens=80, seed=i), prompt_of(backend))
    finished = run_all(backend)
    lengths = np.array([len(s.token_ids) for s in finished.values()])
    assert lengths.max() == 80
    assert all((s.finish_reason == "length") <= (len(s.token_ids) == 80) for s in finished.values())
    # Of a log-normal with mean 40 and sigma 0.6 (mu = ln 40 - 0.18), the part above 80 is P(z > 1.455) = 7.3 %.
    share = np.mean([s.finish_reason == "length" for s in finished.values()])
    assert share == pytest.approx(0.073, abs=0.02)


def test_answers_are_right_as_often_as_asked_for_in_the_form_of_the_reward():
    backend = make_backend(max_running=1024, accuracy=0.25)
    for i in range(4):
        backend.submit(make_lease(str(i), group_size=1024, answer="42", max_new_tokens=99, seed=i), prompt_of(backend))
    right = [r"\boxed{42}" in s.text for s in run_all(backend).values()]
    # 4096 draws: standard deviation sqrt(0.25 * 0.75 / 4096) = 0.7 %.
    assert np.mean(right) == pytest.approx(0.25, abs=0.03)


def run_all_of(backend: FakeBackend) -> list[Sampled]:
    return list(run_all(backend).values())


def test_sequences_wait_for_slots_and_carry_a_version_for_each_token():
    # Two slots, three answers of four tokens; activated after two steps and again after five.
    backend = make_backend(max_running=2, mean_tokens=4.0, sigma=0.0)
    backend.submit(make_lease("a", group_size=3), prompt_of(backend))
    assert backend.num_running == 3
    finished = backend.step() + backend.step()
    assert backend.progress() == {"a": 4}
    backend.activate(1, {})
    finished += backend.step() + backend.step()
    assert [s.versions.tolist() for s in finished] == [[0, 0, 1, 1]] * 2
    assert (backend.num_running, backend.progress()) == (1, {"a": 8})
    backend.step()
    backend.activate(2, {})
    last = run_all_of(backend)
    assert [(s.index, s.versions.tolist()) for s in last] == [(2, [1, 2, 2, 2])]


@pytest.mark.parametrize(
    ("top_p", "top_k", "num_kept"), [(1.0, 5, 5), (1.0, 99, 32), (0.5, 0, 16), (0.3, 5, 2), (0.01, 0, 1)]
)
def test_of_equally_likely_tokens_top_k_and_top_p_keep_the_first(top_p: float, top_k: int, num_kept: int):
    # Of 32 tokens; 0.3 of 5 is 1.5, which takes two of them to reach.
    backend = make_backend(mean_tokens=40.0)
    backend.submit(make_lease(top_p=top_p, top_k=top_k, max_new_tokens=80), prompt_of(backend))
    for sampled in run_all(backend).values():
        assert set(sampled.token_ids.tolist()) <= set(range(num_kept))
        assert sampled.logprobs.tolist() == pytest.approx([-math.log(num_kept)] * len(sampled.token_ids))
        assert sampled.sampling_mask is not None
        assert len(sampled.sampling_mask) == len(sampled.token_ids)
        for token in range(32):
            assert contains(sampled.sampling_mask, np.full(len(sampled.sampling_mask), token, np.int32)).all() == (
                token < num_kept
            )
