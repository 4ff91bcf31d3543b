"""Write ``rollouts/step-NNNNNN.jsonl``: the rollouts that a step trained on, as text. Called by ``recorder.py``.

``log.rollouts_every`` says which steps, ``log.rollouts_groups`` how many of their groups, or all.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from async_rl.config.config import Config
from async_rl.queue.messages import TakenGroup
from async_rl.run.eval_records import Decode, answer_record, write_json_lines


def log_rollouts(
    run_dir: Path, taken: Sequence[TakenGroup], *, step: int, version: int, config: Config, decode: Decode
) -> None:
    """Write the rollouts of ``step`` if they are due. ``version`` is the learner's before the step."""
    every = config.log.rollouts_every
    if not every or (step - 1) % every:
        return
    chosen = [taken[index] for index in _chosen(len(taken), config, step)]
    lines = (line for item in chosen for line in _lines(item, version, decode))
    write_json_lines(run_dir / "rollouts" / f"step-{step:06d}.jsonl", lines)


def _chosen(num_groups: int, config: Config, step: int) -> list[int]:
    """Indices of the step's groups to log, in order; drawn at random from the run's seed and the step.

    The first groups would always be those of the oldest version.
    """
    wanted = config.log.rollouts_groups
    if wanted == "all" or wanted >= num_groups:
        return list(range(num_groups))
    return sorted(random.Random(f"{config.run.seed}/{step}").sample(range(num_groups), wanted))


def _lines(item: TakenGroup, version: int, decode: Decode) -> list[dict[str, Any]]:
    group = item.group
    shared = {
        "position": group.position, "lease_id": group.lease_id, "generator": group.generator_id, "trained_at": version,
        "masked": item.masked,
    }  # fmt: skip
    return [
        {**shared, "index": index, **answer_record(item.prompt, rollout, decode)}
        for index, rollout in enumerate(group.rollouts)
    ]
