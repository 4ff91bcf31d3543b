"""``async_rl.Run`` reads a run's directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w

import async_rl
from async_rl.errors import RunError

ROWS = [
    {"step": 0, "time_s": 1.0, "eval/a/accuracy": 0.25, "eval/b-c/accuracy": 0.5, "eval/b-c/reward": 1.5},
    {"step": 1, "version": 1, "time_s": 2.0, "tokens/trained": 7, "reward/mean": 0.5},
    {"step": 2, "version": 2, "time_s": 3.0, "tokens/trained": 9, "reward/mean": 0.75, "kl/reference": 0.1},
    {"step": 2, "time_s": 4.0, "eval/a/accuracy": 0.75},
]


def lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def run(tmp_path: Path) -> async_rl.Run:
    config = {"run": {"dir": str(tmp_path)}, "model": {"path": "tiny"}, "queue": {"max_staleness": 7}}
    (tmp_path / "config.toml").write_text(tomli_w.dumps(config))
    return async_rl.Run(str(tmp_path))


def test_a_directory_without_a_run_is_refused(tmp_path: Path):
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(RunError, match=r"expected a run directory, .* config\.toml, at .*; correct the path"):
            async_rl.Run(path)


def test_steps_and_evaluations_are_apart(run: async_rl.Run):
    lines(run.path / "metrics.jsonl", ROWS)
    assert list(run.metrics()) == ROWS[1:3]
    assert list(run.evaluations()) == [
        {"step": 0, "set": "a", "time_s": 1.0, "accuracy": 0.25},
        {"step": 0, "set": "b-c", "time_s": 1.0, "accuracy": 0.5, "reward": 1.5},
        {"step": 2, "set": "a", "time_s": 4.0, "accuracy": 0.75},
    ]
    frame = run.metrics_frame()
    assert frame["reward/mean"].to_dict() == {1: 0.5, 2: 0.75}
    assert run.evaluations_frame().loc["a", "accuracy"].to_dict() == {0: 0.25, 2: 0.75}
    assert (run.last_step, run.is_finished, run.config.queue.max_staleness) == (2, False, 7)


def test_rollouts_and_answers_are_read_by_their_step(run: async_rl.Run):
    for step in (1, 12):
        lines(run.path / "rollouts" / f"step-{step:06d}.jsonl", [{"response": f"{step}/{n}"} for n in range(2)])
        for name in ("a", "b-a"):
            lines(run.path / "eval" / f"{name}-step-{step:06d}.jsonl", [{"response": f"{name} {step}"}])
    assert [row["response"] for row in run.rollouts()] == ["1/0", "1/1", "12/0", "12/1"]
    assert list(run.rollouts(step=12)) == [{"step": 12, "response": f"12/{n}"} for n in range(2)]
    assert list(run.rollouts(step=2)) == []
    assert run.rollouts_frame()["step"].to_list() == [1, 1, 12, 12]
    assert list(run.answers("a")) == [{"step": 1, "response": "a 1"}, {"step": 12, "response": "a 12"}]
    assert list(run.answers("b-a", 1)) == [{"step": 1, "response": "b-a 1"}]


def test_a_run_that_has_just_begun_is_empty_and_not_wrong(run: async_rl.Run):
    assert (list(run.metrics()), list(run.evaluations()), list(run.rollouts()), run.ledger()) == ([], [], [], {})
    assert len(run.metrics_frame()) == len(run.evaluations_frame()) == len(run.rollouts_frame()) == 0
    assert run.export_path is None
    assert repr(run) == f"Run({str(run.path)!r}): not finished, 0 steps"
    assert "<img" not in run._repr_html_()
    with pytest.raises(RunError, match="expected a run with a step or an evaluation"):
        run.picture()
    with pytest.raises(RunError, match=r"queue\.json"):
        run.status()


def test_a_notebook_shows_summary_and_picture_and_text_stays_text(run: async_rl.Run):
    lines(run.path / "metrics.jsonl", [*ROWS, {"step": 2, "time_s": 5.0, "eval/<b>x/accuracy": 1.0}])
    (run.path / "ledger.json").write_text(
        json.dumps({"run_id": "r", "step": 2, "groups": {"issued": 2, "in_flight": 0, "queued": 0, "taken": 0,
                    "trained": 2, "filtered": 0, "dropped": {}}})
    )  # fmt: skip
    (run.path / "finished.json").write_text("{}")
    (run.path / "export").mkdir()
    assert run.export_path == run.path / "export"
    assert run.status()["ledger"]["groups"]["issued"] == 2
    assert run.summary().startswith("finished: 2 steps\naccuracy on a: 0.250 -> 0.750, on ")
    page = run.report(run.path / "page.html").read_text(encoding="utf-8")
    assert page.lower().startswith("<!doctype html>")
    assert "<b>x" not in page
    assert run.report() == run.path / "report.html"
    shown = run._repr_html_()
    assert shown.startswith("<pre>finished: 2 steps\n")
    assert '<img alt="curves of the run"' in shown
    assert "data:image/png;base64,iVBOR" in shown
    assert "<b>" not in shown
