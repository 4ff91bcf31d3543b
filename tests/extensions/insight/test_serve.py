"""The report over HTTP: what is served, to whom, and that it follows the run."""

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_rl.errors import RunError
from async_rl.extensions.insight.report.serve import start_server
from tests.extensions.insight.runs import step_row

from .pages import a_rollout, a_run, an_answer, blobs, header, write_answers, write_rollouts


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = a_run(tmp_path / "run")
    write_rollouts(run, 1, [a_rollout(response="one")])
    return run


@pytest.fixture
def port(run: Path) -> Iterator[int]:
    with start_server([run]) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def get(port: int, path: str, host: str = "") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path, headers={"Host": host or f"127.0.0.1:{port}"})
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def test_page_index_and_chunks_are_served(port: int):
    status, page = get(port, "/")
    assert status == 200
    data = json.loads(blobs(page.decode())["data"])
    assert (data["served"], data["rollouts"]) == (True, [1])
    assert "chunk-0-0" not in blobs(page.decode())
    assert json.loads(get(port, "/data/index-0")[1])["step"] == [1]
    assert header(get(port, "/data/chunk-0-0")[1])["records"][0]["response"] == "one"


def test_what_the_run_writes_later_is_served(port: int, run: Path):
    before = get(port, "/data/stamp")
    assert get(port, "/data/stamp") == before
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps(step_row(5)) + "\n")
    write_rollouts(run, 5, [a_rollout(response="five")])
    write_answers(run, "math", 2, [an_answer(1, response="two")])
    assert get(port, "/data/stamp") != before
    assert json.loads(blobs(get(port, "/")[1].decode())["data"])["runs"][0]["columns"]["step"] == [1, 2, 3, 4, 5]
    assert json.loads(get(port, "/data/index-0")[1])["step"] == [1, 5, 2]
    said = [header(get(port, f"/data/chunk-0-{number}")[1])["records"][0]["response"] for number in range(3)]
    assert said == ["one", "five", "two"]


def test_other_paths_are_not_found(port: int):
    for path in ("/data/chunk-0-9", "/data/index-7", "/data/index-", "/data/chunk-0", "/data/chunk-0--1", "/../run_id",
                 "/data/stamp-1", f"/data/index-{'9' * 5000}"):  # fmt: skip
        assert get(port, path) == (404, b"no such page"), path


def test_a_request_for_another_host_is_refused(port: int):
    assert get(port, "/", host=f"attacker.example:{port}")[0] == 403
    assert get(port, "/data/index-0", host="127.0.0.1")[0] == 403  # another port
    assert get(port, "/data/stamp", host=f"localhost:{port}")[0] == 200


def test_a_damaged_file_is_said(port: int, run: Path):
    write_rollouts(run, 1, [])
    (run / "rollouts" / "step-000001.jsonl").write_text("{\n")
    status, message = get(port, "/data/index-0")
    assert status == 500
    assert b"delete the file" in message


def test_a_port_in_use_is_refused(port: int, run: Path):
    with pytest.raises(RunError, match=rf"--port {port}: can't serve on it"):
        start_server([run], port)
