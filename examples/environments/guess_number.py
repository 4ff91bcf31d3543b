"""Guess the number: the model says one, hears ``<`` or ``>`` (the number sought is smaller, greater), says another.

Rows carry ``{"extra_info": {"number": 7}}`` and a prompt. The reward is 1 for the right number, and 0.1 is taken away
for what is no number at all. Used by ``examples/guess_number.py`` and docs/environments.md.
"""

from __future__ import annotations

from typing import Any


async def step(state: str, action: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    """``state`` is the whole game so far; the hint goes behind the model's action."""
    try:
        guess = int(action)
    except ValueError:
        return {"next_state": f"{state}{action}?", "reward": -0.1, "score": 0.0}
    number = extra_info["number"]
    if guess == number:
        return {"next_state": f"{state}{action}=", "reward": 1.0, "score": 1.0, "done": True}
    hint = "<" if number < guess else ">"
    return {"next_state": f"{state}{action}{hint}", "reward": 0.0, "score": 0.0}
