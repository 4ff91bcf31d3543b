"""An environment for the tests of its process: what the model says is an order to behave in some way."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from typing import Any

AROUND_THE_WORLD = 3600.0


async def reset(extra_info: dict[str, Any]) -> Any:
    if extra_info.get("reset") == "from the row":
        return None
    if "first" in extra_info:
        return extra_info["first"]
    if extra_info.get("reset") == "sleep":
        await asyncio.sleep(AROUND_THE_WORLD)
    extra_info["drawn"] = random.random()
    return f"start {extra_info['idx']};", extra_info


async def step(state: str, action: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    if action in _MISDEEDS:
        _MISDEEDS[action]()
    if action == "sleep":
        await asyncio.sleep(AROUND_THE_WORLD)
    if action in _MALFORMED:
        return _MALFORMED[action]
    if action == "print":  # of a state of messages, as an environment for text does
        return {"next_state": f"{state}{action}", "reward": 0.0}
    if action == "pid":
        return {"next_state": f"{state}pid {os.getpid()};", "reward": 0.0}
    if action == "draw":
        return {"next_state": f"{state}{extra_info['drawn']};", "reward": 0.0}
    if action == "linger":
        extra_info["task"] = asyncio.create_task(asyncio.sleep(AROUND_THE_WORLD))
    if action == "tasks":
        return {"next_state": f"{state}{len(asyncio.all_tasks())} tasks;", "reward": 0.0}
    done = action == "stop"
    result: dict[str, Any] = {"next_state": state + action + ";", "reward": float(len(action)), "done": done}
    return {**result, "score": 1.0} if done else result


def _spin() -> None:
    while True:
        pass


def _leave_daemons_behind() -> None:
    """Start two processes in sessions of their own. The parent of the second one has ended."""
    subprocess.Popen(["sleep", str(AROUND_THE_WORLD)], start_new_session=True)
    subprocess.run(["sh", "-c", f"setsid sleep {AROUND_THE_WORLD} &"], check=True)


def _ignore_everything() -> None:
    while True:
        try:
            time.sleep(AROUND_THE_WORLD)
        except BaseException:
            continue


_MISDEEDS: dict[str, Any] = {
    "spin": _spin,
    "exit": lambda: os._exit(3),
    "recurse": lambda: os.kill(os.getpid(), 11),
    "raise": lambda: {}["no such key"],
    "daemon": _leave_daemons_behind,
    "ignore": _ignore_everything,
    "leave": sys.exit,
}
_MALFORMED: dict[str, Any] = {
    "none": None,
    "nan": {"next_state": "x", "reward": float("nan")},
    "typo": {"next_state": "x", "reward": 1.0, "dnoe": True},
    "no state": {"reward": 1.0},
}


class Player:
    """Plays by itself: asks twice, whatever comes; the row says with what the first answer ends."""

    async def generate(self, rollout: Any) -> None:
        first = await rollout.sample("first:", max_tokens=3, stop=rollout.extra_info["stop"])
        rollout.reward(0.5)
        second = await rollout.sample([{"role": "user", "content": first.text}])
        rollout.reward(len(second.text), score=1.0)
        rollout.reward(-1.0, score=0.0)
