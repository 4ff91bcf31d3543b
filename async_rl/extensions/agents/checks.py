"""Checks before a run with agents starts, which ``async_rl.checks`` has: the relay's address, and the agent itself.

The user's agent plays rows of the training data, so that a mistake in it costs no sampling. It runs as in a run: in a
process of its own, against a real HTTP front. In place of the model, each call gets the same text, which solves
nothing. ``checks.environment_trial`` does the same for environments.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.config.config import Config
from async_rl.config.generator import has_model
from async_rl.data.chat import load_tokenizer, model_directory
from async_rl.data.dataset import Row
from async_rl.extensions.agents.programs.pool import agent_pool
from async_rl.extensions.agents.rollouts import AgentRollouts
from async_rl.extensions.agents.start import open_front
from async_rl.generator.backend import Sampled
from async_rl.generator.rollouts import Graded, ThreadGrader
from async_rl.launch.checks.addresses import check_own_address
from async_rl.launch.checks.environment_trial import LIMIT_S, NUM_ROWS, POLL_S, renderer, trial_findings, trial_problem
from async_rl.launch.checks.finding import Finding
from async_rl.launch.checks.start import Start
from async_rl.queue.core.admission import train_sampling
from async_rl.records import Lease, Prompt
from async_rl.rewards.conformance import WRONG_ANSWER
from async_rl.rewards.records import UNJUDGED


def check_relay(start: Start) -> Iterable[Finding]:
    """Check that the relay can bind its address.

    Raises:
        AddressError: it can't, as ``check_own_address``.
    """
    address = start.config.environment.relay
    assert address is not None
    check_own_address(address, "environment.relay", start.config, insecure=start.insecure)
    return ()


def check_agents(start: Start) -> Iterable[Finding]:
    """Let the agent play the first rows, if generators on this machine play it. Warn if it fails on some of them only.

    Raises:
        ConfigError: as ``try_agent``.
    """
    config = start.config
    if not config.samples_here:
        return
    if config.environment.relay is not None:
        yield Finding("environment", "skip", "agents are programs that start elsewhere (environment.relay)")
    else:
        yield from trial_findings(config, start.rows, try_agent(config, start.rows))


def try_agent(config: Config, rows: Sequence[Row]) -> str:
    """Let the agent play one rollout on each of the first ``rows``.

    Return what failed on some of the rows, in one line; empty if nothing did. A run survives such failures.

    Raises:
        ConfigError: the agent can't be imported; or on each of the rows it raises an exception, makes no call, or
            returns something other than it must.
    """
    tried = rows[:NUM_ROWS]
    deadline = time.monotonic() + LIMIT_S
    with ExitStack() as stack:
        rollouts, engine = _rollouts(config, stack)
        for number, row in enumerate(tried):
            prompt = Prompt(number, number, 0, row.messages, row.reward_data)
            lease = Lease(str(number), "train", prompt, 1, train_sampling(config), "trial", 0, 0, 0, number)
            rollouts.submit(lease, rollouts.encode(lease))
        ended: list[Graded] = []
        while len(ended) < len(tried):
            rollouts.take(engine.step())
            ended += rollouts.collect()
            if time.monotonic() > deadline:
                return (
                    f"{config.environment.shown} did not play {len(tried) - len(ended)} of {len(tried)} rows within "
                    f"{LIMIT_S:g} s"
                )
            time.sleep(POLL_S)
    errors = {one.lease.prompt.row: one.failure.detail for one in ended if one.failure is not None}
    return trial_problem(config, "agent", errors, len(tried))


class _FixedAnswers:
    """Gives each call the same answer. It implements ``agents.rollouts.Engine``."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.max_running = NUM_ROWS
        self._token_ids = np.array(token_ids, np.int32)
        self._calls: list[tuple[Lease, np.ndarray]] = []

    def submit(self, lease: Lease, prompt_ids: np.ndarray) -> None:
        self._calls.append((lease, prompt_ids))

    def cancel(self, lease_id: str) -> None:
        self._calls = [call for call in self._calls if call[0].lease_id != lease_id]

    def progress(self) -> dict[str, int]:
        return {}

    def step(self) -> list[Sampled]:
        calls, self._calls = self._calls, []
        return [self._answer(lease, prompt_ids) for lease, prompt_ids in calls]

    def _answer(self, lease: Lease, prompt_ids: np.ndarray) -> Sampled:
        token_ids = self._token_ids[: lease.sampling.max_new_tokens]
        is_whole = len(token_ids) == len(self._token_ids)
        return Sampled(
            lease.lease_id, 0, prompt_ids, token_ids, np.zeros(len(token_ids), np.float32),
            np.zeros(len(token_ids), np.int32), "stop" if is_whole else "length", WRONG_ANSWER,
        )  # fmt: skip


def _rollouts(config: Config, stack: ExitStack) -> tuple[AgentRollouts, _FixedAnswers]:
    """Return the agent's rollouts, and the engine that answers them. ``stack`` closes what they use."""
    pool = stack.enter_context(closing(agent_pool(config)))
    directory: Path | None = None
    token_ids = [1]
    if has_model(config.generator.backend):
        directory = model_directory(config.model.path)
        tokenizer: Any = load_tokenizer(directory, needs_template=False)
        end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        token_ids = [*tokenizer.encode(WRONG_ANSWER, add_special_tokens=False), *end]

    front, engine = stack.enter_context(closing(open_front(config, directory))), _FixedAnswers(token_ids)
    # What the reward functions say of the rollouts is tried elsewhere.
    grader = stack.enter_context(closing(ThreadGrader(lambda item: UNJUDGED)))
    agents = AgentRollouts(engine, pool, front, grader, renderer(config), config.environment, train_sampling(config))
    return agents, engine
