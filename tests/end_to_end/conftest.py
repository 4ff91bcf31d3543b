"""A network of the test's own, for what happens off loopback."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Network:
    """A network namespace, and this machine's address as seen from there."""

    namespace: str
    host_address: str


@dataclass(frozen=True)
class Firewall:
    """A network namespace behind a router that drops all packets except those to and from open ports."""

    network: Network
    router: str

    def open(self, *ports: int) -> None:
        """Let TCP connections to ``ports`` of this machine pass."""
        for port in ports:
            for side in ("sport", "dport"):
                sh("ip", "-n", self.router, "rule", "add", "pref", "10", "ipproto", "tcp", side, str(port),
                   "lookup", "main")  # fmt: skip


def sh(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def free_subnets() -> str:
    """Return the first two numbers of addresses that only this test process uses."""
    return f"10.{200 + os.getpid() % 50}"


@contextmanager
def namespaces(*names: str) -> Iterator[None]:
    try:
        for name in names:
            sh("ip", "netns", "add", name)
            sh("ip", "-n", name, "link", "set", "lo", "up")
        yield
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def join(
    near: str, far: str, near_address: str, far_address: str, *, far_namespace: str, near_namespace: str = ""
) -> None:
    """Connect two namespaces by a cable; ``near_namespace`` is this process's own if it is empty."""
    near_ip = ("ip", "-n", near_namespace) if near_namespace else ("ip",)
    sh(*near_ip, "link", "add", near, "type", "veth", "peer", "name", far, "netns", far_namespace)
    for ip, interface, address in ((near_ip, near, near_address), (("ip", "-n", far_namespace), far, far_address)):
        sh(*ip, "addr", "add", f"{address}/24", "dev", interface)
        sh(*ip, "link", "set", interface, "up")


def skip_without_namespaces() -> None:
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("network namespaces need root, iproute2 and util-linux")


@pytest.fixture
def network() -> Iterator[Network]:
    """A network namespace joined to this one; needs root and iproute2."""
    skip_without_namespaces()
    name, subnet = f"arl{os.getpid()}", f"{free_subnets()}.{os.getpid() // 50 % 250}"
    with namespaces(name):
        join(f"{name}a"[-15:], f"{name}b"[-15:], f"{subnet}.1", f"{subnet}.2", far_namespace=name)
        yield Network(name, f"{subnet}.1")


@pytest.fixture
def firewall() -> Iterator[Firewall]:
    """A network namespace behind a firewall, all of whose ports are closed; needs root and iproute2.

    Its router drops packets by routing rules, because a kernel may lack the modules of a packet filter.
    """
    skip_without_namespaces()
    router, behind = f"arlr{os.getpid()}", f"arlb{os.getpid()}"
    number = os.getpid() // 50 % 125 * 2
    near, far = f"{free_subnets()}.{number}", f"{free_subnets()}.{number + 1}"

    def end(letter: str) -> str:
        return f"{letter}{os.getpid()}"

    with namespaces(router, behind):
        join(end("a"), end("b"), f"{near}.1", f"{near}.2", far_namespace=router)
        join(end("c"), end("d"), f"{far}.1", f"{far}.2", far_namespace=behind, near_namespace=router)
        sh("ip", "netns", "exec", router, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        sh("ip", "route", "add", f"{far}.0/24", "via", f"{near}.2")
        sh("ip", "-n", behind, "route", "add", "default", "via", f"{far}.1")
        for interface in (end("b"), end("c")):
            sh("ip", "-n", router, "rule", "add", "pref", "20", "iif", interface, "blackhole")
        yield Firewall(Network(behind, f"{near}.1"), router)
