"""A program, its limits and the result of a run. Shared by both sides of the launcher's socket."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Outcome = Literal["ended", "timed_out"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one run of one program.

    Attributes:
        time_s: wall-clock seconds, and nearly so of CPU time.
        memory_bytes: address space.
        output_bytes: of standard output, and of any file it writes.
        scratch_bytes: of all files in its private directory together.
        max_threads: the main one included. A program can't start processes.
    """

    time_s: float
    memory_bytes: int
    output_bytes: int
    scratch_bytes: int
    max_threads: int

    def to_record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Limits:
        return cls(**record)


@dataclass(frozen=True, slots=True)
class Program:
    """A Python program and what it is asked once.

    With ``function``, the program is run as a module, then its function of that name (or the method of its class
    ``Solution``) is called with ``arguments``, a JSON list; what it returns is the output, as JSON. Without, it is run
    as a script that reads ``stdin``. ``prelude`` gives it the names of common modules without an import.
    """

    source: str
    stdin: bytes = b""
    function: str | None = None
    arguments: str = "[]"
    prelude: bool = False


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of one run.

    Attributes:
        outcome: ``timed_out`` if it was killed at its time limit.
        exit_code: 0 if all went well; negative: killed by that signal. The program can choose it.
        output: standard output, or the JSON of what was returned; cut at ``output_bytes``.
        stderr_tail: the end of standard error, for people.
        wall_s: from the request to the end of its last process.
        cpu_s: of all its processes that were waited for.
    """

    outcome: Outcome
    exit_code: int
    output: bytes
    stderr_tail: str
    wall_s: float
    cpu_s: float


FAILED_EXIT = 1
"""The program raised; Python's own code for that."""

UNUSABLE_EXIT = 121
"""It does not compile, or has no such function."""

UNWRITABLE_EXIT = 120
"""Its output could not be written in the end; Python's own code for that."""
