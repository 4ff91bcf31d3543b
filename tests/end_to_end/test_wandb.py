"""``log.wandb = "offline"`` in a whole run: every row arrives in the file that ``wandb sync`` reads."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.harness import metrics, roles, write_config
from tests.end_to_end.tiny import tiny_config, write_tiny_task
from tests.run.wandb_server import wandb_server


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


def history(path: Path) -> list[dict[str, Any]]:
    """The rows that were logged to a ``.wandb`` file."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

    rows: list[dict[str, Any]] = []
    for data in records(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            rows.append({i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in record.history.item})
    return rows


@pytest.mark.slow
def test_every_row_arrives_without_a_key_a_prompt_or_a_network(tmp_path: Path):
    raw = tiny_config(tmp_path, write_tiny_task(tmp_path), learner={"steps": 3}, log={"wandb": "offline"})
    config = write_config(tmp_path / "config.toml", raw)
    nowhere = "http://127.0.0.1:9"  # nobody listens on this port: a request would fail, and be seen
    environment = {
        "WANDB_API_KEY": "", "WANDB_BASE_URL": nowhere, "HTTP_PROXY": nowhere, "HTTPS_PROXY": nowhere,
        "HOME": str(tmp_path / "home"),
    }  # fmt: skip
    with roles(tmp_path / "logs") as start:
        launch = start("launch", "launch", str(config), env=environment)
        launch.succeed()
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    sent, written = history(file), metrics(tmp_path / "run")
    assert [row["step"] for row in sent] == [row["step"] for row in written]
    for theirs, ours in zip(sent, written, strict=True):
        assert {key: theirs[key] for key in ours if ours[key] is not None} == {
            key: value for key, value in ours.items() if value is not None
        }
    assert "wandb" not in launch.log
    assert "wandb" not in (tmp_path / "run" / "logs" / "learner-0.log").read_text().replace("log.wandb", "")


@pytest.mark.long
def test_a_run_starts_and_ends_without_the_server_and_says_so(tmp_path: Path):
    raw = tiny_config(tmp_path, write_tiny_task(tmp_path), learner={"steps": 3}, log={"wandb": "online"})
    config = write_config(tmp_path / "config.toml", raw)
    with wandb_server() as server, roles(tmp_path / "logs") as start:
        server.is_silent.set()
        environment = {"WANDB_API_KEY": "k" * 40, "WANDB_BASE_URL": server.url, "HOME": str(tmp_path / "home")}
        launch = start("launch", "launch", str(config), env=environment)
        launch.succeed()
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    assert [row["step"] for row in history(file)] == [row["step"] for row in metrics(tmp_path / "run")]
    (note,) = [line for line in launch.log.splitlines() if "wandb" in line]
    assert "did not start within 20 s" in note
    assert note.endswith(f"wandb sync {file.parent}")
