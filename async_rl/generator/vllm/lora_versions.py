"""Versions that are only adapters (``lora.publish = "adapters"``), as vLLM's LoRA requests.

Every version gets an id of its own in the engine. A request names the version that was the newest when it entered the
engine, and is sampled with it to its end. So no activation pauses the engine, keys and values are always those of the
version that samples, and several versions are in flight at once. Called by ``vllm.backend``.

vLLM loads an adapter from a directory in peft's format. ``LoraVersions`` writes one for each version, next to the
model's files, and removes it when no request needs it any more.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_rl.config.config import Config
from async_rl.config.learner import LoraConfig
from async_rl.generator.hf.adapter_table import AdapterNames
from async_rl.generator.vllm.adapter import max_versions
from async_rl.generator.vllm.engine import VllmEngine

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


class LoraVersions:
    """The versions of the adapters in one engine. ``newest`` is the id of the one that new requests name, 0 if none."""

    def __init__(self, engine: VllmEngine, model: PreTrainedModel, config: Config, directory: Path) -> None:
        self._engine, self._lora = engine, config.lora
        self._names = AdapterNames(model, config.lora)
        self._most = max_versions(config)
        self._directory = directory / "adapters"
        self._present: set[int] = set()
        self.newest = 0

    def check(self, weights: Mapping[str, Tensor]) -> None:
        """Raise WeightsError if a tensor of a version is missing, unknown or of another shape."""
        self._names.check(weights)

    def activate(self, weights: Mapping[str, Tensor], in_flight: Collection[int]) -> float:
        """Let requests name these adapters from now on, and forget those that none of ``in_flight`` names.

        Return the seconds in which the engine loaded them, and could not run a step.

        Raises:
            WeightsError: vLLM can't load them.
        """
        from safetensors.torch import save_file

        self.newest += 1
        path = self._path(self.newest)
        path.mkdir(parents=True)
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text(json.dumps(_peft_settings(self._lora)), encoding="utf-8")
        unused = self._present - set(in_flight)
        pause_s = self._engine.change_adapters(self.newest, path, remove=sorted(unused))
        for number in unused:
            shutil.rmtree(self._path(number))
        self._present = (self._present - unused) | {self.newest}
        return pause_s

    def may_start(self, in_flight: Collection[int]) -> bool:
        """Return whether a request may name the newest version while the ids ``in_flight`` are in use.

        If not, it would wait inside the engine until an older version has no requests any more.
        """
        return len({*in_flight, self.newest}) <= self._most

    def _path(self, number: int) -> Path:
        return self._directory / str(number)


def _peft_settings(lora: LoraConfig) -> dict[str, Any]:
    """Return what vLLM reads of peft's ``adapter_config.json``."""
    return {
        "peft_type": "LORA",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rank_stabilized,
        "target_modules": list(lora.targets),
        "bias": "none",
    }
