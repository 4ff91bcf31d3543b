"""The running rows of the transformers backend with their caches: the protocol ``Rows``, and rows in slots.

``SlotRows`` decodes all rows in one forward pass, over one cache of keys and values. It serves models that cache only
plain keys and values of all tokens. ``lockstep`` has the implementation for all other models, and ``self_test`` chooses
one. Shape letters: R = running rows, V = vocabulary, P = tokens of a prefix, B = prompts of a pass, T = tokens of the
longest of them, N = tokens of a pass, L = layers with experts, K = experts for each token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from async_rl.generator.hf.forward import make_forward, register_decode_attention
from async_rl.generator.hf.routing import RouteRecorder
from async_rl.generator.hf.slots import Prefix, SlotCache
from async_rl.routes import RouteArray

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Result = TypeVar("Result")
_MAX_PREFILL_TOKENS = 8192
"""The most padded tokens in one prefill pass; limits the memory of its activations."""
_WINDOW_WORDS = ("sliding_window", "window_size", "attention_window", "attention_chunk_size", "local_attention")
"""Config keys with these words are the widths of attention windows."""


class Rows(Protocol):
    """The caches of the running rows, numbered from 0, and the model's forward pass over them.

    A *prefix* is the state of the cache after some tokens. Each implementation has its own type of it.
    """

    def prefixes(self, sequences: Sequence[np.ndarray]) -> list[Any]:
        """Return the prefix of each token sequence (int32 [P], P > 0), in their order."""
        ...

    def record_prefixes(self, sequences: Sequence[np.ndarray], recorder: RouteRecorder) -> list[tuple[Any, RouteArray]]:
        """Return what ``prefixes`` returns, each with the routes [P, L, K] of its tokens."""
        ...

    def add(self, first_row: int, num_rows: int, prefix: Any | None, *, length: int, max_length: int) -> None:
        """Begin rows, all with this prefix; None: with an empty cache.

        ``length`` is the number of cached tokens of the longest row after the next step, and ``max_length`` the most
        that any row can reach.
        """
        ...

    def remove(self, rows: Sequence[int], sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Remove ``rows``, and then give the row ``sources[i]`` the number ``destinations[i]``, for each i."""
        ...

    def decode(self, ids: np.ndarray, positions: np.ndarray, *, max_length: int) -> Tensor:
        """Feed one token per row (int64 [R]) at its position (int64 [R]). Return the logits [R, V] after it."""
        ...

    def record_decode(
        self, ids: np.ndarray, positions: np.ndarray, recorder: RouteRecorder, *, max_length: int
    ) -> tuple[Tensor, RouteArray]:
        """Do as ``decode``. Return the logits, and the routes [R, L, K] of the tokens that were fed."""
        ...

    def recompute(self, fed: Mapping[int, np.ndarray]) -> None:
        """Compute the caches of rows again after new weights. ``fed``: row -> its cached tokens, int32 [P], P > 0."""
        ...

    def forget(self) -> None:
        """Free the caches' memory. There are no rows."""
        ...

    def fresh(self, max_running: int) -> Rows:
        """Return empty rows of the same kind for the same model."""
        ...


def caches_only_keys_and_values(config: Any) -> bool:
    """Return whether transformers caches plain keys and values of all tokens in every layer of this model."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    text = config.get_text_config(decoder=True)
    if {type(layer) for layer in DynamicCache(config=text).layers} != {DynamicLayer}:
        return False
    # Models without layer types in their config may have windows that the cache does not know.
    settings = text.to_dict()
    if settings.get("layer_types") or settings.get("use_sliding_window") is False:
        return True
    return not any(
        isinstance(value, int) and not isinstance(value, bool) and value > 0
        for key, value in settings.items()
        if any(key.endswith(word) for word in _WINDOW_WORDS)
    )


def _in_batches(
    compute: Callable[[Sequence[np.ndarray]], list[Result]], sequences: Sequence[np.ndarray]
) -> list[Result]:
    """Return the result of ``compute`` for each sequence. It gets those of similar length together."""
    results: dict[int, Result] = {}
    for batch in _batches(sequences):
        results.update(zip(batch, compute([sequences[i] for i in batch]), strict=True))
    return [results[index] for index in range(len(sequences))]


def _batches(sequences: Sequence[np.ndarray]) -> Iterator[list[int]]:
    batch: list[int] = []
    for index in sorted(range(len(sequences)), key=lambda i: len(sequences[i])):
        if batch and (len(batch) + 1) * len(sequences[index]) > _MAX_PREFILL_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


class SlotRows:
    """All rows in one cache of keys and values, ``SlotCache``, and in one forward pass. It implements ``Rows``.

    Attributes:
        forward: the forward pass.
    """

    def __init__(self, model: PreTrainedModel, max_running: int) -> None:
        """Use ``model``, whose attention becomes ``forward.decode_attention``.

        Raises:
            ValueError: the model's attention can't be replaced.
        """
        name = register_decode_attention()
        model.set_attn_implementation(name)
        if model.config._attn_implementation != name:
            raise ValueError(f"{type(model).__name__} does not accept another attention function")
        text_config: Any = model.config.get_text_config(decoder=True)
        self._model = model
        self.forward = make_forward(model)
        self._cache = SlotCache(text_config.num_hidden_layers, max_running, model.device)

    def prefixes(self, sequences: Sequence[np.ndarray]) -> list[Prefix]:
        """Return the keys and values of each token sequence. Sequences of similar length are computed together."""
        return _in_batches(self._prefixes_of_batch, sequences)

    def record_prefixes(
        self, sequences: Sequence[np.ndarray], recorder: RouteRecorder
    ) -> list[tuple[Prefix, RouteArray]]:
        def recorded(batch: Sequence[np.ndarray]) -> list[tuple[Prefix, RouteArray]]:
            prefixes, routes_NLK = recorder.record(lambda: self._prefixes_of_batch(batch))
            routes_BTLK = routes_NLK.reshape(len(batch), -1, *routes_NLK.shape[1:])
            # Copies, because a view would keep the routes of the padding.
            return [(prefix, r[: len(ids)].copy()) for prefix, r, ids in zip(prefixes, routes_BTLK, batch, strict=True)]

        return _in_batches(recorded, sequences)

    def _prefixes_of_batch(self, sequences: Sequence[np.ndarray]) -> list[Prefix]:
        ids = np.zeros((len(sequences), max(map(len, sequences))), np.int64)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence)] = sequence
        cache = self.forward.prefill(torch.from_numpy(ids).to(self._model.device))
        return [cache.prefix(row, len(sequence)) for row, sequence in enumerate(sequences)]

    def add(self, first_row: int, num_rows: int, prefix: Prefix | None, *, length: int, max_length: int) -> None:
        self._cache.reserve(length, max_length)
        if prefix is not None:
            self._cache.write_prefix(first_row, num_rows, prefix)

    def remove(self, rows: Sequence[int], sources: Sequence[int], destinations: Sequence[int]) -> None:
        self._cache.move(sources, destinations)

    def decode(self, ids: np.ndarray, positions: np.ndarray, *, max_length: int) -> Tensor:
        length = self._cache.padded(int(positions.max()) + 1)
        self._cache.reserve(length, max_length)
        ids_R, positions_R = torch.from_numpy(np.stack([ids, positions])).to(self._model.device)
        self._cache.begin_step(positions_R, length)
        return self.forward.decode(ids_R, positions_R, self._cache)

    def record_decode(
        self, ids: np.ndarray, positions: np.ndarray, recorder: RouteRecorder, *, max_length: int
    ) -> tuple[Tensor, RouteArray]:
        return recorder.record(lambda: self.decode(ids, positions, max_length=max_length))

    def recompute(self, fed: Mapping[int, np.ndarray]) -> None:
        for row, prefix in zip(fed, self.prefixes(list(fed.values())), strict=True):
            self._cache.write_prefix(row, 1, prefix)

    def forget(self) -> None:
        self._cache.forget()

    def fresh(self, max_running: int) -> SlotRows:
        other = SlotRows(self._model, max_running)
        other.forward = self.forward
        return other
