"""``async-rl status``: of a run that goes on, has stopped or has finished, and what its tables show."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from async_rl.cli import main as cli
from async_rl.launch.status import print_status, status_tables, why_not_alive
from async_rl.net.keys import ClientKeys, make_keys
from async_rl.queue.client.clients import GeneratorQueue, LearnerQueue
from async_rl.run.directory import RunDir
from tests.queue.builders import make_config
from tests.queue.conftest import Servers, attach, wait_until
from tests.refusal import refusal

FINISHED_GROUPS = {
    "issued": 12, "in_flight": 0, "queued": 0, "taken": 0, "trained": 12, "filtered": 0, "dropped": {"stale": 0}
}  # fmt: skip


def status_of(run_dir: Path, *options: str) -> None:
    with pytest.raises(SystemExit) as leaving:
        cli.main(["status", str(run_dir), *options])
    assert not leaving.value.code


def test_the_queue_server_is_asked_and_the_exit_code_says_whether_a_process_is_alive(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run_dir = tmp_path / "run"

    def check(name: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as leaving:
            cli.main(["status", str(run_dir), "--alive", name])
        printed = capsys.readouterr()
        return int(str(leaving.value.code or 0)), printed.out + printed.err

    with closing(Servers(tmp_path)) as servers:
        server = servers.start(make_config(str(run_dir)), "--run-id", "run")
        assert check("queue") == (0, "queue: alive\n")
        code, said = check("learner")
        assert (code, "none has connected yet" in said) == (1, True)
        learner = servers.learner(server.address)
        attach(learner, num_steps=7)
        assert check("learner") == (0, "learner: alive\n")
        status_of(run_dir, "--json")
        status = json.loads(capsys.readouterr().out)
        assert (status["run_id"], status["num_steps"], status["address"]) == ("run", 7, server.address)
        code, said = check("g0")
        assert (code, "generator g0 has not connected. The queue server knows 0: none" in said) == (1, True)
        generator = servers.generator(server.address)
        generator.hello(5.0, "fake", "here")
        assert check("g0") == (0, "g0: alive\n")
        generator.leave()
        wait_until("the generator's end", lambda: check("g0")[0] == 1)
        learner.close()
        wait_until("the learner's end", lambda: "the learner is not alive: it has ended" in check("learner")[1])
    silent = {"generators": [{"id": "g0", "alive": False, "seen_s_ago": 40.0}]}
    assert "generator g0 is not alive: it has sent nothing for 40 s" in why_not_alive(silent, "g0")
    RunDir(run_dir).metrics.write_text('{"step": 5}\n')
    said = refusal(capsys, "status", str(run_dir), "--alive", "queue", "--timeout", "0.2")
    assert f"at {server.address}, did not answer within 0.2 s: it has ended" in said
    assert "The run has made 5 steps, and its newest checkpoint is none; read the logs" in said


def test_a_run_of_this_machine_that_has_stopped_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
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


def test_a_quarantine_is_shown_and_lifted_by_who_has_the_learners_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    make_keys(tmp_path / "keys", ["node"])
    learners, nodes = (str(tmp_path / "keys" / f"{name}.key") for name in ("client", "node"))
    run_dir, keys = tmp_path / "run", ClientKeys.load(learners)
    with closing(Servers(tmp_path)) as servers, ExitStack() as clients:
        server = servers.start(make_config(str(run_dir), queue={"keys": str(tmp_path / "keys")}), "--run-id", "run")
        learner = clients.enter_context(closing(LearnerQueue(server.address, 30.0, keys)))
        generator = clients.enter_context(closing(GeneratorQueue(server.address, "g0", keys)))
        attach(learner)
        generator.hello(5.0, "fake", "here")
        learner.quarantine("line-a", "g0", "far from the learner")
        status_of(run_dir, "--keys", nodes)
        shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
        assert "g0 quarantined: far from the learner" in shown
        assert "note generator 'g0' was quarantined after step 0, it gets no more leases: far" in shown
        for generator_id, key, message in (
            ("g0", nodes, "--lift-quarantine: expected 'quarantine' to be sent with the learner's key"),
            ("g1", learners, "expected the id of a quarantined generator, got 'g1'"),
        ):
            lift = ("--keys", key, "--lift-quarantine", generator_id)
            assert message in refusal(capsys, "status", "--connect", server.address, *lift)
        status_of(run_dir, "--keys", learners, "--lift-quarantine", "g0", "--json")
        status = json.loads(capsys.readouterr().out)
        assert [one["quarantined"] for one in status["generators"]] == [""]
        assert status["group_notes"] == {}


def test_a_finished_run_is_read_from_its_files_with_the_notes_on_its_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run_dir = RunDir(tmp_path)
    run_dir.mark_finished({"step": 3})
    figures: dict[str, Any] = {"run_id": "r1", "step": 3, "version": 3, "groups": FINISHED_GROUPS}
    run_dir.ledger.write_text(json.dumps(figures))
    status_of(tmp_path, "--json")
    found = json.loads(capsys.readouterr().out)
    assert found == {
        "run_id": "r1", "step": 3, "version": 3, "num_steps": 3, "finished": True,
        "ledger": {"groups": FINISHED_GROUPS},
    }  # fmt: skip
    note = "step 3: the gradient explodes: gradient norm 1 -> 300 within one step"
    run_dir.ledger.write_text(json.dumps({**figures, "training_notes": [note]}))
    status_of(tmp_path)
    printed = capsys.readouterr().out
    assert all(words in printed for words in ("3 of 3", "finished", "yes", "trained", "12", "the gradient explodes"))
    run_dir.ledger.write_text('{"groups": ')
    assert f"expected a JSON object in {run_dir.ledger}" in refusal(capsys, "status", str(tmp_path))


def shown(status: dict[str, Any], width: int = 100) -> str:
    """The tables of a status, as text."""
    console = Console(width=width, record=True, file=io.StringIO())
    for table in status_tables(status):
        console.print(table)
    return console.export_text()


def in_words(text: str) -> list[str]:
    """The lines of tables, their cells apart by a space."""
    return [" ".join(line.replace("│", " ").split()) for line in text.splitlines()]


STATUS: dict[str, Any] = {
    "step": 3, "lineage": "l1", "num_steps": 8, "finished": False, "stop": "",
    "bytes": 0, "bytes_reserved": 1536, "max_bytes": 1 << 31,
    "announced": {"version": 2, "channel": "tcp://127.0.0.1:7 public-key", "digest": "ab"},
    "stream": {"position": 9, "epoch": 0},
    "leases": [{}, {}],
    "malformed": 0,
    "learner_trouble": "pulls are slow",
    "who_waits": "generators have 40% to spare",
    "group_notes": {"wrong": "all 8 groups have only wrong answers"},
    "ledger": {
        "groups": {"issued": 7, "queued": 0, "dropped": {"stale": 2, "expired": 0}},
        "rollouts": {"trained": 3, "masked": {"truncated": 1}, "dropped": {"stale": 2}},
        "tokens": {"received": 4000, "queued": 0, "trained": 1400, "dropped": {"stale": 900}},
        "eval": {"groups": {"issued": 0}},
        "outcomes": {
            "received": {"groups": 7, "rollouts": 8, "tokens": 4000, "reward": 2.0, "accuracy": 6.0},
            "trained": {"groups": 2, "rollouts": 4, "tokens": 2000, "reward": 2.0, "accuracy": 2.0},
            "dropped": {"groups": 2, "rollouts": 2, "tokens": 900, "reward": 1.0, "accuracy": 1.0},
        },
    },
    "generators": [
        # 6 of 10 s times 2 slots busy; 50 tokens in 10 s.
        {"id": "a", "host": "h", "alive": True, "active": ["l", 2], "seen_s_ago": 0.26,
         "stats": {"max_running": 2, "wall_s": 10.0, "busy_sequence_s": 12.0, "num_tokens": 50}},
        {"id": "b", "host": "h", "alive": False, "active": None, "seen_s_ago": 1.0, "stats": {}, "trouble": "old"},
        {"id": "d", "host": "h", "alive": True, "seen_s_ago": 1.0, "stats": {}, "quarantined": "9 of 9 refused"},
        {"id": "e", "host": "h", "alive": True, "seen_s_ago": 1.0, "stats": {}, "too_slow": "too slow for it"},
    ],
    "waits": [{"who": "learner", "for": "take", "since_s": 0.5}],
}  # fmt: skip


def test_tables_show_what_is_not_zero_and_count_leases():
    lines = in_words(shown(STATUS))
    for words in (
        "problem of the learner pulls are slow",
        "who waits for whom generators have 40% to spare",
        "memory 0 B of groups, 1.5 KiB reserved by leases, limit 2 GiB",
        "weights version 2 from tcp://127.0.0.1:7",
        "d quarantined: 9 of 9 refused",
        "e too slow for it",
        "next prompt number 9 of the data, epoch 0",
        "leases 2",
        "note all 8 groups have only wrong answers",
        "dropped: stale 2 2 900",
        "received 7 8 4,000 0.250 0.750",
        "masked: truncated 1",
        "trained 2 4 2,000 0.500 0.500",
        "of it masked 1 600",
        "a h 2 60% of 2 50 5 0.3 s ago",
        "b h - - - - gone, 1.0 s ago",
        "learner groups 0.5",
    ):
        assert words in lines, (words, lines)
    unshown = ("why the run stops", "malformed", "queued", "dropped: expired", "ledger of evaluations", "run ahead")
    assert [line for line in lines if line.startswith(unshown)] == []


def test_no_figure_of_a_generator_with_a_long_id_is_lost_on_a_narrow_screen():
    host = "ip-10-0-12-1.eu-west-1.compute.internal"
    stats = {"wall_s": 10.0, "max_running": 64, "busy_sequence_s": 320.0, "num_tokens": 1234567}
    generator = {"id": f"{host}-12345-abcd", "host": host, "active": ["l", 12], "seen_s_ago": 1.0, "stats": stats}
    text = shown({"generators": [generator]}, width=80)
    assert [figure for figure in ("12", "50% of 64", "1,234,567", "123,457", "1.0 s ago") if figure not in text] == []
    cells = [line.split("│")[1].strip() for line in text.splitlines() if line.count("│") == 7]
    assert "".join(cells) == generator["id"]


def test_a_run_without_a_generator_says_so_until_it_is_finished():
    gone, doctor = {"id": "a", "alive": False}, {"id": "doctor-b", "alive": True, "backend": "doctor"}
    for generators, finished, said in (
        ([gone, doctor], False, True),
        ([gone, {"id": "c", "alive": True, "backend": "hf"}], False, False),
        ([], True, False),
    ):
        text = shown({"step": 0, "finished": finished, "generators": generators})
        assert ("no generator is connected" in text) == said, generators


def test_many_generators_fit_a_screen_which_shows_who_is_in_trouble(capsys: pytest.CaptureFixture[str]):
    # 200 generators of 2 slots for 10 s: 15 of these 20 sequence-seconds were busy.
    stats = {"wall_s": 10.0, "max_running": 2, "busy_sequence_s": 15.0, "num_tokens": 100}
    generators: list[dict[str, Any]] = [
        {"id": f"g{number}", "alive": True, "active": ["line", 7 + number % 2], "seen_s_ago": 0.5, "stats": stats}
        for number in range(200)
    ]
    generators[150]["alive"] = False
    for number in (160, 170, 180, 190, 195, 199):
        generators[number]["trouble"] = "nothing listens"
    waits = [{"who": f"g{number}", "for": "lease", "since_s": number / 10} for number in range(199)]
    waits.append({"who": "learner", "for": "take", "since_s": 5.0})
    print_status({"generators": generators, "waits": waits})
    lines = in_words(capsys.readouterr().out)
    assert len(lines) < 50
    assert "generators: 200" in lines
    assert "g150 7 75% of 2 100 10 gone, 0.5 s ago" in lines
    assert [line.split()[0] for line in lines if "0.5 s ago" in line] == [
        "g150", "g160", "g170", "g180", "g190", "g195", "g199", *(f"g{number}" for number in range(17))
    ]  # fmt: skip
    assert "and 176 others; --json shows each" in " ".join(lines)
    assert "g160, g170, g180, g190 and 2 others nothing listens" in lines
    assert "g198, g197, g196, g195 and 195 others a lease 0.0 to 19.8" in lines
    assert "learner groups 5.0" in lines
