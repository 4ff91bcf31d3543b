"""A run whose data is a table and whose rewards are the user's own functions, as a user starts it; and its metrics."""

from __future__ import annotations

import csv
import hashlib
import json
import textwrap
from pathlib import Path

import pytest

from async_rl.run.records.metric_table import METRIC_KEYS
from tests.end_to_end.harness import check_ledger, launched, metrics, roles, steps, write_config
from tests.end_to_end.tiny import tiny_config, write_tiny_task
from tests.learner.loop.test_profiling import ranges
from tests.run.metric_keys import declared_key

SOURCE = textwrap.dedent(
    """
    def right(items):
        return [float(item.text.endswith(f"{{{item.reward_data['gt_answer']}}}")) for item in items]

    async def loud(item):
        return 1.0
    """
)
FAKE = {"mean_tokens": 4.0, "vocab_size": 20, "accuracy": 1.0}

MAY_BE_ABSENT = {
    "idle/spare",  # nobody decoded with full batches
    # The settings, or what happened, decide.
    "score/mean", "turns/mean", "turns/max", "kl/reference", "masked/<cause>",
    "mismatch_kl/update_effect", "parity/mean", "parity/<name>", "parity/sampled_<name>", "packing/padding",
    "packing/repeated", "rule/<name>", "loss_mask/<name>", "loss_metric/<name>",
    *(f"routing/{name}" for name in ("different", "balance_loss", "busiest", "unused")),
    "distill/kl", "distill/top_k_mass", "source/<source>/distill_kl",
    *(f"source/<source>/{name}" for name in ("groups", "accuracy", "reward", "aside", "known", "pass_rate")),
    *(f"curriculum/{name}" for name in ("aside", "known", "pass_rate", "passed_aside", "passed_thinned")),
    "time/checkpoint_write_s", "idle/learner_used", "learner_sampled/groups", "learner_sampled/tokens",
    "time/critic_s", *(key for key in METRIC_KEYS if key.startswith("critic/")),
    *(key for key in METRIC_KEYS if key.startswith("mirror/")),
    "grading/<counter>", *(key for key in METRIC_KEYS if key.startswith("agent/")),
    "length/cut_turn", "length/cut_context", "advantage/agreement", "advantage/zero_groups",
    # It needs a known device.
    "throughput/mfu",
    # They need two reports of the same generators; a run of three steps may be over before.
    "time/pause_s", "time/generate_s", "time/decode_step_s", "time/decode_sequence_s",
    "idle/generators", "overlap/efficiency", "throughput/generated_tokens_per_s",
    "time/grading_s", "time/environment_s", *(f"idle/{n}" for n in ("grading", "environment", "weights", "leases")),
    # Of an environment, of failed rows, of sets with several answers per row.
    *(f"eval/<dataset>/{name}" for name in ("score", "score_best_of_n", "turns", "failed", "best_of_n",
                                            "reward_best_of_n", "majority_at_n")),
}  # fmt: skip
"""Keys of ``METRIC_KEYS`` that not every run has."""


def write_csv(path: Path, task: dict[str, str]) -> str:
    """The task's rows with column names of their own; the last question is longer than any prompt may be."""
    rows = [json.loads(line) for line in Path(task["train"]).read_text().splitlines()]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["question", "solution"])
        writer.writerows([row["messages"][0]["content"], row["gt_answer"]] for row in rows[:-1])
        writer.writerow(["1+" * 30 + "1:", "31"])
    return str(path)


@pytest.mark.slow
def test_a_run_with_rewards_of_the_user_s_own_over_a_table(tmp_path: Path):
    source = tmp_path / "my_rewards.py"
    source.write_text(SOURCE)
    config = tiny_config(
        tmp_path,
        write_tiny_task(tmp_path, num_rows=8),
        reward={"type": f"{source}:right", "extra": {f"{source}:loud": 0.25}, "soft_overlong": False},
        learner={"steps": 3},
        generator={"backend": "fake", "batch_size": 4, "allow_code": [str(source)]},
        experimental={"fake": FAKE},
        eval={"every": 0},
    )
    config["data"] = {
        "train": write_csv(tmp_path / "rows.csv", {"train": config["data"]["train"]}),
        "columns": {"prompt": "question", "gt_answer": "solution"},
        "eval": {"table": str(tmp_path / "rows.csv")},
        "on_long_prompt": "truncate",
    }
    rows, run_dir = launched(tmp_path, config, "--set", "log.profile=2-2"), tmp_path / "run"
    assert [(row["reward/mean"], row["accuracy/mean"]) for row in rows] == [(pytest.approx(1.25), 1.0)] * 3
    emitted = {key: declared_key(key) for row in metrics(run_dir) for key in row}
    assert [key for key, declared in emitted.items() if declared is None] == []
    assert METRIC_KEYS.keys() - emitted.values() <= MAY_BE_ABSENT
    (trace,) = (run_dir / "profile").iterdir()
    assert trace.name == "step-000002.json.gz"
    assert ranges(trace) >= {"wait", "prepare", "train", "pack", "forward", "backward", "optimizer", "publish"}
    digests = json.loads((run_dir / "code_digests.json").read_text())
    assert set(digests.values()) == {hashlib.sha256(SOURCE.encode()).hexdigest()}


@pytest.mark.slow
def test_a_reward_that_always_fails_stops_the_run_with_its_own_error_and_the_corrected_one_goes_on(tmp_path: Path):
    source = tmp_path / "my_rewards.py"
    # It does not fail in the trial before the start, which finds nothing.
    source.write_text(
        "import sys\nIS_TRIAL = 'async_rl.launch.checks.user_code_trial:score_rows' in sys.orig_argv\n"
        "def right(item):\n"
        "    return IS_TRIAL or item.reward_data['answer']\n"
    )
    config = tiny_config(
        tmp_path,
        write_tiny_task(tmp_path, num_rows=8),
        reward={"type": f"{source}:right", "soft_overlong": False},
        learner={"steps": 2},
        generator={"backend": "fake", "batch_size": 4, "allow_code": [str(source)]},
        experimental={"fake": FAKE},
        eval={"every": 0},
    )
    path = write_config(tmp_path / "config.toml", config)
    with roles(tmp_path / "logs") as start:
        failed = start("failed", "launch", str(path))
        assert failed.wait() == 1
        expected = f"KeyError: 'answer' ({source}, line 4, in right: return IS_TRIAL or item.reward_data['answer'])"
        assert f"the reward failed 8 times in a row with the same error, and never succeeded: {expected}" in failed.log
        assert "Traceback" not in failed.log
        source.write_text("def right(item):\n    return float(item.reward_data['gt_answer'] in item.text)\n")
        start("corrected", "launch", str(path)).succeed()
    assert steps(tmp_path / "run") == [1, 2]
    check_ledger(tmp_path / "run")
