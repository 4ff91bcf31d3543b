"""gloo with faults that a test injects, in the place of the library of every rank (``library.SUBSTITUTE``).

A test writes ``CALL:FAULT`` into a file below ``ASYNC_RL_FAULTS``. It names a rank: the process reads its own name from
the variable ``FAULTY_NAME`` (the broadcaster has none, so it is "broadcaster"). The rank's next such call takes the
fault, and removes the file. The faults:

- ``progress``: the call returns, and ``state`` is False from then on.
- ``raise``: the call raises.
- ``async``: the call returns, and ``state`` raises from then on.
- ``stall``: the call returns without having done anything, and no event is done from then on.
- ``hang``: the call does not return, and no later one does either, ``abort`` included.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from async_rl.weights.collective.gloo import GlooLibrary
from async_rl.weights.collective.library import Endpoint

FAULTS = ("progress", "raise", "async", "stall", "hang")


def file_of(directory: Path, name: str) -> Path:
    return directory / f"library.{name}"


class FaultyLibrary:
    """Implements ``library.Library``."""

    device = torch.device("cpu")

    def __init__(self, endpoint: Endpoint) -> None:
        self._gloo = GlooLibrary(endpoint)
        self._file = file_of(Path(os.environ["ASYNC_RL_FAULTS"]), os.environ.get("FAULTY_NAME", "broadcaster"))
        self._fault = ""

    def unique_id(self) -> bytes:
        return self._gloo.unique_id()

    def init(self, unique_id: bytes, rank: int, size: int, timeout_s: float) -> None:
        if not self._goes_wrong("init"):
            self._gloo.init(unique_id, rank, size, timeout_s)

    def state(self) -> bool:
        if self._fault == "async":
            raise RuntimeError("injected: a peer is gone")
        return self._fault != "progress" and (self._fault == "stall" or self._gloo.state())

    def broadcast(self, memory: Tensor, timeout_s: float, *, after: Any = None) -> None:
        if not self._goes_wrong("broadcast"):
            self._gloo.broadcast(memory, timeout_s, after=after)

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        return self._gloo.allocate(num_bytes, device)

    def copy(self, target: Tensor, source: Tensor, *, after: Any = None) -> Any:
        return self._gloo.copy(target, source, after=after)

    def event(self) -> Any:
        return self._gloo.event()

    def done(self, event: Any) -> bool:
        return self._fault != "stall" and self._gloo.done(event)

    def abort(self) -> None:
        self._goes_wrong("abort")
        self._gloo.abort()

    def _goes_wrong(self, call: str) -> bool:
        """Whether this call takes a fault, after it has been injected."""
        planned, _, fault = self._file.read_text().partition(":") if self._file.exists() else ("", "", "")
        if planned == call and not self._fault:
            self._file.unlink()
            self._fault = fault
        elif self._fault == "hang":
            pass
        else:
            return False
        if self._fault == "hang":
            signal.sigwait([])
        if self._fault == "raise":
            raise RuntimeError("injected")
        return True
