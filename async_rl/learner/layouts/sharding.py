"""How FSDP2 shards a model over the ranks, and when parameters are gathered. Called by ``trained_model.py``.

Groups are gathered one by one: each decoder layer, and the embedding, norm and head together, which is the root group.
With L layers, a step of M micro-batches gathers this many groups (``learner.reshard``):

==================  ===========================================================  ==============
``full``            a layer for its forward and its backward pass, as in ZeRO-3  ``M (2 L + 1)``
``after_backward``  a layer for each micro-batch                                 ``M (L + 1)``
``none``            a layer for each step                                        ``L + 1``
==================  ===========================================================  ==============
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import cast

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from async_rl.config.learner import Reshard
from async_rl.learner.layouts.expert_parallel import divide_experts, experts_to_divide
from async_rl.learner.layouts.mesh import Mesh
from async_rl.learner.layouts.tensor_parallel import divide, divisions
from async_rl.learner.model.policy_model import PolicyModel


def shard(model: PolicyModel, mesh: Mesh, dtype: torch.dtype, *, reshard: Reshard, is_offloaded: bool) -> None:
    """Shard ``model`` over the ranks of ``mesh.fsdp``: each decoder layer by itself; embedding, norm and head as one
    group. Before that each is divided over the ranks of ``mesh.tensor``, and experts over those of ``mesh.experts``,
    if there are any.

    One group for these keeps a tied head tied. Layers that share weights (Zamba 2) are in that group too, because FSDP
    takes a parameter into one group only. Layers move to the device one by one, so the device never has to hold the
    whole model. If ``is_offloaded``, the shards stay on the host, and so do their gradients.

    Raises:
        ModelError: the model can't be divided over the ranks of ``mesh.tensor`` or ``mesh.experts``.
    """
    divided = {} if mesh.tensor is None else divisions(model, mesh.tensor.size())
    experts = set[nn.Module]() if mesh.experts is None else experts_to_divide(model, mesh.experts.size())
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    # Experts get the weights of the router as it computes them. The root's only float inputs are temperatures, which
    # must not be cast: 1.001 is 1 in bfloat16.
    uncast = replace(precision, cast_forward_inputs=False)
    placement = CPUOffloadPolicy(pin_memory=mesh.fsdp.device_type == "cuda") if is_offloaded else OffloadPolicy()
    num_owners = Counter(parameter for layer in model.decoder_layers for parameter in set(layer.parameters()))
    for layer in model.decoder_layers:
        parameters = list(layer.parameters())
        if not parameters or any(num_owners[parameter] > 1 for parameter in parameters):
            continue
        if mesh.tensor is not None:
            divide(layer, divided, mesh.tensor)
        for module in experts.intersection(layer.modules()):
            assert mesh.experts is not None
            divide_experts(module, mesh.experts)
            fully_shard(
                module, mesh=mesh.expert_fsdp, mp_policy=uncast, reshard_after_forward=reshard == "full",
                offload_policy=placement,
            )  # fmt: skip
        fully_shard(
            cast(nn.Module, layer), mesh=mesh.fsdp, mp_policy=precision, reshard_after_forward=reshard == "full",
            offload_policy=placement,
        )  # fmt: skip
    if mesh.tensor is not None:
        divide(model, divided, mesh.tensor)
    # The backward pass needs the root group first, so it stays unsharded.
    fully_shard(model, mesh=mesh.fsdp, mp_policy=uncast, reshard_after_forward=False, offload_policy=placement)


def begin_backward(model: PolicyModel, *, reshard: Reshard, is_last: bool, in_pipeline: bool) -> None:
    """Prepare the sharded ``model`` for the backward pass of a micro-batch of a step that accumulates gradients.

    Unless parameters are resharded after each use, gradients may stay unsharded too until the step's last micro-batch:
    one reduction a step. With ``none`` the parameters stay gathered until then; the optimizer changes the shards, so
    they are gathered again for the next step. Only the backward pass looks at this.
    In a pipeline other micro-batches are between their forward and their backward pass, so FSDP's record of the order
    stays until the last one.
    """
    module = cast(FSDPModule, model)
    if in_pipeline:
        module.set_is_last_backward(is_last)
    if reshard == "full":
        return
    module.set_requires_gradient_sync(is_last)
    if reshard == "none":
        module.set_reshard_after_backward(is_last)


def end_forward(model: PolicyModel) -> None:
    """Clean up after forward passes without a backward pass: reshard the parameters, and clear FSDP's record of the
    order.

    FSDP records the order of forward passes, and the next backward pass prefetches in that order. Without a backward
    pass the record would grow without limit.
    """
    if hasattr(FSDPModule, "reset_iter_state"):
        cast(FSDPModule, model).reset_iter_state()
        return
    for module in model.modules():  # this torch can't reset the record
        if isinstance(module, FSDPModule):
            module.reshard()
