"""Whole runs whose agents are programs that ``async-rl agent`` starts, as on another machine, with keys."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_rl.launch.status import ask_status
from async_rl.net.keys import ClientKeys, make_keys
from tests.end_to_end.harness import Role, roles, steps, wait_until, write_config
from tests.extensions.agents.test_agents_run import FAKE, settled, trained_calls, write_agent_run
from tests.extensions.agents.test_outside import PROGRAM
from tests.ports import free_address

THREE_CALLS = (
    PROGRAM
    + """
ids = [1, 2]
for number in range(3):
    status, answer = ask(ids)
    assert status == 200, answer
    ids = [*ids, *answer["choices"][0]["token_ids"], 3]
status, answer = post(given["finish_url"], {"reward": float(sum(ids) % 2)}, given["finish_key"])
assert status == 200, answer
"""
)


def with_relay(directory: Path, config: Path, **changes: dict[str, Any]) -> tuple[str, str]:
    """Give the run of ``config`` keys, and a relay in place of its agent. Return the queue's and relay's address."""
    keys, queue, relay = directory / "keys", free_address(), free_address()
    make_keys(keys, ["agents"])
    raw = tomllib.loads(config.read_text())
    raw["environment"] = {"relay": relay, **changes.pop("environment", {})}
    raw["queue"] |= {"address": queue, "keys": str(keys)}
    raw["generator"].pop("allow_code", None)
    raw["generator"]["serve"] = True
    for section, values in changes.items():
        raw.setdefault(section, {}).update(values)
    write_config(config, raw)
    return queue, relay


def start_agent(start: Callable[..., Role], directory: Path, queue: str, source: str, name: str = "agent") -> Role:
    program = directory / "program.py"
    program.write_text(source)
    return start(
        name, "agent", "--connect", queue, "--keys", str(directory / "keys" / "agents.key"), "--parallel", "4", "--",
        sys.executable, str(program), is_program=True,
    )  # fmt: skip


@pytest.mark.slow
def test_programs_on_another_machine_play_a_run_which_waits_for_them(tmp_path: Path):
    config = write_agent_run(tmp_path, "", **FAKE)
    queue, relay = with_relay(
        tmp_path, config, generator={"backend": "fake"}, learner={"steps": 3, "groups_per_step": 4}
    )
    keys = ClientKeys.load(tmp_path / "keys" / "agents.key")
    with roles(tmp_path / "logs") as start:
        launch = start("launch", "launch", str(config))
        wait_until("the queue", lambda: (tmp_path / "run" / "queue.json").exists())

        def trouble() -> str:
            status = ask_status(queue, 30.0, keys)
            assert status["relay"] == relay
            return "".join(one["trouble"] for one in status["generators"])

        wait_until(
            "the generator's word", lambda: f"no `async-rl agent` is connected to the relay at {relay}" in trouble()
        )
        assert steps(tmp_path / "run") == []
        stranger = tmp_path / "stranger"
        make_keys(stranger)
        refused = start("stranger", "agent", "--connect", queue, "--keys", str(stranger / "client.key"), "--wait", "3")
        assert refused.wait() == 2
        assert "no queue" in refused.log or "did not answer" in refused.log
        agent = start_agent(start, tmp_path, queue, THREE_CALLS)
        launch.succeed()
        agent.succeed(60.0)
    assert steps(tmp_path / "run") == [1, 2, 3]
    assert settled(tmp_path / "run")["failures"] == []
    counts = trained_calls(tmp_path / "run")
    assert counts["lost"] == 0
    assert counts["continued"] == 2 * counts["first"] == 2 * counts["sessions"] > 0
