"""Traces of chosen steps (``log.profile``): where rank 0 of the learner spends its time, operation by operation.

The trainer calls ``StepProfiler.step`` around each step, from the wait for its groups to its records. A trace is the
JSON of Chrome's trace viewer, which Perfetto (https://ui.perfetto.dev) and ``chrome://tracing`` show. The parts of a
step are ranges in it: ``wait``, ``prepare``, ``train``, ``publish``, and within ``train`` those of
``engine.phases.Phase``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

logger = logging.getLogger(__name__)


class StepProfiler:
    """Writes a trace of each of ``steps`` into ``directory``. Other steps cost nothing."""

    def __init__(self, steps: range, directory: Path) -> None:
        self._steps, self._directory = steps, directory

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Trace the ``with`` block if it is one of the steps, and write ``step-NNNNNN.json.gz``.

        A block that raises leaves no file.
        """
        if number not in self._steps:
            yield
            return
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
        with profile(activities=activities) as trace:
            yield
        self._directory.mkdir(exist_ok=True)
        path = self._directory / f"step-{number:06d}.json.gz"
        partial = self._directory / f".{path.name}"
        trace.export_chrome_trace(str(partial))
        os.replace(partial, path)
        logger.info("step %d: wrote the trace %s", number, path)
