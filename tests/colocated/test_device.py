"""A device that training and sampling share, and the generator's loop on it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

from async_rl.colocated.device import SharedDevice
from async_rl.generator.loop import HEARTBEAT_S
from async_rl.queue.messages import GeneratorEvent
from tests.generator.leases import make_lease
from tests.generator.test_worker import Scene, granted, quiet


def takes_turn(device: SharedDevice) -> bool:
    with device.turn() as is_free:
        return is_free


def closing(device: SharedDevice, order: list[str]) -> threading.Thread:
    """A thread that closes the device and then says so; closing has begun."""

    def close() -> None:
        device.close()
        order.append("closed")

    thread = threading.Thread(target=close)
    thread.start()
    while not device.is_closed:
        pass
    return thread


def test_only_an_open_device_gives_turns_and_only_these_are_busy_time():
    # A turn from 11 to 12 on the open device, and one from 20 to 21 on the closed one.
    now = [10.0]
    device = SharedDevice(clock=lambda: now[0], wait_s=0)
    assert not takes_turn(device)
    device.open()
    now[0] = 11.0
    with device.turn() as is_free:
        assert is_free
        now[0] = 12.0
    now[0] = 13.0
    device.close()
    now[0] = 20.0
    with device.turn() as is_free:
        assert not is_free
        now[0] = 21.0
    assert device.busy_s == 1.0


def test_closing_waits_for_the_turn_that_has_begun():
    device, order = SharedDevice(), list[str]()
    device.open()
    with device.turn() as is_free:
        assert is_free
        thread = closing(device, order)
        order.append("sampled")
    thread.join(30)
    assert order == ["sampled", "closed"]


def test_a_turn_begins_as_soon_as_the_device_opens():
    device, given = SharedDevice(wait_s=60.0), list[bool]()
    thread = threading.Thread(target=lambda: given.append(takes_turn(device)))
    thread.start()
    device.open()
    thread.join(30)
    assert given == [True]


def test_an_engine_keeps_the_device_between_turns_until_it_is_asked_to_leave_it():
    device, order = SharedDevice(wait_s=0), list[str]()
    device.open()
    assert device.max_wait_s == math.inf
    with device.turn():
        device.keep(lambda: order.append("left"))
    assert device.max_wait_s == 0
    thread = closing(device, order)
    assert order == []
    for _ in range(2):  # it has nothing to leave the second time
        assert not takes_turn(device)
        thread.join(30)
    assert order == ["left", "closed"]
    device.open()
    assert takes_turn(device)
    device.give_up()
    device.close()
    assert order == ["left", "closed"], "nothing is left that could be asked"


def test_the_number_of_groups_that_may_begin_is_full_again_when_the_device_opens():
    device = SharedDevice(2)
    left: list[int | None] = []
    for change in (device.open, device.group_begins, device.group_begins, device.close, device.open):
        change()
        left.append(device.groups_left)
    assert left == [2, 1, 0, 0, 2]
    assert (SharedDevice().groups_left, SharedDevice(0).groups_left) == (None, 0)


# --- the generator's loop, which plays what a test calls while nothing arrives


def opened(max_groups: int | None = None, **options: Any) -> tuple[SharedDevice, Scene]:
    device = SharedDevice(max_groups, wait_s=0)
    device.open()
    return device, Scene(device=device, **options)


def meanwhile(*actions: Callable[[], object]) -> Callable[[], list[GeneratorEvent]]:
    def play() -> list[GeneratorEvent]:
        for action in actions:
            action()
        return []

    return play


def test_answers_stop_while_the_device_trains_and_go_on_with_the_next_version():
    # Four tokens each: some of version 3, then a pause in which version 4 comes.
    device, scene = opened()
    sampled: list[int] = []
    look = meanwhile(lambda: sampled.append(scene.backend.num_tokens))
    scene.run(
        scene.announce(3), granted(make_lease("a")), meanwhile(device.close, look), *quiet(5), scene.announce(4),
        *quiet(5), meanwhile(look, device.open), *quiet(8),
    )  # fmt: skip
    before, after = sampled
    assert 0 < before < 8
    assert after == before
    (group,) = scene.queue.returned
    assert group.weights_digest == {3: "first-3", 4: "first-4"}
    for rollout in group.rollouts:
        (sequence,) = rollout.sequences
        versions = sequence.versions[sequence.loss_mask].tolist()
        # Two answers: half of the tokens each.
        assert versions == [3] * (before // 2) + [4] * (4 - before // 2)


def test_leases_stay_alive_while_the_device_trains():
    device, scene = opened(batch_size=1)

    def later() -> None:
        scene.clock.now_s += HEARTBEAT_S

    leases = (make_lease("running", group_size=1), make_lease("waiting", group_size=1))
    heartbeats = [event for _ in range(3) for event in (meanwhile(later), *quiet(1))]
    scene.run(scene.announce(0), granted(*leases), meanwhile(device.close), *heartbeats)
    progress = [p for p, _ in scene.queue.heartbeats if "running" in p]
    assert len(progress) >= 3
    for lease_id in ("running", "waiting"):
        counts = [p[lease_id] for p in progress]
        assert counts == sorted(set(counts)), f"a lease whose progress does not grow expires: {counts}"


def test_groups_that_are_graded_while_the_device_trains_are_returned():
    device, scene = opened()

    def trains_after_the_last_step() -> None:
        if scene.backend.num_tokens == 8:
            device.close()

    scene.run(scene.announce(0), granted(make_lease("a")), *[meanwhile(trains_after_the_last_step)] * 12)
    assert len(scene.queue.returned) == 1


def test_no_more_groups_are_requested_than_may_begin_and_evaluations_do_not_count():
    # Four slots of groups of two would take three leases. One may begin before the device trains, and one after.
    device, scene = opened(1)
    scene.run(
        scene.announce(0), granted(make_lease("e", kind="eval")), granted(make_lease("a")), *quiet(9),
        meanwhile(device.close, device.open), granted(make_lease("b")), *quiet(9),
    )  # fmt: skip
    assert [wanted for _, _, wanted in scene.queue.requests] == [1, 1, 1]
    assert [group.lease_id for group in scene.queue.returned] == ["e", "a", "b"]
