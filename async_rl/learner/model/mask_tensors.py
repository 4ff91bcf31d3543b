"""Sampling masks on the device, made without a wait of the host for the device. Used by ``logprobs.py``.

Shape letters: N = predicted tokens, V = vocabulary, W = words of sampling masks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from async_rl.sampling_mask import BITS_PER_WORD, words_at_most


class MaskTensors(NamedTuple):
    """A ``SamplingMask``: for each predicted token, the tokens that top-p and top-k left.

    Attributes:
        sizes: int32 [N], on the host, because the shapes of what is computed depend on it.
        words: int32 [W], on the device.
    """

    sizes: np.ndarray
    words: Tensor

    def split(self, rows: int) -> list[MaskTensors]:
        """Split the masks into parts of ``rows`` predicted tokens, as ``Tensor.split`` does."""
        sizes = np.split(self.sizes, range(rows, len(self.sizes), rows))
        num_words = [int(np.abs(part).sum()) for part in sizes]
        return [MaskTensors(s, w) for s, w in zip(sizes, self.words.split(num_words), strict=True)]

    def mask(self, vocab_size: int, *, first: int = 0) -> Tensor:
        """Return bool [N, V]: for each predicted token, whether each of ``vocab_size`` tokens from ``first`` could be
        sampled.
        """
        device, num_tokens, num_words = self.words.device, len(self.sizes), len(self.words)
        sizes_N = torch.from_numpy(self.sizes).to(device, non_blocking=True)
        num_words_N = sizes_N.abs().long()
        row_W = torch.arange(num_tokens, device=device).repeat_interleave(num_words_N, output_size=num_words)
        place_W = self.words.long() - first
        is_id_W = (sizes_N[row_W] > 0) & (place_W >= 0) & (place_W < vocab_size)
        # Selecting the ids would wait for their number. Instead the other words go into one more column.
        mask = (sizes_N == 0)[:, None].repeat(1, vocab_size + 1)
        mask[row_W, torch.where(is_id_W, place_W, vocab_size)] = True
        mask_NV = mask[:, :vocab_size]
        if (self.sizes < 0).any():
            # Only the words of bits that have some of these tokens.
            begin, limit = first // BITS_PER_WORD, words_at_most(first + vocab_size)
            column_W = torch.arange(num_words, device=device) - (num_words_N.cumsum(0) - num_words_N)[row_W] - begin
            is_used_W = (sizes_N[row_W] < 0) & (column_W >= 0) & (column_W < limit - begin)
            bits = self.words.new_zeros(num_tokens, limit - begin + 1)
            bits[row_W, torch.where(is_used_W, column_W, limit - begin)] = self.words
            bytes_NX = bits[:, : limit - begin].contiguous().view(torch.uint8)
            bits_NX8 = (bytes_NX[..., None] >> torch.arange(8, dtype=torch.uint8, device=device)) & 1
            start = first - begin * BITS_PER_WORD
            mask_NV |= bits_NX8.flatten(1)[:, start : start + vocab_size].bool()
        return mask_NV
