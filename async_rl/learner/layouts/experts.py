"""Experts that are divided over a group of ranks: each rank has some experts of every layer, as a whole.

Called by ``tensor_parallel.py``, where every rank of the group has the same tokens, and ``expert_parallel.py``, where
each has tokens of its own. Experts are modules of transformers that have the parameters of all experts of a layer,
stacked [E, ...], and compute from hidden states, chosen experts and their weights. Shape letters: d = hidden size, E =
experts of a layer, S = pairs of a token and one of its experts.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

from torch import Tensor, nn

from async_rl.config.parallel import check_divisor
from async_rl.errors import ModelError
from async_rl.learner.model.policy_model import PolicyModel

_STYLES = ("moe_tp_experts", "ep_dispatch_experts")


def find_experts(policy: PolicyModel, size: int, key: str) -> dict[nn.Module, str]:
    """Return the modules of ``policy`` that compute experts, which transformers' plans name, and their names.

    Args:
        policy: the model.
        size: number of ranks over which they shall be divided.
        key: the config key that asks for it.

    Raises:
        ModelError: they can't be divided so.
    """
    model = policy.causal_lm
    # Before transformers 5.19 only models with experts have an ``ep_plan``.
    plans = {**model.tp_plan, **getattr(model, "ep_plan", {})}
    patterns = [
        re.compile(p.replace(".", r"\.").replace("*", r"\d+")) for p, style in plans.items() if style in _STYLES
    ]
    modules = list[tuple[str, nn.Module]](model.named_modules())
    found = {module: name for name, module in modules if any(p.fullmatch(name) for p in patterns)}
    for module, name in found.items():
        sizes = {parameter.shape[0] for parameter in module.parameters()}
        if len(inspect.signature(module.forward).parameters) != 3 or len(sizes) != 1:
            raise ModelError(
                f"{key}: expected experts that compute from hidden states, chosen experts and their weights, but "
                f"{name} of {type(model).__name__} does not; leave the key out"
            )
        check_divisor(key, "the experts of a layer", sizes.pop(), size)
    return found


def compute_pairs(experts: Callable[..., Tensor], rows_Sd: Tensor, expert_S: Tensor, weights_S: Tensor) -> Tensor:
    """Return ``weight * expert(row)`` for each of S rows, [S, d].

    ``experts`` is the forward function of a module of transformers that computes experts. All its parameters get a
    gradient even if S is 0, because FSDP's ranks must agree on that.
    """
    if len(rows_Sd):
        return experts(rows_Sd, expert_S[:, None], weights_S[:, None])
    nothing_1d = rows_Sd.new_zeros(1, rows_Sd.shape[1])
    return rows_Sd + experts(nothing_1d, expert_S.new_zeros(1, 1), weights_S.new_zeros(1, 1))[:0]
