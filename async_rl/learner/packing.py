"""Sequences to packed micro-batches: rows without padding, balanced over ranks, never above the token budget.

Numpy only. Shape letters: ``T`` packed tokens of a micro-batch, ``S`` its sequences, ``N`` its predicted tokens (those
under the loss mask). Called by the engine on rank 0; what leaves is scattered to the other ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from async_rl.errors import WireError


@dataclass(frozen=True, slots=True, eq=False)
class TrainSequence:
    """One sequence to train on.

    Attributes:
        sequence_id: unique in the step; skipped sequences are reported by it.
        token_ids: int32 [T].
        loss_mask: bool [T], True on tokens that are trained on; the first token never is.
        behavior_logprobs: float32 [T], nats.
        versions: int32 [T], the version that sampled each token.
        advantages: float32 [T], reward units.
        temperature: the one it was sampled at.
    """

    sequence_id: int
    token_ids: np.ndarray
    loss_mask: np.ndarray
    behavior_logprobs: np.ndarray
    versions: np.ndarray
    advantages: np.ndarray
    temperature: float


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Sequences packed into one row for one rank.

    Attributes:
        token_ids: int64 [T]; position_ids: int64 [T], from 0 in each sequence; cu_seqlens: int32 [S + 1].
        predict_index: int64 [N], where in T the hidden state lies that predicts each trained token (its position - 1).
        targets: int64 [N]; behavior_logprobs, advantages, temperatures: float32 [N]; versions: int32 [N].
        sequence_index: int64 [N], which of the S sequences each trained token is in.
        sequence_ids: int64 [S]; -1 for the dummy sequence of a rank that has nothing to do.
    """

    token_ids: np.ndarray
    position_ids: np.ndarray
    cu_seqlens: np.ndarray
    predict_index: np.ndarray
    targets: np.ndarray
    behavior_logprobs: np.ndarray
    advantages: np.ndarray
    temperatures: np.ndarray
    versions: np.ndarray
    sequence_index: np.ndarray
    sequence_ids: np.ndarray


def pack(sequences: Sequence[TrainSequence], *, max_tokens: int, num_ranks: int) -> list[list[MicroBatch]]:
    """Cut ``sequences`` into micro-batches: outer list ranks, inner list micro-batches, equally many on every rank.

    Longest first, each to the emptiest micro-batch (LPT), with as few micro-batches a rank as that fits. Any two
    micro-batches then differ by at most the longest sequence. Micro-batches of similar size get the same index on all
    ranks, since ranks wait for each other at every layer. Inside one, sequences go from long to short, so that padding
    attention (``attention.py``) finds similar lengths side by side. Deterministic: ties keep the given order.

    A rank that would have nothing in a round gets a dummy: one sequence of 2 tokens, no predictions, id -1.

    Raises:
        ValueError: a sequence is longer than ``max_tokens``, is empty, or trains on its first token (which nothing
            predicts); its arrays differ in length.
    """
    for sequence in sequences:
        _check(sequence, max_tokens)
    order = sorted(range(len(sequences)), key=lambda i: -len(sequences[i].token_ids))
    lengths = [len(sequences[i].token_ids) for i in order]
    num_rounds = max(1, -(-sum(lengths) // (max_tokens * num_ranks)))
    while (bins := _longest_first(lengths, num_rounds * num_ranks, max_tokens)) is None:
        num_rounds += 1
    bins.sort(key=lambda members: -sum(lengths[i] for i in members))
    ranks: list[list[MicroBatch]] = [[] for _ in range(num_ranks)]
    for round_index in range(num_rounds):
        chosen = bins[round_index * num_ranks : (round_index + 1) * num_ranks]
        # Back and forth, so that one rank does not get the larger half of every round.
        for rank, members in zip(ranks, chosen if round_index % 2 == 0 else reversed(chosen), strict=True):
            rank.append(_micro_batch([sequences[order[i]] for i in members]) if members else dummy_micro_batch())
    return ranks


def dummy_micro_batch() -> MicroBatch:
    """Two tokens, no predictions: what a rank runs to join the others' collectives."""
    nothing = TrainSequence(
        sequence_id=-1,
        token_ids=np.zeros(2, dtype=np.int32),
        loss_mask=np.zeros(2, dtype=np.bool_),
        behavior_logprobs=np.zeros(2, dtype=np.float32),
        versions=np.zeros(2, dtype=np.int32),
        advantages=np.zeros(2, dtype=np.float32),
        temperature=1.0,
    )
    return _micro_batch([nothing])


def to_arrays(batch: MicroBatch) -> list[np.ndarray]:
    """The arrays of ``batch`` in the order of its fields, as ``wire.encode`` takes them."""
    return [getattr(batch, f.name) for f in fields(batch)]


def from_arrays(arrays: Sequence[np.ndarray]) -> MicroBatch:
    """What ``to_arrays`` took apart. Copies: arrays off the wire are read-only, which torch does not take.

    Raises:
        WireError: not as many arrays as a micro-batch has, or one of another dtype or not one-dimensional.
    """
    if len(arrays) != len(_DTYPES):
        raise WireError(f"expected the {len(_DTYPES)} arrays of a micro-batch, got {len(arrays)}")
    for (name, dtype), array in zip(_DTYPES.items(), arrays, strict=True):
        if array.dtype != dtype or array.ndim != 1:
            raise WireError(f"expected {name} as {np.dtype(dtype)} [n], got {array.dtype} {list(array.shape)}")
    return MicroBatch(*(np.array(array) for array in arrays))


def _check(sequence: TrainSequence, max_tokens: int) -> None:
    length = len(sequence.token_ids)
    where = f"sequence {sequence.sequence_id}"
    parts = (sequence.loss_mask, sequence.behavior_logprobs, sequence.versions, sequence.advantages)
    if any(len(part) != length for part in parts):
        raise ValueError(f"{where}: expected arrays of one length, got {[length, *map(len, parts)]}")
    if length == 0:
        raise ValueError(f"{where}: expected at least one token, got none")
    if length > max_tokens:
        raise ValueError(
            f"{where} has {length} tokens, learner.max_tokens = {max_tokens}; raise learner.max_tokens to at least "
            f"sampling.max_prompt_tokens + sampling.max_new_tokens, or lower those"
        )
    if sequence.loss_mask[0]:
        raise ValueError(f"{where}: its first token is under the loss mask, but nothing predicts a first token")


def _longest_first(lengths: Sequence[int], num_bins: int, capacity: int) -> list[list[int]] | None:
    """Indices into descending ``lengths``, each put into the emptiest bin; None if one does not fit there."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, index) for index in range(num_bins)]
    for item, length in enumerate(lengths):
        load, index = heap[0]
        if load + length > capacity:
            return None
        bins[index].append(item)
        heapq.heapreplace(heap, (load + length, index))
    return bins


def _micro_batch(sequences: Sequence[TrainSequence]) -> MicroBatch:
    lengths = np.array([len(s.token_ids) for s in sequences])
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    token_ids = np.concatenate([s.token_ids for s in sequences]).astype(np.int64)
    trained = np.flatnonzero(np.concatenate([s.loss_mask for s in sequences]))
    sequence_index = np.repeat(np.arange(len(sequences)), lengths)[trained]
    temperatures = np.array([s.temperature for s in sequences], dtype=np.float32)
    return MicroBatch(
        token_ids=token_ids,
        position_ids=np.concatenate([np.arange(n, dtype=np.int64) for n in lengths]),
        cu_seqlens=cu_seqlens,
        predict_index=(trained - 1).astype(np.int64),
        targets=token_ids[trained],
        behavior_logprobs=np.concatenate([s.behavior_logprobs for s in sequences])[trained].astype(np.float32),
        advantages=np.concatenate([s.advantages for s in sequences])[trained].astype(np.float32),
        temperatures=temperatures[sequence_index],
        versions=np.concatenate([s.versions for s in sequences])[trained].astype(np.int32),
        sequence_index=sequence_index.astype(np.int64),
        sequence_ids=np.array([s.sequence_id for s in sequences], dtype=np.int64),
    )


_DTYPES = {
    "token_ids": np.int64,
    "position_ids": np.int64,
    "cu_seqlens": np.int32,
    "predict_index": np.int64,
    "targets": np.int64,
    "behavior_logprobs": np.float32,
    "advantages": np.float32,
    "temperatures": np.float32,
    "versions": np.int32,
    "sequence_index": np.int64,
    "sequence_ids": np.int64,
}
