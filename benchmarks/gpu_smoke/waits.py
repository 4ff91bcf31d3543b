"""Finds operations that would make the host wait for the device, also where there is no device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class Waits(TorchDispatchMode):
    """Notes in ``seen`` the operations whose result, or its shape, the host must read from the device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = func in (aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default)
        if func in (aten.index.Tensor, aten.index_put_.default):  # as many rows as there are True
            waits = any(isinstance(i, Tensor) and i.dtype == torch.bool for i in args[1])
        if func is aten.repeat_interleave.Tensor:  # as many as the sum of the repeats
            waits = (kwargs or {}).get("output_size") is None
        if waits:
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))
