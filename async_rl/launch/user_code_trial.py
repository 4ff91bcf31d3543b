"""Try the user's reward on rows of the training data before a run starts, so that a mistake in it costs no sampling.

``preflight`` calls ``try_reward``. The user's code runs in a separate process, because it may crash, hang, print or
keep much memory. That process gets the config and the rows as JSON, and answers with the first error.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from async_rl.config.config import Config
from async_rl.config.loading import parse_config
from async_rl.errors import ConfigError, UserError
from async_rl.process.child import module_command, package_environment
from async_rl.process.user_code import describe_error
from async_rl.rewards.conformance import WRONG_ANSWER, example_of, rollout_of
from async_rl.rewards.records import RewardOutput
from async_rl.rewards.registry import RewardSum, build_reward

NUM_ROWS = 3
LIMIT_S = 120.0
"""Seconds after which the trial is given up. A reward that loads a large model may need longer, so this is no error."""

_LAST_LINES = 3


def try_reward(config: Config, rows: Sequence[Mapping[str, Any]]) -> None:
    """Let the user's reward functions score two answers, a right and a wrong one, to each of the first ``rows``.

    Built-in rewards are not tried, because loading the data has checked the fields that they need.

    Args:
        rows: the reward data of training rows, such as ``{"gt_answer": "4"}``.

    Raises:
        ConfigError: a function can't be imported, raises an exception, or returns something other than it must.
    """
    request = {"config": config.model_dump(mode="json", exclude_none=True), "rows": list(rows[:NUM_ROWS])}
    try:
        done = subprocess.run(
            module_command("async_rl.launch.user_code_trial"),
            input=msgspec.json.encode(request), capture_output=True, timeout=LIMIT_S, env=package_environment(),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        logging.getLogger(__name__).warning(
            "the reward scored no %d rows within %g s; starting without this check", len(request["rows"]), LIMIT_S
        )
        return
    if done.returncode or not done.stdout:
        last = "\n".join(done.stderr.decode(errors="replace").strip().splitlines()[-_LAST_LINES:])
        raise ConfigError(
            f"{_key(config)}: the process that tried {_names(config)} ended with exit code {done.returncode}; let the "
            f"function return a number or raise an exception. Its last output:\n{last}"
        )
    if error := json.loads(done.stdout)["error"]:
        raise ConfigError(error)


def _score_two_answers(config: Config, reward: RewardSum, data: Mapping[str, Any]) -> list[RewardOutput]:
    """Return the scores of the right answer to the row with the reward data ``data``, and of a wrong answer."""
    right = example_of(config.reward.types[0], data).right
    # The wrong answer is plain text, never a program: only the user's code is on trial, not the sandbox.
    texts = (WRONG_ANSWER if right is None else right, WRONG_ANSWER)
    return reward.score_group([rollout_of(text, data, config.sampling.max_new_tokens) for text in texts])


def _first_error(config: Config, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a message about the first row that can't be scored. Return an empty text if there is none."""
    try:
        reward = build_reward(config)
    except UserError as error:
        return str(error)
    try:
        for number, data in enumerate(rows):
            try:
                _score_two_answers(config, reward, data)
            except Exception as error:  # the user's code raises what it likes
                sentence, _ = describe_error(error)
                return (
                    f"{_key(config)}: {_names(config)} can't score an answer to training row {number}: {sentence}; "
                    f"correct the function or the row"
                )
    finally:
        reward.close()
    return ""


def _key(config: Config) -> str:
    return "reward.type" if config.reward.types[0].is_user_code else "reward.extra"


def _names(config: Config) -> str:
    named = zip(config.reward.names, config.reward.types, strict=True)
    return " and ".join(name for name, kind in named if kind.is_user_code)


def _child() -> None:
    """Read a request from standard input and write the answer to standard output.

    What the user's code prints goes to standard error instead.
    """
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    error = _first_error(parse_config(request["config"], "the config"), request["rows"])
    json.dump({"error": error}, answer)
    answer.flush()
    # Do not wait for threads that the user's code left running.
    os._exit(0)


if __name__ == "__main__":
    _child()
