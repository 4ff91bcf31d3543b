"""Evaluations side by side: steps of a run, runs, models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from async_rl.errors import RunError
from async_rl.extensions.insight.evaluation.table import Entry, compare, eval_table


def write_metrics(directory: Path, *rows: dict[str, Any]) -> Path:
    directory.mkdir()
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def eval_row(step: int, dataset: str = "math", **figures: float) -> dict[str, Any]:
    return {"step": step, "time_s": 1.0, **{f"eval/{dataset}/{key}": value for key, value in figures.items()}}


def test_a_runs_evaluations_are_a_table_by_step(tmp_path: Path):
    run = write_metrics(
        tmp_path / "run",
        eval_row(0, accuracy=0.25, accuracy_se=0.031, pass_at_1=0.25, pass_at_4=0.5, pass_at_k=0.5, samples=4, rows=20,
                 majority_at_n=0.3, length_mean=7.25, truncated=0.125, version_min=0, version_max=0),
        {"step": 1, "version": 1, "tokens/trained": 9},
        eval_row(10, "chat", accuracy=0.5, rows=3),
        eval_row(10, accuracy=0.75, accuracy_se=0.03, pass_at_1=0.75, pass_at_4=0.9, pass_at_k=0.9, samples=4, rows=20,
                 majority_at_n=0.8, length_mean=123.0, truncated=0.0, unanswered=1, version_min=8, version_max=10),
    )  # fmt: skip
    assert compare([run]) == [
        "math: 20 rows, 4 answers a row",
        "step       accuracy  pass@4  maj@4  tokens    cut  unanswered  versions",
        "0     0.250 ± 0.031   0.500  0.300     7.2  12.5%                     0",
        "10    0.750 ± 0.030   0.900  0.800   123.0   0.0%           1      8-10",
        "",
        "chat: 3 rows",
        "step  accuracy",
        "10       0.500",
    ]


def test_runs_and_models_stand_below_each_other(tmp_path: Path):
    runs = [write_metrics(tmp_path / name, eval_row(5, accuracy=a, rows=20)) for name, a in (("a", 0.5), ("b", 0.6))]
    out = tmp_path / "out"
    out.mkdir()
    figures = {"model": "base", "dataset": "math", "figures": {"accuracy": 0.4, "rows": 20, "samples": 1}}
    (out / "figures.json").write_text(json.dumps([figures]))
    lines = compare([*runs, out])
    assert [line.split() for line in lines[1:]] == [
        ["of", "step", "accuracy"], [str(runs[0]), "5", "0.500"], [str(runs[1]), "5", "0.600"], ["base", "-", "0.400"],
    ]  # fmt: skip


def test_sets_of_different_rows_are_marked_and_what_holds_no_evaluation_is_refused(tmp_path: Path):
    run = write_metrics(tmp_path / "run", eval_row(0, accuracy=0.5, rows=20), eval_row(1, accuracy=0.5, rows=5))
    assert compare([run])[0] == "math: 5 or 20 rows; DIFFERENT rows: not comparable"
    with pytest.raises(RunError, match=r"expected a run directory \(with a metrics\.jsonl\) or an --out directory"):
        compare([tmp_path])
    with pytest.raises(RunError, match=r"expected evaluations, got none"):
        compare([write_metrics(tmp_path / "none", {"step": 1})])


def test_pass_at_all_answers_has_its_number_and_none_where_they_differ():
    six = Entry(("a",), {"accuracy": 0.5, "pass_at_4": 0.7, "pass_at_k": 0.8, "samples": 6})
    four = Entry(("b",), {"accuracy": 0.5, "pass_at_4": 0.7, "pass_at_k": 0.7, "samples": 4, "best_of_n": 0.75})
    assert eval_table(["of"], [six])[0].split() == ["of", "accuracy", "pass@4", "pass@6"]
    assert eval_table(["of"], [four])[0].split() == ["of", "accuracy", "pass@4", "best@4"]
    assert eval_table(["of"], [six, four])[0].split() == ["of", "accuracy", "pass@4", "best@n"]
