"""Records rollouts for ``async-rl report``: figures of every rollout, and the token columns of those that are sampled.

``recorder.py`` writes the text of the same sampled rollouts. The update that trains on them returns what it computed
for their tokens (``TrainSequence.is_recorded``), so nothing is computed for the records alone, and other steps cost
nothing but a line of figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from async_rl.config.config import Config
from async_rl.learner.checkpoints.files import TrainerState
from async_rl.learner.data.batch import PreparedBatch
from async_rl.learner.interface import FATES, TokenOutcomes
from async_rl.learner.loop.parts import StepPart
from async_rl.learner.loop.recorder import RowWriter, chosen_groups
from async_rl.learner.loop.step_result import StepResult, cause_of_tokens, rollout_causes
from async_rl.queue.messages import TakenGroup
from async_rl.records import NO_VERSION, TokenSequence
from async_rl.run.directory import RunDir
from async_rl.run.records.eval_records import Decode
from async_rl.run.records.token_columns import GIVEN, PLACES, TokenTable, columns_path, write_token_columns

_MAX_KNOWN = 50_000
_BROKEN = "\ufffd"
"""What decoders put in the place of a part of a character."""


class RolloutRecords(StepPart):
    """Writes ``rollouts/summaries.jsonl`` and ``rollouts/step-NNNNNN.tokens.parquet``. It must be the last part."""

    def __init__(
        self, config: Config, state: TrainerState, *, run_dir: RunDir, summaries: RowWriter, decode: Decode,
        confirm: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Prepare the records.

        Args:
            config: the run's config.
            state: the trainer's state, from which the step is taken.
            run_dir: the run directory.
            summaries: takes the rows of ``summaries.jsonl``.
            decode: turns token ids into text, with special tokens.
            confirm: raises LineageError if a newer learner has taken over the run.
        """
        self._config, self._state, self._run_dir = config, state, run_dir
        self._summaries, self._confirm = summaries, confirm
        self._texts = TokenTexts(decode)
        self._recorded: frozenset[int] = frozenset()

    def train(self, prepared: PreparedBatch, *, version: int) -> PreparedBatch:
        """Return the batch with the sequences of sampled rollouts marked."""
        self._recorded = recorded_rollouts(prepared.groups, self._config, step=self._state.step + 1)
        rollout_of = prepared.rollout_of
        marked = (s for s in prepared.sequences if rollout_of[s.sequence_id] in self._recorded)
        return _with(prepared, {s.sequence_id: replace(s, is_recorded=True) for s in marked})

    def record(self, result: StepResult) -> Mapping[str, float]:
        if self._config.log.rollouts_every or self._config.log.replayable:
            self._summaries.write(summary(result, step=self._state.step))
        if self._recorded:
            has_own_loss = self._config.loss.function is not None
            table = token_table(result, self._recorded, self._texts.of, has_own_loss=has_own_loss)
            path = columns_path(self._run_dir.rollouts / f"step-{self._state.step:06d}.jsonl")
            write_token_columns(path, table, self._confirm)
        return {}


def _with(prepared: PreparedBatch, new: Mapping[int, Any]) -> PreparedBatch:
    if not new:
        return prepared
    return prepared.with_sequences(new.get(s.sequence_id, s) for s in prepared.sequences)


def recorded_rollouts(groups: Sequence[TakenGroup], config: Config, *, step: int) -> frozenset[int]:
    """Return the numbers in the step of the rollouts whose tokens are recorded: those with text, up to the limit of
    ``log.rollouts_tokens``, and all with ``log.replayable``.
    """
    most = math.inf if config.log.replayable else config.log.rollouts_tokens
    firsts = np.cumsum([0, *(len(item.group.rollouts) for item in groups)]).tolist()
    found: list[int] = []
    num_tokens = 0
    for group in chosen_groups(len(groups), config, step):
        for index, rollout in enumerate(groups[group].group.rollouts):
            num_tokens += sum(len(sequence.token_ids) for sequence in rollout.sequences)
            if num_tokens > most:
                return frozenset(found)
            found.append(firsts[group] + index)
    return frozenset(found)


def summary(result: StepResult, *, step: int) -> dict[str, Any]:
    """Return the row of ``summaries.jsonl``: lists with a value for each group, and for each rollout in their order."""
    groups, prepared = result.groups, result.prepared
    rollouts = [rollout for item in groups for rollout in item.group.rollouts]
    oldest = [rollout.oldest_version for rollout in rollouts]
    return {
        "step": step,
        "version": result.version,
        "positions": [item.group.position for item in groups],
        "rows": [item.prompt.row for item in groups],
        "sizes": [len(item.group.rollouts) for item in groups],
        "reward": [_short(rollout.reward) for rollout in rollouts],
        "accuracy": [_short(rollout.accuracy) for rollout in rollouts],
        "tokens": list(prepared.rollout_tokens),
        "staleness": [None if version == NO_VERSION else int(result.version - version) for version in oldest],
        "finish": [rollout.finish_reason for rollout in rollouts],
        "cause": rollout_causes(prepared, result.causes),
    }


def token_table(
    result: StepResult, recorded: frozenset[int], texts_of: Callable[[Sequence[np.ndarray]], list[str]], *,
    has_own_loss: bool = False,
) -> TokenTable:  # fmt: skip
    """Return the columns of the ``recorded`` rollouts' tokens, of whatever their sequences became in the step."""
    trained = {s.sequence_id: s for s in result.prepared.sequences}
    by_rollout: dict[int, list[int]] = {}
    for sequence_id, rollout in result.prepared.rollout_of.items():
        by_rollout.setdefault(rollout, []).append(sequence_id)
    computed: dict[int, tuple[int, TokenOutcomes]] = {}
    for version, update in zip(result.versions, result.updates, strict=True):
        for sequence_id, values in update.tokens.items() if update is not None else ():
            computed.setdefault(sequence_id, (version, values))
    places: dict[str, list[int]] = {name: [] for name in PLACES}
    parts: list[dict[str, np.ndarray]] = []
    number = -1
    for item in result.groups:
        for index, rollout in enumerate(item.group.rollouts):
            number += 1
            if number not in recorded:
                continue
            ids = by_rollout.get(number) or [-1] * len(rollout.sequences)
            for order, (sequence, sequence_id) in enumerate(zip(rollout.sequences, ids, strict=True)):
                version, values = computed.get(sequence_id, (result.version, None))
                for name, value in zip(PLACES, (item.group.position, index, order, version), strict=True):
                    places[name].append(value)
                cause = result.prepared.masked.get(number) or result.causes.get(sequence_id, "")
                of_tokens = cause or cause_of_tokens(has_own_loss=has_own_loss)
                parts.append(_columns(sequence, trained.get(sequence_id), values, cause=cause, of_tokens=of_tokens))
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return TokenTable(
        places={name: np.array(values, np.int64) for name, values in places.items()},
        sizes=np.array([len(part["token_ids"]) for part in parts], np.int64),
        texts=texts_of([part["token_ids"] for part in parts]),
        outcomes=columns.pop("outcomes").tolist(),
        numbers=columns,
    )


def _columns(
    sequence: TokenSequence, trained: Any, values: TokenOutcomes | None, *, cause: str, of_tokens: str
) -> dict[str, np.ndarray]:
    """Return the columns of one sequence. ``trained`` is what the learner made of it; None if it was masked before."""
    size = len(sequence.token_ids)
    outcomes = np.where(sequence.loss_mask, cause or "stale", GIVEN).astype(object)
    logprobs, entropies, advantages = (np.full(size, np.nan, np.float32) for _ in range(3))
    if trained is not None:
        advantages[trained.loss_mask] = trained.advantages[trained.loss_mask]
        names = np.array([*FATES[:3], of_tokens], object)
        outcomes[trained.loss_mask] = cause or ("trained" if values is None else names[values.fates])
        if values is not None:
            logprobs[trained.loss_mask], entropies[trained.loss_mask] = values.logprobs, values.entropies
    return {
        "token_ids": sequence.token_ids, "versions": sequence.versions,
        "behavior_logprobs": np.where(sequence.loss_mask, sequence.behavior_logprobs, np.nan).astype(np.float32),
        "logprobs": logprobs, "entropies": entropies, "advantages": advantages, "outcomes": outcomes,
    }  # fmt: skip


class TokenTexts:
    """The text of single tokens. Each token is decoded once, as long as no more than ``_MAX_KNOWN`` are known."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._known: dict[int, str] = {}
        self._before: tuple[int, str] | None = None

    def of(self, sequences: Sequence[np.ndarray]) -> list[str]:
        """Return the text of every token of ``sequences``. Parts of one character are decoded together."""
        found: list[str] = []
        for token_ids in sequences:
            ids = token_ids.tolist()
            texts = [self._text(token_id) for token_id in ids]
            begin = None
            for at in range(len(ids) + 1):
                if at < len(ids) and _BROKEN in texts[at]:
                    begin = at if begin is None else begin
                elif begin is not None:
                    together = self._decode(np.array(ids[begin:at], np.int32))
                    texts[begin:at] = [*[""] * (at - begin - 1), together]
                    begin = None
            found += texts
        return found

    def _text(self, token_id: int) -> str:
        if token_id not in self._known:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[token_id] = self._decoded(token_id)
        return self._known[token_id]

    def _decoded(self, token_id: int) -> str:
        """Decode a token behind another one, because some tokenizers drop the space at the beginning of a text."""
        alone = self._decode(np.array([token_id], np.int32))
        if self._before is None:
            if alone.isascii() and alone.isalnum():
                self._before = token_id, alone
            return alone
        before_id, before = self._before
        behind = self._decode(np.array([before_id, token_id], np.int32))
        return behind.removeprefix(before) if behind.startswith(before) else alone


def _short(value: float) -> float | None:
    """Return the number with six digits. None if it is not finite: JSON has no such numbers."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
