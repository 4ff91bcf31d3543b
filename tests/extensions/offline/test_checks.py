"""What the doctor and a start find in the rows of sft, rm and dpo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from async_rl.cli.main import main
from async_rl.config.loading import config_to_toml
from tests.extensions.offline.offline_run import offline_config
from tests.launch.checks.made import made


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit, match="0"):
        main(["doctor", *arguments])
    return capsys.readouterr().out


def test_a_config_for_sft_alone_is_checked_for_what_sft_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = offline_config(tmp_path, "sft", sft={"eval": {"held_out": str(tmp_path / "rows.jsonl")}})
    path = tmp_path / "offline.toml"
    path.write_text(config_to_toml(config))
    rows = {row["check"]: row for row in json.loads(doctor(capsys, str(path), "--json"))["rows"]}
    assert rows["sft.data"]["found"].startswith("12 rows, the longest sequence has ")
    assert rows["sft.eval.held_out"]["state"] == "OK"
    assert not rows.keys() & {"queue.address", "data.train", "reward", "gloo, two ranks"}
    assert doctor(capsys, str(path)).splitlines()[-1] == f"next: async-rl sft {path}"


def test_offline_data_that_is_missing_or_too_long_is_red(tmp_path: Path):
    sft = {"eval": {"held_out": str(tmp_path / "nowhere.jsonl")}}
    config = offline_config(tmp_path, "sft", sft=sft, learner={"max_tokens": 8})
    train, held_out = made(config, "offline data")
    assert (train.check, train.state, held_out.check, held_out.state) == (
        "sft.data", "FAIL", "sft.eval.held_out", "FAIL",
    )  # fmt: skip
    assert "a micro-batch at most 8" in train.found
    assert "learner.max_tokens" in train.fix
    assert "nowhere.jsonl" in held_out.found


def test_rows_that_spell_control_tokens_are_counted_with_the_first(tmp_path: Path):
    config = offline_config(tmp_path, "sft")
    rows = [
        {"prompt": [{"role": "user", "content": "1"}], "response": [{"role": "assistant", "content": "2"}]},
        {"messages": [{"role": "user", "content": "a <|user|> b"}, {"role": "assistant", "content": "2"}]},
        {"prompt": "plain <|user|>", "response": "text"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    row, _ = made(config, "offline data")
    assert row.found == f"1 rows of sft.data spell control tokens in a content, read as text (first: {path}:2)"
