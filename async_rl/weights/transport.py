"""The interface of a way by which versions travel, on both sides, and which way a run takes. No torch.

``nccl`` and ``gloo`` are one pair (``collective_sender``, ``collective_inlet``): one send for all members of an epoch.
``tcp`` is the other (``stream_sender``, ``stream_inlet``): each member pulls. The publisher decides by ``Rounds`` who
takes which; the receiver does what it is told. Neither knows how the bytes move.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal, Protocol, TypeVar

from async_rl.process.fault_points import fault_point
from async_rl.weights import control
from async_rl.weights.manifest import Manifest

if TYPE_CHECKING:
    from async_rl.weights.buffers import Buffer, Buffers
    from async_rl.weights.scheduler import Member
    from async_rl.weights.staging import StagedVersion

TransportName = Literal["nccl", "gloo", "tcp"]
Tell = Callable[[bytes, control.PublisherMessage], None]
"""Sends to a member over the control channel."""


def choose_transport(setting: str, *, has_cuda: bool, is_trusted: bool) -> TransportName:
    """What ``weights.transport`` means here.

    ``auto`` is a collective where nobody but us is on the network (one host, or a network that the user called
    trusted), for collectives authenticate nobody; else ``tcp``.
    """
    match setting:
        case "nccl" | "gloo" | "tcp":
            return setting
        case "auto" if is_trusted:
            return "nccl" if has_cuda else "gloo"
        case "auto":
            return "tcp"
        case _:
            raise ValueError(f"expected 'auto', 'nccl', 'gloo' or 'tcp', got {setting!r}")


@dataclass(frozen=True, slots=True)
class Delivery:
    """One version to some members, until ``deadline`` (monotonic clock). The publisher keeps its bytes till the end.

    ``epoch`` is the communicator's number where there is one; ``build``: it is to be made first. ``is_first``: the
    members were told of nothing yet.
    """

    attempt: int
    staged: StagedVersion
    members: tuple[Member, ...]
    deadline: float
    epoch: int = 0
    build: bool = False
    is_first: bool = False


class Outlet(Protocol):
    """The learner's side. The publisher's thread alone calls it; nothing here waits."""

    def deliver(self, delivery: Delivery, tell: Tell) -> None:
        """Tell each member what it has to know, and begin."""
        ...

    def end(self, attempt: int, *, intact: bool) -> None:
        """Every member has answered, or nobody waits for its answer any more. ``intact``: all went well."""
        ...

    def close(self, timeout_s: float) -> bool:
        """Let go of everything; whether what was under way ended within ``timeout_s``."""
        ...


def bucket_received() -> None:
    """Every inlet says so after each bucket: the middle of a transfer, where tests let a generator die."""
    fault_point("generator.receiving")


OrderT = TypeVar("OrderT", contravariant=True)


@dataclass(frozen=True, slots=True)
class Filled:
    """A buffer has what its manifest says. ``num_corrupt`` buckets came again, for they did not match at first."""

    wire_bytes: int
    num_corrupt: int = 0


class Inlet(Protocol, Generic[OrderT]):
    """The generator's side. The transfer thread alone calls it."""

    def fill(self, order: OrderT, manifest: Manifest, buffer: Buffer, buffers: Buffers, *, deadline: float) -> Filled:
        """Receive the version that was ordered into ``buffer``, whole and verified.

        Raises:
            CorruptWeightsError: what came does not match its digests.
            WeightsError: it did not come.
        """
        ...

    def close(self) -> None:
        """Let go of all connections."""
        ...
