"""A task of reasoning-gym as rows and reward, which ``pip install reasoning-gym`` needs.

    python examples/gym_tasks.py chain_sum 1000 > gym.jsonl

Then set ``data.train = "gym.jsonl"``, ``reward.type = "examples/gym_tasks.py:score"``, and a ``data.system_prompt``
that asks for the final answer inside ``<answer>`` and ``</answer>``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import reasoning_gym  # pyright: ignore[reportMissingImports]


def score(item: Any) -> float:
    """The task's own score of the answer, 0 to 1."""
    entry = json.loads(item.reward_data["entry"])
    answer = item.text.rpartition("<answer>")[2].partition("</answer>")[0].strip()
    try:
        return float(reasoning_gym.get_score_answer_fn(entry["metadata"]["source_dataset"])(answer=answer, entry=entry))
    except ValueError:  # some scorers raise for an answer that is no number
        return 0.0


if __name__ == "__main__":
    name, num_rows = sys.argv[1:]
    for made in reasoning_gym.create_dataset(name, size=int(num_rows), seed=0):
        print(json.dumps({"prompt": made["question"], "entry": json.dumps(made)}))
