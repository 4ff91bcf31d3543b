"""The sandbox needs no rights: the attacks again, as an ordinary user, and as the root of a container."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

FEW = "fork or outside or socket or killing"
AGAIN = {"ordinary": f"{FEW} or parents_processes or shut", "container": FEW}


@pytest.mark.slow
@pytest.mark.parametrize("who", AGAIN)
def test_those_with_few_rights_can_confine_programs(who: str):
    module, tests = "tests.extensions.code_rewards.unprivileged", "tests/extensions/code_rewards/test_attacks.py"
    command = [sys.executable, "-m", module, who, tests, "-k", AGAIN[who]]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
