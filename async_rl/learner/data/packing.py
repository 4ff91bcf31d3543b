"""Packs sequences into micro-batches: rows without padding, balanced over ranks, never above the token limit.

The engine calls ``pack`` on rank 0 and sends each rank its part. A row holds only what the model must compute: what
sequences have in common at their beginning occurs once (``beginnings.py``), and tokens after the last one that predicts
something are left out. ``balance.py`` decides who computes what. Some
models can't compute such a row (``model/self_test.py``). They compute the micro-batch's sequences as the rows of one
padded batch, and ``pack`` keeps that batch within the limit. Numpy only. Shape letters: T = tokens of a row, E = tokens
of its sequences placed end to end, S = its sequences, N = its predicted tokens (those under the loss mask).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from async_rl.learner.data.balance import Sizes, Work, dealt, packed_bins, padded_bins
from async_rl.learner.data.beginnings import Computed, beginnings, computed, num_shared, sorted_by_key
from async_rl.learner.interface import PaddedCost
from async_rl.learner.sequences import COLUMNS, TokenColumns, TrainSequence, after_update, bounds_of, train_sequence
from async_rl.sampling_mask import NOTHING_LEFT_OUT, SamplingMask, join

Packing = Literal["packed", "padded"]
"""How a model computes a micro-batch: as one row without padding, or with each sequence as a row that is padded."""

_ROW_TOKENS_ONLY = Work()
_DUMMY_ID = -1
_BUG = "this is a bug in async-rl, please report it"
_OPTIONAL = tuple(name for name, column in COLUMNS.items() if column.is_optional)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MicroBatch(TokenColumns[np.ndarray]):
    """Sequences packed into one row for one rank.

    Attributes:
        token_ids: int32 [T]; position_ids: int32 [T], from 0 in each sequence.
        token_index: int32 [E], the index into T of each sequence token; indices of a shared beginning occur repeatedly.
        cu_seqlens: int32 [S + 1], the place in E where each sequence starts.
        predict_index: int32 [N], the place in T of the hidden state that predicts each trained token.
        targets: int32 [N]; temperatures: float32 [N]; after_update: bool [N], as ``sequences.after_update``.
        routes: uint16 [T * L * K], the experts of the row's tokens; [0] if the model's routers choose. Sequences share
            a prompt only if its routes are the same.
        mask_sizes: int32 [N], mask_words: int32 [W], as in ``SamplingMask``; both [0] if nothing was left out.
        sequence_index: int32 [N], the index in S of each trained token's sequence.
        sequence_ids: int64 [S]; -1 is the dummy sequence of a rank that has nothing to do.
    """

    token_ids: np.ndarray
    position_ids: np.ndarray
    token_index: np.ndarray
    cu_seqlens: np.ndarray
    predict_index: np.ndarray
    targets: np.ndarray
    routes: np.ndarray
    mask_sizes: np.ndarray
    mask_words: np.ndarray
    temperatures: np.ndarray
    after_update: np.ndarray
    sequence_index: np.ndarray
    sequence_ids: np.ndarray


def pack(
    sequences: Sequence[TrainSequence],
    *,
    max_tokens: int,
    num_ranks: int,
    packing: Packing = "packed",
    work: Work = _ROW_TOKENS_ONLY,
    min_rounds: int = 1,
) -> list[list[MicroBatch]]:
    """Divide ``sequences`` into micro-batches, equally many for every rank. Return the micro-batches of each rank.

    There are about as few micro-batches per rank as fit. Those of similar work get the same index on all ranks, since
    ranks wait for each other at every layer (``balance.py``). Within a micro-batch sequences are sorted from long to
    short. The result is deterministic: ties keep the order.

    A rank without any sequence in a round gets a dummy: one token, no predictions, id -1.

    Args:
        sequences: those of one optimizer step. Their order is kept only among equals.
        max_tokens: largest size of a micro-batch: tokens of its row or, if ``padded``, number of its sequences times
            the tokens of the longest.
        num_ranks: number of ranks.
        packing: whether the model computes a micro-batch as one row or as padded rows.
        work: what the model computes besides its layers' products with row tokens.
        min_rounds: smallest number of micro-batches of each rank, if there are so many sequences.

    Raises:
        ValueError: a sequence is longer than ``max_tokens``, is empty, or trains on its first token (which nothing
            predicts); its arrays differ in length; or only some sequences have optional values.
    """
    for sequence in sequences:
        _check(sequence, max_tokens)
    for name in _OPTIONAL:
        given = [s.sequence_id for s in sequences if len(getattr(s, name))]
        if len(given) not in (0, len(sequences)):
            raise ValueError(
                f"expected {name} of all {len(sequences)} sequences or of none, got {len(given)}: {given}; {_BUG}"
            )
    spans = [_span(sequence) for sequence in sequences]
    order = sorted_by_key([span.computed for span in spans])
    neighbours = pairwise(order)
    sizes = Sizes(
        lengths=[span.length for span in spans],
        beside=[work.beside(span.length, span.num_trained) for span in spans],
        order=order,
        shared=[0] * bool(order) + [num_shared(spans[one].computed, spans[two].computed) for one, two in neighbours],
    )
    divide = packed_bins if packing == "packed" else padded_bins
    min_rounds = max(1, min(min_rounds, len(sequences) // num_ranks))
    ranks = dealt(divide(sizes, max_tokens=max_tokens, num_ranks=num_ranks, min_rounds=min_rounds), num_ranks)
    return [_micro_batches(sequences, spans, members) for members in ranks]


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
    """
    found: dict[int, np.ndarray] = {}
    for micro_batches, of_rank in zip(parts, values, strict=True):
        counts = [np.bincount(mb.sequence_index, minlength=len(mb.sequence_ids)) for mb in micro_batches]
        ends = np.cumsum(np.concatenate(counts))
        ids = np.concatenate([mb.sequence_ids for mb in micro_batches])
        found |= dict(zip(ids.tolist(), np.split(of_rank, ends[:-1]), strict=True))
    found.pop(_DUMMY_ID, None)
    return found


def dummy_micro_batch() -> MicroBatch:
    """Return a micro-batch of one token without predictions. A rank without work runs it, because the collectives
    need it.
    """
    nothing = train_sequence(_DUMMY_ID, [0], np.zeros(1, np.bool_))
    return _micro_batches([nothing], [_span(nothing)], [[0]])[0]


def to_arrays(batch: MicroBatch) -> list[np.ndarray]:
    """Return the arrays of ``batch`` in the order of its fields, as ``wire.encode`` takes them."""
    return [getattr(batch, f.name) for f in fields(batch)]


def from_arrays(arrays: Sequence[np.ndarray]) -> MicroBatch:
    """Return the micro-batch whose arrays ``to_arrays`` returned.

    The arrays are copied, because those from the wire are read-only, which torch refuses.

    Raises:
        ValueError: the number of arrays is wrong.
    """
    return MicroBatch(**{f.name: np.array(array) for f, array in zip(fields(MicroBatch), arrays, strict=True)})


def _check(sequence: TrainSequence, max_tokens: int) -> None:
    length = len(sequence.token_ids)
    where = f"sequence {sequence.sequence_id}"
    lengths = {"loss_mask": len(sequence.loss_mask)} | {name: len(getattr(sequence, name)) for name in COLUMNS}
    for name, got in lengths.items():
        if got != length and (got or name not in _OPTIONAL):
            raise ValueError(f"{where}: expected {name} of {length} tokens, got {got}; {_BUG}")
    if length > max_tokens:
        raise ValueError(
            f"{where}: expected at most learner.max_tokens x parallel.sequence = {max_tokens} tokens, got {length}; "
            f"raise this to at least sampling.max_prompt_tokens + sampling.max_new_tokens, or lower those"
        )
    if sequence.loss_mask[0]:
        raise ValueError(f"{where}: its first token is under the loss mask, but nothing predicts a first token; {_BUG}")


class _Span(NamedTuple):
    """Which tokens of a sequence are computed and trained.

    Attributes:
        begin, end: the range from its first trained token to the one after its last; empty if there is none.
        num_trained: number of trained tokens in this range.
        computed: the tokens that are computed: the one before it predicts the last trained token, and nothing needs the
            tokens after.
    """

    begin: int
    end: int
    num_trained: int
    computed: Computed

    @property
    def length(self) -> int:
        return len(self.computed.token_ids)


def _span(sequence: TrainSequence) -> _Span:
    """Return the span of a checked sequence.

    Raises:
        ValueError: it has another number of sampling masks than trained tokens.
    """
    mask = sequence.loss_mask
    num_trained = int(np.count_nonzero(mask))
    begin = int(mask.argmax()) if num_trained else 1
    end = len(mask) - int(mask[::-1].argmax()) if num_trained else 1
    if sequence.sampling_mask is not None and len(sequence.sampling_mask) != num_trained:
        raise ValueError(
            f"sequence {sequence.sequence_id}: expected sampling masks for {num_trained} trained tokens, got "
            f"{len(sequence.sampling_mask)}; {_BUG}"
        )
    length = max(1, end - 1)
    return _Span(begin, end, num_trained, computed(sequence.token_ids[:length], sequence.routes, prompt=begin))


class _Rows(NamedTuple):
    """The rows of several micro-batches, one after another. Arrays are as in ``MicroBatch``.

    Attributes:
        places: int64 [S + 1], where the tokens of each sequence begin in ``token_index``, and the end.
        row_places: int64 [S + 1], where each sequence's own tokens begin in ``token_ids``, and the end.
    """

    token_ids: np.ndarray
    position_ids: np.ndarray
    token_index: np.ndarray
    routes: np.ndarray
    places: np.ndarray
    row_places: np.ndarray


def _micro_batches(
    sequences: Sequence[TrainSequence], spans: Sequence[_Span], members: Sequence[Sequence[int]]
) -> list[MicroBatch]:
    """Return the micro-batches of the sequences with indices ``members``; a dummy where there are none.

    Arrays are computed for all of them together, and each micro-batch gets its parts.
    """
    in_order = [sorted(each, key=lambda i: (-spans[i].length, i)) for each in members]
    bounds = bounds_of([len(each) for each in in_order])
    chosen = [sequences[i] for each in in_order for i in each]
    if not chosen:
        return [dummy_micro_batch() for _ in members]
    of_chosen = [spans[i] for each in in_order for i in each]
    rows = _rows([span.computed for span in of_chosen], bounds)
    columns, trained_places = _trained(chosen, of_chosen, rows, bounds)
    firsts = bounds.tolist()
    at, row_at = rows.places[bounds].tolist(), rows.row_places[bounds].tolist()
    trained_at = trained_places[bounds].tolist()
    routes_per_token = len(rows.routes) // len(rows.token_ids)
    ids = np.array([sequence.sequence_id for sequence in chosen], dtype=np.int64)
    found: list[MicroBatch] = []
    for number, (first, last) in enumerate(pairwise(firsts)):
        if first == last:
            found.append(dummy_micro_batch())
            continue
        row = slice(row_at[number], row_at[number + 1])
        trained = slice(trained_at[number], trained_at[number + 1])
        counts = trained_places[first : last + 1]
        mask = _sampling_mask([s.sampling_mask for s in chosen[first:last]], counts[1:] - counts[:-1])
        found.append(
            MicroBatch(
                token_ids=rows.token_ids[row],
                position_ids=rows.position_ids[row],
                token_index=rows.token_index[at[number] : at[number + 1]],
                cu_seqlens=(rows.places[first : last + 1] - at[number]).astype(np.int32),
                routes=rows.routes[row.start * routes_per_token : row.stop * routes_per_token],
                mask_sizes=mask.sizes,
                mask_words=mask.words,
                sequence_ids=ids[first:last],
                **{name: values[trained] for name, values in columns.items()},
            )
        )
    return found


def _rows(sequences: Sequence[Computed], bounds: np.ndarray) -> _Rows:
    """Return the rows of micro-batches. ``bounds`` says which sequences each has, as ``cu_seqlens`` does for tokens."""
    shared_with = [b for first, last in pairwise(bounds.tolist()) for b in beginnings(sequences[first:last])]
    lengths = np.array([len(sequence.token_ids) for sequence in sequences])
    shared = np.array([beginning.num_tokens for beginning in shared_with])
    own = lengths - shared
    places, row_places = bounds_of(lengths), bounds_of(own)
    num_before = np.repeat(row_places[bounds[:-1]], np.diff(bounds))  # tokens of earlier rows, for each sequence
    token_index = _counting(places[:-1] - (row_places[:-1] - num_before - shared), lengths)
    starts = places.tolist()
    firsts = np.repeat(bounds[:-1], np.diff(bounds)).tolist()
    for start, first, (of, num_tokens) in zip(starts, firsts, shared_with, strict=False):
        if num_tokens:
            other = starts[first + of]
            token_index[start : start + num_tokens] = token_index[other : other + num_tokens]
    parts = list(zip(sequences, shared.tolist(), strict=True))
    routes = [sequence.routes[first:].reshape(-1) for sequence, first in parts if sequence.routes is not None]
    return _Rows(
        token_ids=np.concatenate([sequence.token_ids[first:] for sequence, first in parts]).astype(
            np.int32, copy=False
        ),
        position_ids=_counting(row_places[:-1] - shared, own),
        token_index=token_index,
        routes=np.concatenate([np.zeros(0, np.uint16), *routes]),
        places=places,
        row_places=row_places,
    )


def _trained(
    sequences: Sequence[TrainSequence], spans: Sequence[_Span], rows: _Rows, bounds: np.ndarray
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the fields of ``MicroBatch`` that have a value for each trained token, and where those of each sequence
    begin, int64 [S + 1].
    """
    num_trained = np.array([span.num_trained for span in spans])
    ranges = [slice(span.begin, span.end) for span in spans]
    is_trained: np.ndarray | None = None  # of the tokens in ``ranges``; None: all are
    if sum(span.end - span.begin for span in spans) != num_trained.sum():
        is_trained = np.concatenate([s.loss_mask[place] for s, place in zip(sequences, ranges, strict=True)])

    def trained(parts: Iterable[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
        values = np.concatenate([part[place] for part, place in zip(parts, ranges, strict=True)])
        return (values if is_trained is None else values[is_trained]).astype(dtype, copy=False)

    starts = zip(rows.places.tolist(), spans, strict=False)
    predicting = np.concatenate([rows.token_index[at + s.begin - 1 : at + s.end - 1] for at, s in starts])
    temperatures = np.array([s.temperature for s in sequences], dtype=np.float32)
    index_in_batch = np.arange(len(spans)) - np.repeat(bounds[:-1], np.diff(bounds))
    columns = {
        "predict_index": predicting if is_trained is None else predicting[is_trained],
        "targets": trained((s.token_ids for s in sequences), np.int32),
        "temperatures": np.repeat(temperatures, num_trained),
        "after_update": trained(after_update([s.versions for s in sequences]), np.bool_),
        "sequence_index": np.repeat(index_in_batch.astype(np.int32), num_trained),
    }
    for name, column in COLUMNS.items():
        parts = [getattr(s, name) for s in sequences]
        # ``pack`` has ensured that all sequences have an optional column, or none has.
        columns[name] = trained(parts, column.dtype) if len(parts[0]) else np.zeros(0, column.dtype)
    return columns, bounds_of(num_trained)


def _counting(offsets: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return int32 [sum of sizes]: 0, 1, 2 and so on, less an offset for each run of these sizes."""
    return np.arange(sizes.sum(), dtype=np.int32) - np.repeat(offsets.astype(np.int32), sizes)


def _sampling_mask(of_sequences: Sequence[SamplingMask | None], num_trained: np.ndarray) -> SamplingMask:
    if all(mask is None for mask in of_sequences):
        return NOTHING_LEFT_OUT
    whole = (SamplingMask(np.zeros(n, np.int32), NOTHING_LEFT_OUT.words) for n in num_trained)
    return join([w if mask is None else mask for mask, w in zip(of_sequences, whole, strict=True)])
