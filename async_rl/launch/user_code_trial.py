"""Try the user's reward, loss and advantages before a run starts, so that a mistake in them costs no sampling.

``preflight`` and the doctor call ``try_reward``, with rows of the training data, and ``try_loss``, which makes up a
batch. The user's code runs in a separate process, because it may crash, hang, print or keep much memory. That process
gets the config and the rows as JSON, and answers with the first error.
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
from async_rl.config.loading import config_from_toml, config_to_toml
from async_rl.errors import ConfigError, UserError
from async_rl.process.child import module_command, package_environment
from async_rl.process.user_code import describe_error, is_code_name
from async_rl.rewards.conformance import WRONG_ANSWER, example_of, rollout_of
from async_rl.rewards.records import RewardOutput
from async_rl.rewards.registry import RewardSum, build_reward

NUM_ROWS = 3
LIMIT_S = 120.0
"""Seconds after which the trial is given up. A reward that loads a large model may need longer, so this is no error."""

_LAST_LINES = 3

TrialRow = tuple[Sequence[Mapping[str, str]], Mapping[str, Any]]
"""The messages of a row's prompt, and its reward data, such as ``{"gt_answer": "4"}``."""


def try_reward(config: Config, rows: Sequence[TrialRow]) -> None:
    """Let the user's reward functions score two answers, a right and a wrong one, to each of the first ``rows``.

    Built-in rewards are not tried, because loading the data has checked the fields that they need. Log a warning if an
    answer that is scored twice gets another reward: the policy can't learn from chance.

    Args:
        rows: training rows.

    Raises:
        ConfigError: a function can't be imported, raises an exception, or returns something other than it must.
    """
    num_rows = len(rows[:NUM_ROWS])
    _try(config, _key(config), _names(config), rows[:NUM_ROWS], f"the reward scored no {num_rows} rows")


def try_loss(config: Config) -> None:
    """Let the user's own loss and advantages compute a made-up batch. Do nothing if there are none.

    Raises:
        ConfigError: a function can't be imported, raises an exception, or breaks the rules of
            ``learner.losses.own`` or ``learner.own_advantage``. The message has the figures.
    """
    if config.loss.code_names:
        names = " and ".join(config.loss.code_names)
        key = "loss.function" if config.loss.function else "loss.advantage_function"
        _try(config, key, names, None, f"{names} did not compute a small batch")


def _try(config: Config, key: str, names: str, rows: Sequence[TrialRow] | None, what_is_late: str) -> None:
    """Try the reward on ``rows``, or the loss and the advantages if there are none, in a separate process.

    Raises:
        ConfigError: it failed, or ended its process.
    """
    request = {"config": config_to_toml(config), "rows": rows}
    try:
        done = subprocess.run(
            module_command("async_rl.launch.user_code_trial"),
            input=msgspec.json.encode(request), capture_output=True, timeout=LIMIT_S, env=package_environment(),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        logging.getLogger(__name__).warning("%s within %g s; starting without this check", what_is_late, LIMIT_S)
        return
    if done.returncode or not done.stdout:
        last = "\n".join(done.stderr.decode(errors="replace").strip().splitlines()[-_LAST_LINES:])
        raise ConfigError(
            f"{key}: the process that tried {names} ended with exit code {done.returncode}; let the function return "
            f"its result or raise an exception. Its last output:\n{last}"
        )
    answer = json.loads(done.stdout)
    if answer["error"]:
        raise ConfigError(answer["error"])
    if answer["note"]:
        logging.getLogger(__name__).warning("%s", answer["note"])


def _score_two_answers(config: Config, reward: RewardSum, row: TrialRow) -> list[RewardOutput]:
    """Return the scores of the right answer to ``row``, and of a wrong answer."""
    messages, data = row
    right = example_of(config.reward.types[0], data).right
    # The wrong answer is plain text, never a program: only the user's code is on trial, not the sandbox.
    texts = (WRONG_ANSWER if right is None else right, WRONG_ANSWER)
    return reward.score_group([rollout_of(text, data, config.sampling.max_new_tokens, messages) for text in texts])


def _score_rows(config: Config, rows: Sequence[TrialRow]) -> tuple[str, str]:
    """Return a message about the first row that can't be scored, and one about rewards that depend on chance. Each is
    empty if there is nothing to say.
    """
    try:
        reward = build_reward(config, has_scorers=False)
    except UserError as error:
        return str(error), ""
    note = ""
    try:
        for number, row in enumerate(rows):
            try:
                first, second = (_score_two_answers(config, reward, row) for _ in range(2))
            except Exception as error:  # the user's code raises what it likes
                sentence, _ = describe_error(error)
                message = (
                    f"{_key(config)}: {_names(config)} can't score an answer to training row {number}: {sentence}; "
                    f"correct the function or the row"
                )
                return message, ""
            note = note or _differing(config, number, first, second)
    finally:
        reward.close()
    return "", note


def _differing(config: Config, number: int, first: Sequence[RewardOutput], second: Sequence[RewardOutput]) -> str:
    """Return a message if the same answers to row ``number`` were scored differently. Else return an empty text."""
    for before, after in zip(first, second, strict=True):
        if before.parts != after.parts:
            rewards = " and ".join(f"{sum(output.parts.values()):.4g}" for output in (before, after))
            return (
                f"{_key(config)}: {_names(config)} gave one answer to training row {number} the rewards {rewards}: if "
                f"rewards depend on chance, less is learned, or nothing; let equal answers get equal rewards"
            )
    return ""


def _error_of_loss(config: Config) -> str:
    """Return a message about the first of loss and advantages that fails. Return an empty text if none does."""
    from async_rl.learner.losses.own_advantage import load_own_advantage
    from async_rl.learner.losses.own_trial import load_own_loss  # it imports torch

    try:
        load_own_advantage(config)
        load_own_loss(config)
    except UserError as error:
        return str(error)
    return ""


def _key(config: Config) -> str:
    """The key that names the user's function, the first of them if there are several."""
    if config.reward.types[0].is_user_code:
        return "reward.type"
    return "reward.extra" if any(is_code_name(name) for name in config.reward.extra) else "reward.accuracy"


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
    config, rows = config_from_toml(request["config"], "the config"), request["rows"]
    error, note = (_error_of_loss(config), "") if rows is None else _score_rows(config, rows)
    json.dump({"error": error, "note": note}, answer)
    answer.flush()
    # Do not wait for threads that the user's code left running.
    os._exit(0)


if __name__ == "__main__":
    _child()
