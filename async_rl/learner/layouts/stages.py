"""Stages of a pipeline: models that are cut down to consecutive decoder layers.

The first stage also has the embedding, the last the final norm, the head and the loss. What is left keeps its name:
layers of other stages are replaced by modules that pass hidden states through, so checkpoints, adapters and publishing
know tensors by the names that they always have. If the head is tied to the embedding, the last stage has a copy of it.

``check_stages`` checks before training that a model can be divided so. Called by ``trained_model.py``; ``pipeline.py``
runs the stages. Shape letters: T = tokens of a row, d = hidden size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from async_rl.config.parallel import check_num_stages
from async_rl.errors import ModelError
from async_rl.learner.model.policy_model import DeviceBatch, PolicyModel
from async_rl.learner.model.self_test import VALUE_TOLERANCE, test_batch, tested_layers


def layer_bounds(num_layers: int, num_stages: int) -> list[int]:
    """Return where the layers of each stage begin, and the end: ``num_stages + 1`` numbers.

    Stages differ by one layer at most. The last has no more than another, because it has the head and the loss; of the
    others the later ones have more, because they keep the activations of fewer micro-batches.

    Raises:
        ConfigError: there are more stages than layers.
    """
    check_num_stages(num_layers, num_stages)
    size, more = divmod(num_layers, num_stages)
    bounds = [0]
    for stage in range(num_stages):
        has_more = num_stages - 1 - more <= stage < num_stages - 1
        bounds.append(bounds[-1] + size + has_more)
    return bounds


class PassThrough(nn.Module):
    """Takes the place of a decoder layer of another stage, and returns the hidden states that it gets.

    Attributes:
        received: hidden states to return instead. Set just before the stage's first layer.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        for name, value in vars(layer).items():  # models read settings of their layers
            if not name.startswith("_") and isinstance(value, (bool, int, float, str)):
                setattr(self, name, value)
        self.received: Tensor | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states if self.received is None else self.received


class _NoEmbedding(nn.Module):
    """Takes the place of the embedding, whose output later stages do not use. Models look at its shape and dtype."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._width, self._dtype = width, dtype

    def forward(self, ids: Tensor) -> Tensor:
        return torch.zeros(1, dtype=self._dtype, device=ids.device).expand(*ids.shape, self._width)


class _Names(NamedTuple):
    """The names, in the causal LM, of the modules that have weights."""

    embedding: str
    layers: str
    norm: str
    head: str


def _names(policy: PolicyModel) -> _Names:
    """Return the names of the parts of ``policy``.

    Raises:
        ModelError: the model has weights elsewhere, or layers that share weights.
    """
    model, layers = policy.causal_lm, policy.decoder_layers
    inside = {id(module) for module in layers.modules()}
    of_module = {id(module): name for name, module in model.named_modules()}
    embedding, head = (of_module[id(m)] for m in (model.get_input_embeddings(), policy.head))
    outside = [
        name
        for name, module in model.named_modules()
        if id(module) not in inside and next(module.parameters(recurse=False), None) is not None
    ]
    norms = [name for name in outside if name not in (embedding, head)]
    if len(norms) != 1:
        found = f"others in {', '.join(norms)}" if norms else "none in a norm"
        raise _refusal(policy, f"expected weights in an embedding, decoder layers, one norm and a head, got {found}")
    owners = Counter(parameter for layer in layers for parameter in set(layer.parameters()))
    if max(owners.values()) > 1:
        raise _refusal(policy, "some of its layers share weights")
    return _Names(embedding, of_module[id(layers)], norms[0], head)


def _refusal(policy: PolicyModel, finding: str) -> ModelError:
    return ModelError(
        f"parallel.pipeline: {type(policy.causal_lm).__name__} can't be divided into stages: {finding}; leave the key "
        f"out, and divide the model in another way, such as over more shards"
    )


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)


class Stage:
    """One model, cut down to this rank's stage.

    Attributes:
        copied: name of the embedding, if the head is tied to it and this is the last stage, which then has a copy. The
            first stage owns it.
    """

    def __init__(self, policy: PolicyModel, dtype: torch.dtype, *, index: int, num_stages: int) -> None:
        """Remove from ``policy`` what belongs to other stages. Weights may be on the meta device.

        Args:
            policy: not sharded yet. Adapters may have been added.
            dtype: in which the model computes.
            index: which stage.
            num_stages: the value of ``parallel.pipeline``.

        Raises:
            ConfigError: the model has fewer layers than stages.
            ModelError: the model can't be divided.
        """
        self._policy, self._names = policy, _names(policy)
        self._bounds = layer_bounds(len(policy.decoder_layers), num_stages)
        self._last, self._index = num_stages - 1, index
        model, layers = policy.causal_lm, policy.decoder_layers
        self._is_tied = policy.head.weight is cast(nn.Embedding, model.get_input_embeddings()).weight
        self.copied = f"{self._names.embedding}.weight" if self._is_tied and index == self._last else None
        self.width = int(model.config.get_text_config().hidden_size)
        first, end = self._bounds[index : index + 2]
        for place in (*range(first), *range(end, len(layers))):
            layers[place] = PassThrough(layers[place])
        self._entry = layers[first - 1] if index else None
        if index and self.copied is None:
            _replace(model, self._names.embedding, _NoEmbedding(self.width, dtype))
        if index < self._last:
            _replace(model, self._names.norm, nn.Identity())
            _replace(model, self._names.head, nn.Identity())
            cast(Any, policy).forward = policy.hidden_states

    @property
    def tied_weight(self) -> Tensor | None:
        """The weights that the first and the last stage both have, in these stages."""
        if not self._is_tied or self._index not in (0, self._last):
            return None
        return cast(nn.Embedding, self._policy.causal_lm.get_input_embeddings()).weight

    def owner(self, name: str) -> int:
        """Return the stage that has the tensor ``name``; of a tied embedding, the stage that saves and publishes it."""
        module = name + "."
        if module.startswith(self._names.embedding + "."):
            return 0
        if not module.startswith(self._names.layers + "."):
            return self._last
        layer = int(name[len(self._names.layers) + 1 :].partition(".")[0])
        return sum(bound <= layer for bound in self._bounds[1:])

    def present(self, names: Iterable[str]) -> list[str]:
        """Return those of the tensors ``names`` that this stage has, a copy included, in order."""
        return [name for name in names if self.owner(name) == self._index or name == self.copied]

    def owned(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the ``tensors`` of this stage without the copy."""
        return {name: tensor for name, tensor in tensors.items() if name != self.copied}

    @contextmanager
    def entered(self, batch: DeviceBatch, received: Tensor | None) -> Iterator[None]:
        """Let the model continue in the ``with`` block where the stage before stopped: at hidden states [T, d]."""
        if self._entry is None or received is None:
            yield
            return
        with _entered(self._policy, cast(PassThrough, self._entry), batch, received):
            yield


@contextmanager
def _entered(policy: PolicyModel, entry: PassThrough, batch: DeviceBatch, received_Td: Tensor) -> Iterator[None]:
    if policy.packing == "packed":
        entry.received = received_Td[None]
    else:
        (rows,), _ = batch.layout.padding
        entry.received = received_Td.index_select(0, rows.gather).view(rows.num_sequences, rows.max_length, -1)
    try:
        yield
    finally:
        entry.received = None


@torch.no_grad()
def check_stages(policy: PolicyModel) -> None:
    """Check that two stages, one after the other, compute what the decoder computes in one.

    Args:
        policy: on the host, unsharded. It is restored afterwards.

    Raises:
        ModelError: the model can't be divided, or the values differ.
    """
    names, model, batch = _names(policy), policy.causal_lm, test_batch(policy)
    norm, embedding, whole = (model.get_submodule(name) for name in (names.norm, names.embedding, names.layers))
    layers = tested_layers(policy)
    layers = layers * 2 if len(layers) == 1 else layers
    middle = len(layers) // 2
    entry = PassThrough(layers[0])
    front = [*layers[:middle], *map(PassThrough, layers[middle:])]
    rear = [*map(PassThrough, layers[: middle - 1]), entry, *layers[middle:]]

    def computed(parts: Sequence[nn.Module]) -> Tensor:
        _replace(model, names.layers, nn.ModuleList(parts))
        return policy.decoded(batch)

    try:
        expected_Td = computed(layers)
        _replace(model, names.norm, nn.Identity())
        hidden_Td = computed(front)
        _replace(model, names.norm, norm)
        _replace(model, names.embedding, _NoEmbedding(hidden_Td.shape[-1], hidden_Td.dtype))
        with _entered(policy, entry, batch, hidden_Td):
            value_Td = computed(rear)
    except Exception as error:  # a model may raise anything for layers that it does not expect
        raise _refusal(policy, f"it fails: {type(error).__name__}: {error}") from error
    finally:
        for name, module in ((names.layers, whole), (names.norm, norm), (names.embedding, embedding)):
            _replace(model, name, module)
    difference = float((value_Td - expected_Td).abs().max() / expected_Td.abs().max().clamp_min(1e-6))
    if not difference <= VALUE_TOLERANCE:
        raise _refusal(
            policy,
            f"in two stages the decoder's output differs by {difference:.1e} of its largest value (at most "
            f"{VALUE_TOLERANCE:g})",
        )
