"""The batch of the transformers backend: row r of ``RunningSequences`` is slot r of the KV cache ``SlotCache``.

Rows 0 to ``num_rows - 1`` are in use. When a sequence ends, the sequence in the last row moves to the free row, so that
a decode step computes no empty row. ``RunningSequences`` stores the sequences' numbers in arrays with one entry per
row, because a step then needs only a few array operations. ``PrefillCache`` collects the keys and values of prompts.

Shape letters: L = layers, S = slots, R = running rows (always the first R slots), H = KV heads, C = capacity in
tokens, D = head dimension, P = prefix tokens, N = tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from async_rl.errors import ModelError
from async_rl.generator.backend import rollout_keys
from async_rl.records import Lease
from async_rl.routes import RouteArray
from async_rl.sampling_mask import SamplingMask, split

_GRANULE = 16
_GRANULES = {"cpu": 8}
"""Capacities and lengths are multiples of this many tokens, by type of device: attention kernels need aligned rows."""


@dataclass(frozen=True, slots=True, eq=False)
class RunningSequence:
    """One running sequence: the sample with number ``index`` of the lease.

    ``sampling_mask`` holds, for each sampled token, the set of tokens that top-p and top-k kept. It is None if the
    lease's sampling keeps all tokens. ``routes`` holds the routes of the tokens fed so far, in parts [N, L, K] (here L
    = layers with experts, K = experts for each token). It is None if the lease wants none.
    """

    lease: Lease
    index: int
    prompt_ids: np.ndarray
    sampling_mask: list[SamplingMask] | None
    routes: list[RouteArray] | None


class RunningSequences:
    """The running sequences as arrays with one entry per row. Only the first ``num_rows`` entries are in use.

    Attributes:
        next_ids, position: int64 [max_running], the token to feed next, and its position.
        num_sampled, max_sampled: int64 [max_running], how many tokens are sampled, and the most that may be.
        key: uint64 [max_running], the key of the sequence's random numbers (``backend.rollout_keys``).
        temperature, top_p, min_p, top_k: float64 (top_k: int64) [max_running], the sampling settings.
        has_stop: bool [max_running], whether the lease has stop strings or stop token ids.
    """

    def __init__(self, max_running: int) -> None:
        self.num_rows = 0
        self.sequences: list[RunningSequence] = []
        self.next_ids = np.zeros(max_running, np.int64)
        self.position = np.zeros(max_running, np.int64)
        self.num_sampled = np.zeros(max_running, np.int64)
        self.max_sampled = np.zeros(max_running, np.int64)
        self.key = np.zeros(max_running, np.uint64)
        self.temperature = np.zeros(max_running, np.float64)
        self.top_p = np.zeros(max_running, np.float64)
        self.min_p = np.zeros(max_running, np.float64)
        self.top_k = np.zeros(max_running, np.int64)
        self.has_stop = np.zeros(max_running, np.bool_)
        self._sampled = {"token_ids": np.zeros((max_running, 64), np.int32)}
        self._row_index = np.arange(max_running)

    @property
    def num_free(self) -> int:
        return len(self.position) - self.num_rows

    @property
    def length(self) -> int:
        """The number of cached tokens of the longest row after the next forward pass."""
        return int(self.position[: self.num_rows].max()) + 1

    @property
    def max_length(self) -> int:
        """The largest number of tokens that any running row can still reach in the cache."""
        rows = slice(0, self.num_rows)
        return int((self.position[rows] + self.max_sampled[rows] - self.num_sampled[rows]).max()) + 1

    def add(
        self, lease: Lease, prompt_ids: np.ndarray, first_index: int, count: int, routes: RouteArray | None = None
    ) -> int:
        """Add ``count`` samples of the lease with indices from ``first_index`` on.

        ``routes`` are those of the prompt without its last token; None if the lease wants none, or the prompt has one
        token. Return the number of the first row.
        """
        first_row = self.num_rows
        rows = slice(first_row, first_row + count)
        self.num_rows += count
        first_routes = [] if routes is None else [routes]
        self.sequences.extend(
            RunningSequence(
                lease,
                first_index + i,
                prompt_ids,
                sampling_mask=None if lease.sampling.keeps_all else [],
                routes=list(first_routes) if lease.wants_routes else None,
            )
            for i in range(count)
        )
        # The first decode step feeds the prompt's last token, so the prefix in the cache is one token shorter.
        self.next_ids[rows] = prompt_ids[-1]
        self.position[rows] = len(prompt_ids) - 1
        self.num_sampled[rows] = 0
        self.max_sampled[rows] = lease.sampling.max_new_tokens
        self.key[rows] = rollout_keys(lease.seed, np.arange(first_index, first_index + count))
        self.temperature[rows] = lease.sampling.temperature
        self.top_p[rows] = lease.sampling.top_p
        self.min_p[rows] = lease.sampling.min_p
        self.top_k[rows] = lease.sampling.top_k
        self.has_stop[rows] = bool(lease.sampling.stop or lease.sampling.stop_token_ids)
        return first_row

    def record(self, columns: Mapping[str, np.ndarray]) -> None:
        """Append one sampled token to each row: a value [R] in each of the columns of ``Sampled``, always the same."""
        rows = slice(0, self.num_rows)
        place = self._row_index[rows], self.num_sampled[rows]
        for name, values_R in columns.items():
            stored = self._sampled.setdefault(name, np.zeros((len(self.position), 64), values_R.dtype))
            if int(place[1].max()) >= stored.shape[1]:
                stored = self._sampled[name] = np.concatenate([stored, np.zeros_like(stored)], axis=1)
            stored[place] = values_R
        self.next_ids[rows] = columns["token_ids"]
        self.position[rows] += 1
        self.num_sampled[rows] += 1

    def record_masks(self, kept: SamplingMask) -> None:
        """Append the sampling masks of the newest tokens.

        ``kept`` has one set for each row whose sampling does not keep all tokens, in the order of the rows.
        """
        sets = [sequence.sampling_mask for sequence in self.sequences if sequence.sampling_mask is not None]
        for of_row, newest in zip(sets, split(kept, [1] * len(sets)), strict=True):
            of_row.append(newest)

    def record_routes(self, routes_RLK: RouteArray) -> None:
        """Append the routes of the tokens that were fed last, one for each row."""
        for row, sequence in enumerate(self.sequences):
            if sequence.routes is not None:
                sequence.routes.append(routes_RLK[row : row + 1])

    def sampled(self, row: int) -> dict[str, np.ndarray]:
        """Return copies of the row's columns, [N] each, by their names in ``Sampled``."""
        return {name: stored[row, : self.num_sampled[row]].copy() for name, stored in self._sampled.items()}

    def last_tokens(self, row: int, count: int) -> np.ndarray:
        """Return the newest ``count`` tokens of the row, or all if it has fewer."""
        end = int(self.num_sampled[row])
        return self._sampled["token_ids"][row, max(0, end - count) : end]

    def remove(self, rows: Sequence[int]) -> tuple[list[int], list[int]]:
        """Remove ``rows``, and move the last remaining rows into the gaps.

        Return the old and the new numbers of the moved rows, so that the cache can move them too.
        """
        leaving = set(rows)
        remaining = self.num_rows - len(leaving)
        gaps = sorted(row for row in leaving if row < remaining)
        movers = [row for row in range(remaining, self.num_rows) if row not in leaving]
        for column in (
            self.next_ids, self.position, self.num_sampled, self.max_sampled, self.key, self.temperature, self.top_p,
            self.min_p, self.top_k, self.has_stop, *self._sampled.values(),
        ):  # fmt: skip
            column[gaps] = column[movers]
        for source, destination in zip(movers, gaps, strict=True):
            self.sequences[destination] = self.sequences[source]
        del self.sequences[remaining:]
        self.num_rows = remaining
        return movers, gaps


class Prefix(NamedTuple):
    """The keys and values of one prompt, each [L, H, P, D]."""

    keys: Tensor
    values: Tensor


class PrefillCache(Cache):
    """Collects the keys and values that a model computes for prompts. Attention sees only the present input."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if layer_idx != len(self._keys):
            raise ModelError(
                f"expected the model to fill its layers' caches in order, got layer {layer_idx} after layer "
                f"{len(self._keys) - 1}; use another model"
            )
        if self._keys:
            _refuse_unlike(key_states, value_states, self._keys[0], self._values[0])
        self._keys.append(key_states)
        self._values.append(value_states)
        return key_states, value_states

    def prefix(self, row: int, length: int) -> Prefix:
        """Return a copy of the keys and values of the first ``length`` tokens of one row."""
        keys = torch.stack([k[row, :, :length] for k in self._keys])
        return Prefix(keys, torch.stack([v[row, :, :length] for v in self._values]))


class _Window(NamedTuple):
    """Views of one layer's part of the cache for a decode step.

    New tokens are written to ``key_lines`` and ``value_lines`` [S * H * C, D], with a line for each slot, head and
    token. Attention reads ``keys`` and ``values`` [R, H, N, D].
    """

    key_lines: Tensor
    value_lines: Tensor
    keys: Tensor
    values: Tensor


class SlotCache(Cache):
    """The KV cache of the running rows: two tensors [L, S, H, C, D] for keys and values.

    Each row is written at its own position and read up to the length of the longest row. The running rows are always
    the first R, so that a read is a view and empty slots cost nothing. ``C`` grows by doubling, no further than the
    longest row can get.

    Attributes:
        hidden_RN: bool [R, N], True where a cached token that the present step reads does not belong to the row.
    """

    def __init__(self, num_layers: int, max_running: int, device: torch.device) -> None:
        super().__init__(layers=[])
        self._num_layers = num_layers
        self._max_running = max_running
        self._granule = _GRANULES.get(device.type, _GRANULE)
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._capacity = 0
        self._slots_N = torch.zeros(0, dtype=torch.long, device=device)
        self._positions_R = torch.zeros(0, dtype=torch.long, device=device)
        self._first_lines_RH = self._lines_RH = self._positions_R
        self._windows: list[_Window] = []
        self.hidden_RN = torch.zeros(0, 0, dtype=torch.bool, device=device)

    def padded(self, length: int) -> int:
        """Return ``length`` rounded up to the multiple of tokens that attention kernels need."""
        return -(-length // self._granule) * self._granule

    def reserve(self, length: int, max_length: int) -> None:
        """Make room for ``length`` tokens in every slot.

        The cache grows by doubling, but not beyond ``max_length``, the most tokens that a running row can need.
        """
        if length <= self._capacity:
            return
        self._capacity = self.padded(max(length, min(2 * self._capacity, max_length)))
        self._windows = []
        if self._keys is not None and self._values is not None:
            self._keys = self._grown(self._keys)
            self._values = self._grown(self._values)

    def forget(self) -> None:
        """Free the cache's memory. The next rows then get a capacity and layout that do not depend on earlier rows."""
        self._keys = self._values = None
        self._capacity = 0
        self._windows = []

    def _grown(self, old: Tensor) -> Tensor:
        new = old.new_zeros((*old.shape[:3], self._capacity, old.shape[4]))
        new[..., : old.shape[3], :] = old
        return new

    def begin_step(self, positions_R: Tensor, length: int) -> None:
        """Prepare a decode step.

        It writes row r at ``positions_R[r]`` (int64) and reads ``length`` tokens of every row.
        """
        if len(self._slots_N) != length:
            self._slots_N = torch.arange(length, device=positions_R.device)
        if self.hidden_RN.shape != (len(positions_R), length):
            self._windows = []
        self.hidden_RN = self._slots_N > positions_R[:, None]
        self._positions_R = positions_R

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store one layer's keys and values [R, H, 1, D] of one new token per row.

        Return that layer's cached keys and values [R, H, length, D], with the ``length`` given to ``begin_step``.
        """
        if not self._windows:
            self._windows = self._opened(key_states, value_states)
        window = self._windows[layer_idx]
        if layer_idx == 0:
            self._lines_RH = self._first_lines_RH + self._positions_R.repeat_interleave(key_states.shape[1])
        window.key_lines.index_copy_(0, self._lines_RH, key_states.reshape(-1, key_states.shape[3]))
        window.value_lines.index_copy_(0, self._lines_RH, value_states.reshape(-1, value_states.shape[3]))
        return window.keys, window.values

    def _opened(self, keys: Tensor, values: Tensor) -> list[_Window]:
        """Return the views of every layer for this step's rows and tokens.

        They stay valid until the number of rows or tokens changes.
        """
        storage = self._storage(keys, values)
        rows, slots = slice(0, len(keys)), slice(0, len(self._slots_N))
        self._first_lines_RH = torch.arange(keys.shape[0] * keys.shape[1], device=keys.device) * self._capacity
        return [
            _Window(k.flatten(0, 2), v.flatten(0, 2), k[rows, :, slots], v[rows, :, slots])
            for k, v in zip(*storage, strict=True)
        ]

    def write_prefix(self, first_row: int, num_rows: int, prefix: Prefix) -> None:
        """Copy a prompt's keys and values into ``num_rows`` rows, the first of which is ``first_row``."""
        all_keys, all_values = self._storage(prefix.keys[0, None], prefix.values[0, None])
        rows, length = slice(first_row, first_row + num_rows), prefix.keys.shape[2]
        all_keys[:, rows, :, :length] = prefix.keys[:, None]
        all_values[:, rows, :, :length] = prefix.values[:, None]

    def move(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy the row ``sources[i]`` to the row ``destinations[i]``, for each i.

        The two lists have no row in common.
        """
        if self._keys is None or self._values is None:
            return
        for cached in (self._keys, self._values):
            used = cached[..., : len(self._slots_N), :]
            for source, destination in zip(sources, destinations, strict=True):
                used[:, destination] = used[:, source]

    def _storage(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if self._keys is None or self._values is None:
            self._keys, self._values = self._allocated(keys), self._allocated(values)
        return self._keys, self._values

    def _allocated(self, like: Tensor) -> Tensor:
        # Zeros, because masked positions are read and multiplied by 0, so they must be finite.
        return like.new_zeros((self._num_layers, self._max_running, like.shape[1], self._capacity, like.shape[3]))


def _refuse_unlike(keys: Tensor, values: Tensor, first_keys: Tensor, first_values: Tensor) -> None:
    """Raise ModelError if a layer's number of KV heads or its head dimension differs from the first layer's."""
    if keys.shape[1::2] != first_keys.shape[1::2] or values.shape[1::2] != first_values.shape[1::2]:
        raise ModelError(
            f"expected every layer to cache {tuple(first_keys.shape[1::2])} (KV heads, head dimension), got "
            f"{tuple(keys.shape[1::2])}; the transformers backend needs layers of one shape, so use another model"
        )
