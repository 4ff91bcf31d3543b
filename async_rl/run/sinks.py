"""What a run is logged to: the sinks of ``log.to``, ours and those of other packages, and whether they can be used.

A package offers a sink as an entry point of the group ``async_rl.sinks``, NAME = MODULE:FACTORY (docs/loggers.md).
Packages are imported when a sink is opened, so that the table costs nothing. All sinks get the same keys. A row carries
its step: an evaluation's is often below that of the row before, and a run that went back to a checkpoint repeats steps.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# Each tool is optional.

from __future__ import annotations

import importlib
import importlib.util
import json
import netrc
import os
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypedDict
from urllib.parse import urlsplit

from async_rl.config.config import Config
from async_rl.errors import ConfigError
from async_rl.run.prometheus import check_prometheus

Row = Mapping[str, Any]

MAX_TABLE_ROWS = 32
_MAX_CELL_CHARACTERS = 2000
_COLUMNS = ("step", "row", "prompt", "response", "reward", "accuracy", "num_tokens", "finish_reason")


class Settings(TypedDict):
    """What a sink is opened with.

    Attributes:
        project: the name that groups runs.
        name: the run's name on the screen.
        id: stays the same when the run is resumed.
        directory: absolute path of the directory whose rows are logged.
        mode: of wandb, ``"online"`` or ``"offline"``.
        config: the run's config, as JSON data.
        limit_s: seconds to wait for a server at the start.
        finish_s: seconds to wait for it at the end.
        stats_pid: the process whose load is measured.
    """

    project: str
    name: str
    id: str
    directory: str
    mode: str
    config: dict[str, Any]
    limit_s: float
    finish_s: float
    stats_pid: int


class Sink:
    """An open sink, which has ``write`` at least. Any method may raise, and blocks no other sink.

    Attributes:
        place: where the run is: a directory, or an address.
    """

    place: str = ""

    def write(self, row: Row) -> None:
        """Log one row of metrics, which has the key ``step`` and no None."""
        raise NotImplementedError

    def table(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Log sampled rollouts as a table."""

    def rewind(self, step: int) -> None:
        """Expect rows for the steps after ``step`` again. Forget the old ones, if the sink can."""

    def finish(self, *, is_failed: bool) -> None:
        """Send what is left. Raise TimeoutError if that takes too long and the sink's files have the rest."""


class Wandb(Sink):
    """Weights & Biases."""

    def __init__(self, settings: Settings) -> None:
        import wandb

        self._wandb = wandb
        private: dict[str, Any] = {
            "console": "off", "silent": True, "init_timeout": settings["limit_s"], "x_stats_pid": settings["stats_pid"],
        }  # fmt: skip
        if "finish_timeout" in wandb.Settings.model_fields:  # else the parent ends this process, with the last rows
            private |= {"finish_timeout": settings["finish_s"], "finish_timeout_raises": True}
        try:
            self._run = wandb.init(
                project=settings["project"], name=settings["name"], id=settings["id"], resume="allow",
                dir=settings["directory"], mode=settings["mode"], config=settings["config"],  # pyright: ignore[reportArgumentType]
                settings=wandb.Settings(**private),
            )  # fmt: skip
        except Exception:
            wandb.teardown()  # else the id stays in use, and the next attempt fails
            raise
        # Rows carry their own step: wandb's own counter rejects the smaller steps that follow a rollback.
        self._run.define_metric("*", step_metric="step")
        self.place = os.path.dirname(self._run.dir)

    def write(self, row: Row) -> None:
        self._run.log(dict(row))

    def table(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        table = self._wandb.Table(columns=list(columns), data=[list(row) for row in rows], allow_mixed_types=True)
        self._run.log({"rollouts": table, "step": step})

    def finish(self, *, is_failed: bool) -> None:
        self._run.finish(exit_code=int(is_failed))
        self._wandb.teardown()  # its service writes the last rows of a file when it ends


class TensorBoard(Sink):
    """Event files in the folder ``tensorboard`` of the directory. TensorBoard hides what a rollback makes void."""

    def __init__(self, settings: Settings) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.text import metadata
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
        from tensorboard.util.tensor_util import make_tensor_proto

        self._events, self._summaries, self._text, self._tensor = event_pb2, summary_pb2, metadata, make_tensor_proto
        self.place = str(Path(settings["directory"]) / "tensorboard")
        self._writer = EventFileWriter(self.place, flush_secs=10)
        self._add_text("config", 0, ["```\n" + json.dumps(settings["config"], indent=1) + "\n```"])

    def write(self, row: Row) -> None:
        values = [
            self._summaries.Summary.Value(tag=key, simple_value=value) for key, value in numbers(row).items()
        ]  # fmt: skip
        self._add(row["step"], self._summaries.Summary(value=values))

    def table(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self._add_text("rollouts", step, [list(columns), *([str(cell) for cell in row] for row in rows)])

    def rewind(self, step: int) -> None:
        log = self._events.SessionLog(status=self._events.SessionLog.START)
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step + 1, session_log=log))

    def finish(self, *, is_failed: bool) -> None:
        self._writer.close()

    def _add_text(self, tag: str, step: int, text: Sequence[Any]) -> None:
        """Add a text, or a table if each item of ``text`` is a row of cells."""
        tensor = self._tensor(text, dtype="string")
        metadata = self._text.create_summary_metadata(display_name=tag, description="")
        value = self._summaries.Summary.Value(tag=f"{tag}/text_summary", metadata=metadata, tensor=tensor)
        self._add(step, self._summaries.Summary(value=[value]))

    def _add(self, step: int, summary: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, summary=summary))


class Trackio(Sink):
    """Trackio's database on this machine, or the Space or server that its environment variables name."""

    def __init__(self, settings: Settings) -> None:
        import trackio

        self._trackio = trackio
        self.place = str(trackio.TRACKIO_DIR)
        self._run = trackio.init(
            project=settings["project"],
            name=f"{settings['name']}-{settings['id'][:6]}",  # Trackio resumes by name
            config=settings["config"], resume="allow", embed=False, auto_log_cpu=False,
        )  # fmt: skip

    def write(self, row: Row) -> None:
        self._run.log({key: value for key, value in row.items() if key != "step"}, step=row["step"])

    def table(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        table = self._trackio.Table(columns=list(columns), data=[list(row) for row in rows])
        self._run.log({"rollouts": table}, step=step)

    def finish(self, *, is_failed: bool) -> None:
        self._trackio.finish()


class Mlflow(Sink):
    """The server or store of ``MLFLOW_TRACKING_URI``; if unset, a database in the directory's folder ``mlflow``."""

    def __init__(self, settings: Settings) -> None:
        import mlflow
        from mlflow.entities import Metric, Param

        self._metric = Metric
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
            params = [Param(key, str(value)[:500]) for key, value in _flat(settings["config"]).items()]
            for first in range(0, len(params), 100):  # MLflow's limit
                self._client.log_batch(self._run_id, params=params[first : first + 100])

    def write(self, row: Row) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(_mlflow_key(key), value, now, row["step"]) for key, value in numbers(row).items()]
        for first in range(0, len(metrics), 1000):  # MLflow's limit
            self._client.log_batch(self._run_id, metrics=metrics[first : first + 1000])

    def table(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        data = {column: [row[index] for row in rows] for index, column in enumerate(columns)}
        self._client.log_table(self._run_id, data, f"rollouts/step-{step:06d}.json")

    def finish(self, *, is_failed: bool) -> None:
        self._client.set_terminated(self._run_id, "FAILED" if is_failed else "FINISHED")


BUILT_IN: Mapping[str, Callable[[Settings], Sink]] = {
    "wandb": Wandb, "tensorboard": TensorBoard, "trackio": Trackio, "mlflow": Mlflow,
}  # fmt: skip
"""Name in ``log.to``, which is the package's name too -> what opens the sink."""
_ENVIRONMENT = {
    # wandb's reports about itself go to the same server, and wait for it at the end, also in offline mode.
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # By default MLflow tries for many minutes, while later rows wait.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
"""Variables for the packages, unless the user has set them."""


def offered_sinks() -> dict[str, EntryPoint]:
    """Return the sinks that installed packages offer, by their names in ``log.to``."""
    return {entry.name: entry for entry in entry_points(group="async_rl.sinks")}


def sink_factory(name: str) -> Callable[[Settings], Sink]:
    """Import the package of the sink ``name``, and return what opens the sink. Raises whatever the package raises."""
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    if name in BUILT_IN:
        importlib.import_module(name)
        return BUILT_IN[name]
    return offered_sinks()[name].load()


def check_sinks(config: Config) -> None:
    """Check that the sinks of ``log.to`` and what ``log.prometheus_port`` needs are installed, and wandb has its key.

    Raises:
        ConfigError: one is missing, or the key; or ``generator.prometheus_port`` is set for all generators.
    """
    if config.generator.prometheus_port is not None:
        raise ConfigError(
            f"generator.prometheus_port: expected it only in --set of `async-rl generator`, because each generator "
            f"needs a port of its own, got {config.generator.prometheus_port} in the run's config; set "
            f"log.prometheus_port, which serves metrics of all processes"
        )
    for tool in config.log.to:
        if tool not in BUILT_IN:
            if tool not in (offered := offered_sinks()):
                raise ConfigError(
                    f"log.to: expected {', '.join(sorted(BUILT_IN.keys() | offered.keys()))}, got {json.dumps(tool)}; "
                    f"correct it, or install the package that offers it (an entry point of the group async_rl.sinks)"
                )
            continue
        spec = importlib.util.find_spec(tool)
        if spec is None or spec.origin is None:  # a folder of that name is no package
            package = tool if tool == "wandb" else f"async-rl[{tool}]"
            raise ConfigError(
                f"log.to: {json.dumps(tool)} needs the package {tool}, which is not installed: pip install "
                f"'{package}', or take it out of log.to"
            )
    check_prometheus(config.log.prometheus_port)
    if "wandb" in config.log.to and config.log.wandb_mode == "online":
        _check_key()


def _check_key() -> None:
    """Check that there is an API key for Weights & Biases. Without one, wandb would wait for the user to type it.

    Raises:
        ConfigError: ``WANDB_API_KEY`` is not set, and the netrc file has no key for the server.
    """
    if os.environ.get("WANDB_API_KEY"):
        return
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        has_key = path.exists() and netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError) as error:
        raise ConfigError(
            f'log.wandb_mode = "online" needs an API key, but {path} can\'t be read: {error}; set WANDB_API_KEY, or '
            f"correct that file"
        ) from error
    if not has_key:
        raise ConfigError(
            f'log.wandb_mode = "online", but there is no API key for {host}: set WANDB_API_KEY, run `wandb login`, or '
            f'set log.wandb_mode = "offline" (synced later with `wandb sync`)'
        )


def samples_table(step: int, lines: Sequence[Mapping[str, Any]]) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
    """Return columns and rows of a table of at most 32 rollouts: the ``lines`` of ``rollouts/step-NNNNNN.jsonl``.

    Texts are cut after 2,000 characters.
    """
    rows: list[list[Any]] = []
    for line in lines[:MAX_TABLE_ROWS]:
        prompt = "\n".join(f"{message.get('role')}: {message.get('content')}" for message in line["messages"])
        cells = {"step": step, **line, "prompt": prompt}
        rows.append([_cut(cells.get(column)) for column in _COLUMNS])
    return _COLUMNS, rows


def _cut(cell: Any) -> Any:
    is_long = isinstance(cell, str) and len(cell) > _MAX_CELL_CHARACTERS
    return f"{cell[:_MAX_CELL_CHARACTERS]}... ({len(cell)} characters)" if is_long else cell


def numbers(row: Row) -> dict[str, float]:
    """Return the numbers of a row without its step, for tools that take nothing else."""
    return {key: float(value) for key, value in row.items() if isinstance(value, int | float) and key != "step"}


def _mlflow_key(key: str) -> str:
    """Return the key as MLflow takes it: letters, digits and ``_-.:/``."""
    return "".join(character if character.isalnum() or character in "_-.:/ " else "_" for character in key)


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return flat
