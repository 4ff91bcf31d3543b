"""A run over the real roles under each layout of the learner's ranks: it samples, trains, evaluates and exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.family_run import learn_sums
from tests.end_to_end.harness import check_ledger, metrics, roles, steps, write_config
from tests.end_to_end.tiny import tiny_config, write_tiny_task
from tests.learner.rank_layouts import LAYOUTS, LORA, layout_weights, model_for

IN_CI = ("tensor 2", "pipeline 2")
NUM_STEPS = 3


def layout_run(root: Path, name: str, **changes: Any) -> list[dict[str, Any]]:
    """The metrics of the steps of a run at bound 0 under the layout ``name``, whose model is exported and evaluated."""
    size, parallel = LAYOUTS[name]
    task = write_tiny_task(root)
    layout_weights(root / "model", model_for(parallel, "qwen3"))
    raw = tiny_config(
        root,
        task,
        **changes,
        learner={"steps": NUM_STEPS, "nproc": size},
        parallel=parallel,
        queue={"max_staleness": 0},
        optimizer={"lr": 1e-2},
        checkpoint={"every": 2},
        loss={"kl_coef": 0.1, "kl_placement": "loss", "entropy_coef": 0.1},
        experimental={"parity_every": 1},
    )
    with roles(root / "logs") as start:
        start("launch", "launch", str(write_config(root / "config.toml", raw))).succeed()
        start("eval", "eval", str(root / "run"), "--dataset", task["held_out"], "--max-new-tokens", "8").succeed()
    check_ledger(root / "run")
    assert steps(root / "run") == list(range(1, NUM_STEPS + 1))
    assert (root / "run" / "export" / "model.safetensors").is_file()
    return [row for row in metrics(root / "run") if "version" in row]


def check_run(rows: list[dict[str, Any]]) -> None:
    """What the generator says of a token is what the learner says of it, from the first step to the last."""
    for row in rows:
        assert (row["ratio/mean"], row["ratio/max"], row["ratio/ess"]) == pytest.approx((1.0, 1.0, 1.0), abs=1e-5)
        assert row["grad_norm"] > 0
    assert rows[-1]["kl/reference"] > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_CI)
def test_a_run_samples_trains_evaluates_and_exports(tmp_path: Path, name: str):
    check_run(layout_run(tmp_path, name))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "parallel"), [(3, {}), pytest.param(4, {"pipeline": 2}, marks=pytest.mark.long)], ids=str
)
def test_the_last_batch_of_the_data_may_have_fewer_answers_than_there_are_ranks(
    tmp_path: Path, num_ranks: int, parallel: dict[str, int]
):
    # Three rows, two groups of two answers a step: the second step has two answers.
    task = write_tiny_task(tmp_path, num_rows=3)
    raw = tiny_config(
        tmp_path, task, learner={"steps": 99, "groups_per_step": 2, "nproc": num_ranks}, parallel=parallel,
        optimizer={"lr": 1e-2},
    )  # fmt: skip
    raw["data"]["epochs"] = 1
    with roles(tmp_path / "logs") as start:
        start("launch", "launch", str(write_config(tmp_path / "config.toml", raw))).succeed()
    groups = check_ledger(tmp_path / "run")["groups"]
    assert (groups["issued"], groups["trained"]) == (3, 3)
    last = [row for row in metrics(tmp_path / "run") if "version" in row][-1]
    assert (last["step"], last["version"]) == (2, 2)
    assert last["tokens/trained"] > 0
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file()


@pytest.mark.long
@pytest.mark.parametrize("lora", [{}, LORA], ids=["all weights", "adapters"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_samples_trains_evaluates_and_exports_under_every_layout(tmp_path: Path, name: str, lora: dict[str, Any]):
    check_run(layout_run(tmp_path, name, **lora))


@pytest.fixture(scope="module")
def task_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the warm starts are kept: one for each model."""
    return tmp_path_factory.mktemp("quickstarts")


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_quickstart_learns_under_every_layout(task_root: Path, name: str):
    size, parallel = LAYOUTS[name]
    family = "qwen3 moe" if "experts" in parallel else "qwen2"
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
    learned = learn_sums(task_root / family, family, backend="transformers", parallel=parallel, num_ranks=size, **shape)
    assert learned.accuracy_after > learned.accuracy_before + 0.1
    assert learned.parity < 1e-4
