"""Evaluations as the learner writes them down. ``tests/run`` has their figures and files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from msgspec import structs

from async_rl.learner.checkpoints.files import TrainerState
from async_rl.learner.loop.evaluations import Evaluations
from async_rl.queue.client.clients import LearnerQueue
from async_rl.queue.messages import EvalResult
from async_rl.records import Prompt
from tests.generator.leases import make_lease
from tests.queue.builders import group, make_config


class AnsweringQueue:
    """Gives ``results`` once."""

    def __init__(self, results: Sequence[EvalResult]) -> None:
        self.results = list(results)

    def confirm(self, lineage: str) -> None: ...

    def eval_results(self, lineage: str, received: Sequence[tuple[str, int]]) -> list[EvalResult]:
        given, self.results = self.results, []
        return given


def recorded(tmp_path: Path, result: EvalResult, **sections: Any) -> dict[str, Any]:
    config = make_config(str(tmp_path), data={"eval": {"math": "none.jsonl"}}, **sections)
    state = TrainerState().fork()
    state.pending_evals.append((result.dataset, result.step))
    rows: list[dict[str, Any]] = []
    evaluations = Evaluations(
        config, state, cast(LearnerQueue, AnsweringQueue([result])), record=lambda _, row: rows.append(row),
        run_dir=tmp_path, decode=str,
    )  # fmt: skip
    evaluations.collect()
    assert not evaluations.are_pending
    (row,) = rows
    return {key.removeprefix("eval/math/"): value for key, value in row.items()}


def result_of(answers: Sequence[Sequence[tuple[str, float]]]) -> EvalResult:
    """A row for each list of (answer, accuracy)."""
    groups = []
    for row, of_row in enumerate(answers):
        made = group(make_lease(kind="eval"), version=3, accuracies=[accuracy for _, accuracy in of_row])
        rollouts = tuple(structs.replace(r, extracted=text) for r, (text, _) in zip(made.rollouts, of_row, strict=True))
        prompt = Prompt(row, row, 0, ({"role": "user", "content": "?"},), {"gt_answer": "1"})
        groups.append((prompt, structs.replace(made, rollouts=rollouts)))
    return EvalResult("math", 7, tuple(groups))


def test_votes_are_taken_as_the_run_compares_answers(tmp_path: Path):
    # As text, "1" and "1.0" vote apart, and "2" has two votes.
    result = result_of([[("1", 1.0), ("2", 0.0), ("1.0", 1.0), ("2", 0.0), ("1.", 1.0)]])
    assert recorded(tmp_path / "a", result)["majority_at_n"] == 1.0
    assert recorded(tmp_path / "b", result, reward={"equality": "exact"})["majority_at_n"] == 0.0
    assert "majority_at_n" not in recorded(tmp_path / "c", result, reward={"type": "code"})
