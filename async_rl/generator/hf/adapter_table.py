"""The adapters of a model by their names, for versions that hold nothing else (``lora.publish = "adapters"``).

The backends use this module. ``AdapterNames`` checks a version; ``AdapterTable`` also merges it into the model's
weights, as the learner does for merged versions. Shape letters: O, I = a layer's outputs and inputs, R = rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from async_rl.config.learner import LoraConfig
from async_rl.errors import WeightsError
from async_rl.generator.hf.causal_model import WeightTable
from async_rl.weights.adapters import merge, peft_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class AdapterNames:
    """The names and shapes that a version of the adapters must have: A, [R, I], and B, [O, R], of each target."""

    def __init__(self, model: PreTrainedModel, lora: LoraConfig) -> None:
        rank = lora.rank or 0
        self._shapes: dict[str, tuple[int, int]] = {}
        self.modules: dict[str, nn.Linear] = {}
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and name.rpartition(".")[2] in lora.targets:
                self.modules[name] = module
                self._shapes[peft_name(name, "A")] = (rank, module.in_features)
                self._shapes[peft_name(name, "B")] = (module.out_features, rank)

    def check(self, weights: Mapping[str, Tensor]) -> None:
        """Check that ``weights`` has the names and shapes of the model's adapters.

        Raises:
            WeightsError: a tensor is missing, unknown or of another shape.
        """
        missing = sorted(self._shapes.keys() - weights.keys())
        unknown = sorted(weights.keys() - self._shapes.keys())
        if missing or unknown:
            raise WeightsError(
                f"expected the {len(self._shapes)} tensors of the adapters of the generator's model, got "
                f"{len(weights)} from the learner: missing {missing[:5]}, unknown {unknown[:5]}; learner and generator "
                f"must run one model config with one version of transformers"
            )
        for name, shape in self._shapes.items():
            if tuple(weights[name].shape) != shape:
                raise WeightsError(
                    f"{name}: expected shape {list(shape)}, got {list(weights[name].shape)} from the learner; learner "
                    f"and generator must run one model config with one version of async-rl"
                )


class AdapterTable(WeightTable):
    """Puts versions of the adapters into a model that has the frozen weights, of which it keeps a copy."""

    def __init__(self, model: PreTrainedModel, lora: LoraConfig) -> None:
        super().__init__(model)
        self._names, self._scale = AdapterNames(model, lora), lora.scale
        self._frozen: dict[str, Tensor] = {}
        for name, module in self._names.modules.items():
            self._frozen[name] = module.weight.data
            module.weight.data = module.weight.data.clone()

    def check(self, weights: Mapping[str, Tensor]) -> None:
        self._names.check(weights)

    @torch.no_grad()
    def replace(self, weights: Mapping[str, Tensor], *, copy: bool = False) -> None:
        """Give each target layer the weight W + scale * B A, cast once. The memory of the weights stays the same."""
        for name, module in self._names.modules.items():
            frozen = self._frozen[name]
            a_RI, b_OR = (weights[peft_name(name, letter)].detach().to(frozen.device) for letter in "AB")
            module.weight.data.copy_(merge(frozen, a_RI, b_OR, scale=self._scale))
