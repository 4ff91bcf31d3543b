"""The command line: every kind of bad input is one message, exit code 2, no traceback, and nothing is written."""

import io
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from async_rl import cli
from async_rl.config_file import load_config
from async_rl.errors import ConfigError, TrainingError

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = ("launch", "learner", "generator", "queue", "status", "config", "eval", "export", "sft")


def write_config(directory: Path, **sections: str) -> Path:
    """A config whose sections are TOML text; the run directory is ``directory / "run"``."""
    texts = {"run": f"dir = {str(directory / 'run')!r}", "model": f"path = {str(directory / 'model')!r}"} | sections
    path = directory / "run.toml"
    path.write_text("".join(f"[{name}]\n{text}\n" for name, text in texts.items()))
    return path


def write_data(directory: Path) -> str:
    path = directory / "train.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "1 + 1?"}], "gt_answer": "2"}) + "\n")
    return f"train = {str(path)!r}"


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message of a command that must exit 2."""
    with pytest.raises(SystemExit) as leaving:
        cli.main(list(arguments))
    printed = capsys.readouterr()
    assert leaving.value.code == 2, printed
    assert "Traceback" not in printed.err
    assert printed.out == ""
    return printed.err


def test_bad_input_is_one_message_and_exit_code_2_in_a_real_process(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "async_rl", "config", str(tmp_path / "none.toml")],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"async-rl: no config file at {tmp_path / 'none.toml'}\n"


@pytest.mark.parametrize("command", ["launch", "learner", "queue", "config", "sft"])
def test_a_missing_config_file_is_named(command: str, capsys: pytest.CaptureFixture[str]):
    assert "no config file at none.toml" in refusal(capsys, command, "none.toml")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("queue.max_stalenes=1", "queue.max_stalenes: unknown key"),
        ("learner.steps=many", "learner.steps: input should be a valid integer"),
        ("learner.steps=0", "learner.steps: input should be greater than or equal to 1, got 0"),
        ("learner.steps=1.5", "learner.steps: input should be a valid integer"),
        ("reward.type=best", "reward.type: input should be 'boxed' or 'think_answer_tags', got 'best'"),
        ("weights.sync_every=9", "weights.sync_every: expected at most queue.max_staleness + 1 = 5, got 9"),
        ("queue.address=localhost", "queue.address: expected an address like tcp://127.0.0.1:5555, got 'localhost'"),
        ("learner", "expected --set section.key=value, got 'learner'"),
        ("steps=5", "expected --set section.key=value, got 'steps=5'"),
    ],
)
def test_a_bad_key_names_itself_what_was_expected_and_what_was_got(
    override: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = str(write_config(tmp_path))
    assert message in refusal(capsys, "launch", config, "--set", override)
    assert not (tmp_path / "run").exists()


def test_a_config_that_is_no_toml_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "run.toml").write_text("[run\n")
    assert "not valid TOML" in refusal(capsys, "config", str(tmp_path / "run.toml"))


@pytest.mark.parametrize("address", ["localhost:5555", "tcp://host", "tcp://host:99999", "udp://127.0.0.1:1", ""])
@pytest.mark.parametrize("command", ["generator", "status"])
def test_a_malformed_address_is_refused_at_once(command: str, address: str, capsys: pytest.CaptureFixture[str]):
    assert "expected an address like tcp://127.0.0.1:5555" in refusal(capsys, command, "--connect", address)


def test_a_busy_port_is_refused_before_anything_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        address = f"tcp://127.0.0.1:{busy.getsockname()[1]}"
        config = write_config(tmp_path, data=write_data(tmp_path), queue=f'address = "{address}"')
        assert f"queue.address: can't bind {address}" in refusal(capsys, "launch", str(config))
    assert not (tmp_path / "run").exists()


def test_an_address_open_to_the_network_needs_insecure(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = write_config(tmp_path, queue='address = "tcp://0.0.0.0:0"')
    assert "--insecure" in refusal(capsys, "launch", str(config))


def test_launch_refuses_missing_data_bad_rows_and_a_missing_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = str(write_config(tmp_path))
    assert "data.train: needed, but not set" in refusal(capsys, "launch", config)
    missing = f"data.train={tmp_path / 'none.jsonl'}"
    assert "none.jsonl" in refusal(capsys, "launch", config, "--set", missing)
    (tmp_path / "bad.jsonl").write_text('{"messages": []}\n')
    assert "bad.jsonl:1" in refusal(capsys, "launch", config, "--set", f"data.train={tmp_path / 'bad.jsonl'}")
    config = str(write_config(tmp_path, data=write_data(tmp_path)))
    assert f"no directory {tmp_path / 'model'}" in refusal(capsys, "launch", config)
    assert not (tmp_path / "run").exists()


def test_launch_refuses_a_changed_config_with_the_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from async_rl.run_dir import prepare_run_dir

    config = write_config(tmp_path)
    prepare_run_dir(load_config(config))
    assert "optimizer.lr: 1e-06 -> 0.1" in refusal(capsys, "launch", str(config), "--set", "optimizer.lr=0.1")


def test_a_finished_run_is_left_alone_with_exit_code_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from async_rl.run_dir import prepare_run_dir

    config = write_config(tmp_path)
    prepare_run_dir(load_config(config)).mark_finished({"step": 3})
    with pytest.raises(SystemExit) as leaving:
        cli.main(["launch", str(config)])
    assert not leaving.value.code
    assert "is finished; --fresh starts over" in " ".join(capsys.readouterr().out.split())


def test_a_dry_run_prints_every_command_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    from async_rl import launch

    monkeypatch.setattr(launch, "check_model", lambda path: None)
    config = write_config(tmp_path, data=write_data(tmp_path))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as leaving:
        cli.main(["launch", str(config), "--dry-run", "--set", "generator.count=2"])
    assert not leaving.value.code
    printed = capsys.readouterr().out
    for role in (f"async_rl queue {config}", f"async_rl learner {config} --set generator.count=2", "generator-1"):
        assert role in printed
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_with_an_example(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as leaving:
        cli.main([command, "--help"])
    text = capsys.readouterr().out
    assert not leaving.value.code
    assert "Example" in text
    assert f"async-rl {command}" in text


def test_the_root_help_names_every_command(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    text = capsys.readouterr().out
    assert [c for c in COMMANDS if f"\n  {c} " not in text] == []


def test_an_unknown_command_or_option_is_refused(capsys: pytest.CaptureFixture[str]):
    assert "launch" in refusal(capsys, "launc")
    assert "--nonsense" in refusal(capsys, "config", "x.toml", "--nonsense")


def test_config_prints_toml_that_reads_back_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = write_config(tmp_path)
    with pytest.raises(SystemExit):
        cli.main(["config", str(config), "--set", "queue.filter_range=[]", "--set", "run.name=a b"])
    (tmp_path / "again.toml").write_text(capsys.readouterr().out)
    assert load_config(tmp_path / "again.toml") == load_config(config, ["queue.filter_range=[]", "run.name=a b"])


@pytest.mark.parametrize(
    ("raised", "code"), [(ConfigError("x"), 2), (SystemExit(143), 143), (KeyboardInterrupt(), 130)]
)
def test_how_a_command_ends_is_its_exit_code(
    raised: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    def fail(*_args: object) -> None:
        raise raised

    monkeypatch.setattr("async_rl.config_file.load_config", fail)
    with pytest.raises(SystemExit) as leaving:
        cli.main(["config", "x.toml"])
    assert leaving.value.code == code


@pytest.mark.parametrize("raised", [TrainingError("diverged"), BrokenPipeError("a bug in a role")])
def test_a_failure_that_is_not_the_users_keeps_its_traceback(raised: Exception, tmp_path: Path):
    code = (
        "import async_rl.config_file as c\nfrom async_rl.errors import TrainingError\nfrom async_rl import cli\n"
        f"def fail(*_): raise {raised!r}\nc.load_config = fail\ncli.main(['queue', 'x.toml'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert str(raised) in done.stderr


def test_the_command_runs_from_any_directory_without_being_installed(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "cli.py"), "--version"], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.stdout.startswith("async-rl ")


def test_status_tables_show_what_is_not_zero_and_count_leases():
    from rich.console import Console

    from async_rl.status import status_tables

    groups = {"issued": 7, "queued": 0, "dropped": {"stale": 2, "expired": 0}}
    status = {
        "step": 3,
        "stream": {"position": 9, "epoch": 0},
        "leases": [{}, {}],
        "ledger": {"groups": groups, "eval": {"groups": {"issued": 0}}},
        "generators": [{"id": "a", "busy": 0.123456}],
    }
    console = Console(width=80, record=True, file=io.StringIO())
    for table in status_tables(status):
        console.print(table)
    lines = [" ".join(line.replace("│", " ").split()) for line in console.export_text().splitlines()]
    for shown in (
        "step 3",
        "stream position 9",
        "leases 2",
        "groups issued 7, dropped (stale 2)",
        "eval -",
        "a 0.1235",
    ):
        assert shown in lines
