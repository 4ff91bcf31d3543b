"""Plays leases with agents in processes of their own and a real HTTP front, over any backend."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from async_rl.config.generator import EnvironmentConfig
from async_rl.environments.pool import EnvironmentPool
from async_rl.extensions.agents.front.process import Front
from async_rl.extensions.agents.front.requests import RequestRules
from async_rl.extensions.agents.outside_programs import OutsidePrograms
from async_rl.extensions.agents.programs.pool import code_pool, program_pool
from async_rl.extensions.agents.rollouts import AgentRollouts, Engine
from async_rl.generator.backend import Sampled
from async_rl.generator.rollouts import Graded
from async_rl.queue.messages import Failure
from async_rl.records import Rollout
from async_rl.rewards.records import RewardInput, RewardOutput
from tests.generator.leases import make_lease
from tests.generator.scripted import CharacterText, InlineGrader

DEADLINE_S = 180.0
CLIENT = """
import asyncio, json, os, sys, time, urllib.error, urllib.request


def post(url, body, key=""):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def generate(url, token_ids, params):
    body = {"token_ids": token_ids, "sampling_params": params}
    return post(url.removesuffix("/v1") + "/inference/v1/generate", body)
"""
HEAD = f"""{CLIENT}
async def ask(task, token_ids, **params):
    status, found = await asyncio.to_thread(generate, task.base_url, token_ids, params)
    return status, found["choices"][0] if status == 200 else found["error"]


def note(line):
    with open(os.path.join(os.path.dirname(__file__), "said"), "a") as file:
        print(line, file=file)

"""
PROGRAM = f"""{CLIENT}
def ask(ids, base=os.environ.get("OPENAI_BASE_URL", "")):
    return generate(base, ids, {{}})

given = json.loads(sys.stdin.readline())
task = json.load(open(os.environ["ASYNC_RL_TASK"]))
"""
"""What a program needs that is an agent: ``given`` it on its standard input, and its ``task``."""


def rollout_of(graded: Graded) -> Rollout:
    assert graded.rollout is not None, graded.failure
    return graded.rollout


def failure_of(graded: Graded) -> Failure:
    assert graded.failure is not None
    return graded.failure


class Steps(Engine, Protocol):
    """The methods of ``Backend`` that sessions and ``World`` use."""

    def step(self) -> list[Sampled]: ...


EngineT = TypeVar("EngineT", bound=Steps)


def score(item: RewardInput) -> RewardOutput:
    return RewardOutput({"length": float(len(item.text))}, 1.0 if item.text == "done" else 0.0)


class Turns(Generic[EngineT]):
    """Takes turns of the generator's loop.

    Args:
        backend: samples the answers.
        pool: runs the agents, or offers their sessions elsewhere.
        front: the HTTP front.
        settings: the section ``[environment]``.
        clock: returns the time in seconds.
        vocab_size: token ids must be below it.
    """

    def __init__(
        self, backend: EngineT, pool: EnvironmentPool | OutsidePrograms, front: Front, settings: EnvironmentConfig, *,
        clock: Callable[[], float], vocab_size: int = 200,
    ) -> None:  # fmt: skip
        self.backend, self.front = backend, front
        self.rollouts = AgentRollouts(
            backend, pool, front, InlineGrader(score), CharacterText().render, settings, make_lease().sampling,
            vocab_size=vocab_size, max_abs=100.0, clock=clock, judged_by=["gt_answer"],
        )  # fmt: skip
        self.done: list[Graded] = []

    @property
    def told(self) -> object:
        """What a test that waits in vain shows."""
        return self.rollouts.trouble

    def submit(self, *, group_size: int = 1, max_new_tokens: int = 20, **lease: Any) -> None:
        submitted = make_lease(group_size=group_size, max_new_tokens=max_new_tokens, **lease)
        self.rollouts.submit(submitted, self.rollouts.encode(submitted))

    def turn(self) -> None:
        self.rollouts.take(self.backend.step())
        self.done += self.rollouts.collect()
        time.sleep(0.002)

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            self.turn()
            assert time.monotonic() < deadline, (self.done, self.told)


class World(Turns[EngineT]):
    """Plays one lease with an agent whose source is given.

    Args:
        directory: gets the agent's file, and what the agent notes.
        stack: ends the agents and the front.
        source: the agent's, after ``HEAD``.
        backend: samples the answers.
        vocab_size: token ids must be below it.
        max_model_len: the longest sequence, in tokens.
        tokenizer: a directory with a tokenizer, for chats; None: there are none.
        config: the section ``[environment]``.
    """

    def __init__(
        self, directory: Path, stack: ExitStack, source: str, backend: EngineT, *,
        clock: Callable[[], float] = time.monotonic, vocab_size: int = 200, max_model_len: int = 72,
        tokenizer: Path | None = None, **config: object,
    ) -> None:  # fmt: skip
        path = directory / "agent.py"
        path.write_text(HEAD + source)
        named = {} if {"command", "name"} & config.keys() else {"name": f"{path}:run"}
        settings = EnvironmentConfig(**named, **config)  # type: ignore[arg-type]
        self.said = directory / "said"
        front = stack.enter_context(
            closing(Front(RequestRules("tiny", frozenset({"judge"})), max_model_len, tokenizer))
        )
        allowed = [settings.name.partition(":")[0]]
        pool = program_pool(settings) if settings.program else code_pool(settings, allowed, None)
        self.pool = stack.enter_context(closing(pool))
        super().__init__(backend, self.pool, front, settings, clock=clock, vocab_size=vocab_size)

    @property
    def told(self) -> object:
        return self.notes

    def play(self, *, group_size: int = 1, **lease: Any) -> list[Graded]:
        self.submit(group_size=group_size, **lease)
        self.until(lambda: len(self.done) == group_size or (self.done and self.done[0].rollout is None))
        return sorted(self.done, key=lambda graded: graded.index)

    @property
    def notes(self) -> list[str]:
        return self.said.read_text().splitlines() if self.said.exists() else []
