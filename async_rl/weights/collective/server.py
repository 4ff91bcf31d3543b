"""The broadcaster: the process beside the learner that is rank 0 of every communicator.

``python -m async_rl.weights.collective.server FD``: the learner starts the process and instructs it over the Unix
socket ``FD``. The process reads the learner's staging memory, which both have mapped, and makes no decisions. It ends
when the learner ends, or when the learner kills it because a call of its library does not return.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from async_rl.errors import AsyncRLError, WeightsError
from async_rl.process.helper import parent_socket
from async_rl.terminal import log_visibly
from async_rl.weights.collective.libraries import make_library
from async_rl.weights.collective.library import Communicator, Endpoint, Library
from async_rl.weights.collective.protocol import (
    TO_BROADCASTER,
    Broadcast,
    BroadcasterMessage,
    Configure,
    Connect,
    Connected,
    Disconnect,
    Disconnected,
    Loaded,
    Rendezvous,
    Sent,
)
from async_rl.weights.memory import host_memory
from async_rl.weights.server_process import MapSlot, receive_message, send_message


class Broadcaster:
    """Follows the learner's instructions, one after the other."""

    def __init__(self, learner: socket.socket, settings: Configure) -> None:
        self._learner = learner
        self._settings = settings
        self._slots: dict[int, list[Tensor]] = {}
        self._communicator: Communicator | None = None
        self._why_not = "it was never connected"

    def run(self) -> None:
        """Follow the learner's instructions until the learner closes the pipe."""
        self._send(Loaded())
        while (received := receive_message(self._learner, TO_BROADCASTER)) is not None:
            message, fd = received
            match message:
                case MapSlot(slot, sizes, offsets):
                    assert fd is not None, "a slot without memory"
                    self._slots[slot] = self._map(fd, sizes, offsets)
                case Connect(size):
                    self._connect(size)
                case Broadcast():
                    self._broadcast(message)
                case Disconnect():
                    self._disconnect()
                    self._send(Disconnected())
                case Configure():
                    raise AssertionError("configured twice")

    def _map(self, fd: int, sizes: Sequence[int], offsets: Sequence[int]) -> list[Tensor]:
        buckets: list[Tensor] = []
        for size, offset in zip(sizes, offsets, strict=True):
            view = mmap.mmap(fd, max(1, size), offset=offset)
            buckets.append(host_memory(view, pinned=self._settings.device is not None)[:size])
        os.close(fd)  # the mappings stay
        return buckets

    def _connect(self, size: int) -> None:
        self._disconnect()
        self._meet(size)
        self._send(Connected())

    def _meet(self, size: int) -> None:
        settings = self._settings
        library: Library | None = None
        try:
            endpoint = Endpoint(settings.host, settings.host, settings.device)
            library = make_library(settings.transport, endpoint)
            unique_id = library.unique_id()
        except (AsyncRLError, RuntimeError, OSError) as error:
            if library is not None:
                library.abort()
            self._send(Rendezvous(b"", f"{error}"))
            return
        # Before the ranks connect: until this has reached the members, none of them comes.
        self._send(Rendezvous(unique_id, ""))
        try:
            self._communicator = Communicator.connect(library, unique_id, rank=0, size=size, stall_s=settings.stall_s)
        except WeightsError as error:
            self._why_not = str(error)

    def _broadcast(self, order: Broadcast) -> None:
        start = time.monotonic()
        deadline, why = start + order.deadline_s, ""
        try:
            if self._communicator is None:
                raise WeightsError(self._why_not)
            self._communicator.broadcast(self._slots[order.slot], chunk_bytes=order.chunk_bytes, deadline=deadline)
        except WeightsError as error:
            # The learner counts it. After any error the communicator can't be used again.
            why = str(error)
            self._why_not = why
            self._disconnect()
        self._send(Sent(order.attempt, time.monotonic() - start, why))

    def _disconnect(self) -> None:
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.close()

    def _send(self, message: BroadcasterMessage) -> None:
        with contextlib.suppress(OSError):  # a learner that is gone ends ``run``
            send_message(self._learner, message)


def main(
    arguments: Sequence[str], environment: Mapping[str, str] = os.environ, leave: Callable[[int], None] = os._exit
):
    """Follow the learner until it closes the pipe. Then exit at once, even if connections are open."""
    log_visibly(environment.get("ASYNC_RL_LOG", "WARNING"), "broadcaster: %(message)s")
    torch.set_num_threads(1)
    with parent_socket(arguments[0]) as learner:
        received = receive_message(learner, [Configure])
        if received is not None:
            Broadcaster(learner, received[0]).run()
    leave(0)


if __name__ == "__main__":
    main(sys.argv[1:])
