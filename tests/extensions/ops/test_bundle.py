"""The archive of a run for whoever helps to debug it."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from async_rl.cli.main import main
from async_rl.extensions.ops import bundle
from async_rl.redaction import redacted, without_names


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('api_key = "hunter2"', "api_key = ***"),
        ('{"MY_TOKEN": "my hunter2"}', '{"MY_TOKEN": ***}'),
        ("HF_TOKEN=hunter2", "HF_TOKEN=***"),
        ("Authorization: Bearer hunter2", "Authorization: Bearer ***"),
        ("s3://me:hunter2/3@bucket/x?sig=hunter2&y", "s3://***@bucket/x?sig=***&y"),
        ("got hf_abcdefghijklmnop of env-value", "got *** of ***"),
        ("max_new_tokens = 512", "max_new_tokens = 512"),
        ('"tokens": {"trained": 5}', '"tokens": {"trained": 5}'),
        ("special_tokens_in_content = 'text'", "special_tokens_in_content = 'text'"),
        ("KeyError: 'layer'", "KeyError: 'layer'"),
        ("in /home/bob/x, /home/ann/y, /scratch/ann/z", "in /home/USER/x, ~/y, /scratch/USER/z"),
    ],
)
def test_secrets_and_names_are_replaced_and_figures_are_not(text: str, shown: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_KEY", "env-value")
    monkeypatch.setenv("HOME", "/home/ann")
    assert without_names(redacted(text)) == shown


def packed(run: Path, out: Path, *, exit_code: str = "0") -> dict[str, str]:
    with pytest.raises(SystemExit, match=exit_code):
        main(["bundle", str(run), "--out", str(out)])
    with zipfile.ZipFile(out) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


def test_a_killed_run_with_damaged_files_is_listed_and_packed_without_rows_and_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(bundle, "_HEAD_BYTES", 8)
    monkeypatch.setattr(bundle, "_TAIL_BYTES", 9)
    contents = {
        "config.toml": b"\xff damaged", "logs/learner-0.log": b"first\nsecond\nthird\nlast\n", "logs/rank-0.json": b"{",
        "rollouts/step-000001.jsonl": b"{}", "client.key": b"hunter2", "metrics.jsonl": b'{"wandb_key": "hunter2"}',
    }  # fmt: skip
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "notes.log").symlink_to("client.key")
    texts = packed(tmp_path, tmp_path / "b.zip")
    shown = capsys.readouterr().out
    assert "logs/learner-0.log  (head and tail of 24 B)" in shown
    assert "notes.log  (left out: a link, or no regular file)" in shown
    assert texts["logs/learner-0.log"] == "first\n[head and tail of 24 B]\nlast\n"
    assert "hunter2" not in str(texts)
    assert not texts.keys() & {"rollouts/step-000001.jsonl", "client.key"}
    assert texts["doctor.txt"].startswith("not checked: ")
    assert "torch=" in texts["versions.txt"]


def test_a_run_that_never_started_is_packed_by_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bundle, "_CHECKS", frozenset({"versions"}))
    config = tmp_path / "mine.toml"
    config.write_text('run.dir = "runs/x"\nmodel.path = "m"\ndata.train = "t"\n')
    texts = packed(config, tmp_path / "b.zip")
    assert 'model.path = "m"' in texts["config.toml"]
    assert "OK   torch: " in texts["doctor.txt"]
    packed(tmp_path / "no such run", tmp_path / "b.zip", exit_code="2")
