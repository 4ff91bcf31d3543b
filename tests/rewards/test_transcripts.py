"""What rewards get of an agent's conversation."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from typing import Any

from async_rl.config.judge import JudgeConfig
from async_rl.rewards.functions import FunctionReward
from async_rl.rewards.judge import JudgeReward
from async_rl.rewards.judge_client import JudgeClient
from async_rl.rewards.records import RewardInput
from async_rl.rewards.transcripts import conversation_of
from tests.rewards.served_judge import completion, judge

ASKED = {"role": "user", "content": [{"type": "text", "text": "2+3?"}]}
CALLED = {
    "role": "assistant",
    "content": "So.",
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "5"}
SILENT = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "stop", "arguments": "{}"}}]}
ROW = ({"role": "user", "content": "sum"},)
ITEM = RewardInput(
    "5", {}, 4, 9, "stop", ROW, transcript=(ASKED, CALLED, RESULT, {"role": "assistant", "content": "5"})
)


def test_a_conversation_has_tool_calls_as_text():
    item = dataclasses.replace(ITEM, transcript=(ASKED, CALLED, RESULT, SILENT))
    assert conversation_of(item) == [
        {"role": "user", "content": "2+3?"},
        {"role": "assistant", "content": 'So.\n<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": '<tool_call>{"name": "stop", "arguments": {}}</tool_call>'},
    ]


def test_a_function_of_trl_gets_all_messages_from_the_first_answer_on():
    seen: list[Any] = []

    def f(completions: Any, **kwargs: Any) -> list[float]:
        seen.extend(completions)
        return [1.0]

    FunctionReward("mine:f", f, scale=1.0, time_limit_s=5.0)(ITEM)
    assert seen == [[CALLED, RESULT, {"role": "assistant", "content": "5"}]]


def test_a_judge_may_read_the_whole_conversation():
    with judge([completion("Score: 10")]) as server:
        config = JudgeConfig(endpoint=server.url, model="m", rubric="{transcript}")
        with closing(JudgeReward(config, JudgeClient(config, first_pause_s=0.01), scale=1.0)) as reward:
            assert reward(ITEM).accuracy == 1.0
    text = server.requests[0][0]["messages"][0]["content"]
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
    assert text.startswith(f"[user]\n2+3?\n\n[assistant]\nSo.\n{call}\n\n[tool]\n5\n\n[assistant]\n5\n\nEnd your")
