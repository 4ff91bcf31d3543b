"""A calculator as a tool: the model may call it in every turn, and answers in a box.

Rows are math rows (``messages``, ``gt_answer``). A call is
``<tool_call>{"name": "calculator", "arguments": {"expression": "12 * 34"}}</tool_call>``; its result comes back as a
``tool`` message, so the chat template must know that role. Set ``sampling.stop = ["</tool_call>"]``.
"""

from __future__ import annotations

from typing import Any

from async_rl.environments.arithmetic import evaluate
from async_rl.environments.protocol import Messages, StepResult, ToolCall, parse_tool_calls
from async_rl.rewards.extraction import extract_boxed

NAME = "calculator"


class Calculator:
    """Keeps no state of its own: the conversation is the state, as the chat template renders it."""

    async def reset(self, extra_info: dict[str, Any]) -> Messages:
        return extra_info["messages"]

    async def step(self, state: Messages, action: str, extra_info: dict[str, Any]) -> StepResult:
        calls = parse_tool_calls(action)
        if not calls:
            right = is_right(extract_boxed(action).answer, extra_info["gt_answer"])
            return {"reward": float(right), "done": True}
        results = [{"role": "tool", "content": result_of(call)} for call in calls]
        return {"next_state": [*state, {"role": "assistant", "content": action}, *results], "reward": 0.0}


def result_of(call: ToolCall) -> str:
    if call.error:
        return call.error
    if call.name != NAME or not isinstance(call.arguments.get("expression"), str):
        return f'the only tool is {NAME}, with arguments {{"expression": "..."}}'
    try:
        value, _ = evaluate(call.arguments["expression"])
    except ValueError as error:
        return str(error)
    return str(value) if value.denominator == 1 else f"{float(value):.10g}"


def is_right(answer: str | None, gold: str) -> bool:
    """Whether two numbers are equal; two texts, where one of them is none."""
    try:
        return answer is not None and evaluate(answer)[0] == evaluate(gold)[0]
    except ValueError:
        return answer == gold
