"""The turn loop: reset, sample, step, until done. Runs in the environment's process; called by ``child.py``.

Everything that an environment returns is checked here, so that errors name what its author wrote.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

from async_rl.environments.protocol import Rollout, RolloutOverError, State

_STEP_KEYS = {"next_state", "reward", "score", "done", "extra_info"}


class EnvironmentFault(Exception):  # noqa: N818  (the author's mistake; not one of the run's errors)
    """The environment returned what it must not."""


async def play(code: Any, rollout: Rollout) -> None:
    """Play one rollout with ``code``: a module, an instance, or a class, of which an instance is made.

    Raises:
        EnvironmentFault: the environment returned something malformed. Its own exceptions are passed on.
    """
    environment: Any = code() if inspect.isclass(code) else code
    try:
        if hasattr(environment, "generate"):
            await _awaited(environment.generate(rollout))
        else:
            await _turns(environment, rollout)
    except RolloutOverError:
        pass
    finally:
        if hasattr(environment, "close"):
            await _awaited(environment.close())


async def _turns(environment: Any, rollout: Rollout) -> None:
    state = await _first_state(environment, rollout)
    while True:
        action = await rollout.sample(state)
        result = await _awaited(environment.step(state, action.text, rollout.extra_info))
        _check_step(result)
        rollout.extra_info = result.get("extra_info", rollout.extra_info)
        rollout.reward(result["reward"], result.get("score"))
        if result.get("done", False):
            return
        state = result["next_state"]


async def _first_state(environment: Any, rollout: Rollout) -> State:
    made = await _awaited(environment.reset(rollout.extra_info)) if hasattr(environment, "reset") else None
    if isinstance(made, tuple):
        if len(made) != 2 or not isinstance(made[1], dict):
            raise EnvironmentFault(f"reset: expected a state or (state, extra_info), got a tuple of {len(made)}")
        made, rollout.extra_info = made
    if made is None:
        if rollout.prompt is None:
            raise EnvironmentFault("expected reset to return a first state, for the row has no messages; got none")
        return rollout.prompt
    _check_state(made, "reset")
    return made


def _check_step(result: Any) -> None:
    if not isinstance(result, dict):
        raise EnvironmentFault(f"step: expected a dict, got {type(result).__name__}")
    if unknown := sorted(map(str, set(result) - _STEP_KEYS)):
        raise EnvironmentFault(f"step: unknown keys {unknown}; expected only {sorted(_STEP_KEYS)}")
    if not is_finite(result.get("reward")):
        raise EnvironmentFault(f"step: reward: expected a finite number, got {result.get('reward')!r}")
    if result.get("score") is not None and not is_finite(result["score"]):
        raise EnvironmentFault(f"step: score: expected a finite number, got {result['score']!r}")
    if not isinstance(result.get("done", False), bool):
        raise EnvironmentFault(f"step: done: expected true or false, got {result['done']!r}")
    if not isinstance(result.get("extra_info", {}), dict):
        raise EnvironmentFault(f"step: extra_info: expected a dict, got {type(result['extra_info']).__name__}")
    if not result.get("done", False):
        _check_state(result.get("next_state"), "step: next_state")


def _check_state(state: Any, where: str) -> None:
    if isinstance(state, str):
        if not state:
            raise EnvironmentFault(f"{where}: expected a state, got empty text")
        return
    is_conversation = (
        isinstance(state, list | tuple)
        and len(state) > 0
        and all(isinstance(m, Mapping) and all(isinstance(v, str) for v in m.values()) for m in state)
    )
    if not is_conversation:
        raise EnvironmentFault(f"{where}: expected text or a list of messages, got {type(state).__name__}")


def is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
