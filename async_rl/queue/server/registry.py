"""The generators that the server knows: the connection of each, its last lease answer and its newest probe answer.

Generator ids come from peers, so everything that is stored by id is stored here, with one limit on their number. Pure;
time comes as ``now``, in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from async_rl.errors import QueueError, WireError
from async_rl.queue.messages import LeasesGranted

MAX_GENERATORS = 4096
FORGET_S = 300.0
"""A generator that was silent for so long, or that left, is removed when another needs its place."""
MAX_ANSWER_BYTES = 32 << 10


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """A generator's answer to the probe of one version, still encoded (``parity.encode_answer``)."""

    lineage: str
    version: int
    data: bytes


@dataclass(slots=True)
class Generator:
    """What the server knows about one generator.

    Attributes:
        peer: the routing id of its connection; None if unknown.
        granted: the id of its last lease request, and the answer.
        told: the version it had active and the one it was last told to activate.
        answer: its newest probe answer. Not journaled: after a restart the learner asks again at a later version.
    """

    seen_at: float
    peer: bytes | None = None
    has_left: bool = False
    granted: tuple[str, LeasesGranted] | None = None
    told: tuple[Any, ...] | None = None
    answer: ProbeAnswer | None = None


class GeneratorRegistry:
    """Generators by id, at most ``max_generators``."""

    def __init__(self, max_generators: int = MAX_GENERATORS) -> None:
        self._max_generators = max_generators
        self._generators: dict[str, Generator] = {}
        self._by_peer: dict[bytes, str] = {}
        self.num_changes = 0
        """Counts changes of ``granted``."""

    def __len__(self) -> int:
        return len(self._generators)

    def seen(self, generator_id: str, now: float, peer: bytes | None = None) -> Generator:
        """The generator that sent a message, registered if it is new. With ``peer``, its answers go there from now on.

        Raises:
            WireError: that connection belongs to another generator. QueueError: there is no place for a new one.
        """
        if peer is not None and (known := self._by_peer.get(peer, generator_id)) != generator_id:
            # Otherwise one peer could fill the registry, and be sent every notice once for each of its names.
            raise WireError(f"expected messages of generator {known!r} on this connection, got one of {generator_id!r}")
        generator = self._generators.get(generator_id)
        if generator is None:
            self._make_room(now)
            generator = self._generators[generator_id] = Generator(now)
        generator.seen_at = max(now, generator.seen_at)
        if peer is not None and generator.peer != peer:
            self._unbind(generator)
            generator.peer = peer
            self._by_peer[peer] = generator_id
        return generator

    def peer_of(self, generator_id: str) -> bytes | None:
        """The connection of this generator's last message."""
        generator = self._generators.get(generator_id)
        return None if generator is None else generator.peer

    def grant(self, generator: Generator, request_id: str, answer: LeasesGranted) -> None:
        """Keep the answer to the generator's last lease request, in case the request is repeated."""
        generator.granted = (request_id, answer)
        self.num_changes += 1

    def granted(self) -> dict[str, tuple[str, LeasesGranted]]:
        """The last lease request of every generator, with its answer."""
        return {name: g.granted for name, g in self._generators.items() if g.granted is not None}

    def answers_since(self, lineage: str, version: int) -> dict[str, bytes]:
        """The probe answers of ``version`` or later, by generator."""
        answers = {name: g.answer for name, g in self._generators.items() if g.answer is not None}
        return {name: a.data for name, a in answers.items() if a.lineage == lineage and a.version >= version}

    def leave(self, generator_id: str) -> None:
        """The generator said goodbye, or is replaced."""
        generator = self._generators.get(generator_id)
        if generator is not None:
            self._unbind(generator)
            generator.has_left, generator.granted, generator.told = True, None, None
            self.num_changes += 1

    def has_left(self, generator_id: str) -> bool:
        generator = self._generators.get(generator_id)
        return generator is not None and generator.has_left

    def forget_answers(self) -> None:
        """A new learner attached: do not repeat lease answers of the last one's time."""
        for generator in self._generators.values():
            generator.granted = generator.told = None
        self.num_changes += 1

    def _unbind(self, generator: Generator) -> None:
        if generator.peer is not None:
            self._by_peer.pop(generator.peer, None)
        generator.peer = None

    def _make_room(self, now: float) -> None:
        if len(self._generators) < self._max_generators:
            return
        for name, generator in list(self._generators.items()):
            if generator.has_left or now - generator.seen_at > FORGET_S:
                self._unbind(self._generators.pop(name))
                self.num_changes += 1
        if len(self._generators) >= self._max_generators:
            raise QueueError(
                f"expected at most {self._max_generators} generators, and as many are registered. One that is silent "
                f"for {FORGET_S:.0f} s loses its place: try again later, and see `async-rl status` for the list"
            )
