"""Generators' newest answers to probes, held for the learner. Bounded, kept in memory only.

They are lost with the server: the learner asks again at a later version. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from async_rl.errors import WireError
from async_rl.queue.protocol import MAX_PROBE_BYTES
from async_rl.queue.server.registry import MAX_GENERATORS


@dataclass(frozen=True, slots=True)
class _Held:
    lineage: str
    version: int
    data: bytes


class ParityAnswers:
    """One a generator, encoded as it came (``parity.encode_answer``)."""

    def __init__(self) -> None:
        self._newest: dict[str, _Held] = {}

    def put(self, generator_id: str, lineage: str, version: int, data: bytes) -> None:
        """Keep an answer in place of that generator's last.

        Raises:
            WireError: it is too large.
        """
        if len(data) > MAX_PROBE_BYTES:
            raise WireError(f"expected an answer of at most {MAX_PROBE_BYTES} bytes, got {len(data)}")
        self._newest.pop(generator_id, None)
        self._newest[generator_id] = _Held(lineage, version, data)
        if len(self._newest) > MAX_GENERATORS:
            del self._newest[next(iter(self._newest))]

    def since(self, lineage: str, version: int) -> dict[str, bytes]:
        """The answers of ``version`` or later, by generator."""
        return {
            who: held.data for who, held in self._newest.items() if held.lineage == lineage and held.version >= version
        }
