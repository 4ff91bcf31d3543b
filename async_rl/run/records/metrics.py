"""The writer of ``metrics.jsonl``.

``metrics.jsonl`` has one JSON object per line. After every optimizer step the learner writes a *step row* with keys of
``metric_table``, without ``loss/policy`` if there was nothing to train. After every finished evaluation the learner
writes an *eval row* with ``step`` (the step that requested the evaluation), ``time_s`` and ``eval/<dataset>/...``.
Values that are not finite become null, because JSON has no NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from async_rl.config.config import Config
from async_rl.run.directory import RunDir
from async_rl.run.records.prometheus import Endpoint
from async_rl.run.records.step_log import Row, StepLog


class MetricsWriter:
    """Writes rows to ``metrics.jsonl``, one at a time. A run has one writer. ``async-rl follow`` reads them there."""

    def __init__(self, run_dir: Path, config: Config, *, on_row: Callable[[Row], None] = lambda row: None) -> None:
        """Open ``metrics.jsonl`` for appending, and remove an incomplete last line, which a dying process may leave.

        ``on_row`` is called with each row that is written.
        """
        port = config.log.prometheus_port
        self._endpoint = Endpoint("learner", port and port + 1, config)
        self._log = StepLog(RunDir(run_dir).metrics)
        self._on_row = on_row

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row, which must have the key ``step``."""
        plain = {key: _finite(value) for key, value in row.items()}
        self._log.write(plain)
        self._on_row(plain)
        is_step = "version" in plain  # an evaluation's step is that of its request, which is over
        self._endpoint.update({key: value for key, value in plain.items() if is_step or key != "step"})

    def rewind_to(self, step: int, *, evals_to_come: Collection[tuple[str, int]] = ()) -> int:
        """Move the rows of the steps after ``step`` to another file, as ``StepLog.rewind_to`` does.

        Args:
            evals_to_come: pairs (dataset, step) of evaluations that will run again. Their rows are moved, too.

        Returns:
            The number of rows that were moved.
        """
        return self._log.rewind_to(step, is_gone=lambda row: _is_eval_of(row, evals_to_come))

    def close(self) -> None:
        """Close ``metrics.jsonl``."""
        self._log.close()
        self._endpoint.close()


def _finite(value: Any) -> Any:
    """Return ``value`` as JSON data. NumPy scalars become plain numbers, and NaN and infinities become None."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_eval_of(row: Row, evals: Collection[tuple[str, int]]) -> bool:
    return any(
        row["step"] == step and any(key.startswith(f"eval/{dataset}/") for key in row) for dataset, step in evals
    )
