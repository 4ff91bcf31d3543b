"""How many steps a run can make at most, for its views, and what to set if schedules span more.

A run makes ``learner.steps`` steps, or fewer if its data ends before (``data.epochs``).
"""

from __future__ import annotations

import math

from async_rl.config.config import Config
from async_rl.run.directory import RunDir
from async_rl.run.records.starts import read_origin


def planned_steps(config: Config, most_prompts: float, run_dir: RunDir) -> int:
    """Return the number of the last step that the run can make. Groups that are filtered or fail make it lower.

    ``most_prompts`` is the number of prompts of the whole data (``PromptStream.most_prompts_left``). A fork counts its
    steps from that of its checkpoint, and may begin its data anew.
    """
    origin = read_origin(run_dir, "restore it from a copy of the run directory, or choose another run.dir")
    first = 0 if origin is None else origin.step
    steps = first + most_prompts / config.learner.groups_per_step
    return config.learner.steps if steps >= config.learner.steps else math.ceil(steps)


def schedule_note(config: Config, num_steps: int) -> str:
    """Return a note if schedules span more steps than ``num_steps``, which the data allows; else an empty text."""
    if num_steps >= config.learner.steps:
        return ""
    spans = {
        "optimizer.schedule": config.optimizer.schedule != "constant",
        "critic.schedule": config.loss.has_critic and config.critic.schedule != "constant",
        "sampling.temperature_end": (
            config.sampling.temperature_end is not None and config.sampling.temperature_steps is None
        ),
    }
    keys = [key for key, is_set in spans.items() if is_set]
    if not keys:
        return ""
    return (
        f"note: the data ends after at most {num_steps} steps (data.epochs), but {' and '.join(keys)} "
        f"{'span' if len(keys) > 1 else 'spans'} learner.steps = {config.learner.steps}, and will not reach the end: "
        f"set learner.steps = {num_steps}"
    )
