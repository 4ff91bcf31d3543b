"""The learner lets its ranks sample exactly while it waits, with the version that it published last."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from async_rl.errors import TrainingError
from async_rl.learner.data.batch import prepare_batch
from async_rl.learner.loop.idle_sampling import IdleSampling
from async_rl.learner.loop.publishing import Published
from async_rl.learner.loop.step_result import StepResult, step_result
from async_rl.learner.sampling import SamplingOrder, sampler_id
from async_rl.queue.messages import TakenGroup
from async_rl.records import Group, Lease
from tests.generator.leases import make_lease
from tests.learner.loop.direct_queue import DirectQueue
from tests.learner.loop.scripted_run import ScriptedEngine, answered, make_run
from tests.queue.builders import group


@dataclass
class LoggedEngine:
    """What samples; ``log`` has its orders' versions, "stop", and the versions of the updates between them."""

    engine: ScriptedEngine = field(default_factory=ScriptedEngine)
    orders: list[SamplingOrder] = field(default_factory=list)
    log: list[int | str] = field(default_factory=list)
    num_updates: int = 0

    def sample(self, order: SamplingOrder) -> None:
        self.note_updates()
        self.orders.append(order)
        self.log.append(order.version)

    def stop_sampling(self) -> float:
        self.note_updates()
        self.log.append("stop")
        return float(len(self.log))

    def note_updates(self) -> None:
        new = self.engine.versions[self.num_updates :]
        self.log += [f"update of {version}" for version in new]
        self.num_updates += len(new)


def test_the_ranks_sample_in_every_wait_and_in_nothing_else_with_the_version_that_they_have(tmp_path: Path):
    # Three steps, of which the second is skipped: the first evaluation, a wait and an update for each step, the last
    # evaluation.
    run = make_run(tmp_path, learner={"steps": 3}, eval={"every": 0})
    run.engine.stepped = [True, False, True]
    engine = LoggedEngine(run.engine)
    run.start(sampling=engine)
    updates = [0, "stop", "update of 0", 1, "stop", "update of 1", 1, "stop", "update of 1"]
    assert engine.log == [0, "stop", *updates, 2, "stop"]
    assert [order.digest for order in engine.orders] == [f"digest-{version}" for version in (0, 0, 1, 1, 2)]
    assert {(order.address, len(order.lineage)) for order in engine.orders} == {("tcp://q:1", 12)}


def test_nothing_is_sampled_for_a_batch_that_is_there_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(DirectQueue, "is_take_answered", True)
    run = make_run(tmp_path, learner={"steps": 2}, eval={"every": 0})
    engine = LoggedEngine(run.engine)
    run.start(sampling=engine)
    # Only in the evaluations before the first and after the last step.
    assert [order.version for order in engine.orders] == [0, 2]
    assert [row["idle/learner_used"] for row in run.rows] == [0.0, 0.0]


def test_ranks_stop_when_the_learner_fails(tmp_path: Path):
    run = make_run(tmp_path)
    engine = LoggedEngine(run.engine)

    def fails(lease: Lease, version: int) -> Group:
        if version == 1:
            raise TrainingError("sampling has failed")
        return answered(lease, version)

    with pytest.raises(TrainingError, match="sampling has failed"):
        run.start(sampling=engine, answer=fails)
    assert engine.log[-1] == "stop"


def result_of(taken: list[TakenGroup]) -> StepResult:
    nothing = prepare_batch((), mask_truncated=False, num_updates=1, known_weights=lambda _: True)
    return step_result(tuple(taken), nothing, [], version=0)


def test_the_metrics_count_what_the_learner_sampled_of_the_step_and_the_share_of_rank_0s_wait(
    monkeypatch: pytest.MonkeyPatch,
):
    # Two answers of three tokens each in a group; two of the three groups are the learner's. Two waits of 10 s; rank 0
    # is busy for 4 s in the first, and for 1 s in the second.
    owners = (sampler_id(0, "now"), sampler_id(1, "an earlier start"), "generator-0")
    lease = make_lease("a")
    taken = [TakenGroup(group(lease, generator=owner), lease.prompt, 0.0, 0) for owner in owners]
    clock, busy = iter([0.0, 10.0, 50.0, 60.0]), iter([4.0, 5.0])
    monkeypatch.setattr("async_rl.learner.loop.idle_sampling.time.monotonic", lambda: next(clock))

    class Busy(LoggedEngine):
        def stop_sampling(self) -> float:
            return next(busy)

    sampling = IdleSampling(Busy(), address="", lineage="now")
    for of, groups, used in ((taken, 2, 0.4), ([], 0, 0.1)):
        with sampling.while_waiting(Published(0, "digest")):
            pass
        assert sampling.record(result_of(of)) == pytest.approx(
            {"learner_sampled/groups": groups, "learner_sampled/tokens": groups * 2 * 3, "idle/learner_used": used}
        )
