"""A generator's weights side as a program of its own, told over stdin what to do, telling over stdout what it has.

Commands, one JSON object a line: ``{"follow": {...announcement}}``; ``{"fault": "corrupt" | "kill" | "freeze"}``
(happens once, at the second bucket of the next transfer). Told back: one object for each version that arrived.
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
num_broadcasts = 0


def inject_faults() -> None:
    """Let the fault happen after this process received its second bucket of a transfer."""
    from async_rl.weights.collective import CollectiveGroup

    broadcast = CollectiveGroup.broadcast

    def faulty(self, bucket, **options):
        global fault, num_broadcasts
        num_broadcasts += 1
        broadcast(self, bucket, **options)
        if fault and num_broadcasts == 2:
            now, fault = fault, ""
            if now == "corrupt":
                bucket[0] += 1
            else:
                os.kill(os.getpid(), {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}[now])

    CollectiveGroup.broadcast = faulty


def tell(**facts) -> None:
    print(json.dumps(facts), flush=True)


def main() -> None:
    global fault, num_broadcasts
    receiver = Receiver(sys.argv[1], insecure=False)
    tell(ready=True, torch="torch" in sys.modules)
    inject_faults()
    while True:
        readable, _, _ = select.select([sys.stdin, receiver], [], [])
        if sys.stdin in readable:
            line = sys.stdin.readline()
            if not line:
                break
            command = json.loads(line)
            if "follow" in command:
                receiver.follow(Announcement(**command["follow"]))
            else:
                fault, num_broadcasts = command["fault"], 0
        if receiver in readable and (staged := receiver.poll()) is not None:
            receiver.activated(staged)
            tensors = {name: digest_bytes(bytes(_raw(tensor))) for name, tensor in staged.tensors.items()}
            shapes = {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in staged.tensors.items()}
            stats = receiver.stats()
            tell(
                version=staged.version, digest=staged.digest, tensors=tensors, shapes=shapes, corrupt=stats.corrupt,
                failed=stats.failed,
            )  # fmt: skip
    receiver.close()


def _raw(tensor) -> bytes:
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


if __name__ == "__main__":
    main()
