"""Tensor parallelism: the ranks of a group compute each layer together, each a part of its heads, columns and experts.

Called by ``sharding.py``, before FSDP shards what each rank has left. transformers says for each model which layers are
divided how (its *plan*). Parameters become DTensors of the group's mesh, so that FSDP, checkpoints and the gathering of
weights know their parts. Layers compute with the local part of these, without DTensor, as in Megatron-LM
(arXiv:1909.08053): hidden states are whole on every rank; a ``colwise`` layer makes some of the columns from them; a
``rowwise`` layer takes these, and its results are summed over the ranks. So each attention and each MLP needs one sum
in the forward pass, and one in the backward pass. The embedding and the head are divided by tokens of the vocabulary
(``vocabulary.py``), experts by whole experts. Whatever lies outside of such layers is computed by every rank alike.

Shape letters: N = tokens, d = hidden size, K = experts for each token, S = pairs of a token and one of its experts.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from async_rl.config.parallel import HEADS, check_divisor, check_heads
from async_rl.errors import ModelError
from async_rl.learner.layouts.experts import compute_pairs, find_experts
from async_rl.learner.layouts.local_parts import divide_parameters, set_forward, with_parts
from async_rl.learner.model.heads import head_of
from async_rl.learner.model.policy_model import PolicyModel
from async_rl.learner.model.vocabulary import VocabularyPart

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Division = Callable[[nn.Module, DeviceMesh], None]
_COPY = "_async_rl_copy"


class _Copy(torch.autograd.Function):
    """The tensor itself. Its gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        # Not a view: a view holds its base, which ``_copied`` lets hold the view. Nothing would free the two.
        return tensor.new_empty(0).set_(cast(Any, tensor.detach()))

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (the decorator hides the parameters' names)
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, None]:
        return _summed(grad_outputs[0], ctx.group), None


class _Sum(torch.autograd.Function):
    """The sum over the ranks. Its gradient, which is the same on every rank, is that of each rank's part."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _summed(tensor, group)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (the decorator hides the parameters' names)
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, None]:
        return grad_outputs[0], None


def _summed(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    result = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, group=group)
    return result


def _copied(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return ``_Copy`` of ``tensor``, the same for all layers that take it: their gradients are summed at once."""
    if not tensor.requires_grad or not torch.is_grad_enabled():
        return tensor
    if _COPY not in vars(tensor):
        setattr(tensor, _COPY, _Copy.apply(tensor, group))
    return getattr(tensor, _COPY)


def divisions(policy: PolicyModel, size: int) -> dict[nn.Module, Division]:
    """Return how each module of ``policy`` is divided over ``size`` ranks, for ``divide``.

    Raises:
        ModelError: its sizes can't be divided by the number of ranks, or its plan is missing or not understood.
    """
    model = policy.causal_lm
    # It warns that a part of a part is gathered in two steps.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    settings = model.config.get_text_config()
    check_heads({key: getattr(settings, key, None) for key in HEADS}, size)
    planned = _planned(policy)
    _check_complete(model, planned)
    found: dict[nn.Module, Division] = {}
    for name, style in planned.items():
        module = model.get_submodule(name)
        if style in _OF_LINEAR:
            found.update(_of_linear(module, name, style, size))
        elif style == _WHOLE:
            found[module] = _divide_whole
    found.update(dict.fromkeys(find_experts(policy, size, "parallel.tensor"), _divide_experts))
    embedding, head = cast(nn.Module | None, model.get_input_embeddings()), head_of(model)
    if isinstance(embedding, nn.Embedding):
        found[embedding] = _divide_embedding
    # A stage of a pipeline may have no head. One of values has a row only, and every rank computes it.
    if isinstance(head, nn.Linear) and policy.head_kind == "tokens":
        is_tied = isinstance(embedding, nn.Embedding) and embedding.weight is head.weight
        found[head] = partial(_divide_head, tied_to=embedding if is_tied else None)
    return found


def divide(root: nn.Module, divisions: dict[nn.Module, Division], mesh: DeviceMesh) -> None:
    """Divide ``root`` and the modules in it as ``divisions`` says. Each module is divided once."""
    for module in list(root.modules()):
        if module in divisions:
            divisions.pop(module)(module, mesh)


def _planned(policy: PolicyModel) -> dict[str, str]:
    """Return the styles of the modules in decoder layers, by their names."""
    model = policy.causal_lm
    patterns = {pattern: re.compile(pattern.replace(".", r"\.").replace("*", r"\d+")) for pattern in model.tp_plan}
    inside = {module for layer in policy.decoder_layers for module in layer.modules()}
    planned = {
        name: style
        for name, module in model.named_modules()
        for pattern, style in model.tp_plan.items()
        if module in inside and patterns[pattern].fullmatch(name)
    }
    known = (*_OF_LINEAR, _WHOLE, _EXPERTS)
    unknown = [(name, style) for name, style in planned.items() if style not in known]
    if unknown:
        name, style = unknown[0]
        raise ModelError(
            f"parallel.tensor: expected a model whose layers are divided as {', '.join(known)}, "
            f"but {name} of {type(model).__name__} is {style}; leave the key out"
        )
    if not planned:
        raise ModelError(
            f"parallel.tensor: expected a model for which transformers has a plan of tensor parallelism, but "
            f"{type(model).__name__} has none; leave the key out, or choose a model such as Qwen3 or Llama (model.path)"
        )
    return planned


def _check_complete(model: PreTrainedModel, planned: Mapping[str, str]) -> None:
    """Check that the plan has all parameters of modules with divided layers: others would act on a part of the columns,
    and nothing would say how their gradients add up.
    """
    for parent in sorted({name.rpartition(".")[0] for name, style in planned.items() if style in _OF_LINEAR}):
        names = [name for name in planned if name.startswith(f"{parent}.")]
        known = {p for name in names for p in model.get_submodule(name).parameters()}
        rest = [name for name, p in model.get_submodule(parent).named_parameters() if p not in known]
        if rest:
            raise ModelError(
                f"parallel.tensor: transformers' plan for {type(model).__name__} does not say how {parent}.{rest[0]} "
                f"is divided; leave the key out"
            )


def _of_linear(module: nn.Module, name: str, style: str, size: int) -> dict[nn.Module, Division]:
    """Return the divisions of a linear layer, and of the adapter in it: of B in a layer that is divided by columns, of
    A in one that is divided by rows. The adapter's other matrix is whole.
    """
    division = _OF_LINEAR[style]
    linear: Any = getattr(module, "base_layer", module)
    if type(linear) is not nn.Linear or getattr(module, "lora_variant", None):
        raise ModelError(
            f"parallel.tensor: expected linear layers with plain weights and adapters, but {name} is a "
            f"{type(linear).__name__} in a {type(module).__name__}; leave the key out"
        )
    is_by_columns = division is _divide_columns
    outputs, inputs = linear.weight.shape
    side, count = ("outputs", outputs) if is_by_columns else ("inputs", inputs)
    check_divisor("parallel.tensor", f"the {side} of {name}", count, size)
    matrices = () if module is linear else cast(Any, module.lora_B if is_by_columns else module.lora_A).values()
    return dict.fromkeys((linear, *matrices), division)


def _divide_columns(linear: nn.Module, mesh: DeviceMesh) -> None:
    """Compute some outputs of a linear layer, from whole inputs."""
    inner, group = with_parts(linear, divide_parameters(linear, mesh, 0)), mesh.get_group()
    set_forward(linear, lambda x: inner(_copied(x, group)))


def _divide_rows(linear: nn.Module, mesh: DeviceMesh) -> None:
    """Compute whole outputs of a linear layer, from the inputs that this rank has."""
    parts, has_bias = divide_parameters(linear, mesh, 1, only="weight"), cast(Any, linear).bias is not None
    inner = with_parts(linear, parts | ({"bias": lambda _: None} if has_bias else {}))
    group = mesh.get_group()

    def forward(x: Tensor) -> Tensor:
        summed = cast(Tensor, _Sum.apply(inner(x), group))
        return summed + cast(Any, linear).bias if has_bias else summed

    set_forward(linear, forward)


def _divide_whole(module: nn.Module, mesh: DeviceMesh) -> None:
    """Keep the parameters of ``module`` whole, which computes some heads: their gradients are summed."""
    group = mesh.get_group()
    parts = {name: lambda p: cast(Tensor, _Copy.apply(p, group)) for name, _ in module.named_parameters(recurse=False)}
    set_forward(module, with_parts(module, parts))


def _divide_embedding(embedding: nn.Module, mesh: DeviceMesh) -> None:
    """Look up the tokens of this rank's part of the vocabulary; other rows are 0."""
    assert isinstance(embedding, nn.Embedding)
    inner = with_parts(embedding, divide_parameters(embedding, mesh, 0))
    group, part = mesh.get_group(), VocabularyPart.of(embedding.weight)
    assert part is not None
    if (padding := embedding.padding_idx) is not None:
        # torch's type does not say that it may be None.
        cast(Any, embedding).padding_idx = padding - part.first if part.first <= padding < part.end else None

    def forward(ids: Tensor) -> Tensor:
        places, is_own = part.places(ids)
        return cast(Tensor, _Sum.apply(inner(places).masked_fill(~is_own[..., None], 0.0), group))

    set_forward(embedding, forward)


def _divide_head(head: nn.Module, mesh: DeviceMesh, *, tied_to: nn.Module | None) -> None:
    """Divide the parameters only: ``logprobs.py`` reads these, and does not call the module."""
    if tied_to is not None:
        assert isinstance(tied_to.weight, DTensor)  # models have their embedding before their head
        head.weight = cast(nn.Parameter, tied_to.weight)
    divide_parameters(head, mesh, 0)


def _divide_experts(experts: nn.Module, mesh: DeviceMesh) -> None:
    """Compute the tokens of this rank's experts. The results of other experts are 0. The host waits for the device in
    each pass through a layer, because the number of these tokens is known only there.
    """
    module: Any = experts
    inner, group = with_parts(experts, divide_parameters(experts, mesh, 0)), mesh.get_group()
    module.num_experts = int(module.num_experts) // mesh.size()
    first = mesh.get_local_rank() * module.num_experts

    def forward(hidden_Nd: Tensor, chosen_NK: Tensor, weights_NK: Tensor) -> Tensor:
        own_NK = chosen_NK - first
        token_S, place_S = ((own_NK >= 0) & (own_NK < module.num_experts)).nonzero(as_tuple=True)
        rows_Sd = _copied(hidden_Nd, group)[token_S]
        weights_S = _copied(weights_NK, group)[token_S, place_S]
        out_Sd = compute_pairs(inner, rows_Sd, own_NK[token_S, place_S], weights_S)
        return cast(Tensor, _Sum.apply(torch.zeros_like(hidden_Nd).index_add(0, token_S, out_Sd), group))

    set_forward(experts, forward)


_OF_LINEAR: dict[str, Division] = {"colwise": _divide_columns, "rowwise": _divide_rows}
_WHOLE, _EXPERTS = "replicated_with_grad_allreduce", "moe_tp_experts"
"""The styles of transformers' plans that are understood."""
