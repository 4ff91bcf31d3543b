"""Whom the kernel kills first if memory runs out: environments and programs, before the role that they belong to."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest

from async_rl.config.generator import EnvironmentConfig
from async_rl.extensions.code_rewards.sandbox import Program, Sandbox
from async_rl.process.sandbox.limits import Limits
from tests.end_to_end.harness import wait_until
from tests.environments.pools import pool_of
from tests.processes import children_of

pytestmark = pytest.mark.skipif(not Path("/proc/self/oom_score_adj").exists(), reason="Linux only")

SAYS_ITS_SCORE = """
from pathlib import Path

async def reset(extra_info):
    return Path("/proc/self/oom_score_adj").read_text().strip()

async def step(state, action, extra_info):
    return {"next_state": state, "reward": 0.0, "score": 0.0, "done": True}
"""


def test_an_environment_is_killed_before_its_generator(tmp_path: Path):
    source = tmp_path / "scored.py"
    source.write_text(SAYS_ITS_SCORE)
    with closing(pool_of(EnvironmentConfig(name=str(source)))) as pool:
        pool.start("a", {"prompt": "", "state": "", "extra_info": {}, "seed": 0, "max_turns": 1})
        (said,) = wait_until("the first state", pool.poll)
    assert said.message["state"] == "1000"


def test_the_launcher_and_its_programs_are_killed_before_their_generator():
    before = set(children_of(os.getpid()))
    with closing(Sandbox()) as sandbox:
        limits = Limits(time_s=30.0, memory_bytes=1 << 30, output_bytes=1 << 20, scratch_bytes=1 << 20, max_threads=4)
        assert sandbox.run(Program("print(1)"), limits).output == b"1\n"
        (launcher,) = set(children_of(os.getpid())) - before
        # A program inherits what its launcher has.
        scores = [Path(f"/proc/{pid}/oom_score_adj").read_text() for pid in (launcher, *children_of(launcher))]
    assert set(scores) == {"1000\n"}
