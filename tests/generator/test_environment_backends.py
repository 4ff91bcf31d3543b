"""Played rollouts over the real backend and the shipped fake: random numbers, sampling masks, versions."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from async_rl.config.generator import EnvironmentConfig, GeneratorConfig
from async_rl.config.run import FakeConfig
from async_rl.data.chat import load_tokenizer
from async_rl.errors import ModelError
from async_rl.generator.backend import Sampled
from async_rl.generator.environment_rollouts import EnvironmentRollouts, Text, TokenizerText, Trajectory
from async_rl.generator.fake import FakeBackend, FakeText
from async_rl.generator.hf.backend import TransformersBackend
from async_rl.records import TEXT_ROLE, Lease, Rollout
from tests.data.public_templates import cases, tokenizer_of
from tests.end_to_end.harness import wait_until
from tests.environments.pools import pool_of
from tests.extensions.offline.template_table import second_turn
from tests.generator.leases import make_lease
from tests.generator.tiny_model import write_model

ECHO = """
async def reset(extra_info):
    return extra_info["prompt_text"]

async def step(state, action, extra_info):
    return {"next_state": state + action + "=7+", "reward": 1.0, "score": 0.0}
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path)
    (path / "echo.py").write_text(ECHO)
    return path


def play(
    backend: Any, text: Text, directory: Path, leases: Sequence[Lease], name: str = "echo.py"
) -> dict[str, list[Rollout]]:
    """All rollouts of ``leases``, by lease and index; the backend is stepped as long as anything runs."""
    config = EnvironmentConfig(name=str(directory / name), max_turns=3, max_turn_tokens=4)
    done: dict[str, dict[int, Rollout]] = {lease.lease_id: {} for lease in leases}
    with contextlib.closing(pool_of(config)) as pool:
        rollouts = EnvironmentRollouts(backend, pool, text, config)
        for lease in leases:
            rollouts.submit(lease, rollouts.encode(lease))

        def probe() -> bool:
            if backend.num_running:
                rollouts.take(backend.step())
            for graded in rollouts.collect():
                assert graded.rollout is not None
                done[graded.lease.lease_id][graded.index] = graded.rollout
            return all(len(done[lease.lease_id]) == lease.group_size for lease in leases)

        while rollouts.num_open:
            probe()
        wait_until("all rollouts", probe)
    return {lease_id: [found[index] for index in sorted(found)] for lease_id, found in done.items()}


def transformers_backend(directory: Path, *, batch_size: int, deterministic: bool) -> TransformersBackend:
    config = GeneratorConfig(batch_size=batch_size)
    return TransformersBackend.from_files(directory, config, deterministic=deterministic, load_pretrained=True)


def same(first: Rollout, second: Rollout) -> bool:
    return first.turns == second.turns and all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for a, b in zip(first.sequences, second.sequences, strict=True)
        for name in ("token_ids", "loss_mask", "behavior_logprobs", "versions")
    )


def test_deterministic_rollouts_are_the_same_to_the_last_bit_whatever_else_is_played(directory):
    text = TokenizerText(load_tokenizer(directory))
    lease, other = make_lease("a", seed=11), make_lease("b", seed=12, group_size=3)
    alone = play(transformers_backend(directory, batch_size=2, deterministic=True), text, directory, [lease])
    beside = play(transformers_backend(directory, batch_size=3, deterministic=True), text, directory, [other, lease])
    assert all(same(a, b) for a, b in zip(alone["a"], beside["a"], strict=True))
    assert not same(alone["a"][0], alone["a"][1])
    assert all(len(rollout.turns) > 1 for rollout in alone["a"])


def test_an_end_token_that_the_tokenizer_only_marks_as_special_is_in_a_conversation_once(directory: Path):
    # As in Gemma, whose <end_of_turn> has no role such as that of eos_token.
    tokenizer: Any = load_tokenizer(directory)
    tokenizer.add_tokens([AddedToken("<stop>", special=True)], special_tokens=False)
    assert "<stop>" not in tokenizer.all_special_tokens
    ids = np.array(tokenizer.encode("2<stop>", add_special_tokens=False), np.int32)
    text = tokenizer.decode(ids.tolist(), skip_special_tokens=True)
    assert text == "2"  # as backends decode it
    trajectory = Trajectory(TokenizerText(tokenizer))
    trajectory.add_state("1+1=")
    zeros = np.zeros(len(ids), np.float32)
    trajectory.add_answer(Sampled("lease", 0, ids[:0], ids, zeros, zeros.astype(np.int32), "stop", text))
    state = "1+1=2<stop>+1="
    assert tokenizer.decode(trajectory.add_state(state).tolist(), skip_special_tokens=False) == state


def test_a_state_with_a_token_that_the_model_has_no_row_for_is_refused(directory: Path):
    tokenizer: Any = load_tokenizer(directory)
    text = TokenizerText(tokenizer, num_rows=len(tokenizer))
    tokenizer.add_tokens(["<new>"])
    assert len(text.encode("1+1=")) == len(text.encode_start("1+1=")) == 4
    for encode in (text.encode, text.encode_start):
        with pytest.raises(ModelError, match=r"a state: .* has a row for, got <new> "):
            encode("1+<new>")


@pytest.mark.parametrize("name", cases())
def test_a_public_template_s_second_turn_has_every_token_of_the_first_once(name: str):
    assert second_turn(name) in ("goes on", "new sequence")


def test_two_end_tokens_of_a_turn_are_in_a_conversation_once():
    tokenizer = tokenizer_of("cohere2")  # as in Command R7B
    text = TokenizerText(tokenizer)
    asked: list[Any] = [{"role": "user", "content": "1+1"}]
    trajectory = Trajectory(text)
    first = trajectory.add_state(text.render(asked))
    ids = np.array(tokenizer.encode("2<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", add_special_tokens=False), np.int32)
    zeros = np.zeros(len(ids), np.float32)
    trajectory.add_answer(Sampled("lease", 0, first, ids, zeros, zeros.astype(np.int32), "stop", "2"))
    state = text.render([*asked, {"role": "assistant", "content": "2"}, {"role": "user", "content": "2+2"}])
    assert trajectory.add_state(state).tolist() == text.encode(state).tolist()
    assert len(trajectory.sequences()) == 1


STARTS = """
async def reset(extra_info):
    return extra_info["begin"] or None

async def step(state, action, extra_info):
    return {"next_state": None, "reward": 1.0, "score": 0.0}
"""


@pytest.mark.parametrize(
    ("message", "begin", "has_start"),
    [
        ({"role": TEXT_ROLE, "content": "1+1="}, "", True),
        ({"role": TEXT_ROLE, "content": "1+1="}, "?", True),
        ({"role": "user", "content": "1+1"}, "", False),
        ({"role": "user", "content": "1+1"}, "?", True),
    ],
)
def test_a_text_state_begins_as_a_text_prompt_does(
    directory: Path, tmp_path: Path, message: dict[str, str], begin: str, has_start: bool
):
    tokenizer: Any = load_tokenizer(directory)
    start = ("<pad>", tokenizer.convert_tokens_to_ids("<pad>"))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<pad> $A", special_tokens=[start])
    text = TokenizerText(tokenizer)
    (tmp_path / "starts.py").write_text(STARTS)
    lease = make_lease("a", group_size=1)
    lease = replace(lease, prompt=replace(lease.prompt, messages=(message,), reward_data={"begin": begin}))
    backend = transformers_backend(directory, batch_size=1, deterministic=True)
    ((rollout,),) = play(backend, text, tmp_path, [lease], name="starts.py").values()
    (sequence,) = rollout.sequences
    assert (sequence.token_ids[0] == start[1]) == has_start


def test_sampling_masks_of_all_turns_stay_with_their_sequence(directory):
    text = TokenizerText(load_tokenizer(directory))
    lease = make_lease("a", top_k=3)
    lease = replace(lease, sampling=replace(lease.sampling, max_new_tokens=12))
    played = play(transformers_backend(directory, batch_size=4, deterministic=False), text, directory, [lease])
    for rollout in played["a"]:
        (sequence,) = rollout.sequences
        assert sequence.sampling_mask is not None
        assert len(sequence.sampling_mask) == sequence.loss_mask.sum() == sum(turn.num_tokens for turn in rollout.turns)


def test_the_fake_plays_too(directory):
    fake = FakeConfig(mean_tokens=2.0)
    backend = FakeBackend(GeneratorConfig(backend="fake", batch_size=3), fake)
    backend.activate(5, {})
    played = play(backend, FakeText(fake.vocab_size), directory, [make_lease("a"), make_lease("b", seed=9)])
    for rollout in (*played["a"], *played["b"]):
        assert [turn.num_tokens for turn in rollout.turns] == [2, 2, 2]
        assert {int(v) for s in rollout.sequences for v in s.versions[s.loss_mask]} == {5}
