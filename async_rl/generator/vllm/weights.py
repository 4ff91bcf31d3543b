"""Our weight transfer inside vLLM's worker processes: from the generator's shared memory into the model.

vLLM builds ``SharedWeights``, by the name that ``plugin`` registers. The generator has received and verified the bytes
before the engine is paused. The model gets them in one of two ways: vLLM's own update *loads* them while the engine is
paused, or a thread *prepares* them while the model decodes (on the CPU).

The worker's own thread runs vLLM's calls, decode steps among them, one after the other. The thread of ``Preparer``
serves the generator's commands (``worker_link``). So a preparation does not block decode steps; it only competes for
processor time, memory bandwidth and Python's lock. Only ``swap`` is called between two steps; it exchanges pointers.

A ``DoubleBuffer`` is a second set of a vLLM model's tensors (CPU only). It is loaded while the model decodes; then
pointers are exchanged. vLLM's CPU build repacks weights for its kernels, which is slow. ``DoubleBuffer`` copies the
model's module tree without tensors, allocates new tensors in checkpoint layout, and lets vLLM load and pack them layer
by layer. ``swap`` then moves the new tensors and kernels into the existing layer and parameter objects. The names are
those of vLLM 0.32.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from vllm.config import set_current_vllm_config  # pyright: ignore[reportMissingImports]
from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
    layerwise_groups,  # pyright: ignore[reportMissingImports]
)
from vllm.model_executor.layers.attention import (  # pyright: ignore[reportMissingImports]
    Attention,
    is_deferred_attention_layer,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod  # pyright: ignore[reportMissingImports]
from vllm.model_executor.layers.quantization.base_config import (  # pyright: ignore[reportMissingImports]
    QuantizeMethodBase,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (  # pyright: ignore[reportMissingImports]
    UnquantizedEmbeddingMethod,
)
from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import (  # pyright: ignore[reportMissingImports]
    _get_original_loader,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import (  # pyright: ignore[reportMissingImports]
    materialize_meta_tensor,
    to_meta_tensor,
)
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs  # pyright: ignore[reportMissingImports]

from async_rl.generator.vllm.worker_link import map_tensors, write_report
from async_rl.weights.manifest import digest_bytes

_SWITCH_S = 0.0005
"""For how long the thread may keep Python's lock from a decode step that wants it; Python's default is ten times it."""
_OWN = frozenset(("_parameters", "_buffers", "_modules"))
"""Attributes that each copied layer has from the beginning, separate from those of the original layer."""


class WorkerCalls:
    """Methods that vLLM adds to its worker class, so that ``plugin`` and the generator can call them in each worker."""

    def preparing_obstacle(self) -> str:
        """Return the reason why this worker can't prepare weights while it decodes. Return "" if it can."""
        return _transfer(self).obstacle

    def swap_weights(self, number: int) -> None:
        """Give the model the weights that were prepared under ``number``. See ``Preparer.swap``."""
        _transfer(self).swap(number)

    def held_digests(self) -> dict[str, str]:
        """Return a digest of each parameter that the model now computes with, by the parameter's name.

        It is the digest of the parameter's bytes. Where a kernel has packed these away, it is the digest of the layer's
        output for a fixed input.
        """
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
    """Return the linear layer's output for a fixed test input whose elements all differ.

    ``held_digests`` digests this output where a kernel has packed the parameter away.
    """
    places = torch.linspace(-1, 1, layer.input_size_per_partition, dtype=torch.float64)
    return layer.quant_method.apply(layer, places.to(parameter.dtype).to(parameter.device)[None], None)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


@dataclass
class SharedInit(WeightTransferInitInfo):
    """What a worker needs to open the shared memory and the pipes (see ``worker_link``).

    ``rows`` describes the tensors in the memory. ``command_paths`` has one pipe for each worker.
    """

    path: str
    size_bytes: int
    rows: list[Any]
    command_paths: list[str]
    report_path: str


@dataclass
class SharedUpdate(WeightTransferUpdateInfo):
    """vLLM's request to load new weights. It needs no fields, because the shared memory holds exactly one version."""


class SharedWeights(WeightTransferEngine[SharedInit, SharedUpdate]):
    """Loads weights from shared memory into the model of one worker. vLLM calls it through ``WeightTransferEngine``."""

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
        """The reason why this worker can't prepare weights while it decodes; empty if it can."""
        return obstacle(self.model, self.device)

    def swap(self, number: int) -> None:
        """Give the model the weights that were prepared under ``number``. See ``Preparer.swap``."""
        if self._preparer is None:
            raise RuntimeError(
                f"expected a vLLM worker that prepares weights, got one that can't: "
                f"{self.obstacle or 'the transfer is not set up yet'}; this is a bug in async-rl, please report it"
            )
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
            raise ValueError(
                f"expected every parameter of the model in a version, missing {missing[:5]}; learner and generator "
                f"must run one model config"
            )

    def _in_order(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._tensors.items()

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        for layer in self._tied_layers:
            # A tied output head loads nothing, so the reload passes it by; on the CPU it computes with a packed copy.
            layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        self._tensors.clear()


class Preparer:
    """Prepares new weights in one worker, in a thread of its own, when the generator sends a command through a pipe.

    ``tensors`` are views into the shared memory that holds the weights to prepare.
    """

    def __init__(
        self,
        model: Any,
        vllm_config: Any,
        tensors: Mapping[str, torch.Tensor],
        *,
        rank: int,
        command_path: str,
        report_path: str,
    ) -> None:
        self._model, self._config, self._tensors = model, vllm_config, tensors
        self._rank = rank
        self._report_fd = os.open(report_path, os.O_WRONLY)
        self._ready: tuple[int, DoubleBuffer] | None = None
        self._old: list[Any] = []
        sys.setswitchinterval(_SWITCH_S)
        threading.Thread(target=self._serve, args=(command_path,), name="prepare-weights", daemon=True).start()

    def swap(self, number: int) -> None:
        """Give the model the weights that were prepared under ``number``.

        The worker's own thread calls this method between two decode steps.

        Raises:
            RuntimeError: these weights are not ready; the model keeps its old ones.
        """
        if self._ready is None or self._ready[0] != number:
            raise RuntimeError(
                f"expected prepared weights number {number} in vLLM's worker {self._rank}, got number "
                f"{self._ready and self._ready[0]}; this is a bug in async-rl, please report it"
            )
        (_, copy), self._ready = self._ready, None
        self._old.append(copy.swap())

    def _serve(self, command_path: str) -> None:
        with open(command_path, encoding="ascii") as commands:
            for line in commands:
                match line.split():
                    case ["prepare", number]:
                        self._prepare(int(number))
                    case ["release"]:
                        self._release()

    def _release(self) -> None:
        while self._old:
            release(self._old.pop())

    def _prepare(self, number: int) -> None:
        error = ""
        try:
            # What was swapped out, or made ready and not taken, makes room first.
            self._release()
            self._ready = None
            # vLLM keeps it in a global of the process, and nothing sets another one once the engine runs.
            with set_current_vllm_config(self._config):
                copy = DoubleBuffer(self._model)
                copy.load(self._tensors)
            self._ready = number, copy
        except Exception as failure:  # the boundary: the generator decides, and the old weights are as they were
            error = f"{type(failure).__name__}: {failure}"
        write_report(self._report_fd, rank=self._rank, number=number, error=error)


def obstacle(model: Any, device: torch.device) -> str:
    """Return the reason why ``DoubleBuffer`` does not work for ``model``. Return "" if it works.

    For some layers (mixtures of experts, latent attention, quantised ones) vLLM stores processed weights where
    ``DoubleBuffer`` does not look.
    """
    if device.type != "cpu":
        return f"the model is on {device.type}, where a version is copied into the tensors that are there"
    if callable(getattr(model, "process_weights_after_loading", None)):
        return f"{type(model).__name__} processes its weights as a whole"
    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        known = method is None or type(method) in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
        if isinstance(method, QuantizeMethodBase) and not known:
            return f"{name} is computed by {type(method).__name__}"
        if is_deferred_attention_layer(layer) and type(layer) is not Attention:
            return f"{name} is a {type(layer).__name__}"
        held = get_layerwise_info(layer).restore_metadata[0]
        for key, parameter in layer._parameters.items():
            if parameter is not None and parameter.numel() == 0 and key not in held:
                return f"the shape of {name}.{key} before it was packed is not known"
    return ""


class DoubleBuffer:
    """A second set of tensors and kernels for ``model``.

    Call ``load`` once to fill it, then ``swap`` once to use it.
    """

    def __init__(self, model: Any) -> None:
        self._pairs: list[tuple[Any, Any, dict[str, Any]]] = []
        """Layer, its copy, and the copy's attributes as they were before it was loaded."""
        self._parameters: dict[int, torch.nn.Parameter] = {}
        """By the identity of the model's parameter: tied ones stay tied."""
        self._layers: dict[int, Any] = {}
        self._root: Any = self._copy_of(model)
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._data: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        self._old: list[Any] = []

    def _copy_of(self, layer: Any) -> Any:
        if (known := self._layers.get(id(layer))) is not None:
            return known
        copy = object.__new__(type(layer))
        self._layers[id(layer)] = copy
        # Copied at once: a step may be running, and give a layer an attribute.
        before = dict(layer.__dict__)
        copy.__dict__.update(before)
        copy.__dict__["_parameters"] = {
            name: None if parameter is None else self._fresh(layer, name, parameter)
            for name, parameter in layer._parameters.items()
        }
        copy.__dict__["_buffers"] = dict(layer._buffers)
        copy.__dict__["_modules"] = {
            name: None if child is None else self._copy_of(child) for name, child in layer._modules.items()
        }
        self._pairs.append((layer, copy, before))
        return copy

    def _fresh(self, layer: Any, name: str, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        """Return a new, uninitialised parameter for a layer, in the layout in which vLLM loads checkpoints.

        The system provides its memory only when it is written.
        """
        if (known := self._parameters.get(id(parameter))) is not None:
            return known
        # vLLM has noted shapes and loaders before it packed anything; of what is never packed it notes nothing.
        held = get_layerwise_info(layer).restore_metadata[0]
        meta = held[name] if name in held else to_meta_tensor(parameter)
        fresh = restore_layer_refs(materialize_meta_tensor(meta), layer)
        if hasattr(fresh, "weight_loader"):
            # vLLM's own reload leaves wrappers behind in its notes, which load nothing outside of such a reload.
            fresh.weight_loader = _get_original_loader(fresh)
        self._parameters[id(parameter)] = fresh
        return fresh

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load ``tensors``, a whole version by checkpoint names, and pack them for vLLM's kernels.

        Raises:
            ValueError: a parameter is missing, or the loaded tensors do not fit the model's.
            Exception: vLLM's loading raised it.
        """
        names = {id(parameter): name for name, parameter in self._root.named_parameters()}
        unpacked = [
            (copy, {names[id(parameter)] for parameter in copy._parameters.values() if parameter is not None})
            for _, copy, _ in self._pairs
            if isinstance(getattr(copy, "quant_method", None), QuantizeMethodBase)
        ]
        loaded: set[str] = set()
        # A decoder layer at a time, so that only one of them is in memory as it was before packing.
        for group in layerwise_groups(list(tensors)):
            found = self._root.load_weights((name, tensors[name]) for name in group)
            if found is None:
                raise ValueError(
                    f"expected load_weights of {type(self._root).__name__} to return the loaded names, got none; "
                    f"set experimental.vllm.prepare_weights = false"
                )
            loaded |= found
            for copy, wanted in unpacked:
                if wanted <= loaded:
                    _pack(copy)
            unpacked = [(copy, wanted) for copy, wanted in unpacked if not wanted <= loaded]
        if missing := sorted(set(names.values()) - loaded):
            raise ValueError(
                f"expected every parameter of the model in a version, missing {missing[:5]}; learner and generator "
                f"must run one model config"
            )
        self._check()
        self._note_changes()

    def _check(self) -> None:
        """Check that ``swap`` can exchange the tensors: the new ones have the old shapes, strides and dtypes.

        Raises:
            ValueError: they differ, or vLLM has created or replaced tensors.
        """
        for layer, copy, _ in self._pairs:
            buffers = [(copy._buffers.get(name), layer._buffers.get(name)) for name in copy._buffers | layer._buffers]
            if copy._parameters.keys() != layer._parameters.keys() or any(new is not old for new, old in buffers):
                raise ValueError(
                    f"vLLM created or replaced tensors in {type(layer).__name__}, so its weights can't be swapped; set "
                    f"experimental.vllm.prepare_weights = false"
                )
            for name, old in layer._parameters.items():
                new = copy._parameters[name]
                if old is not None and (old.shape, old.stride(), old.dtype) != (new.shape, new.stride(), new.dtype):
                    raise ValueError(
                        f"expected {name} of {type(layer).__name__}, in the form that vLLM computes with, to be "
                        f"{list(old.shape)}, {old.dtype}, got {list(new.shape)}, {new.dtype}; set "
                        f"experimental.vllm.prepare_weights = false"
                    )

    def _note_changes(self) -> None:
        """Record what ``swap`` has to change in the model, and which objects the model no longer needs after that."""
        for layer, copy, before in self._pairs:
            changed = {
                key: value for key, value in copy.__dict__.items() if key not in _OWN and before.get(key) is not value
            }
            if changed:
                self._attributes.append((layer.__dict__, changed))
                self._old += [before.get(key) for key in changed]
            for name, parameter in layer._parameters.items():
                if parameter is not None and parameter.numel():
                    self._data.append((parameter, copy._parameters[name].data))
                    self._old.append(parameter.data)

    def swap(self) -> list[Any]:
        """Give the model these weights. Return the objects that it held before; ``release`` frees them later.

        It takes about a microsecond per tensor, because no weights are copied.
        """
        for attributes, changed in self._attributes:
            attributes.update(changed)
        for parameter, data in self._data:
            parameter.data = data
        # The copy's own tree goes with it: taking it apart takes longer than all of this.
        return [*self._old, self._root, self._pairs, self._attributes, self._data]


def _pack(layer: Any) -> None:
    """Bring a layer's loaded weights into the form that its kernel needs, as vLLM does after loading.

    Free what is replaced.
    """
    weights = list(layer._parameters.values())
    layer.quant_method.process_weights_after_loading(layer)
    release([weight for weight in weights if not any(weight is kept for kept in layer._parameters.values())])


@torch.no_grad()
def release(old: list[Any]) -> None:
    """Free the memory of the tensors in the list ``old``, and empty the list.

    Each tensor gives its memory back in an operation of torch, which releases Python's lock, so that decode steps go
    on. Without that operation, Python would hold the lock for the milliseconds that hundreds of megabytes take.
    """
    while old:
        thing = old.pop()
        if isinstance(thing, torch.Tensor):
            thing.set_()  # pyright: ignore[reportCallIssue]  (its stub lacks this form)
