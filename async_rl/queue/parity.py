"""Check that a generator's engine and the learner compute the same log-probabilities from the same weights and tokens.

While the learner has a version of the weights, it scores a few given tokens. It sends these tokens and its
log-probabilities, as a ``Probe``, with the announcement of the version. Each generator scores the same tokens once it
has activated that version, and sends its ``Answer`` through the queue. So no side waits, and both score with the same
version. ``learner.loop.parity`` and ``generator.parity`` implement the two sides. The doctor compares both sides in one
process. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np

from async_rl.errors import WireError
from async_rl.net.codec import read_as
from async_rl.net.wire import SAME_VERSION, Limits, decode, encode

MAX_SEQUENCES = 8
MAX_CONTEXT = 64
"""Maximum number of given tokens before the first scored token."""
MAX_SCORED = 32
"""Maximum number of scored tokens in a sequence."""

_LIMITS = Limits(max_bytes=1 << 20, max_header_bytes=1 << 16, max_arrays=2 * MAX_SEQUENCES, max_items=64, max_depth=4)
_EXACT_LIMIT = 1e-3
_ROUNDED_LIMIT = 0.05
_TEMPERATURES = (1.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.3, 1.5, 2.0)
"""Those that an engine may have applied in place of the right one, the likeliest first."""
_FAR = 20


@dataclass(frozen=True, slots=True, eq=False)
class ProbeSequence:
    """Tokens to score, int32 [T]. Each of the last ``num_scored`` tokens is scored given all tokens before it."""

    token_ids: np.ndarray
    num_scored: int


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """The tokens that generators must score at ``version``, and the learner's log-probabilities of them.

    Attributes:
        lineage: the learner's id.
        version: the weights version to score with.
        temperature: the number by which the logits are divided. Top-p and top-k are not applied.
        sequences: the tokens to score.
        logprobs: the learner's log-probabilities, in nats, float32 [num_scored] for each sequence.
        dtype: the dtype in which the learner computes, by torch's name.
        limit: ``experimental.parity_limit``. If None, the limit depends on the dtypes of both sides.
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
    """A generator's log-probabilities for a probe.

    Attributes:
        version: the weights version, as in the probe.
        backend: the name of the engine.
        dtype: the dtype in which the engine computes, by torch's name.
        logprobs: float32 [N], for the scored tokens of all sequences in order. None if the engine can't score given
            tokens.
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
    """How much the log-probabilities of engine and learner differ: |engine - learner| over ``tokens`` tokens, in nats.

    ``bias`` is the mean of engine - learner. A difference is infinite if one side gives a token the probability 0.
    """

    tokens: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: float
    bias: float

    def metrics(self, prefix: str) -> dict[str, float]:
        """Return all fields but ``bias`` by name, with ``prefix`` before each name, for a row of ``metrics.jsonl``."""
        names = ("tokens", "mean", "p50", "p95", "p99", "max")
        return {f"{prefix}{name}": getattr(self, name) for name in names}

    def __str__(self) -> str:
        return (
            f"mean |difference| {self.mean:.2g} nats over {self.tokens} tokens (median {self.p50:.2g}, 99th percentile "
            f"{self.p99:.2g}, largest {self.max:.2g})"
        )


def compare(engine: np.ndarray, learner: np.ndarray) -> Difference:
    """Return the difference between two arrays [N] of log-probabilities of the same tokens.

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
    """Return the mean |difference|, in nats, above which engine and learner count as different.

    It is ``limit`` or, if that is None, depends on the dtypes of both sides. Results of two kernels differ by about
    0.01 if they round to bfloat16, and by 1e-6 in float32.
    """
    if limit is not None:
        return limit
    return _EXACT_LIMIT if set(dtypes) == {"float32"} else _ROUNDED_LIMIT


def far_limit(limit: float | None) -> float:
    """Return the mean |difference|, in nats, above which a generator is quarantined: 20 times ``parity_limit``.

    The limit for rounded dtypes is used, whatever dtype a generator claims. By default the result is 1 nat.
    """
    return _FAR * parity_limit(limit, ())


def explains(candidate: np.ndarray, wanted: np.ndarray, before: Difference, limit: float) -> bool:
    """Return whether a changed setting explains a difference ``before``: with it, one side's log-probabilities
    ``candidate`` are within ``limit`` of the other side's, ``wanted``, and much nearer than before.
    """
    mean = compare(candidate, wanted).mean
    return mean <= limit and mean < 0.3 * before.mean


def other_temperature(
    score: Callable[[float], np.ndarray | None], asked: float, wanted: np.ndarray, before: Difference, limit: float
) -> float | None:
    """Return the temperature that explains a difference ``before`` at ``asked``. None if none that is tried does.

    ``score`` computes one side's log-probabilities at a temperature; ``wanted`` are the other side's.
    """
    for other in (temperature for temperature in _TEMPERATURES if temperature != asked):
        found = score(other)
        if found is not None and explains(found, wanted, before, limit):
            return other
    return None


def looks_masked(engine: np.ndarray, learner: np.ndarray) -> bool:
    """Return whether the engine seems to leave out tokens (by top-p or top-k) that the learner counts.

    In this case the engine gives every token left out the probability 0, and all others a higher one than the learner
    does.
    """
    delta = engine.astype(np.float64) - learner.astype(np.float64)
    kept = delta[engine > -np.inf]
    if not kept.size:
        return False
    tolerance = 0.1 * float(np.abs(kept).mean())
    return bool((kept >= -tolerance).all()) and (kept.size < delta.size or float(kept.mean()) > 0)


class ProbeFields(msgspec.Struct, frozen=True):
    lineage: str
    version: int
    temperature: float
    scored: list[Annotated[int, msgspec.Meta(gt=0)]]
    dtype: str
    limit: float | None


class AnswerFields(msgspec.Struct, frozen=True):
    version: int
    backend: str
    dtype: str
    cause: str
    excluded: tuple[str, ...]


def encode_probe(probe: Probe) -> bytes:
    """Return a probe as bytes, for ``Announcement.probe``."""
    scored = [given.num_scored for given in probe.sequences]
    fields = ProbeFields(probe.lineage, probe.version, probe.temperature, scored, probe.dtype, probe.limit)
    return encode("probe", fields, [*(given.token_ids for given in probe.sequences), *probe.logprobs])


def decode_probe(data: bytes) -> Probe:
    """Return the probe from bytes that ``encode_probe`` returned.

    Raises:
        WireError: the data is malformed.
    """
    message = decode(data, _LIMITS)
    fields, arrays = read_as(message.fields, ProbeFields), message.arrays
    scored = fields.scored
    if not scored or len(arrays) != 2 * len(scored):
        raise WireError(
            f"malformed probe: expected {2 * len(scored)} arrays (tokens and logprobs of {len(scored)} sequences, at "
            f"least one sequence), got {len(arrays)}; {SAME_VERSION}"
        )
    tokens, logprobs = arrays[: len(scored)], arrays[len(scored) :]
    for ids, values, count in zip(tokens, logprobs, scored, strict=True):
        fits = count == len(values) < len(ids) <= MAX_CONTEXT + MAX_SCORED
        if ids.dtype != np.int32 or values.dtype != np.float32 or not fits:
            raise WireError(
                f"malformed probe: expected {count} float32 logprobs and more int32 token ids than that, at most "
                f"{MAX_CONTEXT + MAX_SCORED}; got {len(values)} {values.dtype} logprobs and {len(ids)} {ids.dtype} "
                f"token ids; {SAME_VERSION}"
            )
    sequences = tuple(ProbeSequence(np.array(ids), count) for ids, count in zip(tokens, scored, strict=True))
    values = tuple(map(np.array, logprobs))
    return Probe(fields.lineage, fields.version, fields.temperature, sequences, values, fields.dtype, fields.limit)


def encode_answer(answer: Answer) -> bytes:
    """Return a generator's answer as bytes. The queue keeps the bytes for the learner."""
    fields = AnswerFields(answer.version, answer.backend, answer.dtype, answer.cause, answer.excluded)
    return encode("answer", fields, [] if answer.logprobs is None else [answer.logprobs])


def decode_answer(data: bytes) -> Answer:
    """Return the answer from bytes that ``encode_answer`` returned.

    Raises:
        WireError: the data is malformed.
    """
    message = decode(data, _LIMITS)
    fields = read_as(message.fields, AnswerFields)
    if message.arrays and (message.arrays[0].dtype != np.float32 or message.arrays[0].ndim != 1):
        logprobs = message.arrays[0]
        raise WireError(
            f"malformed answer to a probe: expected logprobs as float32 [N], got {logprobs.dtype} "
            f"{list(logprobs.shape)}; {SAME_VERSION}"
        )
    logprobs = np.array(message.arrays[0]) if message.arrays else None
    return Answer(fields.version, fields.backend, fields.dtype, logprobs, fields.cause, fields.excluded)
