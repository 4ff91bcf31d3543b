"""``async-rl launch`` on code rows: programs are sampled, run here or by a verifier, filtered and trained on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.harness import ROOT, launched, metrics, roles, wait_until
from tests.end_to_end.tiny import tiny_config, write_tiny_task
from tests.ports import free_address

ROWS = ROOT / "tests" / "data" / "mbpp_10.jsonl"


SANDBOX = pytest.param(False, marks=pytest.mark.slow, id="sandbox")
VERIFIER = pytest.param(True, marks=pytest.mark.long, id="verifier")


@pytest.mark.parametrize("is_remote", [SANDBOX, VERIFIER])
def test_code_rows_are_sampled_graded_and_trained_on(tmp_path: Path, is_remote: bool):
    # The fake backend writes programs that know the tests' outputs, half of the time.
    fake = {"mean_tokens": 6.0, "vocab_size": 16, "accuracy": 0.5}
    address = free_address().removeprefix("tcp://")
    code = {"packages": [], "time_limit_s": 20.0} | ({"endpoint": f"http://{address}"} if is_remote else {})
    raw = tiny_config(
        tmp_path,
        write_tiny_task(tmp_path),
        data={"train": str(ROWS), "eval": {"mbpp": str(ROWS)}},
        sampling={"group_size": 4, "max_prompt_tokens": 512},
        reward={"type": "code", "code": code},
        queue={"lease_timeout_s": 120.0, "filter_range": [0.01, 0.99]},
        learner={"steps": 2, "max_tokens": 4096},
        generator={"backend": "fake"},
        experimental={"fake": fake},
    )
    with roles(tmp_path / "logs") as start:
        if is_remote:
            verifier = start("verifier", "verifier", "--bind", address, "--set", "reward.code.packages=[]")
            wait_until("the verifier", lambda: address in verifier.log)
        trained = launched(tmp_path, raw)
    assert all(0 < row["accuracy/mean"] < 1 for row in trained)
    # 10 answers, each right with probability a half: none or all of them once in 500 runs, and the seed is fixed.
    evaluated = [row["eval/mbpp/accuracy"] for row in metrics(tmp_path / "run") if "eval/mbpp/accuracy" in row]
    assert len(evaluated) == 2
    assert all(0 < accuracy < 1 for accuracy in evaluated)
