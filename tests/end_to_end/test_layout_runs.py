"""A run over the real roles under each layout of the learner's ranks: it samples, trains, evaluates and exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.harness import launched, roles
from tests.end_to_end.tiny import tiny_config, write_tiny_task
from tests.learner.rank_layouts import LAYOUTS, LORA, layout_weights, model_for

IN_CI: dict[str, dict[str, Any]] = {"tensor 2": {}, "pipeline 2": {"lora": {**LORA["lora"], "publish": "adapters"}}}
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
        # From 1.4 to 1.0 over 2 versions: 0.2 a version.
        sampling={"top_p": 0.7, "temperature": 1.4, "temperature_end": 1.0, "temperature_steps": 2},
        queue={"max_staleness": 0},
        optimizer={"lr": 1e-2},
        checkpoint={"every": 2},
        loss={"kl_coef": 0.1, "kl_placement": "loss", "entropy_coef": 0.1},
        experimental={"parity_every": 1},
    )
    rows = launched(root, raw)
    with roles(root / "logs") as start:
        start("eval", "eval", str(root / "run"), "--dataset", task["held_out"], "--max-new-tokens", "8").succeed()
    assert (root / "run" / "export" / "model.safetensors").is_file()
    return rows


def check_run(rows: list[dict[str, Any]]) -> None:
    """What the generator says of a token is what the learner says of it, from the first step to the last."""
    assert [row["temperature"] for row in rows] == pytest.approx([1.4, 1.2, 1.0])
    for row in rows:
        assert (row["ratio/mean"], row["ratio/max"], row["ratio/ess"]) == pytest.approx((1.0, 1.0, 1.0), abs=1e-5)
        assert row["grad_norm"] > 0
    assert rows[-1]["kl/reference"] > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_CI)
def test_a_run_samples_trains_evaluates_and_exports(tmp_path: Path, name: str):
    check_run(layout_run(tmp_path, name, **IN_CI[name]))


@pytest.mark.slow
def test_a_run_whose_answers_reach_the_longest_sequence_of_two_ranks_leaves_nothing_out(tmp_path: Path):
    # A prompt has 6 tokens, and most answers have the allowed 12: 18 tokens, two ranks of 9. A group shares its prompt.
    raw = tiny_config(
        tmp_path,
        write_tiny_task(tmp_path),
        sampling={"max_prompt_tokens": 6, "max_new_tokens": 12},
        learner={"steps": NUM_STEPS, "nproc": 2, "max_tokens": 9},
        parallel={"sequence": 2},
    )
    rows = launched(tmp_path, raw)
    assert {(row["length/max"], row["tokens/masked"]) for row in rows} == {(12, 0)}
    # 4 groups of 2 answers.
    assert [row["tokens/trained"] for row in rows] == [8 * row["length/mean"] for row in rows]


@pytest.mark.long
@pytest.mark.parametrize("lora", [{}, LORA], ids=["all weights", "adapters"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_samples_trains_evaluates_and_exports_under_every_layout(tmp_path: Path, name: str, lora: dict[str, Any]):
    check_run(layout_run(tmp_path, name, **lora))
