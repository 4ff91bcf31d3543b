"""Between a generator and the threads that prepare versions in vLLM's workers: commands and reports by pipes. No torch.

What vLLM's own calls carry is served between two decode steps and holds them up; these pipes go past its engine. They
have no name in any file system: the workers, processes of the same user, open them through ``/proc``. Commands are the
lines ``prepare NUMBER`` and ``release``. A report is a line of JSON, ``{"rank", "number", "error"}``, written at once.
"""

from __future__ import annotations

import json
import os
import select
import time

from async_rl.errors import WeightsError

LONGEST_ERROR = 1500
"""Characters, ASCII: a report of less than 4096 bytes is written to a pipe whole, never mixed with another worker's."""


class PrepareChannel:
    """The generator's ends: one pipe of commands to each of ``num_workers`` workers, one of reports from all."""

    def __init__(self, num_workers: int, *, limit_s: float) -> None:
        self._limit_s = limit_s
        # All ends stay open here, so no pipe ends before a worker has opened it.
        self._commands = [os.pipe2(os.O_CLOEXEC) for _ in range(num_workers)]
        self._reports = os.pipe2(os.O_CLOEXEC)
        self._received = b""
        self._errors: dict[int, str] = {}
        self._deadline_s = 0.0
        self.number = 0
        """Of the newest preparation."""

    @property
    def paths(self) -> dict[str, str | list[str]]:
        """Where the workers open their ends: fields of ``vllm_weights.SharedInit``."""
        own = f"/proc/{os.getpid()}/fd"
        commands = [f"{own}/{read_fd}" for read_fd, _ in self._commands]
        return {"command_paths": commands, "report_path": f"{own}/{self._reports[1]}"}

    def prepare(self) -> None:
        """Have every worker prepare what lies in shared memory. Older preparations are passed over from now on."""
        self.number += 1
        self._errors = {}
        self._deadline_s = time.monotonic() + self._limit_s
        self._command(f"prepare {self.number}")

    def release(self) -> None:
        """Have every worker free the memory of what was swapped out."""
        self._command("release")

    def _command(self, line: str) -> None:
        for _, write_fd in self._commands:
            os.write(write_fd, f"{line}\n".encode())

    def wait(self, timeout_s: float) -> bool:
        """Whether a worker is still at it; waits for a report for at most ``timeout_s``.

        Raises:
            WeightsError: all have reported, and one has failed; or they take longer than ``limit_s``.
        """
        num_workers = len(self._commands)
        if len(self._errors) < num_workers and select.select([self._reports[0]], [], [], timeout_s)[0]:
            self._received += os.read(self._reports[0], 1 << 16)
            *lines, self._received = self._received.split(b"\n")
            for report in map(json.loads, lines):
                if report["number"] == self.number:
                    self._errors[report["rank"]] = report["error"]
        if len(self._errors) < num_workers:
            if time.monotonic() > self._deadline_s:
                missing = sorted(set(range(num_workers)) - self._errors.keys())
                raise WeightsError(f"vLLM's workers {missing} did not prepare a version within {self._limit_s:.0f} s")
            return True
        if failed := [f"worker {rank}: {error}" for rank, error in sorted(self._errors.items()) if error]:
            raise WeightsError(f"vLLM could not prepare a version, and keeps the one it has: {'; '.join(failed)}")
        return False

    def close(self) -> None:
        """End the workers' threads, too, once no other process has the pipes of commands open."""
        for pipe in (*self._commands, self._reports):
            for fd in pipe:
                os.close(fd)


def write_report(fd: int, *, rank: int, number: int, error: str) -> None:
    """A worker's report; ``error`` is empty if it is ready."""
    plain = error.encode("ascii", "replace").decode()[:LONGEST_ERROR]
    os.write(fd, (json.dumps({"rank": rank, "number": number, "error": plain}) + "\n").encode())
