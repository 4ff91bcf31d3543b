"""Frames reach the other end whole and in order, whatever memory they lie in."""

from collections.abc import Iterator

import pytest
import zmq

from async_rl.errors import WireError
from async_rl.net.frames import COPY_BELOW_BYTES, send_frames
from async_rl.net.wire import Frame
from async_rl.queue.client.connection import Connection
from async_rl.queue.messages import Ping


@pytest.fixture
def pair() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    with zmq.Context() as context, context.socket(zmq.PAIR) as left, context.socket(zmq.PAIR) as right:
        left.bind("inproc://pair")
        right.connect("inproc://pair")
        yield left, right


def test_frames_arrive_as_one_message(pair):
    left, right = pair
    received = zmq.Frame(b"as it came" * 10_000)
    part = received.buffer[3:7]
    large = bytes(range(256)) * (COPY_BELOW_BYTES // 256)
    frames: list[Frame] = [b"first", received.buffer, part, bytearray(b"array"), large, b""]
    send_frames(left, frames)
    assert right.recv_multipart() == [bytes(frame) for frame in frames]


def test_a_frame_that_was_received_can_be_sent_on_again_and_again(pair):
    left, right = pair
    left.send(b"x" * 200_000)
    body = right.recv(copy=False).buffer
    for _ in range(2):
        send_frames(right, [b"head", body])
        assert left.recv_multipart() == [b"head", b"x" * 200_000]


def test_without_room_nothing_is_sent():
    with zmq.Context() as context, context.socket(zmq.PUSH) as nobody, pytest.raises(zmq.Again):
        send_frames(nobody, [b"one", b"two"])


def test_a_malformed_answer_is_an_error_that_names_the_queue_server():
    with zmq.Context() as context, context.socket(zmq.ROUTER) as other_program:
        address = f"tcp://127.0.0.1:{other_program.bind_to_random_port('tcp://127.0.0.1')}"
        connection = Connection(address, "learner")
        try:
            connection.post(Ping())
            connection.poll(0.0)
            while not other_program.poll(10):
                connection.poll(0.0)
            sender = other_program.recv_multipart()[0]
            other_program.send_multipart([sender, b"HTTP/1.1 400 Bad Request"])
            with pytest.raises(
                WireError, match=f"^the queue server at {address} sent a malformed message: .*not async-rl"
            ):
                connection.poll(30.0)
        finally:
            connection.close()
