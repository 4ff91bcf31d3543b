"""Checks before a run with agents starts, which ``async_rl.checks`` has: the relay's address, and the agent itself.

The user's agent plays rows of the training data, so that a mistake in it costs no sampling. It runs as in a run: in a
process of its own, against a real HTTP front. In place of the model, each call gets the same text, which solves
nothing. ``checks.environment_trial`` does the same for environments.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.config.config import Config
from async_rl.config.generator import has_model
from async_rl.data.chat import load_tokenizer, model_directory, stored_template
from async_rl.data.dataset import Row
from async_rl.data.turn_parts import Part, num_computed_again, parts_of, role_headers
from async_rl.extensions.agents.programs.isolation import warning
from async_rl.extensions.agents.programs.pool import agent_pool
from async_rl.extensions.agents.rollouts import AgentRollouts
from async_rl.extensions.agents.start import open_front
from async_rl.generator.backend import Sampled
from async_rl.generator.rollouts import Graded, ThreadGrader
from async_rl.launch.checks.addresses import check_own_address
from async_rl.launch.checks.environment_trial import LIMIT_S, NUM_ROWS, POLL_S, renderer, trial_findings, trial_problem
from async_rl.launch.checks.finding import Finding, warnings
from async_rl.launch.checks.start import Start
from async_rl.queue.core.admission import train_sampling
from async_rl.records import Lease, Prompt
from async_rl.rewards.conformance import WRONG_ANSWER
from async_rl.rewards.records import UNJUDGED
from async_rl.run.records.token_columns import GIVEN
from async_rl.terminal import visible

Decode = Callable[[Sequence[int]], str]
_SHOWN = 200
"""Letters that are shown of the beginning and of the end of a long text."""


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
        if config.environment.command and config.environment.sandbox != "off":
            found = warnings("environment.sandbox", warning(config.environment.sandbox))
            yield from found or [Finding("environment.sandbox", "OK", "each program of an agent runs isolated")]
        yield from trial_findings(config, start.rows, *try_agent(config, start.rows))


def try_agent(config: Config, rows: Sequence[Row]) -> tuple[str, str]:
    """Let the agent play one rollout on each of the first ``rows``.

    Return what failed on some of the rows, in one line, empty if nothing did: a run survives such failures. And, for
    people, what was played.

    Raises:
        ConfigError: the agent can't be imported; or on each of the rows it raises an exception, makes no call, or
            returns something other than it must.
    """
    tried = rows[:NUM_ROWS]
    deadline = time.monotonic() + LIMIT_S
    with ExitStack() as stack:
        rollouts, engine, decode, headers = _rollouts(config, stack)
        for number, row in enumerate(tried):
            prompt = Prompt(number, number, 0, row.messages, row.reward_data)
            lease = Lease(str(number), "train", prompt, 1, train_sampling(config), "trial", 0, 0, 0, number)
            rollouts.submit(lease, rollouts.encode(lease))
        ended: list[Graded] = []
        while len(ended) < len(tried):
            rollouts.take(engine.step())
            ended += rollouts.collect()
            if time.monotonic() > deadline:
                left = len(tried) - len(ended)
                return f"{config.environment.shown} did not play {left} of {len(tried)} rows within {LIMIT_S:g} s", ""
            time.sleep(POLL_S)
    errors = {one.lease.prompt.row: one.failure.detail for one in ended if one.failure is not None}
    ended.sort(key=lambda one: one.lease.prompt.row)
    shown = "\n".join(line for one in ended for line in _played_lines(one, decode, headers))
    return trial_problem(config, "agent", errors, len(tried)), shown


def _played_lines(graded: Graded, decode: Decode, headers: Mapping[str, str]) -> Iterator[str]:
    """Yield what an agent played as lines: whose message each part is, and whether it is context, or a target that is
    to be trained. ``headers`` are those of ``turn_parts.role_headers``.
    """
    rollout = graded.rollout
    if rollout is None or rollout.session is None:
        return
    calls = ", ".join(f"{number} {kind}" for kind, number in rollout.session.calls.items() if number)
    sequences: list[list[Part]] = []
    for one in rollout.sequences:
        outcomes = np.where(one.loss_mask, "trained", GIVEN).tolist()
        sequences.append(parts_of([decode([token]) for token in one.token_ids.tolist()], outcomes, headers))
    again = num_computed_again(sequences)
    cost = f"; {again} tokens of context are computed again for those that do not continue" if again else ""
    yield f"row {graded.lease.prompt.row}: calls: {calls}{cost}"
    if rollout.session.without_effect:
        yield f"  sent without effect: {visible(', '.join(rollout.session.without_effect))}"
    for sequence, parts in zip(rollout.sequences, sequences, strict=True):
        for role, use, begin, end in parts:
            text = visible(decode(sequence.token_ids[begin:end].tolist()).strip().replace("\n", "\\n"))
            text = text if len(text) <= 2 * _SHOWN else f"{text[:_SHOWN]} ... {text[-_SHOWN:]}"
            yield f"  {role or '-':<9} {use:<7} {end - begin:6,} tokens  {text}"


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


def _rollouts(
    config: Config, stack: ExitStack
) -> tuple[AgentRollouts, _FixedAnswers, Decode, Mapping[str, str]]:  # fmt: skip
    """Return the agent's rollouts, the engine that answers them, what makes text of tokens, and the headers of the chat
    template's messages. ``stack`` closes what they use.
    """
    pool = stack.enter_context(closing(agent_pool(config)))
    directory: Path | None = None
    token_ids, decode, headers = [1], str, {}
    if has_model(config.generator.backend):
        directory = model_directory(config.model.path)
        tokenizer: Any = load_tokenizer(directory, needs_template=False)
        end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        token_ids, decode = [*tokenizer.encode(WRONG_ANSWER, add_special_tokens=False), *end], tokenizer.decode
        headers = role_headers(stored_template(directory))
    front, engine = stack.enter_context(closing(open_front(config, directory))), _FixedAnswers(token_ids)
    # What the reward functions say of the rollouts is tried elsewhere.
    grader = stack.enter_context(closing(ThreadGrader(lambda item: UNJUDGED)))
    agents = AgentRollouts(engine, pool, front, grader, renderer(config), config.environment, train_sampling(config))
    return agents, engine, decode, headers
