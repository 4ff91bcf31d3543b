"""A run that is killed again and again ends with the bits of one that is not, on one rank and under every layout.

With a bound above 0 that holds because the generator answers at once, and by prompt and version alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from async_rl.run.records.step_log import read_rows
from tests.fault_points import FAULT_POINTS
from tests.forked import preload
from tests.learner.rank_layouts import LAYOUTS, LORA, layout_model, model_for
from tests.learner.ranks import kill_at, run_ranks
from tests.learner.resumed_run import tensors_of

preload("tests.learner.resumed_run")

FAKED = ("learner.publishing",)
"""There are no generators, so nothing is published."""
ALL = tuple(point for point in FAULT_POINTS if point.startswith("learner.") and point not in FAKED)
OF_RANK_1 = ("learner.forward-rank-1", "learner.backward-rank-1")
OF_STALE = ("learner.forward", "learner.acknowledged")
OF_CRITIC = ("learner.backward", "learner.checkpoint_writing")
CRITIC = {
    "loss": {"preset": "ppo", "skip_threshold": 0},
    "critic": {"lr": 1e-3, "lam": 0.9, "freeze_steps": 3, "importance_cap": 1.0},
}
TEACHER = {
    "scorer": {"teacher": {"model": "teacher", "address": "tcp://127.0.0.1:1"}},  # nobody asks it
    "distill": {"teacher": "teacher", "form": "loss", "top_k": 3, "coef": 0.5},
    "generator": {"backend": "transformers"},  # the other one knows no vocabulary that a teacher could share
}
MOVING = {"loss": {"preset": "grpo", "reference_every": 3, "reference_decay": 0.4, "advantage": "per_part_norm"}}
OF_TWO = ("learner.forward-rank-1", "learner.backward", "learner.trained", "learner.checkpoint_saved")


def begin(directory: Path, num_steps: int, sections: dict[str, Any], bound: int) -> Path:
    (directory / "gates").mkdir(parents=True)
    (directory / "bound").write_text(str(bound))
    (directory / "steps").write_text(str(num_steps))
    (directory / "sections.json").write_text(json.dumps(sections))
    layout_model(directory / "model", model_for(sections.get("parallel", {}), "qwen2"))
    return directory


WITH_RANK_1 = (*ALL, *OF_RANK_1)
SPLIT = {"parallel": {"sequence": 2}}
RUNS: dict[str, tuple[int, dict[str, Any], tuple[str, ...], int]] = {
    "two ranks": (2, MOVING, OF_TWO, 0),
    "critic": (1, CRITIC, OF_CRITIC, 2),
    "one rank, all": (1, {}, ALL, 0),
    "one rank, stale": (1, {}, OF_STALE, 2),
    "two ranks, all, stale": (2, {}, WITH_RANK_1, 2),
    **{
        f"{name}{what}, all": (size, sections | more, points, bound)
        for name, sections in {"critic": CRITIC, "teacher": TEACHER}.items()
        for what, size, more, points, bound in (
            ("", 1, {}, ALL, 2), (", two ranks", 2, {}, WITH_RANK_1, 0), (", adapters", 1, LORA, ALL, 0),
            (", sequence 2", 2, SPLIT, ALL, 0),
        )
    },
    **{f"{name}, all": (size, {"parallel": parallel}, WITH_RANK_1, 0) for name, (size, parallel) in LAYOUTS.items()},
}  # fmt: skip
"""Name -> number of ranks, sections of the config, where it is killed, and the staleness bound. The first two are slow,
all others long.
"""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("world_size", "sections", "points", "bound"),
    [
        pytest.param(*run, marks=pytest.mark.slow if name in ("two ranks", "critic") else pytest.mark.long, id=name)
        for name, run in RUNS.items()
    ],
)
def test_a_run_killed_at_every_fault_point_ends_with_the_bits_of_an_undisturbed_one(
    tmp_path: Path, world_size: int, sections: dict[str, Any], points: tuple[str, ...], bound: int
):
    num_steps = 6 * len(points) + 6
    whole, killed = (begin(tmp_path / name, num_steps, sections, bound) for name in ("whole", "killed"))
    (whole / "point").write_text("")
    run_ranks("resumed", whole, world_size=world_size)
    for point in points:
        kill_at(point, "resumed", killed, world_size=world_size)
    (killed / "point").write_text("")
    run_ranks("resumed", killed, world_size=world_size)
    rows = read_rows(killed / "run" / "trained.jsonl")
    assert len({row["lineage"] for row in rows}) == len(points) + 1  # each start has left steps
    assert [position for row in rows for position, _ in row["groups"]] == list(range(2 * num_steps))
    expected, got = tensors_of(whole), tensors_of(killed)
    assert got.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(got[name], tensor)] == []
