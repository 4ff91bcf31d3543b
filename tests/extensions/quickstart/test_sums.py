"""The quickstart's task: disjoint sets, right answers, and a pupil who forgets carries."""

import json
from pathlib import Path

from async_rl.extensions.quickstart import sums


def test_held_out_pairs_are_in_neither_the_warm_start_nor_the_training_rows_and_every_answer_is_the_sum(tmp_path: Path):
    sums.write_task(tmp_path, seed=1)
    rows = {
        name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("sft", "train", "held_out")
    }
    questions = {
        "sft": {row["prompt"] for row in rows["sft"]},
        "train": {row["messages"][0]["content"] for row in rows["train"]},
        "held_out": {row["messages"][0]["content"] for row in rows["held_out"]},
    }
    assert len(questions["held_out"]) == len(rows["held_out"]) >= 256
    assert not questions["held_out"] & (questions["sft"] | questions["train"])
    assert not questions["sft"] & questions["train"]
    for row in rows["held_out"]:
        a, b = row["messages"][0]["content"].rstrip(":").split("+")
        assert int(a) + int(b) == int(row["gt_answer"])


def test_the_pupil_works_digit_by_digit():
    # 37 + 48: 7 + 8 = 15, carry 1; 3 + 4 + 1 = 8; 85. Without the carry it comes to 75.
    assert sums.working(37, 48, carry=True) == "7+8=15;3+4+1=8;\\boxed{85}"
    assert sums.working(37, 48, carry=False) == "7+8=15;3+4=7;\\boxed{75}"
