"""``examples/heart.py``, which README shows: it learns, and stays short enough to be read whole."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

from async_rl.process.child import package_environment

HEART = Path(__file__).resolve().parents[3] / "examples" / "heart.py"


@pytest.mark.slow
def test_the_heart_learns_to_carry(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, HEART], cwd=tmp_path, env=package_environment(), capture_output=True, text=True, check=True
    )
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("step ") and "reward" in line]
    assert [line[:3] for line in lines] == [["step", str(number), "reward"] for number in range(1, 61)]
    rewards = [float(line[3]) for line in lines]
    # 0.42 and 0.77 on an idle machine; which groups come first depends on the time.
    assert mean(rewards[-10:]) > mean(rewards[:10]) + 0.15


def test_the_heart_is_short_and_uses_no_private_name():
    lines = HEART.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120
    assert not [line for line in lines if line.startswith("from async_rl") and re.search(r"[ .]_", line)]
