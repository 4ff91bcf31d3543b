"""Whole runs whose rollouts are sessions of agents, which call the generator's HTTP endpoint."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.end_to_end.faults_harness import FaultRun, fault_config, fault_run, trained_rows
from tests.end_to_end.harness import (
    check_ledger,
    command_lines,
    metrics,
    processes_of,
    roles,
    steps,
    wait_until,
    write_config,
)
from tests.end_to_end.tiny import tiny_config, write_tiny_task

CLIENT = '''
"""Agents that call the token endpoint with the standard library alone."""
import asyncio, json, os, time, urllib.error, urllib.request


def post(task, token_ids, **params):
    """The status, and the answer or the error."""
    body = json.dumps({"token_ids": token_ids, "sampling_params": params}).encode()
    url = task.base_url.removesuffix("/v1") + "/inference/v1/generate"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=60) as reply:
            return 200, json.load(reply)["choices"][0]
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]


async def ask(task, token_ids, **params):
    return await asyncio.to_thread(post, task, token_ids, **params)

'''
THREE_CALLS = '''
async def run(task):
    """Its second and third call continue the one before."""
    ids = [1, 2]
    for number in range(3):
        status, answer = await ask(task, ids, max_tokens=4)
        assert status == 200, answer
        ids = [*ids, *answer["token_ids"], 3]
    return float(sum(ids) % 2)
'''


def write_agent_run(directory: Path, source: str, **changes: dict[str, Any]) -> Path:
    """A run of ``tiny_config`` whose rollouts are played by the agent ``run`` of ``source``."""
    agent = directory / "agent.py"
    agent.write_text(CLIENT + source)
    config = tiny_config(
        directory,
        write_tiny_task(directory),
        environment={"name": f"{agent}:run"},
        sampling={"group_size": 2, "max_new_tokens": 12, "max_prompt_tokens": 16},
    )
    config["generator"] |= {"serve": True, "allow_code": [str(agent)]}
    config["data"].pop("eval")
    config["log"] = {"rollouts_every": 1, "rollouts_groups": "all"}
    for section, keys in changes.items():
        config.setdefault(section, {}).update(keys)
    return write_config(directory / "config.toml", config)


def agent_counts(run_dir: Path) -> dict[str, float]:
    """The counts of calls by kind, as of the last step."""
    *_, last = [row for row in metrics(run_dir) if "version" in row]
    return {name: value for name, value in last.items() if name.startswith("agent/")}


def trained_calls(run_dir: Path) -> Counter[str]:
    """The calls by kind of all rollouts that were trained, and the rollouts as ``sessions``."""
    counts: Counter[str] = Counter()
    for path in (run_dir / "rollouts").glob("step-*.jsonl"):
        for line in path.read_text().splitlines():
            counts.update(json.loads(line)["session"]["calls"], sessions=1)
    return counts


@pytest.mark.slow
def test_an_agent_trains_on_what_it_was_answered(tmp_path: Path):
    config = write_agent_run(
        tmp_path, THREE_CALLS, queue={"max_staleness": 0}, learner={"steps": 2, "groups_per_step": 4}, eval={"every": 0}
    )
    with roles(tmp_path / "logs") as start:
        start("launch", "launch", str(config)).succeed()
    run_dir = tmp_path / "run"
    assert steps(run_dir) == [1, 2]
    rows = [row for row in metrics(run_dir) if "version" in row]
    for row in rows:
        lag_0 = {name: row[name] for name in row if name.startswith("lag_0/ratio")}
        assert lag_0
        assert lag_0 == pytest.approx(dict.fromkeys(lag_0, 1.0), abs=1e-5)
    # 2 steps of 4 groups of 2 rollouts of 3 calls.
    kinds = {"first": 16, "continued": 32, "branched": 0, "rewritten": 0, "lost": 0}
    assert trained_calls(run_dir) == {"sessions": 16, **kinds}
    ledger = check_ledger(run_dir)
    assert ledger["groups"]["trained"] == 8
    assert ledger["groups"]["queued"] == ledger["groups"]["taken"] == ledger["groups"]["in_flight"] == 0


FAKE: dict[str, dict[str, Any]] = {
    "experimental": {"fake": {"mean_tokens": 4.0, "step_time_s": 0.01, "vocab_size": 20}},
    "sampling": {"group_size": 4, "max_new_tokens": 48, "max_prompt_tokens": 16},
    "environment": {"timeout_s": 5.0, "first_reset_timeout_s": 60.0},
    "data": {"epochs": 100},
    "eval": {"every": 0},
    "queue": {"max_staleness": 16},
}
"""A run with the fake backend."""
NOTES = '''
def note(task, line):
    with open(os.path.join(os.path.dirname(__file__), "said"), "a") as file:
        file.write(f"{line}\\n")


async def calm(task):
    """Three calls; how long each took is noted."""
    ids = [1, 2]
    for number in range(3):
        began = time.monotonic()
        status, answer = await ask(task, ids, max_tokens=4)
        assert status == 200, answer
        note(task, f"{time.monotonic() - began:.4f} {task.extra_info['idx']}")
        ids = [*ids, *answer["token_ids"], 3]
    return float(sum(ids) % 2)

'''


def settled(run_dir: Path) -> dict[str, Any]:
    """The ledger of a run that has ended, of which nothing is left open."""
    ledger = check_ledger(run_dir)
    groups = ledger["groups"]
    assert groups["queued"] == groups["taken"] == groups["in_flight"] == 0
    return ledger


@pytest.mark.long
@pytest.mark.timeout(900)
def test_two_hundred_sessions_at_once_lose_no_call(tmp_path: Path):
    config = write_agent_run(tmp_path, NOTES + "run = calm\n", **FAKE)
    agents = tomllib.loads(config.read_text())
    agents["generator"] |= {"backend": "fake", "batch_size": 50}  # four sessions for each slot
    agents["learner"] |= {"steps": 20, "groups_per_step": 16}
    with roles(tmp_path / "logs") as start:
        launch = start("launch", "launch", str(write_config(config, agents)))
        launch.succeed(deadline_s=800.0)
    run_dir = tmp_path / "run"
    assert steps(run_dir) == list(range(1, 21))
    assert settled(run_dir)["failures"] == []
    counts = agent_counts(run_dir)
    assert counts["agent/lost"] == 0
    assert counts["agent/continued"] == 2 * counts["agent/first"] > 0
    print(counts, latencies(tmp_path))


def latencies(directory: Path) -> list[float]:
    """Seconds: the median and the 99th percentile of the calls of ``calm``."""
    took = [float(line.split()[0]) for line in (directory / "said").read_text().splitlines()]
    return [float(value) for value in np.percentile(took, [50, 99])]


HOSTILE = (
    NOTES
    + '''
import socket, subprocess
from urllib.parse import urlsplit


def connection(task):
    split = urlsplit(task.base_url)
    return socket.create_connection((split.hostname, split.port), timeout=30)


def flood(task, seconds=3.0):
    """As many calls as it can send, valid or not, over connections that stay open."""
    body = b'{"token_ids": [1], "sampling_params": {"max_tokens": 1}}'
    path = urlsplit(task.base_url).path.removesuffix("/v1") + "/inference/v1/generate"
    head = f"POST {path} HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n".encode()
    end = time.monotonic() + seconds
    with connection(task) as one:
        one.setblocking(False)
        while time.monotonic() < end:
            try:
                one.send((head + body) * 20)
            except BlockingIOError:
                time.sleep(0.001)


def large(task):
    with connection(task) as one:
        path = urlsplit(task.base_url).path.removesuffix("/v1") + "/inference/v1/generate"
        one.sendall(f"POST {path} HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: {100 << 20}\\r\\n\\r\\n".encode())
        try:
            for _ in range(100):
                one.sendall(b"1" * (1 << 20))
        except OSError:
            pass  # it was refused meanwhile


class With:
    """A task with another key."""

    def __init__(self, task, key):
        self.base_url = task.base_url.replace(task.api_key, key)


async def run(task):
    row = task.extra_info["idx"]
    kind = row % 8 if row > 2 else 0  # the first rows are tried before the run
    if kind == 1:
        await asyncio.sleep(1000)
    elif kind == 2:
        for _ in range(5):
            subprocess.Popen(["sleep", "100000"], start_new_session=True)
    elif kind == 3:
        await asyncio.gather(*(asyncio.to_thread(flood, task) for _ in range(4)))
    elif kind == 4:
        await asyncio.to_thread(large, task)
    elif kind == 5:
        with open(os.path.join(os.path.dirname(__file__), "keys"), "a+") as file:
            file.write(f"{task.api_key}\\n")
            file.seek(0)
            first = file.readline().strip()
        status, _ = await ask(With(task, "wrong"), [1])
        assert status == 401, status
        if first != task.api_key:
            status, _ = await ask(With(task, first), [1], max_tokens=1)  # another's, which may have ended
            note(task, f"stolen {status}")
    elif kind == 6:
        os._exit(1)
    else:
        return await calm(task)
    await ask(task, [1], max_tokens=4)
    return 0.0
'''
).replace('note(task, f"stolen', 'print(f"stolen')


@pytest.mark.long
@pytest.mark.timeout(900)
def test_hostile_agents_hurt_nobody_else(tmp_path: Path):
    medians: dict[str, list[float]] = {}
    for name, source in (("calm", NOTES + "run = calm\n"), ("hostile", HOSTILE)):
        directory = tmp_path / name
        directory.mkdir()
        config = write_agent_run(directory, source, **FAKE)
        agents = tomllib.loads(config.read_text())
        agents["generator"] |= {"backend": "fake", "batch_size": 16}
        agents["environment"]["first_reset_timeout_s"] = 5.0
        agents["experimental"]["fake"]["step_time_s"] = 0.05  # a call takes 0.2 s, as an engine's does
        agents["learner"] |= {"steps": 12, "groups_per_step": 4}
        with roles(directory / "logs") as start:
            launch = start("launch", "launch", str(write_config(config, agents)), env={"ASYNC_RL_TEST": str(directory)})
            launch.succeed(deadline_s=400.0)
        assert steps(directory / "run") == list(range(1, 13))
        settled(directory / "run")
        assert "agents/front.py" not in launch.log  # no traceback of the front
        assert not processes_of(f"ASYNC_RL_TEST={directory}")  # and so no child that an agent has left
        medians[name] = latencies(directory)
    print(medians)
    assert medians["hostile"][0] < 2 * medians["calm"][0]


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", range(3))
def test_agents_fronts_and_roles_killed_at_random_moments_train_nothing_twice(tmp_path: Path, seed: int):
    num_rows = 102
    config = fault_config(tmp_path, num_rows=num_rows, generator={"count": 2}, queue={"on_stale": "mask"})
    agent = tmp_path / "agent.py"
    agent.write_text(CLIENT + RETRIES)
    raw = tomllib.loads(config.read_text())
    raw["data"].pop("eval")
    raw["environment"] = {"name": f"{agent}:run", "timeout_s": 5.0}
    raw["sampling"]["max_new_tokens"] = 60
    raw["queue"]["max_attempts"] = 50
    raw["generator"] |= {"serve": True, "allow_code": [str(agent)]}
    write_config(config, raw)
    chance = random.Random(seed)
    victims = ["agent", "front", "generator", "queue", "front", "agent", "learner", "generator", "agent", "front"]
    with fault_run(tmp_path, config) as run:
        run.launch()
        for victim in victims:
            run.await_step(run.last_step() + 3)
            pid = wait_until(f"a {victim}", run.tended(lambda victim=victim: pid_of(run, victim, chance)))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            print(f"step {run.last_step()}: killed the {victim}", flush=True)
        assert not run.is_finished
        run.finish(deadline_s=400)
    trained = [position for row in trained_rows(run.run_dir) for position, _ in row["groups"]]
    assert sorted(trained) == list(range(num_rows))
    print(settled(run.run_dir)["groups"])


def pid_of(run: FaultRun, victim: str, chance: random.Random) -> int | None:
    """A process of the run. An agent is a process that a fork server has forked."""
    if victim == "queue":
        return run.queue_pid()
    lines = command_lines(run.marker)
    if victim == "agent":
        servers = {pid for pid, line in lines.items() if "async_rl.extensions.agents.programs.fork_server" in line}
        found = [pid for pid in servers if parent_of(pid) in servers]
    elif victim == "front":
        found = [pid for pid, line in lines.items() if "async_rl.extensions.agents.front.server" in line]
    else:
        found = [
            pid for pid, line in lines.items() if "async_rl" in line and line[line.index("async_rl") + 1] == victim
        ]
    return chance.choice(sorted(found)) if found else None


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


RETRIES = '''
async def run(task):
    """Three calls, each repeated if its connection breaks."""
    ids = [1, 2]
    for number in range(3):
        while True:
            try:
                status, answer = await ask(task, ids, max_tokens=6)
                break
            except (OSError, ValueError):
                await asyncio.sleep(0.05)
        assert status == 200, answer
        ids = [*ids, *answer["token_ids"], 3]
    return float(sum(ids) % 2)
'''
