"""The vLLM backend, on the real engine, against plain full forward passes of the same tiny model (no cache)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from async_rl.errors import ModelError, WeightsError
from async_rl.queue.parity import ProbeSequence
from tests.generator.backend_checks import CUTS, PROMPTS, check_cut, check_ends, check_greedy, check_nan, check_stops
from tests.generator.leases import run_all, submit
from tests.generator.tiny_model import scores
from tests.vllm.tiny import (
    EOS,
    TOLERANCE,
    assert_scored_by,
    at_version_3,
    engine,
    make_model,
    weights_of,
    write_files,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_files(tmp_path_factory.mktemp("model"))
    # What a model's author may have left there: none of it may reach the samples.
    hidden = {"temperature": 0.1, "top_k": 1, "top_p": 0.1, "min_p": 0.9, "repetition_penalty": 9.0, "eos_token_id": 5}
    (path / "generation_config.json").write_text(json.dumps(hidden))
    return path


@pytest.fixture(scope="module")
def started(directory: Path) -> Iterator:
    with engine(directory) as backend:
        with pytest.raises(RuntimeError, match="before the first activate"):
            submit(backend, "a")
        yield backend


@pytest.fixture
def backend(started) -> Iterator:
    yield from at_version_3(started)


def steps_until(backend, enough) -> list:
    """Steps until ``enough(progress)``, or until nothing runs; what they finished."""
    finished = []
    while backend.num_running and not enough(backend.progress()):
        finished += backend.step()
    return finished


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_logprobs_are_those_of_a_full_forward_pass_at_the_temperature(backend, temperature):
    for i, prompt in enumerate(PROMPTS):
        submit(backend, str(i), prompt, group_size=3, temperature=temperature, max_new_tokens=10 + 17 * i, seed=i)
    finished = run_all(backend)
    assert finished.keys() == {(str(i), j) for i in range(4) for j in range(3)}
    assert assert_scored_by({3: make_model(0)}, finished.values(), temperature) == 0
    assert len({s.token_ids.tobytes() for s in finished.values()}) > 6


def test_seeds_are_of_lease_and_index_whoever_samples_beside(backend):
    submit(backend, "a", PROMPTS[1], group_size=3, seed=11, max_new_tokens=24)
    alone = run_all(backend)
    submit(backend, "before", PROMPTS[3], group_size=5, seed=1, temperature=0.5, max_new_tokens=9)
    submit(backend, "a", PROMPTS[1], group_size=3, seed=11, max_new_tokens=24)
    # The next lease's seed is the next number: its samples are not these shifted by one.
    submit(backend, "next", PROMPTS[1], group_size=3, seed=12, max_new_tokens=24)
    crowd = run_all(backend)
    for index in range(3):
        assert crowd["a", index].token_ids.tolist() == alone["a", index].token_ids.tolist()
    ids = [crowd[name, index].token_ids.tobytes() for name in ("a", "next") for index in range(3)]
    assert len(set(ids)) == 6


def test_it_does_what_every_engine_must_do(backend):
    check_greedy(backend, make_model(0), TOLERANCE)
    # 5 is what generation_config.json calls an end of sequence, too, as in the transformers backend.
    check_ends(backend, EOS, 5)
    check_stops(backend)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_sampling_masks_are_exactly_what_min_p_top_k_and_top_p_left(backend, cut):
    check_cut(backend, make_model(0), cut, TOLERANCE)


def test_cancel_stops_the_engine_and_leaves_the_others_as_they_were(backend):
    submit(backend, "stays", PROMPTS[1], group_size=2, seed=3, max_new_tokens=20)
    expected = run_all(backend)
    submit(backend, "stays", PROMPTS[1], group_size=2, seed=3, max_new_tokens=20)
    submit(backend, "goes", PROMPTS[3], group_size=100, seed=4, max_new_tokens=400)
    finished = steps_until(backend, lambda progress: progress.get("goes", 0) > 100)
    backend.cancel("goes")
    got = {(s.lease_id, s.index): s for s in finished if s.lease_id == "stays"} | run_all(backend)
    assert {k: v.token_ids.tolist() for k, v in got.items()} == {k: v.token_ids.tolist() for k, v in expected.items()}
    assert backend._engine.load.num_running <= 2  # answers of 400 tokens would still be running


def test_kept_keys_and_values_are_those_of_the_old_weights_until_the_sequence_ends(backend):
    old, new = make_model(0), make_model(1)
    submit(backend, "a", PROMPTS[1], group_size=8, max_new_tokens=200, seed=5)
    steps_until(backend, lambda progress: progress.get("a", 0) > 8 * 30)
    backend.activate(4, weights_of(1))
    submit(backend, "b", PROMPTS[1], group_size=2, max_new_tokens=20, seed=6)
    finished = run_all(backend)
    swapped = [s for (name, _), s in finished.items() if name == "a" and set(s.versions.tolist()) == {3, 4}]
    assert swapped
    for sampled in swapped:
        first = int((sampled.versions == 3).sum())
        np.testing.assert_allclose(sampled.logprobs[:first], scores(old, sampled)[:first], atol=TOLERANCE)
        # The first token of the new weights: they fed the one before it, over keys and values of the old ones.
        with torch.no_grad():
            fed = np.concatenate([sampled.prompt_ids, sampled.token_ids[:first]]).astype(np.int64)
            ids = torch.tensor(fed[None])
            cache = old(input_ids=ids[:, :-1], use_cache=True).past_key_values
            logits = new(input_ids=ids[:, -1:], past_key_values=cache, use_cache=True).logits[0, -1]
        expected = float(torch.log_softmax(logits, -1)[int(sampled.token_ids[first])])
        assert sampled.logprobs[first] == pytest.approx(expected, abs=TOLERANCE)
        assert np.abs(sampled.logprobs[first:] - scores(new, sampled)[first:]).max() > 1e-3
    for index in range(2):
        # What began after the swap has nothing of the old weights, the prompt's cache neither.
        np.testing.assert_allclose(finished["b", index].logprobs, scores(new, finished["b", index]), atol=TOLERANCE)


def sleep_and_lose_the_weights(backend) -> None:
    """What a GPU's engine does when it sleeps. vLLM's CPU build keeps its memory, so the test overwrites it."""
    held = dict(backend.digests())
    backend.sleep()
    engine = backend._engine
    engine._run(engine._llm.collective_rpc("reset_weights"))
    assert engine.digests() != held


@pytest.mark.parametrize("next_version", [3, 4])
def test_sequences_go_on_after_the_engine_has_slept_with_the_same_or_the_next_version(backend, next_version):
    """Their keys and values are computed again, by the version with which the engine wakes."""
    models = {3: make_model(0), 4: make_model(1)}
    for name in ("a", "stopped"):
        submit(backend, name, PROMPTS[1], group_size=8, max_new_tokens=200, seed=5)
    steps_until(backend, lambda progress: min(progress.values()) > 8 * 20)
    sleep_and_lose_the_weights(backend)
    num_tokens = backend.num_tokens
    backend.cancel("stopped")
    submit(backend, "later", PROMPTS[0], group_size=2, max_new_tokens=20, seed=6)
    assert backend.num_tokens == num_tokens, "nothing is sampled while it sleeps"
    if next_version != 3:
        backend.activate(next_version, weights_of(1))
    finished = run_all(backend)
    assert {name for name, _ in finished} == {"a", "later"}
    assert {v for s in finished.values() for v in s.versions.tolist()} == {3, next_version}
    assert_scored_by(models, finished.values())


def test_an_engine_that_sleeps_wakes_to_score_tokens_and_to_report_its_digests(backend):
    given = ProbeSequence(np.arange(3, 23, dtype=np.int32), 8)
    held, scored = dict(backend.digests()), backend.score_tokens([given], 1.0)
    sleep_and_lose_the_weights(backend)
    np.testing.assert_allclose(backend.score_tokens([given], 1.0), scored, atol=TOLERANCE)
    sleep_and_lose_the_weights(backend)
    assert backend.digests() == held


def test_an_older_version_of_another_lineage_replaces_a_newer_one(backend):
    backend.activate(9, weights_of(1))
    backend.activate(2, weights_of(2))
    submit(backend, "a", group_size=2)
    assert_scored_by({2: make_model(2)}, run_all(backend).values())


def test_missing_unknown_and_misshaped_tensors_are_refused_and_nothing_changes(backend):
    good, name = weights_of(1), "model.layers.0.mlp.up_proj.weight"
    for wrong, message in (
        ({k: v for k, v in good.items() if k != name}, r"missing \['model.layers.0.mlp.up_proj.weight'\]"),
        (good | {"extra": torch.zeros(1)}, r"unknown \['extra'\]"),
        (good | {name: good[name].T}, r"up_proj.weight: expected shape \[128, 64\], got \[64, 128\]"),
        (good | {name: good[name].bfloat16()}, "expected the same tensors in every version of the weights"),
    ):
        with pytest.raises(WeightsError, match=message):
            backend.activate(4, wrong)
    assert backend.version == 3
    submit(backend, "a", group_size=1)
    assert_scored_by({3: make_model(0)}, run_all(backend).values())


def test_what_the_engine_cannot_do_is_refused_by_name(backend):
    with pytest.raises(ModelError, match=r"engine holds at most 464; lower sampling\.max_new_tokens"):
        submit(backend, "a", max_new_tokens=600)
    with pytest.raises(ModelError, match=r"temperature 0\.001: vLLM can't sample at temperatures between 0 and 0\.01"):
        submit(backend, "a", temperature=0.001)
    assert backend.num_running == 0


def test_weights_that_give_nan_are_refused_when_they_have_sampled(backend):
    check_nan(backend, weights_of(1))
