"""Records which experts a model's routers choose, for leases that want routes (``async_rl.routes``).

``rows.Rows`` call it. A hook on every router keeps its choice in a forward pass. Shape letters: N = tokens of the
passes, L = layers with experts, K = experts for each token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from async_rl.routes import RouteArray, RoutingShape, in_order, routers_of

T = TypeVar("T")


class RouteRecorder:
    """Records the routes of the forward passes that ``record`` runs, and of no others."""

    def __init__(self, model: Any) -> None:
        """Add a hook to every router of ``model``, a model of transformers.

        Raises:
            ModelError: the model has no experts, or its routers are not understood.
        """
        model_type = model.config.get_text_config(decoder=True).model_type
        routers = routers_of(model, model_type)
        self.shape = RoutingShape(len(routers), routers[0].num_experts, routers[0].top_k)
        self._chosen: list[Tensor] | None = None
        for router in routers:
            router.register_forward_hook(self._keep)

    def _keep(self, router: nn.Module, inputs: Any, output: tuple[Tensor, ...]) -> None:
        if self._chosen is not None:
            self._chosen.append(in_order(output)[2])

    def record(self, run: Callable[[], T]) -> tuple[T, RouteArray]:
        """Return the result of ``run``, and the routes [N, L, K] of the tokens of its forward passes, in order."""
        self._chosen = []
        try:
            result = run()
            num_layers = self.shape.num_layers
            passes = [self._chosen[i : i + num_layers] for i in range(0, len(self._chosen), num_layers)]
            routes_NLK = torch.cat([torch.stack(layers_NK, dim=1) for layers_NK in passes])
        finally:
            self._chosen = None
        # One transfer of the smallest size; torch has few operations on uint16.
        small = torch.uint8 if self.shape.dtype == np.uint8 else torch.int32
        return result, routes_NLK.to(small).cpu().numpy().astype(self.shape.dtype, copy=False)
