"""Agents that call vLLM by OpenAI's own client, with Qwen3's chat template and a token for each byte."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from async_rl.config.generator import EnvironmentConfig
from async_rl.config.loading import parse_config
from async_rl.environments.pool import EnvironmentPool
from async_rl.generator.agents.front_process import Front
from async_rl.generator.agents.rollouts import AgentRollouts
from async_rl.generator.rollouts import Graded
from async_rl.generator.vllm.backend import VllmBackend
from async_rl.records import TokenSequence
from async_rl.rewards.records import RewardOutput
from tests.data.public_templates import tokenizer_of
from tests.generator.leases import make_lease
from tests.generator.scripted import CharacterText, InlineGrader
from tests.generator.tiny_model import weights_of
from tests.vllm.tiny import DEVICE, TINY, TOLERANCE

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

MAX_NEW, MAX_PROMPT = 300, 1500
AGENT = """
import asyncio, json, os

from openai import AsyncOpenAI, OpenAI

TOOLS = [{"type": "function", "function": {"name": "add", "description": "a + b", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}}]
IDS = {"logprobs": True, "extra_body": {"return_token_ids": True}}


def note(kind, prompt, choice):
    logprobs = [one.logprob for one in choice.logprobs.content]
    with open(os.path.join(os.path.dirname(__file__), "said"), "a") as file:
        file.write(json.dumps([kind, prompt, choice.token_ids, logprobs]) + "\\n")


async def run(task):
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
        messages = [{"role": "user", "content": "2+3?"}]
        for _ in range(3):
            got = await client.chat.completions.create(
                model="m", messages=messages, tools=TOOLS, max_tokens=40, **IDS)
            note("turn", got.prompt_token_ids, got.choices[0])
            messages += [got.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "More."}]
        one = [{"role": "user", "content": "One?"}]
        got = await client.chat.completions.create(model="m", messages=one, n=4, max_tokens=8, seed=7, **IDS)
        for choice in got.choices:
            note("choice", got.prompt_token_ids, choice)
        chunks = await client.chat.completions.create(model="m", messages=one, max_tokens=6, stream=True)
        assert [chunk async for chunk in chunks]

    def ask():
        with OpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
            return client.chat.completions.create(model="m", messages=one, max_tokens=5, **IDS)

    got = await asyncio.to_thread(ask)
    note("sync", got.prompt_token_ids, got.choices[0])
    return 1.0
"""


def model_of(seed: int, vocab_size: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocab_size, num_key_value_heads=2, max_position_embeddings=4096, initializer_range=0.15,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, **TINY,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()


class World:
    """One lease at a time, played by ``AGENT`` over a real engine."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        tokenizer = tokenizer_of("qwen3")
        self.models = {version: model_of(version, len(tokenizer)) for version in (3, 4)}
        self.models[3].config.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        section = {"backend": "vllm", "batch_size": 16, "num_threads": 1, "kv_after_update": "recompute"}
        raw = {
            "run": {"dir": "run"}, "model": {"path": "model", "dtype": "float32"},
            "sampling": {"max_new_tokens": MAX_NEW, "max_prompt_tokens": MAX_PROMPT},
            "generator": section, "experimental": {"vllm": {"kv_cache_bytes": 64 << 20}},
        }  # fmt: skip
        torch.set_num_threads(1)
        self.backend = stack.enter_context(
            closing(VllmBackend.from_files(directory, parse_config(raw, "test"), device=DEVICE))
        )
        self.backend.activate(3, weights_of(self.models[3]))
        path = directory / "agent.py"
        path.write_text(AGENT)
        self.said = directory / "said"
        environment = EnvironmentConfig(name=f"{path}:run", max_rollout_tokens=20_000)
        pool = EnvironmentPool(environment, allowed=[str(path)], digest=None, has_agents=True)
        stack.enter_context(closing(pool))
        front = stack.enter_context(closing(Front("m", MAX_NEW + MAX_PROMPT, directory)))
        grader = InlineGrader(lambda item: RewardOutput({}, 0.0))
        self.rollouts = AgentRollouts(
            self.backend, pool, front, grader, CharacterText().render, environment, vocab_size=len(tokenizer)
        )

    def play(self, group_size: int) -> list[Graded]:
        """Play one lease. New weights come while the second turn of an agent is sampled."""
        lease = make_lease("a", group_size=group_size, seed=5, max_new_tokens=MAX_NEW, max_prompt_tokens=MAX_PROMPT)
        self.rollouts.submit(lease, self.rollouts.encode(lease))
        done: list[Graded] = []
        deadline = time.monotonic() + 300
        while len(done) < group_size:
            self.rollouts.take(self.backend.step() if self.backend.num_running else [])
            done += self.rollouts.collect()
            in_second_turn = any(key.endswith("/1") and 5 < num < 35 for key, num in self.backend.progress().items())
            if in_second_turn and self.backend.version == 3:
                self.backend.activate(4, weights_of(self.models[4]))
            assert time.monotonic() < deadline, done
        return done

    def scores(self, sequence: TokenSequence) -> np.ndarray:
        """Log-probabilities of a sequence's tokens, float32 [N], each by a full pass with its own version's model."""
        found = np.zeros(len(sequence.token_ids), np.float32)
        ids = torch.tensor(sequence.token_ids[None].astype(np.int64))
        for version, model in self.models.items():
            with torch.no_grad():
                logprobs = torch.log_softmax(model(input_ids=ids).logits[0, :-1].float(), -1)
            own = torch.gather(logprobs, 1, ids[0, 1:, None])[:, 0].numpy()
            found[1:] = np.where(sequence.versions[1:] == version, own, found[1:])
        return found


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(tmp_path_factory.mktemp("model"), stack)


def test_agents_train_on_the_tokens_and_versions_that_vllm_sampled(world: World):
    done = world.play(group_size=2)
    assert [one.failure for one in done] == [None, None]
    rollouts = [one.rollout for one in done if one.rollout is not None]
    sequences = [sequence for rollout in rollouts for sequence in rollout.sequences]
    for call in map(json.loads, world.said.read_text().splitlines()):
        assert any(holds(sequence, call) for sequence in sequences), call[0]
    for rollout in rollouts:
        assert rollout.session is not None
        # Three turns; four choices, a streamed one and a sync one, whose prompt is another one.
        calls = rollout.session.calls
        assert (calls["first"], calls["continued"], calls["lost"]) == (1, 2, 0)
        assert calls["branched"] + calls["rewritten"] == 6
    for sequence in sequences:
        mask = sequence.loss_mask
        np.testing.assert_allclose(sequence.behavior_logprobs[mask], world.scores(sequence)[mask], atol=TOLERANCE)
    assert any(set(sequence.versions[sequence.loss_mask].tolist()) == {3, 4} for sequence in sequences)
    assert world.backend.num_running == 0


def holds(sequence: TokenSequence, call: tuple[str, list[int], list[int], list[float]]) -> bool:
    """Whether a call's prompt and answer are in the sequence, the answer as what is trained."""
    _, prompt, answer, logprobs = call
    whole, at = [*prompt, *answer], slice(len(prompt), len(prompt) + len(answer))
    return (
        sequence.token_ids[: len(whole)].tolist() == whole
        and bool(sequence.loss_mask[at].all())
        and np.allclose(sequence.behavior_logprobs[at], logprobs, atol=1e-6)
    )
