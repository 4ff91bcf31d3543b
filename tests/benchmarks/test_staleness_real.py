"""The staleness study: every run that it asks for can be made, and its tables by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from async_rl.config.loading import load_config
from benchmarks import staleness_real
from benchmarks.coarse_backend import rounded
from benchmarks.staleness_grid import Cell, Grid, Question
from benchmarks.staleness_notes import fall_of, notes_report
from benchmarks.staleness_real import GRID, ROOT, TASKS, load, measure, settings_of
from benchmarks.staleness_tables import area, compared, late_share, report

GRID_READ = Grid.load(GRID)


@pytest.mark.parametrize("question", GRID_READ.questions, ids=lambda question: question.name)
def test_every_run_of_the_grid_has_a_config_that_is_accepted(question: Question):
    for cell in question.cells():
        if cell.seed == 0:
            overrides = [f"{key}={value}" for key, value in settings_of(cell, GRID_READ).items()]
            config = load_config(ROOT / TASKS[cell.task].config, [*overrides, "data.eval.final=final.jsonl"])
            assert config.optimizer.lr == pytest.approx(TASKS[cell.task].lr * cell.rate)
            assert config.eval.of("final").every == 0


def test_an_arm_of_two_names_has_the_settings_of_both_and_the_second_overrides_the_first():
    grid = Grid({"a": {"x": 1, "y": 1}, "b": {"y": 2}}, [])
    assert grid.settings("a+b") == {"x": 1, "y": 2}


def row(accuracy: float, **more: Any) -> dict[str, Any]:
    dropped = {"stale": 3, "cancelled": 1, "too_slow": 0}
    return {
        "accuracy": accuracy, "evals": [[0, 0.2], [10, 0.6], [30, 0.8]], "ratio/ess": 0.9, "ratio/kl": 0.01,
        "staleness/mean": 2.0, "groups": {"issued": 40, "dropped": dropped},
        "tokens": {"trained": 90, "masked": {"stale": 10}}, **more,
    }  # fmt: skip


def test_area_and_late_share_by_hand():
    assert area(row(0.8)) == pytest.approx((10 * 0.4 + 20 * 0.7) / 30)
    assert late_share(row(0.8)) == pytest.approx(4 / 40 + 10 / 100)


def test_differences_are_paired_and_have_students_interval():
    # Mean 0.02, standard error 0.01 / sqrt(3) = 0.00577; 4.303 times it is 0.0248.
    assert compared([0.01, 0.02, 0.03]) == ("+0.020 [-0.005, +0.045]", "0.031", "not told apart")
    assert compared([-0.1, -0.11, -0.12])[2] == "worse"
    assert compared([0.2]) == ("+0.200", "", "too few runs")


def test_the_table_has_each_arm_beside_the_first_of_the_same_seeds():
    question = Question("q", "What helps?", ("sums",), ("a", "b"), (4.0,), 3)
    accuracies = {"a": (0.5, 0.6, 0.7), "b": (0.7, 0.8, 0.91)}
    rows = {
        Cell("sums", arm, 4.0, s): row(value) for arm, values in accuracies.items() for s, value in enumerate(values)
    }
    lines = report([question], rows).splitlines()
    assert lines[0] == "### What helps?"
    assert lines[-2].split(" | ")[:7] == ["| sums", "x4", "a", "3", "2", "20.0%", "0.900"]
    assert lines[-1].endswith("| 0.803 | 0.600 | +0.203 [+0.189, +0.218] | 0.018 | better |")
    assert report([question], {}) == ""


def test_a_run_that_is_made_again_replaces_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(staleness_real, "RESULTS", tmp_path / "rows.jsonl")
    assert load() == {}
    where = {"task": "sums", "arm": "a", "rate": 1.0, "seed": 0}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({**where, "accuracy": a}) + "\n" for a in (0.1, 0.2)))
    assert load() == {Cell("sums", "a", 1.0, 0): {**where, "accuracy": 0.2}}


def test_a_run_is_measured_by_its_metrics_and_its_ledger(tmp_path: Path):
    step = {"time/step_s": 2.0, "version": 1, "accuracy/received": 0.5, "ratio/ess": 0.5}
    rows = [
        {"step": 0, "time_s": 1.0, "eval/held_out/accuracy": 0.25, "eval/final/accuracy": 0.3},
        {"step": 1, "time_s": 4.0, **step},
        {"step": 2, "time_s": 6.0, **step, "ratio/ess": 1.0},
        {"step": 2, "time_s": 7.0, "eval/held_out/accuracy": 0.75, "eval/final/accuracy": 0.8},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    (tmp_path / "ledger.json").write_text(json.dumps({"groups": {"issued": 1}, "tokens": {"trained": 2}}))
    measured = measure(tmp_path)
    assert (measured["before"], measured["accuracy"], measured["seconds"]) == (0.3, 0.8, 7.0)
    assert measured["evals"] == [[0, 0.25], [2, 0.75]]
    assert (measured["sampled"], measured["ratio/ess"]) == ([0.5, 0.5], 0.75)


def test_a_break_begins_where_two_thirds_of_the_best_are_lost_for_good():
    # Means of three: ..., 0.9, 0.7, 0.5, 0.3, 0.1. Two thirds of 0.9 are 0.6, a third is 0.3.
    falling = [0.9] * 5 + [0.3, 0.3, 0.3, 0.0, 0.0]
    assert fall_of(falling) == 7
    assert fall_of([*falling[:7], *[0.9] * 5]) is None, "it recovers"
    assert fall_of([0.1, 0.2, 0.3]) is None


def test_the_notes_report_counts_breaks_named_before_and_false_notes():
    falling = [0.9] * 5 + [0.3, 0.3, 0.3, 0.0, 0.0]
    rows = {
        Cell("sums", "a", 1.0, 0): row(0.9, sampled=[0.9] * 10, notes=[]),
        Cell("sums", "b", 1.0, 0): row(0.87, sampled=[0.9] * 10, notes=[["random", 3]]),
        Cell("sums", "c", 1.0, 0): row(0.8, sampled=[0.9] * 10, notes=[["samples", 3]]),  # neither
        Cell("sums", "d", 1.0, 0): row(0.0, sampled=falling, notes=[["worse", 9], ["samples", 5]]),
        Cell("sums", "e", 1.0, 0): row(0.0, sampled=falling, notes=[["worse", 9]]),
    }
    *table, _, named, false = notes_report(rows).splitlines()
    assert table[2:] == [
        "| sums/d/x1/0 | 7 | samples, 5 | 2 |",
        "| sums/e/x1/0 | 7 | worse, 9 | -2 |",
    ]
    assert named == "1 of 2 breaks are named before they begin, a median of 0 steps before."
    assert false == "1 of 2 healthy runs have a note: sums/b/x1/0."


def test_weights_of_few_bits_by_hand():
    # Two bits have the values -1, 0 and 1 times the row's largest entry.
    weights = torch.tensor([[1.0, 0.4, -0.6], [0.0, 0.0, 0.0]])
    assert rounded(weights, 2).tolist() == [[1.0, 0.0, -1.0], [0.0, 0.0, 0.0]]
    assert rounded(weights, 8)[0].tolist() == pytest.approx([1.0, 51 / 127, -76 / 127])
    vector = torch.tensor([0.3])
    assert rounded(vector, 2) is vector
