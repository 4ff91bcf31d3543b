"""Directories of dead generators are removed, those of living ones are not."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from async_rl.generator.start.worker import scratch_directory

HOLD = """
import sys, time
from async_rl.generator.start.worker import scratch_directory
with scratch_directory() as directory:
    (directory / "model").write_text("weights")
    print(directory, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_a_killed_generators_directory_goes_with_the_next_and_a_living_ones_stays(parent: Path):
    holders = [
        subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        killed, living = (Path(holder.stdout.readline().strip()) for holder in holders if holder.stdout)
        holders[0].kill()
        holders[0].wait()
        assert (killed / "model").exists()
        with scratch_directory():
            assert killed.exists(), "a young one may be just before it takes its lock"
        for directory in (killed, living):
            os.utime(directory / "lock", (0, 0))
        with scratch_directory():
            assert not killed.exists()
            assert (living / "model").exists()
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()


def test_what_is_not_a_generators_is_left_alone(parent: Path):
    (parent / "async-rl-generator-half-made").mkdir()
    (parent / "other").mkdir()
    with scratch_directory():
        pass
    assert sorted(path.name for path in parent.iterdir()) == ["async-rl-generator-half-made", "other"]
