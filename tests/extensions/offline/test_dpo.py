"""Training on preferences from a config to a Hugging Face directory: it learns, resumes exactly, on every layout."""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from async_rl.errors import ConfigError, RunError
from async_rl.extensions.offline.dpo import LabelledAnswers
from async_rl.extensions.offline.reference import reference_logprobs
from async_rl.extensions.offline.rows import train_sequence
from async_rl.extensions.offline.tasks import train
from async_rl.learner.interface import Engine, PolicyScores
from async_rl.learner.sequences import TrainSequence
from async_rl.process.fault_points import OFFLINE_FAULT_POINTS
from tests.extensions.offline.offline_run import begin, metrics, offline_config
from tests.forked import preload
from tests.learner.ranks import finish_ranks, run_ranks, start_ranks

preload("tests.extensions.offline.offline_run")

ALL = (
    "offline.reference_scored", "learner.forward", "learner.backward", "offline.trained", "learner.checkpoint_writing",
    "learner.checkpoint_saved", "learner.checkpoint_written", "offline.trained_all",
)  # fmt: skip
OF_TWO = (ALL[0], "learner.forward-rank-1", "learner.backward-rank-1", *ALL[1:])
LORA = {"lora": {"rank": 4, "alpha": 8.0}}


def exported(root: Path) -> dict[str, Tensor]:
    return load_file(root / "out" / "model.safetensors")


def test_every_fault_point_of_training_on_given_rows_is_tested():
    assert set(OFFLINE_FAULT_POINTS) <= set(ALL)


@pytest.mark.parametrize(
    ("loss", "beta", "first"),
    # The policy is the reference model: ln 2, 1 / (2 beta)^2 = 25, and the mean of 1 - 1/2.
    [
        ("sigmoid", 0.1, math.log(2)),
        ("kto", 0.1, 0.5),
        pytest.param("ipo", 0.1, 25.0, marks=pytest.mark.long),
        pytest.param("simpo", 2.0, None, marks=pytest.mark.long),
        pytest.param("orpo", 1.0, None, marks=pytest.mark.long),
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


def test_a_resumed_run_refuses_other_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = offline_config(tmp_path, "dpo", dpo={"loss": "kto", "steps": 1})
    monkeypatch.setattr(LabelledAnswers, "export", Mock(side_effect=RuntimeError("killed")))
    with pytest.raises(RuntimeError, match="killed"):
        train("dpo", config)
    path = tmp_path / "rows.jsonl"
    path.write_text(path.read_text().replace("false", "true"))
    with pytest.raises(RunError, match=r"dpo\.data: expected the rows that .* was trained on, got others"):
        train("dpo", config)


def test_a_config_without_data_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"dpo\.data: expected a value"):
        train("dpo", offline_config(tmp_path, "dpo", dpo={"data": ""}))


def kill_at(directory: Path, point: str, world_size: int) -> None:
    (directory / "point").write_text(point)
    ended = finish_ranks(start_ranks("offline", directory, world_size=world_size))
    killed = int(point.rpartition("-rank-")[2]) if "-rank-" in point else 0
    assert ended[killed][0] == -signal.SIGKILL, "\n\n".join(output for _, output in ended)
    assert all(code for code, _ in ended)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("command", "world_size", "points", "sections"),
    [
        pytest.param("dpo", 1, ("offline.reference_scored", "learner.backward"), {}, marks=pytest.mark.slow, id="some"),
        *(
            pytest.param(command, size, points, sections, marks=pytest.mark.long, id=f"{command}, {name}")
            for command in ("sft", "dpo")
            for name, size, points, sections in (
                ("one rank", 1, ALL, {}),
                ("kto", 1, ALL, {"dpo": {"loss": "kto"}}),
                ("adapters", 1, ALL, LORA),
                ("two ranks", 2, OF_TWO, {}),
                ("two ranks share sequences", 2, OF_TWO, {"parallel": {"sequence": 2}}),
            )
            if command == "dpo" or name != "kto"
        ),
    ],
)
def test_a_run_killed_at_every_fault_point_ends_with_the_bits_of_an_undisturbed_one(
    tmp_path: Path, command: str, world_size: int, points: tuple[str, ...], sections: dict[str, Any]
):
    points = points if command == "dpo" else tuple(p for p in points if p != "offline.reference_scored")
    own = {"steps": 6 * len(points) + 6} | sections.get(command, {})
    whole, killed = (begin(tmp_path / n, command, **sections | {command: own}) for n in ("whole", "killed"))
    run_ranks("offline", whole, world_size=world_size)
    for point in points:
        kill_at(killed, point, world_size)
    (killed / "point").write_text("")
    run_ranks("offline", killed, world_size=world_size)
    assert metrics(killed, command) == metrics(whole, command)
    expected, got = exported(whole), exported(killed)
    assert [name for name, tensor in expected.items() if not torch.equal(got[name], tensor)] == []


@pytest.mark.parametrize(
    ("name", "sections"),
    [
        pytest.param("data", {}, marks=pytest.mark.long),
        pytest.param("sequence", {"parallel": {"sequence": 2}}, marks=pytest.mark.slow),
        pytest.param("adapters", LORA, marks=pytest.mark.long),
        pytest.param("kto", {"dpo": {"loss": "kto"}}, marks=pytest.mark.long),
        pytest.param("pipeline", {"parallel": {"pipeline": 2}}, marks=pytest.mark.long),
        pytest.param("tensor", {"parallel": {"tensor": 2}}, marks=pytest.mark.long),
    ],
)
def test_two_ranks_learn_what_one_learns(tmp_path: Path, name: str, sections: dict[str, Any]):
    of_one = {key: value for key, value in sections.items() if key != "parallel"}
    settings = {"dpo": {"steps": 4, "lr": 1e-3, **sections.get("dpo", {})}, "learner": {"max_tokens": 64}}
    train("dpo", offline_config(begin(tmp_path / "one", "dpo", **of_one | settings), "dpo", **of_one | settings))
    run_ranks("offline", begin(tmp_path / "two", "dpo", **sections | settings))
    for one, two in zip(metrics(tmp_path / "one", "dpo"), metrics(tmp_path / "two", "dpo"), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
    expected = exported(tmp_path / "one")
    for key, tensor in exported(tmp_path / "two").items():
        torch.testing.assert_close(tensor, expected[key], atol=1e-3, rtol=1e-3)
