"""The sampling mask: for each sampled token, the set of ids that top-p and top-k kept. Numpy only.

Backends make it, ``records.TokenSequence`` carries it, and the learner renormalises over it: without it, the
distribution that a token was sampled from is unknown. The sets are exact. Each is stored in the shortest of three
forms: it takes 4 bytes, and 4 more for each id, but at most one bit for each id of the vocabulary. Shape letters:
N = sampled tokens, W = words, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BITS_PER_WORD = 32


@dataclass(frozen=True, slots=True, eq=False)
class SamplingMask:
    """One set for each of N sampled tokens.

    Attributes:
        sizes: int32 [N]. ``n`` above 0: the set is ``n`` words, each a token id, ascending. Below 0: ``-n`` words of
            bits, id ``i`` being bit ``i % 32`` of word ``i // 32``. 0: nothing was left out, the whole vocabulary.
        words: int32 [W], set behind set; W is the sum of ``abs(sizes)``.
    """

    sizes: npt.NDArray[np.int32]
    words: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.sizes)


NOTHING_LEFT_OUT = SamplingMask(np.zeros(0, np.int32), np.zeros(0, np.int32))
"""A mask of no tokens. It is used where neither top-p nor top-k is on."""


def words_at_most(vocab_size: int) -> int:
    """Return the number of words of the longest set."""
    return -(-vocab_size // BITS_PER_WORD)


def pack_ids(counts: npt.NDArray[np.integer], ids: npt.NDArray[np.integer], *, vocab_size: int) -> SamplingMask:
    """Pack N sets. Set ``i`` has ``counts[i]`` ids, at least one, ascending; ``ids`` holds them set after set."""
    limit = words_at_most(vocab_size)
    sizes = np.where(counts < limit, counts, -limit)
    sizes[counts == vocab_size] = 0
    if sizes.min(initial=1) > 0:
        return SamplingMask(sizes.astype(np.int32), ids.astype(np.int32))
    words: list[np.ndarray] = []
    for size, of_set in zip(sizes.tolist(), np.split(ids, np.cumsum(counts)[:-1]), strict=True):
        if size > 0:
            words.append(of_set.astype(np.int32))
        elif size < 0:
            bits = np.zeros(limit * BITS_PER_WORD, np.uint8)
            bits[of_set] = 1
            words.append(np.packbits(bits, bitorder="little").view("<i4"))
    return SamplingMask(sizes.astype(np.int32), np.concatenate([NOTHING_LEFT_OUT.words, *words]))


def join(parts: Sequence[SamplingMask]) -> SamplingMask:
    """Join the sets of all ``parts``, at least one, in order."""
    return SamplingMask(np.concatenate([p.sizes for p in parts]), np.concatenate([p.words for p in parts]))


def split(mask: SamplingMask, counts: Sequence[int]) -> list[SamplingMask]:
    """Split ``mask``: part ``i`` is a view of the next ``counts[i]`` sets. The inverse of ``join``."""
    ends = np.cumsum(counts)
    word_ends = np.concatenate([[0], np.cumsum(np.abs(mask.sizes))])[ends]
    parts = zip(np.split(mask.sizes, ends), np.split(mask.words, word_ends), strict=True)
    return [SamplingMask(sizes, words) for sizes, words in parts][: len(counts)]


def select(mask: SamplingMask, chosen_N: npt.NDArray[np.bool_]) -> SamplingMask:
    """Return the sets of the chosen tokens."""
    return SamplingMask(mask.sizes[chosen_N], mask.words[np.repeat(chosen_N, np.abs(mask.sizes))])


def contains(mask: SamplingMask, token_ids_N: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """Return bool [N]: whether each token is in its set."""
    sizes_W = np.repeat(mask.sizes, np.abs(mask.sizes))
    ids_W = np.repeat(token_ids_N, np.abs(mask.sizes))
    column_W = _columns(mask)
    # Of a word of bits, only the token's bit matters; a negative id is in no set.
    bit_W = (mask.words >> (ids_W % BITS_PER_WORD)) & (column_W == ids_W // BITS_PER_WORD)
    hit_W = np.where(sizes_W > 0, mask.words == ids_W, bit_W == 1)
    hits_N = np.bincount(np.repeat(np.arange(len(mask)), np.abs(mask.sizes)), weights=hit_W, minlength=len(mask))
    return (hits_N > 0) | (mask.sizes == 0)


def _columns(mask: SamplingMask) -> npt.NDArray[np.integer]:
    """Return int [W]: the index of each word within its set."""
    lengths = np.abs(mask.sizes)
    starts = np.cumsum(lengths) - lengths
    return np.arange(len(mask.words)) - np.repeat(starts, lengths)


def largest_id(mask: SamplingMask) -> int:
    """Return an upper bound of all ids; -1 without words. For a set of bits: the last id of its last word."""
    is_id = np.repeat(mask.sizes > 0, np.abs(mask.sizes))
    last_column = int(_columns(mask)[~is_id].max(initial=-1))
    return max(int(mask.words[is_id].max(initial=-1)), BITS_PER_WORD * last_column if last_column >= 0 else -1)


def why_malformed(sizes: npt.NDArray[np.int32], words: npt.NDArray[np.int32], num_sampled: int) -> str:
    """Return the error in int32 arrays that should hold the sets of ``num_sampled`` tokens; empty if valid."""
    if sizes.shape != (num_sampled,):
        return f"expected sizes of {num_sampled} sampling masks, got {list(sizes.shape)}"
    # Converted to a wider type first: the absolute value of the lowest int32 does not fit into int32.
    lengths = np.abs(sizes.astype(np.int64))
    if words.shape != (lengths.sum(),):
        return f"expected {lengths.sum()} words of sampling masks, got {list(words.shape)}"
    if words[np.repeat(sizes > 0, lengths)].min(initial=0) < 0:
        return "expected token ids of 0 and above in sampling masks"
    return ""
