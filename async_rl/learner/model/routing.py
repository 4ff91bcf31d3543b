"""Routing replay: the model computes each token with the experts that the generator's engine chose.

R3 (arXiv:2510.11370): where the engine's routers choose other experts than the learner's, a token's probability jumps,
and the ratio pi/mu with it. ``RoutingReplay`` puts a hook on every router of a model. The hook replaces the choice by
the recorded one, and computes the weights of these experts from the router's own logits, as the model's family does, so
that the router gets its gradient.

The routes of a micro-batch stay until the next one begins, because the backward pass computes layers again under
gradient checkpointing. Shape letters: N = tokens that the decoder computes, L = layers with experts, E = experts, K =
experts for each token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from async_rl.routes import Family, family_of, routers_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Outputs = tuple[Tensor, Tensor, Tensor]


def gates(family: Family, router: Any, logits_NE: Tensor, chosen_NK: Tensor) -> Tensor:
    """Return the weights of the experts ``chosen_NK`` (int64), as ``router`` computes those of its own choice, [N, K].

    The result has a gradient in ``logits_NE``. It is in the precision in which the router normalises.
    """
    match family.gates:
        case "chosen_softmax":
            return torch.softmax(logits_NE.gather(1, chosen_NK), dim=-1)
        case "softmax":
            weights_NK = torch.softmax(logits_NE, dim=-1, dtype=torch.float32).gather(1, chosen_NK)
            is_normal = getattr(router, "norm_topk_prob", True)
            return weights_NK / weights_NK.sum(dim=-1, keepdim=True) if is_normal else weights_NK
        case "sigmoid":
            weights_NK = logits_NE.sigmoid().gather(1, chosen_NK)
            if router.norm_topk_prob:
                weights_NK = weights_NK / (weights_NK.sum(dim=-1, keepdim=True) + 1e-20)
            return weights_NK * router.routed_scaling_factor


class RoutingReplay:
    """The hooks on the routers of one model. Without routes the routers choose by themselves.

    Attributes:
        num_layers, top_k: L and K of the model.
        num_different: int64 [], at how many of the counted tokens and layers the router itself would have chosen other
            experts. The caller resets both counts.
        num_counted: number of counted tokens and layers.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Add the hooks to the routers of ``model``.

        Raises:
            ModelError: the model has no experts, or its routers are not understood.
        """
        model_type = model.config.model_type
        self._family = family_of(model_type)
        routers = routers_of(model, model_type)
        self.num_layers, self.top_k = len(routers), int(routers[0].top_k)
        self._routes_NLK: Tensor | None = None
        self._counted: Tensor | slice | None = None
        self._is_counting = False
        self._recorded: dict[int, Tensor] | None = None
        self.reset_counts()
        for layer, router in enumerate(routers):
            router.register_forward_hook(self._hook(layer))

    def reset_counts(self) -> None:
        self.num_different, self.num_counted = torch.zeros((), dtype=torch.int64), 0

    @contextmanager
    def forward(self, routes_NLK: Tensor | None, counted: Tensor | slice | None = None) -> Iterator[None]:
        """Run one forward pass in the ``with`` block with these routes (integers; None: the routers' own choice).

        Its backward pass uses them, too. Differences are counted in the forward pass only, at the tokens ``counted``
        (a slice of N, or int64 indices into it; None: all tokens).
        """
        self._routes_NLK, self._counted, self._is_counting = routes_NLK, counted, True
        try:
            yield
        finally:
            self._is_counting = False

    @contextmanager
    def recording(self) -> Iterator[dict[int, Tensor]]:
        """Collect the routers' own choices, layer -> int64 [N, K], while the ``with`` block runs."""
        self._recorded = {}
        try:
            yield self._recorded
        finally:
            self._recorded = None

    def _hook(self, layer: int) -> Callable[[nn.Module, Any, Outputs], Outputs | None]:
        family = self._family

        def replay(router: nn.Module, inputs: Any, output: Outputs) -> Outputs | None:
            logits_NE, weights_NK, own_NK = output[family.logits], output[1], output[2 - family.logits]
            if self._recorded is not None:
                self._recorded[layer] = own_NK
            if self._routes_NLK is None:
                return None
            chosen_NK = self._routes_NLK[:, layer].long()
            if self._is_counting:
                self._count(own_NK, chosen_NK)
            weights_NK = gates(family, router, logits_NE, chosen_NK).to(weights_NK.dtype)
            return (chosen_NK, weights_NK, logits_NE) if family.logits else (logits_NE, weights_NK, chosen_NK)

        return replay

    @torch.no_grad()
    def _count(self, own_NK: Tensor, chosen_NK: Tensor) -> None:
        differs_N = (own_NK.sort(dim=-1).values != chosen_NK.sort(dim=-1).values).any(dim=-1)
        differs_N = differs_N if self._counted is None else differs_N[self._counted]
        self.num_different = self.num_different.to(differs_N.device) + differs_N.sum()
        self.num_counted += len(differs_N)
