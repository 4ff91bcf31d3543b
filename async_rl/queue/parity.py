"""Check that engine and learner compute the same log-probabilities from the same weights and tokens. No torch.

The learner scores a few given tokens while it holds a version. It sends them, as a ``Probe``, with the version's
announcement. Every generator scores the same tokens once it has activated that version, and returns its ``Answer``
through the queue. So neither side waits, and both sides score at the same version. ``learner.parity`` and
``generator.parity`` implement the two sides; the doctor compares in one process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from async_rl.errors import WireError
from async_rl.net.codec import field
from async_rl.net.wire import Limits, decode, encode
from async_rl.queue.messages import SAME_VERSION

MAX_SEQUENCES = 8
MAX_CONTEXT = 64
"""Maximum number of given tokens before the first scored one."""
MAX_SCORED = 32
"""Maximum number of scored tokens in a sequence."""

_LIMITS = Limits(max_bytes=1 << 20, max_header_bytes=1 << 16, max_arrays=2 * MAX_SEQUENCES, max_items=64, max_depth=4)
_EXACT_LIMIT = 1e-3
_ROUNDED_LIMIT = 0.05
_FAR = 20


@dataclass(frozen=True, slots=True, eq=False)
class ProbeSequence:
    """Tokens, int32 [T]. The last ``num_scored`` of them are scored, each given all tokens before it."""

    token_ids: np.ndarray
    num_scored: int


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """The tokens that generators must score at ``version``, and the learner's results.

    Attributes:
        temperature: the divisor of the logits. Top-p and top-k are not applied.
        logprobs: the learner's log-probabilities, float32 [num_scored] for each sequence, nats.
        dtype: the dtype in which the learner computes, by torch's name.
        limit: ``experimental.parity_limit``; if None, it depends on the dtypes of both sides.
    """

    lineage: str
    version: int
    temperature: float
    sequences: tuple[ProbeSequence, ...]
    logprobs: tuple[np.ndarray, ...]
    dtype: str
    limit: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """A generator's results at the probe's version.

    Attributes:
        logprobs: float32 [N], for all scored tokens in order; None if the engine can't score given tokens.
        backend, dtype: the engine, and the dtype in which it computes.
        cause: the likely cause of a difference above the limit, found by the generator's experiments; empty if unknown.
        excluded: the causes that those experiments excluded.
    """

    version: int
    backend: str
    dtype: str
    logprobs: np.ndarray | None
    cause: str = ""
    excluded: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Difference:
    """|engine - learner| over ``tokens`` log-probabilities, nats; ``bias`` is the mean of engine - learner.

    A difference is infinite if one side gives a token the probability 0.
    """

    tokens: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: float
    bias: float

    def metrics(self, prefix: str) -> dict[str, float]:
        """All fields but ``bias``, with ``prefix`` before each name, for a row of ``metrics.jsonl``."""
        names = ("tokens", "mean", "p50", "p95", "p99", "max")
        return {f"{prefix}{name}": getattr(self, name) for name in names}

    def __str__(self) -> str:
        return (
            f"mean |difference| {self.mean:.2g} nats over {self.tokens} tokens (median {self.p50:.2g}, 99th percentile "
            f"{self.p99:.2g}, largest {self.max:.2g})"
        )


def compare(engine: np.ndarray, learner: np.ndarray) -> Difference:
    """Compare log-probabilities [N] of the same tokens.

    Raises:
        ValueError: the two differ in length, or are empty.
    """
    if engine.shape != learner.shape or not engine.size:
        raise ValueError(
            f"expected log-probabilities of engine and learner in two arrays of one shape, with at least one number, "
            f"got shapes {list(engine.shape)} and {list(learner.shape)}; this is a bug in async-rl, please report it"
        )
    delta = engine.astype(np.float64) - learner.astype(np.float64)
    size = np.where(np.isfinite(delta), np.abs(delta), np.inf)
    p50, p95, p99 = (float(np.quantile(size, share, method="higher")) for share in (0.5, 0.95, 0.99))
    bias = float(delta.mean()) if np.isfinite(delta).all() else math.inf
    return Difference(len(delta), float(size.mean()), p50, p95, p99, float(size.max()), bias)


def parity_limit(limit: float | None, dtypes: Sequence[str]) -> float:
    """The mean |difference| above which the two sides count as different.

    Results of two kernels differ by about 0.01 if they round to bfloat16, and by 1e-6 in float32.
    """
    if limit is not None:
        return limit
    return _EXACT_LIMIT if set(dtypes) == {"float32"} else _ROUNDED_LIMIT


def far_limit(limit: float | None) -> float:
    """The mean |difference| above which a generator is quarantined: 20 times the limit of rounding, or ``limit``.

    By default it is 1 nat. No dtype that a generator claims changes it.
    """
    return _FAR * parity_limit(limit, ())


def looks_masked(engine: np.ndarray, learner: np.ndarray) -> bool:
    """Whether the engine seems to exclude tokens (top-p, top-k) that the learner counts.

    Then the engine gives every excluded token the probability 0, and all others a higher one than the learner does.
    """
    delta = engine.astype(np.float64) - learner.astype(np.float64)
    kept = delta[engine > -np.inf]
    if not kept.size:
        return False
    tolerance = 0.1 * float(np.abs(kept).mean())
    return bool((kept >= -tolerance).all()) and (kept.size < delta.size or float(kept.mean()) > 0)


def encode_probe(probe: Probe) -> bytes:
    """Encode a probe for ``Announcement.probe``."""
    fields = {
        "lineage": probe.lineage, "version": probe.version, "temperature": float(probe.temperature),
        "scored": [given.num_scored for given in probe.sequences], "dtype": probe.dtype, "limit": probe.limit,
    }  # fmt: skip
    return bytes(encode("probe", fields, [*(given.token_ids for given in probe.sequences), *probe.logprobs]))


def decode_probe(data: bytes) -> Probe:
    """The inverse of ``encode_probe``.

    Raises:
        WireError: the data is malformed.
    """
    message = decode(data, _LIMITS)
    scored, arrays = field(message.fields, "scored", list), message.arrays
    if not scored or len(arrays) != 2 * len(scored):
        raise WireError(
            f"malformed probe: expected {2 * len(scored)} arrays (tokens and logprobs of {len(scored)} sequences, at "
            f"least one sequence), got {len(arrays)}; {SAME_VERSION}"
        )
    tokens, logprobs = arrays[: len(scored)], arrays[len(scored) :]
    for ids, values, count in zip(tokens, logprobs, scored, strict=True):
        fits = type(count) is int and 0 < count == len(values) < len(ids) <= MAX_CONTEXT + MAX_SCORED
        if ids.dtype != np.int32 or values.dtype != np.float32 or not fits:
            raise WireError(
                f"malformed probe: expected {count} float32 logprobs and more int32 token ids than that, at most "
                f"{MAX_CONTEXT + MAX_SCORED}; got {len(values)} {values.dtype} logprobs and {len(ids)} {ids.dtype} "
                f"token ids; {SAME_VERSION}"
            )
    limit = message.fields.get("limit")
    return Probe(
        lineage=field(message.fields, "lineage", str),
        version=field(message.fields, "version", int),
        temperature=field(message.fields, "temperature", float),
        sequences=tuple(ProbeSequence(np.array(ids), count) for ids, count in zip(tokens, scored, strict=True)),
        logprobs=tuple(np.array(values) for values in logprobs),
        dtype=field(message.fields, "dtype", str),
        limit=None if limit is None else field(message.fields, "limit", float),
    )


def encode_answer(answer: Answer) -> bytes:
    """Encode an answer. The queue keeps it for the learner."""
    fields = {
        "version": answer.version, "backend": answer.backend, "dtype": answer.dtype, "cause": answer.cause,
        "excluded": list(answer.excluded),
    }  # fmt: skip
    return bytes(encode("answer", fields, [] if answer.logprobs is None else [answer.logprobs]))


def decode_answer(data: bytes) -> Answer:
    """The inverse of ``encode_answer``.

    Raises:
        WireError: the data is malformed.
    """
    message = decode(data, _LIMITS)
    fields: Any = message.fields
    excluded = field(fields, "excluded", list)
    if not all(isinstance(text, str) for text in excluded):
        types = sorted({type(cause).__name__ for cause in excluded})
        raise WireError(f"malformed answer to a probe: expected excluded causes as str, got {types}; {SAME_VERSION}")
    if message.arrays and (message.arrays[0].dtype != np.float32 or message.arrays[0].ndim != 1):
        logprobs = message.arrays[0]
        raise WireError(
            f"malformed answer to a probe: expected logprobs as float32 [N], got {logprobs.dtype} "
            f"{list(logprobs.shape)}; {SAME_VERSION}"
        )
    return Answer(
        version=field(fields, "version", int),
        backend=field(fields, "backend", str),
        dtype=field(fields, "dtype", str),
        logprobs=np.array(message.arrays[0]) if message.arrays else None,
        cause=field(fields, "cause", str),
        excluded=tuple(excluded),
    )
