"""A receiver as a program of its own: takes commands on stdin, reports on stdout.

Commands, one JSON object a line: ``{"follow": {...announcement}}``; ``{"fault": "corrupt" | "kill" | "freeze", "on":
"collective" | "stream"}`` (happens once, at the second bucket of the next such transfer). It reports one object for
each version that arrived.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys

from async_rl.queue.messages import Announcement
from async_rl.weights.manifest import digest_bytes
from async_rl.weights.receiver import Receiver

fault = ""
fault_on = ""
num_buckets = 0


def inject_faults() -> None:
    """Let the fault happen after this process received its second bucket of a transfer."""
    from async_rl.weights.collective import Communicator
    from async_rl.weights.tcp.receiver import _Answer

    broadcast, read = Communicator.broadcast, _Answer.read

    def faulty_broadcast(self, bucket, *, chunk_bytes, deadline, on_chunk=None):
        chunks = iter([bucket])

        def faulty_on_chunk(chunk):
            for first in chunks:  # before its bytes are digested
                received("collective", first)
            if on_chunk is not None:
                on_chunk(chunk)

        broadcast(self, bucket, chunk_bytes=chunk_bytes, deadline=deadline, on_chunk=faulty_on_chunk)

    def faulty_read(self, into, hasher):
        read(self, into, hasher)
        received("stream", into)

    Communicator.broadcast = faulty_broadcast
    _Answer.read = faulty_read


def received(by: str, bucket) -> None:
    global fault, num_buckets
    if by != fault_on:
        return
    num_buckets += 1
    if fault and num_buckets == 2:
        now, fault = fault, ""
        if now == "corrupt":
            bucket[0] = bucket[0] ^ 1
        else:
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}[now])


def report(**facts) -> None:
    print(json.dumps(facts), flush=True)


def main() -> None:
    global fault, fault_on, num_buckets
    receiver = Receiver(sys.argv[1], insecure=False)
    report(ready=True, torch="torch" in sys.modules)
    inject_faults()
    commands = open(0, "rb", buffering=0)  # noqa: SIM115  (a line that was read ahead would not wake the select)
    while True:
        readable, _, _ = select.select([commands, receiver], [], [])
        if commands in readable:
            line = commands.readline()
            if not line:
                break
            command = json.loads(line)
            if "follow" in command:
                receiver.follow(Announcement(**command["follow"]))
            else:
                fault, fault_on, num_buckets = command["fault"], command.get("on", "collective"), 0
        if receiver in readable and (staged := receiver.poll()) is not None:
            receiver.activated(staged)
            tensors = {name: digest_bytes(bytes(_raw(tensor))) for name, tensor in staged.tensors.items()}
            shapes = {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in staged.tensors.items()}
            stats = receiver.stats()
            report(
                version=staged.version, digest=staged.digest, tensors=tensors, shapes=shapes, corrupt=stats.corrupt,
                failed=stats.failed, corrupt_buckets=stats.corrupt_buckets, wire_bytes=stats.wire_bytes,
                received_bytes=stats.received_bytes,
            )  # fmt: skip
    receiver.close()


def _raw(tensor) -> bytes:
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


if __name__ == "__main__":
    main()
