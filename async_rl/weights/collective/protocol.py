"""The messages between the learner and its broadcaster. They travel over the pipe of ``weights.server_process``.

The broadcaster handles the learner's messages in their order, one at a time. It answers ``Configure`` with ``Loaded``,
``Connect`` with ``Rendezvous`` and then ``Connected``, ``Broadcast`` with ``Sent``, and ``Disconnect`` with
``Disconnected``.
"""

from __future__ import annotations

import msgspec

from async_rl.weights.server_process import MapSlot


class Configure(msgspec.Struct, frozen=True):
    """What the broadcaster must know from its start. See ``transport.CollectiveSettings`` for the fields."""

    transport: str
    host: str
    stall_s: float
    device: str | None


class Connect(msgspec.Struct, frozen=True):
    """Begin a new communicator of ``size`` ranks."""

    size: int


class Broadcast(msgspec.Struct, frozen=True):
    """Broadcast the version in ``slot`` over the communicator, in chunks of ``chunk_bytes``, within ``deadline_s``."""

    attempt: int
    slot: int
    chunk_bytes: int
    deadline_s: float


class Disconnect(msgspec.Struct, frozen=True):
    """Close the communicator."""


class Loaded(msgspec.Struct, frozen=True):
    """The broadcaster has loaded its library's code."""


class Rendezvous(msgspec.Struct, frozen=True):
    """What the other ranks need to connect (see ``Library.unique_id``). ``error`` is empty if there was none."""

    unique_id: bytes
    error: str


class Connected(msgspec.Struct, frozen=True):
    """The broadcaster waits for the other ranks no longer: they have all come, or it has given up."""


class Sent(msgspec.Struct, frozen=True):
    """The broadcast of ``attempt`` has ended after ``elapsed_s`` seconds. ``error`` is empty if it succeeded."""

    attempt: int
    elapsed_s: float
    error: str


class Disconnected(msgspec.Struct, frozen=True):
    """The communicator is closed."""


LearnerMessage = MapSlot | Configure | Connect | Broadcast | Disconnect
BroadcasterMessage = Loaded | Rendezvous | Connected | Sent | Disconnected
TO_BROADCASTER: tuple[type[LearnerMessage], ...] = (MapSlot, Configure, Connect, Broadcast, Disconnect)
TO_LEARNER: tuple[type[BroadcasterMessage], ...] = (Loaded, Rendezvous, Connected, Sent, Disconnected)
