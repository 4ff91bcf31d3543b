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
SOURCES = "packages/latex-answers/src"
QUICKSTART = ("quickstart", "--set", "learner.steps=6", "--set", "eval.every=3")

pytestmark = pytest.mark.timeout(1800)


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
    for name in ("async_rl", "packages/latex-answers/src"):
        shutil.copytree(
            ROOT / name, place / "source" / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, place / "source")
    options = ("--quiet", "--no-deps", "--no-build-isolation", "-w", str(place))
    run(sys.executable, "-m", "pip", "wheel", *options, "./source", cwd=place)
    return next(place.glob("*.whl"))


def check_quickstart(printed: str, directory: Path) -> None:
    assert "finished: 6 steps" in printed
    assert "async-rl init my.toml" in printed
    assert (directory / "runs/quickstart/finished.json").exists()
    assert [path.name for path in directory.iterdir()] == ["runs"]


@pytest.fixture(scope="module")
def fresh(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that has the wheel, and the other packages from this environment."""
    place = tmp_path_factory.mktemp("environment") / "fresh"
    run(sys.executable, "-m", "venv", "--without-pip", str(place), cwd=place.parent)
    python = str(place / "bin/python")
    command = ("-m", "pip", "--python", python, "install", "--quiet", "--no-deps", str(wheel))
    run(sys.executable, *command, cwd=place.parent)
    # A folder that a .pth file adds has no .pth files of its own, so an async-rl that is installed there as editable is
    # not found.
    packages = Path(
        run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=place.parent).strip()
    )
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    return place


@pytest.mark.slow
def test_the_wheel_has_every_file_of_its_packages(wheel: Path):
    kept = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    tracked = run("git", "ls-files", "async_rl", SOURCES, cwd=ROOT).splitlines()
    assert kept == {name.removeprefix(f"{SOURCES}/") for name in tracked}


@pytest.mark.long
def test_the_quickstart_runs_from_an_installed_wheel_in_an_empty_directory(fresh: Path, tmp_path: Path):
    scripts = fresh / "bin"
    found = run(str(scripts / "python"), "-c", "import async_rl; print(async_rl.__file__)", cwd=tmp_path).strip()
    assert Path(found).is_relative_to(fresh)
    printed = run(str(scripts / "async-rl"), *QUICKSTART, cwd=tmp_path)
    check_quickstart(printed, tmp_path)
    assert f"export PATH={scripts}:" in printed


CONFIG = """
[run]
dir = "run"
[model]
path = "model"
[reward]
type = "brief"
[log]
to = ["lengths"]
[extension.brevity]
limit = 7
"""


@pytest.mark.slow
def test_a_package_from_outside_of_the_tree_is_found_and_used(fresh: Path, tmp_path: Path):
    shutil.copytree(ROOT / "tests/outside/brevity", tmp_path / "source")
    options = ("--python", str(fresh / "bin/python"), "install", "--quiet", "--no-deps", "--no-build-isolation")
    run(sys.executable, "-m", "pip", *options, "./source", cwd=tmp_path)
    command = str(fresh / "bin/async-rl")
    (tmp_path / "run.toml").write_text(CONFIG)
    assert "brevity     Say how long answers may be." in run(command, "--help", cwd=tmp_path)
    assert run(command, "brevity", "run.toml", cwd=tmp_path) == "at most 7 tokens\n"
    printed = run(command, "config", "run.toml", cwd=tmp_path)
    assert 'type = "brevity:brief"' in printed
    assert '"lengths",' in printed
    doctor = subprocess.run(
        [command, "doctor", "run.toml", "--json"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    offered = "brevity 1.0 offers commands: brevity, config: brevity, rewards: brief, sinks: lengths"
    assert offered in " ".join(doctor.stdout.split())
    (tmp_path / "run.toml").write_text(CONFIG.replace("limit", "limits"))
    warned = subprocess.run([command, "config", "run.toml"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "warning: launch refuses this: extension.brevity.limits: unknown key" in warned.stderr
