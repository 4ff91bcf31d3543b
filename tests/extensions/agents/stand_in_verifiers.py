"""A Python in which a small package stands in for ``verifiers``: it has the parts that our program uses, and one
taskset, ``words``. Whether the real one fits is tried by hand (docs/agents.md says with what).
"""

from __future__ import annotations

import sys
from pathlib import Path

_SOURCES = {
    "verifiers/__init__.py": '__version__ = "0.4.0"\n',
    "verifiers/v1/__init__.py": "",
    "verifiers/v1/configs/__init__.py": "",
    "verifiers/v1/utils/__init__.py": "",
    "verifiers/v1/types.py": "class SamplingConfig:\n    pass\n",
    "verifiers/v1/clients.py": "from types import SimpleNamespace as ModelContext\nClientConfig = dict\n",
    "verifiers/v1/configs/agent.py": """
from types import SimpleNamespace


class AgentConfig:
    def __init__(self, runtime=None, client=None, retries=0):
        self.runtime, self.client = runtime, client
        self.retries = SimpleNamespace(max_retries=retries, rules=[])


def agent_config_fields(config):
    return {name: value for name, value in vars(config).items() if isinstance(value, AgentConfig)}
""",
    "verifiers/v1/utils/loaders.py": """
from contextlib import asynccontextmanager
from types import SimpleNamespace

import words
from verifiers.v1.configs.agent import AgentConfig


def env_config_type(taskset, env):
    return SimpleNamespace(model_fields={"agent": SimpleNamespace(default=AgentConfig())})


def resolve_env_config(raw):
    config = SimpleNamespace(taskset=SimpleNamespace(task=None, **raw["taskset"]), retries=AgentConfig().retries)
    for name in sorted(set(raw) - {"taskset", "id"}):
        setattr(config, name, AgentConfig(**raw[name]))
    return config


class load_environment:
    def __init__(self, config):
        self.config, self.taskset = config, words.Words(config.taskset)

    @asynccontextmanager
    async def serving(self):
        yield

    def slots(self, task):
        return [task]

    async def run_slot(self, task, context):
        assert self.config.agent.runtime == {"type": "subprocess"}
        return await words.run(task, context)

""",
    "words.py": '''
import asyncio, json, os, urllib.request
from types import SimpleNamespace

from pydantic import BaseModel


class Data(BaseModel):
    word: str = ""
    idx: int = 0


class Task:
    def __init__(self, data, config=None):
        self.data = data

    @classmethod
    def data_type(cls):
        return Data


class Words:
    def __init__(self, config):
        self.bounded = not getattr(config, "endless", False)
        if hasattr(config, "broken"):
            raise ValueError(config.broken)

    @classmethod
    def task_type(cls):
        return Task

    def __iter__(self):
        print("a taskset that prints")
        return (Task(Data(word=word, idx=idx)) for idx, word in enumerate("one two three four".split()))


def note(line):
    with open(os.path.join(os.path.dirname(__file__), "notes"), "a") as file:
        file.write(f"{line}\\n")


def call(context, token_ids):
    url = context.client["base_url"].removesuffix("/v1") + "/inference/v1/generate"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps({"token_ids": token_ids}).encode())) as reply:
        return json.load(reply)["choices"][0]["token_ids"]


async def run(task, context):
    """Two calls; the word of the row says what happens then."""
    note(os.getpid())
    ids = await asyncio.to_thread(call, context, [1, 2])
    await asyncio.to_thread(call, context, [1, 2, *ids, 3])
    if task.data.word == "dies":
        os._exit(3)
    if task.data.word == "raises":
        raise KeyError("task")
    if task.data.word == "hangs":
        note("hangs")
        try:
            await asyncio.sleep(1000)
        finally:
            note("stopped")
    errors = [SimpleNamespace(type=task.data.word, message="it broke", status_code=None)]
    failed = task.data.word.endswith("Error")
    trace = SimpleNamespace(
        agent=SimpleNamespace(trainable=True, config=SimpleNamespace(model="policy")), ok=not failed, num_turns=2,
        errors=errors if failed else [], rewards={"right": SimpleNamespace(score=0.5), "unscored": None},
        metrics={"length": 3, "unknown": None}, reward=0.25,
    )
    return SimpleNamespace(ok=not failed, errors=[], traces=[trace] * (2 if task.data.word == "twice" else 1))
''',
}


def write_python(directory: Path) -> str:
    """Write the package and return the path of a Python that has it."""
    for name, source in _SOURCES.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    python = directory / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nPYTHONPATH={directory} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)
