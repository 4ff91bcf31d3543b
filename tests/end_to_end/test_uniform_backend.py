"""The example of a backend of one's own, run with the command in its docstring."""

from __future__ import annotations

import ast
import shlex
import string
from pathlib import Path

import pytest

from async_rl.extensions.quickstart import sums
from tests.end_to_end.harness import check_ledger, roles, steps, write_config
from tests.end_to_end.tiny import tiny_config, write_tiny_task

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "uniform_backend.py"


def command() -> list[str]:
    """Return the words after CONFIG of the command in the example's docstring. Its file has the whole path."""
    text = ast.get_docstring(ast.parse(EXAMPLE.read_text())) or ""
    shown = text[text.index("async-rl launch CONFIG ") : text.index("\n\nThe vocabulary")].replace("\\\n", " ")
    return shlex.split(shown.replace("examples/uniform_backend.py", str(EXAMPLE)))[3:]


@pytest.mark.long
def test_the_command_in_the_example_of_a_backend_works(tmp_path: Path):
    task = write_tiny_task(tmp_path, num_rows=8)
    sums.write_model(tmp_path / "model", seed=0, characters=string.printable[:95])
    config = tiny_config(tmp_path, task, learner={"steps": 2}, eval={"every": 0})
    del config["queue"]["filter_range"]
    path = write_config(tmp_path / "config.toml", config)
    with roles(tmp_path / "logs") as start:
        start("launch", "launch", str(path), *command()).succeed()
    assert steps(tmp_path / "run") == [1, 2]
    check_ledger(tmp_path / "run")
