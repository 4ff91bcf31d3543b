"""Our weight transfer inside vLLM's worker processes: from the generator's shared memory into the model.

vLLM builds it, by the name that ``plugin`` registers. The generator has received and verified the bytes before the
engine is paused. The model gets them in one of two ways: *prepared* while it decodes and swapped in by pointers
(``prepare``; on the CPU), or *loaded* by vLLM's own update while the engine is paused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from async_rl.generator.vllm.prepare import Preparer, obstacle
from async_rl.generator.vllm.worker_link import map_tensors
from async_rl.weights.manifest import digest_bytes


class WorkerCalls:
    """Mixed into vLLM's workers: the methods that ``plugin`` and the generator call in them."""

    def preparing_obstacle(self) -> str:
        """Why versions can't be prepared here; empty: they can."""
        return _transfer(self).obstacle

    def swap_weights(self, number: int) -> None:
        """See ``Preparer.swap``."""
        _transfer(self).swap(number)

    def held_digests(self) -> dict[str, str]:
        """Name -> digest of each parameter's bytes; of what it does to an input where a kernel has packed it away."""
        model: Any = getattr(self, "get_model")()  # noqa: B009  (the worker's own)
        held: dict[str, str] = {}
        for name, parameter in model.named_parameters():
            layer = model.get_submodule(name.rpartition(".")[0])
            is_packed = parameter.numel() == 0 and hasattr(layer, "input_size_per_partition")
            held[name] = digest_bytes(_bytes_of(_effect(layer, parameter) if is_packed else parameter))
        return held


def _transfer(worker: Any) -> SharedWeights:
    return worker.weight_transfer_engine


@torch.inference_mode()
def _effect(layer: Any, parameter: torch.Tensor) -> torch.Tensor:
    """The linear layer's output for an input with a different number in every place."""
    places = torch.linspace(-1, 1, layer.input_size_per_partition, dtype=torch.float64)
    return layer.quant_method.apply(layer, places.to(parameter.dtype).to(parameter.device)[None], None)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


@dataclass
class SharedInit(WeightTransferInitInfo):
    """The path, size and tensors of the shared memory, and the pipes (see ``worker_link``)."""

    path: str
    size_bytes: int
    rows: list[Any]
    command_paths: list[str]
    report_path: str


@dataclass
class SharedUpdate(WeightTransferUpdateInfo):
    """An update without fields: the shared memory holds exactly one version."""


class SharedWeights(WeightTransferEngine[SharedInit, SharedUpdate]):
    """See ``WeightTransferEngine``."""

    init_info_cls = SharedInit
    update_info_cls = SharedUpdate

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # It warns of every layer without weights of its own, at every version; we look for missing ones ourselves.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
        self._tensors: dict[str, torch.Tensor] = {}
        self._preparer: Preparer | None = None
        self._parameters = {name for name, _ in self.model.named_parameters()}
        every_name = [name for name, _ in self.model.named_parameters(remove_duplicate=False)]
        tied = [name.rpartition(".")[0] for name in every_name if name not in self._parameters]
        self._tied_layers = [self.model.get_submodule(name) for name in tied]

    def init_transfer_engine(self, init_info: SharedInit) -> None:
        self._tensors.clear()
        self._tensors |= map_tensors(init_info.path, init_info.size_bytes, init_info.rows)
        if self._preparer is None and not self.obstacle:
            rank = self.vllm_config.parallel_config.rank
            self._preparer = Preparer(
                self.model,
                self.vllm_config,
                self._tensors,
                rank=rank,
                command_path=init_info.command_paths[rank],
                report_path=init_info.report_path,
            )

    @cached_property
    def obstacle(self) -> str:
        """See ``prepare.obstacle``."""
        return obstacle(self.model, self.device)

    def swap(self, number: int) -> None:
        """See ``Preparer.swap``."""
        if self._preparer is None:
            raise RuntimeError(f"no version can be prepared here: {self.obstacle or 'the transfer is not set up yet'}")
        self._preparer.swap(number)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            # The memory is overwritten as soon as we return, so the copies must be over.
            torch.cuda.synchronize(self.device)

    def receive_weights(self, update_info: SharedUpdate) -> None:
        loaded = self.model.load_weights(self._in_order())
        if loaded is not None and (missing := sorted(self._parameters - set(loaded))):
            raise ValueError(f"expected every parameter of the model in a version, missing {missing[:5]}")

    def _in_order(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._tensors.items()

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        for layer in self._tied_layers:
            # A tied output head loads nothing, so the reload passes it by; on the CPU it computes with a packed copy.
            layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        self._tensors.clear()
