"""The audit of rewards: its test by hand, drawn fleets, and its part in a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from async_rl.errors import ConfigError
from async_rl.learner.checkpoints.files import TrainerState
from async_rl.learner.data.batch import PreparedBatch, prepare_batch
from async_rl.learner.loop.regrading import Regraded, Regrader, judge_grades
from async_rl.learner.loop.reward_audit import (
    ALARM,
    OTHER,
    REFUTED,
    TOLERATED,
    WITHDRAWN,
    GradeTest,
    RewardAudit,
    build_reward_audit,
)
from async_rl.queue.client.clients import LearnerQueue
from async_rl.queue.core.groups import fits_filter
from async_rl.queue.messages import Batch, TakenGroup
from async_rl.records import Group, Prompt
from async_rl.run.directory import RunDir
from tests.examples import is_full
from tests.learner.loop.test_parity import FakeQueue, make_group
from tests.learner.tiny import tiny_config

FILTER = (0.01, 0.99)


def test_the_mean_factor_of_an_honest_answer_is_at_most_1():
    # An answer is refuted with probability p + t, withdrawn with p, and neither otherwise; t is tolerated.
    for tolerated in (0.0, TOLERATED):
        for p in (0.0, 0.1, (1 - tolerated) / 2):
            mean = (p + tolerated) * REFUTED + p * WITHDRAWN + (1 - 2 * p - tolerated) * OTHER
            assert mean <= 1 + 1e-12
    # By hand: (2 - 1.02 * 1.9) / 0.98 and (1 - 0.02 * 1.9) / 0.98. A false alarm is one in a million runs'.
    assert (round(WITHDRAWN, 4), round(OTHER, 4), round(math.exp(ALARM))) == (0.0633, 0.9816, 1_000_000)


def test_one_that_forges_every_grade_is_found_at_its_22nd_group():
    # ln 1.9 = 0.642 for each group, and ln(1e6) = 13.8: 21 groups are too few.
    test = GradeTest()
    said = [test.add(Regraded("g", 8, 8, example="row 3: 1 claimed, 0 found")) for _ in range(22)]
    assert [bool(why) for why in said] == [False] * 21 + [True]
    assert "of 176 answers in 22 groups, the learner graded 176 otherwise" in said[-1]
    assert "row 3: 1 claimed, 0 found" in said[-1]
    # After that it begins anew: who is lifted is not found again for the old groups.
    assert test.add(Regraded("g", 8, 8)) == ""


@pytest.mark.parametrize("group", [(1, 1), (4, 1), (1, 0), (8, 8)])
def test_no_mix_of_grades_is_an_error(group: tuple[int, int]):
    # A rate of 1/6 among others, groups of one answer, only forged ones: each ended the learner once.
    test = GradeTest()
    for _ in range(100):
        test.add(Regraded("forger", *group))
        for honest in (Regraded("honest", 4, 0), Regraded("withdrawn", 4, 0, 4), Regraded("failed", 0, num_failed=4)):
            assert not test.add(honest)


def test_a_rate_of_chance_is_nobodys_lie():
    # A coin: a quarter of the answers is refuted and a quarter withdrawn. ln of the mean factor is below 0.
    test = GradeTest()
    assert not any(test.add(Regraded("g", 4, 1, 1, 1)) for _ in range(10_000))


class Fleet:
    """A drawn run: how often prompts are solved, how steady the reward is, the filter, and who forges how often."""

    def __init__(self, seed: int) -> None:
        self.random = random = np.random.default_rng(seed)
        self.size = int(random.choice([2, 4, 8, 16]))
        self.filter_range = FILTER if random.random() < 0.5 else None
        # Shares of the prompts that are never and always solved: late in a run nearly all, so chance alone decides
        # which groups the filter keeps.
        self.never, self.always = (1 - 10 ** random.uniform(-2.5, 0)) * random.dirichlet([1.0, 1.0])
        self.noise = float(random.choice([0.0, 0.0, 0.001, 0.01, 0.05, 0.2, 0.5]))
        self.elsewhere = float(random.choice([0.0, 0.01]))
        num_forgers = int(random.integers(0, 4))
        self.forgers = {f"forger-{n}": float(random.uniform(0.2, 1.0)) for n in range(num_forgers)}
        self.honest = [f"honest-{n}" for n in range(int(random.integers(1, 6)))]

    def noisy(self, truth: np.ndarray) -> np.ndarray:
        return np.where(self.random.random(truth.shape) < self.noise, 1 - truth, truth)

    def groups(self, who: str, num_groups: int) -> Iterator[Regraded]:
        """What the learner's grades say of the groups of this generator, without those that the filter drops."""
        random, shape = self.random, (num_groups, self.size)
        kind = random.random(num_groups)
        rate = np.where(
            kind < self.never, 0.0, np.where(kind < self.never + self.always, 1.0, random.random(num_groups))
        )
        truth = (random.random(shape) < rate[:, None]).astype(float)
        changed = random.random(shape) < self.forgers.get(who, 0.0)
        changed |= random.random((num_groups, 1)) < self.elsewhere  # whole rows that are graded otherwise there
        claimed = self.noisy(truth)
        claimed = np.where(changed, 1 - claimed, claimed)
        first, second = self.noisy(truth), self.noisy(truth)
        same = ((first == claimed) & (second == claimed)).all(axis=1)
        for number, mean in enumerate(claimed.mean(axis=1).tolist()):
            if not fits_filter(self.filter_range, mean, None):
                continue
            if same[number]:
                yield Regraded(who, self.size)
                continue
            grades = ([(one, one) for one in of_all[number].tolist()] for of_all in (claimed, first, second))
            yield judge_grades(who, *grades, filter_range=self.filter_range)

    def found(self, num_groups: int) -> set[str]:
        """Who is found within ``num_groups`` trained groups."""
        test, everyone = GradeTest(), (*self.honest, *self.forgers)
        trained = {who: islice(self.groups(who, 10 * num_groups), num_groups) for who in everyone}
        return {who for who in everyone if any(test.add(one) for one in trained[who])}


def test_of_drawn_fleets_no_honest_one_is_found_and_every_forger_that_can_be_judged():
    for seed in range(200 if is_full() else 40):
        fleet = Fleet(seed)
        found = fleet.found(200)
        assert not found & set(fleet.honest), seed
        # Forgers of a fifth of the answers and more, where the reward is steady and no filter hides single forgeries.
        if fleet.noise <= 0.01 and fleet.filter_range is None:
            assert found == fleet.forgers.keys(), seed


class Graded:
    """A ``Regrader`` that says what the test wants of the groups that it was given."""

    def __init__(self, found: Mapping[str, Regraded]) -> None:
        self.found, self.given, self.num_left_out = found, list[str](), 0

    def submit(self, groups: Sequence[TakenGroup]) -> None:
        self.given += [item.group.generator_id for item in groups]

    def collect(self) -> list[Regraded]:
        done, self.given = self.given, []
        return [self.found[who] for who in done]

    def close(self) -> None: ...


class Scene:
    def __init__(self, tmp_path: Path, found: Mapping[str, Regraded]) -> None:
        self.queue, self.regrader, self.run_dir = FakeQueue(), Graded(found), RunDir(tmp_path)
        self.part = RewardAudit(
            1.0, TrainerState(version=3), cast(LearnerQueue, self.queue), self.run_dir,
            cast(Regrader, self.regrader),
        )  # fmt: skip

    def step(self, *groups: Group) -> PreparedBatch:
        taken = tuple(TakenGroup(g, Prompt(g.position, 0, 0, (), {}), 0.0, 3) for g in groups)
        prepared = prepare_batch(taken, mask_truncated=False, num_updates=1, known_weights=lambda group: True)
        return self.part.check(Batch(taken), prepared, version=3)

    @property
    def row(self) -> dict[str, float]:
        return dict(self.part.record(cast(Any, None)))


def test_a_forger_is_quarantined_and_the_step_does_not_train_on_it(tmp_path: Path):
    scene = Scene(tmp_path, {"liar": Regraded("liar", 2, 2, example="row 1"), "honest": Regraded("honest", 2)})
    batch = make_group("liar", 3), make_group("honest", 3, position=1)
    masked = [scene.step(*batch).masked for _ in range(23)]  # what is graded is judged a step later
    assert masked[:-1] == [{}] * 22
    assert masked[-1] == {0: "quarantined", 1: "quarantined"}
    assert list(scene.queue.quarantined) == ["liar"]
    assert "of 44 answers in 22 groups, the learner graded 44 otherwise" in scene.queue.quarantined["liar"]
    assert scene.row == {
        "audit/regraded": 4, "audit/refuted": 2, "audit/unsteady": 0, "audit/failed": 0, "audit/left_out": 0,
        "audit/quarantined": 1,
    }  # fmt: skip


def test_a_reward_that_this_machine_does_not_allow_is_refused_before_the_first_step(tmp_path: Path):
    config = tiny_config(tmp_path, "model", learner={"audit_rewards": 0.1}, reward={"type": "mine.py:right"})
    with pytest.raises(ConfigError, match="allow_code"):
        build_reward_audit(config, TrainerState(), cast(LearnerQueue, None), RunDir(tmp_path), str)
