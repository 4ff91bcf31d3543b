"""A generator's answer to a probe: what its engine gives the learner's tokens, and why it differs if it does. No torch.

Called by the loop once the probe's version is active, so engine and weights are at that version while this runs.
Where the difference is above the limit, cheap experiments tell the likely causes apart, the surest first.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from async_rl.generator.backend import Backend
from async_rl.queue.parity import Answer, Probe, ProbeSequence, compare, looks_masked, parity_limit

logger = logging.getLogger(__name__)

ScoringMode = Literal["cached_decode", "full_forward", "float32_head"]
"""How to score tokens: one by one over cached keys and values, as rollouts are sampled; in one forward pass over the
whole text, without a cache; or in one pass with the output head in float32."""

_TEMPERATURES = (1.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.3, 1.5, 2.0)
_SHOWN_NAMES = 5


@runtime_checkable
class ScoringBackend(Protocol):
    """What a backend has in addition to ``Backend`` if it can score tokens."""

    @property
    def name(self) -> str:
        """As in ``generator.backend``."""
        ...

    @property
    def dtype(self) -> str:
        """What the engine computes in, by torch's name."""
        ...

    def score_tokens(
        self, sequences: Sequence[ProbeSequence], temperature: float, mode: ScoringMode = "cached_decode"
    ) -> np.ndarray | None:
        """Log-probabilities of the scored tokens under the active weights: float32, nats, sequence after sequence.

        None if the engine has no such ``mode``. Running sequences are left as they are.
        """
        ...

    def digests(self) -> Mapping[str, str]:
        """A digest of every parameter as the engine holds it at this moment, by the engine's names."""
        ...


def answer_probe(backend: Backend, probe: Probe, weights: Mapping[str, Any]) -> Answer:
    """Score ``probe``; ``weights`` are those of its version, verified as they arrived, and active."""
    if not isinstance(backend, ScoringBackend):
        return Answer(probe.version, type(backend).__name__, "", None)
    found = backend.score_tokens(probe.sequences, probe.temperature)
    if found is None:
        return Answer(probe.version, backend.name, backend.dtype, None)
    wanted = np.concatenate(probe.logprobs)
    limit = parity_limit(probe.limit, (probe.dtype, backend.dtype))
    cause, excluded = "", []
    if not compare(found, wanted).mean <= limit:
        logger.warning("version %d: %s; looking for the cause", probe.version, compare(found, wanted))
        cause, excluded = _cause(backend, probe, weights, found, wanted, limit)
    return Answer(probe.version, backend.name, backend.dtype, found, cause, tuple(excluded))


def _cause(
    backend: Any, probe: Probe, weights: Mapping[str, Any], found: np.ndarray, wanted: np.ndarray, limit: float
) -> tuple[str, list[str]]:
    """The likely cause (empty: none found), and what is excluded."""
    excluded: list[str] = []
    if stale := _stale_tensors(backend, probe.version, weights):
        shown = ", ".join(stale[:_SHOWN_NAMES]) + (f" and {len(stale) - _SHOWN_NAMES} more" if stale[5:] else "")
        return f"stale or corrupt tensors: the engine held other bytes than it had received of {shown}", excluded
    again = backend.score_tokens(probe.sequences, probe.temperature)
    if again is not None and _explains(again, found, wanted, limit):
        return (
            "stale or corrupt weights: since the same verified bytes were activated once more the engine agrees; which "
            "tensor it was, it can't tell"
        ), excluded
    excluded.append("the engine holds exactly the tensors that it received")
    if cause := temperature_cause(backend, probe, found, wanted, limit):
        return cause, excluded
    excluded.append("no other temperature explains it")
    if looks_masked(found, wanted):
        return (
            "a top-p or top-k mask that nobody asked for: the engine gives every token more than the learner does, "
            "or nothing at all; look for sampling defaults of the model (generation_config.json)"
        ), excluded
    full_forward = backend.score_tokens(probe.sequences, probe.temperature, "full_forward")
    if full_forward is not None:
        if _explains(full_forward, found, wanted, limit):
            return (
                "reuse of keys and values: over its cache the engine gives the tokens other log-probabilities than in "
                "one pass over the whole text, which agrees with the learner"
            ), excluded
        excluded.append("it is the same without cached keys and values")
    exact = backend.score_tokens(probe.sequences, probe.temperature, "float32_head")
    if exact is not None:
        if _explains(exact, found, wanted, limit):
            return f"the precision of the output head: in {backend.dtype} it differs, in float32 it agrees", excluded
        excluded.append("a head in float32 changes little")
    if backend.dtype != probe.dtype:
        return (
            f"precision: the engine computes in {backend.dtype}, the learner in {probe.dtype} (model.dtype)",
            excluded,
        )
    return "", excluded


def _stale_tensors(backend: Any, version: int, weights: Mapping[str, Any]) -> list[str]:
    """Parameters that change when the same version is activated once more: they were not what had arrived."""
    before = dict(backend.digests())
    backend.activate(version, weights)
    after = backend.digests()
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def temperature_cause(backend: Any, probe: Probe, found: np.ndarray, wanted: np.ndarray, limit: float) -> str:
    """Whether the engine ignores its temperature, or the learner's tokens fit another one; empty: neither."""
    asked = probe.temperature
    doubled = backend.score_tokens(probe.sequences, 2 * asked)
    if doubled is not None and compare(doubled, found).max < 1e-6:
        return f"temperature: the engine gives the same at {asked:g} and {2 * asked:g}, so it applies none"
    for other in _TEMPERATURES:
        at_other = None if other == asked else backend.score_tokens(probe.sequences, other)
        if at_other is not None and _explains(at_other, found, wanted, limit):
            return f"temperature: asked for {asked:g}, the engine differs; at {other:g} it agrees with the learner"
    return ""


def _explains(candidate: np.ndarray, found: np.ndarray, wanted: np.ndarray, limit: float) -> bool:
    """Whether ``candidate`` is near ``wanted``, by far nearer than ``found``."""
    mean = compare(candidate, wanted).mean
    return mean <= limit and mean < 0.3 * compare(found, wanted).mean
