"""The rules of what becomes of a mirror's checkpoints, on names alone."""

from __future__ import annotations

from typing import Any

import pytest

from async_rl.config.run import CheckpointConfig
from async_rl.extensions.ops.mirror.rules import Local, decide
from async_rl.learner.checkpoints.mirror import step_of


def name(step: int) -> str:
    return f"step-{step:06d}"


def folder(step: int, history: str) -> str:
    return f"step-{step:06d}-{history}"


def local(*steps: int, history: str = "a", damaged: tuple[int, ...] = ()) -> Local:
    return Local(
        name(steps[-1]) if steps else None,
        {name(step): folder(step, history) for step in steps},
        frozenset(folder(step, "a") for step in damaged),
    )


@pytest.mark.parametrize(
    ("own", "config", "listed", "kept"),
    [
        # The newest two of 2, 4, 6 and 8, once 8 is there, and multiples of 4.
        (local(6, 8), {"every": 2, "keep_last": 2, "keep_every": 4}, [4, 6], []),
        (local(4, 6), {"keep_last": 1}, [6], []),
        (local(2, 4), {}, [2, 4], [6]),
        (local(), {}, [], [2, 4, 6]),
        (local(2, 4), {"mirror_may_lose": 6}, [2, 4], []),
        (local(2, 4), {"mirror_may_lose": 4}, [2, 4], [6]),
        # 6 was made again. That of the other history is kept.
        (local(4, 6, history="b"), {}, [2], [4, 6]),
        # 6 was damaged, and the run is past it.
        (local(7, 8, damaged=(6,)), {}, [4], [6]),
        (local(7, 8, damaged=(6,)), {"mirror_may_lose": 6}, [4], []),
    ],
)
def test_what_becomes_of_the_steps_2_4_and_6(own: Local, config: dict[str, Any], listed: list[int], kept: list[int]):
    found_listed, found_kept = decide(
        {name(step): folder(step, "a") for step in (2, 4, 6)}, own, CheckpointConfig(**config)
    )
    assert sorted(map(step_of, found_listed)) == listed
    assert sorted(map(step_of, found_kept)) == kept


@pytest.mark.parametrize(
    ("text", "step"), [("step-000004", 4), ("step-1000000-ab", 1_000_000), ("step-4", -1), ("", -1), (None, -1)]
)
def test_the_step_is_that_in_the_name(text: str | None, step: int):
    assert step_of(text) == step
