"""Addresses: which one others connect to, and which can't be reached."""

from __future__ import annotations

import socket

import pytest

from async_rl.errors import AddressError
from async_rl.net.address import advertised_address, interface_of
from async_rl.net.streams import listening_socket


@pytest.mark.parametrize(
    ("bind", "advertise", "expected"),
    [
        ("tcp://127.0.0.1:5555", None, "tcp://127.0.0.1:5555"),
        ("tcp://10.0.0.1:0", None, "tcp://10.0.0.1:0"),
        ("tcp://[fd00::1]:5555", None, "tcp://[fd00::1]:5555"),
        ("tcp://0.0.0.0:5555", "tcp://10.0.0.1:0", "tcp://10.0.0.1:5555"),
        ("tcp://*:5555", "tcp://node-a:7000", "tcp://node-a:7000"),
        ("tcp://[::]:5555", "tcp://[fd00::1]:5555", "tcp://[fd00::1]:5555"),
        ("tcp://127.0.0.1:5555", "tcp://localhost:5555", "tcp://localhost:5555"),
    ],
)
def test_others_connect_to_the_advertised_address_or_to_the_bound_one(bind: str, advertise: str | None, expected: str):
    assert advertised_address(bind, advertise) == expected


@pytest.mark.parametrize("bind", ["tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://[::]:5555"])
def test_all_interfaces_are_no_address_to_connect_to(bind: str):
    with pytest.raises(AddressError, match=r"stands for all interfaces.*set queue\.advertise = \"tcp://.*:5555\""):
        advertised_address(bind, None)


@pytest.mark.parametrize("advertise", ["tcp://127.0.0.1:5555", "tcp://0.0.0.0:5555", "tcp://[::1]:5555"])
def test_an_advertised_address_that_other_machines_cannot_reach_is_refused(advertise: str):
    with pytest.raises(
        AddressError, match=rf"queue\.advertise: expected .* got {advertise.replace('[', '.').replace(']', '.')}"
    ):
        advertised_address("tcp://10.0.0.1:5555", advertise)


def test_a_listener_takes_the_first_free_port_of_a_range():
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with listening_socket("127.0.0.1", [port, 0]) as listener:
            assert listener.getsockname()[1] != port
        with pytest.raises(AddressError, match=rf"the ports {port} to {port} of 127\.0\.0\.1 are in use"):
            listening_socket("127.0.0.1", [port])
    with listening_socket("127.0.0.1", [port]) as listener:
        assert listener.getsockname()[1] == port


def test_the_interface_of_an_address_is_found():
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(AddressError, match=r"expected an address of one of this machine's network interfaces \(.*lo"):
        interface_of("192.0.2.7")
