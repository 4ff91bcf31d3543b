"""Shared memory for the tensors of one version, and pipes for commands, between generator and vLLM's workers. No torch.

Memory and pipes have no names in a file system. The workers run as the same user and open them through ``/proc``.

``SharedStaging`` is the memory. The generator writes a version there while the engine decodes; every worker maps the
same pages once (``map_tensors``), so that a swap is a copy. The memory is an anonymous file of the generator. The
kernel frees it when the last process that uses it ends.

``PrepareChannel`` is the pipes to the threads that prepare versions in the workers. Calls through vLLM's engine are
served between two decode steps, and delay the next step. Commands through these pipes do not delay it. Commands are the
lines ``prepare NUMBER`` and ``release``. A report is a line of JSON, ``{"rank", "number", "error"}``, written at once.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from async_rl.errors import WeightsError
from async_rl.weights.manifest import ALIGNMENT

if TYPE_CHECKING:
    from torch import Tensor

Row = tuple[str, str, list[int], int]
"""Name, torch's name of the dtype, shape, offset in bytes. Plain data, because it travels to other processes."""

LONGEST_ERROR = 1500
"""ASCII characters. A pipe takes a report below 4096 bytes as a whole, so reports of workers never mix."""


class SharedStaging:
    """Shared memory through which the workers get the tensors of one version.

    The first ``write`` fixes names, dtypes and shapes. Later writes must have the same ones and overwrite the memory.
    """

    def __init__(self) -> None:
        self._fd = os.memfd_create("async-rl-weights", os.MFD_CLOEXEC)
        self._views: dict[str, Tensor] = {}
        self.rows: list[Row] = []
        self.size_bytes = 0

    @property
    def path(self) -> str:
        """The path at which other processes of this user on this machine can open the memory."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def write(self, weights: Mapping[str, Tensor]) -> None:
        """Copy ``weights``, tensors of one version on the host, to the shared memory.

        Raises:
            WeightsError: names, dtypes or shapes differ from those of the first write, or there is not enough memory.
        """
        if not self.rows:
            self._lay_out(weights)
        expected = {name: (dtype, tuple(shape)) for name, dtype, shape, _ in self.rows}
        got = {name: (_dtype_name(tensor), tuple(tensor.shape)) for name, tensor in weights.items()}
        if got != expected:
            odd = sorted(name for name in got.keys() | expected.keys() if got.get(name) != expected.get(name))
            raise WeightsError(
                f"expected the same tensors in every version of the weights, but {odd[0]!r} was {expected.get(odd[0])} "
                f"and is {got.get(odd[0])}; this is a bug in async-rl, please report it"
            )
        for name, tensor in weights.items():
            self._views[name].copy_(tensor)

    def _lay_out(self, weights: Mapping[str, Tensor]) -> None:
        end = 0
        rows: list[Row] = []
        for name, tensor in weights.items():
            offset = -(-end // ALIGNMENT) * ALIGNMENT
            rows.append((name, _dtype_name(tensor), list(tensor.shape), offset))
            end = offset + tensor.numel() * tensor.element_size()
        try:
            # Reserve all of it now: a page that is missing later would end the process by a signal.
            os.posix_fallocate(self._fd, 0, max(1, end))
        except OSError as error:
            raise WeightsError(
                f"no shared memory for {end} bytes of weights: {error.strerror}; free or enlarge /dev/shm (docker run "
                f"--shm-size)"
            ) from error
        self.rows, self.size_bytes = rows, max(1, end)
        self._views = map_tensors(self.path, self.size_bytes, self.rows)

    def close(self) -> None:
        """Give the memory up. Processes that have mapped it keep it until they end."""
        self._views = {}
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def map_tensors(path: str, size_bytes: int, rows: Sequence[Row]) -> dict[str, Tensor]:
    """Return tensors by name that are views into the shared memory at ``path``.

    Later writes to the memory change them.
    """
    import torch

    memory = torch.from_file(path, shared=True, size=size_bytes, dtype=torch.uint8)
    views: dict[str, Tensor] = {}
    for name, dtype_name, shape, offset in rows:
        dtype: torch.dtype = getattr(torch, dtype_name)
        size = dtype.itemsize
        for length in shape:
            size *= length
        views[name] = memory[offset : offset + size].view(dtype).view(list(shape))
    return views


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


class PrepareChannel:
    """The generator's ends of the pipes: one pipe for commands to each worker, and one for reports from all of them."""

    def __init__(self, num_workers: int, *, limit_s: float) -> None:
        self._limit_s = limit_s
        # All ends stay open here, so a worker can open its end at any time.
        self._commands = [os.pipe2(os.O_CLOEXEC) for _ in range(num_workers)]
        self._reports = os.pipe2(os.O_CLOEXEC)
        self._received = b""
        self._errors: dict[int, str] = {}
        self._deadline_s = 0.0
        self.number = 0
        """The number of the newest preparation."""

    @property
    def paths(self) -> dict[str, str | list[str]]:
        """Return the ``/proc`` paths at which the workers open the pipes.

        The keys are the fields ``command_paths`` and ``report_path`` of ``weights.SharedInit``.
        """
        own = f"/proc/{os.getpid()}/fd"
        commands = [f"{own}/{read_fd}" for read_fd, _ in self._commands]
        return {"command_paths": commands, "report_path": f"{own}/{self._reports[1]}"}

    def prepare(self) -> None:
        """Tell every worker to prepare the version in shared memory. Ignore reports about earlier ones from now on."""
        self.number += 1
        self._errors = {}
        self._deadline_s = time.monotonic() + self._limit_s
        self._command(f"prepare {self.number}")

    def release(self) -> None:
        """Tell every worker to free the memory of the weights that the last swap replaced."""
        self._command("release")

    def _command(self, line: str) -> None:
        for _, write_fd in self._commands:
            os.write(write_fd, f"{line}\n".encode())

    def wait(self, timeout_s: float) -> bool:
        """Return whether a worker is still preparing weights. Wait at most ``timeout_s`` seconds for a report.

        Raises:
            WeightsError: all workers have reported and one has failed, or they take longer than ``limit_s``.
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
                raise WeightsError(
                    f"vLLM's workers {missing} did not prepare the new weights within {self._limit_s:.0f} s; look for "
                    f"the cause in the generator's log"
                )
            return True
        if failed := [f"worker {rank}: {error}" for rank, error in sorted(self._errors.items()) if error]:
            raise WeightsError(
                f"vLLM could not prepare the new weights and keeps its current version: {'; '.join(failed)}"
            )
        return False

    def close(self) -> None:
        """Close the pipes. That ends the workers' threads, unless another process has the command pipes open."""
        for pipe in (*self._commands, self._reports):
            for fd in pipe:
                os.close(fd)


def write_report(fd: int, *, rank: int, number: int, error: str) -> None:
    """Write a worker's report about preparation ``number`` to the pipe ``fd``.

    ``error`` is empty if the weights are ready.
    """
    plain = error.encode("ascii", "replace").decode()[:LONGEST_ERROR]
    os.write(fd, (json.dumps({"rank": rank, "number": number, "error": plain}) + "\n").encode())
