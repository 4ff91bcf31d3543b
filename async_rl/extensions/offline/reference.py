"""The reference model's log-probabilities of all rows, scored once before the first step and kept on disk.

The reference model is the one that the run begins with, so the engine itself scores with its starting weights, before
it reads a checkpoint. Each chunk of rows is a file of the run directory that is written atomically. A run that is
killed scores only the chunks that are missing. Files of another model, precision or dataset lie in another folder.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import xxhash

from async_rl.config.config import Config
from async_rl.extensions.offline.rows import digest_of
from async_rl.extensions.offline.scores import chunks_of, summed_logprobs
from async_rl.learner.interface import Engine
from async_rl.learner.sequences import TrainSequence
from async_rl.process.fault_points import fault_point
from async_rl.run.directory import write_atomically
from async_rl.weights.adapters import BaseWeights

logger = logging.getLogger(__name__)

_PROGRESS_S = 5.0


def reference_logprobs(
    engine: Engine,
    config: Config,
    rows: Sequence[Sequence[TrainSequence]],
    directory: Path,
    check_stop: Callable[[str], None],
) -> list[list[float]]:
    """Return ``summed_logprobs`` under the engine's weights, which are those that the run begins with.

    Args:
        engine: has loaded no checkpoint yet.
        config: the run's config.
        rows: the sequences of each row of the dataset.
        directory: where the chunks are kept, in a folder for this model and these rows.
        check_stop: called after each chunk with what is saved; raises StoppedError if a signal asked to stop.
    """
    folder = directory / _digest(config, rows)
    folder.mkdir(parents=True, exist_ok=True)
    found: list[list[float]] = []
    said = time.monotonic()
    for number, chunk in enumerate(chunks_of(rows)):
        path = folder / f"{number:06d}.json"
        sums = _read(path, len(chunk))
        if sums is None:
            sums = summed_logprobs(engine, chunk)
            write_atomically(path, json.dumps(sums))
            fault_point("offline.reference_scored")  # a chunk of the reference model's log-probabilities is kept
            check_stop(f"the reference model has scored {len(found) + len(chunk)} of {len(rows)} rows")
        found += sums
        if time.monotonic() - said >= _PROGRESS_S:
            logger.info("reference log-probabilities: %d of %d rows", len(found), len(rows))
            said = time.monotonic()
    return found


def _read(path: Path, num_rows: int) -> list[list[float]] | None:
    """Return the chunk in the file ``path``. None if it is missing or damaged, so that it must be scored."""
    with suppress(OSError, ValueError):
        sums = json.loads(path.read_bytes())
        if isinstance(sums, list) and len(sums) == num_rows:
            return sums
    return None


def _digest(config: Config, rows: Sequence[Sequence[TrainSequence]]) -> str:
    """Return the digest of what the log-probabilities depend on: the model's files, its precision, and the tokens."""
    model = config.model
    settings = [BaseWeights.of(model.path).digest, model.dtype, model.head_dtype, config.lora.base_bits]
    tokens = digest_of(sequence for row in rows for sequence in row)
    return xxhash.xxh3_128_hexdigest(json.dumps([*settings, tokens]).encode())
