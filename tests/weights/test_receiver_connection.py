"""What a receiver says about its connection to the learner."""

from __future__ import annotations

import threading
import time
from contextlib import closing

import pytest

from async_rl.queue.messages import Announcement
from async_rl.weights import control
from async_rl.weights.channel import receiver
from async_rl.weights.channel.receiver import Receiver

DEADLINE_S = 30.0
CHANNEL = "tcp://127.0.0.1:5556"


class FakeSocket:
    """The socket to a learner that says nothing. ``trouble`` is why there is no connection."""

    def __init__(self) -> None:
        self.is_connected, self.trouble, self.to_open = False, "", ""
        self.turn = threading.Condition()

    def receive(self) -> None:
        with self.turn:
            self.turn.notify_all()

    def after_turns(self, number: int = 3) -> None:
        """Wait until the receiver has looked at this socket so often."""
        for _ in range(number):
            with self.turn:
                assert self.turn.wait(DEADLINE_S)

    def trouble_after(self, seconds: float) -> str:
        return self.trouble

    def send(self, message: control.MemberMessage) -> bool:
        return self.is_connected

    def wait(self, timeout_s: float) -> None:
        time.sleep(timeout_s)

    def leave(self) -> None:
        pass


@pytest.fixture
def learner(monkeypatch: pytest.MonkeyPatch) -> FakeSocket:
    fake = FakeSocket()

    def connect(*_: object, to_open: str) -> FakeSocket:
        fake.to_open = to_open
        return fake

    monkeypatch.setattr(receiver, "PublisherSocket", connect)
    monkeypatch.setattr(receiver, "_SILENT_S", 0.0)
    return fake


def follow(receiver: Receiver, learner: FakeSocket, *ports: int) -> None:
    receiver.follow(Announcement("line", 1, "digest", CHANNEL, ports=ports))
    learner.after_turns()


def wait_for(receiver: Receiver, text: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while text not in (receiver.error or ""):
        assert time.monotonic() < deadline, receiver.error
        time.sleep(0.01)


def test_a_learner_that_was_never_reached_is_not_called_silent(learner: FakeSocket):
    with closing(Receiver("g", insecure=False)) as made:
        follow(made, learner)
        assert made.error is None, "the first cause is not known yet"
        learner.trouble = "open port 5556"
        wait_for(made, "open port 5556")
        learner.trouble = ""
        learner.after_turns()
        assert made.error == "open port 5556"
        learner.is_connected = True
        wait_for(made, f"the learner at {CHANNEL} has been silent")


def test_a_learner_that_is_reached_at_once_is_silent_only_from_then_on(
    learner: FakeSocket, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(receiver, "_SILENT_S", DEADLINE_S)  # less than any machine has been up for
    learner.is_connected = True
    with closing(Receiver("g", insecure=False)) as made:
        follow(made, learner)
        assert made.error is None


@pytest.mark.parametrize(
    ("has_ports", "ports", "expected"),
    [
        (True, (5556, 5557), "open the ports 5556 and 5557 (weights.port)"),
        (False, (46151, 52703), "set weights.port, and open its ports"),
        (True, (), ""),
    ],
)
def test_all_ports_of_the_learner_are_named_at_once(learner: FakeSocket, has_ports: bool, ports, expected: str):
    with closing(Receiver("g", insecure=False, has_ports=has_ports)) as made:
        follow(made, learner, *ports)
        assert learner.to_open == expected
