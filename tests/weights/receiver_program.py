"""A receiver in a process of its own: takes commands from a connection and reports on it.

Commands: ``{"follow": {...announcement}}``; ``{"fault": "corrupt" | "kill" | "freeze"}`` (happens once, at the second
bucket that it receives in the next collective). It reports one dict for each version that arrived, and ``READY`` for a
fault.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from multiprocessing.connection import Connection

from async_rl.queue.messages import Announcement
from async_rl.weights.channel.receiver import Receiver
from async_rl.weights.manifest import digest_bytes

READY = -1
"""Reported as the version once a fault will happen."""
fault = ""
num_buckets = 0


def inject_faults() -> None:
    """Let the fault happen after this process received its second bucket of a collective."""
    from async_rl.weights.collective.library import Communicator

    broadcast = Communicator.broadcast

    def faulty_broadcast(self, buckets, *, chunk_bytes, deadline, on_chunk=None):
        begun = set()

        def faulty_on_chunk(index, chunk):
            if index not in begun:  # before its bytes are digested
                begun.add(index)
                passes(buckets[index])
            assert on_chunk is not None, "a receiver without digests"
            return on_chunk(index, chunk)

        broadcast(self, buckets, chunk_bytes=chunk_bytes, deadline=deadline, on_chunk=faulty_on_chunk)

    Communicator.broadcast = faulty_broadcast


def passes(bucket) -> None:
    global fault, num_buckets
    num_buckets += 1
    if fault and num_buckets == 2:
        now, fault = fault, ""
        if now == "corrupt":
            bucket[0] = bucket[0] ^ 1
        else:
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}[now])
            threading.Event().wait()  # another thread may take the signal, and this one would go on until then


def run(name: str, connection: Connection) -> None:
    """Body of the process, until the test kills it."""
    global fault, num_buckets
    receiver = Receiver(name, insecure=False, has_peers=True)
    inject_faults()
    while True:
        readable, _, _ = select.select([connection, receiver], [], [])
        if connection in readable:
            command = connection.recv()
            if "follow" in command:
                receiver.follow(Announcement(**command["follow"]))
            else:
                fault, num_buckets = command["fault"], 0
                connection.send({"version": READY})
        if receiver in readable and (staged := receiver.poll()) is not None:
            receiver.activated(staged)
            tensors = {name: digest_bytes(bytes(_raw(tensor))) for name, tensor in staged.tensors.items()}
            shapes = {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in staged.tensors.items()}
            connection.send({
                "version": staged.version, "digest": staged.digest, "tensors": tensors, "shapes": shapes,
            })  # fmt: skip


def _raw(tensor) -> bytes:
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
