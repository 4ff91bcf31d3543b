"""The wheel has all that the commands need: without the checkout, the quickstart runs in an empty directory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ("quickstart", "--set", "learner.steps=6", "--set", "eval.every=3")

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


def run(*command: str, cwd: Path, **variables: str) -> str:
    """Run a command that doesn't inherit an import path, and return what it prints."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        command, cwd=cwd, env=environment | variables, capture_output=True, text=True, timeout=1500, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: a build in the checkout would leave files there, and use those of an older one."""
    place = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "async_rl", place / "source/async_rl", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, place / "source")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(place), "./source", cwd=place)
    return next(place.glob("*.whl"))


def check_quickstart(printed: str, directory: Path) -> None:
    assert "finished: 6 steps" in printed
    assert "what asynchrony gained (estimate): " in printed
    assert "async-rl init my.toml" in printed
    assert (directory / "runs/quickstart/finished.json").exists()
    assert [path.name for path in directory.iterdir()] == ["runs"]


def test_the_wheel_has_every_file_of_the_package(wheel: Path):
    kept = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("async_rl/")}
    tracked = run("git", "ls-files", "async_rl", cwd=ROOT).splitlines()
    assert kept == set(tracked)


def test_the_quickstart_runs_from_an_installed_wheel_in_an_empty_directory(wheel: Path, tmp_path: Path):
    run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "fresh"), cwd=tmp_path)
    scripts = tmp_path / "fresh/bin"
    python = str(scripts / "python")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", str(wheel), cwd=tmp_path)
    # The other packages are those of this environment. A folder that a .pth file adds has no .pth files of its own, so
    # an async-rl that is installed there as editable is not found.
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    empty = tmp_path / "empty"
    empty.mkdir()
    found = run(python, "-c", "import async_rl; print(async_rl.__file__)", cwd=empty).strip()
    assert Path(found).is_relative_to(packages)
    printed = run(str(scripts / "async-rl"), *QUICKSTART, cwd=empty)
    check_quickstart(printed, empty)
    assert f"export PATH={scripts}:" in printed


def test_the_quickstart_runs_by_uv_tool_run(wheel: Path, tmp_path: Path):
    if (uv := shutil.which("uv")) is None:
        pytest.skip("uv is not installed, so `uv tool run` can't be tried")
    command = (uv, "tool", "run", "--python", sys.executable, "--from", str(wheel), "async-rl", *QUICKSTART)
    printed = run(*command, cwd=tmp_path)
    check_quickstart(printed, tmp_path)
    assert "export PATH=" in printed
