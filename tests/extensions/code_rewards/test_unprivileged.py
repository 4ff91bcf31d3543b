"""The sandbox needs no rights: the attacks again, as an ordinary user, and as the root of a container."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

FEW = "fork or outside or socket or killing"
PROGRAMS, AGENTS = "code_rewards/test_attacks.py", "agents/test_isolation.py"
AGAIN = [
    ("ordinary", PROGRAMS, f"{FEW} or parents_processes or shut"), ("container", PROGRAMS, FEW),
    ("ordinary", AGENTS, "no_program"), ("container", AGENTS, "no_program"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("who", "tests", "chosen"), AGAIN)
def test_those_with_few_rights_can_confine_programs(who: str, tests: str, chosen: str):
    module = "tests.extensions.code_rewards.unprivileged"
    command = [sys.executable, "-m", module, who, f"tests/extensions/{tests}", "-k", chosen]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
