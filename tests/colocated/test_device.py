"""A device that training and sampling share, and the generator's loop on it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from async_rl.colocated.device import SharedDevice
from async_rl.generator.loop import HEARTBEAT_S
from async_rl.queue.messages import GeneratorEvent
from tests.generator.leases import make_lease
from tests.generator.test_worker import Scene, granted, quiet


def test_a_closed_device_gives_no_turn_and_an_open_one_gives_it():
    device = SharedDevice(wait_s=0)
    given: list[bool] = []
    for change in (lambda: None, device.open, device.close):
        change()
        with device.turn() as is_free:
            given.append(is_free)
    assert given == [False, True, False]


def test_closing_waits_for_the_turn_that_has_begun():
    device = SharedDevice()
    device.open()
    order: list[str] = []

    def close() -> None:
        device.close()
        order.append("closed")

    thread = threading.Thread(target=close)
    with device.turn() as is_free:
        assert is_free
        thread.start()
        while not device.is_closed:
            pass
        order.append("sampled")
    thread.join(30)
    assert order == ["sampled", "closed"]


def test_a_turn_begins_as_soon_as_the_device_opens():
    device = SharedDevice(wait_s=60.0)
    given: list[bool] = []

    def sample() -> None:
        with device.turn() as is_free:
            given.append(is_free)

    thread = threading.Thread(target=sample)
    thread.start()
    device.open()
    thread.join(30)
    assert given == [True]


def test_only_turns_on_the_open_device_are_busy_time():
    # A turn from 11 to 12 on the open device, and one from 20 to 21 on the closed one.
    now = [10.0]
    device = SharedDevice(clock=lambda: now[0], wait_s=0)
    device.open()
    now[0] = 11.0
    with device.turn():
        now[0] = 12.0
    now[0] = 13.0
    device.close()
    now[0] = 20.0
    with device.turn():
        now[0] = 21.0
    assert device.busy_s == 1.0


def test_an_engine_keeps_the_device_between_turns_until_it_is_asked_to_leave_it():
    device, order = SharedDevice(wait_s=0), []
    device.open()
    assert device.max_wait_s == math.inf
    with device.turn():
        device.keep(lambda: order.append("left"))
    assert device.max_wait_s == 0

    def close() -> None:
        device.close()
        order.append("closed")

    thread = threading.Thread(target=close)
    thread.start()
    while not device.is_closed:
        pass
    assert order == []
    for _ in range(2):  # it has nothing to leave the second time
        with device.turn() as is_free:
            assert not is_free
        thread.join(30)
    assert order == ["left", "closed"]
    device.open()
    with device.turn() as is_free:
        assert is_free
    order.clear()
    device.give_up()
    device.close()
    assert order == [], "nothing is left that could be asked"


def test_the_number_of_groups_that_may_begin_is_full_again_when_the_device_opens():
    device = SharedDevice(2)
    left: list[int | None] = []
    for change in (device.open, device.group_begins, device.group_begins, device.close, device.open):
        change()
        left.append(device.groups_left)
    assert left == [2, 1, 0, 0, 2]
    assert SharedDevice().groups_left is None
    assert SharedDevice(0).groups_left == 0


def test_answers_stop_while_the_device_trains_and_go_on_with_the_next_version():
    # Four tokens each: some of version 3, then a pause in which version 4 comes.
    device = SharedDevice(wait_s=0)
    scene = Scene(device=device)
    sampled: list[int] = []

    def trains() -> list[GeneratorEvent]:
        device.close()
        sampled.append(scene.backend.num_tokens)
        return []

    def has_trained() -> list[GeneratorEvent]:
        sampled.append(scene.backend.num_tokens)
        device.open()
        return []

    device.open()
    scene.run(
        scene.announce(3), granted(make_lease("a")), trains, *quiet(5), scene.announce(4), *quiet(5), has_trained,
        *quiet(8),
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


def _later(scene: Scene, seconds: float) -> Callable[[], list[GeneratorEvent]]:
    def play() -> list[GeneratorEvent]:
        scene.clock.now_s += seconds
        return []

    return play


def test_leases_stay_alive_while_the_device_trains():
    device = SharedDevice(wait_s=0)
    scene = Scene(device=device, batch_size=1)

    def trains() -> list[GeneratorEvent]:
        device.close()
        return []

    device.open()
    leases = (make_lease("running", group_size=1), make_lease("waiting", group_size=1))
    heartbeats = [event for _ in range(3) for event in (_later(scene, HEARTBEAT_S), *quiet(1))]
    scene.run(scene.announce(0), granted(*leases), trains, *heartbeats)
    progress = [p for p, _ in scene.queue.heartbeats if "running" in p]
    assert len(progress) >= 3
    for lease_id in ("running", "waiting"):
        counts = [p[lease_id] for p in progress]
        assert counts == sorted(set(counts)), f"a lease whose progress does not grow expires: {counts}"


def test_groups_that_are_graded_while_the_device_trains_are_returned():
    device = SharedDevice(wait_s=0)
    scene = Scene(device=device)
    returned: list[int] = []

    def trains_after_the_last_step() -> list[GeneratorEvent]:
        if scene.backend.num_tokens == 8:
            device.close()
        returned.append(len(scene.queue.returned))
        return []

    device.open()
    scene.run(scene.announce(0), granted(make_lease("a")), *[trains_after_the_last_step] * 12)
    assert returned[-1] == 1


def test_no_more_groups_are_requested_than_may_begin():
    # Four slots of groups of two would take three leases. One may begin before the device trains, and one after.
    device = SharedDevice(1, wait_s=0)
    scene = Scene(device=device)

    def waits_again() -> list[GeneratorEvent]:
        device.close()
        device.open()
        return []

    device.open()
    scene.run(scene.announce(0), granted(make_lease("a")), *quiet(9), waits_again, granted(make_lease("b")), *quiet(9))
    assert [wanted for _, _, wanted in scene.queue.requests] == [1, 1]
    assert [group.lease_id for group in scene.queue.returned] == ["a", "b"]


def test_evaluations_do_not_count_as_groups_that_begin():
    device = SharedDevice(1, wait_s=0)
    scene = Scene(device=device)
    device.open()
    scene.run(scene.announce(0), granted(make_lease("e", kind="eval")), granted(make_lease("a")), *quiet(9))
    assert [wanted for _, _, wanted in scene.queue.requests] == [1, 1]
