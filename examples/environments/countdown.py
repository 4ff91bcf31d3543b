"""Countdown: reach a target with the four operations, each number used once. The answer is in ``<answer>`` tags.

Rows: ``{"messages": [...], "extra_info": {"target": 24, "numbers": [2, 3, 4]}}``. As in RL2's environment: 1 for a
right equation, 0.1 for an answer in the right form. A wrong one may be mended in the next turn, for half of the reward;
``environment.max_turns = 1`` leaves that out.
"""

from __future__ import annotations

from typing import Any

from async_rl.environments.arithmetic import evaluate
from async_rl.environments.protocol import last_tag

FORM_REWARD = 0.1
TOLERANCE = 1e-5


async def reset(extra_info: dict[str, Any]) -> str:
    """The row's prompt, as text, is the first state."""
    return extra_info["prompt_text"]


async def step(state: str, action: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    answer = last_tag(action, "answer")
    if answer is None:
        told = "Write your equation inside <answer> </answer>."
        return {"next_state": f"{state}{action}\n{told}\n", "reward": 0.0, "score": 0.0}
    tries = extra_info.get("tries", 0)
    fault = why_wrong(answer, extra_info["target"], extra_info["numbers"])
    if not fault:
        return {"reward": 0.5**tries, "score": 1.0, "done": True}
    extra_info["tries"] = tries + 1
    told = f"{state}{action}\n{fault} Try again.\n"
    return {"next_state": told, "reward": 0.0 if tries else FORM_REWARD, "score": 0.0}


def why_wrong(equation: str, target: float, numbers: list[int]) -> str:
    """What is wrong with ``equation``, in words for the model; empty if nothing is."""
    try:
        value, used = evaluate(equation.partition("=")[0])
    except ValueError:
        return "That is no equation of numbers with + - * /."
    if sorted(used) != sorted(numbers):
        return f"Use each of {numbers} exactly once."
    return "" if abs(float(value) - target) < TOLERANCE else f"That is {float(value):g}, not {target:g}."
