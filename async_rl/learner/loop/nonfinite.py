"""Writes down what an optimizer step trained on when its gradient was not finite, so that the cause can be looked for.

The trainer calls ``record_nonfinite`` when it skips such a step. ``nonfinite/step-NNNNNN.jsonl`` of the run directory
has a line for the step and one for each of its sequences. NaN and Infinity are written as Python's ``json`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.learner.data.batch import PreparedBatch
from async_rl.learner.interface import UpdateStats
from async_rl.learner.sequences import TrainSequence
from async_rl.run.records.eval_records import Decode, answer_record, write_json_lines

MAX_FILES = 3
"""Most files of one run. The first steps say most about the cause, and a run may skip many."""


def record_nonfinite(
    run_dir: Path, sequences: Sequence[TrainSequence], update: UpdateStats, prepared: PreparedBatch, *,
    step: int, version: int, decode: Decode, confirm: Callable[[], None],
) -> Path | None:  # fmt: skip
    """Write the sequences of a skipped optimizer step. Return the file, or None if there are ``MAX_FILES`` already.

    Args:
        run_dir: the run directory.
        sequences: what the optimizer step trained on.
        update: its statistics.
        prepared: the batch that the sequences are from.
        step: number of the step, as in ``metrics.jsonl``.
        version: the learner's version.
        decode: turns token ids into text.
        confirm: raises LineageError if a newer learner has taken over the run.
    """
    path = run_dir / "nonfinite" / f"step-{step:06d}.jsonl"
    if len(list(path.parent.glob("step-*.jsonl"))) >= MAX_FILES and not path.exists():
        return None
    head = {
        "step": step, "version": version, "reason": update.reason, "loss": update.loss, "grad_norm": update.grad_norm,
        "ratio_max": update.ratio_max, "num_sequences": len(sequences),
    }  # fmt: skip
    write_json_lines(path, chain([head], _lines(sequences, prepared, decode)), confirm)
    return path


def _lines(sequences: Sequence[TrainSequence], prepared: PreparedBatch, decode: Decode) -> Iterator[dict[str, Any]]:
    rollouts = [(taken, rollout) for taken in prepared.groups for rollout in taken.group.rollouts]
    for sequence in sequences:
        taken, rollout = rollouts[prepared.rollout_of[sequence.sequence_id]]
        arrays = {
            "token_ids": sequence.token_ids,
            "loss_mask": sequence.loss_mask,
            "behavior_logprobs": sequence.behavior_logprobs,
            "reference_logprobs": sequence.reference_logprobs,
            "proximal_logprobs": sequence.proximal_logprobs,
            "token_versions": sequence.versions,
            "advantages": sequence.advantages,
        }
        yield {
            "sequence_id": sequence.sequence_id,
            "position": taken.group.position,
            "lease_id": taken.group.lease_id,
            "generator": taken.group.generator_id,
            **answer_record(taken.prompt, rollout, decode),
            "temperature": sequence.temperature,
            **{name: np.asarray(values).tolist() for name, values in arrays.items()},
        }
