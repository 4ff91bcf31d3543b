"""The sequences of one optimizer step, as the loop gives them to an engine, and the table of their tokens' columns.

A *column* has one value for each token, such as the advantage. ``TokenColumns`` declares every column once. Sequences,
micro-batches, batches on the device and the losses' inputs inherit it, and packing, division over ranks and the copy to
the device read the table (``COLUMNS``): a new column is one line here and its use. T = tokens of a sequence, N =
trained tokens of a micro-batch, K = a number of tokens of the vocabulary.
"""

# ruff: noqa: RUF009 (``_optional`` returns a field)
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from async_rl.records import PER_TOKEN
from async_rl.routes import RouteArray
from async_rl.sampling_mask import SamplingMask

A = TypeVar("A")
B = TypeVar("B")


class Column(NamedTuple):
    """How a column is stored.

    Attributes:
        dtype: on the host, and on the device unless ``is_index``.
        is_optional: whether all sequences of a step may lack it: then it is [0].
        is_index: whether torch indexes with its values: then they are int64 on the device.
    """

    dtype: type[np.generic]
    is_optional: bool = False
    is_index: bool = False


def _how(dtype: type[np.generic], **how: bool) -> dict[str, Column]:
    return {"column": Column(dtype, **how)}


def _optional(dtype: type[np.generic], **how: bool) -> Any:
    return field(default_factory=partial(np.zeros, 0, dtype), metadata=_how(dtype, is_optional=True, **how))


def _carried(name: str) -> Any:
    """Return the field of a column that rollouts carry under the same name (``records.PER_TOKEN``)."""
    dtype = PER_TOKEN[name].dtype.type
    return _optional(dtype) if PER_TOKEN[name].when else field(metadata=_how(dtype))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TokenColumns(Generic[A]):
    """The columns, as arrays of type A: [T] in a sequence, [N] elsewhere. An optional one is [0] if nothing needs it.

    Attributes:
        behavior_logprobs: nats, at sampling time and temperature.
        versions: the version that sampled the token.
        advantages: reward units, finite.
        reference_logprobs: nats, of the reference model.
        proximal_logprobs: nats, of the policy that the step began with. [0] also where that is the trained one: at the
            first update on a batch, where both have the same weights.
        verdicts: a ``losses.rules.Verdict``, if something judges tokens by the whole step.
        teacher_logprobs: nats, of the teacher.
        teacher_top_ids: the teacher's likeliest tokens, and teacher_top_logprobs: their log-probabilities, nats.
        value_targets: what the critic learns, and old_values: its values before the batch's first update; reward units.
        slopes: the derivative of a loss over whole sequences by the token's value.
    """

    behavior_logprobs: A = _carried("behavior_logprobs")
    versions: A = _carried("versions")
    advantages: A = field(metadata=_how(np.float32))
    reference_logprobs: A = _optional(np.float32)
    proximal_logprobs: A = _optional(np.float32)
    verdicts: A = _optional(np.uint8)
    teacher_logprobs: A = _optional(np.float32)
    teacher_top_ids: A = _optional(np.int32, is_index=True)
    teacher_top_logprobs: A = _optional(np.float32)
    value_targets: A = _optional(np.float32)
    old_values: A = _optional(np.float32)
    slopes: A = _optional(np.float32)

    def columns(self, change: Callable[[A], B]) -> dict[str, Any]:
        """Return every column by name: those with values changed, and the others as they are."""
        values = {name: getattr(self, name) for name in COLUMNS}
        return {name: change(value) if len(value) else value for name, value in values.items()}


COLUMNS: Mapping[str, Column] = MappingProxyType({f.name: f.metadata["column"] for f in fields(TokenColumns)})
"""The table of columns, by name."""
CARRIED = tuple(name for name in COLUMNS if name in PER_TOKEN)
"""Those that rollouts carry."""


def no_optional_columns() -> dict[str, np.ndarray]:
    """Return every optional column without values, by name."""
    return {name: np.zeros(0, column.dtype) for name, column in COLUMNS.items() if column.is_optional}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TrainSequence(TokenColumns[np.ndarray]):
    """One sequence to train on.

    Attributes:
        sequence_id: number of the sequence, unique in the step.
        token_ids: int32 [T].
        loss_mask: bool [T], True on tokens that are trained on. The first token never is.
        temperature: the sampling temperature.
        sampling_mask: for each token under the loss mask, the tokens that top-p and top-k left. None if they left all.
        routes: [P, L, K], the experts to compute the first P tokens with (``async_rl.routes``): at least those before
            the last token under the loss mask. None if the model's routers choose.
        is_recorded: whether ``UpdateStats.tokens`` has what the update computed for its tokens.
    """

    sequence_id: int
    token_ids: np.ndarray
    loss_mask: np.ndarray
    temperature: float
    sampling_mask: SamplingMask | None = None
    routes: RouteArray | None = None
    is_recorded: bool = False


def train_sequence(
    sequence_id: int, token_ids: Sequence[int] | np.ndarray, loss_mask: np.ndarray, *, temperature: float = 1.0,
    **fields: Any,
) -> TrainSequence:  # fmt: skip
    """Return a sequence for which nothing else is known: zeros stand in the columns that are not among ``fields``."""
    required = (name for name, column in COLUMNS.items() if not column.is_optional)
    zeros = {name: np.zeros(len(token_ids), COLUMNS[name].dtype) for name in required}
    return TrainSequence(
        sequence_id=sequence_id, token_ids=np.asarray(token_ids, np.int32), loss_mask=loss_mask,
        temperature=temperature, **{**zeros, **fields},
    )  # fmt: skip


def after_update(versions: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return for sequences with these ``versions``, [T] each: bool [T], True on tokens that were sampled with newer
    weights than the first token of their answer.

    Such a token was sampled with cached keys and values of older weights. An answer is an unbroken run of sampled
    tokens. Every turn of an environment is an answer with its own prefill.
    """
    together = np.concatenate(versions)
    bounds = bounds_of([len(each) for each in versions])
    is_sampled = together >= 0
    begins = np.zeros(len(together), dtype=np.bool_)
    begins[1:] = is_sampled[1:] != is_sampled[:-1]
    begins[bounds[:-1]] = True  # also where a sequence begins
    runs = np.flatnonzero(begins)
    first_versions = np.repeat(together[runs], np.diff(runs, append=len(together)))
    after = is_sampled & (together > first_versions)
    return [after[start:end] for start, end in pairwise(bounds.tolist())]


def bounds_of(sizes: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return int64 [n + 1]: where each of n things of these sizes begins if they follow each other, and the end."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])
