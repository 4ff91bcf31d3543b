"""KV caches of the transformers backend: one slot a slot for decoding, and a collector for prefill.

Shape letters: L = layers, S = slots, R = running rows (always the first R slots), H = KV heads, C = capacity in
tokens, D = head dimension, P = prefix tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from async_rl.errors import ModelError

_GRANULE = 16
_GRANULES = {"cpu": 8}
"""Capacities and lengths are multiples of so many tokens, by type of device: attention kernels want aligned rows."""


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
        if self._keys:
            _refuse_unlike(key_states, value_states, self._keys[0], self._values[0])
        self._keys.append(key_states)
        self._values.append(value_states)
        return key_states, value_states

    def prefix(self, row: int, length: int) -> Prefix:
        """The first ``length`` tokens of one row of the prefill, copied out."""
        keys = torch.stack([k[row, :, :length] for k in self._keys])
        return Prefix(keys, torch.stack([v[row, :, :length] for v in self._values]))


class _Window(NamedTuple):
    """What one layer's update writes and reads: lines of D numbers, one a slot, head and token; views [R, H, N, D]."""

    key_lines: Tensor
    value_lines: Tensor
    keys: Tensor
    values: Tensor


class SlotCache(Cache):
    """Keys [L, S, H, C, D] and values, written at each row's own position, read up to the longest row.

    The running rows are always the first R, so that a read is a view and empty slots cost nothing. ``C`` grows by
    doubling, no further than the longest row can get.

    Attributes:
        hidden_RN: bool [R, N], which of the N cached tokens that this step reads are not the row's (of the step that
            was begun last).
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
        """``length`` rounded up to what the cache reads at a time."""
        return -(-length // self._granule) * self._granule

    def reserve(self, length: int, max_length: int) -> None:
        """Have room for ``length`` tokens in every slot; ``max_length`` is the most that running rows can need."""
        if length <= self._capacity:
            return
        self._capacity = self.padded(max(length, min(2 * self._capacity, max_length)))
        self._windows = []
        if self._keys is not None and self._values is not None:
            self._keys = self._grown(self._keys)
            self._values = self._grown(self._values)

    def forget(self) -> None:
        """Be as new: capacity and layout are those of the rows to come, not of earlier ones."""
        self._keys = self._values = None
        self._capacity = 0
        self._windows = []

    def _grown(self, old: Tensor) -> Tensor:
        new = old.new_zeros((*old.shape[:3], self._capacity, old.shape[4]))
        new[..., : old.shape[3], :] = old
        return new

    def begin_step(self, positions_R: Tensor, length: int) -> None:
        """The next forward pass writes row r at ``positions_R[r]`` (int64) and reads ``length`` tokens of each."""
        if len(self._slots_N) != length:
            self._slots_N = torch.arange(length, device=positions_R.device)
        if self.hidden_RN.shape != (len(positions_R), length):
            self._windows = []
        self.hidden_RN = self._slots_N > positions_R[:, None]
        self._positions_R = positions_R

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store keys and values [R, H, 1, D] of one new token per row.

        Return the cached keys and values [R, H, length, D]; ``length`` is that of the longest row.
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
        """A window a layer on the rows and tokens of this step; good until one of their numbers changes."""
        storage = self._storage(keys, values)
        rows, slots = slice(0, len(keys)), slice(0, len(self._slots_N))
        self._first_lines_RH = torch.arange(keys.shape[0] * keys.shape[1], device=keys.device) * self._capacity
        return [
            _Window(k.flatten(0, 2), v.flatten(0, 2), k[rows, :, slots], v[rows, :, slots])
            for k, v in zip(*storage, strict=True)
        ]

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
        for cached in (self._keys, self._values):
            used = cached[..., : len(self._slots_N), :]
            for source, destination in zip(sources, destinations, strict=True):
                used[:, destination] = used[:, source]

    def _storage(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if self._keys is None or self._values is None:
            self._keys, self._values = self._allocated(keys), self._allocated(values)
        return self._keys, self._values

    def _allocated(self, like: Tensor) -> Tensor:
        # Zeros: masked positions are read, and what they hold is multiplied by 0, so it must be finite.
        return like.new_zeros((self._num_layers, self._max_running, like.shape[1], self._capacity, like.shape[3]))


def _refuse_unlike(keys: Tensor, values: Tensor, first_keys: Tensor, first_values: Tensor) -> None:
    """Compare KV heads and head dimension, the second and fourth axis, with those of the first layer."""
    if keys.shape[1::2] != first_keys.shape[1::2] or values.shape[1::2] != first_values.shape[1::2]:
        raise ModelError(
            f"expected every layer to cache {tuple(first_keys.shape[1::2])} (KV heads, head dimension), got "
            f"{tuple(keys.shape[1::2])}; the transformers backend takes models whose layers are alike"
        )
