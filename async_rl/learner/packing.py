"""Packs sequences into micro-batches: rows without padding, balanced over ranks, never above the token limit.

The engine calls ``pack`` on rank 0 and sends each rank its part. A row holds only what the model must compute: a prompt
that a group's rollouts share occurs once, and tokens after the last one that predicts something are left out. Some
models can't compute such a row (``engine/self_test.py``). They compute the micro-batch's sequences as the rows of one
padded batch, and ``pack`` keeps that batch within the limit. Numpy only. Shape letters: T = tokens of a row, E = tokens
of its sequences placed end to end, S = its sequences, N = its predicted tokens (those under the loss mask).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal, NamedTuple

import numpy as np
import xxhash

from async_rl.errors import WireError
from async_rl.net.wire import SAME_VERSION
from async_rl.routes import RouteArray
from async_rl.sampling_mask import NOTHING_LEFT_OUT, SamplingMask, join

Packing = Literal["packed", "padded"]
"""How a model computes a micro-batch: as one row without padding, or with each sequence as a row that is padded."""

# Sequences that share a prompt are split into parts, each at most an even load divided by this number.
_PARTS_PER_BIN = 4
_DUMMY_ID = -1
_BUG = "this is a bug in async-rl, please report it"
_OPTIONAL = ("reference_logprobs", "proximal_logprobs", "verdicts")


def _no_logprobs() -> np.ndarray:
    return np.zeros(0, dtype=np.float32)


def _no_verdicts() -> np.ndarray:
    return np.zeros(0, dtype=np.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class TrainSequence:
    """One sequence to train on.

    Attributes:
        sequence_id: number of the sequence, unique in the step.
        token_ids: int32 [T].
        loss_mask: bool [T], True on tokens that are trained on. The first token never is.
        behavior_logprobs: float32 [T], nats.
        versions: int32 [T], the version that sampled each token.
        advantages: float32 [T], reward units.
        temperature: the sampling temperature.
        reference_logprobs: float32 [T], nats, of the frozen reference model. [0] if the loss needs none.
        proximal_logprobs: float32 [T], nats, of the policy that the step began with. [0] if the loss needs none.
        sampling_mask: for each token under the loss mask, the tokens that top-p and top-k left. None if they left all.
        verdicts: uint8 [T], a ``losses.rules.Verdict`` on each token. [0] if nothing judges tokens by the whole step.
        routes: [P, L, K], the experts to compute the first P tokens with (``async_rl.routes``): at least those before
            the last token under the loss mask. None if the model's routers choose.
    """

    sequence_id: int
    token_ids: np.ndarray
    loss_mask: np.ndarray
    behavior_logprobs: np.ndarray
    versions: np.ndarray
    advantages: np.ndarray
    temperature: float
    reference_logprobs: np.ndarray = field(default_factory=_no_logprobs)
    proximal_logprobs: np.ndarray = field(default_factory=_no_logprobs)
    sampling_mask: SamplingMask | None = None
    verdicts: np.ndarray = field(default_factory=_no_verdicts)
    routes: RouteArray | None = None

    @property
    def after_update(self) -> np.ndarray:
        """bool [T], True on tokens that were sampled with newer weights than the first token of their answer.

        Such a token was sampled with cached keys and values of older weights. An answer is an unbroken run of sampled
        tokens.
        Every turn of an environment is an answer with its own prefill.
        """
        is_sampled = self.versions >= 0
        begins = is_sampled & ~np.concatenate([[False], is_sampled[:-1]])
        first_of_run = np.flatnonzero(begins)[np.maximum(np.cumsum(begins) - 1, 0)] if begins.any() else 0
        return is_sampled & (self.versions > self.versions[first_of_run])


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Sequences packed into one row for one rank.

    Attributes:
        token_ids: int64 [T]; position_ids: int64 [T], from 0 in each sequence.
        token_index: int64 [E], the index into T of each sequence token; indices of a shared prompt occur repeatedly.
        cu_seqlens: int32 [S + 1], the place in E where each sequence starts.
        predict_index: int64 [N], the place in T of the hidden state that predicts each trained token.
        targets: int64 [N]; behavior_logprobs, advantages, temperatures: float32 [N]; versions: int32 [N];
            after_update: bool [N], as ``TrainSequence.after_update``.
        reference_logprobs, proximal_logprobs: float32 [N]; [0] if the loss needs none. verdicts: uint8 [N], or [0].
        routes: uint16 [T * L * K], the experts of the row's tokens; [0] if the model's routers choose. Sequences share
            a prompt only if its routes are the same.
        mask_sizes: int32 [N], mask_words: int32 [W], as in ``SamplingMask``; both [0] if nothing was left out.
        sequence_index: int64 [N], the index in S of each trained token's sequence.
        sequence_ids: int64 [S]; -1 is the dummy sequence of a rank that has nothing to do.
    """

    token_ids: np.ndarray
    position_ids: np.ndarray
    token_index: np.ndarray
    cu_seqlens: np.ndarray
    predict_index: np.ndarray
    targets: np.ndarray
    behavior_logprobs: np.ndarray
    advantages: np.ndarray
    reference_logprobs: np.ndarray
    proximal_logprobs: np.ndarray
    verdicts: np.ndarray
    routes: np.ndarray
    mask_sizes: np.ndarray
    mask_words: np.ndarray
    temperatures: np.ndarray
    versions: np.ndarray
    after_update: np.ndarray
    sequence_index: np.ndarray
    sequence_ids: np.ndarray


def pack(
    sequences: Sequence[TrainSequence], *, max_tokens: int, num_ranks: int, packing: Packing = "packed"
) -> list[list[MicroBatch]]:
    """Divide ``sequences`` into micro-batches, equally many for every rank. Return the micro-batches of each rank.

    There are as few micro-batches per rank as fit. Those of similar size get the same index on all ranks, since ranks
    wait for each other at every layer. Within a micro-batch sequences are sorted from long to short, so that padded
    attention (``engine/attention.py``) finds similar lengths side by side. The result is deterministic: ties keep the
    order. ``_packed_bins`` and ``_padded_bins`` decide which sequences share a micro-batch.

    A rank without any sequence in a round gets a dummy: one token, no predictions, id -1.

    Args:
        sequences: what to train on.
        max_tokens: largest size of a micro-batch: tokens of its row or, if ``padded``, number of its sequences times
            the tokens of the longest.
        num_ranks: number of ranks.
        packing: how the model computes a micro-batch.

    Raises:
        ValueError: a sequence is longer than ``max_tokens``, is empty, or trains on its first token (which nothing
            predicts); or its arrays differ in length.
    """
    for sequence in sequences:
        _check(sequence, max_tokens)
    for name in _OPTIONAL:
        given = [s.sequence_id for s in sequences if len(getattr(s, name))]
        if len(given) not in (0, len(sequences)):
            raise ValueError(
                f"expected {name} of all {len(sequences)} sequences or of none, got {len(given)}: {given}; {_BUG}"
            )
    num_routed = sum(s.routes is not None for s in sequences)
    if num_routed not in (0, len(sequences)):
        raise ValueError(f"expected routes of all {len(sequences)} sequences or of none, got {num_routed}; {_BUG}")
    spans = [_span(sequence) for sequence in sequences]
    if packing == "packed":
        bins = _packed_bins(spans, max_tokens, num_ranks)
        bins.sort(key=lambda members: -_row_tokens(spans, members))
    else:
        bins = _padded_bins(spans, max_tokens, num_ranks)
        bins.sort(key=lambda members: -_padded_tokens(spans, members))
    ranks: list[list[MicroBatch]] = [[] for _ in range(num_ranks)]
    for round_index in range(len(bins) // num_ranks):
        chosen = bins[round_index * num_ranks : (round_index + 1) * num_ranks]
        # The order of ranks alternates, so that no rank gets the larger micro-batch of every round.
        for rank, members in zip(ranks, chosen if round_index % 2 == 0 else reversed(chosen), strict=True):
            longest_first = sorted(members, key=lambda i: (-spans[i].length, i))
            rank.append(_micro_batch([sequences[i] for i in longest_first]) if members else dummy_micro_batch())
    return ranks


class PaddedCost(NamedTuple):
    """Shares of the tokens that padded rows compute and one packed row would not, each from 0 to below 1.

    Attributes:
        padding: share of the tokens that are padding.
        repeated: share of the tokens of prompts that another sequence of the micro-batch has computed.
    """

    padding: float
    repeated: float


def padded_cost(parts: Sequence[Sequence[MicroBatch]]) -> PaddedCost:
    """Return what padded rows cost in the micro-batches of all ranks. Dummies are not counted."""
    real = [mb for micro_batches in parts for mb in micro_batches if mb.sequence_ids[0] != _DUMMY_ID]
    lengths = [np.diff(mb.cu_seqlens) for mb in real]
    if not real:
        return PaddedCost(0.0, 0.0)
    computed = sum(len(each) * int(each.max()) for each in lengths)
    num_tokens, num_distinct = sum(int(each.sum()) for each in lengths), sum(len(mb.token_ids) for mb in real)
    return PaddedCost(1 - num_tokens / computed, (num_tokens - num_distinct) / computed)


def by_sequence(parts: Sequence[Sequence[MicroBatch]], values: Sequence[np.ndarray]) -> dict[int, np.ndarray]:
    """Undo ``pack``: return the values of each sequence's trained tokens, by sequence id.

    Args:
        parts: the micro-batches of each rank.
        values: for each rank, one value per trained token, micro-batch after micro-batch.

    Raises:
        ValueError: a rank does not have exactly one value per trained token.
    """
    found: dict[int, np.ndarray] = {}
    for micro_batches, of_rank in zip(parts, values, strict=True):
        counts = [np.bincount(mb.sequence_index, minlength=len(mb.sequence_ids)) for mb in micro_batches]
        ends = np.cumsum(np.concatenate(counts))
        if len(of_rank) != ends[-1]:
            raise ValueError(f"expected {ends[-1]} values, one per trained token, got {len(of_rank)}; {_BUG}")
        ids = np.concatenate([mb.sequence_ids for mb in micro_batches])
        found |= dict(zip(ids.tolist(), np.split(of_rank, ends[:-1]), strict=True))
    found.pop(_DUMMY_ID, None)
    return found


def dummy_micro_batch() -> MicroBatch:
    """Return a micro-batch of one token without predictions. A rank without work runs it, because the collectives
    need it.
    """
    nothing = TrainSequence(
        sequence_id=_DUMMY_ID,
        token_ids=np.zeros(1, dtype=np.int32),
        loss_mask=np.zeros(1, dtype=np.bool_),
        behavior_logprobs=np.zeros(1, dtype=np.float32),
        versions=np.zeros(1, dtype=np.int32),
        advantages=np.zeros(1, dtype=np.float32),
        temperature=1.0,
    )
    return _micro_batch([nothing])


def to_arrays(batch: MicroBatch) -> list[np.ndarray]:
    """Return the arrays of ``batch`` in the order of its fields, as ``wire.encode`` takes them."""
    return [getattr(batch, f.name) for f in fields(batch)]


def from_arrays(arrays: Sequence[np.ndarray]) -> MicroBatch:
    """Return the micro-batch whose arrays ``to_arrays`` returned.

    The arrays are copied, because those from the wire are read-only, which torch refuses.

    Raises:
        WireError: the number of arrays is wrong, or one has another dtype or is not one-dimensional.
    """
    if len(arrays) != len(_DTYPES):
        raise WireError(f"expected the {len(_DTYPES)} arrays of a micro-batch, got {len(arrays)}; {SAME_VERSION}")
    for (name, dtype), array in zip(_DTYPES.items(), arrays, strict=True):
        if array.dtype != dtype or array.ndim != 1:
            raise WireError(
                f"micro-batch: expected {name} as {dtype} [n], got {array.dtype} {list(array.shape)}; {SAME_VERSION}"
            )
    return MicroBatch(*(np.array(array) for array in arrays))


def _check(sequence: TrainSequence, max_tokens: int) -> None:
    length = len(sequence.token_ids)
    where = f"sequence {sequence.sequence_id}"
    parts = (sequence.loss_mask, sequence.behavior_logprobs, sequence.versions, sequence.advantages)
    if any(len(part) != length for part in parts):
        raise ValueError(f"{where}: expected arrays of one length, got {[length, *map(len, parts)]}; {_BUG}")
    for name in _OPTIONAL:
        if len(getattr(sequence, name)) not in (0, length):
            raise ValueError(
                f"{where}: expected {name} [{length}] or [0], got [{len(getattr(sequence, name))}]; {_BUG}"
            )
    if sequence.sampling_mask is not None and len(sequence.sampling_mask) != (
        num_trained := np.count_nonzero(sequence.loss_mask)
    ):
        raise ValueError(
            f"{where}: expected sampling masks for {num_trained} trained tokens, got {len(sequence.sampling_mask)}; "
            f"{_BUG}"
        )
    if sequence.routes is not None and len(sequence.routes) < _span(sequence).length:
        raise ValueError(
            f"{where}: expected routes of {_span(sequence).length} tokens, got {len(sequence.routes)}; {_BUG}"
        )
    if length == 0:
        raise ValueError(f"{where}: expected at least one token, got none; {_BUG}")
    if length > max_tokens:
        raise ValueError(
            f"{where}: expected at most learner.max_tokens = {max_tokens} tokens, got {length}; raise it to at least "
            f"sampling.max_prompt_tokens + sampling.max_new_tokens, or lower those"
        )
    if sequence.loss_mask[0]:
        raise ValueError(f"{where}: its first token is under the loss mask, but nothing predicts a first token; {_BUG}")


class _Span(NamedTuple):
    """Which tokens of a sequence are computed: the first ``length``. Sequences with the same ``key`` share the first
    ``prompt`` tokens, which they compute with the same experts.
    """

    prompt: int
    length: int
    key: bytes


def _span(sequence: TrainSequence) -> _Span:
    trained = np.flatnonzero(sequence.loss_mask)
    # The token before it predicts the last trained token, and nothing needs the tokens after.
    prompt, length = (int(trained[0]), int(trained[-1])) if len(trained) else (0, 1)
    key = sequence.token_ids[:prompt].tobytes()
    if sequence.routes is not None:
        key += xxhash.xxh3_128_digest(sequence.routes[:prompt].tobytes())
    return _Span(prompt, length, key)


def _row_tokens(spans: Sequence[_Span], members: Iterable[int]) -> int:
    """Return the number of row tokens (T) of a micro-batch that holds the sequences with indices ``members``."""
    chosen = list(members)
    prompts = {spans[i].key: spans[i].prompt for i in chosen}
    return sum(prompts.values()) + sum(spans[i].length - spans[i].prompt for i in chosen)


def _packed_bins(spans: Sequence[_Span], max_tokens: int, num_ranks: int) -> list[list[int]]:
    """Return, for every packed micro-batch, the indices of its sequences. Their number is a multiple of ``num_ranks``.

    Sequences with the same prompt stay together, in parts of at most a quarter of an even load, so that sharing a
    prompt costs little balance. The largest part comes first, and each part goes to the emptiest micro-batch (LPT). Any
    two micro-batches then differ by at most the largest part.
    """
    num_rounds = max(1, -(-_row_tokens(spans, range(len(spans))) // (max_tokens * num_ranks)))
    while (bins := _balanced_bins(spans, num_rounds * num_ranks, max_tokens)) is None:
        num_rounds += 1
    return bins


def _padded_bins(spans: Sequence[_Span], max_tokens: int, num_ranks: int) -> list[list[int]]:
    """Return, for every padded micro-batch, the indices of its sequences. Their number is a multiple of ``num_ranks``.

    The sequences are sorted from long to short and cut, so that a micro-batch has similar lengths and little padding.
    The largest micro-batch is as small as that number of cuts allows. Micro-batches at the end may be empty.
    """
    order = sorted(range(len(spans)), key=lambda i: (-spans[i].length, i))
    num_bins = num_ranks * max(1, -(-len(_cut(order, spans, max_tokens)) // num_ranks))
    low, high = spans[order[0]].length if order else 0, max_tokens
    while low < high:  # more room never needs more micro-batches
        middle = (low + high) // 2
        if len(_cut(order, spans, middle)) <= num_bins:
            high = middle
        else:
            low = middle + 1
    bins = _cut(order, spans, high)
    return bins + [[] for _ in range(num_bins - len(bins))]


def _cut(order: Sequence[int], spans: Sequence[_Span], capacity: int) -> list[list[int]]:
    """Cut ``order``, sequences from long to short, into as few padded batches of ``capacity`` tokens as possible."""
    bins: list[list[int]] = []
    for index in order:
        if not bins or (len(bins[-1]) + 1) * spans[bins[-1][0]].length > capacity:
            bins.append([])
        bins[-1].append(index)
    return bins


def _padded_tokens(spans: Sequence[_Span], members: Sequence[int]) -> int:
    """Return the number of tokens, padding included, of the padded batch of the sequences ``members``."""
    return len(members) * max((spans[i].length for i in members), default=0)


def _balanced_bins(spans: Sequence[_Span], num_bins: int, capacity: int) -> list[list[int]] | None:
    """Return, for every micro-batch, the indices of its sequences. None if a part does not fit into the emptiest
    one.
    """
    even_load = _row_tokens(spans, range(len(spans))) / num_bins
    parts = _parts(spans, limit=even_load / _PARTS_PER_BIN)
    parts.sort(key=lambda part: -part.num_tokens)
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, index) for index in range(num_bins)]
    for part in parts:
        load, index = heap[0]
        if load + part.num_tokens > capacity:
            return None
        bins[index] += part.members
        heapq.heapreplace(heap, (load + part.num_tokens, index))
    return bins


@dataclass(slots=True)
class _Part:
    """Indices of sequences with the same prompt that stay together, and the number of row tokens that they take."""

    members: list[int]
    num_tokens: int


def _parts(spans: Sequence[_Span], limit: float) -> list[_Part]:
    """Divide the sequences into parts with the same prompt, in order. A part has at most ``limit`` tokens or one
    sequence.
    """
    parts: list[_Part] = []
    open_parts: dict[bytes, _Part] = {}
    for index, span in enumerate(spans):
        part = open_parts.get(span.key)
        own = span.length - span.prompt
        if part is not None and part.num_tokens + own <= limit:
            part.members.append(index)
            part.num_tokens += own
        else:
            open_parts[span.key] = _Part([index], span.length)
            parts.append(open_parts[span.key])
    return parts


def _micro_batch(sequences: Sequence[TrainSequence]) -> MicroBatch:
    prompt_starts: dict[bytes, int] = {}
    tokens, positions, places, predict, trained_at = [], [], [], [], []
    routes = [np.zeros(0, np.uint16)]
    size = 0
    for sequence in sequences:
        span = _span(sequence)
        start = prompt_starts.setdefault(span.key, size)
        shared = span.prompt if start < size else 0
        place = np.arange(size - shared, size - shared + span.length)
        place[:shared] = np.arange(start, start + shared)
        tokens.append(sequence.token_ids[shared : span.length])
        positions.append(np.arange(shared, span.length))
        places.append(place)
        if sequence.routes is not None:
            routes.append(sequence.routes[shared : span.length].reshape(-1))
        trained_at.append(np.flatnonzero(sequence.loss_mask))
        predict.append(place[trained_at[-1] - 1])
        size += span.length - shared

    def trained(parts: Iterable[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
        return np.concatenate([part[at] for part, at in zip(parts, trained_at, strict=True)]).astype(dtype)

    def optional(parts: Sequence[np.ndarray], dtype: type[np.generic] = np.float32) -> np.ndarray:
        # ``_check`` has ensured that all sequences have these values, or none has.
        return trained(parts, dtype) if len(parts[0]) else np.zeros(0, dtype)

    num_trained = [len(at) for at in trained_at]
    mask = _sampling_mask([s.sampling_mask for s in sequences], num_trained)
    temperatures = np.array([s.temperature for s in sequences], dtype=np.float32)
    return MicroBatch(
        token_ids=np.concatenate(tokens).astype(np.int64),
        position_ids=np.concatenate(positions).astype(np.int64),
        token_index=np.concatenate(places).astype(np.int64),
        cu_seqlens=np.concatenate([[0], np.cumsum([len(place) for place in places])]).astype(np.int32),
        predict_index=np.concatenate(predict).astype(np.int64),
        targets=trained((s.token_ids for s in sequences), np.int64),
        behavior_logprobs=trained((s.behavior_logprobs for s in sequences), np.float32),
        advantages=trained((s.advantages for s in sequences), np.float32),
        reference_logprobs=optional([s.reference_logprobs for s in sequences]),
        proximal_logprobs=optional([s.proximal_logprobs for s in sequences]),
        verdicts=optional([s.verdicts for s in sequences], np.uint8),
        routes=np.concatenate(routes),
        mask_sizes=mask.sizes,
        mask_words=mask.words,
        temperatures=np.repeat(temperatures, num_trained),
        versions=trained((s.versions for s in sequences), np.int32),
        after_update=trained((s.after_update for s in sequences), np.bool_),
        sequence_index=np.repeat(np.arange(len(sequences), dtype=np.int64), num_trained),
        sequence_ids=np.array([s.sequence_id for s in sequences], dtype=np.int64),
    )


def _sampling_mask(of_sequences: Sequence[SamplingMask | None], num_trained: Sequence[int]) -> SamplingMask:
    if all(mask is None for mask in of_sequences):
        return NOTHING_LEFT_OUT
    whole = (SamplingMask(np.zeros(n, np.int32), NOTHING_LEFT_OUT.words) for n in num_trained)
    return join([w if mask is None else mask for mask, w in zip(of_sequences, whole, strict=True)])


_DTYPES = {f.name: getattr(dummy_micro_batch(), f.name).dtype for f in fields(MicroBatch)}
