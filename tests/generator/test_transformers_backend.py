"""The transformers backend against plain full forward passes of the same tiny model (eager attention, no cache)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from async_rl.config.generator import GeneratorConfig
from async_rl.errors import ModelError
from async_rl.generator.hf.backend import TransformersBackend
from async_rl.sampling_mask import SamplingMask, contains
from tests.generator.backend_checks import (
    CUTS,
    PROMPTS,
    check_cut,
    check_ends,
    check_greedy,
    check_nan,
    check_stops,
)
from tests.generator.leases import make_lease, run_all, submit
from tests.generator.tiny_model import CHARACTERS, TEMPLATE, make_model, scores, weights_of, write_model
from tests.learner.tiny import add_token

pytestmark = pytest.mark.usefixtures("one_thread")

EOS = 1


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path)
    return path


@pytest.fixture
def make_backend(directory: Path) -> Callable[..., TransformersBackend]:
    def make(
        max_running: int = 8, seed: int | None = 0, *, deterministic: bool = False, **engine: Any
    ) -> TransformersBackend:
        config = GeneratorConfig(batch_size=max_running, **engine)
        backend = TransformersBackend.from_files(directory, config, deterministic=deterministic)
        if seed is not None:
            backend.activate(3, weights_of(make_model(seed)))
        return backend

    return make


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_logprobs_of_ragged_refilled_groups_equal_a_full_forward_pass(make_backend, temperature):
    # 4 groups of 3 over 5 slots: groups are split over refills, prompts and answers differ in length.
    backend, model = make_backend(max_running=5), make_model(0)
    for i, prompt in enumerate(PROMPTS):
        submit(backend, str(i), prompt, group_size=3, temperature=temperature, max_new_tokens=10 + 17 * i, seed=i)
    # A prompt of one token needs no prefill.
    backend.submit(make_lease("4", group_size=3, temperature=temperature), np.array([9], np.int32))
    finished = run_all(backend)
    assert finished.keys() == {(str(i), j) for i in range(5) for j in range(3)}
    for sampled in finished.values():
        np.testing.assert_allclose(sampled.logprobs, scores(model, sampled, temperature), atol=1e-5)
        assert sampled.versions.tolist() == [3] * len(sampled.token_ids)
        assert (sampled.prompt_ids.dtype, sampled.token_ids.dtype) == (np.int32, np.int32)
        assert (sampled.logprobs.dtype, sampled.versions.dtype) == (np.float32, np.int32)
    assert len({s.token_ids.tobytes() for s in finished.values()}) > 6


def test_deterministic_mode_gives_the_same_bits_wherever_the_weights_lie(make_backend):
    def at_odd_address(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)

    weights = weights_of(make_model(0))
    finished = []
    for given in (weights, {name: at_odd_address(tensor) for name, tensor in weights.items()}):
        backend = make_backend(max_running=6, seed=None, deterministic=True)
        backend.activate(3, given)
        submit(backend, "x", group_size=6, seed=11, max_new_tokens=60)
        finished.append(run_all(backend))
    for key, sampled in finished[0].items():
        assert sampled.token_ids.tobytes() == finished[1][key].token_ids.tobytes()
        assert sampled.logprobs.tobytes() == finished[1][key].logprobs.tobytes()


def test_new_weights_score_from_the_next_step_on_and_keep_the_cache(make_backend):
    backend, old, new = make_backend(max_running=2), make_model(0), make_model(1)
    submit(backend, "a", PROMPTS[1], group_size=1, max_new_tokens=12, seed=5)
    backend._is_eos_V[:] = False
    for _ in range(5):
        assert backend.step() == []
    backend.activate(4, weights_of(new))
    sampled = run_all(backend)["a", 0]
    assert sampled.versions.tolist() == [3] * 5 + [4] * 7
    np.testing.assert_allclose(sampled.logprobs[:5], scores(old, sampled)[:5], atol=1e-5)
    # The sixth token: new weights fed the fifth token, over keys and values of the old ones for all before it.
    with torch.no_grad():
        ids = torch.tensor(np.concatenate([sampled.prompt_ids, sampled.token_ids[:5]])[None].astype(np.int64))
        cache = old(input_ids=ids[:, :-1], use_cache=True).past_key_values
        logits = new(input_ids=ids[:, -1:], past_key_values=cache, use_cache=True).logits[0, -1]
    expected = torch.log_softmax(logits, -1)[int(sampled.token_ids[5])]
    assert sampled.logprobs[5] == pytest.approx(float(expected), abs=1e-5)
    assert abs(float(scores(old, sampled)[5]) - sampled.logprobs[5]) > 1e-3


def test_it_does_what_every_engine_must_do(make_backend):
    check_greedy(make_backend(), make_model(0))
    check_ends(make_backend(), EOS)
    check_stops(make_backend())
    check_nan(make_backend(), weights_of(make_model(1)))


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_cut_distribution_is_the_one_that_was_sampled_and_scored(make_backend, cut: dict[str, Any]):
    check_cut(make_backend(), make_model(0), cut)


def allowed_counts(kept: SamplingMask) -> list[int]:
    vocabulary = range(len(CHARACTERS) + 3)
    return np.sum([contains(kept, np.full(len(kept), token, np.int32)) for token in vocabulary], axis=0).tolist()


def test_only_rows_that_do_not_keep_all_carry_sampling_masks_and_keep_them_when_others_leave(make_backend):
    # Answers end at different steps, so rows move to other slots with what they have gathered.
    backend, alone = make_backend(max_running=8), make_backend(max_running=8)
    submit(backend, "plain", group_size=3, max_new_tokens=5, seed=1)
    submit(backend, "greedy", group_size=2, top_k=2, temperature=0.0, max_new_tokens=9, seed=2)
    submit(backend, "evaluation", group_size=1, top_k=2, max_new_tokens=9, seed=4, kind="eval")
    for one in (backend, alone):
        submit(one, "k", group_size=2, top_k=7, top_p=0.9, max_new_tokens=30, seed=3)
    finished, expected = run_all(backend), run_all(alone)
    for (lease_id, index), sampled in finished.items():
        if lease_id != "k":
            assert sampled.sampling_mask is None
            continue
        assert sampled.sampling_mask is not None
        assert max(allowed_counts(sampled.sampling_mask)) <= 7
        other = expected[lease_id, index]
        assert other.sampling_mask is not None
        assert sampled.token_ids.tolist() == other.token_ids.tolist()
        assert sampled.sampling_mask.words.tolist() == other.sampling_mask.words.tolist()


def test_tokens_are_drawn_with_their_probabilities(make_backend):
    # 2048 first tokens of one prompt; each frequency within 5 standard deviations of its probability.
    backend, model = make_backend(max_running=256), make_model(0)
    submit(backend, "a", group_size=1024, max_new_tokens=1, seed=3)
    submit(backend, "b", group_size=1024, max_new_tokens=1, seed=4)
    finished = run_all(backend)
    prompt = torch.tensor(next(iter(finished.values())).prompt_ids[None].astype(np.int64))
    with torch.no_grad():
        expected = model(input_ids=prompt).logits[0, -1].softmax(-1).numpy()
    counts = np.bincount([int(s.token_ids[0]) for s in finished.values()], minlength=len(expected))
    deviation = np.sqrt(expected * (1 - expected) * 2048)
    assert (np.abs(counts - 2048 * expected) <= 5 * deviation + 1).all()


def test_progress_counts_sampled_tokens_by_lease(make_backend):
    backend = make_backend(max_running=3)
    backend._is_eos_V[:] = False
    for lease_id, max_new_tokens in (("a", 4), ("b", 6)):
        submit(backend, lease_id, group_size=2, max_new_tokens=max_new_tokens)
    for progress in ({"a": 2, "b": 1}, {"a": 4, "b": 2}, {"a": 6, "b": 3}):  # three slots: one sample of b waits
        backend.step()
        assert backend.progress() == progress


def test_a_prompt_with_a_token_that_the_model_has_no_row_for_is_refused(tmp_path: Path):
    write_model(tmp_path)
    add_token(tmp_path, "<new>")
    backend = TransformersBackend.from_files(tmp_path, GeneratorConfig())
    with pytest.raises(ModelError, match=r"a prompt: .* embedding of 46 rows has a row for, got <new> \(46\)"):
        backend.encode_prompt([{"role": "user", "content": "1<new>"}])
    assert len(backend.encode_prompt([{"role": "user", "content": "1"}])) == 2


def test_what_the_prompt_opens_is_reported_and_special_tags_stay_and_may_stop(tmp_path: Path):
    write_model(tmp_path)
    raw, tags = (tmp_path / "tokenizer.json").read_text(), {letter: f"<{letter}>" for letter in "abcdefghij"}
    for letter, tag in tags.items():  # a random model samples many
        raw = raw.replace(f'"{letter}":', f'"{tag}":')
    (tmp_path / "tokenizer.json").write_text(raw)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tokenizer.add_tokens([AddedToken(tag, special=True) for tag in tags.values()])
    tokenizer.chat_template = TEMPLATE.replace("}=", "}+<a>")
    tokenizer.save_pretrained(tmp_path)
    backend = TransformersBackend.from_files(tmp_path, GeneratorConfig(batch_size=8))
    backend.activate(0, weights_of(make_model(0)))
    submit(backend, "a", group_size=40, max_new_tokens=40, temperature=2.0, stop=("<b>",))
    finished = run_all(backend).values()
    assert {one.prompt_opened for one in finished} == {"<a>"}
    assert any("<c>" in one.text for one in finished)
    stopped = [one for one in finished if "<b>" in one.text]
    assert stopped
    assert all(one.text.endswith("<b>") and one.finish_reason == "stop" for one in stopped)
