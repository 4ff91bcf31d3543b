"""Muon (Jordan 2024, https://kellerjordan.github.io/posts/muon; arXiv:2502.16982): steps by orthogonalised momentum.

The update of a matrix is its momentum with all singular values brought near 1. That needs the whole matrix. So ranks
exchange the shards of as many matrices as there are ranks: each rank gets one whole matrix, orthogonalises it, and
sends the shards back. The exchange takes the memory of one matrix. A stack of matrices, such as a layer's experts
[E, O, I], is orthogonalised one by one, and not exchanged if its ranks divide only the stack.

Called by ``optimizer.py``. Shape letters: M = matrices of one exchange, O, I = rows and columns, E = experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from async_rl.config.learner import OptimizerConfig
from async_rl.learner.model.policy_model import PolicyModel
from async_rl.learner.optimizers.compact_adamw import local

MOMENTUM = 0.95
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Jordan's polynomial a x + b x^3 + c x^5, whose repetition brings singular values from (0, 1] near 1."""
_NUM_ITERATIONS = 5


class Muon:
    """Muon on matrices and stacks of matrices. It implements ``optimizer.Optimizer``.

    Updates have Nesterov momentum and the size of AdamW's (arXiv:2502.16982, equation 4: 0.2 sqrt(max(O, I)) times the
    orthogonal matrix), so learning rate and decoupled weight decay mean what they mean for AdamW.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig) -> None:
        self._parameters, self._weight_decay = parameters, config.weight_decay
        self._momentum = {name: torch.zeros_like(p, requires_grad=False) for name, p in parameters.items()}
        self._exchanges = _exchanges(parameters)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for names in self._exchanges:
            parameters = [self._parameters[name] for name in names]
            directions = [self._direction(name, p) for name, p in zip(names, parameters, strict=True)]
            scale = lr * 0.2 * max(parameters[0].shape[-2:]) ** 0.5
            for parameter, update in zip(parameters, _orthogonal_shards(directions, parameters[0]), strict=True):
                local(parameter).mul_(1 - lr * self._weight_decay).sub_(update.to(parameter.dtype), alpha=scale)

    def _direction(self, name: str, parameter: nn.Parameter) -> Tensor:
        """Update the momentum of this rank's shard, and return what is to be orthogonalised. No gradient is one of 0,
        because every rank joins each exchange.
        """
        momentum = local(self._momentum[name])
        gradient = torch.zeros_like(momentum) if parameter.grad is None else local(parameter.grad)
        momentum.lerp_(gradient, 1 - MOMENTUM)
        return gradient.lerp(momentum, MOMENTUM)

    def tensors(self) -> dict[str, Tensor]:
        return {f"momentum.{name}": momentum for name, momentum in self._momentum.items()}

    def resume(self, num_updates: int) -> None:
        pass  # the momentum is all there is


def hidden_matrices(policy: PolicyModel) -> set[str]:
    """Return the names of the parameters that Muon trains: matrices and stacks of matrices of the decoder's layers that
    multiply hidden states. Embeddings, convolutions, norms and biases are none.
    """
    inside = {id(parameter) for parameter in policy.decoder_layers.parameters()}
    owners = dict(policy.causal_lm.named_modules())
    return {
        name
        for name, parameter in policy.causal_lm.named_parameters()
        if id(parameter) in inside
        and parameter.ndim in (2, 3)
        and name.endswith(("weight", "_proj"))
        and not isinstance(owners[name.rpartition(".")[0]], (nn.Embedding, nn.Conv1d))
    }


def orthogonalised(matrices: Tensor) -> Tensor:
    """Return ``matrices`` [..., O, I] with singular values near 1 (0.7 to 1.2), computed in their dtype.

    Five Newton-Schulz iterations; singular values below about a thousandth of the matrix's norm stay smaller.
    """
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    shape = x.shape
    x = x.reshape(-1, *shape[-2:])
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_NUM_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.view(shape)
    return x.mT if is_tall else x


def _exchanges(parameters: Mapping[str, nn.Parameter]) -> list[list[str]]:
    """Return the names of the ``parameters`` that are orthogonalised together: as many of one shape and placement as
    ranks exchange shards, or one if none do.
    """
    alike: dict[object, list[str]] = {}
    for name, parameter in parameters.items():
        place = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
        alike.setdefault((tuple(parameter.shape), place), []).append(name)
    exchanges = []
    for names in alike.values():
        first = parameters[names[0]]
        size = first.device_mesh.size() if isinstance(first, DTensor) and _is_divided(first) else 1
        exchanges += [names[start : start + size] for start in range(0, len(names), size)]
    return exchanges


def _is_divided(parameter: DTensor) -> bool:
    """Return whether ranks have parts of a matrix, and not only of a stack."""
    return any(_dimension(placement) >= parameter.ndim - 2 for placement in parameter.placements)


def _dimension(placement: Placement) -> int:
    """Return the dimension that ``placement`` divides, or -1."""
    return -1 if placement.is_replicate() else cast(Shard, placement).dim


def _of_stack(placement: Placement) -> Placement:
    """Return ``placement`` of a matrix as that of a stack of such matrices."""
    if placement.is_replicate():
        return placement
    if isinstance(placement, _StridedShard):  # FSDP over tensor parallelism
        return _StridedShard(placement.dim + 1, split_factor=placement.split_factor)
    return Shard(_dimension(placement) + 1)


def _orthogonal_shards(directions: Sequence[Tensor], like: Tensor) -> list[Tensor]:
    """Return this rank's shards of the orthogonalised matrices, of which it has the shards ``directions``.

    All are sharded as ``like``. On CUDA the computation is in bfloat16, as Jordan's is.
    """
    stack = torch.stack(list(directions))
    stack = stack.bfloat16() if stack.is_cuda else stack
    if not isinstance(like, DTensor) or not _is_divided(like):
        return list(orthogonalised(stack).unbind())
    mesh, shape = like.device_mesh, torch.Size((len(directions), *like.shape))
    stride = torch.empty(shape, device="meta").stride()

    def sharded(part: Tensor, placements: Sequence[Placement]) -> DTensor:
        return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)

    by_shard = [_of_stack(placement) for placement in like.placements]
    by_matrix = [Shard(0)] * mesh.ndim
    whole = sharded(stack, by_shard).redistribute(placements=by_matrix).to_local()
    return list(sharded(orthogonalised(whole), by_matrix).redistribute(placements=by_shard).to_local().unbind())
