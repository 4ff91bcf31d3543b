"""Counts the bytes of tensors that are alive at once, on any device, also on ``meta``, where nothing is computed."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """``peak`` is the largest number of bytes of tensors made under the mode that were alive after an operation.

    Memory that an operation takes and returns inside is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._older: set[int] = set()
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._live = {key: found for key, found in self._live.items() if not found[0].expired()}
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        self._older |= given - self._live.keys()
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage is not None and storage._cdata not in self._older:
                self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return out
