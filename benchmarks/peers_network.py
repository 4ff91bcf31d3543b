"""How long a version takes to 16 generators with and without ``weights.peers``, over real links of 100 Mb/s.

    sudo python -m benchmarks.peers_network [--generators 16] [--mebibytes 50]

Every process has a network namespace of its own, on one bridge. ``tc tbf`` limits its link in both directions. The
version is 300 times smaller than that of a 7B model, so records are 16 times smaller, too. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing as mp
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection

import torch

from async_rl.queue.messages import Announcement
from async_rl.weights.channel.publisher import Publisher
from async_rl.weights.channel.receiver import Receiver
from async_rl.weights.staging import StagedVersion, Staging
from async_rl.weights.tcp import peer_pull, peer_server, receiver

_PREFIX = f"arl{os.getpid() % 10000}"
_BRIDGE = f"{_PREFIX}b"
_CLONE_NEWNET = 0x40000000
_BUCKET_BYTES = 1 << 20
_RECORD_BYTES = 256 << 10
_DEADLINE_S = 600.0


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True)


@contextmanager
def network(num_hosts: int, rate: str) -> Iterator[None]:
    """Hosts 0 to ``num_hosts`` - 1 with the addresses 10.99.7.1 and up, each with a link of this rate."""
    limit = f"root tbf rate {rate} burst 64kb latency 100ms"
    try:
        _run(f"ip link add {_BRIDGE} type bridge")
        _run(f"ip link set {_BRIDGE} up")
        for host in range(num_hosts):
            name = f"{_PREFIX}n{host}"
            _run(f"ip netns add {name}")
            _run(f"ip link add {_PREFIX}v{host} type veth peer name eth0 netns {name}")
            _run(f"ip link set {_PREFIX}v{host} master {_BRIDGE} up")
            _run(f"ip -n {name} addr add 10.99.7.{host + 1}/24 dev eth0")
            _run(f"ip -n {name} link set eth0 up")
            _run(f"ip -n {name} link set lo up")
            _run(f"ip netns exec {name} tc qdisc add dev eth0 {limit}")
            _run(f"tc qdisc add dev {_PREFIX}v{host} {limit}")
        yield
    finally:
        for host in range(num_hosts):
            subprocess.run(["ip", "netns", "del", f"{_PREFIX}n{host}"], check=False, stderr=subprocess.DEVNULL)
        subprocess.run(["ip", "link", "del", _BRIDGE], check=False)


def enter(host: int) -> None:
    """Move this process into the host's namespace. It must have one thread only."""
    with open(f"/run/netns/{_PREFIX}n{host}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    torch.set_num_threads(1)
    peer_pull.RECORD_BYTES = peer_server.RECORD_BYTES = receiver._PIECE_BYTES = _RECORD_BYTES


def generator(host: int, pipe: Connection) -> None:
    """Receive versions until the other side closes the pipe, and say which have arrived."""
    enter(host)
    with closing(Receiver(f"g{host}", insecure=True, has_peers=True)) as own:
        own.follow(pipe.recv())
        while not pipe.poll():
            if own.wait(0.1) and (received := own.poll()) is not None:
                own.activated(received)


def learner(pipe: Connection, num_generators: int, size_bytes: int, has_peers: bool) -> None:
    """Publish a small version, and when all have it the large one. Send the announcement, then the result."""
    enter(0)
    options = {"deadline_s": _DEADLINE_S, "insecure": True, "transport": "tcp", "has_deltas": False}
    with closing(Publisher("10.99.7.1", has_peers=has_peers, **options)) as publisher:
        small = _staged(0, 1)
        publisher.publish(small)
        pipe.send(Announcement("line", 0, small.manifest.digest, publisher.address))
        assert publisher.wait(0, _DEADLINE_S, num_members=num_generators), publisher.stats()
        large, before, start = _staged(1, size_bytes // _BUCKET_BYTES), publisher.stats(), time.monotonic()
        publisher.publish(large)
        assert publisher.wait(1, _DEADLINE_S, num_members=num_generators), publisher.stats()
        elapsed_s, stats = time.monotonic() - start, publisher.stats()
        total, peers = stats.pulled_bytes - before.pulled_bytes, stats.peer_bytes - before.peer_bytes
        pipe.send((elapsed_s, total - peers, peers, stats.peer_faults))


def _staged(version: int, num_buckets: int) -> StagedVersion:
    staging = Staging(None, _BUCKET_BYTES, deadline_s=_DEADLINE_S, is_pulled=True)
    tensors = {f"w{index}": torch.randint(0, 256, (_BUCKET_BYTES,)).byte() for index in range(num_buckets)}
    return staging.stage("line", version, iter(tensors.items()))


def measure(num_generators: int, size_bytes: int, *, has_peers: bool) -> tuple[float, int, int, int]:
    """Return seconds, bytes sent by the learner, bytes sent by generators, and failures of generators that served."""
    context = mp.get_context("fork")
    ours, theirs = context.Pipe()
    processes = [context.Process(target=learner, args=(theirs, num_generators, size_bytes, has_peers))]
    pipes = [context.Pipe() for _ in range(num_generators)]
    processes += [context.Process(target=generator, args=(i, end)) for i, (_, end) in enumerate(pipes, start=1)]
    for process in processes:
        process.start()
    announcement = ours.recv()
    for pipe, _ in pipes:
        pipe.send(announcement)
    result = ours.recv()
    for pipe, _ in pipes:
        pipe.send(None)
    for process in processes:
        process.join()
    return result


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generators", type=int, default=16)
    parser.add_argument("--mebibytes", type=int, default=50)
    parser.add_argument("--rate", default="100mbit")
    chosen = parser.parse_args(arguments)
    size = chosen.mebibytes << 20
    with network(chosen.generators + 1, chosen.rate):
        one_s = measure(1, size, has_peers=False)[0]
        print(f"{chosen.mebibytes} MiB over links of {chosen.rate}; one transfer: {one_s:.2f} s", flush=True)
        for has_peers in (False, True):
            elapsed_s, from_learner, from_peers, faults = measure(chosen.generators, size, has_peers=has_peers)
            print(
                f"{chosen.generators} generators, peers {'on ' if has_peers else 'off'}: {elapsed_s:.2f} s "
                f"({elapsed_s / one_s:.2f} transfers), the learner sent {from_learner / size:.2f} versions, generators "
                f"{from_peers / size:.2f}, {faults} failures",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
