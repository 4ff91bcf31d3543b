"""What only a CUDA device takes, on a machine without one: ``on_fake_cuda`` says what."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.learner.fake_cuda import SHIM


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a CPU build of torch")
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler (cc)")
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_every_case_runs_to_its_end_on_a_fake_cuda_device(tmp_path: Path, num_ranks: int):
    shim = tmp_path / "shim.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-xc", "-", "-o", shim], input=SHIM, text=True, check=True, timeout=60)
    program = [sys.executable, "-m", "tests.learner.on_fake_cuda", str(num_ranks)]
    environment = {**os.environ, "LD_PRELOAD": str(shim), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=880)
    assert done.returncode == 0, done.stderr[-4000:]
    failed = json.loads(done.stdout.splitlines()[-1])
    assert not failed, "\n".join(f"{name}: {error}" for name, error in failed.items())
