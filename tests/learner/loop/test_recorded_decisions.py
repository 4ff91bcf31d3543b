"""A run that dies and resumes at a bound above 0 trains the groups, and leaves out the tokens, that it would have.

The generator answers at once, so that what arrives before a step does not depend on the clock. Its answers depend on
the prompt, the attempt and the version. Real generators sample again what came after the checkpoint, and differently.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from async_rl.process import fault_points
from async_rl.records import NO_VERSION, Group, Lease, Rollout, TokenSequence
from tests.learner.loop.scripted_run import Killed, Run, make_run
from tests.queue.builders import group

BOUND, STEPS = 2, 13
POINTS = ("learner.taken", "learner.trained", "learner.acknowledged", "learner.checkpoint_saved",
          "learner.checkpoint_written")  # fmt: skip
Trained = list[tuple[list[int], list[int]]]
"""Of each sequence of a step: the tokens' versions, and whether they are trained."""


def by_version(run: Run) -> dict[int, Trained]:
    """What was trained at each version, which must be the same after every restart."""
    found: dict[int, Trained] = {}
    for version, sequences in run.engine.calls:
        trained: Trained = [(s.versions.tolist(), s.loss_mask.tolist()) for s in sequences]
        assert found.setdefault(version, trained) == trained, f"another batch at version {version}"
    return found


def mixed(lease: Lease, version: int) -> Group:
    """Two rollouts whose six tokens were sampled by two versions: at the first attempt at up to four versions' age."""
    age = lease.prompt.position % 5 if lease.attempt == 1 else 0
    oldest = max(0, version - age)
    versions = np.array([NO_VERSION] * 2 + [oldest] * 3 + [max(oldest, version - age // 2)] * 3, dtype=np.int32)
    mask = versions != NO_VERSION
    sequence = TokenSequence(
        token_ids=np.arange(8, dtype=np.int32) + lease.prompt.position,
        loss_mask=mask,
        behavior_logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        versions=versions,
    )
    rollouts = tuple(Rollout((sequence,), {"correct": a}, a, "stop") for a in (1.0, 0.0))
    digests = {int(v): f"digest-{v}" for v in set(versions[mask].tolist())}
    return structs.replace(group(lease, version), rollouts=rollouts, weights_digest=digests)


def a_run(directory: Path, on_stale: str) -> Run:
    return make_run(
        directory, data={"eval": {}}, eval={"every": 0}, sampling={"group_size": 2}, learner={"steps": STEPS},
        queue={"max_staleness": BOUND, "on_stale": on_stale},
    )  # fmt: skip


def decisions(run: Run) -> dict[str, Any]:
    """What became of groups and tokens, without what restarts have lost."""
    groups, masked = run.ledger["groups"], run.ledger["tokens"]["masked"]
    return {"trained": groups["trained"], "stale": groups["dropped"].get("stale", 0), "masked": masked}


@pytest.mark.parametrize("on_stale", ["mask", "drop", "wait"])
def test_a_run_killed_between_take_and_commit_repeats_its_decisions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_stale: str
):
    whole, killed = a_run(tmp_path / "whole", on_stale), a_run(tmp_path / "killed", on_stale)
    whole.start(answer=mixed)
    gates = tmp_path / "gates"
    gates.mkdir()
    monkeypatch.setattr(fault_points, "_directory", str(gates))

    def die(signum: int) -> None:
        raise Killed

    monkeypatch.setattr(fault_points.signal, "raise_signal", die)
    for index, point in enumerate(POINTS):

        def arm(request: str, step: int, at: int = 3 + 2 * index, point: str = point) -> None:
            if (request, step) == ("take", at):
                (gates / point).touch()

        with pytest.raises(Killed):
            killed.start(arm, mixed)
    killed.start(answer=mixed)
    assert by_version(killed) == by_version(whole)
    assert killed.positions == whole.positions
    assert decisions(killed) == decisions(whole)
    assert decisions(whole)["stale"] > 0
    assert (decisions(whole)["masked"].get("stale", 0) > 0) == (on_stale == "mask")
