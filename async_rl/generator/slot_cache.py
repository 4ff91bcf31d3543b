"""KV caches of the transformers backend: one slot a seat for decoding, and a collector for prefill.

Shape letters: L = layers, S = seats, R = running rows (always the first R seats), H = KV heads, C = capacity in
tokens, D = head dimension, P = prefix tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from async_rl.errors import ModelError

_GRANULE = 16
"""Capacities and lengths are multiples of so many tokens: attention kernels want aligned rows."""


class Prefix(NamedTuple):
    """The keys and values of one prompt, each [L, H, P, D]."""

    keys: Tensor
    values: Tensor


class PrefillCache(Cache):
    """Collects what a prefill computes; the model attends within its own input only."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if layer_idx != len(self._keys):
            raise ModelError(f"expected the layers' caches in order, got layer {layer_idx} after {len(self._keys) - 1}")
        self._keys.append(key_states)
        self._values.append(value_states)
        return key_states, value_states

    def prefix(self, row: int, length: int) -> Prefix:
        """The first ``length`` tokens of one row of the prefill, copied out."""
        keys = torch.stack([k[row, :, :length] for k in self._keys])
        return Prefix(keys, torch.stack([v[row, :, :length] for v in self._values]))


class SlotCache(Cache):
    """Keys [L, S, H, C, D] and values, written at each row's own position, read up to the longest row.

    The running rows are always the first R, so that a read is a view and empty seats cost nothing. ``C`` grows by
    doubling, no further than the longest row can get.
    """

    def __init__(self, num_layers: int, num_seats: int) -> None:
        super().__init__(layers=[])
        self._num_layers = num_layers
        self._num_seats = num_seats
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._capacity = 0
        self._length = 0
        self._positions_R = torch.zeros(0, dtype=torch.long)
        self._rows_R = torch.zeros(0, dtype=torch.long)

    @staticmethod
    def padded(length: int) -> int:
        """``length`` rounded up to what the cache reads at a time."""
        return -(-length // _GRANULE) * _GRANULE

    def reserve(self, length: int, max_length: int) -> None:
        """Have room for ``length`` tokens in every seat; ``max_length`` is the most that running rows can need."""
        if length <= self._capacity:
            return
        self._capacity = self.padded(max(length, min(2 * self._capacity, max_length)))
        if self._keys is not None and self._values is not None:
            self._keys = self._grown(self._keys)
            self._values = self._grown(self._values)

    def forget(self) -> None:
        """Be as new: capacity and layout are those of the rows to come, not of earlier ones."""
        self._keys = self._values = None
        self._capacity = 0

    def _grown(self, old: Tensor) -> Tensor:
        new = old.new_zeros((*old.shape[:3], self._capacity, old.shape[4]))
        new[..., : old.shape[3], :] = old
        return new

    def begin_step(self, positions_R: Tensor, length: int) -> None:
        """The next forward pass writes row r at ``positions_R[r]`` (int64) and reads ``length`` tokens of each."""
        if len(self._rows_R) != len(positions_R):
            self._rows_R = torch.arange(len(positions_R), device=positions_R.device)
        self._positions_R = positions_R
        self._length = length

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write one token a row, [R, H, 1, D]; everything up to the longest row, [R, H, length, D]."""
        all_keys, all_values = self._storage(key_states, value_states)
        num_rows = len(self._rows_R)
        keys, values = all_keys[layer_idx, :num_rows], all_values[layer_idx, :num_rows]
        keys[self._rows_R, :, self._positions_R] = key_states[:, :, 0]
        values[self._rows_R, :, self._positions_R] = value_states[:, :, 0]
        return keys[:, :, : self._length], values[:, :, : self._length]

    def write_prefix(self, first_row: int, num_rows: int, prefix: Prefix) -> None:
        """Copy a prompt's keys and values to ``num_rows`` rows from ``first_row`` on."""
        all_keys, all_values = self._storage(prefix.keys[0, None], prefix.values[0, None])
        rows, length = slice(first_row, first_row + num_rows), prefix.keys.shape[2]
        all_keys[:, rows, :, :length] = prefix.keys[:, None]
        all_values[:, rows, :, :length] = prefix.values[:, None]

    def move(self, sources: list[int], destinations: list[int]) -> None:
        """Copy whole rows; the two lists have no row in common."""
        if self._keys is None or self._values is None:
            return
        for source, destination in zip(sources, destinations, strict=True):
            self._keys[:, destination] = self._keys[:, source]
            self._values[:, destination] = self._values[:, source]

    def _storage(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if self._keys is None or self._values is None:
            self._keys, self._values = self._allocated(keys), self._allocated(values)
        if keys.shape[1::2] != self._keys.shape[2::2] or values.shape[1::2] != self._values.shape[2::2]:
            raise ModelError(
                f"expected every layer to cache {tuple(self._keys.shape[2::2])} (KV heads, head dimension), got "
                f"{tuple(keys.shape[1::2])}; the transformers backend takes models whose layers are alike"
            )
        return self._keys, self._values

    def _allocated(self, like: Tensor) -> Tensor:
        # Zeros: masked positions are read, and what they hold is multiplied by 0, so it must be finite.
        return like.new_zeros((self._num_layers, self._num_seats, like.shape[1], self._capacity, like.shape[3]))
