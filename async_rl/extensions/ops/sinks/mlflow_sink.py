"""MLflow."""

# pyright: reportMissingImports=false
# MLflow is in an environment of its own (``make test-loggers``).

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from async_rl.config.loading import flat
from async_rl.run.following.sinks import Row, Settings, Sink, numbers

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
# By default MLflow tries for many minutes, while later rows wait.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")

import mlflow
from mlflow.entities import Metric, Param

_OTHERS = re.compile(r"[^\w.\-:/ ]")
"""Characters that MLflow takes in no key."""


class Mlflow(Sink):
    """The server or store of ``MLFLOW_TRACKING_URI``; if unset, a database in the directory's folder ``mlflow``."""

    def __init__(self, settings: Settings) -> None:
        folder, uri = Path(settings["directory"]) / "mlflow", os.environ.get("MLFLOW_TRACKING_URI", "")
        is_here = not uri
        if is_here:
            folder.mkdir(exist_ok=True)
            uri = f"sqlite:///{folder / 'mlflow.db'}"
        mlflow.set_tracking_uri(uri)
        self.place, self._client = uri, mlflow.MlflowClient(uri)
        known = self._client.get_experiment_by_name(settings["project"])
        experiment = known.experiment_id if known else self._client.create_experiment(
            settings["project"], artifact_location=(folder / "artifacts").as_uri() if is_here else None
        )  # fmt: skip
        runs = self._client.search_runs([experiment], f"tags.`async_rl.id` = '{settings['id']}'", max_results=1)
        if runs:
            self._run_id = runs[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            tags = {"async_rl.id": settings["id"]}
            self._run_id = self._client.create_run(experiment, run_name=settings["name"], tags=tags).info.run_id
            # MLflow refuses another value of a parameter later, so a resumed run keeps the first.
            params = [Param(key, str(value)[:500]) for key, value in flat(settings["config"]).items()]
            for first in range(0, len(params), 100):  # MLflow's limit
                self._client.log_batch(self._run_id, params=params[first : first + 100])

    def write(self, row: Row) -> None:
        now = int(time.time() * 1000)
        metrics = [Metric(_OTHERS.sub("_", key), value, now, row["step"]) for key, value in numbers(row).items()]
        for first in range(0, len(metrics), 1000):  # MLflow's limit
            self._client.log_batch(self._run_id, metrics=metrics[first : first + 1000])

    def table(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        data = {column: [row[index] for row in rows] for index, column in enumerate(columns)}
        self._client.log_table(self._run_id, data, f"rollouts/step-{step:06d}.json")

    def finish(self, *, is_failed: bool) -> None:
        self._client.set_terminated(self._run_id, "FAILED" if is_failed else "FINISHED")
