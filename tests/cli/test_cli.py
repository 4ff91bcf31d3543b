"""The command line: every kind of bad input is one message, exit code 2, no traceback, and nothing is written.

A mistake is a change of a config with which ``launch`` would start, and a part of the message. What a check finds is in
``tests/launch/checks``; here each is one that the commands make.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from async_rl.cli import main as cli
from async_rl.config.loading import load_config
from async_rl.errors import ConfigError, TrainingError
from async_rl.launch import launch
from async_rl.launch.checks import capacity
from async_rl.process.descriptors import few_descriptors
from async_rl.run.reuse import prepare_run_dir
from tests.end_to_end.harness import ROOT, write_config
from tests.end_to_end.tiny import tiny_config, write_tiny_task
from tests.refusal import refusal


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_tiny_task(tmp_path_factory.mktemp("task"), num_rows=8)


@pytest.fixture
def config(tmp_path: Path, task: dict[str, str]) -> Path:
    """A config with which ``launch`` would start; its run directory is ``tmp_path / "run"``."""
    return write_config(tmp_path / "config.toml", tiny_config(tmp_path, task))


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def settings(*overrides: str) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


def check_refused(
    capsys: pytest.CaptureFixture[str], config: Path, message: str, *arguments: str, command: str = "launch"
) -> None:
    before = sorted(config.parent.rglob("*"))
    said = refusal(capsys, command, str(config), *arguments)
    assert message in said
    assert said.startswith("async-rl: ")
    assert sorted(config.parent.rglob("*")) == before


MISTAKES = {
    "a character of no path": ('data.tools="\\u0000"', "data.tools: expected text without"),
    "answers beyond the context": ("sampling.max_new_tokens=113", "expected at most 128, the model's context length"),
    "no prompt fits": ("sampling.max_prompt_tokens=2", "none of the 8 prompts of data.train has at most 2 tokens"),
    "no address": ("queue.address=localhost", "queue.address: expected an address tcp://HOST:PORT"),
    "no keys": ("queue.keys=nowhere", "nowhere"),
    "no NVIDIA library": ("weights.transport=nccl", 'weights.transport: "nccl" needs CUDA devices'),
    "no data": ("data.train=nowhere.jsonl", "no dataset at nowhere.jsonl"),
    "no data to evaluate": ("data.eval.more=nowhere.jsonl", "data.eval.more: no dataset at nowhere.jsonl"),
    "no model": ("model.path=/nowhere", "model.path: expected a model directory, but there is no directory /nowhere"),
    "code that nobody allowed": ("reward.type=own.py:score", "this machine does not allow it; if you trust it, set"),
}


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_setting_is_refused_with_its_key(
    mistake: str, config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    override, message = MISTAKES[mistake]
    (config.parent / "own.py").write_text("def score(item):\n    return 1.0\n")
    monkeypatch.chdir(config.parent)
    check_refused(capsys, config, message, *settings(override))


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("command", ["launch", "learner", "queue"])
def test_every_role_refuses_what_it_can_not_work_with(
    command: str, config: Path, taken_port: int, capsys: pytest.CaptureFixture[str]
):
    place = config.parent
    (place / "file").touch()
    (place / "bad.jsonl").write_text('\n{"messages": []}\n')
    (place / "thesis").mkdir()
    (place / "thesis" / "chapter.tex").touch()
    mistakes = {
        "data.train=": "data.train: expected a file or data set, but the key is unset",
        f"data.train={place / 'bad.jsonl'}": "bad.jsonl:2: ",
        f"run.dir={place / 'file'}": "run.dir: expected a directory at",
        f"run.dir={place / 'file' / 'deep'}": "is a file; choose another",
        f"run.dir={place / 'thesis'}": "which has no config.toml but holds",
        "run.dir=/proc/nowhere": "run.dir: can't write to /proc/nowhere",
        f"queue.address=tcp://127.0.0.1:{taken_port}": f"queue.address: can't bind tcp://127.0.0.1:{taken_port}",
        "queue.address=tcp://0.0.0.0:0": "pass --insecure on a network that you trust",
    }
    if command == "learner":  # its queue server's address may be served already
        del mistakes[f"queue.address=tcp://127.0.0.1:{taken_port}"]
    for override, message in mistakes.items():
        check_refused(capsys, config, message, *settings(override), command=command)
    for address in ("0.0.0.0", "*", "[::]"):
        everywhere = ("--insecure", *settings(f"queue.address=tcp://{address}:5555"))
        said = f"queue.address: tcp://{address}:5555 stands for all interfaces"
        check_refused(capsys, config, said, *everywhere, command=command)
    own = settings("queue.advertise=tcp://127.0.0.1:5555")
    check_refused(capsys, config, "which stands for loopback", *everywhere, *own, command=command)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("command", ["launch", "learner"])
def test_who_trains_refuses_what_the_learner_can_not_work_with(
    command: str, config: Path, task: dict[str, str], taken_port: int, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(config.parent / "netrc"))
    bare, mute, broken = (config.parent / name for name in ("bare", "mute", "broken"))
    for model in (bare, mute, broken):
        shutil.copytree(task["model"], model)
    (broken / "model.safetensors").write_text("{")
    (bare / "tokenizer.json").unlink()
    (mute / "chat_template.jinja").unlink()
    ports = f"{taken_port}-{taken_port + 1}" if taken_port < 65535 else f"{taken_port - 1}-{taken_port}"
    for override, message in {
        f"model.path={bare}": f"expected a tokenizer in {bare}",
        f"model.path={mute}": f"the tokenizer in {mute} has no chat template",
        f"model.path={broken}": "model.safetensors",
        f"weights.port={ports}": "weights.port: expected two free ports, one for each listener of the learner",
        "learner.devices=[0]": "learner.devices: expected CUDA devices [0]",
        "log.profile=5-3": "log.profile: expected a step such as 3",
        'log.to=["wandb"]': "there is no API key for api.wandb.ai",
        "queue.address=tcp://nosuch.invalid:5555": "nosuch.invalid",
    }.items():
        more = ["--insecure"] if "invalid" in override else []
        check_refused(capsys, config, message, *settings(override), *more, command=command)


@pytest.mark.parametrize("command", ["launch", "learner", "queue", "sft"])
def test_a_run_directory_that_was_moved_begins_no_new_run(
    config: Path, capsys: pytest.CaptureFixture[str], command: str
):
    run_dir = prepare_run_dir(load_config(config))
    moved = run_dir.path.rename(config.parent / "moved")
    assert f"--set run.dir={moved}" in refusal(capsys, command, str(moved / "config.toml"))
    assert not run_dir.path.exists()


def test_a_hub_model_without_a_network_is_refused_in_seconds(config: Path):
    done = subprocess.run(
        [sys.executable, "-m", "async_rl", "launch", str(config), "--set", "model.path=nobody/no-such-model"],
        capture_output=True, text=True, timeout=60, cwd=ROOT,
        # A port of this machine where nobody listens: no name is looked up, no packet leaves.
        env={**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(config.parent / "hub")},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert "'nobody/no-such-model' is neither a directory nor a model that can be fetched" in done.stderr
    # On a busy machine lines before the error say what is waited for.
    assert [line for line in done.stderr.splitlines() if " so far)" not in line] == [done.stderr.splitlines()[-1]]
    assert not (config.parent / "run").exists()


NOWHERE = "no config file at nowhere.toml"
ADDRESS = "tcp://127.0.0.1:9"
"""Where nobody listens."""
COMMANDS = [
    ("slurn", "No such command 'slurn'. Did you mean 'slurm'?"),
    ("config x.toml --nonsense", "--nonsense"),
    *((f"{command} nowhere.toml", NOWHERE) for command in ("launch", "learner", "queue", "sft", "dpo", "doctor")),
    ("sweep nowhere.toml --over queue.max_staleness=0,1", NOWHERE),
    ("config broken.toml", "not valid TOML"),
    ("config .", "got the directory .; pass a file, such as config.toml if"),
    ("config run.toml queue", "got the key 'queue' without --explain"),
    ("launch run.toml --json", "--json: expected only with --dry-run"),
    ("sft run.toml --set sft.data=x.jsonl", "sft.out: expected a value, got none"),
    *((f"generator --connect {wrong}", "expected an address tcp://HOST:PORT, such as tcp://127.0.0.1:5555")
      for wrong in ("localhost:5555", "tcp://host", "tcp://host:99999", "udp://127.0.0.1:1")),
    (f"generator --connect {ADDRESS} --wait 0.2", f"no queue answered at {ADDRESS}"),
    (f"generator --connect {ADDRESS} --set generator.batch_siz=3", "did you mean generator.batch_size?"),
    ("status", "got neither"),
    ("init x.toml --from-verl run.sh --gpus 8", "--from-verl: expected no other option"),
    (f"status . --connect {ADDRESS}", "got both"),
    ("status .", "expected a run directory with a queue.json, but "),
    (f"status --connect {ADDRESS} --timeout 0.2", f"the queue at {ADDRESS} did not answer request 'status' within 0.2"),
    ("export nowhere out", "expected a checkpoint"),
    ("export step-000001 full", "expected"),
    ("compare nowhere", "expected a run directory (with config.toml and metrics.jsonl), got none"),
    ("eval owner/model", "expected --dataset FILE, or a config with data.eval"),
    ("eval owner/model --dataset a.jsonl --set evl.x=1", "is not a valid config"),
    ("doctor", "got neither"),
    (f"doctor run.toml --connect {ADDRESS}", "got both"),
    ("doctor run.toml --mean-tokens 9", "--mean-tokens: expected --on, too"),
    ("doctor run.toml --keys a.key", "--keys is only for --connect"),
    (f"doctor --connect {ADDRESS} --set queue.max_staleness=1", "queue.max_staleness"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "message"), COMMANDS, ids=[line for line, _ in COMMANDS])
def test_a_wrong_argument_of_a_command_is_refused(
    line: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    write_config(tmp_path / "run.toml", {"run": {"dir": "run"}, "model": {"path": "model"}})
    (tmp_path / "broken.toml").write_text("[run\n")
    for name in ("step-000001", "full"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    assert message in refusal(capsys, *line.split())
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("command", ["status", "report", "compare", "eval"])
@pytest.mark.parametrize("name", ["loop", "x" * 5000, "file/inside"])
def test_a_path_that_can_not_exist_is_one_message(
    command: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("")
    more = ["--dataset", f"rows={tmp_path / 'file'}"] if command == "eval" else []
    assert len(refusal(capsys, command, str(tmp_path / name), *more)) < 1000


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """What a command prints on standard output."""
    with pytest.raises(SystemExit) as leaving:
        cli.main(list(arguments))
    assert (leaving.value.code or 0) == code
    return capsys.readouterr().out


def printed_json(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    """The object that a command prints on standard output, where nothing else may be."""
    return json.loads(printed(capsys, *arguments, "--json", code=code))


def test_a_finished_run_is_left_alone_with_exit_code_0(config: Path, capsys: pytest.CaptureFixture[str]):
    prepare_run_dir(load_config(config)).mark_finished({"step": 3})
    said = " ".join(printed(capsys, "launch", str(config)).split())
    assert "is finished; raise learner.steps to train on, or pass --fresh to start over" in said


def test_a_dry_run_prints_every_command_and_why_launch_would_refuse_and_writes_nothing(
    config: Path, capsys: pytest.CaptureFixture[str]
):
    before = sorted(config.parent.rglob("*"))
    said = printed(capsys, "launch", str(config), "--dry-run", "--set", "generator.count=2")
    for words in ("# launch would start here", f"async_rl learner {config} --set generator.count=2", "generator-1"):
        assert words in said
    plan = printed_json(capsys, "launch", str(config), "--dry-run")
    assert [process["name"] for process in plan["processes"]] == ["queue", "learner-0", "generator-0"]
    assert plan["processes"][1]["argv"][1:] == ["-m", "async_rl", "learner", str(config)]
    assert (plan["run_dir"], plan["problem"]) == (str(config.parent / "run"), None)
    plan = printed_json(capsys, "launch", str(config), "--dry-run", "--set", "data.train=nowhere.jsonl", code=2)
    assert "no dataset at nowhere.jsonl" in plan["problem"]
    assert sorted(config.parent.rglob("*")) == before


def test_a_dry_run_names_all_that_fails_and_a_launch_the_first(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(capacity, "has_gpu", lambda: False)
    monkeypatch.setattr(capacity, "available_memory", lambda with_swap: 0)
    monkeypatch.setattr(capacity, "free_bytes", lambda path: 1000)
    with pytest.raises(SystemExit) as leaving:
        cli.main(["launch", str(config), "--dry-run"])
    output = capsys.readouterr()
    assert f"async_rl learner {config}" in output.out
    assert "would start here" not in output.out
    assert (leaving.value.code, [f"  {name}: " in output.err for name in ("run.dir", "memory")]) == (2, [True, True])
    said = refusal(capsys, "launch", str(config))
    assert [f"{name}: " in said for name in ("run.dir", "memory")] == [True, False]


PRINTING_REWARD = """
import os, subprocess

print("at the import")


def right(completions, solutions):
    print("at the call")
    os.write(1, b"past Python\\n")
    subprocess.run(["echo", "from a process"])
    return [1.0 for _ in completions]
"""


def test_what_own_code_prints_is_no_part_of_the_result_of_eval(
    tmp_path: Path, task: dict[str, str], capfd: pytest.CaptureFixture[str]
):
    own = tmp_path / "own.py"
    own.write_text(PRINTING_REWARD)
    generator = {"backend": "fake", "allow_code": [str(own)]}
    raw = tiny_config(tmp_path, task, reward={"type": f"{own}:right"}, generator=generator)
    config = str(write_config(tmp_path / "config.toml", raw))
    (found,) = printed_json(capfd, "eval", task["model"], "--config", config, "--dataset", task["held_out"])["results"]
    assert found["figures"]["accuracy"] == 1.0


def test_what_checks_of_launch_print_goes_to_standard_error(
    config: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(launch, "check_launch", lambda *_, **__: subprocess.run(["echo", "from a process"], check=True))
    launch.preflight(load_config(config), insecure=False)
    assert capfd.readouterr() == ("", "from a process\n")


def test_config_prints_the_config_and_explains_a_key_also_without_a_file(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    changes = ("queue.max_staleness=3", "queue.filter_range=[]", "run.name=a b")
    (config.parent / "again.toml").write_text(printed(capsys, "config", str(config), *settings(*changes)))
    assert load_config(config.parent / "again.toml") == load_config(config, changes)
    short, full = (printed(capsys, "config", str(config), *more).splitlines() for more in ((), ("--all",)))
    assert ("[run]" in short, "[critic]" in short, "[critic]" in full) == (True, False, True)
    assert short[-1].startswith("# --all adds the sections with only defaults: ")
    assert printed_json(capsys, "config", str(config), *settings(*changes))["queue"]["max_staleness"] == 3
    monkeypatch.chdir(config.parent)
    explained = ("config", "--explain", "queue.max_staleness", *settings(changes[0]))
    assert printed(capsys, *explained).startswith("queue.max_staleness = 3\n    Maximum number of versions")
    found = printed_json(capsys, *explained)
    assert (found["queue.max_staleness"]["value"], found["queue.max_staleness"]["default"]) == ("3", "4")


WITH_JSON = ("status", "compare", "plan", "doctor", "eval", "export", "sweep", "config", "launch")
WITHOUT_JSON = ("learner", "generator", "queue", "sft", "dpo", "init", "verifier")


@pytest.mark.parametrize("command", [*WITH_JSON, *WITHOUT_JSON])
def test_every_command_explains_itself_with_an_example_in_80_columns(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "80")
    assert f"\n  {command} " in printed(capsys, "--help")
    text = printed(capsys, command, "--help")
    assert max(map(len, text.splitlines())) <= 80
    assert "[[" not in text
    assert "Example" in text
    assert f"async-rl {command}" in text
    if command in WITH_JSON:  # scripts can ask for it, and for silence where progress is shown
        assert ("--json" in text, "--quiet" in text) == (True, command not in ("status", "config"))


@pytest.mark.parametrize(
    ("raised", "code"), [(ConfigError("x"), 2), (SystemExit(143), 143), (KeyboardInterrupt(), 130)]
)
def test_how_a_command_ends_is_its_exit_code(raised: BaseException, code: int, monkeypatch: pytest.MonkeyPatch):
    assert ended_by(raised, monkeypatch) == code


def ended_by(raised: BaseException, monkeypatch: pytest.MonkeyPatch) -> object:
    """The exit code of a command in which this is raised."""

    def fail(*_args: object) -> None:
        raise raised

    monkeypatch.setattr("async_rl.config.loading.load_config", fail)
    with pytest.raises(SystemExit) as leaving:
        cli.main(["config", "x.toml"])
    return leaving.value.code


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (OSError(errno.EMFILE, "Too many", "/run/x"), "expected a free file descriptor for /run/x, but all "),
        (zmq.ZMQError(errno.EMFILE), "expected a free file descriptor, but all "),
        (OSError(errno.ENFILE, "Too many"), "no file descriptor is left on this machine; raise fs.file-max"),
    ],
)
def test_a_lack_of_descriptors_is_one_message(
    raised: Exception, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert ended_by(raised, monkeypatch) == 1
    shown = capsys.readouterr().err
    assert shown.startswith(f"async-rl: {message}")
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    ("hard", "shown"),
    [(64, "expected a limit of at least 256 open files, got 64"), (256, ""), (resource.RLIM_INFINITY, "")],
)
def test_a_low_limit_on_open_files_is_named_at_the_start(hard: int, shown: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, hard))
    assert few_descriptors().startswith(shown)
    assert bool(few_descriptors()) == bool(shown)


def test_without_a_temporary_directory_a_command_says_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: ["/dev/null/none"])
    monkeypatch.setattr(cli, "app", lambda arguments: tempfile.gettempdir())
    assert "No usable temporary directory found in ['/dev/null/none']; set TMPDIR to one" in refusal(capsys, "launch")


@pytest.mark.parametrize("raised", [TrainingError("diverged"), BrokenPipeError("a bug in a role")])
def test_a_failure_that_is_not_the_users_keeps_its_traceback(raised: Exception):
    code = (
        "import async_rl.config.loading as c\nfrom async_rl.errors import TrainingError\n"
        "from async_rl.cli import main as cli\n"
        f"def fail(*_): raise {raised!r}\nc.load_config = fail\ncli.main(['queue', 'x.toml'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert str(raised) in done.stderr


@pytest.mark.parametrize("command", [[str(ROOT / "cli.py")], ["-m", "async_rl"]])
def test_a_python_without_the_dependencies_is_told_how_to_install_them(command: list[str]):
    done = subprocess.run([sys.executable, "-S", *command, "--help"], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (2, "")
    assert "expected its dependencies, got no typer, pydantic, torch" in done.stderr
    assert f"run `make install` in {ROOT}" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_runs_from_any_directory_without_being_installed(tmp_path: Path):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(ROOT / "cli.py"), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment)
    assert done.stdout.startswith("async-rl ")
