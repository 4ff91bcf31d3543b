"""``async-rl launch`` on code rows: programs are sampled, run in the sandbox, filtered and trained on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.harness import ROOT, check_ledger, metrics, roles, steps, write_config
from tests.end_to_end.tiny import tiny_config, write_tiny_task

ROWS = ROOT / "tests" / "data" / "mbpp_10.jsonl"


@pytest.mark.slow
def test_code_rows_are_sampled_graded_and_trained_on(tmp_path: Path):
    # The fake backend writes programs that know the tests' outputs, half of the time.
    fake = {"mean_tokens": 6.0, "vocab_size": 16, "accuracy": 0.5}
    raw = tiny_config(
        tmp_path,
        write_tiny_task(tmp_path),
        data={"train": str(ROWS), "eval": {"mbpp": str(ROWS)}},
        sampling={"group_size": 4, "max_prompt_tokens": 512},
        reward={"type": "code", "code": {"packages": [], "time_limit_s": 20.0}},
        queue={"lease_timeout_s": 120.0, "filter_range": [0.01, 0.99]},
        learner={"steps": 2, "max_tokens": 4096},
        generator={"backend": "fake"},
        experimental={"fake": fake},
    )
    with roles(tmp_path / "logs") as start:
        start("launch", "launch", str(write_config(tmp_path / "config.toml", raw))).succeed()
    assert steps(tmp_path / "run") == [1, 2]
    check_ledger(tmp_path / "run")
    trained = [row for row in metrics(tmp_path / "run") if "version" in row]
    assert all(0 < row["accuracy/mean"] < 1 for row in trained)
    # 10 answers, each right with probability a half: none or all of them once in 500 runs, and the seed is fixed.
    evaluated = [row["eval/mbpp/accuracy"] for row in metrics(tmp_path / "run") if "eval/mbpp/accuracy" in row]
    assert len(evaluated) == 2
    assert all(0 < accuracy < 1 for accuracy in evaluated)
