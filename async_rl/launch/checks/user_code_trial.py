"""Try the user's reward, loss and advantages before a run starts, so that a mistake in them costs no sampling.

``try_reward`` lets it score rows of the training data, and ``try_loss`` makes up a batch. The user's code runs in a
separate process, because it may crash, hang, print or keep much memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from async_rl.config.config import Config
from async_rl.config.loading import config_data, parse_config
from async_rl.errors import UserError
from async_rl.launch.checks.check_process import CheckProcess
from async_rl.launch.checks.finding import Finding, warnings
from async_rl.process.user_code import describe_error, is_code_name
from async_rl.rewards.conformance import WRONG_ANSWER, example_of, rollout_of
from async_rl.rewards.records import RewardOutput
from async_rl.rewards.registry import RewardSum, build_reward

NUM_ROWS = 3
LIMIT_S = 120.0
"""Seconds after which the trial is given up. A reward that loads a large model may need longer, so this is no error."""

TrialRow = tuple[Sequence[Mapping[str, str]], Mapping[str, Any]]
"""The messages of a row's prompt, and its reward data, such as ``{"gt_answer": "4"}``."""


def try_reward(config: Config, rows: Sequence[TrialRow]) -> list[Finding]:
    """Let the user's reward functions score two answers, a right and a wrong one, to each of the first ``rows``.

    Built-in rewards are not tried, because loading the data has checked the fields that they need. It is a FAIL if a
    function can't be imported, raises an exception, or returns something other than it must; and a warning if an answer
    that is scored twice gets another reward: the policy can't learn from chance.

    Args:
        rows: training rows.
    """
    own = rows[:NUM_ROWS]
    return _try("score_rows", config, _key(config), _names(config), f"the reward scored no {len(own)} rows", rows=own)


def try_loss(config: Config) -> list[Finding]:
    """Let the user's own loss and advantages compute a made-up batch. Do nothing if there are none.

    It is a FAIL if a function can't be imported, raises an exception, or breaks the rules of ``learner.losses.own`` or
    ``learner.losses.own_advantage``. The finding has the figures.
    """
    if not config.loss.code_names:
        return []
    names = " and ".join(config.loss.code_names)
    failures = _try("compute_batch", config, _loss_key(config), names, f"{names} did not compute a small batch")
    text = f"{names} gave a made-up batch a finite result that does not depend on its cut"
    return failures or [Finding(_loss_key(config), "OK", text)]


def _try(function: str, config: Config, key: str, names: str, what_is_late: str, **given: Any) -> list[Finding]:
    """Run a function of this module on ``config`` and what is ``given``, in a separate process."""
    overdue = Finding(key, "WARN", f"{what_is_late} within {LIMIT_S:g} s; a run starts without this check")
    return CheckProcess(
        key, f"{__name__}:{function}", {"config": config_data(config), **given}, LIMIT_S, overdue=overdue,
        what=f"the process that tried {names}",
        fix="let the function return its result or raise an exception; its last output is below",
    ).findings()  # fmt: skip


def score_rows(config: dict[str, Any], rows: Sequence[TrialRow]) -> list[Finding]:
    """Let the reward of ``config``, as JSON data, score ``rows``, in the process of ``try_reward``."""
    resolved = parse_config(config, "the config")
    error, note = _score_rows(resolved, rows)
    return [Finding.of_message(_key(resolved), error)] if error else warnings(_key(resolved), note)


def compute_batch(config: dict[str, Any]) -> list[Finding]:
    """Let the loss of ``config``, as JSON data, compute a batch, in the process of ``try_loss``."""
    resolved = parse_config(config, "the config")
    error = _error_of_loss(resolved)
    return [Finding.of_message(_loss_key(resolved), error)] if error else []


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


def _loss_key(config: Config) -> str:
    return "loss.function" if config.loss.function else "loss.advantage_function"
