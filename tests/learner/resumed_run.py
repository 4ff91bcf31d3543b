"""A run with a real engine on any number of ranks, and the real trainer and queue, killed at fault points.

Its groups depend on the prompt and the version alone, and arrive at once, so every history trains the same batches.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from async_rl.learner.checkpoints.files import latest_checkpoint, model_part
from async_rl.learner.checkpoints.stored_tensors import MODEL, OPTIMIZER, REFERENCE, load_tensors
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.ranks import init_ranks
from async_rl.process import fault_points
from async_rl.records import Group, Lease, TeacherScores, TokenSequence
from tests.learner.loop.scripted_run import Run, drawn_rollout, make_run
from tests.queue.builders import group

STEPS_BEFORE_DEATH = 5
"""There is a checkpoint every 2 steps, committed 2 steps later at the latest: each start comes 2 to 6 steps further."""


def answered(lease: Lease, version: int) -> Group:
    """Two rollouts, drawn by the prompt's position, one of them right."""
    generator = np.random.default_rng(lease.prompt.position)
    rollouts = tuple(drawn_rollout(generator, version, accuracy) for accuracy in (1.0, 0.0))
    return structs.replace(group(lease, version), rollouts=rollouts)


def taught(lease: Lease, version: int) -> Group:
    """``answered`` with a teacher's scores of each sampled token and its 3 likeliest, drawn by the position too."""
    generator = np.random.default_rng((1, lease.prompt.position))
    plain = answered(lease, version)
    rollouts = tuple(
        structs.replace(rollout, sequences=tuple(_with_teacher(generator, each) for each in rollout.sequences))
        for rollout in plain.rollouts
    )
    return structs.replace(plain, rollouts=rollouts)


def _with_teacher(generator: np.random.Generator, sequence: TokenSequence) -> TokenSequence:
    size = int(sequence.loss_mask.sum())
    scores = TeacherScores(
        logprobs=generator.uniform(-4.0, -2.0, (size, 4)).astype(np.float32),
        top_ids=generator.permuted(np.tile(np.arange(4, 40, dtype=np.int32), (size, 1)), axis=1)[:, :3].copy(),
    )
    return structs.replace(sequence, teacher=scores)


def build_run(directory: Path) -> Run:
    """The run in ``directory``: its files ``steps``, ``bound`` and ``sections.json`` have the number of steps, the
    staleness bound, and the sections of the layout and the like.
    """
    bound = int((directory / "bound").read_text())
    own = json.loads((directory / "sections.json").read_text())
    return make_run(
        directory, model={"path": str(directory / "model")}, data={"eval": {}}, eval={"every": 0},
        sampling={"group_size": 2, "max_new_tokens": 16, "max_prompt_tokens": 8, "deterministic": bound == 0},
        learner={"steps": int((directory / "steps").read_text()), "max_tokens": 40}, queue={"max_staleness": bound},
        optimizer={"lr": 1e-3}, checkpoint={"every": 2, "asynchronous": True},
        **{"generator": {"backend": "fake"}} | own,
    )  # fmt: skip


def die_at(point: str, gates: Path) -> None:
    """Let the process that reaches ``point`` first, once the file ``gates / point`` is there, be killed."""
    fault_points._directory = str(gates)
    fault_points.signal.raise_signal = lambda _: os.kill(os.getpid(), signal.SIGKILL)


def start(directory: Path) -> None:
    """One start on this rank. The file ``directory / "point"`` names the fault point at which it ends, if any."""
    point = (directory / "point").read_text()
    gates = directory / "gates"
    die_at(point, gates)
    run = build_run(directory)
    ranks = init_ranks(run.config)
    engine = FsdpEngine(run.config, ranks)
    if not ranks.is_leader:
        engine.follow()
        return
    run.engine = engine  # pyright: ignore[reportAttributeAccessIssue]
    first_step: list[int] = []

    def arm(request: str, step: int) -> None:
        if request != "take":
            return
        first_step.append(step)
        if point and step == first_step[0] + STEPS_BEFORE_DEATH:
            (gates / point).touch()

    try:
        run.start(arm, taught if run.config.distill.is_set else answered)
    except BaseException as error:
        engine.close(f"{type(error).__name__}: {error}")
        raise
    engine.close()


def tensors_of(directory: Path) -> dict[str, Any]:
    """Model, optimizer and a reference that moves of the run's last checkpoint, and those of its critic."""
    latest = latest_checkpoint(directory / "run")
    assert latest is not None
    parts = {"": latest, "critic.": model_part(latest, "critic")}
    return {
        of + prefix + name: tensor
        for of, part in parts.items()
        if part.is_dir()
        for prefix in (MODEL, OPTIMIZER, REFERENCE)
        for name, tensor in load_tensors(part, prefix).items()
    }
