"""A cable between two network namespaces that loses, delays and reorders packets, or carries none.

Two TUN devices and a thread that hands packets from one to the other, because kernels often lack netem.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tests.end_to_end.conftest import Network, free_subnets, namespaces, sh

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
PACKET_BYTES = 65_536


class Cable:
    """Each packet is lost with probability ``loss``; the others take ``delay_s``, and up to ``jitter_s`` more.

    Packets overtake each other within the jitter. ``is_cut`` loses all of them, and tells neither end. ``near`` and
    ``far`` are the files of TUN devices that are up; their owner closes them, which removes the devices.
    """

    def __init__(self, near: int, far: int) -> None:
        self.loss, self.delay_s, self.jitter_s, self.is_cut = 0.0, 0.0, 0.0, False
        self.carried, self.lost = 0, 0
        self._ends = {near: far, far: near}
        self._stop, self._stopped = os.pipe()
        self._random = random.Random(0)
        self._thread = threading.Thread(target=self._run, name="cable")
        self._thread.start()

    def close(self) -> None:
        os.close(self._stopped)
        self._thread.join()
        os.close(self._stop)

    def _run(self) -> None:
        under_way = list[tuple[float, int, int, bytes]]()
        while True:
            wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
            readable, _, _ = select.select([*self._ends, self._stop], [], [], wait_s)
            if self._stop in readable:
                return
            for end in readable:
                packet = os.read(end, PACKET_BYTES)
                if self.is_cut or self._random.random() < self.loss:
                    self.lost += 1
                    continue
                arrives = time.monotonic() + self.delay_s + self._random.random() * self.jitter_s
                self.carried += 1
                heapq.heappush(under_way, (arrives, self.carried, self._ends[end], packet))
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, end, packet = heapq.heappop(under_way)
                os.write(end, packet)


def _tun(name: str) -> int:
    """Make a TUN device and return its file: packets that the kernel sends to it, and that it is to receive."""
    file = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    return file


@contextmanager
def cable() -> Iterator[tuple[Network, Cable]]:
    """A namespace at the far end of a cable; needs root, iproute2 and /dev/net/tun."""
    name, subnet = f"arlc{os.getpid()}", f"{free_subnets()}.{os.getpid() // 50 % 250}"
    near, far = f"x{os.getpid()}", f"y{os.getpid()}"
    with namespaces(name), ExitStack() as ends:
        files = [_tun(near), _tun(far)]
        for file in files:
            ends.callback(os.close, file)
        sh("ip", "link", "set", far, "netns", name)
        for ip, device, number in ((("ip",), near, 1), (("ip", "-n", name), far, 2)):
            sh(*ip, "addr", "add", f"{subnet}.{number}/24", "dev", device)
            sh(*ip, "link", "set", device, "up")
        laid = Cable(*files)
        try:
            yield Network(name, f"{subnet}.1"), laid
        finally:
            laid.close()
