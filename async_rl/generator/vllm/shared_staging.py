"""Shared memory through which vLLM's workers get the tensors of one version from the generator. No torch.

The memory has no name in a file system. The workers run as the same user and open it through ``/proc``. The generator
writes a version there while the engine decodes; every worker maps the same pages once. The memory is an anonymous file
of the generator. The kernel frees it when the last process that uses it ends.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from async_rl.errors import WeightsError
from async_rl.weights.manifest import ALIGNMENT
from async_rl.weights.memory import host_memory

if TYPE_CHECKING:
    from torch import Tensor

Row = tuple[str, str, list[int], int]
"""Name, torch's name of the dtype, shape, offset in bytes. Plain data, because it travels to other processes."""


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
        self._views = tensors_in(map_memory(self.path, self.size_bytes), self.rows)

    def close(self) -> None:
        """Give the memory up. Processes that have mapped it keep it until they end."""
        self._views = {}
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def map_memory(path: str, size_bytes: int, *, pinned: bool = False) -> Tensor:
    """Return the shared memory at ``path``, uint8 [``size_bytes``]. ``pinned`` as in ``host_memory``."""
    with open(path, "r+b") as file:
        return host_memory(mmap.mmap(file.fileno(), size_bytes), pinned=pinned)


def tensors_in(memory: Tensor, rows: Sequence[Row]) -> dict[str, Tensor]:
    """Return tensors by name that are views into ``memory``. Later writes to the memory change them."""
    import torch

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
