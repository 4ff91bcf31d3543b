"""Running rows in transformers' own caches, or without any: for models with windows, sinks or state along the row.

Rows that begin together share one prompt, so they are always at the same position: they form a *cohort*. Its cache is
the one that the model itself makes for a batch of equal lengths. Nothing is padded and no mask is passed, so the model
computes as in transformers' own ``generate``. Each cohort takes a forward pass of its own, which is slow for many small
groups. State can't be edited, so after new weights it is computed again from the first token.

Some models have no cache, or compute other values with it than without. For these the rows keep only their tokens, and
every step computes the whole text again. That is right for every causal model, and the slowest way.

Shape letters: R = running rows, B = rows of a cohort, P = tokens so far, V = vocabulary, N = tokens of
all passes, L = layers with experts, K = experts for each token.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from async_rl.generator.hf.forward import cache_name
from async_rl.generator.hf.routing import RouteRecorder
from async_rl.routes import RouteArray

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _Tokens:
    """The tokens of a cohort, int32 [B, P], in place of a cache."""

    def __init__(self, ids_BP: np.ndarray) -> None:
        self.ids_BP = ids_BP

    def reorder_cache(self, places_B: Tensor) -> None:
        self.ids_BP = self.ids_BP[places_B.cpu().numpy()]


@dataclass(slots=True, eq=False)
class _Cohort:
    """Rows at one position. Place i of the cache's batch belongs to ``rows[i]``. ``cache`` is None before any token."""

    rows: list[int]
    cache: Any | None


class LockstepRows:
    """The running rows as cohorts. It implements ``rows.Rows``.

    Attributes:
        has_cache: whether cohorts have caches, not only tokens.
    """

    def __init__(self, model: PreTrainedModel, attention: str, *, has_cache: bool) -> None:
        """Use ``model`` with transformers' attention of this name, ``sdpa`` or ``eager``.

        Without ``has_cache`` every step computes the whole text again.
        """
        model.set_attn_implementation(attention)
        self._model: Any = model
        self._attention = attention
        self.has_cache = has_cache
        self._cache_name = cache_name(model)
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self._cohorts: list[_Cohort] = []

    def prefixes(self, sequences: Sequence[np.ndarray]) -> list[Any]:
        return [self._computed(ids[None]) for ids in sequences]

    def record_prefixes(self, sequences: Sequence[np.ndarray], recorder: RouteRecorder) -> list[tuple[Any, RouteArray]]:
        if self.has_cache:
            return [recorder.record(lambda ids=ids: self._computed(ids[None])) for ids in sequences]
        # The prefixes are only tokens, so these passes have no other purpose.
        return [
            (
                self._computed(ids[None]),
                recorder.record(lambda ids=ids: self._call(self._model.base_model, ids[None], use_cache=False))[1],
            )
            for ids in sequences
        ]

    def add(self, first_row: int, num_rows: int, prefix: Any | None, *, length: int, max_length: int) -> None:
        cache = None
        if prefix is not None:
            # A copy, because further rows may begin with this prefix, and models write into their caches.
            cache = copy.deepcopy(prefix)
            cache.reorder_cache(torch.zeros(num_rows, dtype=torch.long, device=self._model.device))
        self._cohorts.append(_Cohort(list(range(first_row, first_row + num_rows)), cache))

    def remove(self, rows: Sequence[int], sources: Sequence[int], destinations: Sequence[int]) -> None:
        leaving, moved = set(rows), dict(zip(sources, destinations, strict=True))
        for cohort in self._cohorts:
            staying = [place for place, row in enumerate(cohort.rows) if row not in leaving]
            if staying and len(staying) < len(cohort.rows) and cohort.cache is not None:
                cohort.cache.reorder_cache(torch.tensor(staying, device=self._model.device))
            cohort.rows = [moved.get(cohort.rows[place], cohort.rows[place]) for place in staying]
        self._cohorts = [cohort for cohort in self._cohorts if cohort.rows]

    def decode(self, ids: np.ndarray, positions: np.ndarray, *, max_length: int) -> Tensor:
        logits: list[Tensor] = []
        for cohort in self._cohorts:
            logits_BV, cohort.cache = self._advanced(
                ids[cohort.rows][:, None], cohort.cache, int(positions[cohort.rows[0]])
            )
            logits.append(logits_BV)
        return torch.cat(logits)[torch.from_numpy(self._place_of_row()).to(self._model.device)]

    def record_decode(
        self, ids: np.ndarray, positions: np.ndarray, recorder: RouteRecorder, *, max_length: int
    ) -> tuple[Tensor, RouteArray]:
        logits_RV, routes_NLK = recorder.record(lambda: self.decode(ids, positions, max_length=max_length))
        num_computed = [
            1 if self.has_cache else int(positions[row]) + 1 for cohort in self._cohorts for row in cohort.rows
        ]
        # Without a cache a pass computes each row's whole text. The token that was fed is its last one.
        return logits_RV, routes_NLK[np.cumsum(num_computed) - 1][self._place_of_row()]

    def _place_of_row(self) -> np.ndarray:
        """Return the place of each row in the order of the cohorts, int64 [R]."""
        return np.argsort([row for cohort in self._cohorts for row in cohort.rows])

    def recompute(self, fed: Mapping[int, np.ndarray]) -> None:
        for cohort in self._cohorts:
            if cohort.cache is not None:
                cohort.cache = self._computed(np.stack([fed[row] for row in cohort.rows]))

    def forget(self) -> None:
        self._cohorts = []

    def fresh(self, max_running: int) -> LockstepRows:
        return LockstepRows(self._model, self._attention, has_cache=self.has_cache)

    def _advanced(self, ids_B1: np.ndarray, cache: Any | None, position: int) -> tuple[Tensor, Any]:
        """Return the logits [B, V] after these tokens at ``position``, and the cache after them."""
        if not self.has_cache:
            tokens = _Tokens(ids_B1 if cache is None else np.concatenate([cache.ids_BP, ids_B1], axis=1))
            return self._call(self._model, tokens.ids_BP, use_cache=False).logits[:, -1], tokens
        given: dict[str, Any] = {} if cache is None else {self._cache_name: cache}
        if self._takes_positions:  # Bamba would begin at 0
            given["position_ids"] = torch.full(ids_B1.shape, position, device=self._model.device)
        output = self._call(self._model, ids_B1, use_cache=True, **given)
        return output.logits[:, -1], self._cache_of(output)

    def _computed(self, ids_BP: np.ndarray) -> Any:
        """Return the cache after these tokens, int32 [B, P]. The head does not run."""
        if not self.has_cache:
            return _Tokens(ids_BP)
        return self._cache_of(self._call(self._model.base_model, ids_BP, use_cache=True))

    def _call(self, module: Any, ids_BP: np.ndarray, **arguments: Any) -> Any:
        return module(input_ids=torch.from_numpy(ids_BP.astype(np.int64)).to(self._model.device), **arguments)

    def _cache_of(self, output: Any) -> Any:
        cache = getattr(output, self._cache_name, None)
        if cache is None:
            raise ValueError(f"{type(self._model).__name__} returns no cache as {self._cache_name}")
        return cache
