"""The command line: every kind of bad input is one message, exit code 2, no traceback, and nothing is written."""

import errno
import io
import json
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import zmq

from async_rl.cli import main as cli
from async_rl.config.config import Config
from async_rl.config.loading import load_config
from async_rl.errors import ConfigError, TrainingError
from async_rl.launch import launch
from async_rl.net.keys import ClientKeys, make_keys
from async_rl.process.descriptors import few_descriptors
from async_rl.queue.client.clients import GeneratorQueue, LearnerQueue
from async_rl.run.directory import RunDir
from async_rl.run.reuse import prepare_run_dir
from tests.queue.builders import make_config
from tests.queue.conftest import Servers, attach, wait_until
from tests.refusal import refusal

ROOT = Path(__file__).resolve().parents[2]
SHORT = "max_prompt_tokens = 128\nmax_new_tokens = 64"
COMMANDS = (
    "launch",
    "learner",
    "generator",
    "queue",
    "status",
    "config",
    "compare",
    "plan",
    "sweep",
    "eval",
    "export",
    "sft",
    "dpo",
)


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


@pytest.mark.parametrize("command", ["launch", "learner", "queue", "sft"])
def test_a_run_directory_that_was_moved_begins_no_new_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
):
    run_dir = prepare_run_dir(load_config(write_config(tmp_path)))
    moved = run_dir.path.rename(tmp_path / "moved")
    assert f"--set run.dir={moved}" in refusal(capsys, command, str(moved / "config.toml"))
    assert not run_dir.path.exists()


def test_bad_input_is_one_message_and_exit_code_2_in_a_real_process(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "async_rl", "config", str(tmp_path / "none.toml")],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"async-rl: no config file at {tmp_path / 'none.toml'}; check the path\n"


@pytest.mark.parametrize("command", ["launch", "learner", "queue", "config", "sft", "dpo"])
def test_a_missing_config_file_is_named(command: str, capsys: pytest.CaptureFixture[str]):
    assert "no config file at none.toml" in refusal(capsys, command, "none.toml")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("queue.max_stalenes=1", "queue.max_stalenes: unknown key"),
        ("learner.steps=many", "learner.steps: expected a whole number, got 'many'"),
        ("learner.steps=0", "learner.steps: expected at least 1, got 0"),
        ("learner.steps=1.5", "learner.steps: expected a whole number, got 1.5"),
        (
            "reward.type=best",
            "reward.type: expected boxed, think_answer_tags, exact, xml_format, code, model, judge, none, "
            "module:function or file.py:function, got 'best'",
        ),
        ("weights.sync_every=9", "weights.sync_every: expected at most queue.max_staleness + 1 = 5, got 9"),
        (
            "queue.address=localhost",
            "queue.address: expected an address tcp://HOST:PORT, such as tcp://127.0.0.1:5555, got 'localhost'",
        ),
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
    assert "expected an address tcp://HOST:PORT, such as tcp://127.0.0.1:5555" in refusal(
        capsys, command, "--connect", address
    )


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


@pytest.mark.parametrize("command", ["launch", "learner", "queue"])
@pytest.mark.parametrize("address", ["0.0.0.0", "*", "[::]"])
def test_all_interfaces_without_an_address_for_others_is_refused_by_every_role(
    command: str, address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = write_config(tmp_path, data=write_data(tmp_path), queue=f'address = "tcp://{address}:5555"')
    said = refusal(capsys, command, str(config), "--insecure")
    assert f"queue.address: tcp://{address}:5555 stands for all interfaces" in said
    assert re.search(r'set queue\.advertise = "tcp://\S+:5555"', said)
    said = refusal(capsys, command, str(config), "--insecure", "--set", "queue.advertise=tcp://127.0.0.1:5555")
    assert "got tcp://127.0.0.1:5555, which stands for loopback" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["launch", "learner"])
def test_ports_for_weights_that_are_taken_are_refused(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = write_config(tmp_path, data=write_data(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        said = refusal(capsys, command, str(config), "--set", f"weights.port={port}-{port + 1}")
    assert (
        f"weights.port: expected two free ports, one for each listener of the learner, but the ports {port} to" in said
    )
    assert not (tmp_path / "run").exists()


def test_launch_refuses_missing_data_bad_rows_and_a_missing_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = str(write_config(tmp_path))
    assert "data.train: expected a file or data set, but the key is unset" in refusal(capsys, "launch", config)
    missing = f"data.train={tmp_path / 'none.jsonl'}"
    assert "none.jsonl" in refusal(capsys, "launch", config, "--set", missing)
    (tmp_path / "bad.jsonl").write_text('{"messages": []}\n')
    assert "bad.jsonl:1" in refusal(capsys, "launch", config, "--set", f"data.train={tmp_path / 'bad.jsonl'}")
    config = str(write_config(tmp_path, data=write_data(tmp_path)))
    assert f"no directory {tmp_path / 'model'}" in refusal(capsys, "launch", config)
    assert not (tmp_path / "run").exists()


GOOD_ROW = '{"messages": [{"role": "user", "content": "1 + 1?"}], "gt_answer": "2"}\n'
BAD_FILES = {
    "malformed": (GOOD_ROW + '{"messages": [\n', "{path}:2: expected one JSON object per line"),
    "no_answer": (
        GOOD_ROW + "\n" + '{"messages": [{"role": "user", "content": "?"}]}\n',
        '{path}:3: expected a row with "messages" and "gt_answer", got no gt_answer',
    ),
    "empty": ("\n", "expected at least one row in {path}, got none"),
    "not_utf8": ('{"a": "\udcff"}\n', "{path}:1: expected UTF-8"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
@pytest.mark.parametrize("command", ["launch", "learner", "queue"])
def test_a_bad_dataset_is_refused_with_file_and_line(
    command: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    text, message = BAD_FILES[kind]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(text.encode(errors="surrogateescape"))
    config = write_config(tmp_path, data=f"train = {str(path)!r}")
    assert message.format(path=path) in refusal(capsys, command, str(config))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["launch", "learner", "queue"])
def test_a_missing_dataset_is_named_with_its_key(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = str(write_config(tmp_path))
    assert "data.train: expected a file or data set, but the key is unset" in refusal(capsys, command, config)
    config = str(write_config(tmp_path, data=f"{write_data(tmp_path)}\n[data.eval]\nheld_out = 'none.jsonl'"))
    said = refusal(capsys, command, config)
    assert "no dataset at none.jsonl" in said
    assert command == "queue" or "data.eval.held_out:" in said
    assert not (tmp_path / "run").exists()


def make_model(directory: Path, *, tokenizer: bool = True, template: bool = True) -> Path:
    from tests.generator.tiny_model import write_model

    write_model(directory)
    for path in directory.iterdir():
        if (not tokenizer and "tokenizer" in path.name) or (not (tokenizer and template) and "template" in path.name):
            path.unlink()
    return directory


@pytest.mark.parametrize("command", ["launch", "learner"])
def test_an_unfit_model_is_refused(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    bare = make_model(tmp_path / "bare", tokenizer=False)
    mute = make_model(tmp_path / "mute", template=False)
    config = str(write_config(tmp_path, data=write_data(tmp_path)))
    for path, message in (
        (tmp_path / "nowhere", "model.path: expected a model directory"),
        (bare, f"expected a tokenizer in {bare}"),
        (mute, f"the tokenizer in {mute} has no chat template"),
    ):
        assert message in refusal(capsys, command, config, "--set", f"model.path={path}")
    assert not (tmp_path / "run").exists()


def test_a_hub_model_without_a_network_is_refused_in_seconds(tmp_path: Path):
    config = write_config(tmp_path, data=write_data(tmp_path), model="path = 'nobody/no-such-model'")
    done = subprocess.run(
        [sys.executable, "-m", "async_rl", "launch", str(config)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        # A port of this machine where nobody listens: no name is looked up, no packet leaves.
        env={**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hub")},
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "'nobody/no-such-model' is neither a directory nor a model that can be fetched" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["launch", "learner", "queue"])
def test_a_run_directory_that_can_not_be_used_is_refused(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = str(write_config(tmp_path, data=write_data(tmp_path)))
    (tmp_path / "file").touch()
    for path, message in (
        (tmp_path / "file", "run.dir: expected a directory at"),
        (tmp_path / "file" / "deep", "is a file; choose another"),
        (Path("/proc/nowhere"), "run.dir: can't write to /proc/nowhere"),
    ):
        assert message in refusal(capsys, command, config, "--set", f"run.dir={path}")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").touch()
    said = refusal(capsys, command, config, "--set", f"run.dir={tmp_path / 'thesis'}")
    assert "which has no config.toml but holds" in said


def test_a_busy_port_is_refused_by_the_queue_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        address = f"tcp://127.0.0.1:{busy.getsockname()[1]}"
        config = write_config(tmp_path, data=write_data(tmp_path), queue=f'address = "{address}"')
        assert f"queue.address: can't bind {address}" in refusal(capsys, "queue", str(config))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["launch", "learner", "queue"])
def test_an_open_address_is_refused_by_every_role(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = write_config(tmp_path, data=write_data(tmp_path), queue='address = "tcp://0.0.0.0:0"')
    assert "pass --insecure on a network that you trust" in refusal(capsys, command, str(config))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["launch", "learner"])
def test_an_unknown_host_is_refused_at_once(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = write_config(tmp_path, data=write_data(tmp_path), queue='address = "tcp://nosuch.invalid:5555"')
    said = refusal(capsys, command, str(config), "--insecure")
    assert "queue.address" in said
    assert "nosuch.invalid" in said


@pytest.mark.parametrize("command", ["launch", "learner"])
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("learner.devices=[0]", "learner.devices: expected CUDA devices [0], but torch finds none here"),
        ("weights.transport=nccl", 'weights.transport: "nccl" needs CUDA devices'),
    ],
)
def test_devices_that_are_not_there_are_refused(
    command: str,
    override: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = write_config(tmp_path, data=write_data(tmp_path))
    assert message in refusal(capsys, command, str(config), "--set", override)
    assert not (tmp_path / "run").exists()


def test_a_fake_vocabulary_beyond_the_models_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    make_model(tmp_path / "model")
    sections = {"generator": 'backend = "fake"', "experimental": "fake.vocab_size = 999"}
    config = write_config(tmp_path, data=write_data(tmp_path), **sections)
    said = refusal(capsys, "launch", str(config))
    assert "experimental.fake.vocab_size: expected at most 46, the model's vocab_size, got 999" in said


@pytest.mark.parametrize("command", ["launch", "learner"])
def test_wandb_without_a_key_is_refused_not_asked_for(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    config = write_config(tmp_path, data=write_data(tmp_path), log='to = ["wandb"]')
    assert "there is no API key for api.wandb.ai" in refusal(capsys, command, str(config))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("learner.steps=3", "a generator takes only generator.* keys"),
        ("generator.batch_siz=3", "generator.batch_siz: unknown key; did you mean generator.batch_size?"),
        ("generator.batch_size=none", "generator.batch_size: expected a whole number"),
        ("generator.batch_size=0", "generator.batch_size: expected at least 1, got 0"),
        ("generator", "expected --set section.key=value, got 'generator'"),
    ],
)
def test_a_generators_settings_are_checked_before_it_waits_for_a_queue(
    override: str, message: str, capsys: pytest.CaptureFixture[str]
):
    said = refusal(capsys, "generator", "--connect", "tcp://127.0.0.1:9", "--set", override)
    assert message in said


def test_a_generator_gives_up_on_a_queue_that_is_not_there(capsys: pytest.CaptureFixture[str]):
    said = refusal(capsys, "generator", "--connect", "tcp://127.0.0.1:9", "--wait", "0.2")
    assert "no queue answered at tcp://127.0.0.1:9" in said


def test_status_of_nobody_says_where_the_address_is_to_be_found(capsys: pytest.CaptureFixture[str]):
    said = refusal(capsys, "status", "--connect", "tcp://127.0.0.1:9", "--timeout", "0.2")
    assert "the queue at tcp://127.0.0.1:9 did not answer request 'status' within 0.2 s" in said
    assert "queue.json" in said


def test_status_wants_a_run_directory_or_an_address(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert "got neither" in refusal(capsys, "status")
    assert "got both" in refusal(capsys, "status", str(tmp_path), "--connect", "tcp://127.0.0.1:9")
    assert f"expected a run directory with a queue.json, but {tmp_path} has none" in refusal(
        capsys, "status", str(tmp_path)
    )


@pytest.mark.parametrize("command", ["status", "report", "compare", "eval"])
@pytest.mark.parametrize("name", ["loop", "x" * 5000, "file/inside"])
def test_a_path_that_can_not_exist_is_one_message(
    command: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("")
    more = ["--dataset", f"rows={tmp_path / 'file'}"] if command == "eval" else []
    assert len(refusal(capsys, command, str(tmp_path / name), *more)) < 1000


def test_a_character_that_no_path_has_is_refused_with_its_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = write_config(tmp_path)
    for key in ("data.tools", "run.dir"):
        assert f"{key}: expected text without" in refusal(capsys, "config", str(config), "--set", f'{key}="\\u0000"')


def test_status_of_a_run_directory_asks_the_queue_server_that_it_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run_dir, servers = tmp_path / "run", Servers(tmp_path)
    try:
        server = servers.start(make_config(str(run_dir)), "--run-id", "run")
        attach(servers.learner(server.address), num_steps=7)
        status_of(run_dir, "--json")
        status = json.loads(capsys.readouterr().out)
        assert (status["run_id"], status["num_steps"], status["address"]) == ("run", 7, server.address)
        RunDir(run_dir).metrics.write_text('{"step": 5}\n')
    finally:
        servers.close()
    said = refusal(capsys, "status", str(run_dir), "--timeout", "0.2")
    assert f"at {server.address}, did not answer within 0.2 s: it has ended" in said
    assert "The run has made 5 steps, and its newest checkpoint is none; read the logs" in said


def test_status_says_at_once_that_a_run_of_this_machine_has_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    run_dir = RunDir(tmp_path)
    run_dir.metrics.write_text('{"step": 12}\n')
    (tmp_path / "queue.json").write_text(json.dumps({"run_id": "r", "pid": ended.pid, "address": "tcp://127.0.0.1:1"}))
    # A process of another machine may live, so the queue server is asked; it does not answer.
    run_dir.lock.write_text('{"pid": 1, "host": "elsewhere", "role": "launch"}\n')
    assert "did not answer within 0.1 s" in refusal(capsys, "status", str(tmp_path), "--timeout", "0.1")
    run_dir.lock.write_text(json.dumps({"pid": ended.pid, "host": socket.gethostname(), "role": "launch"}) + "\n")
    said = refusal(capsys, "status", str(tmp_path), "--timeout", "100")
    assert f"the run in {tmp_path} has stopped, and none of its processes is alive. The run has made 12 steps" in said
    # The learner inherited the lock, and lives.
    with run_dir.lock.open("a") as file:
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "role": "learner"}) + "\n")
    assert "did not answer within 0.1 s" in refusal(capsys, "status", str(tmp_path), "--timeout", "0.1")


FINISHED_GROUPS = {
    "issued": 12, "in_flight": 0, "queued": 0, "taken": 0, "trained": 12, "filtered": 0, "dropped": {"stale": 0}
}  # fmt: skip


def test_status_says_by_its_exit_code_whether_a_process_is_alive(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run_dir, servers = tmp_path / "run", Servers(tmp_path)

    def check(name: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as leaving:
            cli.main(["status", str(run_dir), "--alive", name])
        printed = capsys.readouterr()
        return int(str(leaving.value.code or 0)), printed.out + printed.err

    try:
        server = servers.start(make_config(str(run_dir)), "--run-id", "run")
        assert check("queue") == (0, "queue: alive\n")
        code, said = check("learner")
        assert (code, "none has connected yet" in said) == (1, True)
        learner = servers.learner(server.address)
        attach(learner)
        assert check("learner") == (0, "learner: alive\n")
        code, said = check("g0")
        assert (code, "generator g0 has not connected. The queue server knows 0: none" in said) == (1, True)
        generator = servers.generator(server.address)
        generator.hello(5.0, "fake", "here")
        assert check("g0") == (0, "g0: alive\n")
        generator.leave()
        wait_until(lambda: check("g0")[0] == 1, "the generator's end")
        learner.close()
        wait_until(lambda: "the learner is not alive: it has ended" in check("learner")[1], "the learner's end")
    finally:
        servers.close()
    assert "did not answer within 0.2 s" in refusal(
        capsys, "status", str(run_dir), "--alive", "queue", "--timeout", "0.2"
    )


def test_a_quarantine_is_shown_and_lifted_by_who_has_the_learners_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    make_keys(tmp_path / "keys", ["node"])
    learners, nodes = (str(tmp_path / "keys" / f"{name}.key") for name in ("client", "node"))
    run_dir, keys = tmp_path / "run", ClientKeys.load(learners)
    with (
        closing(Servers(tmp_path)) as servers,
        ExitStack() as clients,
    ):
        server = servers.start(make_config(str(run_dir), queue={"keys": str(tmp_path / "keys")}), "--run-id", "run")
        learner = clients.enter_context(closing(LearnerQueue(server.address, 30.0, keys)))
        generator = clients.enter_context(closing(GeneratorQueue(server.address, "g0", keys)))
        attach(learner)
        generator.hello(5.0, "fake", "here")
        learner.quarantine("line-a", "g0", "audit of rewards: 8 of 8 answers")
        status_of(run_dir, "--keys", nodes)
        shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
        assert "g0 quarantined: audit of rewards: 8 of 8 answers" in shown
        assert "note generator 'g0' was quarantined after step 0, it gets no more leases: audit of rewards" in shown

        def refused(generator_id: str, key: str) -> str:
            lift = ("--keys", key, "--lift-quarantine", generator_id)
            return refusal(capsys, "status", "--connect", server.address, *lift)

        assert "--lift-quarantine: expected 'quarantine' to be sent with the learner's key" in refused("g0", nodes)
        assert "expected the id of a quarantined generator, got 'g1'" in refused("g1", learners)
        status_of(run_dir, "--keys", learners, "--lift-quarantine", "g0", "--json")
        status = json.loads(capsys.readouterr().out)
        assert [one["quarantined"] for one in status["generators"]] == [""]
        assert status["group_notes"] == {}


def test_without_a_temporary_directory_a_command_says_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: ["/dev/null/none"])
    monkeypatch.setattr(cli, "app", lambda arguments: tempfile.gettempdir())
    said = refusal(capsys, "launch")
    assert "got none: No usable temporary directory found in ['/dev/null/none']; set TMPDIR to one" in said
    monkeypatch.setattr(cli, "app", lambda arguments: Path("/dev/null-or-not").read_text())
    with pytest.raises(FileNotFoundError, match="null-or-not"):
        cli.main(["launch"])


def test_status_of_a_finished_run_is_read_from_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    RunDir(tmp_path).mark_finished({"step": 3})
    RunDir(tmp_path).ledger.write_text(json.dumps({"run_id": "r1", "step": 3, "version": 3, "groups": FINISHED_GROUPS}))
    status_of(tmp_path, "--json")
    ledger = {"groups": FINISHED_GROUPS}
    assert json.loads(capsys.readouterr().out) == {
        "run_id": "r1", "step": 3, "version": 3, "finished": True, "ledger": ledger
    }  # fmt: skip
    status_of(tmp_path)
    printed = capsys.readouterr().out
    assert all(words in printed for words in ("finished", "yes", "trained", "12"))


def test_status_of_a_finished_run_has_the_notes_on_its_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    RunDir(tmp_path).mark_finished({"step": 3})
    note = "step 3: the gradient explodes: gradient norm 1 -> 300 within one step"
    RunDir(tmp_path).ledger.write_text(json.dumps({"step": 3, "training_notes": [note], "groups": FINISHED_GROUPS}))
    status_of(tmp_path)
    printed = capsys.readouterr().out
    assert "note" in printed
    assert "the gradient explodes" in printed


def status_of(run_dir: Path, *options: str) -> None:
    with pytest.raises(SystemExit) as leaving:
        cli.main(["status", str(run_dir), *options])
    assert not leaving.value.code


def test_export_refuses_what_is_no_checkpoint_and_what_is_not_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out"
    assert "expected a checkpoint" in refusal(capsys, "export", str(tmp_path / "none"), str(out))
    assert not out.exists()
    out.mkdir()
    (out / "file").touch()
    (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
    said = refusal(capsys, "export", str(tmp_path / "checkpoints" / "step-000001"), str(out))
    assert "expected" in said
    assert [p.name for p in out.iterdir()] == ["file"]


def test_sft_names_the_keys_that_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = str(write_config(tmp_path))
    assert "sft.data: expected a value, got none" in refusal(capsys, "sft", config)
    assert "sft.out: expected a value, got none" in refusal(capsys, "sft", config, "--set", "sft.data=x.jsonl")
    assert not (tmp_path / "run").exists()


def test_launch_refuses_a_changed_config_with_the_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from async_rl.run.reuse import prepare_run_dir

    config = write_config(tmp_path)
    prepare_run_dir(load_config(config)).trained.write_text('{"step": 1}\n')
    assert "loss.clip_high: 0.28 -> 0.1" in refusal(capsys, "launch", str(config), "--set", "loss.clip_high=0.1")


def test_a_finished_run_is_left_alone_with_exit_code_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from async_rl.run.reuse import prepare_run_dir

    config = write_config(tmp_path)
    prepare_run_dir(load_config(config)).mark_finished({"step": 3})
    with pytest.raises(SystemExit) as leaving:
        cli.main(["launch", str(config)])
    assert not leaving.value.code
    said = " ".join(capsys.readouterr().out.split())
    assert "is finished; raise learner.steps to train on, or pass --fresh to start over" in said


def test_a_dry_run_prints_every_command_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    make_model(tmp_path / "model")
    config = write_config(tmp_path, data=write_data(tmp_path), sampling=SHORT)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as leaving:
        cli.main(["launch", str(config), "--dry-run", "--set", "generator.count=2"])
    assert not leaving.value.code
    printed = capsys.readouterr().out
    assert "# launch would start here" in printed
    for role in (f"async_rl queue {config}", f"async_rl learner {config} --set generator.count=2", "generator-1"):
        assert role in printed
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("command", ["launch", "learner"])
def test_steps_to_profile_are_an_option(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = write_config(tmp_path, data=write_data(tmp_path))
    found = refusal(capsys, command, str(config), "--profile", "5-3")
    assert "log.profile: expected a step such as 3, or steps such as 3-5, got '5-3'" in found


def test_a_dry_run_that_launch_would_refuse_exits_2_after_the_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = write_config(tmp_path)
    with pytest.raises(SystemExit) as leaving:
        cli.main(["launch", str(config), "--dry-run", "--set", "data.train=nowhere.jsonl"])
    assert leaving.value.code == 2
    output = capsys.readouterr()
    assert f"async_rl learner {config}" in output.out
    assert "would start here" not in output.out
    assert "no dataset at nowhere.jsonl" in output.err


def printed_json(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    """The object that a command prints on standard output, where nothing else may be."""
    with pytest.raises(SystemExit) as leaving:
        cli.main([*arguments, "--json"])
    assert (leaving.value.code or 0) == code
    return json.loads(capsys.readouterr().out)


def test_a_dry_run_as_json_has_every_process_and_why_launch_would_refuse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    make_model(tmp_path / "model")
    config = str(write_config(tmp_path, data=write_data(tmp_path), sampling=SHORT))
    plan = printed_json(capsys, "launch", config, "--dry-run")
    assert [process["name"] for process in plan["processes"]] == ["queue", "learner-0", "generator-0"]
    assert plan["processes"][1]["argv"][1:] == ["-m", "async_rl", "learner", config]
    assert (plan["run_dir"], plan["finished"], plan["problem"]) == (str(tmp_path / "run"), False, None)
    plan = printed_json(capsys, "launch", config, "--dry-run", "--set", "data.train=nowhere.jsonl", code=2)
    assert "no dataset at nowhere.jsonl" in plan["problem"]
    assert "--json: expected only with --dry-run" in refusal(capsys, "launch", config, "--json")


PRINTING_REWARD = """
import os, subprocess

print("at the import")


def right(completions, solutions):
    print("at the call")
    os.write(1, b"past Python\\n")
    subprocess.run(["echo", "from a process"])
    return [1.0 for _ in completions]
"""


def test_what_own_code_prints_is_no_part_of_the_result_of_eval(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    make_model(tmp_path / "model")
    (tmp_path / "own.py").write_text(PRINTING_REWARD)
    code = f"backend = 'fake'\nallow_code = ['{tmp_path}/own.py']"
    data, reward = write_data(tmp_path), f"type = '{tmp_path}/own.py:right'"
    config = str(write_config(tmp_path, data=data, sampling=SHORT, reward=reward, generator=code))
    rows = ["--dataset", str(tmp_path / "train.jsonl")]
    (found,) = printed_json(capfd, "eval", str(tmp_path / "model"), "--config", config, *rows)["results"]
    assert found["figures"]["accuracy"] == 1.0


def test_what_own_code_prints_in_the_checks_of_launch_goes_to_standard_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def check(config: Config, *, insecure: bool) -> None:
        print("at the import")
        subprocess.run(["echo", "from a process"], check=True)

    monkeypatch.setattr(launch, "check_launch", check)
    launch.preflight(load_config(write_config(tmp_path)), insecure=False)
    print("the result")
    printed = capfd.readouterr()
    assert printed.out == "the result\n"
    assert sorted(printed.err.splitlines()) == ["at the import", "from a process"]


def test_config_as_json_has_the_values_or_their_explanations(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = str(write_config(tmp_path))
    values = printed_json(capsys, "config", config, "--set", "queue.max_staleness=2")
    assert (values["queue"]["max_staleness"], values["queue"]["address"]) == (2, None)
    found = printed_json(capsys, "config", config, "--explain", "queue.max_staleness")
    assert list(found) == ["queue.max_staleness"]
    assert found["queue.max_staleness"]["value"] == found["queue.max_staleness"]["default"] == "4"


def test_a_damaged_ledger_of_a_finished_run_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "finished.json").write_text("{}")
    (tmp_path / "ledger.json").write_text('{"groups": ')
    assert f"expected a JSON object in {tmp_path}/ledger.json" in refusal(capsys, "status", str(tmp_path))


@pytest.mark.parametrize(
    "command", ["status", "compare", "plan", "doctor", "eval", "export", "sweep", "config", "launch"]
)
def test_scripts_can_ask_for_json_and_silence(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    text = capsys.readouterr().out
    assert "--json" in text
    assert ("--quiet" in text) == (command not in ("status", "config"))  # these two show no progress


@pytest.mark.parametrize("command", [*COMMANDS, "init", "doctor", "verifier"])
def test_every_command_explains_itself_with_an_example_in_80_columns(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as leaving:
        cli.main([command, "--help"])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "[[" not in text
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


def test_config_explains_a_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = str(write_config(tmp_path))
    with pytest.raises(SystemExit):
        cli.main(["config", config, "--explain", "queue.max_staleness", "--set", "queue.max_staleness=2"])
    assert capsys.readouterr().out.startswith("queue.max_staleness = 2\n    Maximum number of versions")
    assert "got the key 'queue' without --explain" in refusal(capsys, "config", config, "queue")


def test_config_explains_a_key_without_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    found = printed_json(capsys, "config", "--explain", "queue.max_staleness", "--set", "queue.max_staleness=2")
    assert (found["queue.max_staleness"]["value"], found["queue.max_staleness"]["default"]) == ("2", "4")
    assert "got 'queue.max_stale'; did you mean queue.max_staleness?" in refusal(
        capsys, "config", "--explain", "queue.max_stale"
    )
    assert "no config file at run.toml" in refusal(capsys, "config", "--explain", "run.toml")


def test_the_directory_of_a_run_is_no_config_but_has_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    said = refusal(capsys, "config", str(tmp_path))
    assert f"got the directory {tmp_path}; pass a file, such as {tmp_path / 'config.toml'} if" in said


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

    monkeypatch.setattr("async_rl.config.loading.load_config", fail)
    with pytest.raises(SystemExit) as leaving:
        cli.main(["config", "x.toml"])
    assert leaving.value.code == code


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (
            OSError(errno.EMFILE, "Too many open files", "/run/x"),
            "expected a free file descriptor for /run/x, but all ",
        ),
        (zmq.ZMQError(errno.EMFILE), "expected a free file descriptor, but all "),
        (OSError(errno.ENFILE, "Too many open files"), "no file descriptor is left on this machine; raise fs.file-max"),
    ],
)
def test_a_lack_of_descriptors_is_one_message(
    raised: Exception, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(*_args: object) -> None:
        raise raised

    monkeypatch.setattr("async_rl.config.loading.load_config", fail)
    with pytest.raises(SystemExit) as leaving:
        cli.main(["config", "x.toml"])
    assert leaving.value.code == 1
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


@pytest.mark.parametrize("raised", [TrainingError("diverged"), BrokenPipeError("a bug in a role")])
def test_a_failure_that_is_not_the_users_keeps_its_traceback(raised: Exception, tmp_path: Path):
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
    done = subprocess.run(
        [sys.executable, str(ROOT / "cli.py"), "--version"], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.stdout.startswith("async-rl ")


def test_status_says_what_agents_did_on_all_generators():
    from rich.console import Console

    from async_rl.launch.status import status_tables

    counters = {"agent/sessions": 10, "agent/first": 10, "agent/continued": 15, "agent/branched": 0,
                "agent/rewritten": 5, "agent/lost": 1, "agent/tool_calls": 7, "agent/sampling_s": 30, "agent/own_s": 10,
                "judge_requests": 3}  # fmt: skip
    generators = [
        {"id": "g", "stats": {"num_tokens": 0, "counters": counters}},
        {"id": "h", "stats": {"num_tokens": 0, "counters": counters}},
        {"id": "i"},
    ]
    console = Console(width=200, record=True, file=io.StringIO())
    for table in status_tables({"generators": generators}):
        console.print(table)
    assert (
        "20 sessions with 60 answers; after the first 75% continued, 25% rewritten; 2 lost; 14 tool calls; 25% of "
        "their time by themselves"
    ) in console.export_text()
    assert status_tables({"generators": generators[2:]})[0].row_count == 0


def test_status_tables_show_what_is_not_zero_and_count_leases():
    from rich.console import Console

    from async_rl.launch.status import status_tables

    groups = {"issued": 7, "queued": 0, "dropped": {"stale": 2, "expired": 0}}
    tokens = {"received": 4000, "queued": 0, "trained": 1400, "dropped": {"stale": 900}}
    outcomes = {
        "received": {"groups": 7, "rollouts": 8, "tokens": 4000, "reward": 2.0, "accuracy": 6.0},
        "trained": {"groups": 2, "rollouts": 4, "tokens": 2000, "reward": 2.0, "accuracy": 2.0},
        "dropped": {"groups": 2, "rollouts": 2, "tokens": 900, "reward": 1.0, "accuracy": 1.0},
    }
    # 6 of 10 s times 2 slots busy; 50 tokens in 10 s.
    stats = {"max_running": 2, "wall_s": 10.0, "busy_sequence_s": 12.0, "num_tokens": 50}
    status = {
        "step": 3,
        "lineage": "l1",
        "num_steps": 8,
        "finished": False,
        "stop": "",
        "bytes": 0,
        "bytes_reserved": 1536,
        "max_bytes": 1 << 31,
        "announced": {"version": 2, "channel": "tcp://127.0.0.1:7 public-key", "digest": "ab", "ports": [7, 8]},
        "stream": {"position": 9, "epoch": 0},
        "leases": [{}, {}],
        "malformed": 0,
        "limited": 3,
        "learner_trouble": "pulls are slow",
        "who_waits": "generators have 40% to spare",
        "run_ahead": {"queue/run_ahead_limit": 26, "time/group_s": 1.5},
        "group_notes": {"wrong": "all 8 groups have only wrong answers"},
        "ledger": {
            "groups": groups,
            "rollouts": {"trained": 3, "masked": {"truncated": 1}, "dropped": {"stale": 2}},
            "tokens": tokens,
            "eval": {"groups": {"issued": 0}},
            "outcomes": outcomes,
        },
        "generators": [
            {"id": "a", "host": "h", "alive": True, "active": ["l", 2], "seen_s_ago": 0.26, "stats": stats},
            {"id": "b", "host": "h", "alive": False, "active": None, "seen_s_ago": 1.0, "stats": {}, "trouble": "old"},
            {"id": "c", "host": "h", "alive": True, "seen_s_ago": 1.0, "stats": {}, "trouble": "open port 8"},
            {"id": "d", "host": "h", "alive": True, "seen_s_ago": 1.0, "stats": {}, "quarantined": "9 of 9 refused"},
            {"id": "e", "host": "h", "alive": True, "seen_s_ago": 1.0, "stats": {}, "too_slow": "too slow for it"},
        ],
        "waits": [{"who": "learner", "for": "take", "since_s": 0.5}],
    }
    console = Console(width=100, record=True, file=io.StringIO())
    for table in status_tables(status):
        console.print(table)
    lines = [" ".join(line.replace("│", " ").split()) for line in console.export_text().splitlines()]
    for shown in (
        "step 3 of 8",
        "problem of the learner pulls are slow",
        "who waits for whom generators have 40% to spare",
        "taken, in flight and ready at most 26 groups (queue.run_ahead)",
        "finished no",
        "memory 0 B of groups, 1.5 KiB reserved by leases, limit 2 GiB",
        "weights version 2 from tcp://127.0.0.1:7",
        "ports for weights 7, 8",
        "c open port 8",
        "d quarantined: 9 of 9 refused",
        "e too slow for it",
        "next prompt number 9 of the data, epoch 0",
        "leases 2",
        "note all 8 groups have only wrong answers",
        "messages above the rate limit 3",
        "issued 7 4,000",
        "dropped: stale 2 2 900",
        "received 7 8 4,000 0.250 0.750",
        "masked: truncated 1",
        "trained 2 4 2,000 0.500 0.500",
        "of it masked 1 600",
        "lineage (learner start) l1",
        "a h 2 60% of 2 50 5 0.3 s ago",
        "b h - - - - gone, 1.0 s ago",
        "learner groups 0.5",
    ):
        assert shown in lines, (shown, lines)
    unshown = ("why the run stops", "malformed", "queued", "dropped: expired", "ledger of evaluations", "run ahead")
    assert [line for line in lines if line.startswith(unshown)] == []


def test_status_loses_no_figure_of_a_generator_with_a_long_id_on_a_narrow_screen():
    from rich.console import Console

    from async_rl.launch.status import status_tables

    host = "ip-10-0-12-1.eu-west-1.compute.internal"
    stats = {"wall_s": 10.0, "max_running": 64, "busy_sequence_s": 320.0, "num_tokens": 1234567}
    generator = {"id": f"{host}-12345-abcd", "host": host, "active": ["l", 12], "seen_s_ago": 1.0, "stats": stats}
    console = Console(width=80, record=True, file=io.StringIO())
    for table in status_tables({"generators": [generator]}):
        console.print(table)
    text = console.export_text()
    assert [figure for figure in ("12", "50% of 64", "1,234,567", "123,457", "1.0 s ago") if figure not in text] == []
    cells = [line.split("│")[1].strip() for line in text.splitlines() if line.count("│") == 7]
    assert "".join(cells) == generator["id"]


def test_status_says_that_no_generator_is_connected():
    from rich.console import Console

    from async_rl.launch.status import status_tables

    gone, doctor = {"id": "a", "alive": False}, {"id": "doctor-b", "alive": True, "backend": "doctor"}
    for generators, finished, said in (
        ([], False, True),
        ([gone, doctor], False, True),
        ([gone, {"id": "c", "alive": True, "backend": "hf"}], False, False),
        ([], True, False),
    ):
        console = Console(width=100, record=True, file=io.StringIO())
        for table in status_tables({"step": 0, "finished": finished, "generators": generators}):
            console.print(table)
        assert ("no generator is connected" in console.export_text()) == said, generators


def test_an_evaluation_says_what_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert "expected --dataset FILE, or a config with data.eval" in refusal(capsys, "eval", "owner/model")
    assert "got neither" in refusal(capsys, "eval", "--compare", str(tmp_path))
    found = refusal(capsys, "eval", "--compare", str(tmp_path), "--samples", "2")
    assert "async-rl eval --compare: expected only directories" in found
    found = refusal(capsys, "eval", "owner/model", "--dataset", "a.jsonl", "--set", "evl.x=1")
    assert "the config with this command line is not a valid config" in found


def test_evaluations_of_a_run_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    row = {"step": 3, "eval/math/accuracy": 0.5, "eval/math/rows": 8}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(SystemExit) as leaving:
        cli.main(["eval", "--compare", str(tmp_path)])
    assert leaving.value.code == 0
    assert capsys.readouterr().out.split() == ["math:", "8", "rows", "step", "accuracy", "3", "0.500"]
    found = printed_json(capsys, "eval", "--compare", str(tmp_path))
    assert found == {"math": [{"of": str(tmp_path), "step": 3, "figures": {"accuracy": 0.5, "rows": 8}}]}


def test_the_doctor_takes_a_config_or_an_address(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    config = tmp_path / "run.toml"
    config.write_text("")
    address = "tcp://127.0.0.1:5555"
    assert "got neither" in refusal(capsys, "doctor")
    assert "got both" in refusal(capsys, "doctor", str(config), "--connect", address)
    assert "--keys is only for --connect" in refusal(capsys, "doctor", str(config), "--keys", "a.key")
    assert "queue.max_staleness" in refusal(capsys, "doctor", "--connect", address, "--set", "queue.max_staleness=1")


def test_a_status_of_many_generators_fits_a_screen_and_shows_who_is_in_trouble(capsys: pytest.CaptureFixture[str]):
    from async_rl.launch.status import print_status

    # 200 sequences of 2 fit each for 10 s, and were busy for 15 of these 20 sequence-seconds.
    stats = {"wall_s": 10.0, "max_running": 2, "busy_sequence_s": 15.0, "num_tokens": 100}
    generators = [
        {"id": f"g{number}", "alive": True, "active": ["line", 7 + number % 2], "seen_s_ago": 0.5, "stats": stats}
        for number in range(200)
    ]
    generators[150]["alive"] = False
    for number in (160, 170, 180, 190, 195, 199):
        generators[number]["trouble"] = "nothing listens"
    waits = [{"who": f"g{number}", "for": "lease", "since_s": number / 10} for number in range(199)]
    waits.append({"who": "learner", "for": "take", "since_s": 5.0})
    print_status({"generators": generators, "waits": waits})
    lines = [" ".join(line.replace("│", " ").split()) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) < 50
    assert "generators: 200" in lines
    assert "g150 7 75% of 2 100 10 gone, 0.5 s ago" in lines
    assert [line.split()[0] for line in lines if "0.5 s ago" in line] == [
        *(f"g{number}" for number in range(17)), "g150", "g160", "g170", "g180", "g190", "g195", "g199"
    ]  # fmt: skip
    assert "and 176 others, versions 7 to 8, 75% busy, 17,600 tokens; --json shows each" in " ".join(lines)
    assert "g160, g170, g180, g190 and 2 others nothing listens" in lines
    assert "g198, g197, g196, g195 and 195 others a lease 0.0 to 19.8" in lines
    assert "learner groups 5.0" in lines
