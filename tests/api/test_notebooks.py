"""The notebooks of examples/ run from their first cell to their last."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import async_rl
from async_rl.process.child import PACKAGE_ROOT, package_path

NOTEBOOKS = sorted((Path(PACKAGE_ROOT) / "examples" / "notebooks").glob("*.ipynb"))
MAX_BYTES = 100_000


@pytest.fixture(autouse=True)
def same_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels import this copy of async-rl."""
    monkeypatch.setenv("PYTHONPATH", package_path({}))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def client(notebook: nbformat.NotebookNode, folder: Path) -> NotebookClient:
    return NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(folder)}})


def texts(notebook: nbformat.NotebookNode) -> list[str]:
    """What each code cell has printed and shown as text."""
    return [
        "".join(o.get("text", "") + o.get("data", {}).get("text/plain", "") for o in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_and_has_no_outputs(path: Path):
    assert path.stat().st_size < MAX_BYTES
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell for cell in code if cell["outputs"] or cell["execution_count"]] == []


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_the_model_learns_in_the_notebook_that_trains_and_the_other_one_draws_two_runs(tmp_path: Path):
    compares, trains = (nbformat.read(path, as_version=4) for path in NOTEBOOKS)
    for notebook in (compares, trains):
        client(notebook, tmp_path).execute()
    assert "finished: 60 steps" in texts(trains)[2]
    assert "data:image/png;base64," in trains.cells[8].outputs[0].data["text/html"]
    first, *_, last = async_rl.Run(tmp_path / "runs" / "from_python").evaluations()
    assert last["accuracy"] > first["accuracy"] + 0.2  # 0.30 -> 0.98 here
    *_, table, _, figure = texts(compares)
    assert "bound 0" in table
    assert "bound 4" in table
    assert "Figure" in figure
    runs = [async_rl.Run(tmp_path / "runs" / f"bound-{bound}") for bound in (0, 4)]
    staleness = [max(row["staleness/max"] for row in run.metrics()) for run in runs]
    assert staleness[0] == 0 < staleness[1]
