"""The audit as a part of the step, over an engine and a queue that say what a test wants."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from async_rl.learner.checkpoints.files import TrainerState
from async_rl.learner.data.batch import PreparedBatch, prepare_batch
from async_rl.learner.interface import Engine
from async_rl.learner.loop.audit import AuditPart, observe_group
from async_rl.queue.client.clients import LearnerQueue
from async_rl.queue.messages import TakenGroup
from async_rl.records import Group, Prompt
from tests.learner.loop.test_parity import FakeEngine, FakeQueue, make_group
from tests.learner.tiny import tiny_config


class Scene:
    def __init__(self, tmp_path: Path, *, audit: float = 1.0) -> None:
        self.engine, self.queue, self.state = FakeEngine(), FakeQueue(), TrainerState(version=3)
        config = tiny_config(tmp_path, "model", learner={"audit": audit})
        self.part = AuditPart(config, self.state, cast(Engine, self.engine), cast(LearnerQueue, self.queue))

    def step(self, groups: Sequence[Group]) -> PreparedBatch:
        taken = tuple(TakenGroup(g, Prompt(g.position, 0, 0, (), {}), 0.0, 3) for g in groups)
        prepared = prepare_batch(taken, mask_truncated=False, num_updates=1, known_weights=lambda group: True)
        return self.part.score(prepared)

    @property
    def row(self) -> dict[str, float]:
        return dict(self.part.record(cast(Any, None)))


def test_a_generator_that_shifts_its_logprobs_is_quarantined_and_the_step_does_not_train_on_it(tmp_path: Path):
    scene = Scene(tmp_path)
    batches = [scene.step([make_group("liar", 3, shift=0.3), make_group("honest", 3, position=1)]) for _ in range(20)]
    assert list(scene.queue.quarantined) == ["liar"]
    assert "audit (size), after " in scene.queue.quarantined["liar"]
    masked = [batch.masked for batch in batches]
    assert [index for index, found in enumerate(masked) if found] != []
    assert next(found for found in masked if found) == {0: "quarantined", 1: "quarantined"}
    assert scene.row["audit/groups"] == 2
    assert scene.row["audit/quarantined"] == 1


def test_each_staleness_of_a_group_is_an_observation_of_its_own(tmp_path: Path):
    group = make_group("g", 3, versions=[2, 2, 2, 2, 3, 3])  # the tokens of version 3 follow some of version 2
    taken = (TakenGroup(group, Prompt(0, 0, 0, (), {}), 0.0, 3),)
    prepared = prepare_batch(taken, mask_truncated=False, num_updates=1, known_weights=lambda group: True)
    logprobs = FakeEngine().score(prepared.sequences, of="policy")
    sequences = [(prepared.rollout_of[s.sequence_id], s) for s in prepared.sequences]
    fresh, stale = observe_group("g", sequences, logprobs, version=3)
    assert (fresh.lag, fresh.follows_others, fresh.num_tokens, fresh.num_rollouts) == (0, True, 4, 2)
    assert (stale.lag, stale.follows_others, stale.num_tokens, stale.num_rollouts) == (1, False, 8, 2)
    assert (fresh.size, stale.size) == (0.0, 0.0)


def test_without_a_share_nothing_is_computed(tmp_path: Path):
    scene = Scene(tmp_path, audit=0.0)
    scene.step([make_group("liar", 3, shift=5.0)])
    assert (scene.engine.asked, scene.row) == ([], {})


def test_a_share_of_the_groups_is_audited(tmp_path: Path):
    scene = Scene(tmp_path, audit=0.5)
    for _ in range(50):
        scene.step([make_group("g", 3, position=position) for position in range(4)])
    # Of 200 groups 100 on average; 50 or 150 would be 7 standard deviations away.
    assert 50 < sum(len(asked) // 2 for asked in scene.engine.asked) < 150
