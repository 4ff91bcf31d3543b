"""Lines by themselves, with plain sockets in the place of receivers."""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from async_rl.weights import control, push_lines
from async_rl.weights.push_lines import Heard, Lost, PushLines
from async_rl.weights.tcp.protocol import make_request, receive_exactly, receive_head

WAIT_S = 10.0
ACK = control.Ack(1, 0, "ab" * 16, 10, 0)
SAID = control.encode_message(ACK)
TOKEN = b"t" * 16


@pytest.fixture
def lines() -> Iterator[PushLines]:
    with closing(PushLines("127.0.0.1")) as started:
        yield started


def connect(lines: PushLines) -> socket.socket:
    return socket.create_connection(("127.0.0.1", lines.port), timeout=WAIT_S)


def events_of(lines: PushLines, count: int = 1) -> list[Heard | Lost]:
    """What is heard until that was so much."""
    events: list[Heard | Lost] = []
    until = time.monotonic() + WAIT_S
    while len(events) < count:
        assert time.monotonic() < until, events
        if select.select([lines], [], [], 0.1)[0]:
            events += lines.poll()
    return events


def settle(lines: PushLines) -> list[Heard | Lost]:
    """What is heard until nothing more is to be read."""
    events: list[Heard | Lost] = []
    while select.select([lines], [], [], 0.2)[0]:
        events += lines.poll()
    return events


def stand(lines: PushLines, member_id: bytes = b"m") -> socket.socket:
    token = lines.expect(member_id)
    connection = connect(lines)
    connection.sendall(make_request(token, (), SAID).encode())
    assert events_of(lines) == [Heard(member_id, ACK)]
    assert lines.stands(member_id)
    return connection


def has_ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_who_stands_gets_head_and_buckets_and_stands_again_by_its_answer(lines: PushLines):
    buckets = [memoryview(os.urandom(3 << 20)), memoryview(b"short"), memoryview(b"")]
    with stand(lines) as connection:
        for attempt in (2, 3):
            token = lines.expect(b"m")
            assert lines.push(b"m", attempt, TOKEN, b"the head", buckets)
            assert not lines.stands(b"m")
            assert receive_head(connection, 100) == b"the head"
            for bucket in buckets:
                assert receive_exactly(connection, len(bucket)) == bucket
            connection.sendall(make_request(token, (), SAID).encode())
            assert events_of(lines) == [Heard(b"m", ACK)]
            lines.end(attempt)  # it is over: nothing is cut off
            assert lines.stands(b"m")


def test_buckets_are_asked_for_again_over_the_line_with_the_token_of_the_push(lines: PushLines):
    with stand(lines) as connection:
        lines.push(b"m", 2, TOKEN, b"head", [memoryview(b"one"), memoryview(b"three"), memoryview(b"7")])
        assert receive_head(connection, 100) == b"head"
        assert receive_exactly(connection, 9) == b"onethree7"
        connection.sendall(make_request(TOKEN, [2, 1]).encode())
        settle(lines)
        assert receive_exactly(connection, 6) == b"7three"
        connection.sendall(make_request(TOKEN, [3]).encode())
        assert events_of(lines) == [Lost(b"m", 2)]
        assert has_ended(connection)
        assert lines.num_malformed == 1


def test_a_request_that_comes_byte_by_byte_is_one_request(lines: PushLines):
    request = make_request(lines.expect(b"m"), (), SAID).encode()
    with connect(lines) as connection:
        for index in range(len(request)):
            assert settle_now(lines) == []
            connection.sendall(request[index : index + 1])
        assert events_of(lines) == [Heard(b"m", ACK)]


def settle_now(lines: PushLines) -> list[Heard | Lost]:
    return lines.poll() if select.select([lines], [], [], 0.0)[0] else []


def test_a_line_that_breaks_amid_a_push_loses_it_and_one_that_stands_loses_nothing(lines: PushLines):
    large = [memoryview(bytes(64 << 20))]
    connection = stand(lines)
    assert lines.push(b"m", 2, TOKEN, b"head", large)
    connection.close()
    assert events_of(lines) == [Lost(b"m", 2)]
    stand(lines).close()
    assert settle(lines) == []
    assert not lines.stands(b"m")


def test_a_push_that_nobody_waits_for_is_cut_off_without_a_word(lines: PushLines):
    with stand(lines) as connection:
        assert lines.push(b"m", 2, TOKEN, b"head", [memoryview(bytes(64 << 20))])
        lines.end(2)
        # It reads what was on its way already, and the end.
        received = 0
        while data := connection.recv(1 << 20):
            received += len(data)
        assert received < 64 << 20
        assert settle(lines) == []


def test_a_token_serves_once_and_only_the_newest_one_of_a_member(lines: PushLines):
    old = lines.expect(b"m")
    new = lines.expect(b"m")
    for token, is_right in ((old, False), (new, True), (new, False)):
        with connect(lines) as connection:
            connection.sendall(make_request(token, (), SAID).encode())
            assert [type(event) for event in settle(lines)] == ([Heard] if is_right else [])
            if not is_right:
                assert has_ended(connection)


def test_a_member_that_stands_anew_stands_there_alone(lines: PushLines):
    with stand(lines) as before, stand(lines) as now:
        assert has_ended(before)
        assert lines.push(b"m", 2, TOKEN, b"head", [memoryview(b"all")])
        assert receive_head(now, 100) == b"head"
        assert receive_exactly(now, 3) == b"all"


def test_who_is_no_member_any_more_neither_stands_nor_may(lines: PushLines):
    token = lines.expect(b"gone")
    with stand(lines, b"m") as connection, stand(lines, b"stays") as other:
        lines.keep({b"stays"})
        assert has_ended(connection)
        assert lines.stands(b"stays")
        with connect(lines) as late:
            late.sendall(make_request(token, (), SAID).encode())
            assert settle(lines) == []
            assert has_ended(late)
        assert lines.push(b"stays", 2, TOKEN, b"head", [])
        assert receive_head(other, 100) == b"head"


def test_strangers_are_let_go_when_others_come_and_never_fill_the_place(lines, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(push_lines, "_STRANGER_S", 0.0)
    monkeypatch.setattr(push_lines, "MAX_LINES", 2)
    with stand(lines), connect(lines) as silent:
        settle(lines)
        with connect(lines) as second:
            settle(lines)
            assert has_ended(silent)
            monkeypatch.setattr(push_lines, "_STRANGER_S", 3600.0)
            with connect(lines) as third:
                settle(lines)
                assert has_ended(third)
            second.sendall(make_request(lines.expect(b"n"), (), SAID).encode())
            assert events_of(lines) == [Heard(b"n", ACK)]


def test_a_stranger_is_not_listened_to_for_megabytes(lines: PushLines):
    head = struct.pack("<4s16s16sII", b"ARW2", TOKEN, TOKEN, 1 << 20, 0)
    with connect(lines) as connection:
        connection.sendall(head + bytes(push_lines.MAX_REQUEST_BYTES))
        assert settle(lines) == []
        assert has_ended(connection)
    assert lines.num_malformed == 1


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n" * 8, struct.pack("<4s16s16sII", b"ARW2", TOKEN, TOKEN, 1 << 31, 0)]
)
def test_what_is_no_request_ends_the_line_and_is_counted(lines: PushLines, said: bytes):
    with connect(lines) as connection:
        connection.sendall(said)
        assert settle(lines) == []
        assert has_ended(connection)
        assert lines.num_malformed == 1
