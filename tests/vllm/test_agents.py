"""Agents with OpenAI's client over the real engine: what they were answered is what is trained, with its log-probs.

The model is a tiny Qwen3 of bytes, which calls a tool when asked. Full forward passes of it are the reference.
"""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
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

TEMPERATURE = 0.5
SAMPLING: dict[str, Any] = {"max_new_tokens": 1024, "max_prompt_tokens": 1024, "temperature": TEMPERATURE}
SETTINGS: dict[str, Any] = {
    "run": {"dir": "run"},
    "model": {"path": "model", "dtype": "float32"},
    "sampling": SAMPLING,
    "environment": {"name": "agent.py:run"},
    "generator": {
        "backend": "vllm", "serve": True, "allow_code": ["agent.py"], "batch_size": 16, "num_threads": 1,
        "kv_after_update": "recompute",
    },
    "experimental": {"vllm": {"kv_cache_bytes": 64 << 20}},
}  # fmt: skip


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
        answer = create(model="policy", messages=[ASKED], tools=TOOLS, **ALL)
        told_all(answer)
        message = answer.choices[0].message
        (call,) = message.tool_calls
        result = {**RESULT, "tool_call_id": call.id}
        answer = create(model="policy", messages=[ASKED, message, result], tools=TOOLS, max_tokens=40, **ALL)
        told_all(answer)
        assert answer.choices[0].message.content == "It is 5."
        chunks = list(create(model="policy", messages=say("stream"), max_tokens=20, stream=True, **ALL))
        told(chunks[0].prompt_token_ids, chunks[-1].choices[0].model_dump())


async def run(task):
    await asyncio.to_thread(of_sync_client, task)
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        create = client.chat.completions.create
        wanted = (("a", 1), ("b", 4))
        asked = [create(model="policy", messages=say(text), max_tokens=30, n=n, **ALL) for text, n in wanted]
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


def logprobs_of(model: Any, sequence: TokenSequence) -> np.ndarray:
    """Each token's log-probability, float32 [N], by one pass over the whole sequence; 0 for the first one."""
    ids = torch.from_numpy(sequence.token_ids.astype(np.int64))
    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1].float() / TEMPERATURE, -1)
    return np.concatenate([[0.0], logprobs.gather(1, ids[1:, None])[:, 0].numpy()])


def check_trained(model: Any, rollout: Rollout, notes: list[str]) -> None:
    """Check that the trained tokens are those that the agent was answered, no more, with the same log-probabilities,
    which are those of full forward passes of version 3.
    """
    left = {number: sequence.loss_mask.copy() for number, sequence in enumerate(rollout.sequences)}
    for prompt, token_ids, logprobs, versions in map(json.loads, notes):
        whole, begin, end = [*prompt, *token_ids], len(prompt), len(prompt) + len(token_ids)
        fits = [
            number for number, one in enumerate(rollout.sequences)
            if one.token_ids[:end].tolist() == whole and left[number][begin:end].all()
            and one.behavior_logprobs[begin:end].tolist() == logprobs
        ]  # fmt: skip
        assert fits, (prompt, token_ids, logprobs)
        left[fits[0]][begin:end] = False
        assert versions in (None, [3] * len(token_ids))
    assert not any(mask.any() for mask in left.values())
    for sequence in rollout.sequences:
        masked = sequence.loss_mask
        assert set(sequence.versions[masked].tolist()) == {3}
        np.testing.assert_allclose(
            sequence.behavior_logprobs[masked], logprobs_of(model, sequence)[masked], atol=TOLERANCE
        )


def test_what_every_client_was_answered_is_what_is_trained(tmp_path: Path):
    torch.set_num_threads(1)
    model = byte_model()
    assert memorise(model) < 0.05
    directory = write_files(tmp_path / "model", model)
    with closing(VllmBackend.from_files(directory, parse_config(SETTINGS, "test"), device=DEVICE)) as backend:
        backend.activate(3, dict(model.named_parameters()))
        with ExitStack() as stack:
            played = World(
                tmp_path, stack, HEAD + CLIENTS, backend, vocab_size=len(byte_tokenizer()), max_model_len=LONGEST,
                tokenizer=directory, timeout_s=60.0, first_reset_timeout_s=120.0, max_rollout_tokens=20_000,
            )  # fmt: skip
            played.play(**SAMPLING, seed=7)
            counts = played.rollouts.counters()
        assert backend.num_running == 0
    (graded,) = played.done
    assert graded.failure is None, graded.failure
    assert graded.rollout is not None
    assert len(played.notes) == 9
    check_trained(model, graded.rollout, played.notes)
    kinds = {name: counts[f"agent/{name}"] for name in ("first", "continued", "branched", "rewritten", "lost")}
    assert kinds == {"first": 1, "continued": 1, "branched": 3, "rewritten": 4, "lost": 0}
    assert counts["agent/tool_calls"] == 1
