"""Floating-point operations of an optimizer step, and what the device could do in the same time.

``StepFlops`` reads a model's costs once. ``of`` then counts a micro-batch on the host, and ``work`` balances the ranks.
Only what the step must compute is counted: a shared prompt once, no padding, logits only where a token is predicted,
and no activation twice, so that gradient checkpointing lowers the utilisation (MFU, arXiv:2204.02311, appendix B)
instead of hiding its cost. A product of matrices [a, b] and [b, c] is 2abc operations. Norms, rotations, softmaxes and
the optimizer are left out, as usual.

Called by ``trained_model.py`` and by ``benchmarks/learner.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from async_rl.learner.cards import card_of
from async_rl.learner.data.balance import Work
from async_rl.learner.data.packing import MicroBatch
from async_rl.learner.model.heads import head_of
from async_rl.learner.model.quantized import QuantizedLinear

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def peak_flops_per_s(device_name: str, dtype: torch.dtype) -> float | None:
    """Return the operations per second of a device, as torch names it, in ``dtype``. None if they are not known.

    Only bfloat16 and float16 are known: in float32 the peak depends on settings of the matrix kernels.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    card = card_of(device_name)
    return card and card.peak


def device_peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return what ``peak_flops_per_s`` says of ``device``. None on the CPU."""
    return peak_flops_per_s(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None


@dataclass(frozen=True, slots=True)
class StepFlops:
    """The costs of a model's forward and backward pass, in floating-point operations.

    Attributes:
        per_token: for each token of a row, of all matrix products except attention and head. A trained matrix costs 6
            for each of its numbers: 2 forward, 2 for the gradient of its input and 2 for its own. A frozen one costs 4.
        per_prediction: for each predicted token, of the head.
        per_pair: for each layer of attention by its window (None: no window), for each pair of a token and a token
            that it attends to, itself included: 6 for each number of a query and of a value, over all heads.
    """

    per_token: float
    per_prediction: float
    per_pair: tuple[tuple[int | None, float], ...]

    @property
    def work(self) -> Work:
        """What attention and head compute, relative to a row token's products in the layers. Ranks are balanced by it.

        Layers whose attention has a window count as work that grows with the tokens alone.
        """
        unit = max(self.per_token, 1.0)
        return Work(
            prediction=self.per_prediction / unit,
            pair=sum(cost for window, cost in self.per_pair if window is None) / unit,
        )

    @classmethod
    def of_model(cls, model: PreTrainedModel) -> StepFlops:
        """Read the costs of ``model``, whose parameters may be sharded and may have adapters.

        Of experts only those count that compute a token. Attention counts in layers of full and of sliding attention;
        other kinds (linear, chunked) have no pairs.
        """
        head = cast(nn.Linear, head_of(model))
        embeddings = {p for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
        settings = model.config.get_text_config()
        per_token = 0.0
        for name, parameter in model.base_model.named_parameters():
            if parameter.ndim < 2 or parameter in embeddings or parameter is head.weight:
                continue
            share = _expert_share(settings) if ".experts." in f".{name}." else 1.0
            per_token += share * _cost(parameter) * parameter.numel()
        for module in model.base_model.modules():
            if isinstance(module, QuantizedLinear):
                per_token += 4 * module.in_features * module.out_features  # frozen, and no parameter
        return cls(
            per_token=per_token,
            per_prediction=_cost(head.weight) * head.weight.numel(),
            per_pair=tuple(_attention_costs(settings)),
        )

    def of(self, micro_batch: MicroBatch) -> float:
        """Return the operations of one micro-batch."""
        num_attended = micro_batch.position_ids + 1
        total = self.per_token * len(num_attended) + self.per_prediction * len(micro_batch.targets)
        for window, cost in self.per_pair:
            pairs = num_attended if window is None else np.minimum(num_attended, window)
            total += cost * int(pairs.sum())
        return total


def _cost(parameter: Tensor) -> int:
    return 6 if parameter.requires_grad else 4


def _expert_share(settings: Any) -> float:
    """Return the share of the routed experts that compute a token."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    num_experts = next((int(n) for key in names if (n := getattr(settings, key, None))), 1)
    return min(1.0, int(getattr(settings, "num_experts_per_tok", None) or num_experts) / num_experts)


def _attention_costs(settings: Any) -> list[tuple[int | None, float]]:
    """Return, for each window that layers have, the cost of a pair over all these layers."""
    num_heads = getattr(settings, "num_attention_heads", None)
    if not isinstance(num_heads, int):
        return []
    # Not settings.head_dim, which raises where it varies between layers (Gemma 4).
    head_dim = int(settings.to_dict().get("head_dim") or settings.hidden_size // num_heads)
    query_dim = int(getattr(settings, "qk_nope_head_dim", None) or 0) + int(
        getattr(settings, "qk_rope_head_dim", None) or 0
    )
    value_dim = int(getattr(settings, "v_head_dim", None) or head_dim)
    of_layer = 6.0 * num_heads * ((query_dim or head_dim) + value_dim)
    types = cast(Sequence[str], getattr(settings, "layer_types", None) or ())
    types = types or ["full_attention"] * int(settings.num_hidden_layers)
    window = getattr(settings, "sliding_window", None)
    costs: dict[int | None, float] = {}
    for kind in types:
        if kind in ("full_attention", "attention", "hybrid"):
            costs[None] = costs.get(None, 0.0) + of_layer
        elif kind == "sliding_attention" and window is not None:
            costs[int(window)] = costs.get(int(window), 0.0) + of_layer
    return list(costs.items())
