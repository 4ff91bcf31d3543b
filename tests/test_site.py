"""The docs as a site: every page is in its navigation, and every link and anchor leads somewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def build(root: Path, out: Path) -> tuple[int, str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(out)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_every_link_of_the_site_leads_somewhere(tmp_path: Path):
    code, said = build(ROOT, tmp_path / "site")
    assert (code, "WARNING" in said) == (0, False), said
    assert "Asynchronous RL then teaches it to carry" in (tmp_path / "site/index.html").read_text("utf-8")
    assert (tmp_path / "site/source/examples/own_loss.py").read_bytes() == (ROOT / "examples/own_loss.py").read_bytes()
