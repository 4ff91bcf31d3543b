"""Load a model so that no rank ever holds the whole of it. Called by ``trained_model.py`` for a model that is sharded.

``open_model`` builds the model on the meta device, where a tensor has a shape but no memory, and finds the place of
each tensor in the model's safetensors files. Once the model is sharded, ``Weights.fill`` allocates this rank's shards
and reads only their rows. The self-test, on rank 0, reads the layers that it needs (``read_first_layers``).

Matrices of experts, which transformers stacks into one parameter while it loads them, are read one by one. transformers
can also read other files, and split, permute or transpose tensors: then ``open_model`` loads the whole model with
transformers on every rank, as ``model.load_model`` does, and the log says why.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from async_rl.config.config import Config
from async_rl.config.learner import ModelConfig
from async_rl.data.chat import model_directory
from async_rl.errors import ModelError
from async_rl.learner.data.packing import Packing
from async_rl.learner.model.heads import SCORE_WEIGHT, Head, auto_class, make_new_head, read_config
from async_rl.learner.model.lora import weight_name
from async_rl.learner.model.policy_model import PolicyModel, check_directory, check_trainable, head_dtype, load_model
from async_rl.learner.model.self_test import keep_tested_layers
from async_rl.learner.model.value_model import ValueModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

_ONE_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_ADAPTER = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor is: the file, its name there, and its shape."""

    file: Path
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Stack:
    """Matrices of experts that are one parameter [E, O, I] in the model: one or several for each expert, whose rows
    follow each other (gate and up). ``of_kind`` has the matrices of one kind, by expert.
    """

    of_kind: tuple[tuple[_Place, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        first = [places[0].shape for places in self.of_kind]
        return (len(self.of_kind[0]), sum(shape[0] for shape in first), *first[0][1:])

    @property
    def is_regular(self) -> bool:
        """Whether the experts have matrices of the same kinds and shapes."""
        return len({len(places) for places in self.of_kind}) == 1 and all(
            len({place.shape for place in places}) == 1 for places in self.of_kind
        )


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of a model on the meta device, in safetensors files: name in the model -> place."""

    places: Mapping[str, _Place | _Stack]

    @torch.no_grad()
    def fill(self, policy: PolicyModel, device: torch.device) -> None:
        """Allocate the parameters of ``policy`` that are on the meta device on ``device``, and read this rank's part.

        Parameters and buffers keep their dtype. Of a sharded parameter only this rank's part is read. Adapters may
        have been added to the model, and layers removed.
        """
        _allocate(policy, device)
        state = policy.causal_lm.state_dict()
        with ExitStack() as opened:
            files = _OpenFiles(opened)
            for name, place in self.places.items():
                if (own_name := weight_name(name, state)) in state:
                    _read(files, place, state[own_name])

    def read(self, name: str) -> Tensor:
        """Return the whole tensor ``name``, which is no stack of experts, on the host."""
        place = self.places[name]
        assert isinstance(place, _Place)
        with safe_open(place.file, framework="pt") as tensors:
            return tensors.get_tensor(place.name)


class _OpenFiles(dict[Path, Any]):
    """Safetensors files by path, opened when they are needed first. ``opened`` closes them."""

    def __init__(self, opened: ExitStack) -> None:
        super().__init__()
        self._opened = opened

    def __missing__(self, file: Path) -> Any:
        self[file] = self._opened.enter_context(safe_open(file, framework="pt"))
        return self[file]


def _read(files: _OpenFiles, place: _Place | _Stack, target: Tensor) -> None:
    """Copy the tensor at ``place`` into ``target``, or into a shard the part of it that the shard has."""
    offset, local = (0,) * target.ndim, target
    if isinstance(target, DTensor):
        _, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
        local = target.to_local()
    if not local.numel():
        return
    if isinstance(place, _Place):
        tensors = files[place.file]
        is_part = local.shape != target.shape
        own = tuple(slice(begin, begin + size) for begin, size in zip(offset, local.shape, strict=True))
        local.copy_(tensors.get_slice(place.name)[own] if is_part else tensors.get_tensor(place.name))
        return
    for index, expert_OI in enumerate(local):
        matrices = [of_expert[offset[0] + index] for of_expert in place.of_kind]
        for rows, matrix in zip(expert_OI.split([m.shape[0] for m in matrices]), matrices, strict=True):
            rows.copy_(files[matrix.file].get_tensor(matrix.name))


def _allocate(model: nn.Module, device: torch.device) -> None:
    """Replace parameters on the meta device by uninitialised ones on ``device``. Shared ones stay shared."""
    allocated: dict[nn.Parameter, nn.Parameter] = {}
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if not parameter.is_meta:
                continue
            if parameter not in allocated:
                empty = torch.empty_like(parameter, device=device)
                allocated[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            setattr(module, name, allocated[parameter])
    model._apply(lambda tensor: tensor)  # FSDP looks at its parameters again


def open_model(config: ModelConfig, head: Head = "tokens") -> tuple[PreTrainedModel, Weights | None]:
    """Return the model of ``model.path`` with this ``head`` on the meta device, and its weights. Buffers that no
    file has, and a new head, are on the host. If that is impossible, return the model with its weights on the host, and
    None.

    Raises:
        ModelError: as ``load_model``.
    """
    directory = check_directory(config)
    try:
        model = _on_meta(directory, config, head)
        places = _places(model, directory)
    except ModelError:
        raise
    except Exception as error:  # unreadable files, unknown models, and what code of the model's own may raise
        places = f"{type(error).__name__}: {error}"
        model = None
    if model is None or isinstance(places, str):
        logger.info("the whole model is loaded on every rank before it is sharded, because %s", places)
        return load_model(config, head), None
    return check_trainable(model, config), Weights(places)


def load_policy(
    config: ModelConfig, packing: Packing, *, is_sharded: bool, head: Head = "tokens"
) -> tuple[PolicyModel, Weights | None]:
    """Return the model of ``model.path``, and the weights to fill it with once it is sharded, if it has none yet.

    Args:
        config: the section ``model``.
        packing: how the model computes a micro-batch.
        is_sharded: whether the caller will shard it. If not, it is loaded with its weights.
        head: what the model computes.

    Raises:
        ModelError: the model can't be used; see ``load_model`` and ``PolicyModel.use``.
    """
    causal_lm, weights = open_model(config, head) if is_sharded else (load_model(config, head), None)
    return _wrapped(causal_lm, config, packing, head), weights


def _wrapped(causal_lm: PreTrainedModel, config: ModelConfig, packing: Packing, head: Head) -> PolicyModel:
    kind = ValueModel if head == "value" else PolicyModel
    return kind(causal_lm, packing, head_dtype=head_dtype(config))


def load_reference(
    config: Config, dtype: torch.dtype, packing: Packing, *, is_sharded: bool
) -> tuple[PolicyModel, Weights | None]:
    """Load the reference model of the KL: ``loss.kl_reference``, or if unset the model that the run began with.

    It computes the policy's micro-batches, so it uses the policy's ``packing``. Its parameters have the ``dtype`` that
    it computes in, and need no more precision, unless they are a running mean (``loss.reference_decay``). The result is
    that of ``load_policy``.

    Raises:
        ModelError: the model can't be used.
    """
    path = config.loss.kl_reference or config.model.path
    settings = config.model.model_copy(update={"path": path, "gradient_checkpointing": "none"})
    try:
        model, weights = load_policy(settings, packing, is_sharded=is_sharded)
    except ModelError as error:
        raise ModelError(
            f"can't use the reference model {path} (loss.kl_reference, or model.path if that is unset): {error}"
        ) from error
    model.requires_grad_(False)
    for parameter in model.parameters():
        # Not model.to(dtype): buffers keep their dtype, as in the policy.
        parameter.data = parameter.data.to(torch.float32 if config.loss.reference_decay else dtype)
    return model, weights


def read_tested(config: ModelConfig, policy: PolicyModel, weights: Weights | None) -> PolicyModel:
    """Return the model for the self-test, on the host with its weights: ``policy``, or if it has none yet another
    model of the layers only that are tested.
    """
    return policy if weights is None else read_first_layers(config, weights, policy.packing, policy.head_kind)


def read_first_layers(config: ModelConfig, weights: Weights, packing: Packing, head: Head = "tokens") -> PolicyModel:
    """Return the model on the host, unsharded, with the layers only that the self-test needs."""
    directory = model_directory(config.path, weights=True)
    causal_lm = _on_meta(directory, config, head)
    if head == "value" and SCORE_WEIGHT not in weights.places:
        make_new_head(causal_lm)
    policy = _wrapped(check_trainable(causal_lm, config), config, packing, head)
    keep_tested_layers(policy)
    weights.fill(policy, torch.device("cpu"))
    return policy


def _on_meta(directory: Path, config: ModelConfig, head: Head) -> PreTrainedModel:
    """Build the model of ``directory`` with parameters on the meta device and buffers on the host, float32."""
    from transformers.initialization import no_init_weights

    settings: Any = read_config(directory, head, trust_remote_code=config.trust_remote_code)
    with no_init_weights(), _parameters_on_meta():
        model: Any = auto_class(head).from_config(
            settings, dtype=torch.float32, trust_remote_code=config.trust_remote_code
        )
    model.tie_weights()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())  # as transformers sets it when it loads a tensor
    return model.eval()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move every parameter to the meta device when a module gets it, while the ``with`` block runs."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def _places(model: PreTrainedModel, directory: Path) -> dict[str, _Place | _Stack] | str:
    """Return the place of each tensor of ``model``, or why they can't be read one by one. A value model whose head is
    in no file gets a new one.
    """
    if (directory / _ADAPTER).is_file():
        return f"it has adapters ({_ADAPTER})"
    found = _stored(directory)
    if isinstance(found, str):
        return found
    places = _renamed(model, found)
    if isinstance(places, str):
        return places
    state = model.state_dict()
    kept = {name for name, _ in model.named_parameters()}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - kept
    if stored_twice := sorted(tied & places.keys()):
        return f"{stored_twice[0]} is stored, but shares its values with another tensor"
    if SCORE_WEIGHT in state and SCORE_WEIGHT not in places:
        make_new_head(model)
        del state[SCORE_WEIGHT]
    wanted = {name: tensor for name, tensor in state.items() if name not in tied}
    for name, tensor in wanted.items():
        if name not in places:
            return f"no tensor in its files is {name}"
        if places[name].shape != tensor.shape:
            return f"{name} has shape {list(tensor.shape)}, but {list(places[name].shape)} in its files"
    return {name: places[name] for name in wanted}


def _stored(directory: Path) -> dict[str, _Place] | str:
    """Return all tensors in the safetensors files of ``directory``, by their names there, or why there are none."""
    if (directory / _ONE_FILE).is_file():
        files = [_ONE_FILE]
    elif (directory / _INDEX).is_file():
        files = sorted(set(json.loads((directory / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        return f"it has neither {_ONE_FILE} nor {_INDEX}"
    found: dict[str, _Place] = {}
    for file in files:
        try:
            with safe_open(directory / file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                    found[name] = _Place(directory / file, name, tuple(tensors.get_slice(name).get_shape()))
        except (OSError, SafetensorError) as error:
            return f"{file} can't be read: {error}"
    return found


def _renamed(model: PreTrainedModel, found: Mapping[str, _Place]) -> dict[str, _Place | _Stack] | str:
    """Return the places by the tensors' names in ``model``, or why transformers needs the whole of a tensor."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    state, prefix = model.state_dict(), model.base_model_prefix
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    renamed: dict[str, _Place | _Stack] = {}
    experts: defaultdict[str, defaultdict[str, list[_Place]]] = defaultdict(lambda: defaultdict(list))
    for name, place in sorted(found.items(), key=lambda item: dot_natural_key(item[0])):
        own_name, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if own_name not in state and name in state:  # as transformers does
            own_name, pattern = rename_source_key(name, [], [], prefix, state)
        if pattern is not None and not _only_stacks(of_pattern[pattern]):
            return f"transformers converts {name}"
        if own_name in renamed or (pattern is None and own_name in experts):
            return f"{name} is {own_name}, and so is another tensor"
        if pattern is None:
            renamed[own_name] = place
        else:
            experts[own_name][pattern].append(place)
    for own_name, kinds in experts.items():
        patterns = of_pattern[next(iter(kinds))].source_patterns
        stack = _Stack(tuple(tuple(kinds[pattern]) for pattern in patterns if pattern in kinds))
        if not stack.is_regular:
            return f"the experts of {own_name} differ in shape or number"
        renamed[own_name] = stack
    return renamed


def _only_stacks(converter: Any) -> bool:
    """Whether transformers only stacks the experts' matrices of one or several kinds, whose rows follow each other."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    stack, *others = converter.operations
    if type(stack) is not MergeModulelist or stack.dim != 0 or len(converter.target_patterns) != 1:
        return False
    if not others:
        return len(converter.source_patterns) == 1
    return len(others) == 1 and type(others[0]) is Concatenate and others[0].dim == 1
