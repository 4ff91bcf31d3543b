"""Decides which sequences share a micro-batch, and which rank computes it. ``packing.pack`` calls it.

Ranks wait for each other at every layer, so the micro-batches with the same index on all ranks, a *round*, take as long
as the one with the most work. Rounds therefore hold micro-batches of similar work. The unit of work is one row token
through the layers. Attention comes on top of it, and grows with the square of a sequence's length.

Pure: numbers in, indices of sequences out. Shape letters: S = sequences, in the order in which the caller has them.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

# Sequences that begin alike are split into parts, each at most an even load divided by this number, unless computing
# their beginning again would cost too much: a sequence joins a part up to an even load if this many times the tokens
# that it shares exceed its own.
_PARTS_PER_BIN = 4
_SHARED_FACTOR = 2
# Micro-batches are opened where sequences do not fit. Then all is repeated with that number from the start, this many
# times at most, because sequences are spread more evenly over micro-batches that exist from the start.
_NUM_PASSES = 4


class Work(NamedTuple):
    """What a model computes besides its layers' products with row tokens, relative to those of one row token.

    Attributes:
        prediction: work of the head for one trained token.
        pair: work of attention for one pair of tokens, summed over layers.
    """

    prediction: float = 0.0
    pair: float = 0.0

    def beside(self, length: int, num_trained: int) -> float:
        """Return the work of one sequence's attention and predictions, in row tokens.

        Attention is computed for each sequence, shared prompts included, so each token has as many pairs as it has
        tokens up to it: ``length`` squared over 2, about.
        """
        return self.prediction * num_trained + self.pair * length * length / 2


class Sizes(NamedTuple):
    """The sequences of a step, as far as their division into micro-batches needs them.

    Attributes:
        lengths: [S], number of tokens that are computed of each sequence.
        beside: [S], work of each sequence besides that of its row tokens, in row tokens (``Work.beside``).
        order: [S], the sequences' indices in an order in which those that begin alike are neighbours.
        shared: [S], for each place in ``order``: how many first tokens that sequence shares with the one before it.
    """

    lengths: Sequence[int]
    beside: Sequence[float]
    order: Sequence[int]
    shared: Sequence[int]


def packed_bins(sizes: Sizes, *, max_tokens: int, num_ranks: int, min_rounds: int = 1) -> list[list[int]]:
    """Return, for every packed micro-batch, the indices of its sequences: from the one with the most work to the least.

    Their number is a multiple of ``num_ranks``, at least ``min_rounds`` times it, and about as small as ``max_tokens``
    allows. Sequences that begin alike
    stay together in parts. The longest part comes first, and each part goes to the micro-batch with the least work that
    has room (LPT). If none has room, each rank gets one more micro-batch. Some may be empty.
    """
    num_tokens = sum(sizes.lengths) - sum(sizes.shared)
    # No two sequences fit together whose own tokens exceed half the limit.
    own = (sizes.lengths[index] - shared for index, shared in zip(sizes.order, sizes.shared, strict=True))
    num_alone = sum(2 * tokens > max_tokens for tokens in own)
    num_rounds = max(min_rounds, -(-num_tokens // (max_tokens * num_ranks)), -(-num_alone // num_ranks))
    bins = _Bins(0)
    for _ in range(_NUM_PASSES):
        parts = _parts(sizes, num_tokens / (num_rounds * num_ranks))
        bins = _spread(parts, num_rounds * num_ranks, max_tokens, num_ranks)
        if len(bins.works) == num_rounds * num_ranks:
            break
        num_rounds = len(bins.works) // num_ranks
    by_work = sorted(range(len(bins.works)), key=lambda index: -bins.works[index])
    return [[i for part in bins.parts[index] for i in sizes.order[part.begin : part.end]] for index in by_work]


def padded_bins(sizes: Sizes, *, max_tokens: int, num_ranks: int, min_rounds: int = 1) -> list[list[int]]:
    """Return, for every padded micro-batch, the indices of its sequences. Their number is a multiple of ``num_ranks``,
    at least ``min_rounds`` times it.

    The sequences are sorted from long to short and cut, so that a micro-batch has similar lengths and little padding.
    The largest micro-batch is as small as that number of cuts allows. Those with the most work come first; the last may
    be empty.
    """
    lengths = sizes.lengths
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    num_bins = num_ranks * max(min_rounds, -(-len(_cut(order, lengths, max_tokens)) // num_ranks))
    low, high = lengths[order[0]] if order else 0, max_tokens
    while low < high:  # more room never needs more micro-batches
        middle = (low + high) // 2
        if len(_cut(order, lengths, middle)) <= num_bins:
            high = middle
        else:
            low = middle + 1
    bins = _cut(order, lengths, high)
    bins.sort(key=lambda members: -len(members) * (lengths[members[0]] + sizes.beside[members[0]]))
    return bins + [[] for _ in range(num_bins - len(bins))]


def dealt(bins: Sequence[list[int]], num_ranks: int) -> list[list[list[int]]]:
    """Return the micro-batches of each rank, round after round. ``bins`` are sorted by their work."""
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    for number, start in enumerate(range(0, len(bins), num_ranks)):
        chosen = bins[start : start + num_ranks]
        # The order of ranks alternates, so that no rank gets the larger micro-batch of every round.
        for rank, members in zip(ranks, chosen if number % 2 == 0 else reversed(chosen), strict=True):
            rank.append(members)
    return ranks


def _cut(order: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Cut ``order``, sequences from long to short, into as few padded batches of ``capacity`` tokens as possible."""
    bins: list[list[int]] = []
    for index in order:
        if not bins or (len(bins[-1]) + 1) * lengths[bins[-1][0]] > capacity:
            bins.append([])
        bins[-1].append(index)
    return bins


class _Part(NamedTuple):
    """Sequences that begin alike and stay together: those at the places from ``begin`` to before ``end`` in the order.

    ``num_tokens`` are the row tokens that they take, and ``work`` is their work.
    """

    num_tokens: int
    work: float
    begin: int
    end: int


class _Bins:
    """The parts, row tokens and work of each micro-batch."""

    def __init__(self, num_bins: int) -> None:
        self.parts: list[list[_Part]] = []
        self.tokens: list[int] = []
        self.works: list[float] = []
        self.add(num_bins)

    def add(self, num_bins: int) -> None:
        self.parts += [[] for _ in range(num_bins)]
        self.tokens += [0] * num_bins
        self.works += [0.0] * num_bins


def _parts(sizes: Sizes, even_load: float) -> list[_Part]:
    """Divide the sequences into parts, from many tokens to few. Each has at least one sequence."""
    parts: list[_Part] = []
    begin, num_tokens, work = 0, 0, 0.0
    for place, (index, shared) in enumerate(zip(sizes.order, sizes.shared, strict=True)):
        length, beside = sizes.lengths[index], sizes.beside[index]
        own = length - shared
        limit = even_load if _SHARED_FACTOR * shared > own + beside else even_load / _PARTS_PER_BIN
        if place and (not shared or num_tokens + own > limit):
            parts.append(_Part(num_tokens, work, begin, place))
            begin, num_tokens, work, own = place, 0, 0.0, length
        num_tokens += own
        work += own + beside
    if sizes.order:
        parts.append(_Part(num_tokens, work, begin, len(sizes.order)))
    parts.sort(key=lambda part: (-part.num_tokens, sizes.order[part.begin]))
    return parts


def _spread(parts: Sequence[_Part], num_bins: int, capacity: int, num_ranks: int) -> _Bins:
    """Put each part into the micro-batch with the least work that has room. Where none has room, ``num_ranks`` are
    added.

    ``parts`` are sorted from many tokens to few. A micro-batch without room for a part waits in ``full`` until a part
    is small enough, so the time is that of sorting.
    """
    bins = _Bins(num_bins)
    open_bins = [(0.0, index) for index in range(num_bins)]
    full: list[tuple[int, int]] = []  # (tokens that it has, index)
    for part in parts:
        room_for = capacity - part.num_tokens
        while full and full[0][0] <= room_for:
            _, index = heapq.heappop(full)
            heapq.heappush(open_bins, (bins.works[index], index))
        while open_bins and bins.tokens[open_bins[0][1]] > room_for:
            _, index = heapq.heappop(open_bins)
            heapq.heappush(full, (bins.tokens[index], index))
        if not open_bins:
            open_bins = [(0.0, len(bins.works) + number) for number in range(num_ranks)]
            bins.add(num_ranks)
        index = open_bins[0][1]
        bins.parts[index].append(part)
        bins.tokens[index] += part.num_tokens
        bins.works[index] += part.work
        heapq.heapreplace(open_bins, (bins.works[index], index))
    return bins
