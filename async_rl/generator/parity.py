"""Compare the engine's log-probabilities with the learner's, on tokens that the learner chose. No torch.

The learner sends a probe: tokens, and its own log-probabilities of them under one version of the weights. The loop
calls ``answer_probe`` while this version is active. If the engine differs from the learner by more than the limit, the
function looks for the cause with a few cheap experiments, and begins with the one whose result is most certain.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from async_rl.generator.backend import Backend
from async_rl.queue.parity import (
    Answer,
    Probe,
    ProbeSequence,
    compare,
    explains,
    looks_masked,
    other_temperature,
    parity_limit,
)
from async_rl.weights.channel.engine_ranks import HeldByEngine

logger = logging.getLogger(__name__)

ScoringMode = Literal["cached_decode", "full_forward", "float32_head"]
"""How to score tokens: one by one over cached keys and values, as rollouts are sampled; in one forward pass over the
whole text, without a cache; or in one such pass with the output head in float32."""

_SHOWN_NAMES = 5


@runtime_checkable
class ScoringBackend(Protocol):
    """Additional members of a backend that can return the log-probabilities of given tokens."""

    @property
    def name(self) -> str:
        """The engine's name, as in the key ``generator.backend``."""
        ...

    @property
    def dtype(self) -> str:
        """The engine's dtype by its name in torch, for example ``bfloat16``."""
        ...

    def score_tokens(
        self, sequences: Sequence[ProbeSequence], temperature: float, mode: ScoringMode = "cached_decode"
    ) -> np.ndarray | None:
        """Return the log-probabilities of the sequences' scored tokens, one sequence after the other: float32 [N].

        They are in nats, under the active weights. Running sequences are not affected. The result is None if the engine
        does not support ``mode``.
        """
        ...

    def digests(self) -> Mapping[str, str]:
        """Return the digest of each parameter that the engine uses now, keyed by the engine's parameter name."""
        ...


def answer_probe(backend: Backend, probe: Probe, weights: Mapping[str, Any]) -> Answer:
    """Return the engine's log-probabilities of the probe's tokens as the answer to the learner.

    If they differ from the learner's by more than the limit, the answer also names the likely cause.

    ``weights`` are the verified tensors of the probe's version, which is active.
    """
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
    """Find out why the engine's log-probabilities ``found`` differ from the learner's, ``wanted``.

    Return the likely cause ("" if none is found), and the list of causes that are excluded.
    """
    excluded: list[str] = []
    before = compare(found, wanted)
    # What the engine's workers hold can't be activated again: they may be receiving the next version in its place.
    if not isinstance(weights, HeldByEngine):
        if stale := _stale_tensors(backend, probe.version, weights):
            shown = ", ".join(stale[:_SHOWN_NAMES]) + (f" and {len(stale) - _SHOWN_NAMES} more" if stale[5:] else "")
            return f"stale or corrupt tensors: the engine did not hold the received bytes of {shown}", excluded
        again = backend.score_tokens(probe.sequences, probe.temperature)
        if again is not None and explains(again, wanted, before, limit):
            return (
                "stale or corrupt weights: the engine agrees after the same verified bytes were activated again; it "
                "can't tell which tensor was wrong"
            ), excluded
        excluded.append("the engine holds exactly the tensors that it received")
    if cause := temperature_cause(backend, probe, found, wanted, limit):
        return cause, excluded
    excluded.append("no other temperature explains it")
    if looks_masked(found, wanted):
        return (
            "a top-p or top-k mask that was not requested: the engine gives every token a higher probability than the "
            "learner does, or zero; look for sampling defaults of the model (generation_config.json)"
        ), excluded
    full_forward = backend.score_tokens(probe.sequences, probe.temperature, "full_forward")
    if full_forward is not None:
        if explains(full_forward, wanted, before, limit):
            return (
                "reuse of keys and values: with its cache the engine gives other log-probabilities than in one pass "
                "over the whole text, which agrees with the learner"
            ), excluded
        excluded.append("the engine gives the same without cached keys and values")
    exact = backend.score_tokens(probe.sequences, probe.temperature, "float32_head")
    if exact is not None:
        if explains(exact, wanted, before, limit):
            return f"the precision of the output head: in {backend.dtype} it differs, in float32 it agrees", excluded
        excluded.append("a head in float32 changes little")
    if backend.dtype != probe.dtype:
        return (
            f"precision: the engine computes in {backend.dtype}, the learner in {probe.dtype} (model.dtype)",
            excluded,
        )
    return "", excluded


def _stale_tensors(backend: Any, version: int, weights: Mapping[str, Any]) -> list[str]:
    """Activate the same version again. Return the names of the parameters that this changed.

    The engine held something other than the received bytes for these parameters.
    """
    before = dict(backend.digests())
    backend.activate(version, weights)
    after = backend.digests()
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def temperature_cause(backend: Any, probe: Probe, found: np.ndarray, wanted: np.ndarray, limit: float) -> str:
    """Describe how the engine's temperature is wrong. Return "" if the temperature does not explain the difference.

    Two errors are recognised: the engine ignores the temperature, or its values at another temperature fit the
    learner's, ``wanted``.
    """
    asked = probe.temperature
    doubled = backend.score_tokens(probe.sequences, 2 * asked)
    if doubled is not None and compare(doubled, found).max < 1e-6:
        return f"temperature: the engine gives the same at {asked:g} and {2 * asked:g}, so it applies none"
    other = other_temperature(
        lambda other: backend.score_tokens(probe.sequences, other), asked, wanted, compare(found, wanted), limit
    )
    if other is None:
        return ""
    return f"temperature: asked for {asked:g}, the engine differs; at {other:g} it agrees with the learner"
