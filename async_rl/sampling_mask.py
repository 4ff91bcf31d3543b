"""The sampling mask: for each sampled token, the set of token ids that top-p and top-k left. Numpy only.

Generators record the mask, ``records.TokenSequence`` carries it, and the learner normalises its probabilities over each
set. Without the mask, the distribution from which a token was sampled is unknown. The sets are exact. A set is stored
as a list of ids, as one bit per id of the vocabulary, or as "all ids", whichever is shortest. Shape letters: N =
sampled tokens, W = int32 words of all sets, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BITS_PER_WORD = 32


@dataclass(frozen=True, slots=True, eq=False)
class SamplingMask:
    """A set of token ids for each of N sampled tokens.

    Attributes:
        sizes: int32 [N]. A number ``n`` above 0 means that the set is stored as ``n`` words, each a token id, in
            ascending order. Below 0, the set is stored as ``-n`` words of bits: id ``i`` is bit ``i % 32`` of word ``i
            // 32``. 0 means that the set is the whole vocabulary and has no words.
        words: int32 [W], the words of all sets, one set after the other. W is the sum of ``abs(sizes)``.
    """

    sizes: npt.NDArray[np.int32]
    words: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.sizes)


NOTHING_LEFT_OUT = SamplingMask(np.zeros(0, np.int32), np.zeros(0, np.int32))
"""A sampling mask for 0 tokens. It is used if neither top-p nor top-k is on."""


def words_at_most(vocab_size: int) -> int:
    """Return the largest number of int32 words that one set can take, for a vocabulary of this size."""
    return -(-vocab_size // BITS_PER_WORD)


def pack_ids(counts: npt.NDArray[np.integer], ids: npt.NDArray[np.integer], *, vocab_size: int) -> SamplingMask:
    """Build a sampling mask of N sets from their token ids.

    Args:
        counts: [N], the number of ids in each set, at least 1.
        ids: the ids of all sets, one set after the other, in ascending order within a set.
    """
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
    """Concatenate the sampling masks ``parts`` (at least one) in their order."""
    return SamplingMask(np.concatenate([p.sizes for p in parts]), np.concatenate([p.words for p in parts]))


def split(mask: SamplingMask, counts: Sequence[int]) -> list[SamplingMask]:
    """Split ``mask`` into consecutive parts, as views of it. Part ``i`` has the next ``counts[i]`` sets."""
    ends = np.cumsum(counts)
    word_ends = np.concatenate([[0], np.cumsum(np.abs(mask.sizes))])[ends]
    parts = zip(np.split(mask.sizes, ends), np.split(mask.words, word_ends), strict=True)
    return [SamplingMask(sizes, words) for sizes, words in parts][: len(counts)]


def select(mask: SamplingMask, chosen_N: npt.NDArray[np.bool_]) -> SamplingMask:
    """Return the mask with only those sets for which ``chosen_N`` (bool [N]) is True."""
    return SamplingMask(mask.sizes[chosen_N], mask.words[np.repeat(chosen_N, np.abs(mask.sizes))])


def contains(mask: SamplingMask, token_ids_N: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """Return bool [N]: whether token ``token_ids_N[i]`` is in set ``i`` of ``mask``."""
    sizes_W = np.repeat(mask.sizes, np.abs(mask.sizes))
    ids_W = np.repeat(token_ids_N, np.abs(mask.sizes))
    column_W = _columns(mask)
    # Of a word of bits, only the token's bit matters; a negative id is in no set.
    bit_W = (mask.words >> (ids_W % BITS_PER_WORD)) & (column_W == ids_W // BITS_PER_WORD)
    hit_W = np.where(sizes_W > 0, mask.words == ids_W, bit_W == 1)
    hits_N = np.bincount(np.repeat(np.arange(len(mask)), np.abs(mask.sizes)), weights=hit_W, minlength=len(mask))
    return (hits_N > 0) | (mask.sizes == 0)


def _columns(mask: SamplingMask) -> npt.NDArray[np.integer]:
    """Return int [W]: the index of each word within its own set."""
    lengths = np.abs(mask.sizes)
    starts = np.cumsum(lengths) - lengths
    return np.arange(len(mask.words)) - np.repeat(starts, lengths)


def largest_id(mask: SamplingMask) -> int:
    """Return a number that no token id in ``mask`` exceeds by 32 or more; -1 if the mask has no words.

    For sets of ids it is the largest id. For sets of bits it is the first id of the last word.
    """
    is_id = np.repeat(mask.sizes > 0, np.abs(mask.sizes))
    last_column = int(_columns(mask)[~is_id].max(initial=-1))
    return max(int(mask.words[is_id].max(initial=-1)), BITS_PER_WORD * last_column if last_column >= 0 else -1)


def why_malformed(sizes: npt.NDArray[np.int32], words: npt.NDArray[np.int32], num_sampled: int) -> str:
    """Check arrays (int32) that should be the sampling mask of ``num_sampled`` tokens.

    Return a message that says what is wrong; empty if nothing is.
    """
    if sizes.shape != (num_sampled,):
        return f"expected sizes of {num_sampled} sampling masks, got {list(sizes.shape)}"
    # Converted to a wider type first: the absolute value of the lowest int32 does not fit into int32.
    lengths = np.abs(sizes.astype(np.int64))
    if words.shape != (lengths.sum(),):
        return f"expected {lengths.sum()} words of sampling masks, got {list(words.shape)}"
    if words[np.repeat(sizes > 0, lengths)].min(initial=0) < 0:
        return "expected token ids of 0 and above in sampling masks"
    return ""
