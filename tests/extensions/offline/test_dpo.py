"""Training on preferences: each loss begins at its value and separates the answers; what the reference costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from async_rl.extensions.offline.reference import reference_logprobs
from async_rl.extensions.offline.tasks import train
from async_rl.learner.interface import Engine, PolicyScores
from async_rl.learner.sequences import TrainSequence, train_sequence
from tests.extensions.offline.offline_run import exported, metrics, offline_config


@pytest.mark.parametrize(
    ("loss", "beta", "first"),
    # The policy is the reference model: ln 2, 1 / (2 beta)^2 = 25, and the mean of 1 - 1/2.
    [
        ("sigmoid", 0.1, math.log(2)),
        ("kto", 0.1, 0.5),
        *(
            pytest.param(loss, beta, first, marks=pytest.mark.long)
            for loss, beta, first in (("ipo", 0.1, 25.0), ("simpo", 2.0, None), ("orpo", 1.0, None))
        ),
    ],
)
def test_every_loss_begins_at_its_value_and_separates_chosen_from_rejected(
    tmp_path: Path, loss: str, beta: float, first: float | None
):
    train("dpo", offline_config(tmp_path, "dpo", dpo={"loss": loss, "beta": beta, "batch_size": 12, "steps": 8}))
    rows = metrics(tmp_path, "dpo")
    assert [row["step"] for row in rows] == list(range(1, 9))
    if first is not None:
        assert rows[0]["loss"] == pytest.approx(first, rel=1e-5)
        assert rows[0]["rewards/margin"] == pytest.approx(0.0, abs=1e-5)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[-1]["rewards/margin"] > rows[0]["rewards/margin"] + 0.05
    assert exported(tmp_path)


def test_the_metrics_are_those_of_the_values_before_the_step(tmp_path: Path):
    # With a learning rate that moves nothing, the margin stays 0 and the loss ln 2, in every step.
    evaluation = {"eval": {"same": str(tmp_path / "rows.jsonl")}, "eval_every": 2}
    train("dpo", offline_config(tmp_path, "dpo", dpo={"lr": 1e-30, "steps": 3, "label_smoothing": 0.2, **evaluation}))
    assert ["eval/same/loss" in row for row in metrics(tmp_path, "dpo")] == [False, True, True]
    for row in metrics(tmp_path, "dpo"):
        assert row.get("eval/same/loss", math.log(2)) == pytest.approx(math.log(2), abs=1e-6)
        assert row["loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert row["rewards/chosen"] == pytest.approx(0.0, abs=1e-6)
        assert row["logprobs/chosen"] > row["logprobs/rejected"]  # which has more tokens


def test_a_reference_of_quantised_weights_is_scored_anew(tmp_path: Path):
    class Constant:
        """Each token has the same log-probability."""

        def __init__(self, value: float) -> None:
            self._value = value

        def score_policy(self, sequences: Sequence[TrainSequence]) -> dict[int, PolicyScores]:
            return {s.sequence_id: PolicyScores(np.full(1, self._value), np.zeros(1)) for s in sequences}

    rows = [[train_sequence(0, [1, 2], np.array([False, True]))]]
    for bits, value in ((None, -1.0), (8, -2.0)):
        config = offline_config(tmp_path, "dpo", lora={"rank": 4, "base_bits": bits})
        engine = cast(Engine, Constant(value))
        assert reference_logprobs(engine, config, rows, tmp_path / "reference", lambda _: None) == [[value]]
