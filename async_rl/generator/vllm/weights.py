"""Our weight transfer inside vLLM's worker processes: from a verified version into the model.

vLLM builds ``VersionTransfer``, by the name that ``plugin`` registers. The bytes are there and verified before the
engine is paused: in the worker's own memory (on its device), if it received them by a collective, else in host memory
that it shares with the generator. In the pause vLLM's own update loads them. The names are those of vLLM 0.32.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (  # pyright: ignore[reportMissingImports]
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import (  # pyright: ignore[reportMissingImports]
    _layerwise_process,  # pyright: ignore[reportPrivateUsage]
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import materialize_layer  # pyright: ignore[reportMissingImports]

from async_rl.generator.vllm.checkpoint_names import CheckpointNames
from async_rl.generator.vllm.plugin import DOUBLE_BUFFER
from async_rl.generator.vllm.shared_staging import map_memory, tensors_in
from async_rl.weights.channel.engine_ranks import RankThread
from async_rl.weights.manifest import ALIGNMENT, digest_bytes

_SLACK_BYTES = 8 * ALIGNMENT
"""For each parameter: a version has more and smaller tensors, which begin at multiples of ``ALIGNMENT``."""


class WorkerCalls:
    """Methods that vLLM adds to its worker class, so that ``plugin`` and the generator can call them in each worker."""

    def runner_name(self) -> str:
        """Return the name of vLLM's model runner here, as in ``experimental.vllm.model_runner``."""
        return "v2" if getattr(self, "use_v2_model_runner") else "v1"  # noqa: B009  (the worker's own)

    def held_digests(self, adapter: int) -> dict[str, str]:
        """Return a digest of each parameter that the model now computes with, by the parameter's name.

        It is the digest of the parameter's bytes. Where a kernel has packed these away, it is the digest of the layer's
        output for a fixed input. If ``adapter`` is not 0, the matrices of the adapters with this id follow.
        """
        model: Any = getattr(self, "get_model")()  # noqa: B009  (the worker's own)
        held: dict[str, str] = {}
        for name, parameter in model.named_parameters():
            layer = model.get_submodule(name.rpartition(".")[0])
            is_packed = parameter.numel() == 0 and hasattr(layer, "input_size_per_partition")
            held[name] = digest_bytes(_bytes_of(_effect(layer, parameter) if is_packed else parameter))
        if adapter:
            runner: Any = getattr(self, "model_runner")  # noqa: B009  (the worker's own)
            for name, layer in runner.lora_manager._adapter_manager.get_adapter(adapter).loras.items():
                for letter, matrices in (("A", layer.lora_a), ("B", layer.lora_b)):
                    parts = matrices if isinstance(matrices, list) else [matrices]
                    for index, part in enumerate(parts):
                        if part is not None:  # vLLM joins layers, of which some may have no adapter
                            held[f"{name}.lora_{letter}.{index}"] = digest_bytes(_bytes_of(part))
        return held


@torch.inference_mode()
def _effect(layer: Any, parameter: torch.Tensor) -> torch.Tensor:
    """Return the linear layer's output for a fixed test input whose elements all differ.

    ``held_digests`` digests this output where a kernel has packed the parameter away.
    """
    places = torch.linspace(-1, 1, layer.input_size_per_partition, dtype=torch.float64)
    return layer.quant_method.apply(layer, places.to(parameter.dtype).to(parameter.device)[None], None)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


@dataclass
class RanksInit(WeightTransferInitInfo):
    """The paths of the pipes for collectives (``weights.channel.engine_ranks``). Empty: they take part in none."""

    order_paths: list[str]
    report_path: str


@dataclass
class Source(WeightTransferUpdateInfo):
    """Where a worker finds a version.

    Either ``received`` is the number of the order with which the worker itself received it. Or it is 0, and the version
    is in the generator's shared memory, which ``rows`` describes (see ``shared_staging``).
    """

    received: int = 0
    path: str = ""
    size_bytes: int = 0
    rows: list[Any] = field(default_factory=list)


def _has_lost_tensors(layer: torch.nn.Module) -> bool:
    """Return whether the model has written tensors of this layer itself, without the loaders that keep them for vLLM.

    They are lost then: during an update the layer has no memory yet.

    Raises:
        ValueError: this is so for only some of the layer's tensors.
    """
    info = get_layerwise_info(layer)
    if not info.can_load():
        return False
    kept = {name for name, _ in info.loaded_weights}
    lost = [name for name, tensor in layer.named_parameters(recurse=False) if tensor.is_meta and name not in kept]
    if lost and kept:
        raise ValueError(f"vLLM can't update the parameters {lost} of {type(layer).__name__}; use another backend")
    return bool(lost)


class VersionTransfer(WeightTransferEngine[RanksInit, Source]):
    """Loads versions into the model of one worker. vLLM calls it through ``WeightTransferEngine``."""

    init_info_cls = RanksInit
    update_info_cls = Source

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # It warns of every layer without weights of its own, at every version; we look for missing ones ourselves.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
        # It warns at every call to sleep that nothing is given up, which docs/engines.md says once.
        logging.getLogger("vllm.v1.worker.cpu_worker").setLevel(logging.ERROR)
        self._mapped: dict[str, tuple[torch.Tensor, dict[str, torch.Tensor]]] = {}
        self._ranks: RankThread | None = None
        # vLLM measures what is left for its cache only after this.
        has_memory = self.vllm_config.additional_config.get(DOUBLE_BUFFER)
        self._memory = self._memory_for_a_version() if has_memory else None
        self._parameters = {name for name, _ in self.model.named_parameters()}
        every_name = [name for name, _ in self.model.named_parameters(remove_duplicate=False)]
        tied = [name.rpartition(".")[0] for name in every_name if name not in self._parameters]
        self._tied_layers = [self.model.get_submodule(name) for name in tied]
        methods = [getattr(layer, "quant_method", None) for layer in self.model.modules()]
        self._expert_methods: list[Any] = [one for one in methods if isinstance(one, UnquantizedFusedMoEMethod)]
        self._layers_with_weights = [layer for layer in self.model.modules() if layer not in self._tied_layers]
        self._direct_layers: list[Any] = []
        self._names = CheckpointNames(Path(self.model_config.model))

    def _memory_for_a_version(self) -> torch.Tensor:
        """Return memory for a whole version, uint8 [N]. The workers' parts of the model add up to one version."""
        parameters = [parameter for _, parameter in self.model.named_parameters()]
        size = sum(parameter.nbytes for parameter in parameters) * self.vllm_config.parallel_config.tensor_parallel_size
        return torch.empty(size + _SLACK_BYTES * len(parameters), dtype=torch.uint8, device=self.device)

    def init_transfer_engine(self, init_info: RanksInit) -> None:
        if init_info.order_paths:
            worker = self.vllm_config.parallel_config.rank
            self._ranks = RankThread(
                worker,
                order_path=init_info.order_paths[worker],
                report_path=init_info.report_path,
                device=str(self.device) if self._is_on_gpu else None,
                memory=self._memory,
            )

    @property
    def _is_on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def start_weight_update(self) -> None:
        if not self._is_on_gpu:
            # The CPU's kernel packs its experts only when it is built, so vLLM would load the next version unpacked.
            for method in self._expert_methods:
                method.moe_kernel = None
        initialize_layerwise_reload(self.model)
        self._give_memory_to(self._direct_layers)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self._is_on_gpu:
            # The memory is overwritten as soon as we return, so the copies must be over.
            torch.cuda.synchronize(self.device)

    def receive_weights(self, update_info: Source) -> None:
        tensors = self._tensors(update_info)
        self._load(tensors)
        if direct := [layer for layer in self._layers_with_weights if _has_lost_tensors(layer)]:
            # This is the first version. Which layers they are is known only now, so it is loaded once more.
            self._direct_layers = direct
            self.finish_weight_update()
            self.start_weight_update()
            self._load(tensors)

    def _load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        weights = self._names.convert(tensors)
        if self.vllm_config.parallel_config.tensor_parallel_size > 1:
            # The loader of gpt-oss writes zeros into a bias on all workers but one, and the memory is everybody's.
            weights = ((name, tensor.clone() if name.endswith("bias") else tensor) for name, tensor in weights)
        loaded = self.model.load_weights(weights)
        if loaded is not None and (missing := sorted(self._parameters - set(loaded))):
            raise ValueError(
                f"expected every parameter of vLLM's model in a version, missing {missing[:5]}; learner and generator "
                f"must run one model config, whose tied weights vLLM ties, too"
            )

    @staticmethod
    def _give_memory_to(layers: Sequence[Any]) -> None:
        """Have these layers receive tensors without vLLM's reload, which expects them to call a loader."""
        for layer in layers:
            materialize_layer(layer, get_layerwise_info(layer))

    def _tensors(self, source: Source) -> Mapping[str, torch.Tensor]:
        if source.received:
            assert self._ranks is not None, "a version that nobody received"
            return self._ranks.tensors(source.received)
        if source.path not in self._mapped:
            memory = map_memory(source.path, source.size_bytes, pinned=self._is_on_gpu)
            self._mapped[source.path] = memory, tensors_in(memory, source.rows)
        return self._mapped[source.path][1]

    def finish_weight_update(self) -> None:
        for layer in self._direct_layers:
            _layerwise_process(layer, get_layerwise_info(layer))
        finalize_layerwise_reload(self.model, self.model_config)
        for layer in self._tied_layers:
            # A tied output head loads nothing, so the reload passes it by; on the CPU it computes with a packed copy.
            layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        self._mapped.clear()
