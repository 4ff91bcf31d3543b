"""The agents of ``clients``, each in an environment of its own, whose model is a script: ``make test-agents``."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.data.public_templates import tokenizer_of
from tests.extensions.agents import world
from tests.extensions.agents.clients import CLIENTS, HEAD, NEWEST, TAIL
from tests.extensions.agents.test_agent_rollouts import command
from tests.generator.scripted import ScriptedBackend


def environment_of(requirements: str) -> str:
    """Install ``requirements``, unless an earlier run has. Return the environment's Python."""
    digest = hashlib.sha256(f"{requirements} {NEWEST} {sys.version}".encode()).hexdigest()
    kept = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "async-rl" / f"agents-{digest[:16]}"
    python, installed = str(kept / "bin" / "python"), kept / ".installed"
    if not installed.exists():
        subprocess.run(["uv", "venv", "--clear", "--python", sys.executable, str(kept)], check=True)
        install = ["uv", "pip", "install", "--exclude-newer", NEWEST, "--python", python, *requirements.split()]
        subprocess.run(install, check=True)
        installed.touch()
    return python


@pytest.mark.agents
@pytest.mark.timeout(1800)  # it may install a gigabyte
@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_plays_its_task_and_what_was_sampled_is_trained(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    client, tokenizer = CLIENTS[name], tokenizer_of("qwen3")
    backend = ScriptedBackend(
        lambda index, turn: client.script[turn], encode=lambda text: tokenizer.encode(f"{text}<|im_end|>")
    )
    _, program = command(tmp_path, HEAD + client.program + TAIL)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    monkeypatch.setattr(world, "DEADLINE_S", 900.0)
    with ExitStack() as stack:
        played = world.World(
            tmp_path, stack, "", backend, tokenizer=tmp_path / "tokenizer", vocab_size=len(tokenizer),
            max_model_len=100_000, command=(environment_of(client.requirements), program), timeout_s=900.0,
        )  # fmt: skip
        (graded,) = played.play(max_prompt_tokens=90_000, max_new_tokens=10_000)
    rollout = world.rollout_of(graded)  # its exit status was 0, and it has checked its answer
    assert rollout.session is not None
    assert {kind: number for kind, number in rollout.session.calls.items() if number} == client.calls
    assert rollout.session.tools == client.tools
    assert len(rollout.sequences) == client.calls["first"] + client.calls.get("rewritten", 0)
    trained = [token for one in rollout.sequences for token in one.token_ids[one.loss_mask]]
    assert trained == [token for text in client.script for token in backend.encode(text)]
    assert not client.tools or "1234" in tokenizer.decode(backend.requests[-1][1])  # what the tool returned


def test_the_page_names_each_client_with_its_version():
    page = " ".join((Path(__file__).parents[3] / "docs" / "agents.md").read_text().split())
    for client in CLIENTS.values():
        package, version = client.requirements.split()[0].split("==")
        assert f"{package.partition('[')[0]} {version}" in page
