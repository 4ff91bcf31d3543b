"""Play the user's environment on rows of the training data before a run starts, so that a mistake in it costs no
sampling.

The checks before a start call ``try_environment``. The environment plays in the same kind of process as in a run
(``environments.pool``); a fixed text takes the place of the model's answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

from async_rl.config.config import Config
from async_rl.config.generator import has_model
from async_rl.data.chat import load_tokenizer
from async_rl.data.dataset import Row
from async_rl.environments.pool import EnvironmentPool, Event
from async_rl.errors import ConfigError
from async_rl.generator.environment_rollouts import TokenizerText, prompt_text, start_message
from async_rl.launch.checks.finding import Finding, warnings
from async_rl.records import Lease, Prompt, Sampling
from async_rl.rewards.conformance import WRONG_ANSWER

NUM_ROWS = 2
MAX_TURNS = 3
"""Answers to one environment. After these it is told that the rollout is over, as in a run at its limits."""
LIMIT_S = 60.0
"""Seconds after which the trial is given up. An environment may be slow by nature, so this ends no run."""

POLL_S = 0.005
_NO_SAMPLING = Sampling(1.0, 1.0, 0, 1, 1, ())

Render = Callable[[Sequence[Mapping[str, str]]], str]


def trial_findings(config: Config, rows: Sequence[Row], problem: str, details: str = "") -> Iterator[Finding]:
    """Yield what a trial on the first ``rows`` found: a ``problem`` on some of them, or if that is empty, none."""
    if problem:
        yield from warnings("environment", problem)
        return
    text = f"{config.environment.shown} was played on {min(NUM_ROWS, len(rows))} rows, with an answer that solves none"
    yield Finding("environment", "OK", text, details=details)


def trial_problem(config: Config, what: str, errors: Mapping[int, str], num_tried: int) -> str:
    """Return what failed first, in one line; empty if ``errors``, by their rows, has none.

    Raises:
        ConfigError: each of the ``num_tried`` rows failed.
    """
    if not errors:
        return ""
    row, own = min(errors), config.environment
    text = f"{own.key}: {own.shown} can't play training row {row}: {errors[row]}; correct the {what} or the row"
    if len(errors) == num_tried:
        raise ConfigError(text)
    return text


def try_environment(config: Config, rows: Sequence[Row]) -> str:
    """Let the user's environment play a rollout on each of the first ``rows``. The answers are a text that solves
    nothing.

    Return what failed on some of the rows, in one line; empty if nothing did. A run survives such failures.

    Raises:
        ConfigError: the environment can't be imported; or on each of the rows it raises an exception, returns something
            other than it must, or takes longer than ``environment.timeout_s`` for a reset or step.
    """
    tried = rows[:NUM_ROWS]
    errors: dict[int, str] = {}
    render = renderer(config)
    with closing(EnvironmentPool(config.environment, allowed=config.generator.allow_code, digest=None)) as pool:
        for number, row in enumerate(tried):
            pool.start(str(number), _start(config, row, number, render))
        playing = {str(number): 0 for number in range(len(tried))}
        deadline = time.monotonic() + LIMIT_S
        while playing:
            for event in pool.poll():
                if error := _answer(config, pool, event, playing, render):
                    errors[int(event.key)] = error
                    playing.pop(event.key, None)
                    pool.cancel(event.key)
            if time.monotonic() > deadline:
                return (
                    f"{config.environment.shown} did not play {len(playing)} of {len(tried)} rows within {LIMIT_S:g} s"
                )
            time.sleep(POLL_S)
    return trial_problem(config, "environment", errors, len(tried))


def _answer(config: Config, pool: EnvironmentPool, event: Event, playing: dict[str, int], render: Render) -> str:
    """Answer the message of an environment. Return its mistake; empty if there is none.

    ``playing`` has the number of answers to each environment that has not ended its rollout.
    """
    message, num_answers = event.message, playing[event.key]
    if event.type == "failed":
        return str(message.get("detail") or message["error"])
    if event.type == "ended":
        del playing[event.key]
        return "" if num_answers else "it ended the rollout without an answer of the model; sample one"
    try:
        if not (message["state"] if isinstance(message["state"], str) else render(message["state"])):
            return "its state has no text for the model; return text, or messages with role and content"
    except Exception as error:  # boundary to chat templates, which raise what they like
        return f"the chat template can't render its state: {type(error).__name__}: {error}"
    if num_answers == min(MAX_TURNS, config.environment.max_turns):
        pool.answer(event.key, {"type": "over"})
        return ""
    playing[event.key] += 1
    answer = {"type": "sampled", "text": WRONG_ANSWER, "finish_reason": "stop", "num_tokens": len(WRONG_ANSWER) // 4}
    pool.answer(event.key, answer)
    return ""


def _start(config: Config, row: Row, number: int, render: Render) -> dict[str, Any]:
    prompt = Prompt(number, number, 0, row.messages, row.reward_data)
    lease = Lease(str(number), "train", prompt, 1, _NO_SAMPLING, "trial", 0, 0, 0, number)
    return start_message(config.environment, lease, 0, render(row.messages) if row.messages else None)


def renderer(config: Config) -> Render:
    """Return the function that renders messages as text, as generators do it."""
    if not has_model(config.generator.backend):
        return lambda messages: "\n".join(message["content"] for message in messages)
    tokenizer = load_tokenizer(config.model.path, needs_template=config.data.prompt_format == "chat")
    text = TokenizerText(tokenizer, config.data.template_arguments)
    return lambda messages: prompt_text(messages, text.render) or ""
