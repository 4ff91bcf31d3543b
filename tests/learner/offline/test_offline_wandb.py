"""``log.wandb`` in the commands that train on given rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from async_rl.config.config import Config
from async_rl.errors import ConfigError
from async_rl.learner.offline.dpo import run_dpo
from async_rl.learner.offline.rm import run_rm
from async_rl.learner.offline.sft import run_sft
from tests.end_to_end.test_wandb import history
from tests.learner.offline.offline_run import metrics, offline_config


@pytest.mark.slow
@pytest.mark.parametrize("run", [run_sft, run_dpo, run_rm])
def test_every_row_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[[Config], None]):
    monkeypatch.setenv("WANDB_API_KEY", "")
    command = run.__name__.removeprefix("run_")
    run(offline_config(tmp_path, command, log={"wandb": "offline"}, **{command: {"steps": 2}}))
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
    config = offline_config(tmp_path, "sft", log={"wandb": "online"}, sft={"data": str(tmp_path / "absent.jsonl")})
    with pytest.raises(ConfigError, match="WANDB_API_KEY"):
        run_sft(config)
