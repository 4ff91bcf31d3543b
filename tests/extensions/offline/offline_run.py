"""Runs of the commands that train on given rows: their config, their results, and how they are disturbed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from async_rl.config.config import Config
from async_rl.config.loading import config_to_toml, load_config
from async_rl.extensions.offline import run, scores
from async_rl.extensions.offline.tasks import train
from tests.learner.resumed_run import die_at
from tests.learner.tiny import tiny_config, tiny_model

STEPS_BEFORE_DEATH = 3
AT_ONCE = ("offline.reference_scored", "offline.trained_all")
"""Points that no step reaches."""


def offline_config(root: Path, command: str, **sections: Any) -> Config:
    """Twelve rows of adding digits; 12 steps of 4 rows, a checkpoint every 2. ``sections`` are merged over that."""
    if not (root / "model").exists():
        tiny_model(root / "model", num_key_value_heads=2)  # tensor parallelism splits them
        (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_for(command, sections)))
    section: dict[str, Any] = {
        "data": str(root / "rows.jsonl"), "out": str(root / "out"), "steps": 12, "batch_size": 4, "lr": 1e-2,
        "checkpoint_every": 2, **sections.pop(command, {}),
    }  # fmt: skip
    return tiny_config(root, "model", **{command: section}, **sections)


def rows_for(command: str, sections: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of ``command``: the right sum is chosen, another one is rejected."""
    asked = [[{"role": "user", "content": f"{n}+1="}] for n in range(12)]
    if command == "sft":
        return [{"messages": [*ask, {"role": "assistant", "content": str(n + 1)}]} for n, ask in enumerate(asked)]
    if sections.get("dpo", {}).get("loss") == "kto":
        return [
            {"prompt": ask, "completion": str(n + 1 + n % 2), "label": not n % 2} for n, ask in enumerate(asked)
        ]  # fmt: skip
    return [{"prompt": ask, "chosen": str(n + 1), "rejected": str(n + 2) * 2} for n, ask in enumerate(asked)]


def metrics(root: Path, command: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "run" / command / "metrics.jsonl").read_text().splitlines()]


def exported(root: Path) -> dict[str, Tensor]:
    return load_file(root / "out" / "model.safetensors")


@contextmanager
def in_step(number: int, action: Callable[[], object]) -> Iterator[None]:
    """Let ``action`` be called when step ``number`` takes its rows."""
    real_batch_of = run.batch_of

    def batch_of(rows: Any, step: int, **settings: Any) -> Any:
        if step == number - 1:
            action()
        return real_batch_of(rows, step, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "batch_of", batch_of)
        yield


def begin(directory: Path, command: str, **sections: Any) -> Path:
    """Write what ``start`` reads."""
    (directory / "gates").mkdir(parents=True)
    (directory / "command").write_text(command)
    (directory / "point").write_text("")
    (directory / "offline.toml").write_text(config_to_toml(offline_config(directory, command, **sections)))
    return directory


def start(directory: Path) -> None:
    """One start on this rank. The file ``directory / "point"`` names the fault point at which it ends, if any."""
    point, gates = (directory / "point").read_text(), directory / "gates"
    die_at(point, gates)
    scores.ROWS_PER_CHUNK = 5
    steps: list[int] = []
    real_batch_of = run.batch_of

    def batch_of(rows: Any, step: int, **settings: Any) -> Any:
        steps.append(step)
        if point and step == steps[0] + STEPS_BEFORE_DEATH:
            (gates / point).touch()
        return real_batch_of(rows, step, **settings)

    run.batch_of = batch_of
    if point in AT_ONCE:
        (gates / point).touch()
    train((directory / "command").read_text(), load_config(directory / "offline.toml"))
