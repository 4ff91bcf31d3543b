"""The learner's side of ``nccl`` and ``gloo``: starts the broadcaster process, and tells it what to send.

The broadcaster has a deadline for every answer. If it misses one, a call of its library does not return, so it is
killed and started again. If that happens too often without a success in between, it is left alone, and all members pull
from then on.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from async_rl.errors import WeightsError
from async_rl.weights.collective.protocol import (
    TO_LEARNER,
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
from async_rl.weights.control import StartCollective, seconds_until
from async_rl.weights.server_process import ServerProcess
from async_rl.weights.transport import CollectiveSettings, Delivery, Send

logger = logging.getLogger(__name__)


class CollectiveSender:
    """Implements ``transport.BroadcastSender``. There is one delivery at a time."""

    def __init__(self, settings: CollectiveSettings) -> None:
        self._settings = settings
        name = f"the process that broadcasts weights ({settings.transport})"
        self._server: ServerProcess[BroadcasterMessage] = ServerProcess(
            "async_rl.weights.collective.server", name, TO_LEARNER, settings.poller, self._configure
        )
        self._delivery: tuple[Delivery, Send] | None = None
        self._are_told = False
        self._due: deque[float] = deque()
        self._is_given_up = False
        self._server.start()

    @property
    def is_up(self) -> bool:
        return self._server.is_up

    def deliver(self, delivery: Delivery, send: Send) -> None:
        """Tell each member to receive the version, and the broadcaster to send it to all of them at once."""
        self._delivery, self._are_told = (delivery, send), False
        if not self.is_up:
            self._fail("the process that broadcasts weights has ended")
        elif delivery.build:
            self._expect(Connect(_num_ranks(delivery)), self._settings.stall_s, 2 * self._settings.stall_s)
        else:
            self._start(b"")

    def end(self, attempt: int, *, intact: bool) -> None:
        """Close the communicator, unless the attempt left it intact."""
        if not intact and self.is_up:
            self._expect(Disconnect(), self._settings.stall_s)

    def poll(self, ready: Mapping[Any, int]) -> None:
        """Handle an answer of the broadcaster, if there is one. Kill the broadcaster if an answer is overdue."""
        if self._is_given_up:
            return
        try:
            if self._server.is_readable(ready):
                self._handle(self._server.poll())
            elif self._due and time.monotonic() > self._due[0]:
                self._server.restart("did not answer in time, and was ended")
        except WeightsError as error:
            self._is_given_up = True
            logger.warning("%s; until then generators pull weights", error)
        if not self.is_up:
            self._due.clear()
            self._fail("the process that broadcasts weights has ended")

    def close(self, timeout_s: float) -> None:
        if not self._is_given_up:
            self._server.close()

    def _configure(self) -> None:
        settings = self._settings
        self._server.send(Configure(settings.transport, settings.host, settings.stall_s, settings.device))

    def _expect(self, message: Connect | Broadcast | Disconnect, *within_s: float) -> None:
        """Send ``message``. Each of its answers must come ``within_s`` after the answer before it."""
        self._server.send(message)
        for each_s in within_s:
            self._due.append(max([time.monotonic(), *self._due]) + each_s)

    def _handle(self, message: BroadcasterMessage | None) -> None:
        match message:
            case Loaded():
                self._server.is_up = True
            case Rendezvous(unique_id, error):
                self._due.popleft()
                if error:
                    self._fail(error)
                elif self._delivery is not None:
                    self._start(unique_id)
            case Sent(_, elapsed_s, error):
                self._due.popleft()
                if not error:
                    self._server.mark_working()
                self._finish(elapsed_s, error)
            case Connected() | Disconnected():
                self._due.popleft()

    def _start(self, unique_id: bytes) -> None:
        """Begin the delivery. ``unique_id`` is that of a new communicator; empty for the one that exists."""
        assert self._delivery is not None
        delivery, send = self._delivery
        settings, remaining_s = self._settings, seconds_until(delivery.deadline)
        rank = 1
        for member in delivery.members:
            start = StartCollective(
                attempt=delivery.attempt,
                epoch=delivery.epoch,
                rank=rank,
                size=_num_ranks(delivery),
                unique_id=unique_id,
                stall_s=settings.stall_s,
                deadline_s=remaining_s,
                chunk_bytes=settings.chunk_bytes,
                transport=settings.transport,
            )
            send(member.member_id, start)
            rank += member.num_ranks
        self._are_told = True
        self._server.map_slot(delivery.staged.slot, delivery.staged.memory)
        order = Broadcast(delivery.attempt, delivery.staged.slot, settings.chunk_bytes, remaining_s)
        self._expect(order, remaining_s + settings.stall_s)

    def _fail(self, error: str) -> None:
        if self._delivery is not None:
            self._finish(0.0, error)

    def _finish(self, elapsed_s: float, error: str) -> None:
        if self._delivery is not None:
            (delivery, _), self._delivery = self._delivery, None
            self._settings.on_sent(delivery, elapsed_s, error, self._are_told)


def _num_ranks(delivery: Delivery) -> int:
    """Return the number of ranks of a communicator for ``delivery``. The broadcaster is one of them."""
    return 1 + sum(member.num_ranks for member in delivery.members)
