"""Checks that each generator and the learner compute the same log-probabilities for the same tokens (parity).

There are two comparisons. Each is made at one version, and neither waits for a generator.

- *Sampled tokens*: a rollout may arrive while the learner still holds the version that sampled all of its tokens, as in
  the first step. The learner then computes the log-probabilities of these tokens before it trains on them. This
  covers everything that sampling does: cache, temperature, top-p.
- *Probe sequences*: every ``experimental.parity_every`` versions, and for each new generator, the learner announces a
  few short sequences of the last batch with a version (a *probe*). Every generator computes their log-probabilities
  once it uses that version, and the learner compares them with its own.

A generator whose difference is far above the limit (``queue.parity.far_limit``) is quarantined, so that it can't stop
the run for others. The queue gives it no more leases and drops its groups, and its rollouts in the current step are
masked. If no generator is left, the queue stops the run with the reasons.

A smaller difference above the limit stops the run at once if its cause is known. If sampled tokens differ for no known
cause, the learner waits for the generator's answer to a probe, which shows whether its weights are right. The trainer
calls this on rank 0.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from async_rl.config.config import Config
from async_rl.errors import ParityError
from async_rl.learner.checkpoints.files import TrainerState
from async_rl.learner.data.batch import PreparedBatch, leave_out
from async_rl.learner.interface import Engine
from async_rl.learner.loop.parts import StepPart
from async_rl.learner.loop.step_result import StepResult
from async_rl.learner.sequences import TrainSequence, train_sequence
from async_rl.net.wire import SAME_VERSION
from async_rl.queue.client.clients import LearnerQueue
from async_rl.queue.messages import Acked, Batch
from async_rl.queue.parity import (
    MAX_CONTEXT,
    MAX_SCORED,
    MAX_SEQUENCES,
    Answer,
    Difference,
    Probe,
    ProbeSequence,
    compare,
    encode_probe,
    explains,
    far_limit,
    looks_masked,
    other_temperature,
    parity_limit,
)

logger = logging.getLogger(__name__)

_SAMPLED_SEQUENCES = 4
"""Most sequences per generator in a comparison of sampled tokens."""
_SAMPLED_TOKENS = 4096
"""Most tokens, of all generators together, in a comparison of sampled tokens."""
_REPEAT_AFTER_VERSIONS = 5
"""If a generator has not answered a probe after this many versions, another probe is sent."""
_MAX_OPEN_PROBES = 8
"""Probes whose answers are still accepted."""


class _Suspicion(NamedTuple):
    """A generator whose sampled tokens differed by ``mean`` nats on average, for no known cause. ``text`` says so."""

    text: str
    mean: float


class ParityGate(StepPart):
    """Compares generators with the learner, during one start of the learner.

    ``dtype`` is torch's name of the dtype in which the learner computes.
    """

    def __init__(self, config: Config, state: TrainerState, engine: Engine, queue: LearnerQueue, *, dtype: str) -> None:
        self._weights, self._engine, self._queue, self._dtype = config.weights, engine, queue, dtype
        self._state = state
        self._every, self._limit = config.experimental.parity_every, config.experimental.parity_limit
        self._checked: dict[str, int] = {}
        self._checked_sampled: dict[str, int] = {}
        self._suspects: dict[str, _Suspicion] = {}
        self._far: dict[str, str] = {}
        self._left_out: set[str] = set()
        self._probes: dict[int, bytes] = {}
        self._sent: dict[int, np.ndarray] = {}
        self._material: tuple[TrainSequence, ...] = ()
        self._alive_generators: Sequence[str] = ()
        self._row: dict[str, float] = {}

    def check(self, batch: Batch, prepared: PreparedBatch, *, version: int) -> PreparedBatch:
        """Compare the log-probabilities of tokens that generators sampled at ``version``, if a check of a generator is
        due.

        ``version`` is the engine's current one. Return ``prepared``, in which the rollouts of quarantined generators
        are masked.

        Raises:
            ParityError: a difference is above the limit, and its cause is known.
        """
        owners = [item.group.generator_id for item in batch.groups for _ in item.group.rollouts]
        self._material = _spread(prepared.sequences) or self._material
        self._compare_sampled(prepared, owners, version)
        self._quarantine()
        # The queue has dropped their other groups, so no later batch has any.
        left_out, self._left_out = self._left_out, set()
        return leave_out(
            prepared,
            {index for index, owner in enumerate(owners) if owner in left_out and index not in prepared.masked},
            "quarantined",
        )

    def _compare_sampled(self, prepared: PreparedBatch, owners: Sequence[str], version: int) -> None:
        chosen: dict[str, list[TrainSequence]] = {}
        room = _SAMPLED_TOKENS
        for sequence in prepared.sequences:
            owner = owners[prepared.rollout_of[sequence.sequence_id]]
            mine = chosen.setdefault(owner, [])
            is_fresh = bool((sequence.versions[sequence.loss_mask] == version).all())
            fits = len(mine) < _SAMPLED_SEQUENCES and len(sequence.token_ids) <= room
            if is_fresh and fits and sequence.loss_mask.any() and self._is_due(self._checked_sampled, owner, version):
                mine.append(sequence)
                room -= len(sequence.token_ids)
        chosen = {owner: mine for owner, mine in chosen.items() if mine}
        if not chosen:
            return
        every = [sequence for mine in chosen.values() for sequence in mine]
        scored = self._engine.score(every, of="policy")
        self._row |= compare(_behavior(every), joined(every, scored)).metrics("parity/sampled_")
        for owner, mine in chosen.items():
            self._checked_sampled[owner] = version
            self._judge_sampled(owner, mine, joined(mine, scored), version)

    def prepare_probe(self) -> None:
        """Compute the learner's log-probabilities of a few sequences, if a generator is due for a check.

        ``take_probe`` returns these sequences, encoded, to announce them with the version. A generator that does not
        answer gets another probe a few versions later, since it may have skipped this version.
        """
        version = self._state.version
        if not self._material or not any(
            self._is_due(self._checked, generator_id, version) for generator_id in self._alive_generators
        ):
            return
        if self._sent and version - max(self._sent) < _REPEAT_AFTER_VERSIONS and not self._suspects:
            return
        temperature = self._material[0].temperature
        probes = [probe_sequence_of(sequence) for sequence in self._material]
        sequences = [to_train(index, one, version, temperature) for index, one in enumerate(probes)]
        scored = self._engine.score(sequences, of="policy")
        logprobs = tuple(np.asarray(scored[s.sequence_id], np.float32) for s in sequences)
        probe = Probe(self._state.lineage, version, temperature, tuple(probes), logprobs, self._dtype, self._limit)
        self._probes[version] = encode_probe(probe)
        self._sent[version] = np.concatenate(logprobs)
        for old in sorted(self._sent)[:-_MAX_OPEN_PROBES]:
            del self._sent[old]

    def take_probe(self, version: int) -> bytes:
        """Remove and return the probe that must be announced with ``version``. Empty if there is none."""
        return self._probes.pop(version, b"")

    def acknowledged(self, acked: Acked) -> None:
        self._alive_generators = tuple(acked.stats.reports)

    def record(self, result: StepResult) -> Mapping[str, float]:
        """Compare the generators' answers that have arrived. Return the metrics of this step.

        Raises:
            ParityError: a difference is above the limit.
        """
        version = self._state.version
        if self._sent:
            self._collect(self._queue.parity_answers(self._state.lineage, min(self._sent)))
            self._quarantine()
            if not any(self._is_due(self._checked, generator_id, version) for generator_id in self._alive_generators):
                self._sent.clear()
        row, self._row = self._row, {}
        return row

    def _is_due(self, checked: Mapping[str, int], generator_id: str, version: int) -> bool:
        last = checked.get(generator_id)
        every = self._every
        return last is None or generator_id in self._suspects or bool(every and version - last >= every)

    def _collect(self, answers: Mapping[str, Answer]) -> None:
        compared: list[tuple[np.ndarray, np.ndarray]] = []
        for generator_id, answer in answers.items():
            sent = self._sent.get(answer.version)
            if sent is None or self._checked.get(generator_id, -1) >= answer.version:
                continue
            self._checked[generator_id] = answer.version
            suspicion = self._suspects.pop(generator_id, None)
            if answer.logprobs is None:
                self._judge_unscored(generator_id, answer, suspicion)
                continue
            if answer.logprobs.shape != sent.shape:
                self._far[generator_id] = (
                    f"expected {list(sent.shape)} log-probabilities from generator {generator_id} for the probe of "
                    f"version {answer.version}, got {list(answer.logprobs.shape)}; {SAME_VERSION}"
                )
                continue
            compared.append((answer.logprobs, sent))
            self._row["parity/version"] = answer.version
            self._judge_scored(generator_id, answer, compare(*compared[-1]), suspicion)
        if compared:
            engine, learner = (np.concatenate(side) for side in zip(*compared, strict=True))
            self._row |= {**compare(engine, learner).metrics("parity/"), "parity/generators": len(compared)}

    def _judge_scored(
        self, generator_id: str, answer: Answer, difference: Difference, suspicion: _Suspicion | None
    ) -> None:
        limit = parity_limit(self._limit, (self._dtype, answer.dtype))
        sides = f"generator {generator_id} ({answer.backend}, {answer.dtype})"
        if difference.mean <= limit:
            if suspicion is not None and suspicion.mean > limit:
                self._fail(
                    f"{suspicion.text}, limit {limit:g}. It scores probe sequences as the learner does (mean "
                    f"|difference| {difference.mean:.2g} at version {answer.version}), so its weights are right. "
                    f"Likely cause: keys and values that are reused between prompts or after a weight update, or the "
                    f"sampling mask"
                )
            return
        cause = answer.cause or (
            "not found by the generator's experiments, so look at the learner's side: its forward pass, or the weights "
            "that it published"
        )
        excluded = f". Excluded: {'; '.join(answer.excluded)}" if answer.excluded else ""
        text = (
            f"{sides} and the learner ({self._dtype}) score the same probe sequences differently at version "
            f"{answer.version}: {difference}, limit {limit:g}. Likely cause: {cause}{excluded}"
        )
        if difference.mean > far_limit(self._limit):
            self._far[generator_id] = text
        else:
            self._fail(text)

    def _judge_unscored(self, generator_id: str, answer: Answer, suspicion: _Suspicion | None) -> None:
        """Handle the answer of a generator that can't compute log-probabilities of given tokens: it is not compared.

        The run stops if its sampled tokens differed before. A backend without a model, which has no dtype, is never
        suspected.
        """
        logger.info(
            "parity: generator %s (%s) can't score probe sequences, so it is not compared", generator_id, answer.backend
        )
        limit = parity_limit(self._limit, (self._dtype, answer.dtype))
        if answer.dtype and suspicion is not None and suspicion.mean > limit:
            self._fail(
                f"{suspicion.text}, limit {limit:g}. Cause not found: {answer.backend} can't score probe sequences"
            )

    def _judge_sampled(
        self, generator_id: str, mine: Sequence[TrainSequence], scored: np.ndarray, version: int
    ) -> None:
        behavior = _behavior(mine)
        difference = compare(behavior, scored)
        # Only the generator's answer shows its dtype, and so which of the two limits holds.
        strict, lax = (parity_limit(self._limit, (self._dtype, other)) for other in (self._dtype, ""))
        if difference.mean <= strict:
            return
        text = (
            f"generator {generator_id} and the learner ({self._dtype}) have different log-probabilities for the tokens "
            f"that the generator sampled at version {version}: {difference}"
        )
        cause = cause_of_sampled(self._engine, mine, behavior, difference, lax) if difference.mean > lax else ""
        if difference.mean > far_limit(self._limit):
            self._far[generator_id] = f"{text}, limit {lax:g}. Likely cause: {cause or 'not found'}"
            return
        if cause:
            self._fail(f"{text}, limit {lax:g}. Likely cause: {cause}")
            return
        logger.info("%s; the learner sends the generator a probe to find the cause", text)
        self._suspects[generator_id] = _Suspicion(text, difference.mean)

    def _quarantine(self) -> None:
        """Quarantine the generators whose differences were found to be far above the limit."""
        far, self._far = self._far, {}
        for generator_id, text in far.items():
            self._suspects.pop(generator_id, None)
            self._left_out.add(generator_id)
            self._queue.quarantine(self._state.lineage, generator_id, text)
            logger.warning("parity: generator %s is quarantined: %s", generator_id, text)

    def _fail(self, text: str) -> None:
        text += (
            ". `async-rl doctor CONFIG` compares the two without a run. experimental.parity_limit sets the limit; with "
            'weights.parity = "warn" the run goes on'
        )
        if self._weights.parity == "warn":
            logger.warning("parity: %s", text)
            return
        raise ParityError(text)


def cause_of_sampled(
    engine: Engine, sequences: Sequence[TrainSequence], behavior: np.ndarray, difference: Difference, limit: float
) -> str:
    """Find the likely cause why ``behavior`` (float32 [N], all trained tokens) differs from the engine's scores.

    It scores the same tokens with other settings, while the engine still holds the version that sampled them. The
    result is empty if no setting explains the difference.
    """

    def scored(changed: Sequence[TrainSequence]) -> np.ndarray:
        return joined(changed, engine.score(changed, of="policy"))

    leased = sequences[0].temperature
    other = other_temperature(
        lambda other: scored([replace(s, temperature=other) for s in sequences]), leased, behavior, difference, limit
    )
    if other is not None:
        return (
            f"temperature: its lease has {leased:g}, but its log-probabilities are those of {other:g}"
            f"{', as if no temperature had been applied' if other == 1.0 else ''}"
        )
    is_masked = any(s.sampling_mask is not None for s in sequences)
    if is_masked and explains(scored([replace(s, sampling_mask=None) for s in sequences]), behavior, difference, limit):
        return "top-p or top-k: its log-probabilities are those before the mask was applied"
    if not is_masked and looks_masked(behavior, scored(sequences)):
        return (
            "a top-p or top-k mask that it does not report: it gives every token more than the learner does; look for "
            "sampling defaults of the model (generation_config.json)"
        )
    return ""


def _spread(sequences: Sequence[TrainSequence]) -> tuple[TrainSequence, ...]:
    """Return a few sequences, evenly spread over the batch."""
    fit = [s for s in sequences if s.loss_mask.any()]
    stride = max(1, len(fit) // MAX_SEQUENCES)
    return tuple(fit[::stride][:MAX_SEQUENCES])


def probe_sequence_of(sequence: TrainSequence) -> ProbeSequence:
    """Return the part of ``sequence`` around its first trained token, as a sequence of a probe."""
    first = int(np.flatnonzero(sequence.loss_mask)[0])
    window = sequence.token_ids[max(0, first - MAX_CONTEXT) : first + MAX_SCORED]
    return ProbeSequence(np.array(window, np.int32), len(window) - min(first, MAX_CONTEXT))


def to_train(index: int, probe: ProbeSequence, version: int, temperature: float) -> TrainSequence:
    """Return the sequence of a probe in the form that ``Engine.score`` takes."""
    size = len(probe.token_ids)
    is_scored, versions = np.arange(size) >= size - probe.num_scored, np.full(size, version, np.int32)
    return train_sequence(index, probe.token_ids, is_scored, temperature=temperature, versions=versions)


def _behavior(sequences: Sequence[TrainSequence]) -> np.ndarray:
    return np.concatenate([s.behavior_logprobs[s.loss_mask] for s in sequences])


def joined(sequences: Sequence[TrainSequence], scored: Mapping[int, np.ndarray]) -> np.ndarray:
    """Return the log-probabilities that ``Engine.score`` computed as one array, in the order of ``sequences``."""
    return np.concatenate([scored[s.sequence_id] for s in sequences])
