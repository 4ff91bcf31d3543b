"""``log.to`` in the commands that train on given rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_rl.errors import ConfigError
from async_rl.extensions.offline import run
from async_rl.extensions.offline.tasks import train
from tests.extensions.offline.offline_run import metrics, offline_config
from tests.run.read_loggers import history, tensorboard_rows


@pytest.mark.slow
@pytest.mark.parametrize("command", ["sft", "dpo", "rm"])
def test_every_row_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str):
    monkeypatch.setenv("WANDB_API_KEY", "")
    to_wandb = {"to": ["wandb"], "wandb_mode": "offline"}
    train(command, offline_config(tmp_path, command, log=to_wandb, **{command: {"steps": 2}}))
    (file,) = (tmp_path / "run" / command / "wandb").glob("offline-run-*/*.wandb")
    written, sent = metrics(tmp_path, command), history(file)
    assert [row["step"] for row in sent] == [1, 2]
    for theirs, ours in zip(sent, written, strict=True):
        assert {key: theirs[key] for key in ours if ours[key] is not None} == {
            key: value for key, value in ours.items() if value is not None
        }


def test_a_missing_key_is_refused_before_the_rows_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    config = offline_config(tmp_path, "sft", log={"to": ["wandb"]}, sft={"data": str(tmp_path / "absent.jsonl")})
    with pytest.raises(ConfigError, match="WANDB_API_KEY"):
        train("sft", config)


def test_a_run_that_is_resumed_before_its_last_step_is_one_run_in_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = offline_config(tmp_path, "sft", log={"to": ["tensorboard"]}, sft={"steps": 6, "checkpoint_every": 4})

    def batch_of(rows: Any, step: int, **settings: Any) -> Any:
        if step == 5:
            raise RuntimeError("a failure in the sixth step")
        return real_batch_of(rows, step, **settings)

    real_batch_of = run.batch_of
    with monkeypatch.context() as patch:
        patch.setattr(run, "batch_of", batch_of)
        with pytest.raises(RuntimeError, match="sixth"):
            train("sft", config)
    assert sorted(tensorboard_rows(tmp_path / "run" / "sft")) == [0, 1, 2, 3, 4, 5]  # 0 has the config
    train("sft", config)  # from step 4 on
    rows, written = tensorboard_rows(tmp_path / "run" / "sft"), metrics(tmp_path, "sft")
    assert [row["step"] for row in written] == [1, 2, 3, 4, 5, 6]
    for row in written:
        assert rows[row["step"]]["loss"] == pytest.approx(row["loss"])
