"""The staleness study: every run that it asks for can be made, and its tables by hand."""

from typing import Any

import pytest

from async_rl.config.loading import load_config
from benchmarks.staleness_grid import Cell, Grid, Question
from benchmarks.staleness_real import GRID, ROOT, TASKS, settings_of
from benchmarks.staleness_tables import report

GRID_READ = Grid.load(GRID)


@pytest.mark.parametrize("question", GRID_READ.questions, ids=lambda question: question.name)
def test_every_run_of_the_grid_has_a_config_that_is_accepted(question: Question):
    for cell in question.cells():
        if cell.seed == 0:
            overrides = [f"{key}={value}" for key, value in settings_of(cell, GRID_READ).items()]
            config = load_config(ROOT / TASKS[cell.task].config, [*overrides, "data.eval.final=final.jsonl"])
            assert config.optimizer.lr == pytest.approx(TASKS[cell.task].lr * cell.rate)
            assert config.eval.of("final").every == 0


def row(accuracy: float, **more: Any) -> dict[str, Any]:
    dropped = {"stale": 3, "cancelled": 1, "too_slow": 0}
    return {
        "accuracy": accuracy, "evals": [[0, 0.2], [10, 0.6], [30, 0.8]], "ratio/ess": 0.9, "ratio/kl": 0.01,
        "staleness/mean": 2.0, "groups": {"issued": 40, "dropped": dropped},
        "tokens": {"trained": 90, "masked": {"stale": 10}}, **more,
    }  # fmt: skip


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
