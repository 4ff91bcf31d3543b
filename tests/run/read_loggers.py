"""The rows of a run as each tool of ``log.to`` reads them back: step -> key -> value, the newest of each."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# Each tool is optional.

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Rows = dict[int, dict[str, Any]]


def records(data: bytes) -> Iterator[bytes]:
    """The records in a ``.wandb`` file: LevelDB's log format behind a header of 7 bytes."""
    block_size, place, record = 32768, 7, b""
    while place + 7 <= len(data):
        if block_size - place % block_size < 7:  # too little for a chunk's header: padding
            place += block_size - place % block_size
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last chunk of one
            yield record
            record = b""


def wandb_records(path: Path, kind: str) -> list[Any]:
    """The records of a kind in a ``.wandb`` file."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

    found = [Record.FromString(data) for data in records(path.read_bytes())]
    return [getattr(record, kind) for record in found if record.WhichOneof("record_type") == kind]


def history(path: Path) -> list[dict[str, Any]]:
    """What was logged to a ``.wandb`` file, row by row, tables too."""
    rows = [row.item for row in wandb_records(path, "history")]
    return [{i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in row} for row in rows]


def wandb_rows(directory: Path) -> tuple[Rows, set[str], list[tuple[str, int]]]:
    """The rows in all ``.wandb`` files of a directory, in the order of their starts, the ids of their runs,
    and the project and exit code of each.
    """
    found: Rows = {}
    files = sorted((directory / "wandb").glob("offline-run-*/*.wandb"))
    for file in files:
        for row in history(file):
            found.setdefault(row["step"], {}).update({k: v for k, v in row.items() if k[0] != "_"})
    ends = [(wandb_records(file, "run")[0].project, wandb_records(file, "exit")[0].exit_code) for file in files]
    return found, {file.stem.removeprefix("run-") for file in files}, ends


def tensorboard_rows(directory: Path) -> Rows:
    """The scalars of the event files, without those that a rollback made void, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    found: Rows = {}
    for key in events.Tags()["scalars"]:
        for event in events.Scalars(key):
            is_again = key in found.setdefault(event.step, {})
            # An evaluation may be made again, and its row has a time too.
            assert not is_again or key.startswith("eval/") or key == "time_s", (
                f"step {event.step} is shown twice: {key}"
            )
            found[event.step][key] = event.value
    for key in events.Tags()["tensors"]:
        for event in events.Tensors(key):
            text = [one.decode() for one in event.tensor_proto.string_val]
            found.setdefault(event.step, {})[key.removesuffix("/text_summary")] = text
    return found


def mlflow_rows(uri: str, project: str = "async-rl") -> tuple[Rows, Any]:
    """The metrics of the only run of an experiment, and that run."""
    import mlflow

    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name(project)
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    found: Rows = {}
    for key in run.data.metrics:
        for metric in client.get_metric_history(run.info.run_id, key):
            found.setdefault(metric.step, {})[key] = metric.value
    return found, run


def trackio_rows(project: str = "async-rl") -> tuple[Rows, set[str]]:
    """The metrics in Trackio's database (in ``TRACKIO_DIR`` as it was when this process began), and its runs."""
    from trackio.sqlite_storage import SQLiteStorage

    names = SQLiteStorage.get_runs(project)
    found: Rows = {}
    for row in (row for name in names for row in SQLiteStorage.get_logs(project, name)):
        found.setdefault(row["step"], {}).update(row)
    return found, set(names)
