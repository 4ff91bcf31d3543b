"""A version's tensors in memory that an engine's processes share with the generator, so that a swap is a copy.

The generator writes (``SharedStaging``), outside the engine's step; every worker process of the engine maps the same
pages once (``map_tensors``). The memory has no name in any file system: it is an anonymous file of the generator,
opened by the workers through ``/proc``, and goes with the last process that holds it, however that one ends.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from async_rl.errors import WeightsError
from async_rl.weights.manifest import ALIGNMENT

if TYPE_CHECKING:
    from torch import Tensor

Row = tuple[str, str, list[int], int]
"""Name, torch's name of the dtype, shape, offset in bytes: plain data, for it travels to the engine's processes."""


class SharedStaging:
    """Room for one version. The layout is that of the first ``write``; later versions have the same tensors."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("async-rl-weights", os.MFD_CLOEXEC)
        self._views: dict[str, Tensor] = {}
        self.rows: list[Row] = []
        self.size_bytes = 0

    @property
    def path(self) -> str:
        """Where the processes of this user on this machine can open the memory."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def write(self, weights: Mapping[str, Tensor]) -> None:
        """Copy ``weights`` (host tensors) in.

        Raises:
            WeightsError: they are not the tensors of the version before; or there is no memory for them.
        """
        if not self.rows:
            self._lay_out(weights)
        expected = {name: (dtype, tuple(shape)) for name, dtype, shape, _ in self.rows}
        got = {name: (_dtype_name(tensor), tuple(tensor.shape)) for name, tensor in weights.items()}
        if got != expected:
            odd = sorted(name for name in got.keys() | expected.keys() if got.get(name) != expected.get(name))
            raise WeightsError(
                f"expected the tensors of the version before, got others: {odd[0]!r} was {expected.get(odd[0])}, is "
                f"{got.get(odd[0])}"
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
            # Reserved at once: pages that are missing later would end the process by a signal.
            os.posix_fallocate(self._fd, 0, max(1, end))
        except OSError as error:
            raise WeightsError(f"no shared memory for {end} bytes of weights: {error.strerror}") from error
        self.rows, self.size_bytes = rows, max(1, end)
        self._views = map_tensors(self.path, self.size_bytes, self.rows)

    def close(self) -> None:
        """Let go of the memory; processes that have mapped it keep it until they end."""
        self._views = {}
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def map_tensors(path: str, size_bytes: int, rows: Sequence[Row]) -> dict[str, Tensor]:
    """Views by name into the memory at ``path``; they show whatever is written there later, too."""
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
