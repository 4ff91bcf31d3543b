"""Which tokens top-p and top-k left to be sampled: one set of ids for each sampled token, packed. Numpy only.

Backends make it, ``records.TokenSequence`` carries it, and the learner renormalises over it: without it nobody can
tell what distribution a token came from. A set is *exact* and written in the shortest of three ways, so a token takes
4 bytes, and 4 more for each kept id, but never more than a bit for each id of the vocabulary. Shape letters:
N = sampled tokens, W = words, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BITS_PER_WORD = 32


@dataclass(frozen=True, slots=True, eq=False)
class KeptTokens:
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


NOTHING_LEFT_OUT = KeptTokens(np.zeros(0, np.int32), np.zeros(0, np.int32))
"""No token, so no set: what there is to carry where neither top-p nor top-k is on."""


def words_at_most(vocab_size: int) -> int:
    """Words of the longest set."""
    return -(-vocab_size // BITS_PER_WORD)


def pack_ids(counts: npt.NDArray[np.integer], ids: npt.NDArray[np.integer], *, vocab_size: int) -> KeptTokens:
    """Sets given by their ids: ``counts`` [N] of them each, at least one, ascending, set behind set in ``ids``."""
    limit = words_at_most(vocab_size)
    sizes = np.where(counts < limit, counts, -limit)
    sizes[counts == vocab_size] = 0
    if sizes.min(initial=1) > 0:
        return KeptTokens(sizes.astype(np.int32), ids.astype(np.int32))
    words: list[np.ndarray] = []
    for size, of_set in zip(sizes.tolist(), np.split(ids, np.cumsum(counts)[:-1]), strict=True):
        if size > 0:
            words.append(of_set.astype(np.int32))
        elif size < 0:
            bits = np.zeros(limit * BITS_PER_WORD, np.uint8)
            bits[of_set] = 1
            words.append(np.packbits(bits, bitorder="little").view("<i4"))
    return KeptTokens(sizes.astype(np.int32), np.concatenate([NOTHING_LEFT_OUT.words, *words]))


def join(parts: Sequence[KeptTokens]) -> KeptTokens:
    """The sets of all ``parts``, in order; at least one."""
    return KeptTokens(np.concatenate([p.sizes for p in parts]), np.concatenate([p.words for p in parts]))


def split(kept: KeptTokens, counts: Sequence[int]) -> list[KeptTokens]:
    """The inverse of ``join``: views of so many sets each."""
    ends = np.cumsum(counts)
    word_ends = np.concatenate([[0], np.cumsum(np.abs(kept.sizes))])[ends]
    parts = zip(np.split(kept.sizes, ends), np.split(kept.words, word_ends), strict=True)
    return [KeptTokens(sizes, words) for sizes, words in parts][: len(counts)]


def select(kept: KeptTokens, chosen_N: npt.NDArray[np.bool_]) -> KeptTokens:
    """The sets of the chosen tokens."""
    return KeptTokens(kept.sizes[chosen_N], kept.words[np.repeat(chosen_N, np.abs(kept.sizes))])


def contains(kept: KeptTokens, token_ids_N: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """bool [N]: whether each token is in its own set."""
    sizes_W = np.repeat(kept.sizes, np.abs(kept.sizes))
    ids_W = np.repeat(token_ids_N, np.abs(kept.sizes))
    column_W = _columns(kept)
    # In a word of bits everything but the token's own bit is noise; a negative id is in no set.
    bit_W = (kept.words >> (ids_W % BITS_PER_WORD)) & (column_W == ids_W // BITS_PER_WORD)
    hit_W = np.where(sizes_W > 0, kept.words == ids_W, bit_W == 1)
    hits_N = np.bincount(np.repeat(np.arange(len(kept)), np.abs(kept.sizes)), weights=hit_W, minlength=len(kept))
    return (hits_N > 0) | (kept.sizes == 0)


def _columns(kept: KeptTokens) -> npt.NDArray[np.integer]:
    """int [W]: which word of its set each is."""
    lengths = np.abs(kept.sizes)
    starts = np.cumsum(lengths) - lengths
    return np.arange(len(kept.words)) - np.repeat(starts, lengths)


def largest_id(kept: KeptTokens) -> int:
    """No id in any set is larger; of a set of bits, all those below 32 of the same word count. -1 without words."""
    is_id = np.repeat(kept.sizes > 0, np.abs(kept.sizes))
    last_column = int(_columns(kept)[~is_id].max(initial=-1))
    return max(int(kept.words[is_id].max(initial=-1)), BITS_PER_WORD * last_column if last_column >= 0 else -1)


def why_malformed(sizes: npt.NDArray[np.int32], words: npt.NDArray[np.int32], num_sampled: int) -> str:
    """What is wrong with arrays off the wire, int32, as the sets of ``num_sampled`` tokens; empty if nothing is."""
    if sizes.shape != (num_sampled,):
        return f"expected sizes of {num_sampled} sets of kept tokens, got {list(sizes.shape)}"
    # Widened first: the most negative int32 has no absolute value of its own.
    lengths = np.abs(sizes.astype(np.int64))
    if words.shape != (lengths.sum(),):
        return f"expected {lengths.sum()} words of kept tokens, got {list(words.shape)}"
    if words[np.repeat(sizes > 0, lengths)].min(initial=0) < 0:
        return "expected token ids of 0 and above in sets of kept tokens"
    return ""
