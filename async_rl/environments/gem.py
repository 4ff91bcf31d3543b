"""Adapter for the environments of GEM (https://github.com/axon-rl/gem), which ``pip install async-rl[gem]`` installs.

To use it, set ``environment.name = "async_rl.environments.gem:Gem"``. The table ``environment.extra`` needs ``env_id``,
such as ``game:GuessTheNumber-v0-easy``. It may have ``env_kwargs``, a table of arguments for that environment, and
``prompt``, a key of ``PROMPTS``. No data is needed, only a number of rows (``environment.rows``): each row gets a seed,
which all rollouts of the row's group share.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

from async_rl.environments.protocol import Messages, StepResult

PROMPTS: dict[str, str] = {
    "none": "{observation}",
    "game": (
        "You are playing language games. Make valid actions to win.\nObservation: {observation}\n"
        "Please reason step by step, and put your final answer within \\boxed{{}}."
    ),
    "general": ("Question: {observation}\nPlease reason step by step, and put your final answer within \\boxed{{}}."),
    "code": (
        "You are an expert Python programmer. Write a correct Python program that matches the specification and passes "
        "all tests.\nQuestion: {observation}\nPlease reason step by step, and write your code in a ```python block."
    ),
}
"""Templates that turn GEM's first observation into a user's message. The key is ``environment.extra.prompt``."""


def _make(env_id: str, **kwargs: Any) -> Any:
    # GEM is an extra, so the type checker lacks it; imported by name, because this module is called gem too.
    return _imported("gem").make(env_id, **kwargs)


def _imported(module: str) -> Any:
    """Return a module of GEM.

    Raises:
        ImportError: GEM is not installed, or lacks a package that it needs.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "gem":
            raise
        raise ImportError("GEM is not installed; install it with pip install async-rl[gem]") from None


def _import_environment(env_id: str) -> None:
    """Import GEM and the module of the environment ``env_id``. An unknown name is left to ``reset``."""
    registry = _imported("gem.envs.registration").ENV_REGISTRY
    spec = registry.get(env_id)
    if spec is not None and isinstance(spec.entry_point, str):
        importlib.import_module(spec.entry_point.partition(":")[0])


class Gem:
    """The GEM environment of one rollout. The state is the whole conversation.

    A step's reward is also the step's score. The rollout ends when GEM ends the episode or reaches GEM's own limit on
    turns.
    """

    make: Callable[..., Any] = staticmethod(_make)

    @staticmethod
    def prepare(extra: dict[str, Any]) -> None:
        """Import what every rollout needs, once for all of them: GEM takes most of a second of processor time.

        Raises:
            ImportError: GEM, or a package that its environment needs, is not installed.
        """
        _import_environment(str(extra.get("env_id", "")))

    def __init__(self) -> None:
        self._env: Any = None
        self._prompt = ""

    async def reset(self, extra_info: dict[str, Any]) -> Messages:
        """Start the episode and return the first state: the row's messages, then GEM's first observation.

        Raises:
            ValueError: ``environment.extra`` has no ``env_id``, or has an unknown ``prompt``.
        """
        if "env_id" not in extra_info:
            raise ValueError(
                "environment.extra.env_id: expected the name of a GEM environment, got none; set it, for example to "
                "game:GuessTheNumber-v0-easy"
            )
        prompt = extra_info.get("prompt", "game")
        if prompt not in PROMPTS:
            raise ValueError(
                f"environment.extra.prompt: expected one of {sorted(PROMPTS)}, got {prompt!r}; correct the key"
            )
        self._prompt = PROMPTS[prompt]
        self._env = self.make(extra_info["env_id"], **extra_info.get("env_kwargs", {}))
        observation, info = self._env.reset(seed=extra_info["seed"] % 2**32)
        return [*extra_info["messages"], self._asked(observation, info)]

    async def step(self, state: Messages, action: str, extra_info: dict[str, Any]) -> StepResult:
        observation, reward, terminated, truncated, info = self._env.step(action)
        answer = {"role": "assistant", "content": action}
        if terminated or truncated:
            return {"reward": float(reward), "done": True}
        reply = {"role": "user", "content": _with_suffix(observation, info)}
        return {"next_state": [*state, answer, reply], "reward": float(reward)}

    def _asked(self, observation: str, info: dict[str, Any]) -> dict[str, str]:
        return {"role": "user", "content": self._prompt.format(observation=_with_suffix(observation, info))}


def _with_suffix(observation: str, info: dict[str, Any]) -> str:
    """Return ``observation`` followed by GEM's hint about the next action, ``info["suffix"]``, if there is a hint."""
    return re.sub(r"\s+\Z", "", f"{observation}\n{info.get('suffix', '')}")
