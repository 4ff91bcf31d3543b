"""Guess the number: the model says one, hears ``<`` or ``>`` (the number sought is smaller, greater), says another.

Rows carry ``{"extra_info": {"number": 7}}`` and a prompt. The reward is 1 for the right number, and -0.5 for what is no
number, or one that the hints have ruled out; the score is 1 for the right number alone. Used by
``examples/guess_number.py`` and docs/environments.md.
"""

from __future__ import annotations

from typing import Any

FAULT = -0.5


async def reset(extra_info: dict[str, Any]) -> str:
    """The row's prompt, as text, is the first state; nothing is ruled out yet."""
    extra_info["low"], extra_info["high"] = float("-inf"), float("inf")
    return extra_info["prompt_text"]


async def step(state: str, action: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    """``state`` is the whole game so far; the hint goes behind the model's action."""
    try:
        guess = int(action)
    except ValueError:
        return {"next_state": f"{state}{action}?", "reward": FAULT, "score": 0.0}
    number = extra_info["number"]
    if guess == number:
        return {"reward": 1.0, "score": 1.0, "done": True}
    reward = 0.0 if extra_info["low"] < guess < extra_info["high"] else FAULT
    if guess < number:
        extra_info["low"], hint = max(extra_info["low"], guess), ">"
    else:
        extra_info["high"], hint = min(extra_info["high"], guess), "<"
    return {"next_state": f"{state}{action}{hint}", "reward": reward, "score": 0.0}
