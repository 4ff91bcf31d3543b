"""A version made ready in a vLLM worker while it decodes: a thread that fills a double buffer.

The worker's own thread serves one call of vLLM after the other, decode steps among them. The thread here serves the
generator's commands (``channel``), so a preparation holds no step up but by the processor time, the memory
bandwidth and Python's lock that it takes. Only ``swap`` is called between two steps; it swaps pointers.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from typing import Any

import torch
from vllm.config import set_current_vllm_config  # pyright: ignore[reportMissingImports]

from async_rl.generator.vllm.channel import write_report
from async_rl.generator.vllm.double_buffer import DoubleBuffer, release

_SWITCH_S = 0.0005
"""For how long the thread may keep Python's lock from a decode step that wants it; Python's default is ten times it."""


class Preparer:
    """One worker's. ``tensors`` are views into the shared memory; what lies there is prepared."""

    def __init__(
        self,
        model: Any,
        vllm_config: Any,
        tensors: Mapping[str, torch.Tensor],
        *,
        rank: int,
        command_path: str,
        report_path: str,
    ) -> None:
        self._model, self._config, self._tensors = model, vllm_config, tensors
        self._rank = rank
        self._report_fd = os.open(report_path, os.O_WRONLY)
        self._ready: tuple[int, DoubleBuffer] | None = None
        self._old: list[Any] = []
        sys.setswitchinterval(_SWITCH_S)
        threading.Thread(target=self._serve, args=(command_path,), name="prepare-weights", daemon=True).start()

    def swap(self, number: int) -> None:
        """Give the model what was prepared as ``number``. The worker's own thread calls it, between two steps.

        Raises:
            RuntimeError: that is not ready; the model is as it was.
        """
        if self._ready is None or self._ready[0] != number:
            raise RuntimeError(f"expected preparation {number} to be ready, got {self._ready and self._ready[0]}")
        (_, copy), self._ready = self._ready, None
        self._old.append(copy.swap())

    def _serve(self, command_path: str) -> None:
        with open(command_path, encoding="ascii") as commands:
            for line in commands:
                match line.split():
                    case ["prepare", number]:
                        self._prepare(int(number))
                    case ["release"]:
                        self._release()

    def _release(self) -> None:
        while self._old:
            release(self._old.pop())

    def _prepare(self, number: int) -> None:
        error = ""
        try:
            # What was swapped out, or made ready and not taken, makes room first.
            self._release()
            self._ready = None
            # vLLM keeps it in a global of the process, and nothing sets another one once the engine runs.
            with set_current_vllm_config(self._config):
                copy = DoubleBuffer(self._model)
                copy.load(self._tensors)
            self._ready = number, copy
        except Exception as failure:  # the boundary: the generator decides, and the old weights are as they were
            error = f"{type(failure).__name__}: {failure}"
        write_report(self._report_fd, rank=self._rank, number=number, error=error)
