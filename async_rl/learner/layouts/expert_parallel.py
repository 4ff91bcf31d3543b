"""Expert parallelism: each rank of a group has some experts of every layer, and tokens are sent to these ranks.

Called by ``sharding.py``. The ranks of a group have tokens of their own, as under FSDP. A rank sends each token to the
ranks of its experts, which compute it and send the results back (all-to-all). The gradients take the same way. So a
rank's experts get the gradients of the tokens of the whole group, and FSDP adds up those of ranks with the same experts
only. The other parameters are sharded as without this.

Shape letters: N = tokens, d = hidden size, K = experts for each token, E = experts of a layer, P = pairs of one of this
rank's tokens and one of its experts, R = pairs that this rank computes, G = ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from async_rl.errors import ModelError
from async_rl.learner.layouts.experts import compute_pairs, find_experts
from async_rl.learner.layouts.local_parts import divide_parameters, set_forward, with_parts
from async_rl.learner.model.policy_model import PolicyModel

KEY = "parallel.experts"


class _Exchange(torch.autograd.Function):
    """Rows that the ranks of a group send each other. Their gradients are sent back."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchanged(rows, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (the decorator hides the parameters' names)
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, None, None, None]:
        return _exchanged(grad_outputs[0], ctx.received, ctx.sent, ctx.group), None, None, None


class _ScaledGradient(torch.autograd.Function):
    """The tensor itself. Its gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (the decorator hides the parameters' names)
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, None]:
        return grad_outputs[0] * ctx.factor, None


def _exchanged(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Send ``sent[i]`` rows to rank i of the group, one after the other. Return ``received[i]`` rows of each rank."""
    result = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(result, rows.contiguous(), list(received), list(sent), group=group)
    return result


def experts_to_divide(policy: PolicyModel, size: int) -> set[nn.Module]:
    """Return the modules of ``policy`` for ``divide_experts``.

    Raises:
        ModelError: there are none, or their experts can't be divided over ``size`` ranks.
    """
    found = find_experts(policy, size, KEY)
    if not found:
        raise ModelError(
            f"{KEY}: expected a model with experts that transformers' plans name, got "
            f"{type(policy.causal_lm).__name__}; leave the key out"
        )
    return set(found)


def divide_experts(experts: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the experts of a module over the ranks of ``mesh``. It then computes tokens on the ranks that have their
    experts.
    """
    module: Any = experts
    size, group = mesh.size(), mesh.get_group()
    parts = dict.fromkeys(divide_parameters(experts, mesh, 0), lambda parameter: _own(parameter, size))
    inner, num_own = with_parts(experts, parts), int(module.num_experts) // size
    module.num_experts = num_own

    def forward(hidden_Nd: Tensor, chosen_NK: Tensor, weights_NK: Tensor) -> Tensor:
        chosen_P = chosen_NK.flatten()
        order_P = chosen_P.argsort(stable=True)
        token_P = order_P // chosen_NK.shape[1]
        counts_GE = chosen_P.bincount(minlength=size * num_own).view(size, num_own)
        others_GE = _exchanged(counts_GE, [1] * size, [1] * size, group)
        # The host must know how much to send: it waits for the device here.
        sent, received = torch.stack([counts_GE.sum(1), others_GE.sum(1)]).tolist()
        exchange: Callable[..., Tensor] = _Exchange.apply
        rows_Rd = exchange(hidden_Nd[token_P], sent, received, group)
        own_R = torch.arange(num_own, device=chosen_P.device).repeat(size).repeat_interleave(others_GE.flatten())
        out_Rd = compute_pairs(inner, rows_Rd, own_R, torch.ones_like(rows_Rd[:, 0]))
        out_Pd = exchange(out_Rd, received, sent, group) * weights_NK.flatten()[order_P][:, None]
        return torch.zeros_like(hidden_Nd).index_add(0, token_P, out_Pd.to(hidden_Nd.dtype))

    set_forward(experts, forward)


def _own(parameter: Tensor, size: int) -> Tensor:
    """Return this rank's experts. FSDP averages over that many fewer ranks than for the other parameters, so their
    gradient is divided by ``size``.
    """
    return cast(Tensor, _ScaledGradient.apply(cast(DTensor, parameter).to_local(), 1 / size))
