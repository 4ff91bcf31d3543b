"""``curve.png``: what is drawn, how often ``launch`` draws it, and what happens if it can't be drawn."""

import gc
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from async_rl.config.loading import config_to_toml
from async_rl.extensions.insight.pictures import curve
from async_rl.extensions.insight.pictures.curve import CurveUpdater, write_curve
from async_rl.run.directory import RunDir
from async_rl.run.lock import RunLock, acquire
from tests.config.made import a_config


def some_rows(num_steps: int) -> list[dict[str, float]]:
    rows: list[dict[str, float]] = []
    for step in range(num_steps + 1):
        if step % 25 == 0:
            rows.append({"step": step, "time_s": 3.0 * step, "eval/gsm8k/accuracy": 0.2 + 0.6 * step / num_steps})
        if step:
            accuracy = 0.2 + 0.6 * step / num_steps + 0.1 * math.sin(step * 7)
            of_step = {"step": step, "version": step, "time_s": 3.0 * step, "tokens/trained": 100}
            staleness = {"staleness/mean": 1.0 + 0.5 * math.cos(step), "staleness/max": step % 5}
            rows.append({**of_step, **staleness, "accuracy/mean": accuracy, "reward/mean": accuracy - 0.1})
    return rows


def panels(figure: Figure) -> dict[str, Axes]:
    """The panels of a picture by their titles."""
    return {" ".join(axes.get_ylabel().split()).partition(" (")[0]: axes for axes in figure.axes}


def write_rows(directory: Path, rows: list[dict[str, float]]) -> None:
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_curve_is_a_picture_and_needs_no_display(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    write_rows(tmp_path, some_rows(100))
    assert write_curve(RunDir(tmp_path))
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["curve.png", "metrics.jsonl"]
    # Rounding errors alone get no logarithmic scale.
    rows = [row | {"ratio/kl": 1e-14, "grad_norm": 0.0} for row in some_rows(20)]
    assert {axes.get_yscale() for axes in curve.draw_figure(RunDir(tmp_path), rows).axes} == {"linear"}


def test_a_home_that_cannot_be_written_is_not_spoken_of(tmp_path: Path):
    # As in a container with a read-only root. No directory can be made below a device, not even by root.
    environment = {name: value for name, value in os.environ.items() if name not in ("MPLCONFIGDIR", "XDG_CACHE_HOME")}
    environment |= {"HOME": "/dev/null", "XDG_CONFIG_HOME": "/dev/null", "TMPDIR": str(tmp_path)}
    script = "from async_rl.extensions.insight.pictures.curve import new_figure; new_figure(2, 2).savefig('figure.png')"
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""
    assert [path.name for path in tmp_path.iterdir()] == ["figure.png"]  # its temporary directory is gone


def test_restarts_and_the_bound_are_marked_and_start_up_squashes_nothing(tmp_path: Path):
    # Steps of 1 s; the first one of each start waits for the start-up, and one step took 500 s.
    slow_s = {1: 30.0, 41: 40.0, 60: 500.0}
    rows = [row | {"time/step_s": slow_s.get(int(row["step"]), 1.0)} for row in some_rows(100)]
    write_rows(tmp_path, rows)
    lines = [{"step": step, "lineage": "a" if step <= 40 else "b"} for step in range(1, 101)]
    (tmp_path / "trained.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = a_config(tmp_path, queue={"max_staleness": 6})
    (tmp_path / "config.toml").write_text(config_to_toml(config))
    change = {"step": 40, "changed": {"queue.max_staleness": [4, 6]}}
    (tmp_path / "config_changes.jsonl").write_text(json.dumps(change) + "\n")
    drawn = panels(curve.draw_figure(RunDir(tmp_path), curve.picture_rows(RunDir(tmp_path))))
    assert list(drawn)[:2] == ["Accuracy", "Staleness"], "beside who waits"
    assert drawn["Seconds per step"].get_ylim() == (0.0, 2.04)
    labels = drawn["Seconds per step"].get_legend_handles_labels()[1]
    assert labels[0] == "step; highest 500"
    assert "restart" in labels
    assert [40.5, 40.5] in [np.asarray(line.get_xdata()).tolist() for line in drawn["Accuracy"].lines]
    bound = next(line for line in drawn["Staleness"].lines if line.get_label() == "bound")
    assert np.asarray(bound.get_ydata()).tolist() == [4] * 40 + [6] * 60


def test_steps_without_a_gradient_are_marked_and_do_not_hide_the_scale_of_the_others(tmp_path: Path):
    # Every tenth step has no gradient. On a logarithmic scale a 0 would be drawn at the panel's lower end.
    write_rows(
        tmp_path, [{**row, "grad_norm": 0.5 * (row["step"] % 10 > 0)} for row in some_rows(100) if "version" in row]
    )
    panel = panels(curve.draw_figure(RunDir(tmp_path), curve.picture_rows(RunDir(tmp_path))))["Gradient norm"]
    marks = next(line for line in panel.get_lines() if line.get_label() == "0")
    assert np.asarray(marks.get_xdata()).tolist() == list(range(10, 101, 10))
    drawn = [np.asarray(line.get_ydata()) for line in panel.get_lines() if line is not marks]
    assert set(np.concatenate(drawn)) == {0.5}


def test_the_curve_of_an_evaluation_alone_is_drawn_and_of_nothing_is_not(tmp_path: Path):
    run_dir = RunDir(tmp_path / "$x^{$")  # which looks like a formula
    run_dir.path.mkdir()
    assert not write_curve(run_dir)
    write_rows(run_dir.path, some_rows(100)[:1])
    assert write_curve(run_dir)


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[RunLock]:
    held = acquire(RunDir(tmp_path), "launch")
    yield held
    held.close()


@pytest.fixture
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST_DRAWING_S", "MIN_PAUSE_S", "PAUSE_PER_DRAWING"):
        monkeypatch.setattr(curve, name, 0.0)


def test_the_curve_is_drawn_again_after_a_pause_when_the_metrics_have_changed(
    tmp_path: Path, lock: RunLock, without_pauses: None, monkeypatch: pytest.MonkeyPatch
):
    drawn: list[RunDir] = []
    monkeypatch.setattr(curve, "write_curve", lambda run_dir, lock: drawn.append(run_dir))
    updater = CurveUpdater(RunDir(tmp_path), lock, lambda line: None)
    for num_rows, pause_s, num_drawings in ((3, 0.0, 1), (3, 0.0, 1), (4, 60.0, 2), (5, 60.0, 2)):
        monkeypatch.setattr(curve, "MIN_PAUSE_S", pause_s)
        write_rows(tmp_path, some_rows(num_rows))
        updater.look()
        assert len(drawn) == num_drawings


def test_a_picture_that_cant_be_written_is_reported_once_and_tried_again(
    tmp_path: Path, lock: RunLock, without_pauses: None
):
    (tmp_path / "curve.png").mkdir()  # nothing can be renamed to a directory
    notes: list[str] = []
    updater = CurveUpdater(RunDir(tmp_path), lock, notes.append)
    for num_rows in (3, 4, 5):
        if num_rows == 5:
            (tmp_path / "curve.png").rmdir()
        write_rows(tmp_path, some_rows(num_rows))
        updater.look()
    assert (tmp_path / "curve.png").is_file()
    (problem,) = notes
    assert "curve.png" in problem
    assert not list(tmp_path.glob(".*partial"))


def test_no_curve_is_written_after_another_process_has_taken_over(tmp_path: Path, lock: RunLock):
    write_rows(tmp_path, some_rows(3))
    newer = acquire(RunDir(tmp_path), "launch", takeover=True)
    assert not write_curve(RunDir(tmp_path), lock)
    assert not list(tmp_path.glob("*curve.png*"))
    newer.close()


def test_no_drawing_leaves_a_figure_behind(tmp_path: Path, lock: RunLock):
    write_rows(tmp_path, some_rows(2))
    updater = CurveUpdater(RunDir(tmp_path), lock, lambda line: None)
    gc.collect()
    before = sum(isinstance(thing, Axes) for thing in gc.get_objects())
    gc.disable()  # a quiet process collects rarely
    try:
        updater.draw()
        assert (tmp_path / "curve.png").exists()
        assert sum(isinstance(thing, Axes) for thing in gc.get_objects()) == before
    finally:
        gc.enable()
