"""A payload that can't be kept changes nothing: the return is repeated later, and the run ends as if nothing was."""

from __future__ import annotations

from random import Random

import pytest

from async_rl.errors import QueueError
from async_rl.queue.storage.payloads import Payload, PayloadRef
from tests.queue.events import EVENTS
from tests.queue.witness import Knobs
from tests.queue.world import World

pytestmark = pytest.mark.usefixtures("fixed_admission")


class Refuser:
    """The store's ``keep``: it refuses the calls whose numbers are in ``refused``."""

    def __init__(self, world: World, refused: frozenset[int]) -> None:
        self._keep, self._refused = world.payloads.keep, refused
        self.num_calls = 0

    def keep(self, payload: Payload) -> PayloadRef:
        self.num_calls += 1
        if self.num_calls in self._refused:
            raise QueueError("the disk is full")
        return self._keep(payload)


class FaultyWorld(World):
    """Its generators repeat what was refused, as clients do. ``settle`` finds half-done changes."""

    refuser: Refuser | None = None
    num_repeated = 0

    def put(self, lease_id: str):
        try:
            return super().put(lease_id)
        except QueueError:
            self.settle()
            self.num_repeated += 1
            return self.put(lease_id)


def live(refused: frozenset[int], monkeypatch: pytest.MonkeyPatch) -> tuple[FaultyWorld, int]:
    """One history: 3 steps, an evaluation and a checkpoint, with these calls of ``keep`` refused."""
    world = FaultyWorld(Knobs(num_steps=3))
    refuser = Refuser(world, refused)
    monkeypatch.setattr(world.payloads, "keep", refuser.keep)
    world.evaluate(exclusive=False)
    world.run_to_the_end()
    return world, refuser.num_calls


def test_a_group_that_is_not_kept_is_still_leased(monkeypatch):
    world = FaultyWorld(Knobs())
    monkeypatch.setattr(world.payloads, "keep", Refuser(world, frozenset({1})).keep)
    world.ask("g0", 1)
    (lease_id,) = world.generators["g0"].leases
    assert world.give("g0", lease_id) == "queued"
    assert world.num_repeated == 1


def test_an_answer_that_is_not_kept_is_still_leased(monkeypatch):
    world = FaultyWorld(Knobs())
    monkeypatch.setattr(world.payloads, "keep", Refuser(world, frozenset({1})).keep)
    world.evaluate(exclusive=True)
    world.ask("g0", 1)
    (lease_id,) = world.generators["g0"].leases
    assert world.give("g0", lease_id) == "eval_done"
    assert world.num_repeated == 1


def test_every_refused_keep_leaves_the_same_end(monkeypatch):
    plain, num_calls = live(frozenset(), monkeypatch)
    # 3 steps of 2 groups, and 2 rows of the evaluation.
    assert num_calls >= 8
    for number in range(1, num_calls + 1):
        world, _ = live(frozenset({number}), monkeypatch)
        assert world.num_repeated == 1
        assert world.books.trained == plain.books.trained
        assert world.ledger == plain.ledger


@pytest.mark.parametrize("seed", range(10))
def test_random_histories_outlive_refused_keeps(seed, monkeypatch):
    random = Random(seed)
    world = FaultyWorld(Knobs(refill=bool(seed % 2)))
    refused = frozenset(random.sample(range(1, 60), 20))
    monkeypatch.setattr(world.payloads, "keep", Refuser(world, refused).keep)
    for event in random.choices(list(EVENTS), list(EVENTS.values()), k=60):
        event(world, random)
    world.run_to_the_end()
