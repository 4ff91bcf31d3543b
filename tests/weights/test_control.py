import socket
import struct
import time

import pytest

from async_rl.errors import WireError
from async_rl.net.codec import decode_as
from async_rl.net.wire import encode
from async_rl.weights import control
from async_rl.weights.control import MemberSocket
from tests.forked import Forked
from tests.hostile import dealer_handshake

MESSAGES = [
    control.Join("g", "127.0.0.1", [control.CollectiveOffer("nccl", "2.28", ["GPU-1"])], 2, "ab"),
    control.Heartbeat(1 << 40),
    control.Leave(),
    control.Ready(3),
    control.Ack(3, 7, "ab", 100, 1, 0.5),
    control.Failed(3, "why", True),
    control.Ping(),
    control.NotMember(),
    control.Dropped("silent", 2.0),
    control.PrepareCollective(4, {"version": 1}),
    control.StartCollective(4, 2, 1, 3, b"id", 1.5, 2.5, 64, "gloo"),
    control.Pull(4, "tcp", {"version": 1}, 5555, b"token", b"key", "ab", [[5, -1], [7, 8]], 2.5),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_every_message_round_trips(message):
    is_to_publisher = isinstance(message, control.TO_PUBLISHER)
    expected = control.TO_PUBLISHER if is_to_publisher else control.TO_MEMBER
    limits = control.TO_PUBLISHER_LIMITS if is_to_publisher else control.TO_MEMBER_LIMITS
    assert decode_as(control.encode_message(message), expected, limits) == message


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (control.encode_message(control.Ping()), "got 'Ping'"),  # for the other side
        (encode("Ready", {"attempt": "1"}), "Expected `int`, got `str`"),
    ],
)
def test_other_messages_and_fields_of_other_types_are_refused(frame: bytes, message: str):
    with pytest.raises(WireError, match=message):
        decode_as(frame, control.TO_PUBLISHER, control.TO_PUBLISHER_LIMITS)


def test_a_long_reason_is_cut_to_what_the_other_side_accepts():
    frame = control.encode_message(control.Failed(1, "x" * 100_000, False))
    message = decode_as(frame, control.TO_PUBLISHER, control.TO_PUBLISHER_LIMITS)
    assert isinstance(message, control.Failed)
    assert len(message.reason) == 2000


def flood_and_vanish(port: int) -> None:
    """Send a publisher more messages than it holds for one member, and reset the connection."""
    with socket.create_connection(("127.0.0.1", port)) as member:
        member.sendall(dealer_handshake())
        assert member.recv(64, socket.MSG_WAITALL)[:1] == b"\xff"
        member.sendall(b"\x00\x02hi" * 1000)
        assert member.recv(1024)  # its READY: it has read the handshake
        time.sleep(0.5)  # what it still reads of the messages is more than it holds
        member.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def be_busy_while_a_member_dies() -> None:
    """A publisher that reads no message for 4 s, longer than two of libzmq's own heartbeats once took."""
    publisher = MemberSocket("127.0.0.1", None)
    flood_and_vanish(publisher.port)
    time.sleep(4.0)
    deadline = time.monotonic() + 20
    while publisher.num_malformed < 64 and time.monotonic() < deadline:
        assert not list(publisher.receive())
    assert publisher.num_malformed >= 64
    publisher.close()


@pytest.mark.slow
def test_a_publisher_outlives_a_member_that_dies_with_its_queue_full():
    child = Forked(be_busy_while_a_member_dies)  # libzmq would abort the process
    assert child.wait(60) == 0, child.communicate()
