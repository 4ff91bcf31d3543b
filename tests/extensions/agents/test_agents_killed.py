"""Every process of a run with agents killed at every fault point, while agents call."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.faults_harness import FaultRun, fault_config, fault_run, judge
from tests.end_to_end.harness import command_lines, state_of, wait_until, write_config
from tests.extensions.agents.world import HEAD
from tests.fault_points import AGENT_FAULT_POINTS, FAULT_POINTS
from tests.processes import parent_of

POINTS = (*FAULT_POINTS, *AGENT_FAULT_POINTS)
VICTIMS = ("agent", "front", "fork_server", "generator", "queue", "learner")
NUM_ROWS, POISON_ROWS = 160, (3, 7)
"""Of the rows that always fail, there are few and early ones: they are out of attempts long before the data ends."""
MODULES = {
    "front": "async_rl.extensions.agents.front.server",
    "fork_server": "async_rl.extensions.agents.programs.fork_server",
}
PLAYS = '''
import http.client, subprocess
from pathlib import Path

PLAYING = Path(__file__).parent / "playing"


async def persist(task, path, key, body):
    """POST until there is an answer: processes are killed."""
    url = task.base_url.removesuffix("/v1") + path
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Authorization": f"Bearer {key}"})

    def send():
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)

    while True:
        try:
            return await asyncio.to_thread(send)
        except urllib.error.HTTPError:
            raise
        except (OSError, ValueError, http.client.HTTPException):
            await asyncio.sleep(0.02)


async def run(task):
    """``play``, with a file that says that this process plays."""
    mark = PLAYING / str(os.getpid())
    mark.touch()
    try:
        if "poison" in task.prompt:
            raise RuntimeError("poison")
        return await play(task)
    finally:
        mark.unlink(missing_ok=True)
'''
CALLS = '''
async def play(task):
    """Three calls, each the continuation of the one before, with a tool's time between them."""
    row, ids, asked = task.extra_info["idx"], [1, 2], {"sampling_params": {"max_tokens": 6}}
    if row % 3 == 0:  # it leaves a process behind, so all that its own has started is killed
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    for number in range(3):
        answer = await persist(task, "/inference/v1/generate", task.api_key, {"token_ids": ids, **asked})
        ids = [*ids, *answer["choices"][0]["token_ids"], 3]
        await asyncio.sleep(0.1)
    reward = float(sum(ids) % 2)
    if row % 2:
        return reward
    await persist(task, "/finish", task.finish_key, {"reward": reward})
'''


class Processes:
    """The processes of a run with agents, whose agents keep files in ``playing``."""

    def __init__(self, run: FaultRun, playing: Path, chance: random.Random) -> None:
        self._run, self._playing, self._chance = run, playing, chance

    def agents(self) -> list[int]:
        """Those that play a rollout."""
        pids = [int(path.name) for path in self._playing.iterdir()]
        return sorted(pid for pid in pids if state_of(pid) not in (None, "Z"))

    def near(self, held: int, victim: str) -> int | None:
        """A process of the kind ``victim``, of the generator that ``held`` belongs to, or of any if it is of none."""
        if victim == "queue":
            return self._run.queue_pid()
        if victim == "learner":
            return self._run.pid_of("learner")
        generators = [pid for index in range(2) if (pid := self._run.pid_of("generator", index)) is not None]
        home = next((pid for pid in ancestors(held) if pid in generators), None)
        found = generators
        if victim == "agent":
            found = self.agents()
        elif victim != "generator":
            lines = command_lines(self._run.marker)
            found = [pid for pid, line in lines.items() if MODULES[victim] in line and parent_of(pid) in generators]
        related = [pid for pid in found if home in ancestors(pid)]
        return self._chance.choice(related or found) if found else None


def ancestors(pid: int) -> list[int]:
    """The process itself, its parent, and so on."""
    found = [pid]
    while found[-1] > 1:
        found.append(parent_of(found[-1]))
    return found


@contextlib.contextmanager
def killed_run(
    directory: Path, source: str, poison: Sequence[int] = (), *,
    killed_codes: Sequence[int] = (-signal.SIGKILL,), generator_settings: Sequence[str] = (), **changes: dict[str, Any],
) -> Iterator[tuple[FaultRun, Processes]]:  # fmt: skip
    """A run whose agents play the function ``play`` of ``source``, and that has begun. ``changes`` is of its config.

    ``generator_settings`` are those of its generators' machines, and ``killed_codes`` as ``FaultRun`` takes them.
    """
    playing, agent = directory / "playing", directory / "agent.py"
    playing.mkdir()
    agent.write_text(HEAD + PLAYS + source)
    config = fault_config(directory, num_rows=NUM_ROWS, poison=poison, queue={"max_staleness": 16})
    raw = tomllib.loads(config.read_text())
    raw["data"].pop("eval")
    raw["environment"] = {"name": f"{agent}:run", "timeout_s": 10.0}
    raw["generator"] |= {"serve": True, "allow_code": [str(agent)]}
    for section, keys in changes.items():
        raw.setdefault(section, {}).update(keys)
    write_config(config, raw)
    settings = (f'generator.allow_code=["{agent}"]', *generator_settings)
    options = [word for setting in settings for word in ("--set", setting)]
    with fault_run(directory, config, generator_options=options, killed_codes=killed_codes) as run:
        run.begin()
        yield run, Processes(run, playing, random.Random(0))


def finish(run: FaultRun, poison: Sequence[int] = ()) -> None:
    """Let the run end, and judge it."""
    assert not run.is_finished
    print(f"step {run.last_step()}: all killed", flush=True)
    run.finish()
    assert "Traceback" not in run.log_of("learner")
    line = judge(run.run_dir, num_rows=NUM_ROWS, poison=poison, has_eval=False)
    print(f"{line}; {run.num_starts} starts")


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_process_killed_at_each_fault_point_in_mid_session_loses_and_repeats_no_prompt(tmp_path: Path, victim: str):
    # After a lost answer, the prompt of the call that goes on from it is longer than a first one may be.
    sampling = {"max_new_tokens": 60, "max_prompt_tokens": 8}
    with killed_run(tmp_path, CALLS, POISON_ROWS, sampling=sampling) as (run, processes):
        for point in POINTS:
            kill_at(run, processes, point, victim)
            run.await_step(run.last_step() + 1)
        finish(run, POISON_ROWS)
    if victim == "front":  # an agent calls again, so it costs no rollout
        assert {one["detail"][:20] for one in run.ledger()["failures"]} == {"RuntimeError: poison"}


def kill_at(run: FaultRun, processes: Processes, point: str, victim: str) -> None:
    """Hold a process at ``point`` while agents play, and kill the victim, which is that process or another one."""
    wait_until(
        f"agents that play, and a {victim}", run.tended(lambda: processes.agents() and processes.near(0, victim))
    )
    held = run.hold(point)
    calling = processes.agents()
    is_own = point.startswith(f"{victim}.")
    pid = held if is_own else wait_until(f"a {victim}", lambda: processes.near(held, victim), deadline_s=10)
    os.kill(pid, signal.SIGKILL)
    run.gates.release(point)
    whom = "it" if is_own else f"the {victim}"
    print(f"step {run.last_step()}: killed {whom} at {point}, {len(calling)} agents played", flush=True)
    assert calling, f"expected a kill in mid-session, got no agent that played at {point}"
