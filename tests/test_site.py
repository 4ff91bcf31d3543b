"""The docs as a site: every page is in its navigation, and every link and anchor leads somewhere."""

from __future__ import annotations

import os
import shutil
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


@pytest.mark.slow
def test_a_link_or_an_anchor_that_leads_nowhere_is_found(tmp_path: Path):
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for name in ("mkdocs.yml", "README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("examples", "async_rl", "deploy", "packages", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    with (tmp_path / "docs/index.md").open("a", encoding="utf-8") as page:
        page.write("\n[one](data.md#no-such-section) [two](no_such_page.md)\n")
    code, said = build(tmp_path, tmp_path / "site")
    assert code == 1
    assert "no-such-section" in said
    assert "no_such_page.md" in said
