"""Give a version's tensors the names and shapes that they have in checkpoints, which vLLM's models load.

In transformers' models some tensors have other names than in checkpoints, and the experts of a layer are one tensor.
``vllm.weights`` calls this in vLLM's workers. It does what ``save_pretrained`` does, one layer at a time.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from async_rl.generator.hf.causal_model import describe_model

_LAYER = re.compile(r"^.*?\.\d+\.")


class CheckpointNames:
    """Converts the tensors of the model that ``directory`` describes."""

    def __init__(self, directory: Path) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange

        self._model: Any = describe_model(directory)
        # Those of old checkpoints, and those that depend on the checkpoint, are not of the names.
        found = get_model_conversion_mapping(self._model, add_legacy=False)
        self._model._weight_conversions = [one for one in found if not isinstance(one, PrefixChange)]

    def convert(self, weights: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each of ``weights``, or the tensors of which it consists, by its name in checkpoints.

        Only one layer's tensors are copied at a time, because a version may fill much of the memory.
        """
        from transformers.core_model_loading import revert_weight_conversion

        if not self._model._weight_conversions:
            yield from weights.items()
            return
        layers: defaultdict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for name, tensor in weights.items():
            found = _LAYER.match(name)
            layers[found[0] if found else ""][name] = tensor
        for layer in layers.values():
            yield from revert_weight_conversion(self._model, layer).items()
