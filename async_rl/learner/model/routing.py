"""The routers of a model with experts: routing replay, the load of experts, and the loss that balances it.

R3 (arXiv:2510.11370): where the engine's routers choose other experts than the learner's, a token's probability jumps,
and the ratio pi/mu with it. ``RouterHooks`` puts a hook on every router of a model. The hook replaces the choice by
the recorded one, and computes the weights of these experts from the router's own logits, as the model's family does, so
that the router gets its gradient. It counts the tokens for which the router itself chose each expert, and sums the
probabilities of the router, for the loss of the Switch Transformer (arXiv:2101.03961) as transformers computes it.

The routes of a micro-batch stay until the next one begins, because the backward pass computes layers again under
gradient checkpointing. Shape letters: N = tokens that the decoder computes, L = layers with experts, E = experts, K =
experts for each token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from async_rl.routes import Family, check_balanced, family_of, in_order, routers_of

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


class RouterHooks:
    """The hooks on the routers of one model. Without routes the routers choose by themselves.

    Attributes:
        num_layers, num_experts, top_k: L, E and K of the model.
        num_different: int64 [], at how many of the counted tokens and layers the router itself would have chosen other
            experts. The caller resets it and what follows.
        num_counted: number of these tokens and layers.
        load_LE: int64, for how many of the counted tokens each router itself chose each expert.
        balance: float64 [], the sum of the micro-batches' ``balance_loss``, without the coefficient.
        balance_coef: the coefficient. 0: there is no such loss.
        replays: whether routes are replayed. If not, the routers choose, whatever routes there are.
    """

    def __init__(self, model: PreTrainedModel, *, replays: bool = True, balance_coef: float = 0.0) -> None:
        """Add the hooks to the routers of ``model``.

        Raises:
            ModelError: the model has no experts, its routers are not understood, or no loss can balance them.
        """
        model_type = model.config.model_type
        if balance_coef:
            check_balanced(model_type)
        self._family, self.replays, self.balance_coef = family_of(model_type), replays, balance_coef
        routers = routers_of(model, model_type)
        self.num_layers, self.top_k = len(routers), int(routers[0].top_k)
        self.num_experts = int(routers[0].num_experts)
        self._sums: list[tuple[Tensor, Tensor]] = []
        self._routes_NLK: Tensor | None = None
        self._counted: Tensor | slice | None = None
        self._is_counting = False
        self._recorded: dict[int, Tensor] | None = None
        self.reset_counts()
        for layer, router in enumerate(routers):
            router.register_forward_hook(self._hook(layer))

    def reset_counts(self) -> None:
        self.num_different, self.num_counted = torch.zeros((), dtype=torch.int64), 0
        self.load_LE = torch.zeros(self.num_layers, self.num_experts, dtype=torch.int64)
        self.balance = torch.zeros((), dtype=torch.float64)

    def balance_loss(self, weight: Tensor, num_tokens: int, group: dist.ProcessGroup | None) -> Tensor:
        """Return the load-balancing loss of the last forward pass times the coefficient and ``weight``, float64 [].

        It is ``E sum_e f_e p_e``, with ``f_e`` the number of choices of expert e by a token and a layer in the mean,
        ``p_e`` the mean of its probabilities, as in transformers' ``load_balancing_loss_func``. The gradient is that
        by the tokens of this rank, with the ``f_e`` and ``p_e`` of the whole row.

        Args:
            weight: float64 [], what the micro-batch adds to the denominator of the step's loss.
            num_tokens: those of the row.
            group: the ranks that compute a part of the row each. None: this rank computes it.
        """
        sums, self._sums = self._sums, []
        counts_E, probs_E = (torch.stack(of_layers).sum(0) for of_layers in zip(*sums, strict=True))
        if group is not None:
            whole = torch.stack([counts_E.float(), probs_E.detach()])
            dist.all_reduce(whole, group=group)
            counts_E, probs_E = whole[0], probs_E + (whole[1] - probs_E.detach())
        size = num_tokens * self.num_layers
        loss = self.num_experts * ((counts_E / size) * (probs_E / size)).sum().double() * weight
        self.balance = self.balance.to(loss.device) + loss.detach()
        return self.balance_coef * loss

    @contextmanager
    def forward(self, routes_NLK: Tensor | None, counted: Tensor | slice | None = None) -> Iterator[None]:
        """Run one forward pass in the ``with`` block with these routes (integers; None: the routers' own choice).

        Its backward pass uses them, too. Tokens are counted in the forward pass only, those at ``counted`` (a slice of
        N, or int64 indices into it; None: all tokens).
        """
        self._routes_NLK, self._counted = routes_NLK if self.replays else None, counted
        self._is_counting, self._sums = True, []
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
            logits_NE, weights_NK, own_NK = in_order(output)
            if self._recorded is not None:
                self._recorded[layer] = own_NK
            if torch.is_grad_enabled():
                self._sum(layer, logits_NE, own_NK)
            if self._routes_NLK is None:
                return None
            chosen_NK = self._routes_NLK[:, layer].long()
            if self._is_counting:
                self._count(own_NK, chosen_NK)
            weights_NK = gates(family, router, logits_NE, chosen_NK).to(weights_NK.dtype)
            if output[0] is logits_NE:
                return logits_NE, weights_NK, chosen_NK
            return chosen_NK, weights_NK, logits_NE

        return replay

    def _sum(self, layer: int, logits_NE: Tensor, own_NK: Tensor) -> None:
        """Add up what the load and the loss need of a layer's counted tokens, in a pass of training."""
        place = slice(None) if self._counted is None else self._counted
        probs_E = None
        if self.balance_coef:
            # Computed again with the layer: checkpointing compares what the two times save for the backward pass.
            probs_E = torch.softmax(logits_NE[place], dim=-1, dtype=torch.float32).sum(0)
        if not self._is_counting:
            return
        chosen = own_NK[place].flatten().long()
        counts_E = chosen.new_zeros(self.num_experts).scatter_add_(0, chosen, torch.ones_like(chosen))
        self.load_LE = self.load_LE.to(chosen.device)
        self.load_LE[layer] += counts_E
        if probs_E is not None:
            self._sums.append((counts_E, probs_E))

    @torch.no_grad()
    def _count(self, own_NK: Tensor, chosen_NK: Tensor) -> None:
        differs_N = (own_NK.sort(dim=-1).values != chosen_NK.sort(dim=-1).values).any(dim=-1)
        differs_N = differs_N if self._counted is None else differs_N[self._counted]
        self.num_different = self.num_different.to(differs_N.device) + differs_N.sum()
        self.num_counted += len(differs_N)
