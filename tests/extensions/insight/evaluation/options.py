"""Options of ``async-rl eval`` for its tests."""

from pathlib import Path
from typing import Any

from async_rl.extensions.insight.evaluation.offline import EvalOptions


def eval_options(
    datasets: tuple[str, ...] = (), config: Path | None = None, overrides: tuple[str, ...] = (), **values: Any
) -> EvalOptions:
    """Options with ``values`` by config key, ``__`` for its dot."""
    return EvalOptions(datasets, config, overrides, {key.replace("__", "."): value for key, value in values.items()})
