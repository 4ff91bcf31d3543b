"""A case of the smoke test: what it needs, and how it reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

Outcome = Literal["passed", "FAILED", "not run"]


class NotRunError(Exception):
    """The machine can't run this case. The message says what is missing."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A number that a case measured, its unit ("s" and "bytes" are compared by ``benchmarks.baselines``), and what the
    case demands of it, in words; empty if nothing.
    """

    value: float
    unit: str
    bound: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a case runs.

    Attributes:
        device: the first CUDA device, or the CPU.
        directory: an empty directory for the case's files.
        figures: what the case has measured, by name; it adds to them.
    """

    device: torch.device
    directory: Path
    figures: dict[str, Figure] = field(default_factory=dict)

    @property
    def has_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> str:
        """What the learner computes in here, as ``model.dtype`` says it. A CPU computes in bfloat16 slowly."""
        return "bfloat16" if self.has_cuda else "float32"


@dataclass(frozen=True, slots=True)
class Case:
    """One path of the software.

    Attributes:
        name: its name on the command line and in the table.
        check: runs it, and returns in a few words what was found. Raises AssertionError if the path is wrong.
        num_devices: how many CUDA devices it needs.
        package: a package that it needs, besides the dependencies of async-rl.
        deadline_s: after so many seconds it has failed, and its processes are killed.
        after: the case that must run before it; empty if none.
    """

    name: str
    check: Callable[[Machine], str]
    num_devices: int = 0
    package: str = ""
    deadline_s: float = 120.0
    after: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a case.

    Attributes:
        name: the case.
        outcome: whether it passed.
        detail: what was found, or why it failed or did not run.
        took_s: seconds.
        device_bytes: peak memory of torch on the CUDA device; 0 if other processes used it, or none.
        figures: what it measured.
    """

    name: str
    outcome: Outcome
    detail: str
    took_s: float
    device_bytes: int = 0
    figures: dict[str, Figure] = field(default_factory=dict)
