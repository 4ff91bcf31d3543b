"""Parameters that are divided over a group of ranks, and modules that compute with this rank's part of them.

Used by ``tensor_parallel.py`` and ``expert_parallel.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

Part = Callable[[Tensor], Tensor | None]
"""What a module computes with instead of a parameter."""


def divide_parameters(module: nn.Module, mesh: DeviceMesh, dim: int, *, only: str = "") -> dict[str, Part]:
    """Divide the module's own parameters along ``dim`` over the ranks of ``mesh``: they become DTensors.

    Args:
        module: has parameters with values, or on the meta device; DTensors stay as they are.
        mesh: of one dimension.
        dim: of the parameters.
        only: the name of the one parameter to divide; all if empty.

    Returns:
        What the module computes with instead of them, for ``with_parts``.
    """
    names = [name for name, _ in module.named_parameters(recurse=False) if only in ("", name)]
    for name in names:
        parameter = cast(nn.Parameter, getattr(module, name))
        if not isinstance(parameter, DTensor):
            # Every rank has the whole parameter, or its shape only: no values are sent.
            part = distribute_tensor(parameter.detach(), mesh, [Shard(dim)], src_data_rank=None)
            setattr(module, name, nn.Parameter(part, requires_grad=parameter.requires_grad))
    return dict.fromkeys(names, lambda parameter: cast(DTensor, parameter).to_local())


def with_parts(module: nn.Module, parts: Mapping[str, Part]) -> Callable[..., Tensor]:
    """Return the module's forward function, with ``parts`` of its parameters in their place.

    While it runs, they hide the parameters of the same names, which stay registered.
    """
    inner = module.forward

    def forward(*args: Tensor) -> Tensor:
        own = vars(module)
        own.update({name: part(module.get_parameter(name)) for name, part in parts.items()})
        try:
            return inner(*args)
        finally:
            for name in parts:
                del own[name]

    return forward


def set_forward(module: nn.Module, forward: Callable[..., Tensor]) -> None:
    """Let ``module`` compute by ``forward``. torch.compile leaves it uncompiled: it can't trace hidden parameters."""
    module.forward = torch.compiler.disable(forward)
