"""The study of staleness: what it makes of a run's metrics, its table, and that no run is made twice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from async_rl.config.loading import load_config
from benchmarks import staleness_study
from benchmarks.staleness_study import (
    LAGS,
    LOSSES,
    ROOT,
    STEPS,
    STUDIED,
    Result,
    Setting,
    draw,
    goal,
    measure,
    run,
    table,
)

SETTING = Setting(lag=16, loss="off", seed=3, learning_rate=1e-3, steps=256)
RESULT = Result(
    [(0, 0.3), (10, 0.8), (20, 1.0)], lag_mean=16.0, lag_max=16, ess=0.5, kl=0.1, ratio_max=7.5, clipped=0.25,
    masked=0.125, seconds=9.0,
)  # fmt: skip


@pytest.mark.parametrize("lag", LAGS)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_run_of_the_study_has_a_config_that_is_accepted(lag: int, loss: str):
    overrides = replace(SETTING, lag=lag, loss=loss).overrides
    config = load_config(ROOT / "configs/quickstart.toml", [f"{key}={value}" for key, value in overrides.items()])
    assert (config.learner.fixed_lag, config.queue.max_staleness, config.queue.filter_range) == (lag, lag, None)
    assert (config.loss.surrogate == "plain") == (loss in ("off", "dppo_tv"))
    assert config.loss.skip_threshold == (None if loss in ("off", "clip") else 20.0)
    assert (config.optimizer.ess_reference == 1.0) == (loss == "vcpo")
    assert [rule.label for rule in config.loss.rules] == {"dppo_tv": ["dppo"], "opsm": ["opsm"]}.get(loss, [])
    assert 4 * lag <= STEPS or loss not in STUDIED
    assert "seed-3" in config.data.train


def test_another_setting_has_another_name():
    others = [
        replace(SETTING, lag=4),
        replace(SETTING, loss="clip"),
        replace(SETTING, seed=4),
        replace(SETTING, learning_rate=2e-3),
        replace(SETTING, steps=257),
    ]
    assert len({setting.name for setting in (SETTING, *others)}) == 6
    assert replace(SETTING).name == SETTING.name


def test_a_result_that_is_kept_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(staleness_study, "STUDY", tmp_path)
    made: list[list[str]] = []

    def launch(command: list[str], **options: Any) -> Any:
        made.append(command)
        run_dir = Path(command[-1].removeprefix("run.dir="))
        run_dir.mkdir(parents=True)
        (run_dir / "metrics.jsonl").write_text('{"step": 0, "time_s": 1.0, "eval/held_out/accuracy": 0.25}\n')
        return staleness_study.subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(staleness_study.subprocess, "run", launch)
    first = run(SETTING)
    assert run(SETTING).accuracy == first.accuracy == 0.25
    assert len(made) == 1
    run(replace(SETTING, seed=4))
    assert len(made) == 2


def test_a_run_that_fails_leaves_no_result_and_its_log_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(staleness_study, "STUDY", tmp_path)
    failed = staleness_study.subprocess.CompletedProcess([], 3)
    monkeypatch.setattr(staleness_study.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(RuntimeError, match=r"exited 3; see .*logs"):
        run(SETTING)
    assert not (tmp_path / "results").exists()


def test_only_steps_that_trained_at_the_held_lag_are_measured(tmp_path: Path):
    # Lag 2: steps 1 and 2 grow up to it; step 4 trained on nothing; a KL that is not finite is written as null. What
    # was asked of version 4 was answered by the last one, 5.
    rows = [
        {"step": step, "version": step, "time_s": step, "tokens/trained": trained, "staleness/mean": lag,
         "staleness/max": lag, "ratio/ess": 0.5, "ratio/kl": kl, "ratio/max": 2.0 * step,
         "ratio/clip_fraction": 0.25, "skip/token_fraction": 0.125}
        for step, trained, lag, kl in [(1, 9, 0, 1.0), (2, 9, 1, 1.0), (3, 9, 2, 0.25), (4, 0, 0, 1.0), (5, 9, 2, None)]
    ]  # fmt: skip
    evals = [{"step": step, "time_s": 7.0, "eval/held_out/accuracy": step / 10} for step in (5, 4, 0)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (*rows, *evals)))
    assert measure(tmp_path, 2) == Result([(0, 0.0), (5, 0.5)], 2, 2, 0.5, 0.25, 10.0, 0.25, 0.125, 7.0)


def test_steps_to_accuracy_lie_on_the_line_between_two_evaluations():
    assert RESULT.steps_to_accuracy == pytest.approx(15)  # half of the way from 0.8 to 1.0
    assert replace(RESULT, evals=[(0, 0.95), (10, 0.1)]).steps_to_accuracy == 0
    assert replace(RESULT, evals=[(0, 0.3), (10, 0.89)]).steps_to_accuracy is None


def test_the_table_and_the_goal_by_hand(tmp_path: Path):
    late = replace(RESULT, evals=[(0, 0.3), (10, 0.7), (20, 0.8)])
    results = {(0, "default"): [RESULT, RESULT], (16, "default"): [RESULT, late]}
    # 1.0 and 0.8: mean 0.9, standard deviation 0.1 * sqrt 2, standard error 0.1. One of two reached 0.9, at step 15.
    assert (
        "| 16 | default | 2 | 16.00 (16) | 0.900 ± 0.100 | 0.800 | 15 (1 of 2) | 0.500 | 0.1 | 7.5 | 25.00% | 12.50% |"
        in table(results)
    )
    assert goal(results).startswith("default at lag 16 less lag 0: -0.100 ± 0.100")
    assert goal({(0, "off"): [RESULT]}) == ""
    draw(results, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
