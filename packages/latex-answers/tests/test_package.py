"""The package as others get it: light until it reads, and the same from its wheel as from its sources."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import sympy

PROJECT = Path(__file__).resolve().parents[1]
SOURCES = PROJECT / "src"


def run(*command: str, cwd: Path, **variables: str) -> str:
    """Run a command that doesn't inherit an import path, and return what it prints."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        command, cwd=cwd, env=environment | variables, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_nothing_but_the_reader_imports_sympy(tmp_path: Path):
    program = (
        "import sys, latex_answers as la\n"
        "print(la.equal('1/2', '0.5'), la.equal('evelyn', r'\\text{Evelyn}'), la.canonical_form('1,000'), end=' ')\n"
        "print(la.boxed_answer(r'\\boxed{2}'), 'sympy' in sys.modules, la.equal('1+x', 'x+1'), 'sympy' in sys.modules)"
    )
    printed = run(sys.executable, "-c", program, cwd=tmp_path, PYTHONPATH=str(SOURCES))
    assert printed.split() == ["True", "True", "1000", "2", "False", "True", "True"]


@pytest.mark.slow
def test_the_wheel_has_every_file_and_works_alone(tmp_path: Path):
    """Built from a copy, without a network, by the setuptools of this environment."""
    pytest.importorskip("setuptools", minversion="77")
    shutil.copytree(PROJECT, tmp_path / "source", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    options = ("--quiet", "--no-deps", "--no-build-isolation", "-w", str(tmp_path))
    run(sys.executable, "-m", "pip", "wheel", *options, "./source", cwd=tmp_path)
    (wheel,) = tmp_path.glob("latex_answers-*.whl")
    kept = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("latex_answers/")}
    files = (path for path in SOURCES.rglob("*") if path.suffix in (".py", ".toml", ".typed"))
    assert kept == {str(path.relative_to(SOURCES)) for path in files}
    run(sys.executable, "-m", "venv", "--without-pip", "fresh", cwd=tmp_path)
    python = str(tmp_path / "fresh/bin/python")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", str(wheel), cwd=tmp_path)
    program = "import latex_answers as la; print(la.__file__, la.equal('1+x', 'x+1'))"
    # This environment's sympy, found after what is installed in the fresh one.
    others = f"import sys; sys.path.append({str(Path(sympy.__file__).parents[1])!r}); "
    place, verdict = run(python, "-c", others + program, cwd=tmp_path).split()
    assert Path(place).is_relative_to(tmp_path / "fresh")
    assert verdict == "True"
