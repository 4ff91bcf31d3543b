"""LoRA (arXiv:2106.09685): low-rank adapters on frozen weights, W x + alpha / rank * B (A x), made by peft.

With ``lora.rank_stabilized`` the factor is alpha / sqrt(rank) (arXiv:2312.03732).

peft puts the adapters into the model's linear layers. Exports, and generators by default, get *merged* weights, W +
alpha / rank * B A, under the base model's names, so they treat a version of a LoRA run like any other version. With
``lora.publish = "adapters"`` generators get A and B only (see ``weights.adapters``). Checkpoints hold only the
adapters, peft's ``adapter_config.json``, and the path and digest of the frozen weights, because adapters are useless
with other weights. Adapters have no dropout, because it would make the ratio pi/mu meaningless.

Called by ``trained_model.py`` and ``export/``. Shape letters: O, I = a layer's outputs and inputs, R = rank.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from async_rl.config.config import Config
from async_rl.config.learner import LoraConfig
from async_rl.data.chat import model_directory
from async_rl.errors import ModelError, RunError
from async_rl.learner.model.heads import SCORE, SCORE_WEIGHT
from async_rl.learner.model.policy_model import PolicyModel
from async_rl.learner.model.quantized import QuantizedLinear, check_kernels
from async_rl.weights.adapters import ADAPTER_BASE, BaseWeights, merge, peft_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from async_rl.learner.model.loading import Weights

logger = logging.getLogger(__name__)

ADAPTER_CONFIG = "adapter_config.json"
"""Name of the file with peft's description of the adapters, in checkpoints and in exported adapters."""

_ADAPTER = "default"


@dataclass(frozen=True, slots=True)
class _Adapted:
    """The names, in the adapted model's state dict, of a weight and of its adapter's matrices A and B."""

    weight: str
    a: str
    b: str


class Adapters:
    """The adapters of one model. Creating this object adds them to the model."""

    def __init__(
        self, policy: PolicyModel, config: Config, *, dtype: torch.dtype, device: torch.device, is_leader: bool,
        weights: Weights | None = None,
    ) -> None:  # fmt: skip
        """Freeze ``policy``, cast its parameters to the ``dtype`` that they compute in, and add float32 adapters. The
        head of a value model is trained whole.

        At first the adapters change nothing (B is 0). A is the same on every rank. The leader (rank 0) reads the files
        of the weights a second time to compute their digest. With ``lora.base_bits`` the decoder's linear layers are
        quantised on ``device``; those on the meta device are read from ``weights``.

        Raises:
            ModelError: ``lora.targets`` names a layer that does not exist or can't have an adapter, or nothing here
                can compute with ``lora.base_bits``.
        """
        from peft import inject_adapter_in_model

        lora, model = config.lora, policy.causal_lm
        assert lora.rank is not None
        _check_targets(model, policy.decoder_layers, lora)
        self._model = model
        self._scale = lora.scale
        self._peft_config = _peft_config(lora, config.model.path)
        # What lies below published adapters is not quantised, and an export is what generators sample with.
        bits = None if lora.publishes_adapters else lora.base_bits
        self.base = replace(BaseWeights.of(config.model.path), base_bits=bits) if is_leader else None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.run.seed)
            with _weights_on_host(model):
                inject_adapter_in_model(self._peft_config, cast(Any, model), _ADAPTER)
        if policy.head_kind == "value":  # a new head is no small change of an old one
            policy.head.requires_grad_(True)
            self._peft_config.task_type, self._peft_config.modules_to_save = "SEQ_CLS", [SCORE]
        self._quantized: dict[str, QuantizedLinear] = {}
        if lora.base_bits is not None:
            check_kernels(lora.base_bits, dtype, device)
            self._quantized = _quantize_layers(model, policy.decoder_layers, lora.base_bits, device, weights)
        for parameter in model.parameters():
            if not parameter.requires_grad:
                # Frozen parameters need no more precision. Not model.to(dtype), because buffers must keep their dtype.
                parameter.data = parameter.data.to(dtype)
        trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
        self.names = list(trained)
        if is_leader:
            logger.info(
                "adapters of rank %d in %d layers: %d of %d parameters are trained", lora.rank, len(trained) // 2,
                sum(trained.values()), sum(p.numel() for p in model.parameters()),
            )  # fmt: skip

    def keep(self, present: Callable[[Iterable[str]], list[str]]) -> None:
        """Forget what other stages of a pipeline have. ``present`` returns those of some names that this one has."""
        self.names = present(self.names)
        self._quantized = {name: self._quantized[name] for name in present(self._quantized)}

    @contextmanager
    def off(self) -> Iterator[None]:
        """Disable the adapters while the ``with`` block runs."""
        from peft.tuners.lora import LoraLayer

        layers = [module for module in self._model.modules() if isinstance(module, LoraLayer)]
        for layer in layers:
            # peft's method to disable adapters also freezes and unfreezes parameters, which FSDP would not notice.
            layer.set_scale(_ADAPTER, 0.0)
        try:
            yield
        finally:
            for layer in layers:
                layer.set_scale(_ADAPTER, 1.0)

    @torch.no_grad()
    def merged(self, names: Iterable[str], dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the base model with these ``names``, unsharded on ``device``, with the adapters merged.
        Parameters get ``dtype``.

        The iterator runs collectives, so all ranks must read it to the end.
        """
        state = self._model.state_dict()
        parameters = {name for name, _ in self._model.named_parameters()}
        for name in names:
            place = _place(name, state)
            if name in self._quantized:
                frozen = self._quantized[name].dequantized(dtype)
                parts = [] if place is None else [_whole(state[part], device) for part in (place.a, place.b)]
                yield name, merge(frozen, *parts, scale=self._scale).to(dtype) if parts else frozen
                continue
            if place is None:
                own_name = weight_name(name, state)
                tensor = _whole(state[own_name], device)
                yield name, tensor.to(dtype) if own_name in parameters else tensor
                continue
            parts = [_whole(state[part], device) for part in (place.weight, place.a, place.b)]
            yield name, merge(*parts, scale=self._scale).to(dtype)

    @torch.no_grad()
    def published(self, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapters under peft's names, unsharded on ``device``, in the ``dtype`` that they compute in.

        The iterator runs collectives, so all ranks must read it to the end.
        """
        state = self._model.state_dict()
        for name in self.names:
            yield published_name(name), _whole(state[name], device).to(dtype)

    def save_config(self, directory: Path) -> None:
        """On rank 0, write the adapters' description, and the base weights' path and digest, into a checkpoint."""
        assert self.base is not None
        self._peft_config.save_pretrained(directory)
        (directory / ADAPTER_BASE).write_bytes(self.base.to_json())

    def check(self, directory: Path) -> None:
        """On rank 0, raise ``RunError`` if the adapters in the checkpoint ``directory`` belong to other weights."""
        if self.base is not None:
            _check_same(directory, self.base)


def _check_same(directory: Path, found: BaseWeights) -> None:
    began = base_weights(directory)
    if began.digest != found.digest:
        raise RunError(
            f"the adapters in {directory} belong to other weights than those in {found.path}: expected digest "
            f"{began.digest}, got {found.digest}; put the model back that the run began with ({began.path})"
        )


def merge_into(model: PreTrainedModel, directory: Path, adapters: Mapping[str, Tensor]) -> None:
    """Merge the ``adapters`` of the checkpoint in ``directory`` into the base model's weights, which keep their dtype.

    Raises:
        RunError: the adapters don't fit the model.
    """
    settings = _read(directory, ADAPTER_CONFIG)
    scale = settings["lora_alpha"] / settings["r"] ** (0.5 if settings.get("use_rslora") else 1)
    if (bits := base_weights(directory).base_bits) is not None:
        _round_layers(model, bits)
    parameters = dict(model.named_parameters())
    for name_of_a in [name for name in adapters if f".lora_A.{_ADAPTER}." in name]:
        module = name_of_a.partition(".lora_A.")[0]
        weight = parameters.get(f"{module}.weight")
        a, b = adapters[name_of_a], adapters[name_of_a.replace(".lora_A.", ".lora_B.")]
        if weight is None or weight.shape != (b.shape[0], a.shape[1]):
            raise RunError(
                f"{directory}: expected a weight of shape [{b.shape[0]}, {a.shape[1]}] for the adapter of {module}, "
                f"got {'none' if weight is None else list(weight.shape)}; put the model back that {ADAPTER_BASE} names"
            )
        weight.data = merge(weight.data, a, b, scale=scale).to(weight.dtype)
    if SCORE_WEIGHT in adapters:
        parameters[SCORE_WEIGHT].data = adapters[SCORE_WEIGHT].to(parameters[SCORE_WEIGHT].dtype)


def peft_names(adapters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint's adapters under the names that peft uses in its files."""
    return {published_name(name): tensor.contiguous() for name, tensor in adapters.items()}


def published_name(name: str) -> str:
    """Return the name under which peft has the adapter matrix ``name`` of the model, or its whole weight ``name``."""
    if ".lora_" not in name:
        return f"base_model.model.{name}"
    module, _, kind = name.partition(".lora_")
    return peft_name(module, kind[0])


def has_adapters(directory: Path) -> bool:
    """Return whether the checkpoint in ``directory`` holds adapters instead of all weights."""
    return (directory / ADAPTER_CONFIG).is_file()


def base_weights(directory: Path) -> BaseWeights:
    """Return the frozen weights that a checkpoint's adapters belong to.

    Raises:
        RunError: the checkpoint does not name the weights.
    """
    found = _read(directory, ADAPTER_BASE)
    return BaseWeights(str(found["path"]), str(found["digest"]), found.get("base_bits"))


def check_base(directory: Path) -> Path:
    """Return the directory of the weights that a checkpoint's adapters belong to.

    Raises:
        ModelError: the weights no longer exist.
        RunError: the files there now have another digest.
    """
    began = base_weights(directory)
    try:
        where = model_directory(began.path, weights=True)
    except ModelError as error:
        raise ModelError(
            f"{directory} holds adapters only, and the model that they belong to is gone: {error}; put it back at "
            f"{began.path}"
        ) from error
    _check_same(directory, BaseWeights.of(began.path))
    return where


def _read(directory: Path, name: str) -> dict[str, Any]:
    path = directory / name
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"can't read {path}: {error}; use a complete checkpoint of a run with lora.rank") from error


def _peft_config(lora: LoraConfig, model_path: str) -> Any:
    from peft import LoraConfig as PeftLoraConfig

    base = Path(model_path)
    return PeftLoraConfig(
        r=cast(int, lora.rank),
        lora_alpha=cast(Any, lora.alpha),
        use_rslora=lora.rank_stabilized,
        target_modules=list(lora.targets),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        # The path is absolute, because the adapter may be used from another working directory. A hub id stays as is.
        base_model_name_or_path=str(base.resolve()) if base.is_dir() else model_path,
    )


def _quantize_layers(
    model: nn.Module, layers: nn.ModuleList, bits: int, device: torch.device, weights: Weights | None
) -> dict[str, QuantizedLinear]:
    """Replace the linear layers of the decoder ``layers``, without their adapters, by quantised ones on ``device``.

    Return these by the names of their weights in the base model.
    """
    inside = {id(module) for module in layers.modules()}
    found: dict[str, QuantizedLinear] = {}
    for name, module in list(model.named_modules()):
        if id(module) not in inside or not isinstance(module, nn.Linear) or ".lora_" in name:
            continue
        own_name = f"{name.removesuffix('.base_layer')}.weight"
        if module.weight.is_meta:
            assert weights is not None
            weight = weights.read(own_name)
        else:
            weight = module.weight
        found[own_name] = QuantizedLinear(weight, module.bias, bits=bits, device=device)
        model.set_submodule(name, found[own_name])
    return found


def _round_layers(model: PreTrainedModel, bits: int) -> None:
    """Give the decoder's linear layers the weights that a learner with ``lora.base_bits`` computed with."""
    for module in PolicyModel(model, "padded").decoder_layers.modules():
        if isinstance(module, nn.Linear):
            weight = module.weight.data
            quantized = QuantizedLinear(weight, None, bits=bits, device=weight.device)
            module.weight.data = quantized.dequantized(weight.dtype)


@contextmanager
def _weights_on_host(model: nn.Module) -> Iterator[None]:
    """Replace matrices on the meta device by ones on the host that take no memory while the ``with`` block runs.

    peft creates adapters where the weights of their layer are, and ours must have values.
    """
    on_meta = {m: m.weight for m in model.modules() if isinstance(m, nn.Linear) and m.weight.is_meta}
    for module, weight in on_meta.items():
        module.weight = nn.Parameter(torch.zeros((), dtype=weight.dtype).expand(weight.shape))
    try:
        yield
    finally:
        for module, weight in on_meta.items():
            weight.requires_grad_(module.weight.requires_grad)
            module.weight = weight


def _check_targets(model: PreTrainedModel, layers: nn.ModuleList, lora: LoraConfig) -> None:
    inside = {id(module) for module in layers.modules()}
    for target in lora.targets:
        named = {n: m for n, m in model.named_modules() if n.rpartition(".")[2] == target}
        if not named:
            linear = {n.rpartition(".")[2] for n, m in layers.named_modules() if isinstance(m, nn.Linear)}
            raise ModelError(
                f"lora.targets: {type(model).__name__} has no layer named {target!r}; choose from its decoder's linear "
                f"layers: {', '.join(sorted(linear)) or 'none'}"
            )
        for name, module in named.items():
            if id(module) not in inside:
                raise ModelError(
                    f"lora.targets: {name} is not in a decoder layer; an adapter on the embedding or the output "
                    f"head (which may be tied to it) is not supported; remove {target!r}"
                )
            if not isinstance(module, nn.Linear):
                raise ModelError(
                    f"lora.targets: expected linear layers, but {name} is a {type(module).__name__}; remove {target!r}"
                )


def weight_name(name: str, state: Mapping[str, Tensor]) -> str:
    """Return the name of tensor ``name`` in the adapted model, where peft moves the tensors of adapted layers one
    level down.
    """
    module, _, kind = name.rpartition(".")
    moved = f"{module}.base_layer.{kind}"
    return moved if moved in state else name


def _place(name: str, state: Mapping[str, Tensor]) -> _Adapted | None:
    """Return the names of the weight ``name`` and of its adapter's matrices. None if the weight has no adapter."""
    module, _, _ = name.rpartition(".")
    a, b = (f"{module}.lora_{letter}.{_ADAPTER}.weight" for letter in "AB")
    is_weight = name.endswith(".weight") and a in state
    return _Adapted(weight_name(name, state), a, b) if is_weight else None


def _whole(tensor: Tensor, device: torch.device) -> Tensor:
    detached = tensor.detach().to(device)
    return detached.full_tensor() if isinstance(detached, DTensor) else detached
