"""Counts the bytes of tensors that are alive at once, on any device, also on ``meta``, where nothing is computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """``peak`` is the largest number of bytes of tensors made under the mode that were alive after an operation.

    Memory that an operation takes and returns inside is not seen. Of a sharded tensor this rank's part counts. An
    emptied storage, as FSDP empties those of gathered parameters, counts nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._older: set[int] = set()
        self._live: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._live = {key: found for key, found in self._live.items() if not found.expired()}
        self._older |= {s._cdata for s in _storages((args, kwargs))} - self._live.keys()
        out = func(*args, **(kwargs or {}))
        self._live |= {s._cdata: StorageWeakRef(s) for s in _storages(out) if s._cdata not in self._older}
        self.peak = max(self.peak, sum(_num_bytes(found) for found in self._live.values()))
        return out


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    for tensor in tree_leaves(tree):
        if isinstance(tensor, Tensor):
            yield (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()


def _num_bytes(found: StorageWeakRef) -> int:
    storage = torch.UntypedStorage._new_with_weak_ptr(found.cdata)  # pyright: ignore[reportAttributeAccessIssue]
    return 0 if storage is None else storage.nbytes()


def local_bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of this rank's parts of ``tensors``."""
    return sum((tensor._local_tensor if isinstance(tensor, DTensor) else tensor).nbytes for tensor in tensors)
