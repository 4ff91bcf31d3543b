"""The sandbox needs no root: the attacks again, as an ordinary user."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

AGAIN = "fork_bomb or outside or parents_processes or socket or killing or shut or right_program"


def test_an_ordinary_user_can_confine_programs():
    done = subprocess.run(
        [sys.executable, "-m", "tests.sandbox.unprivileged", "tests/sandbox/test_attacks.py", "-k", AGAIN],
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
