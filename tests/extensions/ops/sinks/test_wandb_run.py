"""``log.wandb_mode = "offline"`` in a whole run: every row arrives in the file that ``wandb sync`` reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.harness import metrics, roles, write_config
from tests.end_to_end.tiny import tiny_config, write_tiny_task
from tests.run.read_loggers import history


@pytest.mark.slow
def test_every_row_arrives_without_a_key_a_prompt_or_a_network(tmp_path: Path):
    raw = tiny_config(
        tmp_path, write_tiny_task(tmp_path), learner={"steps": 3}, log={"to": ["wandb"], "wandb_mode": "offline"}
    )
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
    sent, written = [row for row in history(file) if "rollouts._type" not in row], metrics(tmp_path / "run")
    assert [row["step"] for row in history(file) if "rollouts._type" in row] == [1, 3]  # the first and the last
    assert [row["step"] for row in sent] == [row["step"] for row in written]
    for theirs, ours in zip(sent, written, strict=True):
        assert {key: theirs[key] for key in ours if ours[key] is not None} == {
            key: value for key, value in ours.items() if value is not None
        }
    assert "wandb" not in launch.log
    assert "wandb" not in (tmp_path / "run" / "logs" / "learner-0.log").read_text().replace("log.wandb_mode", "")
