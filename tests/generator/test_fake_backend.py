"""The fake backend: its answers depend on lease seed and rollout index alone."""

from __future__ import annotations

import math
import subprocess
import sys
import time

import numpy as np
import pytest
from msgspec.structs import replace

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


def test_the_same_lease_gives_the_same_answers_in_any_company():
    alone, crowd = make_backend(max_running=8), make_backend(max_running=2)
    alone.submit(make_lease("x", group_size=3, max_new_tokens=50), prompt_of(alone))
    crowd.submit(make_lease("y", group_size=5, max_new_tokens=50, seed=1), prompt_of(crowd))
    crowd.submit(make_lease("x", group_size=3, max_new_tokens=50), prompt_of(crowd))
    expected, got = run_all(alone), run_all(crowd)
    for index in range(3):
        a, b = expected["x", index], got["x", index]
        assert a.token_ids.tobytes() == b.token_ids.tobytes()
        assert (a.text, a.finish_reason) == (b.text, b.finish_reason)
    assert len({s.token_ids.tobytes() for s in got.values()}) == 8


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
    untruncated = make_backend(max_running=512, mean_tokens=40.0, sigma=0.6)
    for i in range(8):
        untruncated.submit(make_lease(str(i), group_size=512, max_new_tokens=2000, seed=i), prompt_of(untruncated))
    # 4096 samples with a standard deviation of 40 * sqrt(exp(0.36) - 1) = 26.3: the mean is known to 0.41.
    assert np.mean([len(s.token_ids) for s in run_all(untruncated).values()]) == pytest.approx(40, abs=1.5)


def test_answers_are_right_as_often_as_asked_for_in_the_form_of_the_reward():
    backend = make_backend(max_running=1024, accuracy=0.25)
    for i in range(4):
        backend.submit(make_lease(str(i), group_size=1024, answer="42", max_new_tokens=99, seed=i), prompt_of(backend))
    right = [r"\boxed{42}" in s.text for s in run_all(backend).values()]
    # 4096 draws: standard deviation sqrt(0.25 * 0.75 / 4096) = 0.7 %.
    assert np.mean(right) == pytest.approx(0.25, abs=0.03)
    fake = FakeConfig(accuracy=1.0)
    tags = FakeBackend(GeneratorConfig(), fake, answer_form="think_answer_tags")
    tags.activate(0, {})
    tags.submit(make_lease("a", answer="42"), prompt_of(backend))
    assert {s.text.split("\n")[1] for s in run_all_of(tags)} == {"<answer> 42 </answer>"}


def test_programs_know_their_tests_as_often_as_asked_for():
    row = {"test_cases": {"inputs": ["1\n", "2\n"], "outputs": ["one\n", "two\n"]}}
    for accuracy, printed in ((1.0, "one\n\n"), (0.0, "wrong\n")):
        fake = FakeConfig(accuracy=accuracy)
        backend = FakeBackend(GeneratorConfig(), fake, answer_form="code")
        backend.activate(0, {})
        lease = make_lease("a")
        backend.submit(replace(lease, prompt=replace(lease.prompt, reward_data=row)), prompt_of(backend))
        for sampled in run_all_of(backend):
            source = sampled.text.removeprefix("```python\n").removesuffix("\n```")
            done = subprocess.run(
                [sys.executable, "-c", source], input="1\n", capture_output=True, text=True, check=True
            )
            assert done.stdout == printed


def run_all_of(backend: FakeBackend) -> list[Sampled]:
    return list(run_all(backend).values())


def test_tokens_and_logprobs_are_those_of_a_uniform_distribution():
    backend = make_backend()
    backend.submit(make_lease("a", group_size=4), prompt_of(backend))
    for sampled in run_all_of(backend):
        assert sampled.token_ids.dtype == np.int32
        assert sampled.token_ids.min() >= 0
        assert sampled.token_ids.max() < 32
        np.testing.assert_allclose(sampled.logprobs, -math.log(32), rtol=1e-6)


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


def test_cancel_gives_the_slots_to_those_in_line():
    backend = make_backend(max_running=2, mean_tokens=4.0, sigma=0.0)
    backend.submit(make_lease("a", group_size=2), prompt_of(backend))
    backend.submit(make_lease("b", group_size=2), prompt_of(backend))
    backend.step()
    backend.cancel("a")
    backend.cancel("never heard of")
    backend.step()
    assert backend.progress() == {"b": 2}
    assert {key[0] for key in run_all(backend)} == {"b"}


def test_a_step_lasts_as_long_as_asked_for_however_long_the_caller_takes_between():
    backend = make_backend(max_running=2, mean_tokens=20.0, sigma=0.0, step_time_s=0.01)
    backend.submit(make_lease("a", group_size=2, max_new_tokens=30), prompt_of(backend))
    started = time.monotonic()
    run_all(backend)
    # 20 steps of 10 ms; the upper bound only has to tell them from 20 * (10 ms + what the caller does).
    assert 0.2 <= time.monotonic() - started < 1.0


def test_prompts_are_encoded_alike_everywhere_and_within_the_vocabulary():
    ids = prompt_of(make_backend())
    assert ids.tolist() == prompt_of(make_backend()).tolist()
    assert ids.dtype == np.int32
    assert len(ids) == math.ceil(len("<user>how much is 1 + 1?<assistant>") / 4)
    assert ids.min() >= 0
    assert ids.max() < 32


def test_prompts_that_contain_a_chosen_text_always_fail():
    backend = make_backend(fails_on="1 + 1")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"experimental\.fake\.fails_on = '1 \+ 1' is in the prompt"):
            prompt_of(backend)
    assert len(backend.encode_prompt([{"role": "user", "content": "1 + 2"}]))


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


def test_what_keeps_all_carries_no_sampling_masks():
    backend = make_backend()
    backend.submit(make_lease("plain"), prompt_of(backend))
    backend.submit(make_lease("greedy", top_k=3, temperature=0.0), prompt_of(backend))
    backend.submit(make_lease("evaluation", top_k=3, kind="eval"), prompt_of(backend))
    assert all(sampled.sampling_mask is None for sampled in run_all(backend).values())
