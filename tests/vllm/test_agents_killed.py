"""The engine's own process, killed while agents call: its generator ends, and another one takes its place."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from async_rl.process.fault_points import AGENT_FAULT_POINTS
from tests.end_to_end.faults_harness import FaultRun
from tests.end_to_end.harness import state_of, wait_until
from tests.extensions.agents.test_agents_killed import CALLS, NUM_ROWS, Processes, ancestors, finish, killed_run
from tests.vllm.test_processes import descendants

POINTS = ("learner.taken", "generator.sampled", *AGENT_FAULT_POINTS)
SETTINGS = (
    "generator.backend=vllm",
    "generator.num_threads=1",
    "generator.kv_after_update=recompute",
    f"experimental.vllm.kv_cache_bytes={64 << 20}",
)
CHANGES: dict[str, dict[str, Any]] = {
    # An engine needs a minute to start, and meanwhile the other one's rollouts are trained.
    "queue": {"max_staleness": NUM_ROWS},
    # After a lost answer, the prompt of the call that goes on from it is longer than a first one may be.
    "sampling": {"max_new_tokens": 60, "max_prompt_tokens": 8},
}


def engine_of(held: int) -> int | None:
    """The process of vLLM's engine that the held process belongs to, or that its run has."""
    for pid in ancestors(held):
        for child in sorted(descendants(pid)):
            if state_of(child) not in (None, "Z"):
                title = Path(f"/proc/{child}/cmdline").read_bytes()
                if title.startswith(b"VLLM::EngineCore"):
                    return child
    return None


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.timeout(3000)
def test_an_engine_killed_at_each_fault_point_in_mid_session_loses_and_repeats_no_prompt(tmp_path: Path):
    codes = (-signal.SIGKILL, 1)
    with killed_run(tmp_path, CALLS, (), killed_codes=codes, generator_settings=SETTINGS, **CHANGES) as (
        run,
        processes,
    ):
        for point in POINTS:
            kill_engine_at(run, processes, point)
            run.await_step(run.last_step() + 1)
        finish(run)
    assert run.num_starts >= 3 + len(POINTS)


def kill_engine_at(run: FaultRun, processes: Processes, point: str) -> None:
    """Hold a process at ``point`` while agents play and both engines live, and kill the engine."""

    def is_ready() -> bool:
        homes = [run.pid_of("generator", index) for index in range(2)]
        return bool(processes.agents()) and all(pid is not None and engine_of(pid) is not None for pid in homes)

    wait_until("two engines, and agents that play", run.tended(is_ready), deadline_s=300)
    held = run.hold(point)
    calling = processes.agents()
    engine = wait_until("an engine", lambda: engine_of(held), deadline_s=10)
    os.kill(engine, signal.SIGKILL)
    run.gates.release(point)
    print(f"step {run.last_step()}: killed the engine at {point}, {len(calling)} agents played", flush=True)
    assert calling, f"expected a kill in mid-session, got no agent that played at {point}"
