"""Finds which sequences begin alike, so that a packed row computes their common beginning once. ``packing`` calls it.

A beginning is shared token by token: the prompt of a group, and all that the turns of a rollout have in common if each
turn is a sequence of its own, whether it is trained or not. A token's hidden state depends only on the tokens up to it
and, if experts are replayed, on their experts, so sharing changes no value. Shape letters: T = computed tokens of a
sequence, L = layers with experts, K = experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import xxhash


class Computed(NamedTuple):
    """The tokens that the model computes of one sequence.

    Attributes:
        token_ids: int32 [T].
        routes: [T, L, K], the experts of these tokens. None if the model's routers choose.
        key: bytes, by which sequences are sorted so that those that begin alike are neighbours.
    """

    token_ids: np.ndarray
    routes: np.ndarray | None
    key: bytes


class Beginning(NamedTuple):
    """The first ``num_tokens`` tokens of a sequence are those of the sequence with index ``of``, which is earlier."""

    of: int
    num_tokens: int


def computed(token_ids: np.ndarray, routes: np.ndarray | None, *, prompt: int) -> Computed:
    """Return the record of a sequence.

    Args:
        token_ids: int32 [T].
        routes: [P, L, K], with P at least T. None if the model's routers choose.
        prompt: number of first tokens that are likely to be shared. In the key, a digest of their routes follows them.
    """
    if routes is None:
        return Computed(token_ids, None, token_ids.tobytes())
    digest = xxhash.xxh3_128_digest(routes[:prompt].tobytes())
    key = token_ids[:prompt].tobytes() + digest + token_ids[prompt:].tobytes()
    return Computed(token_ids, routes[: len(token_ids)], key)


def sorted_by_key(sequences: Sequence[Computed]) -> list[int]:
    """Return the indices of ``sequences`` in the order of their keys. Equal ones keep their order."""
    return sorted(range(len(sequences)), key=lambda index: sequences[index].key)


def num_shared(one: Computed, other: Computed) -> int:
    """Return with how many equal tokens, computed by the same experts, two sequences begin."""
    size = min(len(one.token_ids), len(other.token_ids))
    size = _num_equal(one.token_ids[:size], other.token_ids[:size])
    if not size or one.routes is None or other.routes is None:
        return size
    return _num_equal(one.routes[:size].reshape(size, -1), other.routes[:size].reshape(size, -1))


def beginnings(sequences: Sequence[Computed]) -> list[Beginning]:
    """Return for each sequence with which earlier one it has the longest beginning in common.

    That is one of its two neighbours by key among the earlier ones. They are found from the last sequence to the first:
    each leaves the sorted list after its turn, and what its neighbours then share is the smaller of what it shared with
    each. With routes, sequences whose prompts' routes differ may be no neighbours. Then less is shared.
    """
    order = sorted_by_key(sequences)
    before = {right: left for left, right in pairwise(order)}
    after = dict(pairwise(order))
    shared = {right: num_shared(sequences[left], sequences[right]) for left, right in pairwise(order)}
    found = [Beginning(0, 0)] * len(sequences)
    for index in reversed(range(len(sequences))):
        left, right = before.pop(index, None), after.pop(index, None)
        with_left = 0 if left is None else shared[index]
        with_right = 0 if right is None else shared[right]
        if left is not None and with_left >= with_right:
            found[index] = Beginning(left, with_left)
        elif right is not None:
            found[index] = Beginning(right, with_right)
        if left is not None and right is not None:
            before[right], after[left], shared[right] = left, right, min(with_left, with_right)
        elif right is not None:
            del before[right]
        elif left is not None:
            del after[left]
    return found


def _num_equal(one: np.ndarray, other: np.ndarray) -> int:
    """Return the number of equal elements, or rows, before the first difference of two arrays of one length."""
    differs = (one != other) if one.ndim == 1 else (one != other).any(axis=1)
    if not len(differs):
        return 0
    first = int(differs.argmax())
    return first if differs[first] else len(one)
