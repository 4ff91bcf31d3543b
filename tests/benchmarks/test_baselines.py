"""The figures of two runs of the smoke test, side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.baselines import main


def write(path: Path, **figures: tuple[float, str]) -> str:
    each = {name: {"value": value, "unit": unit, "bound": ""} for name, (value, unit) in figures.items()}
    path.write_text(json.dumps({"machine": [], "versions": {}, "figures": each}))
    return str(path)


@pytest.mark.parametrize(
    ("new", "code", "row"),
    [
        ((1.14, "s"), 0, "| step | 1 s | 1.14 s | +14.0% |  |"),
        ((1.16, "s"), 1, "| step | 1 s | 1.16 s | +16.0% | WORSE |"),
        ((1.009, "bytes"), 0, "| step | 1 bytes | 1.009 bytes | +0.9% |  |"),
        ((1.011, "bytes"), 1, "| step | 1 bytes | 1.011 bytes | +1.1% | WORSE |"),
        ((9.0, ""), 0, "| step | 1 | 9 | +800.0% |  |"),  # an error, which its case bounds
    ],
)
def test_a_time_may_be_15_percent_worse_and_a_size_1_percent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], new: tuple[float, str], code: int, row: str
):
    old, now = write(tmp_path / "old", step=(1.0, new[1])), write(tmp_path / "new", step=new)
    assert main(["compare", old, now]) == code
    assert row in capsys.readouterr().out.splitlines()


def test_what_one_run_lacks_is_said_and_files_without_a_common_figure_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    old, new = write(tmp_path / "old", step=(1.0, "s")), write(tmp_path / "new", pause=(2.0, "s"))
    assert main(["compare", old, new]) == 2
    assert "| step | 1 s |  |  | only in OLD |" in capsys.readouterr().out
    (tmp_path / "other").write_text("[]")
    with pytest.raises(SystemExit, match="2"):
        main(["compare", old, str(tmp_path / "other")])
    assert "expected the JSON file that make gpu-smoke names at its end" in capsys.readouterr().err
