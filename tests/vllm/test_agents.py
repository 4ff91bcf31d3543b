"""Agents with OpenAI's client over the real engine: what they were answered is what is trained, with its log-probs.

The model is a tiny Qwen3 of bytes, which calls a tool when asked. Full forward passes of it are the reference.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from async_rl.config.loading import parse_config
from async_rl.generator.vllm.backend import VllmBackend
from async_rl.records import Rollout, TokenSequence
from tests.extensions.agents.byte_model import LONGEST, byte_model, byte_tokenizer, memorise, write_files
from tests.extensions.agents.test_conversations import ASKED, RESULT, TOOLS
from tests.extensions.agents.world import World
from tests.vllm.tiny import DEVICE, TOLERANCE

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

NUM_NEW, NUM_PROMPT = 1024, 1024
TEMPERATURE = 0.5
LEASE: dict[str, Any] = {
    "max_new_tokens": NUM_NEW,
    "max_prompt_tokens": NUM_PROMPT,
    "temperature": TEMPERATURE,
    "seed": 7,
}
SETTINGS: dict[str, Any] = {
    "run": {"dir": "run"},
    "model": {"path": "model", "dtype": "float32"},
    "sampling": {"max_new_tokens": NUM_NEW, "max_prompt_tokens": NUM_PROMPT, "temperature": TEMPERATURE},
    "environment": {"name": "agent.py:run"},
    "generator": {
        "backend": "vllm", "serve": True, "allow_code": ["agent.py"], "batch_size": 16, "num_threads": 1,
        "kv_after_update": "recompute",
    },
    "experimental": {"vllm": {"kv_cache_bytes": 64 << 20}},
}  # fmt: skip


@dataclass(frozen=True)
class Served:
    """An engine, and the models of the versions 3 and 4."""

    backend: VllmBackend
    directory: Path
    models: dict[int, Any]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    torch.set_num_threads(1)
    model = byte_model()
    assert memorise(model) < 0.05
    later = deepcopy(model)
    with torch.no_grad():
        for parameter in later.parameters():
            parameter *= 1.05
    directory = write_files(tmp_path_factory.mktemp("model"), model)
    backend = VllmBackend.from_files(directory, parse_config(SETTINGS, "test"), device=DEVICE)
    try:
        yield Served(backend, directory, {3: model, 4: later})
    finally:
        backend.close()


@contextmanager
def world(served: Served, directory: Path, source: str) -> Iterator[World[VllmBackend]]:
    """A world at version 3, whose agent may import ``openai``."""
    served.backend.activate(3, dict(served.models[3].named_parameters()))
    with ExitStack() as stack:
        yield World(
            directory, stack, HEAD + source, served.backend, vocab_size=len(byte_tokenizer()), max_model_len=LONGEST,
            tokenizer=served.directory, timeout_s=60.0, first_reset_timeout_s=120.0, max_rollout_tokens=20_000,
        )  # fmt: skip
    assert served.backend.num_running == 0


HEAD = f"""
import openai

ASKED, RESULT, TOOLS = {ASKED!r}, {RESULT!r}, {TOOLS!r}
ALL = {{"logprobs": True, "extra_body": {{"return_token_ids": True}}}}


def told(prompt, choice):
    logprobs = [one["logprob"] for one in choice["logprobs"]["content"]]
    note(json.dumps([prompt, choice["token_ids"], logprobs, choice.get("weight_versions")]))


def told_all(answer):
    for choice in answer.choices:
        told(answer.prompt_token_ids, choice.model_dump())


def say(text):
    return [{{"role": "user", "content": text}}]
"""
CLIENTS = """
def of_sync_client(task):
    with openai.OpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        create = client.chat.completions.create
        answer = create(model="any", messages=[ASKED], tools=TOOLS, **ALL)
        told_all(answer)
        message = answer.choices[0].message
        (call,) = message.tool_calls
        result = {**RESULT, "tool_call_id": call.id}
        answer = create(model="any", messages=[ASKED, message, result], tools=TOOLS, max_tokens=40, **ALL)
        told_all(answer)
        assert answer.choices[0].message.content == "It is 5."
        chunks = list(create(model="any", messages=say("stream"), max_tokens=20, stream=True, **ALL))
        told(chunks[0].prompt_token_ids, chunks[0].choices[0].model_dump())


async def run(task):
    await asyncio.to_thread(of_sync_client, task)
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        create = client.chat.completions.create
        asked = [create(model="any", messages=say(text), max_tokens=30, n=n, **ALL) for text, n in (("a", 1), ("b", 4))]
        for answer in await asyncio.gather(*asked):
            told_all(answer)
    ids = [5, 6, 7]
    status, answer = await ask(task, ids, max_tokens=20, stop_token_ids=[2**31 - 1])
    assert (status, answer["param"]) == (400, "stop_token_ids"), answer  # vLLM's engine would not survive it
    status, answer = await ask(task, ids, max_tokens=20, stop_token_ids=[3], skip_special_tokens=False)
    assert status == 200, answer
    told(ids, answer)
    return 1.0
"""


def rollout_of(played: World[VllmBackend]) -> Rollout:
    (graded,) = played.done
    assert graded.failure is None, graded.failure
    assert graded.rollout is not None
    return graded.rollout


def logprobs_of(model: Any, sequence: TokenSequence) -> np.ndarray:
    """Each token's log-probability, float32 [N], by one pass over the whole sequence; 0 for the first one."""
    ids = torch.from_numpy(sequence.token_ids.astype(np.int64))
    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1].float() / TEMPERATURE, -1)
    return np.concatenate([[0.0], logprobs.gather(1, ids[1:, None])[:, 0].numpy()])


def check_trained(served: Served, rollout: Rollout, notes: list[str]) -> None:
    """Check that the trained tokens are those that the agent was answered, no more, with the same log-probabilities,
    which are those of a full forward pass of the version that sampled each token.
    """
    answers = [json.loads(line) for line in notes]
    left = {number: sequence.loss_mask.copy() for number, sequence in enumerate(rollout.sequences)}
    for prompt, token_ids, logprobs, versions in answers:
        whole, begin, end = [*prompt, *token_ids], len(prompt), len(prompt) + len(token_ids)
        fits = [
            number for number, one in enumerate(rollout.sequences)
            if one.token_ids[:end].tolist() == whole and left[number][begin:end].all()
            and one.behavior_logprobs[begin:end].tolist() == logprobs
        ]  # fmt: skip
        assert fits, (prompt, token_ids, logprobs)
        left[fits[0]][begin:end] = False
        if versions is not None:
            assert rollout.sequences[fits[0]].versions[begin:end].tolist() == versions
    assert not any(mask.any() for mask in left.values())
    for sequence in rollout.sequences:
        expected = np.zeros(len(sequence.token_ids))
        for version, model in served.models.items():
            expected = np.where(sequence.versions == version, logprobs_of(model, sequence), expected)
        masked = sequence.loss_mask
        np.testing.assert_allclose(sequence.behavior_logprobs[masked], expected[masked], atol=TOLERANCE)


def test_what_every_client_was_answered_is_what_is_trained(served: Served, tmp_path: Path):
    with world(served, tmp_path, CLIENTS) as played:
        played.play(**LEASE)
        counts = played.rollouts.counters()
    rollout = rollout_of(played)
    assert len(played.notes) == 9
    check_trained(served, rollout, played.notes)
    assert {int(version) for one in rollout.sequences for version in one.versions[one.loss_mask]} == {3}
    kinds = {name: counts[f"agent/{name}"] for name in ("first", "continued", "branched", "rewritten", "lost")}
    assert kinds == {"first": 1, "continued": 1, "branched": 3, "rewritten": 4, "lost": 0}
    assert counts["agent/tool_calls"] == 1


LONG = """
async def run(task):
    ids = [5, 6, 7]
    for longest in (300, 20):
        status, answer = await ask(task, ids, max_tokens=longest)
        assert status == 200, answer
        told(ids, answer)
        ids = [*ids, *answer["token_ids"], 8]
    return 1.0
"""


def test_an_update_in_mid_answer_gives_each_token_its_version(served: Served, tmp_path: Path):
    with world(served, tmp_path, LONG) as played:
        played.submit(**LEASE)
        played.until(lambda: any(count > 20 for count in played.backend.progress().values()))
        played.backend.activate(4, dict(served.models[4].named_parameters()))
        played.until(lambda: played.done)
    rollout = rollout_of(played)
    (first, second) = (json.loads(line)[3] for line in played.notes)
    assert first == sorted(first)
    assert set(first) == {3, 4}
    assert set(second) == {4}
    check_trained(served, rollout, played.notes)


GIVES_UP = """
async def run(task):
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
        create = client.chat.completions.create
        lost = asyncio.create_task(create(model="any", messages=say("lost"), max_tokens=900))
        while not os.path.exists(os.path.join(os.path.dirname(__file__), "go")):
            await asyncio.sleep(0.01)
        lost.cancel()
        note("gone")
        while os.path.exists(os.path.join(os.path.dirname(__file__), "go")):
            await asyncio.sleep(0.01)
        told_all(await create(model="any", messages=say("kept"), max_tokens=10, **ALL))
    return 1.0
"""


def test_a_call_that_is_given_up_is_stopped_in_the_engine(served: Served, tmp_path: Path):
    with world(served, tmp_path, GIVES_UP) as played:
        before = played.backend.num_tokens
        played.submit(**LEASE)
        played.until(lambda: any(played.backend.progress().values()))
        assert played.backend.num_running == 1
        (tmp_path / "go").touch()
        played.until(lambda: played.notes and not played.backend.num_running)
        (tmp_path / "go").unlink()
        played.until(lambda: played.done)
        num_sampled = played.backend.num_tokens - before
        assert played.rollouts.counters()["agent/lost"] == 1
    rollout = rollout_of(played)
    check_trained(served, rollout, played.notes[1:])
    assert rollout.num_sampled <= 10 < num_sampled < 900


STOPS = """
async def run(task):
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
        answer = await client.chat.completions.create(model="any", messages=[ASKED], tools=TOOLS, stop=["add"], **ALL)
        told_all(answer)
        note(json.dumps(answer.choices[0].message.content))
    return 1.0
"""


def test_a_stop_text_of_an_agent_ends_its_answer(served: Served, tmp_path: Path):
    with world(served, tmp_path, STOPS) as played:
        played.play(**LEASE)
    rollout = rollout_of(played)
    told, text = played.notes
    assert json.loads(text) == 'So.\n<tool_call>\n{"name": "'
    assert byte_tokenizer().decode(json.loads(told)[1]).endswith('"name": "add')
    assert rollout.finish_reason == "stop"
    check_trained(served, rollout, [told])
