"""Runs of ``async-rl launch`` whose files show that settings do what they promise, many settings in a run.

What a setting does to the learner's steps alone is in ``tests/learner/test_predecessors_training.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.harness import check_ledger, metrics, roles, write_config
from tests.end_to_end.test_launch_run import read_lines, write_gsm8k_model

pytestmark = pytest.mark.long

ASKED = [("1+2:", "3"), ("2+2:", "4"), ("3+4:", "7"), ("5+3:", "8")]
"""Questions and answers."""
LONG = "1+" * 400 + "1:"
"""A question of 802 characters, each a token."""


def launch(root: Path, **sections: dict[str, Any]) -> list[dict[str, Any]]:
    """Launch a run over the fake backend, which is right half of the time, and return the metrics of its steps."""
    write_gsm8k_model(root / "model")
    rows = [{"messages": {"role": "user", "content": question}, "gt_answer": answer} for question, answer in ASKED]
    for name, lines in (("rows.jsonl", [*rows, {"prompt": LONG, "gt_answer": "401"}]), ("math500.jsonl", rows)):
        (root / name).write_text("".join(json.dumps(row) + "\n" for row in lines))
    config: dict[str, dict[str, Any]] = {
        "run": {"dir": str(root / "run")},
        "model": {"path": str(root / "model")},
        "data": {
            "train": str(root / "rows.jsonl"), "eval": {"math500": str(root / "math500.jsonl")},
            "on_long_prompt": "truncate",
        },
        "sampling": {"group_size": 4, "max_new_tokens": 12, "max_prompt_tokens": 512},
        "queue": {"lease_timeout_s": 60.0},
        "learner": {"groups_per_step": 2, "max_tokens": 8192, "num_threads": 1},
        "optimizer": {"lr": 1e-3},
        "generator": {"backend": "fake", "batch_size": 16, "num_threads": 1},
        "experimental": {"fake": {"mean_tokens": 6.0, "vocab_size": 64}},
    }  # fmt: skip
    for section, keys in sections.items():
        config[section] = config.get(section, {}) | keys
    with roles(root / "logs") as start:
        start("launch", "launch", str(write_config(root / "config.toml", config))).succeed()
    check_ledger(root / "run")
    return [row for row in metrics(root / "run") if "version" in row]


def names(directory: Path, pattern: str = "*") -> list[str]:
    return sorted(path.name for path in directory.glob(pattern))


def eval_rows(root: Path) -> list[dict[str, Any]]:
    return [row for row in metrics(root / "run") if "eval/math500/accuracy" in row]


def test_rewards_prompts_logs_evaluations_and_checkpoints_are_as_their_settings_say(tmp_path: Path):
    rows = launch(
        tmp_path,
        data={"system_prompt": "Think first."},
        sampling={"max_new_tokens": 516},
        reward={"type": "boxed", "scale": 10.0, "soft_overlong": True, "cache_length": 512},
        queue={"filter_range": [0.01, 0.99], "refill": True, "journal_dir": str(tmp_path / "journal")},
        learner={"steps": 25},
        eval={"every": 20, "num_samples": 8, "temperature": 0.6},
        checkpoint={"every": 10, "keep_last": 2},
        log={"rollouts_every": 20, "rollouts_groups": "all", "profile": "3-5"},
    )
    # Half of the answers are right and earn 10; all are 6 tokens, of which each after the fourth costs 10 / 512.
    assert [row["reward/correct"] for row in rows] == pytest.approx([10 * row["accuracy/mean"] for row in rows])
    assert [row["reward/overlong"] for row in rows] == pytest.approx([-10 * (6 - 4) / 512] * 25)
    assert all(0 < row["accuracy/mean"] < 1 and row["entropy"] > 0 for row in rows)
    assert check_ledger(tmp_path / "run")["groups"]["trained"] == 25 * 2
    assert [row["step"] for row in eval_rows(tmp_path)] == [0, 20, 25]
    for row in eval_rows(tmp_path):
        assert (row["eval/math500/samples"], row["eval/math500/rows"]) == (8, 4)
        assert row["eval/math500/accuracy"] < row["eval/math500/best_of_n"]
    assert names(tmp_path / "run", "eval/*") == [f"math500-step-0000{step}.jsonl" for step in ("00", "20", "25")]
    assert names(tmp_path / "run", "rollouts/step-*.jsonl") == [f"step-0000{step}.jsonl" for step in ("01", "21", "25")]
    assert names(tmp_path / "run" / "checkpoints") == ["latest", "step-000020", "step-000025"]
    assert names(tmp_path / "run" / "profile") == [f"step-00000{step}.json.gz" for step in (3, 4, 5)]
    assert (tmp_path / "journal" / "index.sqlite").is_file()
    rollouts = [line for path in (tmp_path / "run" / "rollouts").glob("step-*.jsonl") for line in read_lines(path)]
    assert all(rollout["messages"][0] == {"role": "system", "content": "Think first."} for rollout in rollouts)
    # The question of 802 tokens is cut to fit, and sampled, not dropped.
    assert any(rollout["messages"][1]["content"] == LONG for rollout in rollouts)


def test_a_critic_is_trained_alone_for_its_first_steps_and_saved_with_the_policy(tmp_path: Path):
    rows = launch(
        tmp_path,
        loss={"preset": "ppo"},
        critic={"path": str(tmp_path / "model"), "freeze_steps": 10, "value_clip": 0.2, "lr": 0.1},
        learner={"steps": 12, "updates_per_batch": 2},
        checkpoint={"every": 6},
        eval={"every": 10},
    )
    assert [row["step"] for row in eval_rows(tmp_path)] == [0, 10, 12]
    # Ten steps train only the critic; then each batch makes two versions.
    assert [row["version"] for row in rows] == [0] * 10 + [2, 4]
    assert all(row["critic/loss"] > 0 and 0 <= row["critic/clip_fraction"] <= 1 for row in rows)
    assert any(row["critic/clip_fraction"] > 0 for row in rows)
    assert rows[-1]["grad_norm"] > 0
    assert "critic" in names(tmp_path / "run" / "checkpoints" / "step-000012")
