"""A network of the test's own, for what happens off loopback."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Network:
    namespace: str
    host_address: str


def sh(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@pytest.fixture
def network() -> Iterator[Network]:
    """A network namespace joined to this one by a veth pair; needs root and iproute2."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("network namespaces need root, iproute2 and util-linux")
    name = f"arl{os.getpid()}"
    near, far = f"{name}a"[-15:], f"{name}b"[-15:]
    subnet = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
    try:
        sh("ip", "netns", "add", name)
        sh("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
        sh("ip", "addr", "add", f"{subnet}.1/24", "dev", near)
        sh("ip", "link", "set", near, "up")
        sh("ip", "-n", name, "addr", "add", f"{subnet}.2/24", "dev", far)
        sh("ip", "-n", name, "link", "set", far, "up")
        sh("ip", "-n", name, "link", "set", "lo", "up")
        yield Network(name, f"{subnet}.1")
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
